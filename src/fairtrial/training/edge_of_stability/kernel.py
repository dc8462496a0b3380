"""The tangent kernel of a model, exact or through a fixed random projection of its outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.seeds import torch_generator
from fairtrial.training.curvature import tangent_kernel


def ntk(model: nn.Module, x: Tensor, *, exact: bool | None = None, seed: int = 0) -> Tensor:
    """Return the empirical neural tangent kernel K = J J' on probe examples.

    Parameters
    ----------
    model : nn.Module
        Maps (m, ...) to (m, C), each example by itself.
    x : (m, ...) tensor
        Probe examples, 64 or so.
    exact : bool, optional
        True: of all outputs, (m C, m C). False: of the outputs projected on one fixed random unit-variance direction,
        (m, m). Left out: exact where m C is at most 2000.
    seed : int
        Of the direction.

    Examples
    --------
    >>> ntk(nn.Linear(2, 3, bias=False), torch.eye(2)).shape
    torch.Size([6, 6])
    >>> ntk(nn.Linear(2, 3, bias=False), torch.eye(2), exact=False).shape
    torch.Size([2, 2])
    """
    if not len(x):
        raise InputError("there are no probe examples: give 64 or so")
    with torch.no_grad():
        outputs = model(x[:1]).reshape(-1)
    width = len(outputs)
    if exact is None:
        exact = len(x) * width <= 2000
    if exact:
        return tangent_kernel(model, x).reshape(len(x) * width, len(x) * width)
    return tangent_kernel(model, x, projection=direction(width, seed).to(outputs))


def direction(width: int, seed: int = 0) -> Tensor:
    """Return a random direction (width,), of mean square 1 / width: projected kernels keep the scale of an output's."""
    return torch.randn(width, generator=torch_generator(seed, "ntk", width)) / width**0.5


def kernel_distance(a: Tensor, b: Tensor) -> float:
    """Return ``1 - <A, B> / (|A| |B|)``, 0 for kernels equal up to their scale.

    >>> round(kernel_distance(torch.eye(2), torch.ones(2, 2)), 4)
    0.2929
    """
    return float(1 - (a * b).sum() / (a.norm() * b.norm()))
