"""Ways of judging a trial: the engine's own, what people usually do, and a coin.

Each maps the table of a finished trial to one judgement a claim. What people usually do is one rule: a claim is
decided when the 95% interval of its mean leaves the bound out, whatever else is claimed, lost or looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from fairtrial.trial.declare import AllOf, AnyClaim, Claim, Difference
from fairtrial.trial.table import Table, mean_over
from fairtrial.trial.verdict import FIRST_LOOK, ClaimResult, judge

RESAMPLES = 500
ERROR = 0.025  # what a two-sided 95% rule allows on each side


class Judgement(NamedTuple):
    """A state, the interval of a single claim, and the judgements of a composite's claims."""

    state: str
    low: float | None = None
    high: float | None = None
    parts: tuple[Judgement, ...] = ()


Way = Callable[[Table, bool, np.random.Generator], list[Judgement]]
Interval = Callable[[np.ndarray, np.random.Generator], tuple[float, float]]


def by_fairtrial(table: Table, peeked: bool, rng: np.random.Generator) -> list[Judgement]:
    """Judge as every trial is judged."""
    return [_judgement(result) for result in judge({table.part.name: table}, peeked=peeked)]


def by_plain_t(table: Table, peeked: bool, rng: np.random.Generator) -> list[Judgement]:
    """Take every finished cell for a replicate, and a t interval at each look."""
    return [_usual(table, claim, peeked, rng, _t_interval, every_cell=True) for claim in table.part.claims]


def by_bootstrap(table: Table, peeked: bool, rng: np.random.Generator) -> list[Judgement]:
    """Average each replicate, and take the percentiles of the resampled mean at each look."""
    return [_usual(table, claim, peeked, rng, _percentiles, every_cell=False) for claim in table.part.claims]


def by_larger_mean(table: Table, peeked: bool, rng: np.random.Generator) -> list[Judgement]:
    """Print the larger mean in bold: no uncertainty, always decided."""
    point = lambda units, rng: (units.mean(), units.mean())  # noqa: E731
    judged = [_usual(table, claim, False, rng, point, every_cell=True) for claim in table.part.claims]
    return [Judgement(one.state) for one in judged]


def by_coin(table: Table, peeked: bool, rng: np.random.Generator) -> list[Judgement]:
    """Err exactly as often as allowed, without a look at the cells."""
    states = ["HOLDS", "FAILS", "UNDECIDED"]
    return [Judgement(str(s)) for s in rng.choice(states, len(table.part.claims), p=[ERROR, ERROR, 1 - 2 * ERROR])]


def _judgement(result: ClaimResult) -> Judgement:
    return Judgement(result.state, result.low, result.high, tuple(_judgement(child) for child in result.claims))


def _usual(
    table: Table, claim: AnyClaim, peeked: bool, rng: np.random.Generator, interval: Interval, *, every_cell: bool
) -> Judgement:
    if isinstance(claim, AllOf):
        parts = tuple(_usual(table, c, peeked, rng, interval, every_cell=every_cell) for c in claim.claims)
        states = {part.state for part in parts}
        state = "FAILS" if "FAILS" in states else "HOLDS" if states == {"HOLDS"} else "UNDECIDED"
        return Judgement(state, parts=parts)
    assert isinstance(claim, Claim)
    d = _differences(table, claim)  # (replicates, cells of one)
    if not every_cell:
        d = mean_over(d, axis=1)[:, None]
    state, low, high = "UNDECIDED", -np.inf, np.inf
    for count in range(FIRST_LOOK if peeked else len(d), len(d) + 1):
        units = d[:count][np.isfinite(d[:count])]
        if len(units) > 1:
            low, high = interval(units, rng)
            state = _state(claim, low, high)
        if state != "UNDECIDED":
            break
    return Judgement(state, low, high)


def _differences(table: Table, claim: Claim) -> np.ndarray:
    """Return the claim's difference in each cell, NaN where a side is lost: (replicates, cells of one)."""
    quantity = claim.quantity
    assert isinstance(quantity, Difference)
    a, b = (table.units(c, quantity.metric, quantity.where, quantity.scale == "log") for c in (quantity.a, quantity.b))
    sign = 1 if table.part.metric(quantity.metric).higher_is_better else -1
    return (sign * (a - b)).reshape(len(a), -1)


def _state(claim: Claim, low: float, high: float) -> str:
    if claim.above is not None:
        return "HOLDS" if low > claim.above else "FAILS" if high < claim.above else "UNDECIDED"
    assert claim.below is not None
    return "HOLDS" if high < claim.below else "FAILS" if low > claim.below else "UNDECIDED"


def _t_interval(units: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    half = stdtrit(len(units) - 1, 1 - ERROR) * units.std(ddof=1) / np.sqrt(len(units))
    return float(units.mean() - half), float(units.mean() + half)


def _percentiles(units: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    means = np.sort(units[rng.integers(0, len(units), (RESAMPLES, len(units)))].mean(axis=1))
    cut = round(ERROR * RESAMPLES)
    return float(means[cut]), float(means[-1 - cut])
