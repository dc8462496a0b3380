"""What a trial is: the words a ``trial.py`` is written in.

A :class:`Trial` names its parameters and builds its :class:`Part` s from them. A part crosses its candidates with the
cells of its factors, measures each once, and states claims about quantities of the results. Nothing here computes:
the engine runs cells, :mod:`fairtrial.trial.verdict` judges claims.

>>> from fairtrial.trial.declare import *
>>> part = Part(
...     name="accuracy",
...     candidates=(Candidate("mine", "method"), Candidate("coin", "control")),
...     metrics=(Metric("accuracy", higher_is_better=True),),
...     factors=(Factor("seed", range(5), kind="replicate"),),
...     variance="independent",
...     claims=(Claim("C1", "mine beats a coin", difference("mine", "coin", "accuracy"), above=0),),
...     measure=lambda candidate, cell, params, stages: {"accuracy": 1.0},
... )
>>> [cell["seed"] for cell in part.cells()]
[0, 1, 2, 3, 4]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from fairtrial.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from pydantic import BaseModel

__all__ = [
    "Candidate",
    "Claim",
    "Curve",
    "Factor",
    "Input",
    "Items",
    "Metric",
    "Part",
    "Trial",
    "all_of",
    "contrast",
    "difference",
    "exact",
    "for_each",
    "level",
    "report",
    "stage",
    "statistic",
]

Role: TypeAlias = Literal["method", "baseline", "control", "reference"]
Kind: TypeAlias = Literal["setting", "replicate", "within"]
Variance: TypeAlias = Literal["independent", "crossed", "design", "nadeau_bengio"]
Cell: TypeAlias = Mapping[str, Any]
Vector: TypeAlias = "Sequence[Any] | np.ndarray"
Where: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One contender.

    Parameters
    ----------
    label : its name in tables, unique in the part.
    role : ``method``, ``baseline``, ``control`` (must lose) or ``reference`` (shown, never compared).
    uses : the modules that implement it, relative to the trial's package (``"fiedler"``) or absolute, or callables of
        the user's: an edit to one of them runs this candidate's cells again and nobody else's.
    grid : its tuning points, the same number for every candidate that is tuned.
    """

    label: str
    role: Role
    uses: tuple[str | Callable, ...] = ()
    grid: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True)
class Factor:
    """One dimension of the cells.

    A ``setting`` is fixed and selectable. A ``replicate`` is an independent draw: what intervals generalise over; with
    ``most`` it may grow, in order, by further integers up to that many. ``within`` shares its replicate's data or fit
    (the folds of one trained model) and is averaged before any interval.
    """

    name: str
    values: Sequence[Any]
    kind: Kind = "setting"
    most: int | None = None

    def first(self, count: int) -> list[Any]:
        """Return the first ``count`` values, grown beyond the declared ones where ``most`` allows."""
        values = list(self.values)
        return (values + list(range(len(values), count)))[:count]


@dataclass(frozen=True)
class Metric:
    """One number measured in a cell.

    ``per`` names the factor below which the value is constant (``per="draw"``): it is counted once there. ``timed``
    metrics are measured after all others, alone, candidates alternating; a part is timed as a whole or not at all. An
    ``exact`` metric (a count of bytes) has no error: equal values need no further proof.
    """

    name: str
    unit: str = ""
    higher_is_better: bool = True
    per: str | None = None
    timed: bool = False
    exact: bool = False


class Items(NamedTuple):
    """A score for each of several items: ``ids`` (n,) of any hashable type, ``values`` (n,) floats.

    ``train_ids`` are the items the score's model was fitted on, where folds share data.
    """

    ids: Vector
    values: Vector
    train_ids: Vector | None = None


class Curve(NamedTuple):
    """A curve measured in a cell, for figures: ``x`` and ``y`` of one length."""

    x: Vector
    y: Vector


Value: TypeAlias = "float | Items | Curve | None"


# ---------------------------------------------------------------------------------------------------------- quantities


@dataclass(frozen=True)
class Difference:
    """``a`` minus ``b``, turned so that a positive value favours ``a``; of logarithms where ``scale="log"``."""

    a: str
    b: str
    metric: str
    where: Where = field(default_factory=dict)
    scale: Literal["raw", "log"] = "raw"


@dataclass(frozen=True)
class Level:
    """The mean of one candidate's metric, as measured."""

    a: str
    metric: str
    where: Where = field(default_factory=dict)


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of levels: ``terms`` holds ((candidate, metric, where), weight) pairs."""

    terms: tuple[tuple[tuple[str, str, Where], float], ...]


@dataclass(frozen=True)
class Statistic:
    """Any number computed from the part's frame of cells (one row a candidate and cell), bootstrapped."""

    fn: Callable[[pd.DataFrame], float]


Quantity: TypeAlias = Difference | Level | Contrast | Statistic


def difference(
    a: str, b: str, metric: str, where: Where | None = None, scale: Literal["raw", "log"] = "raw"
) -> Difference:
    """Return the paired difference of two candidates on ``metric``, positive where ``a`` is better.

    ``where`` restricts factors: ``{"rate": 0.1}`` or ``{"rate": (0.1, 0.3)}``. ``scale="log"`` compares logarithms of
    the cells' values: use it for times, perplexities and other positive skewed metrics. For a ratio of at most 3 in a
    cost, claim ``difference(..., scale="log")`` above ``-math.log(3)``.
    """
    return Difference(a, b, metric, dict(where or {}), scale)


def level(a: str, metric: str, where: Where | None = None) -> Level:
    """Return the mean of candidate ``a``'s ``metric``."""
    return Level(a, metric, dict(where or {}))


def contrast(weights: Mapping[tuple[str, str, Any], float]) -> Contrast:
    """Return a weighted sum of levels; keys are ``(candidate, metric, where)`` with ``where`` a tuple of pairs or None.

    >>> contrast({("mine", "error", (("rate", 0.04),)): -1.0, ("mine", "error", (("rate", 0.3),)): 1.0}).terms[0][1]
    -1.0
    """
    return Contrast(tuple(((c, m, dict(where or ())), float(w)) for (c, m, where), w in weights.items()))


def statistic(fn: Callable[[pd.DataFrame], float]) -> Statistic:
    """Return a quantity computed from the part's frame: a slope, a correlation, a ratio of means."""
    return Statistic(fn)


# -------------------------------------------------------------------------------------------------------------- claims


@dataclass(frozen=True)
class Claim:
    """A sentence that may be false: ``quantity`` lies ``above`` (or ``below``) a bound.

    ``over="replicate"`` generalises to new draws. ``over="item"`` (fewer than 5 replicates) generalises to new items
    for the replicates made: the text then says 'for this calibration draw' or 'for these trained models'.
    """

    id: str
    text: str
    quantity: Quantity
    above: float | None = None
    below: float | None = None
    over: Literal["replicate", "item"] = "replicate"

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise InputError(f"claim {self.id!r}: give exactly one of above= and below=")


@dataclass(frozen=True)
class AllOf:
    """Holds iff all its claims hold, fails if any fails."""

    id: str
    text: str
    claims: tuple[AnyClaim, ...]


@dataclass(frozen=True)
class ForEach:
    """The same claim at every value of a setting: holds iff it holds at each."""

    factor: str
    claim: Claim

    @property
    def id(self) -> str:
        """The claim's id."""
        return self.claim.id

    @property
    def text(self) -> str:
        """The claim's text."""
        return self.claim.text


@dataclass(frozen=True)
class Exact:
    """A statement without uncertainty: ``fn`` of the part's frame is True, or False, or a reason it is not true."""

    id: str
    text: str
    fn: Callable[[pd.DataFrame], bool | str]


@dataclass(frozen=True)
class Report:
    """A quantity shown with its interval and without a verdict."""

    id: str
    text: str
    quantity: Quantity
    over: Literal["replicate", "item"] = "replicate"


AnyClaim: TypeAlias = Claim | AllOf | ForEach | Exact | Report


def all_of(id: str, text: str, *claims: Claim | ForEach) -> AllOf:
    """Return the claim that all of ``claims`` hold."""
    return AllOf(id, text, claims)


def for_each(factor: str, claim: Claim) -> ForEach:
    """Return the claim that ``claim`` holds at every value of the setting ``factor``."""
    return ForEach(factor, claim)


def exact(id: str, text: str, fn: Callable[[pd.DataFrame], bool | str]) -> Exact:
    """Return a claim without interval: bit equality, budgets, 'worst of the runs made'."""
    return Exact(id, text, fn)


def report(id: str, text: str, quantity: Quantity, over: Literal["replicate", "item"] = "replicate") -> Report:
    """Return a quantity that is shown and not judged."""
    return Report(id, text, quantity, over)


def leaves(claim: AnyClaim) -> Iterator[Claim | Exact | Report]:
    """Yield the single claims of which ``claim`` is made."""
    if isinstance(claim, AllOf):
        for child in claim.claims:
            yield from leaves(child)
    elif isinstance(claim, ForEach):
        yield claim.claim
    else:
        yield claim


# ---------------------------------------------------------------------------------------------------- parts and trials


@dataclass(frozen=True)
class Part:
    """A comparison of candidates on the cells of its factors.

    Parameters
    ----------
    variance : how the replicates relate: ``independent`` (no two share data, items or seeds), ``crossed`` (all answer
        the same items), ``design`` (folds of one data set, item scores known), ``nadeau_bengio`` (folds, means known).
    measure : ``measure(candidate, cell, params, stages)`` returns ``{metric: float | Items | Curve | None}``:
        ``inf`` means diverged (the worst value, not lost), None not applicable; an exception loses the cell.
    group : the factors whose equal values keep cells together on one worker, whose memory-only stages are then freed.
        Factors a part does not have are ignored.
    """

    name: str
    candidates: tuple[Candidate, ...]
    metrics: tuple[Metric, ...]
    factors: tuple[Factor, ...]
    variance: Variance
    claims: tuple[AnyClaim, ...]
    measure: Callable[[Candidate, Cell, Any, Any], Mapping[str, Value]]
    group: tuple[str, ...] = ("seed",)

    def __post_init__(self) -> None:
        self._check_names()
        if len({metric.timed for metric in self.metrics}) > 1:
            raise InputError(f"part {self.name!r}: timed and untimed metrics need a part each")
        if sum(factor.kind == "replicate" for factor in self.factors) > 1:
            raise InputError(f"part {self.name!r}: one factor of kind 'replicate' at most; draw both from one seed")
        for factor in self.factors:
            if not len(factor.values):
                raise InputError(f"part {self.name!r}: factor {factor.name!r} has no values")
            if factor.most is not None and (
                factor.kind != "replicate" or list(factor.values) != list(range(len(factor.values)))
            ):
                raise InputError(f"part {self.name!r}: only a replicate over range(n) may grow to most={factor.most}")
        grids = {len(candidate.grid) for candidate in self.candidates if candidate.grid}
        if len(grids) > 1:
            raise InputError(f"part {self.name!r}: candidates are tuned over {sorted(grids)} points; give all as many")

    def _check_names(self) -> None:
        for kind, names in (
            ("candidate", [candidate.label for candidate in self.candidates]),
            ("metric", [metric.name for metric in self.metrics]),
            ("factor", [factor.name for factor in self.factors]),
            ("claim", [claim.id for claim in self.claims]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise InputError(f"part {self.name!r}: {kind} {twice[0]!r} is declared twice")
        if not self.candidates or not self.metrics:
            raise InputError(f"part {self.name!r}: needs candidates and metrics")

    @property
    def timed(self) -> bool:
        """Whether the part measures time, and so runs last and alone."""
        return self.metrics[0].timed

    @property
    def replicate(self) -> Factor | None:
        """The factor that intervals generalise over."""
        return next((factor for factor in self.factors if factor.kind == "replicate"), None)

    def metric(self, name: str) -> Metric:
        """Return the metric called ``name``."""
        return next(metric for metric in self.metrics if metric.name == name)

    def cells(self, replicates: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the cells in declared order, the replicate varying slowest; ``replicates`` overrides their number."""
        factors = sorted(self.factors, key=lambda factor: factor.kind != "replicate")
        values = [
            factor.first(replicates) if factor.kind == "replicate" and replicates is not None else list(factor.values)
            for factor in factors
        ]
        for combination in itertools.product(*values):
            yield dict(zip([factor.name for factor in factors], combination, strict=True))


@dataclass(frozen=True)
class Trial:
    """A comparison with its parameters.

    Parameters
    ----------
    name : the card's name.
    params : one pydantic model; ``--set key=value``, YAML and keywords are all checked by it. A field marked
        ``json_schema_extra={"scope": "plan"}`` only chooses which cells exist and stays out of their keys; a field
        annotated ``Annotated[str, Input()]`` names a file or folder whose content is part of the key.
    parts : builds the parts from the parameters.
    presets : named parameter values; ``smoke`` (under 10 s) is required, ``full`` usual.
    check : looks at the parameters' files before any long work and raises ``InputError`` or ``MissingSampleError``.
    """

    name: str
    params: type[BaseModel]
    parts: Callable[[Any], tuple[Part, ...]]
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    check: Callable[[Any], None] | None = None


class Input:
    """Marks a parameter that names a file or folder: ``text: Annotated[str, Input()]``."""


# -------------------------------------------------------------------------------------------------------------- stages

Save: TypeAlias = Literal["safetensors", "npz", "json"]


def stage(*, save: Save | None = None, keep: bool = False) -> Callable[[Callable], Callable]:
    """Declare how the result of a module-level function is shared when asked for as ``stages(function, *arguments)``.

    Unmarked, it lives in the worker's memory until the end of its group of cells. ``save`` writes it once, under a
    lock, for all workers and later runs: a dict of tensors (``safetensors``), of arrays (``npz``) or anything JSON.
    ``keep`` holds it in memory for the life of the worker: a loaded model.

    A function whose first parameter is called ``stages`` is given it, and may ask for further stages.
    """

    def mark(function: Callable) -> Callable:
        function.__fairtrial_stage__ = (save, keep)  # type: ignore[attr-defined]
        return function

    return mark
