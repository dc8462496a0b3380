"""Intervals for a mean of cells that agree with their p-values, at any level, fixed or anytime.

An :class:`Interval` keeps what it was made from, so it can be read again at another level (the level of a claim's Holm
rank) or asked for the p-value of a bound. Both readings come from one law of the estimate:

    StudentT     t with the moments' degrees of freedom; for a number of cells fixed beforehand
    Mixture      t-mixture, valid at every look at once (Robbins 1970; exact for Gaussian cells)
    Unknown      no variance was seen and nothing else is known: every bound stays possible
    Constant     a value without error: an exact metric, or the sign rule for six or more equal cells
    RuleOfThree  all-equal 0/1 scores, or all-equal differences of such
    Binomial     one split of 0/1 scores
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincinv, stdtr, stdtrit

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.stats.moments import Moments, VarianceMode, default_variance, moments_of, moments_of_cells
from fairtrial.stats.tables import Array, SplitScores

State = Literal["HOLDS", "FAILS", "UNDECIDED"]
NO_VARIANCE = "no variance seen"
RELATIVE_ZERO = 1e-9  # a spread or difference below this share of the largest score is none
SIGN_RULE_CELLS = 6  # fewer equal cells cannot reach 2^(1-K) <= .05


class Law(Protocol):
    """How an estimate errs: bounds of an interval, and the p-values they invert."""

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Low and high of the interval that misses with probability ``alpha``."""
        ...

    def tails(self, bound: float) -> tuple[float, float]:
        """One-sided p-values of mean <= ``bound`` and of mean >= ``bound``."""
        ...


@dataclass(frozen=True)
class StudentT:
    """(estimate - mean) / sqrt(variance) has Student's distribution with ``df``."""

    mean: float
    variance: float
    df: float

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return mean -/+ t_{1 - alpha/2} sqrt(variance)."""
        half = -stdtrit(self.df, alpha / 2) * np.sqrt(self.variance)
        return float(self.mean - half), float(self.mean + half)

    def tails(self, bound: float) -> tuple[float, float]:
        """Return the two tails of Student's distribution."""
        t = (self.mean - bound) / np.sqrt(self.variance)
        return float(stdtr(self.df, -t)), float(stdtr(self.df, t))


def anytime_half_width(variance: ArrayLike, df: ArrayLike, design_ratio: ArrayLike, level: float = 0.95) -> Array:
    """Half width of the interval that may be looked at after every cell.

    sqrt( V df (R - 1) / (1 - R / g) ),  R = (g / a^2)^(1 / (df + 1)),  g = 1 + 10 V_10 / V_K,  a = 1 - ``level``;
    infinite where R >= g. It inverts a mixture of t likelihood ratios over a normal effect, so the chance that it
    *ever* excludes the mean is at most a (exactly so for Gaussian independent or equicorrelated cells).

    Parameters
    ----------
    variance, df, design_ratio : V_K, its degrees of freedom, V_10 / V_K; arrays are broadcast

    Examples
    --------
    >>> float(anytime_half_width(1.0, 19, 2.0).round(2))  # 20 independent cells; the fixed interval has 2.09
    3.42
    """
    v, df, log_g = np.asarray(variance), np.asarray(df), np.log1p(10 * np.asarray(design_ratio))
    log_r = (log_g - 2 * np.log1p(-level)) / (df + 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        square = v * df * np.expm1(log_r) / -np.expm1(log_r - log_g)
    return np.where(log_r < log_g, np.sqrt(np.maximum(square, 0.0)), np.inf)


def anytime_p_value(distance: ArrayLike, variance: ArrayLike, df: ArrayLike, design_ratio: ArrayLike) -> Array:
    """Two-sided p-value, valid at every look, of an estimate at ``distance`` from the bound.

    min(1, sqrt(g) ((1 + x / g) / (1 + x))^((df + 1) / 2)),  x = distance^2 / (V_K df); see
    :func:`anytime_half_width`, which it inverts.
    """
    df, g = np.asarray(df), 1 + 10 * np.asarray(design_ratio)
    x = np.asarray(distance) ** 2 / (np.asarray(variance) * df)
    return np.exp(np.minimum(0.0, np.log(g) / 2 + (df + 1) / 2 * (np.log1p(x / g) - np.log1p(x))))


@dataclass(frozen=True)
class Mixture:
    """The anytime law: the mean is never left out, at any number of cells, but with probability alpha."""

    mean: float
    variance: float
    df: float
    design_ratio: float

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return mean -/+ the anytime half width."""
        half = float(anytime_half_width(self.variance, self.df, self.design_ratio, 1 - alpha))
        return self.mean - half, self.mean + half

    def tails(self, bound: float) -> tuple[float, float]:
        """Return half the two-sided p-value on the estimate's side (a first crossing is symmetric), 1 on the other."""
        half = float(anytime_p_value(self.mean - bound, self.variance, self.df, self.design_ratio)) / 2
        return (half, 1.0) if self.mean > bound else (1.0, half)


@dataclass(frozen=True)
class Unknown:
    """Nothing is known about the error."""

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return the whole line."""
        return -np.inf, np.inf

    def tails(self, bound: float) -> tuple[float, float]:
        """Reject nothing."""
        return 1.0, 1.0


@dataclass(frozen=True)
class Constant:
    """A value that carries no error beyond ``tolerance``, known with two-sided p-value ``p`` (0: exactly)."""

    mean: float
    tolerance: float
    p: float = 0.0

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return the value itself, or the whole line where ``alpha`` asks for more than is known."""
        if self.p > alpha:
            return -np.inf, np.inf
        return self.mean - self.tolerance, self.mean + self.tolerance

    def tails(self, bound: float) -> tuple[float, float]:
        """Return half of ``p`` on the side of the value, 1 for a bound equal to it."""
        above, below = bound < self.mean - self.tolerance, bound > self.mean + self.tolerance
        return self.p / 2 if above else 1.0, self.p / 2 if below else 1.0


@dataclass(frozen=True)
class RuleOfThree:
    """All N samples scored the same: a different score has probability at most ln(2 / alpha) / N."""

    mean: float
    samples: int
    support: tuple[float, float]

    @property
    def _reach(self) -> float:  # how far one different sample could lie
        return max(self.support[1] - self.mean, self.mean - self.support[0])

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return mean -/+ ln(2 / alpha) / N, inside the possible values."""
        half = self._reach * np.log(2 / alpha) / self.samples
        return float(max(self.mean - half, self.support[0])), float(min(self.mean + half, self.support[1]))

    def tails(self, bound: float) -> tuple[float, float]:
        """Return exp(-N distance) on the side of the mean; 0 for a bound no score can reach."""
        p = float(np.exp(-self.samples * abs(self.mean - bound) / self._reach))
        outside = not self.support[0] <= bound <= self.support[1]
        return (0.0 if outside else p, 1.0) if bound < self.mean else (1.0, 0.0 if outside else p)


@dataclass(frozen=True)
class Binomial:
    """``successes`` of ``samples`` independent 0/1 scores (Clopper and Pearson)."""

    successes: int
    samples: int

    def bounds(self, alpha: float) -> tuple[float, float]:
        """Return the exact interval of equal tails."""
        k, n = self.successes, self.samples
        low = float(betaincinv(k, n - k + 1, alpha / 2)) if k else 0.0
        high = float(betaincinv(k + 1, n - k, 1 - alpha / 2)) if k < n else 1.0
        return low, high

    def tails(self, bound: float) -> tuple[float, float]:
        """P(at least as many successes), P(at most as many), with success probability ``bound``."""
        k, n, p = self.successes, self.samples, float(np.clip(bound, 0, 1))
        outside = p != bound
        greater = float(betainc(k, n - k + 1, p)) if k else float(not outside or bound > 0)
        less = float(1 - betainc(k + 1, n - k, p)) if k < n else float(not outside or bound < 0)
        return greater, less


@dataclass(frozen=True)
class Interval:
    """A mean with its uncertainty; prints as ``0.81 [0.78, 0.84] (95%, 30 cells)``.

    ``at`` and ``p_value`` agree: ``at(level)`` leaves ``bound`` out exactly if ``p_value(bound) <= 1 - level``.

    Attributes
    ----------
    mean, variance, df : the estimate, its variance and the degrees of freedom of that
    n_cells : number of cells (splits, seeds, units) it rests on
    law : how the estimate errs
    level : the level of ``low`` and ``high``
    anytime : whether it may be looked at after every cell
    design_ratio : V_10 / V_K, what the anytime law needs; nan where no law uses it
    notes : what a reader must know, one phrase each

    Examples
    --------
    >>> gain = mean_interval([0.02, 0.05, 0.03, 0.04, 0.01])
    >>> print(gain)
    0.03 [0.01037, 0.04963] (95%, 5 cells)
    >>> gain.state(0.0), round(gain.p_value(0.0), 4), gain.at(0.99)[0] > 0
    ('HOLDS', 0.0132, False)
    """

    mean: float
    variance: float
    df: float
    n_cells: int
    law: Law
    level: float = 0.95
    anytime: bool = False
    design_ratio: float = np.nan
    notes: tuple[str, ...] = ()

    @property
    def low(self) -> float:
        """Lower bound at ``level``."""
        return self.at(self.level)[0]

    @property
    def high(self) -> float:
        """Upper bound at ``level``."""
        return self.at(self.level)[1]

    def at(self, level: float) -> tuple[float, float]:
        """Return (low, high) at another level, such as that of a claim's Holm rank."""
        return self.law.bounds(1 - checked_level(level))

    def p_value(self, bound: float, side: Literal["two-sided", "greater", "less"] = "two-sided") -> float:
        """p-value against ``bound``.

        "greater" tests mean <= bound (small: the mean is greater), "less" tests mean >= bound; "two-sided" is twice
        the smaller, at most 1. Anytime if the interval is.
        """
        greater, less = self.law.tails(bound)
        if side == "greater":
            return greater
        if side == "less":
            return less
        if side != "two-sided":
            raise UnknownNameError("side", side, ("two-sided", "greater", "less"))
        return min(1.0, 2 * min(greater, less))

    @property
    def decidable(self) -> bool:
        """Whether a verdict may rest on it: three cells or more, or no error at all. If not, count its p as 1."""
        return self.n_cells > 2 or isinstance(self.law, Constant)

    def state(self, bound: float = 0.0, level: float | None = None) -> State:
        """Return HOLDS if the interval (at ``level``) lies above ``bound``, FAILS if below, else UNDECIDED."""
        low, high = self.at(self.level if level is None else level)
        if not self.decidable or not (low > bound or high < bound):  # a bound that is no number decides nothing
            return "UNDECIDED"
        return "HOLDS" if low > bound else "FAILS"

    def __str__(self) -> str:
        kind = ", anytime" if self.anytime else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}] ({100 * self.level:.4g}%{kind}, "
            f"{self.n_cells} cells{notes})"
        )


def mean_interval(
    values: ArrayLike,
    *,
    level: float = 0.95,
    variance: VarianceMode = "independent",
    n_test: ArrayLike | None = None,
    n_train: ArrayLike | None = None,
    anytime: bool = False,
    exact: bool = False,
    scale: float | None = None,
) -> Interval:
    """Interval for the mean of a plain vector of cells.

    "independent": no two cells share data, items or seeds; V_K = S^2 / K. "nadeau_bengio": the cells are folds of one
    data set; V_K = S^2 (1 / K + n_test / n_train), where the second term stands for the covariance of folds that
    share training samples (Nadeau and Bengio 2003; Bouckaert and Frank 2004). df = K - 1.

    Without variance (S <= 1e-9 of the largest score) nothing is decided, unless the metric is exact or six or more
    independent cells agree on a value (p = 2^(1 - K), the sign test).

    Parameters
    ----------
    values : (K,) finite values, K >= 2
    n_test, n_train : sizes of the folds, for "nadeau_bengio"
    anytime : make the interval valid at every look
    exact : the metric has no error (a count of bytes, a bit equality): equal values need no further proof
    scale : the largest magnitude of the scores that ``values`` are differences of; left out, that of ``values``

    Raises
    ------
    InputError
        Fewer than two cells, a value that is not finite, sizes missing.

    Examples
    --------
    >>> folds = [0.81, 0.79, 0.84, 0.80, 0.83]
    >>> print(mean_interval(folds, variance="nadeau_bengio", n_test=20, n_train=80))
    0.814 [0.7754, 0.8526] (95%, 5 cells)
    """
    moments = moments_of_cells(values, variance, n_test, n_train)
    x = np.asarray(values, dtype=float)
    scale = float(np.abs(x).max()) if scale is None else scale
    notes = _skew_note(x) if variance == "independent" and not exact else ()
    return _interval(
        moments,
        level=level,
        anytime=anytime,
        spread=float(x.std(ddof=1)),
        scale=scale,
        exact=exact,
        sign_rule=variance == "independent",
        notes=notes,
    )


def interval(
    scores: SplitScores | ArrayLike,
    *,
    level: float = 0.95,
    variance: VarianceMode | None = None,
    anytime: bool = False,
    kappa: float = 1.0,
    exact: bool = False,
) -> Interval:
    """Interval for the expected score of the *algorithm* (trained on as many fresh samples), not of one fitted model.

    Parameters
    ----------
    scores : a table of scores, or a plain vector of independent cells
    variance : "design" (index sets known; its default), "nadeau_bengio" (fold means and sizes; its default),
        "independent" (no two cells share data, items or seeds; the default of a vector), "crossed" (every run answers
        the same items, no training overlap)
    anytime : valid at every look; needs an explicit ``variance``, as a wrong one decides half of all null cases
    kappa : how the training term is closed in "design"; see :func:`fairtrial.stats.design_variance`
    exact : the metric has no error

    Raises
    ------
    InputError
        Fewer than two splits (0/1 scores get the binomial interval instead), a variance mode the table cannot serve.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> test = [fold for _ in range(6) for fold in np.array_split(rng.permutation(50), 5)]
    >>> scores = SplitScores.from_arrays(test, [(fold < 40).astype(float) for fold in test])
    >>> print(interval(scores))
    0.8 [0.6845, 0.9155] (95%, 30 cells; kappa = 1 assumed, measured .4-2.2)
    """
    checked_level(level)
    if anytime and variance is None:
        raise InputError("an anytime interval needs an explicit variance=: say what two cells share")
    if not isinstance(scores, SplitScores):
        return mean_interval(scores, level=level, variance=variance or "independent", anytime=anytime, exact=exact)
    mode = variance or default_variance(scores)
    zero_one = None if exact else _zero_one_interval(scores, level, anytime)
    if zero_one is not None:
        return zero_one
    if scores.score is None or mode not in ("design", "crossed"):
        one = mean_interval(
            scores.means,
            level=level,
            variance=mode,
            n_test=scores.n_test,
            n_train=scores.n_train,
            anytime=anytime,
            exact=exact,
            scale=scores.scale,
        )
        shared = mode == "independent" and scores.score is not None and scores.n_tested < len(scores.score)
        return replace(one, notes=(*one.notes, "on these items")) if shared else one
    return _interval(
        moments_of(scores, mode, kappa),
        level=level,
        anytime=anytime,
        spread=float(scores.score.std()),
        scale=scores.scale,
        exact=exact,
        sign_rule=False,
        notes=(f"kappa = {kappa:g} assumed, measured .4-2.2",) if mode == "design" else (),
    )


def _zero_one_interval(scores: SplitScores, level: float, anytime: bool) -> Interval | None:
    """Interval for 0/1 scores (or differences of such) that a variance cannot serve: one split, or all the same."""
    if scores.score is None or scores.support is None:
        return None
    k, n, mean = scores.n_splits, scores.n_tested, float(scores.means[0])
    if k == 1 and scores.support == (0.0, 1.0):
        note = "one split: a binomial interval for this fitted model, not for the algorithm"
        law: Law = Binomial(int(scores.score.sum()), n)
        return Interval(mean, mean * (1 - mean) / n, np.inf, k, law, level, anytime, notes=(note,))
    if k > 1 and np.ptp(scores.score) == 0:
        note = f"{NO_VARIANCE}: the bound is the rule of three for {n} samples"
        return Interval(mean, 0.0, k - 1, k, RuleOfThree(mean, n, scores.support), level, anytime, notes=(note,))
    return None


def combine(
    intervals: Sequence[Interval], *, bound: float = 0.0, inverse_variance: bool = False
) -> tuple[Interval, float]:
    """Mean effect over fixed settings (tasks, data sets), and the share of settings won.

    The default is the plain mean, variance sum V / q^2 over q settings, Satterthwaite's degrees of freedom: the
    interval is for the mean over *these* settings. ``inverse_variance`` weights settings by 1 / V instead.

    Parameters
    ----------
    intervals : one a setting, from cells that different settings do not share
    bound : a setting is won if its estimate is above

    Raises
    ------
    InputError
        No intervals; an anytime one (average each block of settings first: the block mean is the cell).

    Examples
    --------
    >>> easy, hard = mean_interval([0.02, 0.03, 0.04]), mean_interval([-0.01, 0.01, 0.03])
    >>> mean, won = combine([easy, hard])
    >>> print(mean, won)
    0.02 [-0.000777, 0.04078] (95%, 6 cells) 1.0
    """
    if not intervals:
        raise InputError("there are no settings to combine: give at least one interval")
    if any(one.anytime for one in intervals):
        raise InputError("anytime intervals cannot be combined: average each block of settings, its mean is the cell")
    mean, v, df = (np.array([getattr(one, name) for one in intervals]) for name in ("mean", "variance", "df"))
    won = float(np.mean(mean > bound))
    notes = tuple(dict.fromkeys(note for one in intervals for note in one.notes))
    n_cells, level = sum(one.n_cells for one in intervals), intervals[0].level
    known = all(
        isinstance(one.law, StudentT) or (isinstance(one.law, Constant) and one.law.p == 0) for one in intervals
    )
    if inverse_variance and (v <= 0).any():
        raise InputError("a setting without variance has no inverse: combine by the plain mean")
    w = 1 / v if inverse_variance else np.ones_like(v)
    w = w / w.sum()
    parts = w**2 * v
    total = float(parts.sum())
    estimate = float(w @ mean)
    law: Law
    if not known:
        law, freedom = Unknown(), np.nan
    elif total == 0:
        law, freedom = Constant(estimate, max(one.high - one.mean for one in intervals)), np.nan
    else:
        freedom = total**2 / float((parts[v > 0] ** 2 / df[v > 0]).sum())
        law = StudentT(estimate, total, freedom)
    return Interval(estimate, total, freedom, n_cells, law, level, notes=notes), won


def checked_level(level: float) -> float:
    """Return ``level`` if it is a confidence level."""
    if not 0 < level < 1:
        raise InputError(f"level {level} is not between 0 and 1: for 95% give 0.95")
    return level


def constant_interval(value: float, n_cells: int, level: float) -> Interval:
    """Interval of zero width, for a quantity known without error."""
    return Interval(value, 0.0, n_cells - 1, n_cells, Constant(value, 0.0), level)


def _interval(
    moments: Moments,
    *,
    level: float,
    anytime: bool,
    spread: float,
    scale: float,
    exact: bool,
    sign_rule: bool,
    notes: tuple[str, ...],
) -> Interval:
    checked_level(level)
    k, tolerance = moments.n_cells, RELATIVE_ZERO * scale
    if spread > tolerance:
        law: Law
        if anytime:
            law = Mixture(moments.mean, moments.variance, moments.df, moments.design_ratio)
        else:
            law = StudentT(moments.mean, moments.variance, moments.df)
        notes = (*notes, *(("two cells: an interval but no verdict",) if k == 2 else ()))
        ratio = moments.design_ratio
        return Interval(moments.mean, moments.variance, moments.df, k, law, level, anytime, ratio, notes)
    mean = moments.mean if abs(moments.mean) > tolerance else 0.0
    if exact:
        law = Constant(mean, tolerance)
    elif sign_rule and k >= SIGN_RULE_CELLS:
        law = Constant(mean, tolerance, p=2.0 ** (1 - k))
        notes = (f"{NO_VARIANCE}: by the sign test of {k} equal cells",)
    else:
        law, notes = Unknown(), (NO_VARIANCE,)
    return Interval(mean, 0.0, moments.df, k, law, level, anytime, notes=notes)


def _skew_note(x: Array) -> tuple[str, ...]:
    deviation = x - x.mean()
    second = float(np.mean(deviation**2))
    if not 3 <= len(x) <= 12 or second <= (RELATIVE_ZERO * np.abs(x).max(initial=0.0)) ** 2:
        return ()
    skewness = float(np.mean((deviation / np.sqrt(second)) ** 3))
    return ("skewed cells: error may be 3-7 times nominal on one side",) if abs(skewness) > 1 else ()
