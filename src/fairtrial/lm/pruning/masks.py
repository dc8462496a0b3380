"""Which weights go: exact counts in comparison groups, and N:M patterns.

A mask is boolean, (out, in), ``True`` where the weight is kept. Scores say how much a weight matters; in every group
the lowest go, ties in order of index, so that the same scores give the same mask on every device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fairtrial.errors import InputError, UnknownNameError

Group = Literal["row", "layer", "block"]


def lowest(scores: Tensor, count: int) -> Tensor:
    """Mark exactly ``count`` lowest entries along the last dimension, ties by index.

    Parameters
    ----------
    scores
        (..., n), without NaN.
    count
        0..n.

    Returns
    -------
    Tensor
        Boolean, of the shape of ``scores``.

    Examples
    --------
    >>> lowest(torch.tensor([3.0, 1.0, 2.0, 1.0, 1.0]), 2)
    tensor([False,  True, False,  True, False])
    """
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(count, dim=-1, keepdim=True).values  # selection, not a sort of everything
    marked = scores <= threshold
    surplus = marked.sum(-1, keepdim=True) - count
    if surplus.any():
        tied = scores == threshold
        rank = tied.cumsum(-1, dtype=torch.int32)
        marked &= ~tied | (rank <= rank[..., -1:] - surplus)
    return marked


def zeros_among(n: int, sparsity: float) -> int:
    """Return how many of ``n`` weights are zero at a sparsity: floor(sparsity * n) of the number as it is written.

    The product of floats may fall just short of a whole number, by far less than the margin added here.

    >>> zeros_among(100, 0.57), int(0.57 * 100)
    (57, 56)
    """
    return math.floor(sparsity * n * (1 + 1e-12) + 1e-9)


def parse_pattern(pattern: str) -> tuple[int, int]:
    """Return (N, M) of a pattern "N:M": of every M consecutive inputs N are kept.

    >>> parse_pattern("2:4")
    (2, 4)
    """
    match = re.fullmatch(r"(\d+):(\d+)", pattern)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise UnknownNameError("pattern", pattern, ["2:4", "4:8", "N:M with 0 < N < M"])
    return int(match[1]), int(match[2])


def keep_masks(
    scores: Mapping[str, Tensor], sparsity: float, *, group: Group = "row", pattern: str | None = None
) -> dict[str, Tensor]:
    """Choose the weights of a set of matrices that are kept.

    Parameters
    ----------
    scores
        (out, in) by name; with group "block" they are compared across matrices as they are.
    sparsity
        Share of zeros in [0, 1); ignored where ``pattern`` fixes it.
    group
        What competes: each output "row" (exactly floor(sparsity * in) zeros in each), each matrix ("layer": exactly
        floor(sparsity * out * in)), or all matrices together ("block").
    pattern
        "N:M": of every M consecutive inputs exactly N are kept.

    Returns
    -------
    dict of str to Tensor
        Boolean (out, in) by name, ``True`` = kept.

    Examples
    --------
    >>> keep_masks({"w": torch.tensor([[4.0, 1.0, 3.0, 2.0]])}, 0.5)["w"]
    tensor([[ True, False,  True, False]])
    """
    check_sparsity(sparsity)
    if pattern is not None:
        n, m = parse_pattern(pattern)
        for name, s in scores.items():
            if s.shape[1] % m:
                raise InputError(
                    f"{name} has {s.shape[1]} inputs, not a multiple of {m}: pattern {pattern} does not fit"
                )
        return {name: ~lowest(s.unflatten(1, (-1, m)), m - n).flatten(1) for name, s in scores.items()}
    if group == "row":
        return {name: ~lowest(s, zeros_among(s.shape[1], sparsity)) for name, s in scores.items()}
    if group == "layer":
        return {name: ~lowest(s.flatten(), zeros_among(s.numel(), sparsity)).view_as(s) for name, s in scores.items()}
    if group == "block":
        flat = torch.cat([s.flatten() for s in scores.values()])
        parts = (~lowest(flat, zeros_among(len(flat), sparsity))).split([s.numel() for s in scores.values()])
        return {name: part.view_as(s) for (name, s), part in zip(scores.items(), parts, strict=True)}
    raise UnknownNameError("group", group, get_args(Group))


def check_sparsity(sparsity: float) -> None:
    """Raise InputError unless ``sparsity`` is in [0, 1)."""
    if not 0 <= sparsity < 1:
        raise InputError(f"sparsity must be in [0, 1), the share of weights to set to zero; got {sparsity}")


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a boolean tensor into uint8, eight to a byte, flattened."""
    return torch.from_numpy(np.packbits(mask.flatten().cpu().numpy()))


def unpack_bits(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo :func:`pack_bits`.

    >>> mask = torch.tensor([[True, False, True]])
    >>> bool((unpack_bits(pack_bits(mask), (1, 3)) == mask).all())
    True
    """
    bits = np.unpackbits(packed.numpy(), count=int(np.prod(shape)))
    return torch.from_numpy(bits.view(bool)).view(shape)
