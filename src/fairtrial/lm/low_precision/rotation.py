"""The random Hadamard rotation of 16 neighbours, an intervention of the usual 4-bit recipe that nGPT does without.

Both operands of a product are rotated along the contracted axis: the product stays the same, and outliers are spread
over their block before it is quantized.
"""

from __future__ import annotations

import functools

import torch

from fairtrial.errors import InputError
from fairtrial.seeds import torch_generator


@functools.cache
def hadamard_16(seed: int = 0) -> torch.Tensor:
    """Return the orthogonal (16, 16) matrix of Hadamard with random signs: rows are rotated by ``x @ matrix``."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.kron(matrix, two)
    signs = torch.randint(0, 2, (16, 1), generator=torch_generator(seed, "hadamard signs")) * 2 - 1
    return signs * matrix / 4


def rotate(x: torch.Tensor, axis: int, seed: int = 0) -> torch.Tensor:
    """Rotate blocks of 16 along an axis by :func:`hadamard_16`.

    >>> x = torch.eye(16)
    >>> torch.allclose(rotate(x, 0).T @ rotate(x, 0), x, atol=1e-6)
    True
    """
    if x.shape[axis] % 16:
        raise InputError(f"axis {axis} has length {x.shape[axis]}: rotate blocks of 16, padded with zeros")
    matrix = hadamard_16(seed).to(x.device, x.dtype)
    last = x.movedim(axis, -1).unflatten(-1, (-1, 16)) @ matrix
    return last.flatten(-2).movedim(-1, axis)
