"""Does A beat B? Paired differences on identical cells, an interval for their mean, and a state.

HOLDS if the lower bound exceeds the margin, FAILS if the upper bound is below it, else UNDECIDED. Several claims at
once go through :func:`holm`, which also gives each claim the level at which to print its interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtr

from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.stats.intervals import Interval, State, checked_level, constant_interval, interval
from fairtrial.stats.intervals import mean_interval as _mean_interval
from fairtrial.stats.moments import VarianceMode, default_variance, moments_of, moments_of_cells
from fairtrial.stats.tables import Array, SplitScores

EXACT_FLIPS = 20  # up to this many cells every sign pattern is tried
RANDOM_FLIPS = 20_000


@dataclass(frozen=True)
class Verdict:
    """What a comparison came to; ``difference`` is in the method's favour when positive.

    Attributes
    ----------
    state : "HOLDS", "FAILS" or "UNDECIDED"
    difference, low, high, level : mean paired difference and its interval
    cells, lost : cells used, cells lost (never in the method's favour)
    variance, df : of the mean difference
    sample_gain : how many times one split's test set would have to grow to tell as much; None without variance
    paired_gain : Var(unpaired) / Var(paired), what running both on identical cells was worth; None without variance
    p_value : two-sided, against the margin; with three cells or more, at most 1 - level exactly if a state was reached
    sign_flip_p : two-sided sign-flip p-value; None where cells share data
    rope_probability : P(|effect| < rope) under the correlated-t posterior; None without a rope
    cost_ratio : cost of the method over that of the baseline; None if not measured
    note : what a reader must know
    """

    state: State
    difference: float
    low: float
    high: float
    level: float
    cells: int
    lost: int = 0
    variance: float = np.nan
    df: float = np.nan
    sample_gain: float | None = None
    paired_gain: float | None = None
    p_value: float | None = None
    sign_flip_p: float | None = None
    rope_probability: float | None = None
    cost_ratio: float | None = None
    note: str = ""

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        return (
            f"{self.state}: {self.difference:+.4g} [{self.low:+.4g}, {self.high:+.4g}] "
            f"({100 * self.level:.4g}%, {self.cells} cells{note})"
        )


def compare(
    method: SplitScores | ArrayLike,
    baseline: SplitScores | ArrayLike,
    *,
    margin: float = 0.0,
    higher_is_better: bool,
    level: float = 0.95,
    variance: VarianceMode | None = None,
    anytime: bool = False,
    rope: float | None = None,
    kappa: float = 1.0,
    exact: bool = False,
) -> Verdict:
    """Compare two candidates that ran on identical splits and seeds.

    Parameters
    ----------
    method, baseline : both tables of the same splits, or both vectors of the same cells
    margin : what the difference must exceed, in units of the score
    higher_is_better : False for errors and losses; the difference is then baseline - method
    level, variance, anytime, kappa, exact : as in :func:`fairtrial.stats.interval`
    rope : half width of the region of practical equivalence, for ``rope_probability``

    Raises
    ------
    InputError
        The splits differ (the first that does is named), or the cells are fewer than two.

    Examples
    --------
    >>> forest, logistic = [0.91, 0.90, 0.93, 0.92, 0.94, 0.90], [0.89, 0.87, 0.92, 0.89, 0.90, 0.89]
    >>> verdict = compare(forest, logistic, higher_is_better=True)
    >>> print(verdict)
    HOLDS: +0.02333 [+0.01062, +0.03604] (95%, 6 cells)
    >>> round(verdict.sign_flip_p, 4)
    0.0312
    """
    winner, loser = (method, baseline) if higher_is_better else (baseline, method)
    if anytime and variance is None:
        raise InputError("an anytime verdict needs an explicit variance=: say what two cells share")
    mode = variance or default_variance(method)
    if isinstance(winner, SplitScores) and isinstance(loser, SplitScores):
        table = winner.minus(loser)
        one = interval(table, level=level, variance=mode, anytime=anytime, kappa=kappa, exact=exact)
        difference: SplitScores | Array = table
        cells = table.means
    elif isinstance(winner, SplitScores) or isinstance(loser, SplitScores):
        raise InputError("one candidate is a table of scores and the other a vector: give both alike")
    else:
        a, b = np.asarray(winner, dtype=float), np.asarray(loser, dtype=float)
        if a.shape != b.shape:
            raise InputError(f"the candidates have {a.size} and {b.size} cells: run both on identical cells")
        difference = cells = a - b
        scale = float(max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0)))
        one = _mean_interval(cells, level=level, variance=mode, anytime=anytime, exact=exact, scale=scale)
    if method is baseline:
        one = constant_interval(0.0, len(cells), level)
    gain = moments_of(difference, mode, kappa).gain if one.variance > 0 else None
    return Verdict(
        state=one.state(margin),
        difference=one.mean,
        low=one.low,
        high=one.high,
        level=level,
        cells=one.n_cells,
        variance=one.variance,
        df=one.df,
        sample_gain=gain,
        paired_gain=paired_gain(method, baseline, variance=mode, kappa=kappa) if one.variance > 0 else None,
        p_value=one.p_value(margin),
        sign_flip_p=sign_flip_p(cells, margin) if mode == "independent" else None,
        rope_probability=None if rope is None else rope_probability(one, rope),
        note="; ".join(one.notes),
    )


def paired_gain(
    method: SplitScores | ArrayLike,
    baseline: SplitScores | ArrayLike,
    *,
    variance: VarianceMode | None = None,
    kappa: float = 1.0,
) -> float:
    """Var(unpaired) / Var(paired): how much more data two separate runs would need to tell the candidates apart.

    inf if the differences do not vary, nan if nothing does.

    Examples
    --------
    >>> round(paired_gain([1.0, 2.0, 3.0, 4.0], [0.9, 2.1, 2.9, 4.1]), 1)
    261.0
    """
    mode = variance or default_variance(method)
    if isinstance(method, SplitScores) and isinstance(baseline, SplitScores):
        paired = moments_of(method.minus(baseline), mode, kappa).variance
        unpaired = moments_of(method, mode, kappa).variance + moments_of(baseline, mode, kappa).variance
    else:
        a, b = np.asarray(method, dtype=float), np.asarray(baseline, dtype=float)
        paired = moments_of_cells(a - b, mode).variance
        unpaired = moments_of_cells(a, mode).variance + moments_of_cells(b, mode).variance
    if paired > 0:
        return unpaired / paired
    return np.inf if unpaired > 0 else np.nan


def sign_flip_p(differences: ArrayLike, margin: float = 0.0, *, seed: int = 0) -> float:
    """Two-sided sign-flip p-value of independent paired differences being symmetric about ``margin``.

    Exact up to 20 cells (all 2^K sign patterns; ties count if within 1e-12 of the observed), from 20 000 random
    patterns beyond.

    Parameters
    ----------
    differences : (K,) one a cell

    Examples
    --------
    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    d = np.asarray(differences, dtype=float) - margin
    if d.ndim != 1 or len(d) == 0 or not np.isfinite(d).all():
        raise InputError("sign flips need a vector of finite differences, one or more")
    observed = (1 - 1e-12) * abs(d.sum())
    if len(d) <= EXACT_FLIPS:
        sums = d[:1]  # the first sign can stay: flipping all signs leaves |sum| as it is
        for x in d[1:]:
            sums = np.concatenate([sums + x, sums - x])  # (2^k,)
        return float(np.mean(np.abs(sums) >= observed))
    rng, hits = generator(seed, "sign_flip_p"), 0
    for _ in range(10):
        signs = rng.integers(0, 2, size=(RANDOM_FLIPS // 10, len(d)), dtype=np.int8)
        hits += int(np.count_nonzero(np.abs(2 * (signs @ d) - d.sum()) >= observed))
    return (hits + 1) / (RANDOM_FLIPS + 1)  # the observed pattern is one of them


def rope_probability(one: Interval, rope: float) -> float:
    """P(|effect| < ``rope``) under the (correlated) t posterior of ``one`` (Corani and Benavoli 2015).

    nan if the interval's error is not known.

    Examples
    --------
    >>> round(rope_probability(_mean_interval([0.01, -0.01, 0.0, 0.02, -0.02]), 0.02), 3)
    0.953
    """
    if rope < 0:
        raise InputError(f"rope {rope} is negative: it is the half width of the region of practical equivalence")
    if one.variance > 0:
        s = np.sqrt(one.variance)
        return float(stdtr(one.df, (rope - one.mean) / s) - stdtr(one.df, (-rope - one.mean) / s))
    low, high = one.at(one.level)
    return float(low > -rope and high < rope) if np.isfinite(low) else np.nan


def holm(p_values: ArrayLike, level: float = 0.95) -> tuple[Array, Array]:
    """Holm's step-down test, and the level at which each claim's interval never disagrees with it.

    With a = 1 - ``level`` and m claims, the claim of rank k (ascending p) is rejected while p <= a / (m - k + 1), and
    its interval is at level 1 - a / (m - k + 1); every claim not rejected gets the level of the first rank that was
    not.

    Parameters
    ----------
    p_values : (m,) two-sided p-values; nan counts as 1

    Returns
    -------
    rejected : (m,) bool
    levels : (m,) levels for :meth:`Interval.at`

    Examples
    --------
    >>> rejected, levels = holm([0.001, 0.04, 0.03])
    >>> rejected, levels.round(4)
    (array([ True, False, False]), array([0.9833, 0.975 , 0.975 ]))
    """
    p = np.nan_to_num(np.asarray(p_values, dtype=float), nan=1.0)
    if p.ndim != 1 or ((p < 0) | (p > 1)).any():
        raise InputError("p-values must be a vector of numbers from 0 to 1")
    alpha = (1 - checked_level(level)) / np.arange(len(p), 0, -1)  # by rank
    order = np.argsort(p, kind="stable")
    stays = np.logical_and.accumulate(p[order] <= alpha)
    first = min(int(stays.sum()), max(len(p) - 1, 0))
    rejected, levels = np.zeros(len(p), dtype=bool), np.zeros(len(p))
    rejected[order] = stays
    levels[order] = 1 - np.where(stays, alpha, alpha[first] if len(p) else 0.0)
    return rejected, levels
