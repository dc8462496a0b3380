"""Sample gain: what running many splits was worth, what further ones would bring, and when to stop.

g(K) = v1 / V_K, the variance of one split over that of the mean of K. At a fixed training size a single split's
variance falls as 1 / (test size), so g is how many times larger one test set would have to be to tell as much. With a
common correlation r of the splits, g(K) = K / (1 + (K - 1) r), which ends at 1 / r (Kish's design effect).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError
from fairtrial.stats.components import Overlap, PairSums
from fairtrial.stats.moments import VarianceMode, moments_of, moments_of_design
from fairtrial.stats.tables import SplitScores


@dataclass(frozen=True)
class SampleGain:
    """The sample gain of the splits that were run.

    Attributes
    ----------
    value : g(K); nan if the scores do not vary
    variance : V_K, variance of the mean
    ahead : b -> G_b = g(K + b) / g(K) - 1, the relative gain of b further splits; inf -> the remaining gain
    correlation : r of two splits
    """

    value: float
    variance: float
    ahead: dict[float, float]
    correlation: float

    def __str__(self) -> str:
        if np.isnan(self.value):
            return "no variance seen: there is no sample gain"
        more = ", ".join(f"{b} more: {100 * gain:+.3g}%" for b, gain in self.ahead.items())
        return f"sample gain {self.value:.3g} (splits correlate {self.correlation:.2g}; {more})"


def sample_gain(
    scores: SplitScores | ArrayLike,
    *,
    variance: VarianceMode | None = None,
    ahead: Sequence[float] = (1, 5, 10, np.inf),
    kappa: float = 1.0,
) -> SampleGain:
    """Estimate the sample gain of a table of scores, and of further splits of the same kind as those seen.

    The gain ahead is exact for passes of K-fold, random splits and crossed runs in expectation over the further index
    sets; :class:`StopWhenFlat` evaluates planned ones.

    Parameters
    ----------
    scores, variance, kappa : as in :func:`fairtrial.stats.interval`
    ahead : numbers of further splits; ``inf`` for all there could be

    Examples
    --------
    >>> gain = sample_gain(SplitScores.from_folds([0.8, 0.9, 0.7, 0.8], n_test=20, n_train=80))
    >>> round(gain.value, 3), round(gain.ahead[np.inf], 3)
    (2.5, 1.0)
    """
    if any(b <= 0 or (np.isfinite(b) and b != int(b)) for b in ahead):
        raise InputError("ahead counts further splits: give positive whole numbers or inf")
    moments = moments_of(scores, variance, kappa)
    gains = {b: moments.gain_ahead(b) for b in ahead}
    return SampleGain(moments.gain, moments.variance, gains, moments.correlation)


class StopWhenFlat:
    """Stop a cross-validation when further splits no longer pay.

    After each split the components are estimated from those seen, and the gain G_b of the next ``ahead`` splits
    follows. Two looks in a row below ``min_gain`` stop it. Only the variance is looked at, never the effect, so the
    fixed interval stays valid. No look is taken before ``min_splits``, nor before a sample has been tested twice.

    Parameters
    ----------
    min_gain : smallest relative gain worth having
    ahead : b, the number of further splits it must come from
    min_splits : first look; 6 is one pass of 5-fold and one more, 5 will do for random splits
    max_splits : the budget
    plan : the planned splits (train, test), in order from the first; left out, further splits of the same kind as
        those seen
    kappa : as in :func:`fairtrial.stats.design_variance`

    Attributes
    ----------
    gains : G_b at each look

    Examples
    --------
    >>> rng, stop = np.random.default_rng(0), StopWhenFlat(min_gain=0.1)
    >>> hard = rng.random(100) < 0.3
    >>> for splits in range(1, 101):
    ...     order = rng.permutation(100)
    ...     if stop.update(order[20:], order[:20], 1.0 - hard[order[:20]]):
    ...         break
    >>> splits < 30, stop.gains[-1] < 0.1
    (True, True)
    """

    def __init__(
        self,
        min_gain: float = 0.05,
        ahead: int = 5,
        min_splits: int = 6,
        max_splits: int = 100,
        *,
        plan: Iterable[tuple[ArrayLike, ArrayLike]] | None = None,
        kappa: float = 1.0,
    ) -> None:
        if ahead < 1 or min_splits < 2 or max_splits < min_splits:
            raise InputError("give ahead >= 1 and 2 <= min_splits <= max_splits")
        self.min_gain, self.ahead, self.min_splits, self.max_splits = min_gain, ahead, min_splits, max_splits
        self.kappa = kappa
        self.gains: list[float] = []
        self._plan = None if plan is None else [(np.asarray(a, np.int64), np.asarray(b, np.int64)) for a, b in plan]
        self._seen = Overlap(0)  # splits so far
        self._planned = Overlap(0)  # the first splits of the plan, as many as seen and ``ahead`` more
        self._sums: PairSums | None = None

    def update(self, train: ArrayLike, test: ArrayLike, scores: ArrayLike) -> bool:
        """Take in one finished split and say whether to stop.

        Parameters
        ----------
        train, test : index arrays of the split
        scores : (len(test),) its per-sample scores
        """
        train, test = np.asarray(train, dtype=np.int64), np.asarray(test, dtype=np.int64)
        scores = np.asarray(scores, dtype=float)
        if len(scores) != len(test) or len(test) == 0:
            raise InputError(f"split {self._seen.splits}: {len(scores)} scores for {len(test)} test samples")
        if not np.isfinite(scores).all():
            at = int(np.argmin(np.isfinite(scores)))
            raise InputError(f"score {scores[at]} at split {self._seen.splits}, sample {test[at]}: drop or repair it")
        if self._sums is None:
            self._sums = PairSums(0, shift=float(scores.mean()))
        n = 1 + max(int(train.max(initial=-1)), int(test.max()))
        if n > len(self._sums.count):
            self._sums.grow(n)
            self._seen.grow(n)
        self._seen.add(test, train)
        self._sums.add(test, scores)
        if self._seen.splits >= self.max_splits:
            return True
        if self._seen.splits < self.min_splits or not self._sums.sample_tested_twice:
            return False
        self.gains.append(float(self._gain()))
        return len(self.gains) >= 2 and max(self.gains[-2:]) < self.min_gain

    def _gain(self) -> float:
        assert self._sums is not None
        c = self._sums.components()
        if self._plan is None:
            gain = moments_of_design(self._seen, c, self.kappa, np.nan).gain_ahead(self.ahead)
            return 0.0 if np.isnan(gain) else gain  # no variance: nothing to gain
        for train, test in self._plan[self._planned.splits : self._seen.splits + self.ahead]:
            n = 1 + max(int(train.max(initial=-1)), int(test.max()))
            if n > len(self._planned.tested):
                self._planned.grow(n)
            self._planned.add(test, train)
        now, later = sum(self._seen.parts(c, self.kappa)), sum(self._planned.parts(c, self.kappa))
        return now / later - 1 if later > 0 else 0.0
