"""When is a word acquired? Accuracy as a function of how often the word was heard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairtrial import stats
from fairtrial.errors import InputError
from fairtrial.seeds import generator

_PRIOR_SLOPE = 2.0  # standard deviation of s, a natural logarithm of frequency
_PRIOR_LEVEL = 5.0  # of the logit at the mean log frequency
_STEPS = 25
_LEAST_SLOPE = 1e-3  # below it no frequency of half performance exists
_BEYOND = math.log(4)  # how far beyond the words' frequencies a threshold may lie
_UNITS = 100  # groups of words that the bootstrap resamples, at most


@dataclass(frozen=True)
class Acquisition:
    """An acquisition curve: p(correct | f) = c + (1 - c) logistic(s (log f - log t)).

    Attributes
    ----------
    t : frequency at which half of what is above guessing is reached; at most a factor of 4 beyond the frequencies of
        the words, which then says no more than 'earlier' or 'later than all of them'.
    t_low, t_high : its 95 % interval over words.
    s : slope a natural logarithm of frequency.
    s_low, s_high : its 95 % interval over words.
    words : how many words it was fitted to.
    chance : the guess rate c, fixed.
    """

    t: float
    t_low: float
    t_high: float
    s: float
    s_low: float
    s_high: float
    words: int
    chance: float

    def accuracy(self, frequency: ArrayLike) -> NDArray[np.float64]:
        """Return the accuracy expected at ``frequency``."""
        logit = self.s * (np.log(frequency) - math.log(self.t))
        return self.chance + (1 - self.chance) / (1 + np.exp(-np.clip(logit, -500, 500)))


def fit_acquisition(
    counts: ArrayLike, correct: ArrayLike, trials: ArrayLike, chance: float, *, draws: int = 300, seed: int = 0
) -> Acquisition:
    """Fit an acquisition curve by penalised maximum likelihood, with a bootstrap over words.

    Parameters
    ----------
    counts : (W,) how often each word occurs, at least 1.
    correct, trials : (W,) items right (ties count a half) and items in all, of each word.
    chance : guess rate in [0, 1).
    draws, seed : of the bootstrap.

    Returns
    -------
    Acquisition
        Weak normal priors keep the fit finite: standard deviation 2 for the slope, 5 for the logit at the mean. With
        fewer than 8 words the intervals are infinite. Of more than 100 words, 100 random groups are resampled.

    Raises
    ------
    InputError
        Fewer than two frequencies, counts below 1, more right than there are items, a chance outside [0, 1).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> f = np.exp(rng.uniform(0, 8, 400))
    >>> p = 0.5 + 0.5 / (1 + np.exp(-1.2 * (np.log(f) - np.log(50))))
    >>> fit = fit_acquisition(f, rng.binomial(10, p), np.full(400, 10), 0.5)
    >>> bool(fit.t_low < 50 < fit.t_high), bool(fit.s_low < 1.2 < fit.s_high)
    (True, True)
    """
    columns = [np.asarray(a, dtype=float) for a in (counts, correct, trials)]
    if len({column.shape for column in columns}) > 1 or columns[0].ndim != 1:
        raise InputError(
            f"counts, correct and trials have shapes {', '.join(str(c.shape) for c in columns)}: give (W,) each"
        )
    table = np.stack(columns, axis=-1)  # (W, 3)
    if not (table[:, 0] >= 1).all() or len(np.unique(table[:, 0])) < 2 or not np.isfinite(table).all():
        raise InputError("an acquisition curve needs words of two frequencies or more, each at least 1")
    if not ((table[:, 1] >= 0) & (table[:, 1] <= table[:, 2])).all():
        raise InputError("correct must lie between 0 and trials for every word")
    if not 0 <= chance < 1:
        raise InputError(f"chance={chance}: give a guess rate from 0 to below 1")
    log_f = np.log(table[:, 0])
    centre, least, most = float(log_f.mean()), log_f.min() - _BEYOND, log_f.max() + _BEYOND
    table[:, 0] = log_f - centre
    units = _grouped(table, generator(seed, "acquisition"))  # (U, m, 3)

    def threshold(rows: Any) -> Any:
        level, slope = _fit(rows.reshape(len(rows), -1, 3), chance)
        return np.clip(centre - level / np.maximum(slope, _LEAST_SLOPE), least, most)

    def steepness(rows: Any) -> Any:
        return _fit(rows.reshape(len(rows), -1, 3), chance)[1]

    log_t = stats.bootstrap(units, threshold, draws=draws, seed=seed, vectorized=True)
    slope = stats.bootstrap(units, steepness, draws=draws, seed=seed, vectorized=True)
    t, t_low, t_high = (float(np.exp(x)) for x in (log_t.mean, log_t.low, log_t.high))
    return Acquisition(t, t_low, t_high, slope.mean, slope.low, slope.high, len(table), chance)


def _grouped(table: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Deal words (W, 3) at random into groups of one size (U, m, 3), filled up with words of no trial."""
    units = min(len(table), _UNITS)
    size = math.ceil(len(table) / units)
    filled = np.concatenate([rng.permutation(table), np.zeros((units * size - len(table), 3))])
    return filled.reshape(size, units, 3).swapaxes(0, 1)


def _fit(rows: NDArray[np.float64], chance: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (level, slope), each (B,), of B data sets (B, W, 3) of centred log f, correct and trials.

    Fisher scoring: with p = c + (1 - c) q, q logistic, the working weight is n (dp)^2 / (p (1 - p)).
    """
    x, right, trials = rows[..., 0], rows[..., 1], rows[..., 2]  # (B, W)
    level, slope = np.zeros(len(rows)), np.zeros(len(rows))
    for _ in range(_STEPS):
        q = 1 / (1 + np.exp(-np.clip(level[:, None] + slope[:, None] * x, -30, 30)))
        p = chance + (1 - chance) * q
        dp = (1 - chance) * q * (1 - q)
        gain = dp / np.maximum(p * (1 - p), 1e-12)
        residual, weight = (right - trials * p) * gain, trials * dp * gain
        g0 = residual.sum(1) - level / _PRIOR_LEVEL**2
        g1 = (residual * x).sum(1) - slope / _PRIOR_SLOPE**2
        h00 = weight.sum(1) + 1 / _PRIOR_LEVEL**2
        h01 = (weight * x).sum(1)
        h11 = (weight * x * x).sum(1) + 1 / _PRIOR_SLOPE**2
        determinant = h00 * h11 - h01**2
        step0 = np.clip((h11 * g0 - h01 * g1) / determinant, -1, 1)  # bounded: the likelihood is not concave
        step1 = np.clip((h00 * g1 - h01 * g0) / determinant, -1, 1)
        level, slope = level + step0, slope + step1
        if max(np.abs(step0).max(), np.abs(step1).max()) < 1e-5:
            break
    return level, slope
