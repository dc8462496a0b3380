"""Cognitive simplicity: how accessible the techniques of a proof are.

Every step is tagged with techniques of a taxonomy, levels 1 (school) to 5 (graduate). A step's level is that of its
hardest technique, 1 if it has none, and

    score = (6 - (max level + token-weighted mean level) / 2 - 1) / 4       in [0, 1], 1 = school methods only

A formal proof is read by what it cites: familiar lemmas at little depth are simple (:meth:`.Metamath.simplicity`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.proof_quality.latex import FORMULA
from fairtrial.evaluation.proof_quality.proof import Proof

Encoder = Callable[[list[str]], np.ndarray]
"""Sentences to unit vectors (n, d), such as :class:`fairtrial.sentences.SentenceEncoder`."""

SIMILAR = 0.675  # cosine of a step and a description; fit_threshold on the bank with MiniLM (held-out F1 .91)
_NEGATED = re.compile(
    r"\b(?:without|avoid\w*|no need (?:for|of|to)|not (?:use|need|by)|instead of|rather than)\W+(?:\S+\W+){0,3}$"
)


@dataclass(frozen=True)
class Technique:
    """A technique of proof: its id, level 1-5, name, description, and the expressions that give it away."""

    id: str
    level: int
    name: str
    description: str
    triggers: re.Pattern[str]


class Taxonomy:
    """Techniques by id.

    Parameters
    ----------
    path : a TOML file of ``[[technique]]`` tables with id, level, name, description and triggers (regular expressions
        on lower-case prose in which a formula is the character ∗); left out, the library's own of 64.

    Raises
    ------
    InputError
        The file is not such a taxonomy; the message names the entry.

    Examples
    --------
    >>> taxonomy = Taxonomy()
    >>> len(taxonomy), taxonomy["pigeonhole"].level
    (64, 1)
    """

    def __init__(self, path: str | Path | None = None) -> None:
        file = Path(path) if path is not None else Path(__file__).with_name("taxonomy.toml")
        try:
            entries = tomllib.loads(file.read_text(encoding="utf-8"))["technique"]
            self._by_id = {entry["id"]: _technique(file, entry) for entry in entries}
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise InputError(f"{file}: no taxonomy of techniques: {type(error).__name__}: {error}") from None

    def __getitem__(self, id: str) -> Technique:
        try:
            return self._by_id[id]
        except KeyError:
            raise UnknownNameError("technique", id, self._by_id) from None

    def __iter__(self) -> Any:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def tag(self, proof: Proof, *, encoder: Encoder | None = None, threshold: float = SIMILAR) -> list[set[str]]:
        """Return the ids of the techniques of each step.

        A step has a technique if one of its triggers occurs and is not denied ("we avoid induction"), or, given an
        ``encoder``, if its prose and the description have a cosine of at least ``threshold``.
        """
        tags = [self._triggered(step.prose.lower()) for step in proof.steps]
        if encoder is not None:
            ids = list(self._by_id)
            similar = np.asarray(encoder(masked(proof))) @ self._described(encoder).T  # (steps, techniques)
            for found, row in zip(tags, similar, strict=True):
                found.update(ids[i] for i in np.flatnonzero(row >= threshold))
        return tags

    def _triggered(self, prose: str) -> set[str]:
        found = set()
        for technique in self:
            for match in technique.triggers.finditer(prose):
                if not _NEGATED.search(prose[max(0, match.start() - 60) : match.start()]):
                    found.add(technique.id)
                    break
        return found

    def _described(self, encoder: Encoder) -> np.ndarray:
        return _encoded(encoder, tuple(f"{technique.name}: {technique.description}" for technique in self))


class RememberingEncoder:
    """An encoder that encodes each sentence once.

    >>> remembering = RememberingEncoder(lambda sentences: np.ones((len(sentences), 2)))
    >>> remembering(["a", "b", "a"]).shape
    (3, 2)
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._known: dict[str, np.ndarray] = {}

    def __call__(self, sentences: list[str]) -> np.ndarray:
        """Return the vectors of sentences, (n, d)."""
        if new := [sentence for sentence in dict.fromkeys(sentences) if sentence not in self._known]:
            self._known.update(zip(new, self.encoder(new), strict=True))
        return np.stack([self._known[sentence] for sentence in sentences])


@cache
def default_taxonomy() -> Taxonomy:
    """Return the library's taxonomy, read once."""
    return Taxonomy()


@lru_cache(maxsize=4)
def _encoded(encoder: Encoder, sentences: tuple[str, ...]) -> np.ndarray:
    return np.asarray(encoder(list(sentences)))


def masked(proof: Proof) -> list[str]:
    """Return each step's prose with the formulas masked, for an encoder of sentences."""
    return [step.prose.replace(FORMULA, "it") for step in proof.steps]


def _technique(file: Path, entry: dict[str, Any]) -> Technique:
    where = f"{file}: technique {entry['id']!r}: "
    if entry["level"] not in (1, 2, 3, 4, 5):
        raise InputError(f"{where}level must be 1, 2, 3, 4 or 5, got {entry['level']!r}")
    try:
        triggers = re.compile("|".join(entry["triggers"]) or "(?!)")
    except re.error as error:
        raise InputError(f"{where}a trigger is no regular expression: {error}") from None
    return Technique(entry["id"], entry["level"], entry["name"], entry["description"], triggers)


@dataclass(frozen=True)
class Simplicity:
    """How accessible a proof's techniques are.

    Attributes
    ----------
    score : in [0, 1], 1 = school methods only; of a formal proof in [-1, 1].
    highest, mean : level of the hardest technique, and token-weighted over the steps; ``None`` for a formal proof.
    techniques : ids of all techniques found; of a formal proof, the lemmas it cites.
    """

    score: float
    highest: int | None
    mean: float | None
    techniques: frozenset[str]


def cognitive_simplicity(
    proof: Proof,
    taxonomy: Taxonomy | str | Path | None = None,
    *,
    encoder: Encoder | None = None,
    tags: Sequence[set[str]] | None = None,
) -> Simplicity:
    """Return how accessible a proof's techniques are.

    Parameters
    ----------
    taxonomy : techniques and their levels, or a TOML file of them; left out, the library's own.
    encoder : adds techniques by the similarity of steps to descriptions; without one, triggers alone decide.
    tags : technique ids of each step where they are known, from a person or a judge.

    Raises
    ------
    UnknownNameError
        ``tags`` holds an id that the taxonomy does not have.
    InputError
        As many tags as steps are needed.

    Notes
    -----
    ProofRank names cognitive simplicity, "accessible techniques", as one of its five axes; formula and levels are this
    library's.

    Examples
    --------
    >>> cognitive_simplicity(Proof("By induction it suffices to add one.", "x")).score
    1.0
    >>> cognitive_simplicity(Proof("This follows from Galois theory.", "x")).score
    0.0
    """
    if proof.library is not None and proof.label is not None:
        cited = frozenset(proof.library.cites(proof.label))
        return Simplicity(proof.library.simplicity(proof.label), None, None, cited)
    known = taxonomy if isinstance(taxonomy, Taxonomy) else Taxonomy(taxonomy) if taxonomy else default_taxonomy()
    tags = known.tag(proof, encoder=encoder) if tags is None else tags
    if len(tags) != len(proof):
        raise InputError(f"problem {proof.problem!r}: {len(tags)} sets of tags for {len(proof)} steps: give one a step")
    levels = [max((known[id].level for id in found), default=1) for found in tags]
    mean = sum(level * step.tokens for level, step in zip(levels, proof.steps, strict=True)) / proof.length
    return Simplicity((5 - (max(levels) + mean) / 2) / 4, max(levels), mean, frozenset().union(*tags))


def fit_threshold(
    proofs: Sequence[Proof], techniques: Sequence[set[str]], encoder: Encoder, taxonomy: Taxonomy | None = None
) -> tuple[float, float]:
    """Return the similarity threshold with the best F1 on tagged proofs, and its F1 on problems held out.

    Parameters
    ----------
    proofs, techniques : proofs, and the technique ids that a person gave each of them.

    Returns
    -------
    threshold, f1
        The threshold is that of all proofs; the F1 (micro, over pairs of proof and technique) is of each problem's
        proofs at the threshold that is best for the other problems.
    """
    known = taxonomy or default_taxonomy()
    grid = np.arange(0.3, 0.96, 0.025)
    counts = np.zeros((len(proofs), len(grid), 3))  # found and right, found, given
    for row, (proof, given) in enumerate(zip(proofs, techniques, strict=True)):
        for column, threshold in enumerate(grid):
            found = set().union(*known.tag(proof, encoder=encoder, threshold=float(threshold)))
            counts[row, column] = len(found & given), len(found), len(given)

    def f1(total: np.ndarray) -> np.ndarray:  # (..., 3) -> (...)
        return 2 * total[..., 0] / np.maximum(total[..., 1] + total[..., 2], 1)

    held_out = np.zeros(3)
    problems = np.array([proof.problem for proof in proofs])
    for problem in dict.fromkeys(problems.tolist()):
        inside = problems == problem
        best = int(f1(counts[~inside].sum(0)).argmax())
        held_out += counts[inside, best].sum(0)
    return float(grid[f1(counts.sum(0)).argmax()]), float(f1(held_out))
