"""Replay: new examples are released gradually over the run, each coded just before (Bornschein, Li, Hutter 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset, Sampler

from fairtrial.errors import InputError
from fairtrial.seeds import generator


class IndexedDataset(Dataset):
    """A data set whose items begin with their index: ``(index, *item)``.

    >>> IndexedDataset([("a", 0), ("b", 1)])[1]
    (1, 'b', 1)
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        item = self.data[index]
        return (index, *item) if isinstance(item, tuple | list) else (index, item)


class PrequentialSampler(Sampler[list[int]]):
    """Batches of released examples only; all are released over the first share of the run.

    A run of the usual number of steps gives both a final model trained on all data and a code of every label by a model
    that had not seen it::

        for step, batch in enumerate(sampler):
            if len(block := sampler.arrivals(step)):
                meter.update(block, model(x[block]), y[block])
            ...  # train on batch

    Parameters
    ----------
    n : int
        Examples.
    total_steps, batch_size : int
    schedule : {"linear", "geometric"}
        Equal blocks, or blocks that grow with what is known: an equal number of steps a doubling.
    release_by : float
        Share of the steps after which all are released, in (0, 1].
    seed : int
        Of the order and the batches.

    Raises
    ------
    InputError
        If a number is out of range.

    Examples
    --------
    >>> sampler = PrequentialSampler(100, total_steps=50, batch_size=10)
    >>> [len(sampler.arrivals(step)) for step in (0, 1, 49)]
    [10, 2, 0]
    >>> sorted(i for step in range(50) for i in sampler.arrivals(step)) == list(range(100))
    True
    """

    def __init__(
        self,
        n: int,
        total_steps: int,
        batch_size: int,
        *,
        schedule: Literal["linear", "geometric"] = "linear",
        release_by: float = 0.8,
        seed: int = 0,
    ) -> None:
        if min(n, total_steps, batch_size) < 1 or not 0 < release_by <= 1:
            raise InputError(
                f"n={n}, total_steps={total_steps}, batch_size={batch_size}: at least 1; release_by={release_by}: a "
                "share in (0, 1]"
            )
        if schedule not in ("linear", "geometric"):
            raise InputError(f"schedule={schedule!r}: 'linear' or 'geometric'")
        self.n, self.total_steps, self.batch_size, self.seed = n, total_steps, batch_size, seed
        self._order = generator(seed, "order").permutation(n)
        first = min(batch_size, n)
        last = max(1, int(total_steps * release_by)) - 1  # the step that releases the last example
        way = np.minimum(np.arange(total_steps) / max(last, 1), 1.0) if last else np.ones(total_steps)
        known = first + way * (n - first) if schedule == "linear" else first * (n / first) ** way
        self._released = np.floor(known + 1e-9).astype(int)  # examples released before each step's batch
        self._released[last:] = n

    def arrivals(self, step: int) -> np.ndarray:
        """Return the examples released just before the batch of ``step``."""
        if not 0 <= step < self.total_steps:
            raise InputError(f"step={step}: from 0 to {self.total_steps - 1}")
        return self._order[self._released[step - 1] if step else 0 : self._released[step]]

    def __len__(self) -> int:
        return self.total_steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yield batches: what is newest comes first, the rest are drawn from all that is released."""
        rng = generator(self.seed, "batches")
        for step in range(self.total_steps):
            known = self._released[step]
            size = min(self.batch_size, known)
            new = self.arrivals(step)[:size]
            old = known - len(self.arrivals(step))
            drawn = rng.choice(old, size - len(new), replace=False) if size > len(new) else []
            yield [*new.tolist(), *self._order[drawn].tolist()] if len(drawn) else new.tolist()


def split_blocks(n: int, first: int, count: int) -> Sequence[tuple[int, int]]:
    """Return up to ``count`` ranges (start, stop) from ``first`` to ``n``, each as long as what came before it or less.

    >>> split_blocks(100, 10, 3)
    [(10, 22), (22, 46), (46, 100)]
    """
    cuts = np.unique(np.round(first * (n / first) ** np.linspace(0, 1, count + 1)).astype(int))
    return [(int(a), int(b)) for a, b in pairwise(cuts)]
