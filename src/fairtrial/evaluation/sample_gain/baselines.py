"""What the design-aware interval is compared with, besides the variance modes of :mod:`fairtrial.stats`.

Naive t intervals are ``interval(scores, variance="independent")`` and Nadeau and Bengio's ``variance="nadeau_bengio"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import fdtrc

from fairtrial.errors import InputError, MissingExtraError
from fairtrial.options import checked_count, checked_number
from fairtrial.seeds import generator
from fairtrial.stats import Interval
from fairtrial.stats.intervals import StudentT, Unknown

Array = NDArray[Any]


def finite(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """Return finite real numbers as an array of any shape.

    Raises
    ------
    InputError
        Other values, such as the nan of a split that failed.
    """
    try:
        found = np.asarray(values)
        if found.dtype.kind == "c":
            raise TypeError("complex")
        found = found.astype(float)
    except (TypeError, ValueError):
        raise InputError(f"{name}: give real numbers") from None
    if not np.isfinite(found).all():
        raise InputError(f"{name}: number {int(np.flatnonzero(~np.isfinite(found))[0])} is not finite")
    return found


def nested_cross_validation(
    score: Callable[[Sequence[tuple[Array, Array]]], Sequence[ArrayLike]],
    n: int,
    *,
    folds: int = 10,
    repeats: int = 10,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Nested cross-validation (Bates, Hastie and Tibshirani 2023): the error of a fold mean, measured and not modelled.

    In each of ``repeats`` partitions every fold k is held out in turn, and cross-validation among the others gives an
    estimate a_k that never saw it. (a_k - mean score on fold k)^2 is the squared error of such an estimate plus the
    variance of the fold's mean, var_k / m, which is taken off; what is left, times (folds - 1) / folds for the smaller
    sample, is the variance of the mean. It is kept between 1 and ``folds`` times the naive one.

    The interval is centred at the plain cross-validation estimate, whose estimand is that of
    :func:`fairtrial.stats.interval`: training on n (folds - 1) / folds samples. The authors' bias correction, which
    extrapolates to n, is left out. Scores that are all the same have an interval of the whole line.

    Parameters
    ----------
    score : (train, test) splits -> the per-sample scores of each; called once, with
        ``repeats * folds * (folds + 1) / 2`` splits
    n : number of samples
    folds : 3 or more
    repeats : partitions; the authors use hundreds, a few dozen steady the estimate

    Examples
    --------
    >>> y = np.random.default_rng(0).normal(size=60)
    >>> one = nested_cross_validation(lambda splits: [-((y[b] - y[a].mean()) ** 2) for a, b in splits], 60, folds=5)
    >>> one.low < -1.0 < one.high
    True
    """
    folds, repeats = checked_count(folds, "folds", least=3), checked_count(repeats, "repeats")
    n = checked_count(n, "n", least=2 * folds)
    rng, m = generator(seed, "nested_cross_validation"), n // folds
    held = [(a, b) for a in range(folds) for b in range(a, folds)]  # a == b: one fold held out
    splits: list[tuple[Array, Array]] = []
    for _ in range(repeats):
        part = rng.permutation(n)[: m * folds].reshape(folds, m)
        for a, b in held:
            test = part[a] if a == b else np.concatenate([part[a], part[b]])
            splits.append((np.setdiff1d(part, test), test))
    scores = iter(score(splits))
    squares, inner_all, outer_all = [], [], []
    for _ in range(repeats):
        by_pair = {pair: finite(next(scores), f"scores of folds {pair}") for pair in held}
        inner = np.zeros((folds, folds, m))  # [a, b]: scores of fold a by a model that saw neither a nor b
        for a, b in held:
            if a != b:
                inner[a, b], inner[b, a] = by_pair[a, b][:m], by_pair[a, b][m:]
        outer = np.array([by_pair[a, a] for a in range(folds)])  # (folds, m)
        estimate = inner.sum(axis=(0, 2)) / ((folds - 1) * m)  # (folds,) without fold b: a over the others
        squares.append((estimate - outer.mean(axis=1)) ** 2 - outer.var(axis=1, ddof=1) / m)
        inner_all.append(inner[~np.eye(folds, dtype=bool)])
        outer_all.append(outer)
    mean, count = float(np.mean(outer_all)), repeats * folds
    naive = float(np.var(inner_all, ddof=1)) / n
    if naive == 0:
        notes = ("all scores are the same: nothing is known about the error",)
        return Interval(mean, np.nan, np.nan, count, Unknown(), level, notes=notes)
    variance = float(np.clip(np.mean(squares) * (folds - 1) / folds, naive, folds * naive))
    return Interval(mean, variance, np.inf, count, StudentT(mean, variance, np.inf), level)


def stratified_bootstrap(
    scores: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of a (runs, tasks) matrix, runs resampled within each task (as rliable does).

    Meant for independent runs. Splits of one data set are not, and rows that are tasks make the interval collapse.

    Examples
    --------
    >>> low, high = stratified_bootstrap(np.random.default_rng(0).normal(size=(10, 4)))
    >>> low < 0 < high
    True
    """
    x = finite(scores, "scores")
    if x.ndim != 2 or x.size == 0:
        raise InputError("the stratified bootstrap needs a (runs, tasks) matrix of scores")
    rows = generator(seed, "stratified_bootstrap").integers(0, len(x), size=(draws, *x.shape))
    means = np.take_along_axis(x[None], rows, axis=1).mean(axis=(1, 2))  # (draws,)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


class FTest(NamedTuple):
    """A statistic, its p-value, and the mean difference it is about."""

    statistic: float
    p_value: float
    difference: float


def five_by_two_f_test(differences: ArrayLike) -> FTest:
    """Alpaydin's (1999) 5x2cv F test of two algorithms.

    F = sum of the ten squared differences / (2 sum of the five variances), with 10 and 5 degrees of freedom.

    Parameters
    ----------
    differences : (5, 2) differences of the fold means, five halvings by two folds

    Examples
    --------
    >>> round(five_by_two_f_test([[0.1, 0.12], [0.11, 0.08], [0.1, 0.1], [0.09, 0.11], [0.12, 0.1]]).p_value, 4)
    0.0002
    """
    d = finite(differences, "differences")
    if d.shape != (5, 2):
        raise InputError(f"the 5x2cv F test needs (5, 2) differences, not {d.shape}")
    spread = 2 * float(d.var(axis=1, ddof=1).sum())
    square = float((d**2).sum())
    statistic = square / spread if spread > 0 else (np.inf if square > 0 else 0.0)
    return FTest(statistic, float(fdtrc(10, 5, statistic)), float(d.mean()))


def two_on_single(method: ArrayLike, baseline: ArrayLike, *, runs: int = 1, rope: float = 0.0) -> tuple[float, ...]:
    """Return baycomp's posterior P(baseline better), (P(equivalent),) P(method better); higher scores are better.

    Parameters
    ----------
    method, baseline : (runs * folds,) fold scores
    runs : repetitions of the cross-validation; test and training sizes follow from it
    rope : half width of the region of practical equivalence; 0 leaves its probability out
    """
    try:
        from baycomp import two_on_single as posterior
    except ImportError:
        raise MissingExtraError("evaluation", "baycomp") from None
    one, two = finite(baseline, "baseline"), finite(method, "method")
    if one.shape != two.shape or one.ndim != 1:
        raise InputError(f"scores of shapes {two.shape} and {one.shape}: give as many of both, (runs * folds,)")
    rope, runs = checked_number(rope, "rope", least=0), checked_count(runs, "runs")
    return tuple(map(float, posterior(one, two, rope, runs)))


def almost_stochastic_order(method: ArrayLike, baseline: ArrayLike, *, level: float = 0.95, seed: int = 0) -> float:
    """Return deepsig's bound on how far ``method`` is from stochastically dominating: below .5 it counts as better.

    Needs the package deepsig, which is under the GPL and no dependency of this one.
    """
    try:
        from deepsig import aso
    except ImportError:
        raise InputError("deepsig is not installed: run  pip install deepsig  (its licence is the GPL)") from None
    from joblib.externals.loky import set_loky_pickler

    set_loky_pickler()  # importing deepsig had changed joblib's for the whole process
    one, two = finite(method, "method"), finite(baseline, "baseline")
    return float(aso(one, two, confidence_level=level, seed=seed, show_progress=False))
