"""Bounds on the test error of a predictor that a description of so many nats picks out (PAC-MDL).

Occam: with probability 1 - delta, error <= training error + sqrt((DL + log 1/delta) / 2n); with no training errors,
error <= (DL + log 1/delta) / n (Blumer et al. 1987). Tighter, in the binary divergence (McAllester; Seeger 2002):
kl(training error | error) <= (DL + log(2 sqrt n / delta)) / n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fairtrial.errors import InputError


@dataclass(frozen=True)
class Bound:
    """Bounds on the test error, each by itself, of one description length.

    Attributes
    ----------
    occam, kl : float
        At most 1.
    realizable : float or None
        Where the training error is 0.
    vacuous : bool
        Whether even the best is no better than always saying the commonest of balanced classes.
    delta : float
        The chance that a bound fails.
    """

    occam: float
    kl: float
    realizable: float | None
    vacuous: bool
    delta: float


def kl_inverse(p: float, c: float) -> float:
    """Return the largest q in [p, 1] with binary divergence kl(p | q) <= c, in nats.

    >>> q = kl_inverse(0.1, 0.05)
    >>> round(0.1 * math.log(0.1 / q) + 0.9 * math.log(0.9 / (1 - q)), 12)
    0.05
    """
    if not 0 <= p <= 1 or c < 0:
        raise InputError(f"kl_inverse({p}, {c}): a rate in [0, 1] and nats of at least 0 are needed")
    if p == 1:
        return 1.0
    if p == 0:
        return -math.expm1(-c)

    def divergence(q: float) -> float:
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    low, high = p, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if middle < 1 and divergence(middle) <= c:
            low = middle
        else:
            high = middle
    return low


def prequential_bound(
    description: float, n: int, train_error: float, *, num_classes: int, delta: float = 0.05
) -> Bound:
    """Return the bounds for a description of ``description`` nats of a predictor trained on ``n`` examples.

    Parameters
    ----------
    description : nats, such as a regret; a negative one counts as 0.
    n : examples.
    train_error : share of training examples it gets wrong.
    num_classes : a bound above the error of a constant answer among them is vacuous.
    delta : the chance that a bound fails, in (0, 1).

    >>> prequential_bound(20.0, 1000, 0.0, num_classes=10).realizable < 0.03
    True
    """
    if n < 1 or not 0 < delta < 1:
        raise InputError(f"n={n}, delta={delta}: at least one example and a chance in (0, 1) are needed")
    description = max(description, 0.0)
    occam = min(1.0, train_error + math.sqrt((description + math.log(1 / delta)) / (2 * n)))
    kl = kl_inverse(train_error, (description + math.log(2 * math.sqrt(n) / delta)) / n)
    realizable = min(1.0, (description + math.log(1 / delta)) / n) if train_error == 0 else None
    best = min(b for b in (occam, kl, realizable) if b is not None)
    return Bound(occam, kl, realizable, best >= 1 - 1 / num_classes, delta)
