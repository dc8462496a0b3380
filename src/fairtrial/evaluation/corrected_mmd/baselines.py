"""What MEC-MMD is compared with: each gives weighted points that stand for the truths, or an MMD^2 of its own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fairtrial.errors import InputError
from fairtrial.evaluation.corrected_mmd.kernels import Kernel, kernel_for, kernel_sums, mean_within
from fairtrial.evaluation.corrected_mmd.samples import SignedSample, calibrate, rows_of


def plain_mmd2(x: Tensor, y: Tensor, kernel: Kernel, form: str = "u") -> Tensor:
    """Return the MMD^2 of two samples (N, d), (M, d) taken at face value; unbiased with ``form="u"``.

    >>> from fairtrial.evaluation.corrected_mmd import EnergyKernel
    >>> plain_mmd2(torch.zeros(2, 1), torch.ones(2, 1), EnergyKernel())  # 2 E|x - y| - E|x - x'| - E|y - y'|
    tensor(2.)
    """
    if form not in ("u", "v"):
        raise InputError(f"form={form!r}: give 'u' or 'v'")
    x = rows_of(x, "x")
    y = rows_of(y, "y", x)
    if min(len(x), len(y)) < 2:
        raise InputError(f"samples of {len(x)} and {len(y)} rows: the MMD needs 2 of each at least")
    kernel = kernel_for(kernel, x)
    mean = torch.full((len(y),), 1 / len(y), dtype=y.dtype, device=y.device)
    within = mean_within(kernel, x, form == "u") + mean_within(kernel, y, form == "u")
    return within - 2 * kernel_sums(kernel, x, y, mean).mean()


def plug_in(noisy: Tensor, truth: Tensor, audited: Tensor) -> Tensor:
    """Return (N, d): audited truths, and for the others what a regression of truth on noisy predicts."""
    filled = calibrate(noisy[audited], truth, noisy)
    filled[audited] = truth
    return filled


def imputations(
    noisy: Tensor, truth: Tensor, audited: Tensor, rng: np.random.Generator, draws: int = 5
) -> list[Tensor]:
    """Return ``draws`` completed samples (N, d): predictions plus residuals drawn from the audit.

    Each regression is fitted to a bootstrap of the audit, so that draws also differ by what it does not know.
    """
    completed = []
    m = len(audited)
    for _ in range(draws):
        rows = torch.from_numpy(rng.integers(m, size=m))
        at, known = noisy[audited[rows]], truth[rows]
        filled = calibrate(at, known, noisy)
        residuals = known - calibrate(at, known, at)
        residuals = residuals * (m / max(m - 2, 1)) ** 0.5
        filled = filled + residuals[torch.from_numpy(rng.integers(m, size=len(noisy)))]
        filled[audited] = truth
        completed.append(filled)
    return completed


def equally_weighted(*samples: Tensor) -> SignedSample:
    """Return the points of one or more samples with weights that sum to 1."""
    points = torch.cat(samples)
    return SignedSample(points, torch.full((len(points),), 1 / len(points), dtype=points.dtype))
