"""How well a judge agrees with people, and what its verdicts are worth once some are audited."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError
from fairtrial.stats import Interval
from fairtrial.stats.intervals import Binomial, Law, StudentT, Unknown, checked_level


def cohen_kappa(first: ArrayLike, second: ArrayLike, *, level: float = 0.95) -> Interval:
    """Cohen's kappa of two raters of the same items, (p_o - p_e) / (1 - p_e), with an interval.

    p_o is the share of items they agree on, p_e what raters with these frequencies of labels agree on by chance
    (Cohen 1960). The interval is the exact binomial one of p_o at this p_e: right for few items and for perfect
    agreement too, and rather too wide than too short elsewhere (Fleiss, Cohen and Everitt 1969).

    Parameters
    ----------
    first, second : (n,) labels of any kind

    Raises
    ------
    InputError
        No items, different lengths, or one and the same label throughout, where kappa is 0 / 0.

    Examples
    --------
    >>> people = ["good"] * 50 + ["bad"] * 50
    >>> judge = ["good"] * 40 + ["bad"] * 10 + ["good"] * 5 + ["bad"] * 45
    >>> print(cohen_kappa(people, judge))
    0.7 [0.5294, 0.8271] (95%, 100 cells)
    """
    a, b = np.asarray(first), np.asarray(second)
    n = len(a) if a.ndim == 1 else 0
    if n == 0 or a.shape != b.shape:
        raise InputError(f"kappa needs the labels of two raters for the same items, not {a.shape} and {b.shape}")
    checked_level(level)
    _, code = np.unique(np.concatenate([a, b]), return_inverse=True)
    x, y = code[:n], code[n:]
    labels = int(code.max()) + 1
    chance = float(np.bincount(x, minlength=labels) @ np.bincount(y, minlength=labels)) / n**2
    if labels == 1:
        raise InputError(f"both raters gave all {n} items one label: kappa is undefined, rate items of several kinds")
    agreed = int((x == y).sum())
    law = _BeyondChance(Binomial(agreed, n), chance)
    share = agreed / n
    variance = share * (1 - share) / n / (1 - chance) ** 2
    return Interval((share - chance) / (1 - chance), variance, np.inf, n, law, level)


@dataclass(frozen=True)
class _BeyondChance:
    """The law of an agreement, read on the scale of kappa."""

    agreement: Binomial
    chance: float

    def bounds(self, alpha: float) -> tuple[float, float]:
        low, high = self.agreement.bounds(alpha)
        return (low - self.chance) / (1 - self.chance), (high - self.chance) / (1 - self.chance)

    def tails(self, bound: float) -> tuple[float, float]:
        return self.agreement.tails(self.chance + bound * (1 - self.chance))


def prediction_powered_mean(judged: ArrayLike, human: ArrayLike, *, level: float = 0.95) -> Interval:
    """Mean human score of all items, from a judge's scores of all and people's of a random part.

    mean over all of judge + mean over the audited of (human - judge), which is unbiased however wrong the judge is
    (prediction-powered inference; Angelopoulos et al. 2023). With N items, m of them audited at random, d = human -
    judge, its variance is

        var(judge) / N + 2 cov(judge, d) / N + var(d) / m

    the last two of the audited; exact for an audit drawn without replacement out of the N. Everything audited, it is
    the variance of a plain mean of human scores. m - 1 degrees of freedom.

    Where judge and people differ nowhere in the audit, a difference is not excluded by that: var(d) is then taken as
    if one audited item in m + 1 had differed by the range of the scores.

    Parameters
    ----------
    judged : (N,) a judge's score of every item, 0/1 or any number
    human : (N,) people's scores on the same scale, nan where an item was not audited

    Raises
    ------
    InputError
        Different lengths, a score of the judge that is not finite, or fewer than two audited items.

    Examples
    --------
    >>> judged = [1, 1, 0, 1, 0, 1, 1, 1]
    >>> human = [1, 0, 0, 1, np.nan, np.nan, np.nan, np.nan]
    >>> prediction_powered_mean(judged, human).mean  # .75 - .25
    0.5
    """
    checked_level(level)
    j, h = np.asarray(judged, dtype=float), np.asarray(human, dtype=float)
    if j.ndim != 1 or j.shape != h.shape or not np.isfinite(j).all():
        raise InputError(f"give a finite score of the judge for every item and people's, or nan: {j.shape}, {h.shape}")
    audited = ~np.isnan(h)
    n, m = len(j), int(audited.sum())
    if m < 2 or not np.isfinite(h[audited]).all():
        raise InputError(f"{m} items are audited: people must score at least two, drawn at random")
    d = h[audited] - j[audited]  # (m,)
    mean = float(j.mean() + d.mean())
    cov = float(((j[audited] - j[audited].mean()) * (d - d.mean())).sum()) / (m - 1)
    var_d = float(d.var(ddof=1))
    notes: tuple[str, ...] = ()
    scores = np.concatenate([j, h[audited]])
    if m < n and var_d <= 1e-18 * float(np.abs(scores).max()) ** 2:
        var_d, notes = float(np.ptp(scores)) ** 2 / (m + 1), ("the audit saw judge and people differ nowhere",)
    variance = float(j.var(ddof=1)) / n + 2 * cov / n + var_d / m
    if variance > 0:
        law: Law = StudentT(mean, variance, m - 1)
    else:
        law, notes = Unknown(), ("no variance seen",)
    return Interval(mean, max(variance, 0.0), m - 1, m, law, level, notes=notes)
