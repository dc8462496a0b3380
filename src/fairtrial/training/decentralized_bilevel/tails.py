"""How heavy the tails of gradient noise are: the Hill estimate of its tail index."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairtrial.errors import InputError
from fairtrial.seeds import generator

LEAST, DECISIVE = 200, 5000  # draws to estimate from; draws that can tell an index below 2


@dataclass(frozen=True)
class TailIndex:
    """A tail index alpha: P(noise > u) falls as u to the -alpha; moments below alpha are finite.

    Attributes
    ----------
    alpha, low, high : the Hill estimate and its bootstrap interval.
    draws : how many it rests on.
    """

    alpha: float
    low: float
    high: float
    draws: int

    @property
    def infinite_variance(self) -> bool | None:
        """Whether the interval lies below 2; None where it does not say, or rests on fewer than 5000 draws."""
        if self.draws < DECISIVE or self.low <= 2 <= self.high:
            return None
        return self.high < 2

    @property
    def p(self) -> float:
        """The finite moment to give the optimizer: alpha less 0.1, clamped to [1.1, 2]."""
        return clamped(self.alpha)


def tail_index(
    gradients: Callable[[Any], Any] | Any, batches: Iterable[Any] = (), *, level: float = 0.95, seed: int = 0
) -> TailIndex:
    """Estimate the tail index of gradient noise at a fixed point, after Hill, from the largest sqrt(N) of N lengths.

    alpha is the inverse of the mean of log(length / threshold) over the lengths above the threshold; lengths are those
    of the gradients less their mean.

    Parameters
    ----------
    gradients : callable, or array
        ``gradients(batch)`` returns a gradient, any shape; or the gradients themselves, (N, P), or lengths (N,) of
        noise computed elsewhere.
    batches : iterable
        At least 200 batches for the callable; at least 5000 to decide whether the variance is infinite.
    level : float
        Of the bootstrap interval.
    seed : int
        Of the bootstrap.

    Raises
    ------
    InputError
        With fewer than 200 draws, or where more than N - sqrt(N) of them have no noise.

    Examples
    --------
    >>> lengths = np.random.default_rng(0).pareto(1.5, 20_000) + 1
    >>> tail_index(lengths).infinite_variance
    True
    """
    if callable(gradients):
        gradients = [np.ravel(gradients(batch)) for batch in batches]
    try:
        values = np.asarray(gradients, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("tail_index: the draws are no arrays of real numbers of one shape") from None
    if not 0 < level < 1:
        raise InputError(f"tail_index: level={level}, between 0 and 1")
    if values.ndim > 1 and values.size:
        values = values.reshape(len(values), -1)
        values = np.linalg.norm(values - values.mean(0), axis=1)
    if not np.isfinite(values).all():
        raise InputError(f"tail_index: draw {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    if values.size < LEAST:
        raise InputError(f"tail_index: {values.size} draws, at least {LEAST} are needed")
    if values.min() < 0:
        raise InputError("tail_index: some lengths are negative: give gradients of one number as (N, 1)")
    if len(values) < DECISIVE:
        warnings.warn(f"{len(values)} draws cannot tell whether alpha < 2: take {DECISIVE} or more", stacklevel=2)
    rng = generator(seed, "hill")
    again = [hill(rng.choice(values, len(values))) for _ in range(200)]
    low, high = np.quantile(again, [(1 - level) / 2, (1 + level) / 2])
    return TailIndex(hill(values), float(low), float(high), len(values))


def hill(lengths: np.ndarray) -> float:
    """Return the Hill estimate from the largest sqrt(N) of N lengths."""
    k = math.isqrt(len(lengths))
    top = np.sort(lengths)[-k - 1 :]
    if top[0] <= 0:
        raise InputError("tail_index: most draws have no noise at all: give gradients of single batches")
    excess = np.log(top[1:] / top[0]).mean()
    return float(1 / excess) if excess > 0 else math.inf


def clamped(alpha: float) -> float:
    """Return the moment that is safely finite at tail index ``alpha``, in [1.1, 2]."""
    return min(max(alpha - 0.1, 1.1), 2.0)
