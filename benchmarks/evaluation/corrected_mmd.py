"""Seconds of MEC-MMD against the plain MMD: a training step of the loss, and the whole estimate.

The plain MMD is written as the peers write it: whole kernel matrices in one piece, by torch.cdist. One thread.
sbi's unbiased MMD^2 is timed where it is installed.

python benchmarks/evaluation/corrected_mmd.py
"""

from __future__ import annotations

import importlib.util
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairtrial.evaluation.corrected_mmd import CorrectedMMDLoss, GaussianKernel, mec_mmd2, plain_mmd2

BANDWIDTHS = (2.0, 4.0, 8.0)
KERNEL = GaussianKernel(*BANDWIDTHS)


def usual_kernel(a: Tensor, b: Tensor) -> Tensor:
    squared = torch.cdist(a, b).square()
    return torch.stack([torch.exp(-squared / (2 * h**2)) for h in BANDWIDTHS]).mean(0)


def usual_fit(z: Tensor, y: Tensor) -> Tensor:
    """Return the part of the plain MMD^2 that depends on y."""
    within = usual_kernel(y, y)
    return (within.sum() - within.trace()) / (len(y) * (len(y) - 1)) - 2 * usual_kernel(z, y).mean()


def best(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    n, m, rows, d = 20_000, 1000, 1000, 16
    x = torch.randn(n, d, generator=generator)
    z = x + 0.3 + 0.5 * torch.randn(n, d, generator=generator)
    y = torch.randn(rows, d, generator=generator).requires_grad_()
    audited = torch.arange(m)
    loss = CorrectedMMDLoss(z, x[:m], audited, kernel=KERNEL, fit_only=True)
    ours = best(lambda: loss(y).backward(), 5)
    whole = best(lambda: usual_fit(z, y).backward(), 5)
    chunked = best(lambda: (-2 * _cross(z, y)).backward(), 5)
    print(f"{'N = 20,000, m = M = 1000, d = 16, float32':<66}{'seconds':>10}{'ratio':>8}")
    print(f"{'loss, forward and backward: plain MMD, matrices in one piece':<66}{whole:>10.3f}{1:>8.2f}")
    print(f"{'                            MEC-MMD':<66}{ours:>10.3f}{ours / whole:>8.2f}")
    print(f"{'                            its N x M term alone, in chunks':<66}{chunked:>10.3f}{chunked / whole:>8.2f}")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    small = 5000
    with torch.no_grad():
        estimate = best(lambda: mec_mmd2(z[:small], x[:500], audited[:500], y, kernel=KERNEL), 2)
        plain = best(lambda: plain_mmd2(z[:small], y, KERNEL), 2)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{'value, N = 5000, m = 500: plain MMD^2, ours':<66}{plain:>10.3f}{1:>8.2f}")
    print(f"{'                          MEC-MMD with its standard error':<66}{estimate:>10.3f}{estimate / plain:>8.2f}")
    print(f"{'                          memory beyond the loss above, MB':<66}{grown:>10.0f}")
    if importlib.util.find_spec("sbi"):
        from sbi.utils.metrics import unbiased_mmd_squared

        with torch.no_grad():
            peer = best(lambda: unbiased_mmd_squared(z[:small], y), 2)
        print(
            f"{'                          sbi unbiased_mmd_squared, one Gaussian':<66}{peer:>10.3f}{peer / plain:>8.2f}"
        )


def _cross(z: Tensor, y: Tensor) -> Tensor:
    from fairtrial.evaluation.corrected_mmd.kernels import kernel_sums

    return kernel_sums(KERNEL, z, y, torch.full((len(y),), 1 / len(y))).mean()


if __name__ == "__main__":
    main()
