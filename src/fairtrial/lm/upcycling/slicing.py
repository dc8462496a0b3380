"""Which neurons of a feed-forward layer go into which slice: a partition into F sets of equal size.

The same partition serves all domain models, since fine-tunes of one base share the identity of their neurons.
"""

from __future__ import annotations

import torch

from fairtrial.errors import InputError
from fairtrial.lm.upcycling.architectures import DenseFeedForward
from fairtrial.lm.upcycling.experts import check_granularity

PARTITIONS = ("contiguous", "balanced-kmeans")


def partition_neurons(
    dense: DenseFeedForward, granularity: int, *, partition: str = "contiguous", seed: int = 0
) -> torch.Tensor:
    """Return the neurons of each slice, (F, m / F) int64, ascending in each.

    "contiguous" takes them as they come. "balanced-kmeans" clusters the unit rows of the gate (of up, where there is
    none), so that neurons which act together come together (MoEfication): Lloyd's iterations in which every cluster
    takes m / F rows, the rows with most to lose by a second choice first.

    Raises
    ------
    InputError
        An unknown partition, or a granularity that does not divide m.
    """
    m = dense.size[0]
    check_granularity(m, granularity)
    if partition not in PARTITIONS:
        raise InputError(f"partition={partition!r}: give one of {', '.join(PARTITIONS)}")
    if partition == "contiguous" or granularity == 1:
        return torch.arange(m).view(granularity, -1)
    rows = (dense.up if dense.gate is None else dense.gate).float().cpu()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return _balanced_kmeans(rows, granularity, torch.Generator().manual_seed(seed))


def _balanced_kmeans(rows: torch.Tensor, k: int, g: torch.Generator, iterations: int = 10) -> torch.Tensor:
    """Cluster ``rows`` (m, d) into ``k`` clusters of m / k rows; return their indices (k, m / k)."""
    centres = rows[torch.randperm(len(rows), generator=g)[:k]]
    clusters = torch.empty(0)
    for _ in range(iterations):
        found = _balanced(torch.cdist(rows, centres))
        if torch.equal(found, clusters):
            break
        clusters = found
        centres = rows[clusters].mean(1)
    return clusters


def _balanced(distance: torch.Tensor) -> torch.Tensor:
    """Give every cluster as many of the ``distance`` (m, k) rows; return the indices (k, m / k)."""
    m, k = distance.shape
    two = distance.topk(2, dim=1, largest=False).values
    wishes = distance.argsort(dim=1).tolist()
    taken: list[list[int]] = [[] for _ in range(k)]
    for row in (two[:, 1] - two[:, 0]).argsort(descending=True).tolist():
        next(taken[c] for c in wishes[row] if len(taken[c]) < m // k).append(row)
    return torch.tensor([sorted(rows) for rows in taken])
