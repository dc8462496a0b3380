"""The table every statistic here starts from: which split scored which sample, and what that split was trained on.

A row is one test score: (split, sample, score). Splits are the columns of a cross-validation, or the runs of a crossed
design (every seed answers the same items). Where only fold means are known, :meth:`SplitScores.from_folds` keeps those
with the sizes of the folds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairtrial.errors import InputError

Array = NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class SplitScores:
    """Test scores of K splits; build it with ``from_rows``, ``from_arrays`` or ``from_folds``.

    Rows are kept sorted by (split, sample), so the order in which they came never matters.

    Attributes
    ----------
    labels : (K,) labels of the splits, in split order
    means : (K,) mean score of each split
    n_test, n_train : (K,) sizes of the test and training sets
    samples : (N,) labels of all samples, tested or trained on; None if only fold means are known
    split, sample : (R,) row indices into ``labels`` and ``samples``; None likewise
    score : (R,) scores; None likewise
    train : K sorted arrays of indices into ``samples``; None where each split trains on all it does not test
    scale : the largest magnitude of the scores these were made from; decides what counts as zero
    support : (0, 1) if every score is 0 or 1, (-1, 1) for differences of such scores, else None
    """

    labels: Array
    means: Array
    n_test: Array
    n_train: Array
    samples: Array | None = None
    split: Array | None = None
    sample: Array | None = None
    score: Array | None = None
    train: tuple[Array, ...] | None = None
    scale: float = 0.0
    support: tuple[float, float] | None = None

    @classmethod
    def from_rows(
        cls,
        split: ArrayLike,
        sample: ArrayLike,
        score: ArrayLike,
        train: Sequence[ArrayLike] | None = None,
        *,
        seeds: Sequence[object] | None = None,
    ) -> SplitScores:
        """Make the table from three columns of equal length.

        Parameters
        ----------
        split, sample : (R,) labels (numbers or strings); splits are ordered by their sorted labels
        score : (R,) finite scores
        train : the sample labels each split was trained on, in split order; left out, it is the complement of the
            split's test set among all samples seen
        seeds : the seed of each split's fit, in split order, if known: one seed for all of them is warned about

        Raises
        ------
        InputError
            Unequal lengths, no rows, a score that is not finite, a sample twice in one split, a sample in both train
            and test.

        Examples
        --------
        >>> scores = SplitScores.from_rows([0, 0, 1, 1], ["a", "b", "b", "c"], [1, 0, 1, 1])
        >>> scores.means, scores.n_train
        (array([0.5, 1. ]), array([1, 1]))
        """
        columns = [np.asarray(column) for column in (split, sample, score)]
        if any(column.ndim != 1 or len(column) != len(columns[0]) for column in columns):
            shapes = ", ".join(str(column.shape) for column in columns)
            raise InputError(f"split, sample and score have shapes {shapes}: give three columns of one length")
        labels, split_code = encode(columns[0])
        if train is None:
            samples, sample_code = encode(columns[1])
            return cls._from_codes(labels, samples, split_code, sample_code, columns[2], None, seeds)
        trains = [np.asarray(labels_of_split) for labels_of_split in train]
        samples, codes = encode(np.concatenate([columns[1], *trains]))
        parts = np.split(codes, np.cumsum([len(columns[1]), *map(len, trains)])[:-1])
        return cls._from_codes(labels, samples, split_code, parts[0], columns[2], parts[1:], seeds)

    @classmethod
    def from_arrays(
        cls,
        test: Sequence[ArrayLike],
        scores: Sequence[ArrayLike],
        train: Sequence[ArrayLike] | None = None,
        n: int | None = None,
        *,
        seeds: Sequence[object] | None = None,
    ) -> SplitScores:
        """Make the table from index arrays, as scikit-learn's splitters give them.

        Parameters
        ----------
        test : K arrays of sample indices
        scores : K arrays of scores, aligned with ``test``
        train : K arrays of sample indices; left out, each is the complement of the test set in ``range(n)``
        n : number of samples; left out, one more than the largest index
        seeds : as in :meth:`from_rows`

        Raises
        ------
        InputError
            As in :meth:`from_rows`; indices that are no whole numbers (a mask is none) or outside ``range(n)``.

        Examples
        --------
        >>> SplitScores.from_arrays([[0, 1], [2, 3]], [[1.0, 0.0], [1.0, 1.0]]).n_train
        array([2, 2])
        """
        tests = [_indices(indices, "test", k) for k, indices in enumerate(test)]
        values = [np.asarray(v) for v in scores]
        if [len(t) for t in tests] != [len(v) for v in values]:
            raise InputError("test and scores differ in their lengths: give one score for each tested sample")
        trains = None if train is None else [_indices(indices, "train", k) for k, indices in enumerate(train)]
        everything = np.concatenate([np.zeros(0, np.int64), *tests, *(trains or [])])
        needed = int(everything.max(initial=-1)) + 1
        n = needed if n is None else n
        if needed > n or everything.min(initial=0) < 0:
            raise InputError(f"sample index {needed - 1 if needed > n else everything.min()} is outside range({n})")
        split_code = np.repeat(np.arange(len(tests)), [len(t) for t in tests])
        labels, samples = np.arange(len(tests)), np.arange(n)
        sample_code = everything[: len(split_code)]
        flat = np.concatenate(values) if values else np.zeros(0)
        return cls._from_codes(labels, samples, split_code, sample_code, flat, trains, seeds)

    @classmethod
    def from_folds(cls, means: ArrayLike, n_test: ArrayLike, n_train: ArrayLike) -> SplitScores:
        """Keep only the mean score of each split, with the sizes (one number, or one a split) of its two sets.

        Examples
        --------
        >>> SplitScores.from_folds([0.8, 0.9, 0.7], n_test=20, n_train=80).n_splits
        3
        """
        values = _finite(np.asarray(means, dtype=float).ravel(), "the mean of split {}", np.arange(np.size(means)))
        test, train = (np.broadcast_to(np.asarray(size), values.shape) for size in (n_test, n_train))
        if not ((test > 0) & (train > 0) & np.isfinite(test) & np.isfinite(train)).all():
            raise InputError("n_test and n_train must be positive: they are numbers of samples")
        return cls(np.arange(len(values)), values, test, train, scale=float(np.abs(values).max(initial=0.0)))

    @classmethod
    def _from_codes(
        cls,
        labels: Array,
        samples: Array,
        split: Array,
        sample: Array,
        score: Array,
        train: Sequence[Array] | None,
        seeds: Sequence[object] | None = None,
    ) -> SplitScores:
        if len(split) == 0:
            raise InputError("the score table has no rows: give at least one split with test scores")
        if train is not None and len(train) != len(labels):
            raise InputError(f"train has {len(train)} index arrays for {len(labels)} splits: give one a split")
        if seeds is not None and len(seeds) != len(labels):
            raise InputError(f"seeds has {len(seeds)} entries for {len(labels)} splits: give one a split")
        if seeds is not None and len(labels) > 1 and len(set(seeds)) == 1:
            warnings.warn("one seed for all splits: the verdict is for that seed only", stacklevel=3)
        score = np.asarray(score, dtype=float)
        key = split.astype(np.int64) * len(samples) + sample
        step = np.diff(key)
        if (step <= 0).any():
            order = np.argsort(key)
            split, sample, score, step = split[order], sample[order], score[order], np.diff(key[order])
            if (step == 0).any():
                at = int(np.argmin(step))
                raise InputError(
                    f"sample {samples[sample[at]]} appears twice in split {labels[split[at]]}: "
                    "give each run (seed) of a split its own split label"
                )
        if not np.isfinite(score).all():
            at = int(np.argmin(np.isfinite(score)))
            raise InputError(
                f"score {score[at]} at split {labels[split[at]]}, sample {samples[sample[at]]}: "
                "drop or repair it, or give the worst score of the metric"
            )
        n_test = np.bincount(split, minlength=len(labels))
        if (n_test == 0).any():
            raise InputError(f"split {labels[np.argmin(n_test)]} has no test scores: leave that split out")
        table = cls(
            labels=labels,
            means=np.bincount(split, score, minlength=len(labels)) / n_test,
            n_test=n_test,
            n_train=len(samples) - n_test,
            samples=samples,
            split=split,
            sample=sample,
            score=score,
            scale=float(np.abs(score).max()),
            support=(0.0, 1.0) if ((score == 0) | (score == 1)).all() else None,
        )
        return table if train is None else table._with_train(train)

    def _with_train(self, train: Sequence[Array]) -> SplitScores:
        assert self.samples is not None
        sets = tuple(np.unique(codes) for codes in train)
        tested = np.zeros(len(self.samples), dtype=bool)
        for k, codes in enumerate(sets):
            test = self.test(k)
            tested[test] = True
            both = codes[tested[codes]]
            tested[test] = False
            if len(both):
                raise InputError(
                    f"sample {self.samples[both[0]]} is in both the training and the test set of split "
                    f"{self.labels[k]}: a test sample must not be trained on"
                )
        return replace(self, train=sets, n_train=np.array([len(codes) for codes in sets]))

    def __repr__(self) -> str:
        rows = (
            ""
            if self.samples is None or self.score is None
            else f", {len(self.samples)} samples, {len(self.score)} rows"
        )
        return f"SplitScores({self.n_splits} splits{rows})"

    @property
    def n_splits(self) -> int:
        """K, the number of splits."""
        return len(self.means)

    @cached_property
    def starts(self) -> Array:
        """(K + 1,) offsets of the splits in the rows."""
        return np.concatenate([[0], np.cumsum(self.n_test)])

    @cached_property
    def n_tested(self) -> int:
        """Number of distinct samples that any split tested."""
        assert self.sample is not None
        return int(np.count_nonzero(np.bincount(self.sample)))

    def test(self, k: int) -> Array:
        """Return the indices (into ``samples``) that split number ``k`` tested, ascending."""
        assert self.sample is not None
        return self.sample[self.starts[k] : self.starts[k + 1]]

    def by_group(self, groups: ArrayLike) -> SplitScores:
        """Average rows to (split, group): with groups, the group is the unit that is sampled.

        Parameters
        ----------
        groups : (N,) group label of each sample, in the order of ``samples``

        Raises
        ------
        InputError
            Only fold means are known, the length is wrong, or a group is on both sides of a split.

        Examples
        --------
        >>> scores = SplitScores.from_arrays([[0, 1, 2], [3]], [[1, 0, 1], [1]])
        >>> scores.by_group(["a", "a", "b", "c"]).score
        array([0.5, 1. , 1. ])
        """
        if self.samples is None or self.split is None or self.sample is None:
            raise InputError("groups need per-sample scores, and only fold means are known: build it from rows")
        labels, of_sample = encode(np.asarray(groups))
        if len(of_sample) != len(self.samples):
            raise InputError(f"groups has {len(of_sample)} labels for {len(self.samples)} samples: give one a sample")
        group = of_sample[self.sample]
        key, cell = np.unique(self.split * len(labels) + group, return_inverse=True)
        mean = np.bincount(cell, self.score) / np.bincount(cell)
        trains = self.train
        if trains is None:  # the complement of samples; of groups it must be the complement too
            tested = np.zeros((self.n_splits, len(labels)), dtype=np.int64)
            np.add.at(tested, (self.split, group), 1)
            partly = (tested > 0) & (tested < np.bincount(of_sample))
            if partly.any():
                k, g = np.argwhere(partly)[0]
                raise InputError(f"group {labels[g]} is on both sides of split {self.labels[k]}: keep groups together")
        else:
            for k, codes in enumerate(trains):
                both = np.intersect1d(of_sample[codes], of_sample[self.test(k)])
                if len(both):
                    raise InputError(
                        f"group {labels[both[0]]} is on both sides of split {self.labels[k]}: keep groups together"
                    )
        grouped = None if trains is None else [of_sample[codes] for codes in trains]
        table = self._from_codes(self.labels, labels, key // len(labels), key % len(labels), mean, grouped)
        return replace(table, scale=self.scale)

    def minus(self, other: SplitScores) -> SplitScores:
        """Return the table of differences; both must have the same splits, samples and training sets.

        Raises
        ------
        InputError
            The split sets differ; the message names the first split that does.
        """
        if (self.score is None) != (other.score is None):
            raise InputError("one candidate has per-sample scores and the other only fold means: give both alike")
        if self.n_splits != other.n_splits or not np.array_equal(self.labels, other.labels):
            raise InputError(f"the candidates' splits differ, first at {_first_difference(self.labels, other.labels)}")
        scale = max(self.scale, other.scale)
        if self.score is None or other.score is None:
            if not (np.array_equal(self.n_test, other.n_test) and np.array_equal(self.n_train, other.n_train)):
                raise InputError("the candidates' fold sizes differ: run both on identical splits")
            return replace(self, means=self.means - other.means, scale=scale)
        for k, label in enumerate(self.labels):
            if not self._same_split(other, k):
                raise InputError(f"the candidates' splits differ, first at split {label}: run both on identical splits")
        both_binary = self.support == (0.0, 1.0) == other.support
        return replace(
            self,
            means=self.means - other.means,
            score=self.score - other.score,
            scale=scale,
            support=(-1.0, 1.0) if both_binary else None,
        )

    def _same_split(self, other: SplitScores, k: int) -> bool:
        assert self.samples is not None
        assert other.samples is not None
        pairs = [(self.test(k), other.test(k))]
        if self.train is not None and other.train is not None:
            pairs.append((self.train[k], other.train[k]))
        elif self.n_train[k] != other.n_train[k]:
            return False
        if self.samples is other.samples:
            return all(np.array_equal(a, b) for a, b in pairs)
        return all(np.array_equal(self.samples[a], other.samples[b]) for a, b in pairs)

    def take(self, splits: ArrayLike) -> SplitScores:
        """Return the table of the splits numbered ``splits`` only; sets and sample labels stay as they are."""
        chosen = np.asarray(splits, dtype=np.int64)
        rows = {}
        if self.score is not None and self.sample is not None:
            index = np.concatenate([np.arange(self.starts[k], self.starts[k + 1]) for k in chosen])
            rows = {
                "split": np.repeat(np.arange(len(chosen)), self.n_test[chosen]),
                "sample": self.sample[index],
                "score": self.score[index],
                "train": None if self.train is None else tuple(self.train[k] for k in chosen),
            }
        columns = {name: getattr(self, name)[chosen] for name in ("labels", "means", "n_test", "n_train")}
        return replace(self, **columns, **rows)

    def average_runs(self) -> tuple[SplitScores, list[SplitScores]]:
        """Average the runs (seeds) of one split: splits with the same test and the same training set.

        Returns
        -------
        averaged : one split for each distinct pair of sets
        single : tables of one run of each split (those that every split has); ``[averaged]`` if none was repeated

        Warns
        -----
        UserWarning
            Splits are copies of one another, scores included: they are dropped, as they carry no information.
        """
        runs: dict[tuple[bytes, bytes], list[int]] = {}  # the two sets -> numbers of the splits that have them
        for k in range(self.n_splits):
            train = b"" if self.train is None else self.train[k].tobytes()
            runs.setdefault((self.test(k).tobytes(), train), []).append(k)
        if len(runs) == self.n_splits:
            return self, [self]
        distinct, copies = [], 0
        for same in runs.values():
            kept: list[int] = []
            for k in same:
                if any(np.allclose(self._scores(k), self._scores(j), rtol=0, atol=1e-12 * self.scale) for j in kept):
                    copies += 1
                else:
                    kept.append(k)
            distinct.append(kept)
        if copies:
            warnings.warn(
                f"{copies} splits repeat others, scores included, and are dropped: they add no information",
                stacklevel=4,
            )
        single = [self.take([kept[run] for kept in distinct]) for run in range(min(map(len, distinct)))]
        if max(map(len, distinct)) == 1:
            return single[0], single
        score = np.concatenate([np.mean([self._scores(k) for k in kept], axis=0) for kept in distinct])
        means = np.array([self.means[kept].mean() for kept in distinct])
        return replace(single[0], score=score, means=means), single

    def _scores(self, k: int) -> Array:
        assert self.score is not None
        return self.score[self.starts[k] : self.starts[k + 1]]


def encode(labels: Array) -> tuple[Array, Array]:
    """Sorted distinct labels, and the index of each entry in them; O(rows) for integers of a moderate range."""
    if labels.ndim == 1 and labels.size and np.issubdtype(labels.dtype, np.integer):
        low = int(labels.min())
        span = int(labels.max()) - low + 1
        if span <= 4 * labels.size + 1000:
            seen = np.zeros(span, dtype=bool)
            seen[labels - low] = True
            return np.flatnonzero(seen) + low, (np.cumsum(seen) - 1)[labels - low]
    values, codes = np.unique(labels, return_inverse=True)
    return values, codes


def _indices(given: ArrayLike, name: str, split: int) -> Array:
    """Return sample indices as int64; refuse masks, fractions and text, which a cast would turn into other samples."""
    found = np.asarray(given)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        what = f"{found.dtype} of shape {found.shape}"
        raise InputError(f"{name} of split {split} is {what}: give sample indices, whole numbers (n,)")
    return found.astype(np.int64, copy=False)


def _finite(values: Array, what: str, names: Array) -> Array:
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise InputError(f"{what.format(names[bad[0]])} is {values[bad[0]]}: drop or repair it")
    return values


def _first_difference(a: Array, b: Array) -> str:
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return f"split number {position} ({left} and {right}): run both on identical splits"
    rest = (a if len(a) > len(b) else b)[min(len(a), len(b))]
    return f"split {rest}, which only one has: run both on identical splits"
