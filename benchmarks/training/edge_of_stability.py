"""Sharpness of a small network, ours against hessian-eigenthings and PyHessian, and what monitoring a run costs.

The peers install without their dependencies: ``pip install --no-deps -r benchmarks/training/eigenvalue_peers.txt``.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from fairtrial.data.images import garments
from fairtrial.training.curvature import Hessian, top_eigenpairs
from fairtrial.training.edge_of_stability import Sharpness, StabilityMonitor
from fairtrial.training.networks import mlp

IMAGES, RATE = 400, 0.1
ACCURACY = 1e-3  # relative, of the eigenvalue


def trained(steps: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    x, y = garments(IMAGES, size=14)
    model = mlp([196, 64, 64, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, x, y


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def timed(work: Callable[[], Any], repeats: int = 7) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


def eigenthings(model: nn.Module, x: torch.Tensor, y: torch.Tensor, truth: float) -> Callable[[], float] | None:
    """Return the peer's Lanczos with as few steps as reach the accuracy, which it is told."""
    if importlib.util.find_spec("hessian_eigenthings") is None:
        return None
    from hessian_eigenthings import HessianOperator, lanczos

    operator = HessianOperator(model, [(x, y)], loss)
    for steps in range(2, 60):
        value = float(lanczos(operator, k=1, max_iter=steps, tol=1e-12, which="LA", seed=0).eigenvalues[0])
        if abs(value - truth) <= ACCURACY * truth:
            return lambda: float(lanczos(operator, k=1, max_iter=steps, tol=1e-12, which="LA", seed=0).eigenvalues[0])
    return None


def pyhessian(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], float] | None:
    if importlib.util.find_spec("pyhessian") is None:
        return None
    from pyhessian import hessian

    def power_iteration() -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(hessian(model, nn.CrossEntropyLoss(), data=(x, y), cuda=False).eigenvalues(tol=1e-4)[0][0])

    return power_iteration


def main() -> None:
    model, x, y = trained(60)
    table = Table("sharpness to 1e-3", "value", "ms", "of ours")
    truth = Sharpness(model, loss, [(x, y)], tol=1e-7, max_products=400).measure().value

    hessian = Hessian(lambda batch: loss(model, batch), list(model.parameters()), [(x, y)])

    def ours() -> float:
        with hessian.held() as product:
            return float(top_eigenpairs(product, hessian.size, tol=0.02).values[0])

    seconds, value = timed(ours)
    assert abs(value - truth) <= ACCURACY * truth, (value, truth)
    table.add_row("fairtrial, Lanczos", f"{value:.4f}", f"{1e3 * seconds:.1f}", "1")
    for name, peer in (
        ("hessian-eigenthings, Lanczos", eigenthings(model, x, y, truth)),
        ("PyHessian, power iteration", pyhessian(model, x, y)),
    ):
        if peer is None:
            table.add_row(name, "not installed: benchmarks/training/eigenvalue_peers.txt", "", "")
            continue
        theirs, found = timed(peer)
        table.add_row(name, f"{found:.4f}", f"{1e3 * theirs:.1f}", f"{theirs / seconds:.2f}")
    Console().print(table)

    gradient, _ = timed(lambda: torch.autograd.grad(loss(model, (x, y)), list(model.parameters())))
    probe = Sharpness(model, loss, [(x, y)])
    v = torch.randn(1, probe.hessian.size)
    with probe.hessian.held() as product:
        held, _ = timed(lambda: product(v))
    alone, _ = timed(lambda: probe.hessian.product(v))
    table = Table("one product", "ms", "of a gradient")
    for name, seconds in (("gradient", gradient), ("product alone", alone), ("product, graph held", held)):
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / gradient:.2f}")
    Console().print(table)

    model, x, y = trained(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    monitor = StabilityMonitor(Sharpness(model, loss, [(x, y)]), optimizer=optimizer, every=20)
    training = watching = 0.0
    for step in range(1000):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(model, (x, y)).backward()
        optimizer.step()
        middle = time.perf_counter()
        monitor.after_step(step)
        training, watching = training + middle - start, watching + time.perf_counter() - middle
    products = monitor.frame["products"].median()
    Console().print(
        f"monitoring every 20 steps: {watching / training:.0%} of the run, {products:.0f} products a measurement"
    )


if __name__ == "__main__":
    main()
