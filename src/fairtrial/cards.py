"""The catalogue: one ``card.toml`` a system, read without importing the system.

A card says what a system is, what its paper claims, and where its trial and commands are; everything that lists,
finds or documents systems reads it from here.

>>> find("Fiedler Prune").name
'pruning'
>>> cards()["pruning"].trial
'fairtrial.lm.pruning.trial:trial'
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from fairtrial.errors import InputError, UnknownNameError

AREAS = {
    "lm": "Language models",
    "adaptation": "Adapting pretrained models",
    "rl": "Learning from reward",
    "training": "How networks train",
    "evaluation": "Trusting a number",
    "documents": "Long documents",
    "video": "Video",
    "scene": "3D and sensing",
    "biomed": "Slides, cells, medicine",
    "density": "Densities",
    "engine": "The engine itself",
}
"""The areas in the order they are shown, with their titles; ``engine`` holds no system, only studies of Fairtrial."""

State = Literal["planned", "working"]


@dataclass(frozen=True, slots=True)
class CardClaim:
    """One claim of a trial in words; ``id`` is that of the trial's own claim."""

    id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The catalogue entry of one system.

    Attributes
    ----------
    name : str
        The system's folder, with underscores; :attr:`shown` has hyphens.
    method : str
        The paper's name for the method.
    aliases : tuple of str
        Further names by which :func:`find` knows it.
    area : str
        One of :data:`AREAS`.
    line : str
        What it is, in one line.
    state : {"planned", "working"}
        A planned system has a card and nothing else.
    extras : tuple of str
        The optional dependencies it needs (``pip install 'fairtrial[...]'``).
    samples : tuple of str
        The samples its trial reads by default (:mod:`fairtrial.data.samples`).
    claims : tuple of CardClaim
        What its trial puts to the test.
    paper : tuple of str
        What the paper states, figures included: the paper's word, never measured here.
    use_when, not_when : str
        One or two sentences each.
    commands : dict of str to str
        ``fairtrial apply`` command to ``"module:function"``.
    trial : str
        ``"module:object"`` of its trial; empty while planned.
    """

    name: str
    method: str
    area: str
    line: str
    state: State
    use_when: str
    not_when: str
    aliases: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    claims: tuple[CardClaim, ...] = ()
    paper: tuple[str, ...] = ()
    commands: dict[str, str] = field(default_factory=dict)
    trial: str = ""

    @property
    def shown(self) -> str:
        """The name as users see and type it, with hyphens."""
        return self.name.replace("_", "-")

    @property
    def is_system(self) -> bool:
        """Whether this is one of the systems, not a study of the engine."""
        return self.area != "engine"

    @property
    def names(self) -> tuple[str, ...]:
        """Every name :func:`find` accepts: shown name, method, aliases, commands."""
        return (self.shown, self.method, *self.aliases, *self.commands)


@cache
def cards() -> dict[str, Card]:
    """Return all cards by name, in the order of :data:`AREAS` and then by name.

    Raises
    ------
    InputError
        If a card is malformed (the message names file and key) or two cards share a name.
    """
    root = Path(__file__).parent
    files = [*root.glob("*/card.toml"), *root.glob("*/*/card.toml")]
    order = list(AREAS)
    read = sorted((read_card(file) for file in files), key=lambda card: (order.index(card.area), card.name))
    _by_any_name(read)
    return {card.name: card for card in read}


def find(name: str) -> Card:
    """Return the card known by ``name``: system, method, alias or command.

    Case, spaces, hyphens and underscores do not matter.

    Raises
    ------
    UnknownNameError
        If no card has that name; the message suggests the nearest.

    >>> find("no-such-method")
    Traceback (most recent call last):
    fairtrial.errors.UnknownNameError: there is no trial 'no-such-method'...
    """
    known = _by_any_name(list(cards().values()))
    if card := known.get(_key(name)):
        return card
    # Suggest from every name, list the systems only: all names together would be pages.
    near = difflib.get_close_matches(name, [n for card in cards().values() for n in card.names], n=1, cutoff=0.5)
    raise UnknownNameError("trial", name, {card.shown for card in cards().values()}.union(near))


def read_card(file: Path) -> Card:
    """Read and check one ``card.toml``.

    Raises
    ------
    InputError
        Naming file and key, if the file is not TOML, a key is unknown, missing or of the wrong type, the name is not
        that of its folder, or state and trial disagree.
    """
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not a TOML file: {error}") from error
    known = {f.name: f for f in fields(Card)}
    for key in table.keys() - known.keys():
        raise InputError(f"{file}: unknown key {key!r}; a card has {', '.join(known)}")
    for key, spec in known.items():
        if key not in table and spec.default is MISSING and spec.default_factory is MISSING:
            raise InputError(f"{file}: the key {key!r} is missing")
    card = Card(**{key: _value(file, key, str(known[key].type), value) for key, value in table.items()})
    for key, problem in _problems(card, file.parent):
        raise InputError(f"{file}: {key}: {problem}")
    return card


def _value(file: Path, key: str, kind: str, value: Any) -> Any:
    """Return ``value`` of a TOML table as the field's type."""
    if kind in ("str", "State") and isinstance(value, str):
        return value.strip()
    if kind == "tuple[str, ...]" and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(item.strip() for item in value)
    if kind == "dict[str, str]" and isinstance(value, dict) and all(isinstance(v, str) for v in value.values()):
        return value
    if (
        kind == "tuple[CardClaim, ...]"
        and isinstance(value, list)
        and all(isinstance(item, dict) and item.keys() == {"id", "text"} for item in value)
    ):
        return tuple(CardClaim(str(item["id"]), str(item["text"]).strip()) for item in value)
    shape = {"tuple[CardClaim, ...]": "a list of tables {id, text}", "tuple[str, ...]": "a list of strings"}
    wanted = shape.get(kind, "a table of strings" if kind.startswith("dict") else "a string")
    raise InputError(f"{file}: {key}: expected {wanted}, got {value!r:.60}")


def _problems(card: Card, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) for what types cannot say."""
    if card.name != folder.name:
        yield "name", f"{card.name!r} is not the folder's name {folder.name!r}"
    if card.area not in AREAS:
        yield "area", f"{card.area!r} is not one of {', '.join(AREAS)}"
    if card.is_system and card.area != folder.parent.name:
        yield "area", f"{card.area!r} is not the folder's area {folder.parent.name!r}"
    if card.state not in get_args(State):
        yield "state", f"{card.state!r} is not one of {', '.join(get_args(State))}"
    if "\n" in card.line or not card.line:
        yield "line", "must be exactly one line"
    if (card.state == "working") != bool(card.trial):
        yield "trial", "a working system has a trial, a planned one has none"
    if card.state == "planned" and card.commands:
        yield "commands", "a planned system has none"
    for key, target in {"trial": card.trial, **card.commands}.items():
        if target and not (target.startswith("fairtrial.") and target.count(":") == 1):
            yield key, f"{target!r} is not of the form 'fairtrial.module:object'"
    ids = [claim.id for claim in card.claims]
    if len(set(ids)) < len(ids):
        yield "claims", "two claims share an id"


def _key(name: str) -> str:
    return name.casefold().translate(str.maketrans("", "", " -_"))


def _by_any_name(all_cards: list[Card]) -> dict[str, Card]:
    """Return the cards by every name's key; a name of two cards is an error."""
    known: dict[str, Card] = {}
    for card in all_cards:
        for name in card.names:
            other = known.setdefault(_key(name), card)
            if other is not card:
                both = f"{other.area}/{other.name} and {card.area}/{card.name}"
                raise InputError(f"card.toml: the name {name!r} belongs to both {both}")
    return known
