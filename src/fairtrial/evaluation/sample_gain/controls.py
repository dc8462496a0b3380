"""What any real interval or stopping rule must beat: a single split, and stopping by the throw of a coin."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import bdtr

from fairtrial.errors import InputError
from fairtrial.evaluation.sample_gain.baselines import finite
from fairtrial.seeds import generator
from fairtrial.stats import Interval, SplitScores, interval, mean_interval


class RandomCoin:
    """Stop by a coin that looks at nothing, at a given mean number of splits.

    From ``min_splits`` on each split is the last with one probability, chosen so that the mean number of splits is
    ``mean_splits`` when none may exceed ``max_splits``.

    Parameters
    ----------
    mean_splits : between ``min_splits`` and ``max_splits``
    seed : the same seed stops at the same split

    Examples
    --------
    >>> coins = [RandomCoin(15, 6, 30, seed=seed) for seed in range(2000)]
    >>> bool(abs(np.mean([coin.last for coin in coins]) - 15) < 0.5)
    True
    """

    def __init__(self, mean_splits: float, min_splits: int = 6, max_splits: int = 100, *, seed: int = 0) -> None:
        if not min_splits <= mean_splits <= max_splits:
            raise InputError(f"mean_splits={mean_splits} is not between {min_splits} and {max_splits}")
        low, high, looks = 0.0, 1.0, max_splits - min_splits
        for _ in range(60):  # the mean falls as the probability p to stop grows: sum over looks of (1 - p)^look
            p = (low + high) / 2
            mean = min_splits + float(((1 - p) ** np.arange(1, looks + 1)).sum())
            low, high = (p, high) if mean > mean_splits else (low, p)
        tails = generator(seed, "RandomCoin").geometric(max(p, 1e-12)) - 1
        self.last = min(min_splits + int(tails), max_splits)
        self.splits = 0

    def update(self, train: ArrayLike, test: ArrayLike, scores: ArrayLike) -> bool:
        """Count one split and say whether it is the last."""
        self.splits += 1
        return self.splits >= self.last


def single_split(scores: SplitScores, *, level: float = 0.95) -> Interval:
    """Interval from the first split alone: binomial of 0/1 scores, else Student's over its test samples.

    It is about this fitted model and not the algorithm: neither training data nor seeds vary.

    Examples
    --------
    >>> one = single_split(SplitScores.from_arrays([[0, 1, 2], [3, 4, 5]], [[1, 1, 0], [1, 1, 1]]))
    >>> round(one.low, 3), round(one.high, 3)
    (0.094, 0.992)
    """
    if scores.score is None:
        raise InputError("a single split needs per-sample scores, and only fold means are known")
    first = scores.take([0])
    if first.support == (0.0, 1.0):
        return interval(first, level=level)
    return mean_interval(scores.score[: scores.starts[1]], level=level)


def sign_test(differences: ArrayLike) -> float:
    """Two-sided exact binomial p-value of the signs of one split's paired differences, ties dropped (McNemar's test).

    Parameters
    ----------
    differences : (m,) one a test sample

    Examples
    --------
    >>> sign_test([1, 1, 1, 0, 1, 1, 1]), sign_test([1, -1, 0])
    (0.03125, 1.0)
    """
    d = finite(differences, "differences")
    wins, count = int((d > 0).sum()), int((d != 0).sum())
    return min(1.0, 2 * float(bdtr(min(wins, count - wins), count, 0.5))) if count else 1.0
