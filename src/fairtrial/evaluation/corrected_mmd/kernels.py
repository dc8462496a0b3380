"""Kernels and sums of their values, computed in chunks of rows so that no N x N matrix is ever held."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fairtrial.errors import InputError

Kernel: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (n, d), (k, d) -> (n, k)

CHUNK = 2**20  # kernel values held at once: 8 MB in double precision, a few times that while they are computed
_FACTORS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class GaussianKernel:
    """Mean of Gaussian kernels, mean_h exp(-|a - b|^2 / (2 h^2)).

    Parameters
    ----------
    *bandwidths : the h, each positive, in the units of the data.

    Examples
    --------
    >>> GaussianKernel(1.0)(torch.zeros(1, 1), torch.tensor([[0.0], [2.0]]))
    tensor([[1.0000, 0.1353]])
    """

    bandwidths: tuple[float, ...]

    def __init__(self, *bandwidths: float) -> None:
        if not bandwidths or not all(h > 0 for h in bandwidths):
            raise InputError(f"GaussianKernel: bandwidths must be positive numbers, got {bandwidths}")
        object.__setattr__(self, "bandwidths", tuple(float(h) for h in bandwidths))

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the kernel of rows ``a`` (n, d) and ``b`` (k, d), shape (n, k)."""
        centre = b.detach().mean(0)  # distances do not change, and lose less to rounding
        a, b = a - centre, b - centre
        squared = torch.addmm(b.square().sum(1)[None], a, b.T, alpha=-2) + a.square().sum(1, keepdim=True)
        squared = squared.clamp_min(0)  # (n, k)
        values = [torch.exp(squared * (-0.5 / h**2)) for h in self.bandwidths]
        return sum(values[1:], values[0]) / len(values)


@dataclass(frozen=True)
class EnergyKernel:
    """Minus the Euclidean distance: the MMD^2 is then the energy distance, without a bandwidth to choose.

    Examples
    --------
    >>> EnergyKernel()(torch.zeros(1, 2), torch.tensor([[3.0, 4.0]]))
    tensor([[-5.]])
    """

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the kernel of rows ``a`` (n, d) and ``b`` (k, d), shape (n, k)."""
        return -torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def median_kernel(*samples: Tensor, most: int = 1000) -> GaussianKernel:
    """Return the mean of Gaussians whose bandwidths are 1/2, 1 and 2 times the median distance of ``samples``.

    Give samples without measurement error (audited truths, a simulator's output): a bandwidth from noisy data learns
    the noise. Of each sample (n, d) at most ``most`` rows, evenly spaced, are used.

    >>> median_kernel(torch.tensor([[0.0], [1.0], [3.0]])).bandwidths
    (1.0, 2.0, 4.0)
    """
    rows = torch.cat([s.detach()[:: -(-len(s) // most)] for s in samples])
    distances = torch.pdist(rows)
    distances = distances[distances > 0]  # ties of rounded data would make the median 0
    if not len(distances):
        raise InputError("the median distance is 0: all rows are equal; give kernel= a bandwidth of your own")
    median = distances.median().item()
    return GaussianKernel(*(factor * median for factor in _FACTORS))


def kernel_for(kernel: Kernel | None, *samples: Tensor) -> Kernel:
    """Return the kernel given, or :func:`median_kernel` of the samples (n, d), n at least 2, where there is none.

    Raises
    ------
    InputError
        It is no kernel of such rows, such as its name.
    """
    if kernel is None:
        return median_kernel(*samples)
    if not callable(kernel) or isinstance(kernel, type):
        raise InputError(f"kernel={kernel!r}: give a function of (n, d), (k, d) to (n, k), such as GaussianKernel(1.0)")
    points = samples[0]
    values = kernel(points[:1], points[:2])
    if not isinstance(values, Tensor) or values.shape != (1, 2) or values.dtype != points.dtype:
        raise InputError(f"kernel={kernel!r}: of 1 and 2 rows it must make a tensor (1, 2) of their dtype")
    return kernel


def kernel_sums(kernel: Kernel, a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """Return sum_j weights_j k(a_i, b_j), (n,), of ``a`` (n, d), ``b`` (k, d), ``weights`` (k,); (k, c) give (n, c)."""
    tracked = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return torch.cat(_by_rows(lambda part, _: kernel(part, b) @ weights, a, len(b), tracked))


def own_sums(kernel: Kernel, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_j k(a_i, a_j) and k(a_i, a_i), both (n,), for ``a`` (n, d)."""

    def sums(part: Tensor, first: int) -> Tensor:
        values = kernel(part, a)  # (rows, n)
        return torch.stack([values.sum(1), values.diagonal(first)[: len(part)]])

    tracked = torch.is_grad_enabled() and a.requires_grad
    total, diagonal = torch.cat(_by_rows(sums, a, len(a), tracked), dim=1)
    return total, diagonal


def _by_rows(work: Callable[[Tensor, int], Tensor], a: Tensor, columns: int, tracked: bool) -> list[Tensor]:
    """Apply ``work(rows, index of the first)`` to chunks; with gradients, chunks are computed again when needed."""
    rows = max(1, CHUNK // columns)
    starts: Iterable[int] = range(0, len(a), rows)
    if tracked and len(a) > rows:
        return [checkpoint(work, a[i : i + rows], i, use_reentrant=False) for i in starts]
    return list(itertools.starmap(work, ((a[i : i + rows], i) for i in starts)))


def mean_within(kernel: Kernel, y: Tensor, unbiased: bool) -> Tensor:
    """Return the mean of k(y_l, y_l') over all pairs, or over pairs of different rows where ``unbiased``."""
    total, diagonal = own_sums(kernel, y)
    n = len(y)
    return (total.sum() - diagonal.sum()) / (n * (n - 1)) if unbiased else total.sum() / n**2
