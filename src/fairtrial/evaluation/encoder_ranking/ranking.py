"""Rank encoders of any architecture on unlabelled items, in one stage or two, and say how decisive the ranking is."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.encoder_ranking.subspace import (
    SCORES,
    EncoderScore,
    Features,
    leave_one_out,
    numbers,
    ssr_dagger,
)
from fairtrial.options import checked_count
from fairtrial.seeds import generator

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray
Source: TypeAlias = "ArrayLike | Callable[[], ArrayLike]"
Reference: TypeAlias = "str | Features | ArrayLike | Sequence[str | Features | np.ndarray] | None"


@dataclass(frozen=True)
class Ranking:
    """Encoders by a score, best first.

    Attributes
    ----------
    order : names of the encoders that were scored, best first; with two stages the members of the kept families, then
        the representatives of the others
    scores : of each, by the stage that decided on it; with several references minus its mean rank
    intervals : 95 % of what the score would be on other items
    p_best : share of resamples of the items in which it comes first; of kept families' members where there are two
        stages
    forward_passes : encoders whose features were asked for, a named reference included
    families, widths, references, stages, score, notes : how it came about, and what a reader must know
    """

    order: tuple[str, ...]
    scores: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    p_best: dict[str, float]
    forward_passes: int
    families: dict[str, str] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    stages: dict[str, int] = field(default_factory=dict)
    score: str = "ssr_dagger"
    notes: tuple[str, ...] = ()

    def table(self) -> pd.DataFrame:
        """Return one row an encoder, best first: family, width, stage, score, low, high, p_best."""
        import pandas as pd

        rows = [
            {
                "encoder": name,
                "family": self.families.get(name, ""),
                "width": self.widths[name],
                "stage": self.stages[name],
                "score": self.scores[name],
                "low": self.intervals[name][0],
                "high": self.intervals[name][1],
                "p_best": self.p_best[name],
            }
            for name in self.order
        ]
        return pd.DataFrame(rows).set_index("encoder")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; an interval or share that was not estimated is None."""
        found = asdict(self)
        found["intervals"] = {
            name: [None if np.isnan(x) else x for x in bounds] for name, bounds in self.intervals.items()
        }
        found["p_best"] = {name: None if np.isnan(p) else p for name, p in self.p_best.items()}
        return found


def rank_encoders(
    features: Mapping[str, Source],
    *,
    reference: Reference,
    score: str | EncoderScore = "ssr_dagger",
    families: Mapping[str, str] | None = None,
    stages: Literal[1, 2] = 1,
    within: str | EncoderScore = "rankme",
    keep: int = 1,
    representatives: Mapping[str, str] | None = None,
    ids: Mapping[str, Sequence[Any]] | None = None,
    rank: int | float = 32,
    bootstrap: int = 200,
    seed: int = 0,
) -> Ranking:
    """Rank encoders by how well a linear probe on them is expected to do, without labels.

    Parameters
    ----------
    features : for each encoder its features (n, d) of the same n items in one order, or a callable that returns them:
        it is called once, and only if the encoder is looked at
    reference : the name of one of them, which then is no candidate, or features (n, r) of another encoder. Several of
        either kind in a list: the mean rank over them decides, which damps favouring a reference's own family. None
        where the score needs none. It must not have been trained on the labels that matter.
    score : a name of :data:`~fairtrial.evaluation.encoder_ranking.subspace.SCORES` or an :class:`EncoderScore`
    families : the family of each encoder; one that is left out is a family of its own
    stages : 2 first scores one representative a family, keeps the best ``keep`` families and ranks their members by
        ``within``: as many passes as there are families and members of the best instead of all
    representatives : which member represents a family; left out, the one of median width, or the middle one in order
        where widths are not known before the pass
    ids : item ids of encoders, which are checked to agree
    rank : of the reference's subspace, see :func:`~fairtrial.evaluation.encoder_ranking.subspace.ssr`
    bootstrap : resamples of the items behind ``intervals`` and ``p_best``, the same for all encoders; 0 for none.
        SSR-dagger resamples the leave-one-out errors of its items, which costs nothing; other scores are computed on
        random halves of the items, since a repeated item would count as two that agree.
    seed : of the resamples, and of the order of ties

    Raises
    ------
    InputError
        Fewer than two candidates; encoders of different numbers of items or ids (both are named); features that are not
        finite or constant (the encoder and row are named); too few items for ``rank``.
    UnknownNameError
        A reference, score, family or representative that does not exist.

    Warns
    -----
    UserWarning
        Where nothing of the reference can be read from any encoder: are the items in the same order?

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> truth = rng.normal(size=(300, 12))
    >>> pool = {"clip": truth @ rng.normal(size=(12, 40)), "noise": rng.normal(size=(300, 500)), "half": truth[:, :6]}
    >>> ranking = rank_encoders(pool | {"whole": lambda: truth}, reference="clip", bootstrap=20)
    >>> ranking.order, ranking.p_best["whole"], ranking.forward_passes
    (('whole', 'half', 'noise'), 1.0, 4)
    """
    if stages not in (1, 2):
        raise InputError(f"stages={stages}: give 1 or 2")
    keep, bootstrap = checked_count(keep, "keep"), checked_count(bootstrap, "bootstrap", least=0)
    for name in families or {}:
        if name not in features:
            raise UnknownNameError("encoder", name, features)
    every = [(families or {}).get(name, name) for name in features]
    for family in representatives or {}:
        if family not in every:
            raise UnknownNameError("family", family, every)
    pool = _Pool(features, ids or {})
    notes: list[str] = []
    named, references = _references(pool, reference)
    candidates = [name for name in features if name not in named]
    if dropped := [name for name in features if name in named]:
        notes.append(f"{', '.join(dropped)}: the reference, and so no candidate")
    if len(candidates) < 2:
        raise InputError(f"{len(candidates)} candidates besides the reference: give two encoders or more to rank")
    of = {name: (families or {}).get(name, name) for name in candidates}
    members = {family: [name for name in candidates if of[name] == family] for family in dict.fromkeys(of.values())}
    if len(members) == 1 and families:
        notes.append("all candidates are of one family: a within-family score such as rankme serves there")
    scoring = _Scoring(pool, references, rank, bootstrap, seed)

    first = list(candidates)
    if stages == 2:
        first = [_representative(pool, family, names, representatives or {}) for family, names in members.items()]
    found: dict[str, _Scored] = {}
    decided: dict[str, int] = {}
    order: list[str] = []
    if stages == 1 or len(members) > 1:
        found = scoring.by(score, first, held=stages == 2)
        order = _sorted(found, seed)
        decided = dict.fromkeys(order, 1)
        if score in ("ssr_dagger", ssr_dagger) and all(one.against.max() <= 0 for one in found.values()):
            notes.append("the reference can be read from no candidate (SSR-dagger <= 0): are items in one order?")
            if not ids:
                warnings.warn(notes[-1], stacklevel=2)
    if stages == 2:
        kept = [of[name] for name in order[:keep]] or list(members)
        second = [name for family in kept for name in members[family]]
        if len(kept) < len(second):  # families of one are decided already
            deep = scoring.by(within, second)
            found |= deep
            order = [*_sorted(deep, seed), *(name for name in order if name not in deep)]
            decided |= dict.fromkeys(deep, 2)
    best = [name for name in order if decided[name] == max(decided.values())]
    return Ranking(
        order=tuple(order),
        scores={name: found[name].value for name in order},
        intervals={name: found[name].interval() for name in order},
        p_best={name: 0.0 if bootstrap else float("nan") for name in order} | _shares_of_first(found, best),
        forward_passes=len(pool.passed),
        families={name: of[name] for name in order} if families else {},
        widths={name: pool.widths[name] for name in order},
        references=tuple(one.name for one in references),
        stages=decided,
        score=score if isinstance(score, str) else getattr(score, "__name__", type(score).__name__),
        notes=tuple(notes),
    )


class _Pool:
    """The encoders' features, asked for when needed and checked against each other."""

    def __init__(self, features: Mapping[str, Source], ids: Mapping[str, Sequence[Any]]) -> None:
        self.sources = features
        self.ids = ids
        self.passed: set[str] = set()
        self.widths: dict[str, int] = {}
        self.first: Features | None = None
        one = None
        for name in ids:
            if name not in features:
                raise UnknownNameError("encoder", name, features)
            one = one or name
            if list(ids[name]) != list(ids[one]):
                raise InputError(f"{one} and {name} have different item ids: give features of the same items, in order")

    def features(self, name: str) -> Features:
        source = self.sources[name]
        self.passed.add(name)
        found = Features.of(source() if callable(source) else source, name)
        if found.name != name:  # features that were prepared under another name
            found = copy.copy(found)
            found.name = name
        if name in self.ids and len(self.ids[name]) != found.items:
            raise InputError(f"{name} has {found.items} items and {len(self.ids[name])} ids: give one id an item")
        return self.checked(found)

    def checked(self, found: Features) -> Features:
        """Return features whose items are as many as those of the encoders before."""
        self.first = self.first or found
        if found.items != self.first.items:
            raise InputError(
                f"{self.first.name} has {self.first.items} items and {found.name} has {found.items}: "
                "give features of the same items, in one order"
            )
        self.widths[found.name] = found.width
        return found


def _references(pool: _Pool, reference: Reference) -> tuple[set[str], list[Features]]:
    """Return the names that are references, and the references' features."""
    if reference is None:
        return set(), []
    several = isinstance(reference, list | tuple) and all(
        isinstance(one, str | Features | np.ndarray) for one in reference
    )
    given: list[Any] = list(reference) if several else [reference]  # type: ignore[arg-type]
    found = []
    for place, one in enumerate(given):
        if not isinstance(one, str):
            found.append(pool.checked(Features.of(one, f"reference {place + 1}" if several else "the reference")))
        elif one in pool.sources:
            found.append(pool.features(one))
        else:
            raise UnknownNameError("encoder to be the reference", one, pool.sources)
    return {one for one in given if isinstance(one, str)}, found


def _representative(pool: _Pool, family: str, names: list[str], chosen: Mapping[str, str]) -> str:
    """Return the user's choice for a family, or its member of median width."""
    if family in chosen:
        if chosen[family] not in names:
            raise UnknownNameError(f"member of family {family}", chosen[family], names)
        return chosen[family]
    arrays: dict[str, Any] = {name: pool.sources[name] for name in names}
    if not any(map(callable, arrays.values())):
        names = sorted(names, key=lambda name: _width(arrays[name], name))
    return names[(len(names) - 1) // 2]


def _width(source: Features | ArrayLike, name: str) -> int:
    if isinstance(source, Features):
        return source.width
    return math.prod(numbers(source, name).shape[1:])  # another number of dimensions is refused when its turn comes


# ---------------------------------------------------------------------------------------------------- scores, resampled


@dataclass(frozen=True)
class _Scored:
    """A score, what it was against each reference (R,), and what it would be on other items (B,)."""

    value: float
    against: Array
    draws: Array

    def interval(self) -> tuple[float, float]:
        if not len(self.draws):
            return float("nan"), float("nan")
        low, high = np.quantile(self.draws, [0.025, 0.975])
        return float(low), float(high)


class _Scoring:
    """Scores encoders against the references, on all items and on resamples of them.

    A random half deviates from the whole as the whole does from all items there are, its variance being (n - m) / m = 1
    times as large; what resampling costs every encoder is taken out by centring on the score of all items.
    """

    def __init__(self, pool: _Pool, references: list[Features], rank: int | float, draws: int, seed: int) -> None:
        self.pool, self.references, self.rank, self.draws, self.seed = pool, references, rank, draws, seed
        self.held: dict[str, Features] = {}
        self.halves: list[tuple[Array, list[Features]]] | None = None
        self.times: Array | None = None

    def by(self, score: str | EncoderScore, names: Sequence[str], *, held: bool = False) -> dict[str, _Scored]:
        """Return the scores of encoders; ``held`` keeps their features for a second stage."""
        function = _function(score)
        whole, halves = [], []
        for name in names:
            features = self.held[name] if name in self.held else self.pool.features(name)
            if held:
                self.held[name] = features
            values = self._values(function, features)
            if not np.isfinite(values).all():
                raise InputError(f"{name}: its score is {values[~np.isfinite(values)][0]}: use another score")
            drawn = self._drawn(function, features)
            whole.append(values)
            halves.append(values + drawn - drawn.mean(axis=0) if self.draws else drawn)
        every, resampled = np.array(whole), np.array(halves)  # (encoders, R), (encoders, B, R)
        if every.shape[1] == 1:
            totals, moved = every[:, 0], resampled[:, :, 0]
        else:  # consensus: minus the mean rank
            totals, moved = -_ranks(every).mean(axis=-1), -_ranks(resampled).mean(axis=-1)
        return {
            name: _Scored(float(total), values, drawn)
            for name, total, values, drawn in zip(names, totals, every, moved, strict=True)
        }

    def _values(self, function: EncoderScore, features: Features) -> Array:
        keyed = {"rank": self.rank} if _takes_rank(function) else {}
        return np.array([function(features, one, **keyed) for one in self.references or [None]])  # type: ignore[list-item]

    def _drawn(self, function: EncoderScore, features: Features) -> Array:
        """Return the scores on resamples of the items, (B, references)."""
        if not self.draws:
            return np.empty((0, max(1, len(self.references))))
        if function is ssr_dagger:
            items = [leave_one_out(features, one, self.rank) for one in self.references]
            there, missed = np.array(items).transpose(1, 2, 0)  # (n, references) each
            return 1 - (self._times(features.items) @ missed) / (self._times(features.items) @ there)
        # Halves have an eighth of their items as components at most.
        rank = self.rank if self.rank < 1 else min(self.rank, max(1, features.items // 2 // 8))
        keyed = {"rank": rank} if _takes_rank(function) else {}
        span = _coordinates(features) if function in SCORES.values() else features.centred + features.mean
        found = []
        for rows, references in self._halves(features.items):
            half = Features(span[rows], features.name)
            found.append([function(half, one, **keyed) for one in references or [None]])  # type: ignore[list-item]
        return np.array(found)

    def _times(self, items: int) -> Array:
        """Return how often each item is drawn in each resample with repetition, (B, n)."""
        if self.times is None:
            drawn = generator(self.seed, "bootstrap").integers(items, size=(self.draws, items))
            self.times = np.array([np.bincount(row, minlength=items) for row in drawn], dtype=float)
        return self.times

    def _halves(self, items: int) -> list[tuple[Array, list[Features]]]:
        """Return the rows of each half, and the references there."""
        if self.halves is None:
            rng = generator(self.seed, "halves")
            spans = [(one.name, _coordinates(one)) for one in self.references]
            chosen = [rng.permutation(items)[: items // 2] for _ in range(self.draws)]
            self.halves = [(rows, [Features(span[rows], name) for name, span in spans]) for rows in chosen]
        return self.halves


def _function(score: str | EncoderScore) -> EncoderScore:
    if isinstance(score, str):
        if score not in SCORES:
            raise UnknownNameError("score", score, SCORES)
        return SCORES[score]
    return score


def _takes_rank(function: EncoderScore) -> bool:
    return function in (SCORES["ssr_dagger"], SCORES["ssr_z"], SCORES["ssr"], SCORES["projected_rankme"])


def _coordinates(features: Features) -> Array:
    """Return the uncentred rows in a basis of their span, (n, min(n, d)): all that a rotation of features leaves."""
    if features.narrow:
        return features.centred + features.mean
    squares, axes = np.linalg.eigh(features.uncentred_gram)
    return axes * np.sqrt(np.maximum(squares, 0))


def _ranks(scores: Array) -> Array:
    """Return ranks along the first axis, 1 for the highest; equals share the mean of theirs."""
    higher = (scores[None] > scores[:, None]).sum(axis=1)
    equal = (scores[None] == scores[:, None]).sum(axis=1)
    return higher + (equal + 1) / 2


def _sorted(found: Mapping[str, _Scored], seed: int) -> list[str]:
    """Return names by score, best first, ties in an order that the seed draws."""
    names = list(found)
    draw = generator(seed, "ties").permutation(len(names))
    return [name for _, name in sorted(zip(draw, names, strict=True), key=lambda p: (-found[p[1]].value, p[0]))]


def _shares_of_first(found: Mapping[str, _Scored], names: Sequence[str]) -> dict[str, float]:
    draws = np.array([found[name].draws for name in names])  # (encoders, B)
    if not draws.shape[1]:
        return dict.fromkeys(names, float("nan"))
    wins = np.bincount(draws.argmax(axis=0), minlength=len(names)) / draws.shape[1]
    return dict(zip(names, wins.tolist(), strict=True))
