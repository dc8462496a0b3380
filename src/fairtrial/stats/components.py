"""Variance components of a table of scores, and the variance of its mean that follows from the index sets.

The score of sample i in split k is modelled as  e_ki = mu + t_k + s_i + q_ki:  t_k is what moves a whole split (seed,
partition, collapse), s_i how hard the sample is in every split that tests it, q_ki the rest. The components come from
the half mean squared differences over three kinds of pairs of rows (unbiased without normality),

    A  same sample, other split:  v_t + v_q
    B  same split, other sample:  v_s + v_q
    C  neither:                   v_t + v_s + v_q

each of them O(rows), because the sum over the pairs of a group of (x - y)^2 / 2 is (count sum x^2 - (sum x)^2) / 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError
from fairtrial.stats.tables import Array, SplitScores


@dataclass(frozen=True)
class Components:
    """Variances of the parts of a score.

    Attributes
    ----------
    split, sample, interaction : v_t, v_s, v_q, clipped to v_t >= 0, 0 <= v_s <= B, v_q = B - v_s
    residual_df : rows - splits - samples + 1, or 0 where that is negative
    raw : the three before clipping; nan where the table cannot tell (no sample tested twice)
    single_run : v_q of single runs where ``interaction`` is of an average over runs (seeds) of the same split
    """

    split: float
    sample: float
    interaction: float
    residual_df: int = 0
    raw: tuple[float, float, float] | None = None
    single_run: float | None = None

    @property
    def training(self) -> float:
        """What stands in for the influence of training samples, v_h / kappa: the interaction of a single run."""
        return self.interaction if self.single_run is None else self.single_run


class PairSums:
    """Sums from which A, B and C follow; splits may be added one at a time, each in O(its rows).

    Scores are centred by ``shift`` (any value near their mean) before they are squared.
    """

    def __init__(self, n: int, shift: float) -> None:
        self.shift = shift
        self.count: Array = np.zeros(n)  # by sample
        self.total: Array = np.zeros(n)
        self.square: Array = np.zeros(n)
        self.splits = 0
        self.split_pairs = self.split_sum = 0.0  # ordered pairs in one split, and their sum of (x - y)^2 / 2

    def add(self, test: Array, scores: Array) -> None:
        """Add one split: ``scores[j]`` is the score of sample ``test[j]``."""
        x = scores - self.shift
        self.count[test] += 1
        self.total[test] += x
        self.square[test] += x * x
        self.splits += 1
        self.split_pairs += len(x) * (len(x) - 1)
        self.split_sum += len(x) * float(x @ x) - float(x.sum()) ** 2

    def grow(self, n: int) -> None:
        """Make room for samples up to number ``n`` - 1."""
        more = np.zeros(n - len(self.count))
        self.count, self.total, self.square = (np.r_[x, more] for x in (self.count, self.total, self.square))

    @property
    def sample_tested_twice(self) -> bool:
        """Whether A is defined."""
        return bool((self.count > 1).any())

    def components(self) -> Components:
        """Form A, B, C and solve them for the components."""
        rows, total, square = (float(x.sum()) for x in (self.count, self.total, self.square))
        sample_pairs = float((self.count * (self.count - 1)).sum())
        sample_sum = float((self.count * self.square - self.total**2).sum())
        other_pairs = rows * (rows - 1) - sample_pairs - self.split_pairs
        other_sum = rows * square - total**2 - sample_sum - self.split_sum
        tested = int(np.count_nonzero(self.count))
        if tested < 2:
            raise InputError("the table has one sample: its components need two or more, or give the split means")
        a = sample_sum / sample_pairs if sample_pairs else np.nan
        b = self.split_sum / self.split_pairs if self.split_pairs else np.nan
        c = other_sum / other_pairs if other_pairs else np.nan
        # A split of one sample each (leave-one-out) cannot tell v_t from the rest: C stands in for B. One split
        # cannot either: B stands in for C. Disjoint tests (one K-fold pass): v_s = 0, the conservative choice.
        within = b if np.isfinite(b) else c
        across = c if np.isfinite(c) else b
        sample = min(max(float(across - a), 0.0), float(within)) if np.isfinite(a) else 0.0
        return Components(
            split=max(float(across - within), 0.0),
            sample=sample,
            interaction=max(float(within - sample), 0.0),
            residual_df=max(0, int(rows) - self.splits - tested + 1),
            raw=(float(c - b), float(c - a), float(a + b - c)),
        )


def variance_components(scores: SplitScores) -> Components:
    """Estimate the components by the method of moments, in one pass over the rows.

    Raises
    ------
    InputError
        Only fold means are known, or there is a single sample.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> split, sample = np.repeat(np.arange(40), 500), np.tile(np.arange(500), 40)
    >>> score = rng.normal(size=40)[split] + 2 * rng.normal(size=500)[sample] + rng.normal(size=20_000)
    >>> c = variance_components(SplitScores.from_rows(split, sample, score))
    >>> bool(abs(c.sample - 4) < 0.5), bool(abs(c.interaction - 1) < 0.1)
    (True, True)
    """
    if scores.score is None or scores.split is None or scores.sample is None or scores.samples is None:
        raise InputError("components need per-sample scores, and only fold means are known: use from_rows")
    x = scores.score - scores.score.mean()
    sums = PairSums(len(scores.samples), shift=0.0)
    sums.count = np.bincount(scores.sample, minlength=len(scores.samples)).astype(float)
    sums.total = np.bincount(scores.sample, x, minlength=len(scores.samples))
    sums.square = np.bincount(scores.sample, x * x, minlength=len(scores.samples))
    by_split, square_by_split = (np.add.reduceat(values, scores.starts[:-1]) for values in (x, x * x))
    sums.splits = scores.n_splits
    sums.split_pairs = float((scores.n_test * (scores.n_test - 1)).sum())
    sums.split_sum = float((scores.n_test * square_by_split - by_split**2).sum())
    return sums.components()


class Overlap:
    """How much the splits of a design share: running vectors over the samples, O(n) or less a split.

    Holds K W_i (``tested``) and K U_i (``base + trained``) of  W_i = sum_k w_k 1[i in T_k] / m_k,
    U_i = sum_k w_k 1[i in S_k] / n1_k  with w_k = 1 / K.
    """

    def __init__(self, n: int) -> None:
        self.splits = 0
        self.tested: Array = np.zeros(n)
        self.trained: Array = np.zeros(n)
        self.base = 0.0  # splits that train on their complement add 1 / n1 to every sample and take it from the tested
        self.inverse_test = self.inverse_train = 0.0  # sum 1 / m_k and sum 1 / n1_k
        self.folds: int | None = None  # splits in a K-fold pass, once one pass has tested every sample exactly once
        self._unseen: int = n  # samples the first pass has still to test; negative once one was tested twice

    def add(self, test: Array, train: Array | None = None) -> None:
        """Add a split; without ``train`` it trained on all samples it does not test (on nothing if it tests all)."""
        if self.folds is None and self._unseen > 0:
            self._unseen = -1 if self.tested[test].any() else self._unseen - len(test)
            self.folds = self.splits + 1 if self._unseen == 0 else None
        self.splits += 1
        self.tested[test] += 1 / len(test)
        self.inverse_test += 1 / len(test)
        size = len(self.trained) - len(test) if train is None else len(train)
        if size == 0:
            return
        self.inverse_train += 1 / size
        if train is None:
            self.base += 1 / size
            self.trained[test] -= 1 / size
        else:
            self.trained[train] += 1 / size

    def grow(self, n: int) -> None:
        """Make room for samples up to number ``n`` - 1 (splits so far must have named their training sets)."""
        more = np.zeros(n - len(self.tested))
        self._unseen += len(more) if self.folds is None and self._unseen >= 0 else 0
        self.tested, self.trained = np.r_[self.tested, more], np.r_[self.trained, more]

    def parts(self, c: Components, kappa: float) -> tuple[float, float, float, float]:
        """Return the contributions to V of v_t, v_s, v_q and v_h = ``kappa`` v_q."""
        square = self.splits**2
        trained = self.trained + self.base
        return (
            c.split / self.splits,
            c.sample * float(self.tested @ self.tested) / square,
            c.interaction * self.inverse_test / square,
            kappa * c.training * (float(trained @ trained) - self.inverse_train) / square,
        )


def design_variance(splits: Sequence[tuple[ArrayLike, ArrayLike]], c: Components, kappa: float = 1.0) -> float:
    """Variance of the mean over ``splits``, from their index sets.

    V = v_t sum w^2 + v_s sum_i W_i^2 + v_q sum w^2 / m + kappa v_q (sum_i U_i^2 - sum w^2 / n1),  w = 1 / K.

    The last term is the covariance of splits that share training samples: by first-order influence it is
    |S_j & S_k| v_h / (n1_j n1_k). v_h cannot be identified from a few splits, so it is closed as ``kappa`` v_q: an
    assumption, not a theorem (measured: .4 to 2.2). For random splits with test share p and v_t = 0 the correlation
    of two splits is then p in expectation, which is Nadeau and Bengio's.

    Parameters
    ----------
    splits : K pairs (train, test) of index arrays, as scikit-learn's splitters yield them
    c : components of the scores
    kappa : v_h / v_q; 0 for no shared training (a crossed design)

    Examples
    --------
    One K-fold pass, no split component, no training term: exactly the variance of a mean of n.

    >>> folds = np.arange(20).reshape(5, 4)
    >>> splits = [(np.setdiff1d(np.arange(20), test), test) for test in folds]
    >>> round(design_variance(splits, Components(0.0, 0.0, 2.0), kappa=0.0), 12)
    0.1
    """
    pairs = [(np.asarray(train, dtype=np.int64), np.asarray(test, dtype=np.int64)) for train, test in splits]
    overlap = Overlap(1 + max((int(indices.max(initial=-1)) for pair in pairs for indices in pair), default=-1))
    for train, test in pairs:
        overlap.add(test, train)
    if overlap.splits == 0:
        raise InputError("the design has no splits: give at least one pair (train, test)")
    return sum(overlap.parts(c, kappa))
