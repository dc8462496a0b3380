"""Fast Gauss-Newton beside the full matrix: iterations, time of a head's step, overhead and memory of a step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from fairtrial.training.gauss_newton import FastGaussNewton
from fairtrial.training.gauss_newton.baselines import GaussNewtonCG
from fairtrial.training.gauss_newton.linearised import Linearised
from fairtrial.training.gauss_newton.margins import margins
from fairtrial.training.gauss_newton.solving import ProductRows
from fairtrial.training.networks import mlp


def seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """Return the least processor seconds of a call, after a first one."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def batch(n: int, inputs: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(n, inputs, generator=draw), torch.randint(classes, (n,), generator=draw)


def main() -> None:
    torch.set_num_threads(1)
    table = Table("what", "fgn", "beside", "ratio", "target", title="Fast Gauss-Newton against the full matrix")

    x, _ = batch(256, 784, 10)
    y = mlp([784, 64, 10], seed=1)(3 * x).argmax(1)  # labels that can be learnt
    trained = mlp([784, 64, 64, 10])
    warm = FastGaussNewton(trained.parameters())
    for _ in range(10):
        warm.step(lambda: (trained(x), y))
    for damping in (1.0, 0.1, 0.01, 0.001):
        iterations = []
        for kind in (FastGaussNewton, GaussNewtonCG):  # from the same weights
            model = copy.deepcopy(trained)
            optimizer = kind(model.parameters(), damping=lambda info, damping=damping: damping, cg_max_iter=300)
            optimizer.step(lambda model=model: (model(x), y))
            iterations.append(optimizer.last.cg_iterations)
        table.add_row(f"CG iterations, MLP, 256 examples, damping {damping:g}", *map(str, iterations),
                      f"{iterations[0] / iterations[1]:.2f}", "0.60")  # fmt: skip

    for classes in (10, 100, 1000):
        x, y = batch(512, 576, classes)
        head = nn.Linear(576, classes)
        fgn = FastGaussNewton(head.parameters(), solver="gram", model=head, damping=lambda info: 0.1)
        ggn = GaussNewtonCG(head.parameters(), model=head, damping=lambda info: 0.1, cg_tol=1e-12, cg_max_iter=10)
        ours, theirs = (seconds(lambda o=o, h=head, x=x, y=y: o.step(lambda: (h(x), y))) for o in (fgn, ggn))
        target = "0.25" if classes == 1000 else ""
        table.add_row(f"head step, {classes} classes, 512 x 576, s (10 iterations)", f"{ours:.4f}", f"{theirs:.4f}",
                      f"{ours / theirs:.2f}", target)  # fmt: skip

    for n, sizes in ((256, [784, 64, 64, 10]), (512, [576, 100])):
        x, y = batch(n, sizes[0], sizes[-1])
        model = mlp(sizes)
        fgn = FastGaussNewton(model.parameters(), damping=lambda info: 0.1)
        theirs = diagonal(copy.deepcopy(model), x, y)
        if theirs is not None:
            ours = seconds(lambda o=fgn, m=model, x=x, y=y: o.step(lambda: (m(x), y)))
            table.add_row(f"step, {n} examples, {'-'.join(map(str, sizes))}, s (BackPACK, DiagGGNExact)", f"{ours:.4f}",
                          f"{theirs:.4f}", f"{ours / theirs:.2f}", "")  # fmt: skip

    model = mlp([784, 64, 64, 10])
    x, y = batch(1024, 784, 10)
    linear = Linearised([lambda: (model(x), y)], list(model.parameters()))
    found = margins(linear.logits, linear.labels)
    rows = ProductRows(linear, found.slope * (found.weight / 1024).sqrt()[:, None])
    u, cotangent = torch.randn(1024, dtype=torch.float64), torch.randn_like(linear.logits)
    vector = [torch.randn_like(p) for p in model.parameters()]

    def raw() -> None:
        linear.push(vector)
        linear.pull(cotangent)

    ours, theirs = seconds(lambda: rows.apply(rows.adjoint(u)), 30), seconds(raw, 30)
    table.add_row("product with W W', MLP, 1024 examples, s (JVP + VJP)", f"{ours:.5f}", f"{theirs:.5f}",
                  f"{ours / theirs:.2f}", "1.10")  # fmt: skip

    ours, theirs = (peak(work) for work in (lambda: _step(model, x, y), lambda: _backward(model, x, y)))
    table.add_row("peak memory of a step, MiB (plain backward)", f"{ours:.1f}", f"{theirs:.1f}",
                  f"{ours / theirs:.2f}", "3.00")  # fmt: skip
    Console().print(table)


def diagonal(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float | None:
    """Return the seconds of a step with BackPACK's diagonal of the full matrix; None where it is not installed."""
    try:
        from backpack import backpack, extend
        from backpack.extensions import DiagGGNExact
    except ImportError:
        return None
    model, loss = extend(model), extend(nn.CrossEntropyLoss())

    def step() -> None:
        with backpack(DiagGGNExact()):
            loss(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad / (p.diag_ggn_exact + 0.1)
                del p.diag_ggn_exact
        model.zero_grad()

    return seconds(step)


def _step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    FastGaussNewton(model.parameters()).step(lambda: (model(x), y))


def _backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(x), y).backward()
    model.zero_grad()


def peak(work: Callable[[], None]) -> float:
    """Return the most MiB that tensors made in a call hold at once, by the profiler's account of the allocator."""
    work()
    with torch.profiler.profile(profile_memory=True, record_shapes=False) as profile:
        work()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 2**20


if __name__ == "__main__":
    main()
