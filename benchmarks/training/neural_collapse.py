"""Seconds of the exact flow against gradient descent on both layers, and of a collapse report against its forward."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fairtrial.training.networks import mlp
from fairtrial.training.neural_collapse import CollapseTracker, spectral_flow, spectral_network

K, END, STEP = 16, 300.0, 0.005


def timed(work: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


def descent(s0: np.ndarray) -> np.ndarray:
    """Follow the two layers in numpy, Euler steps small enough for an error like the flow's tables."""
    net = spectral_network(K, 2 * K, s0)
    w1, w2 = (layer.weight.detach().numpy().copy() for layer in net)
    identity = np.eye(K)
    for _ in range(round(END / STEP)):
        z = w2 @ w1
        p = np.exp(z - z.max(0))
        error = STEP / K * (p / p.sum(0) - identity)
        w1, w2 = w1 - w2.T @ error, w2 - error @ w1.T
    return np.sort(np.linalg.svd(w2 @ w1, compute_uv=False))[1:]


def main() -> None:
    s0 = 0.1 * np.exp(0.5 * np.random.default_rng(0).standard_normal(K - 1))
    slow, reached = timed(lambda: descent(s0), repeats=1)
    fast, flow = timed(lambda: spectral_flow(s0, t_max=END))
    apart = np.abs(np.sort(flow.at(math.log(END))) - reached).max()
    large, _ = timed(lambda: spectral_flow(0.1 * np.ones(1023) * np.linspace(0.5, 2, 1023), t_max=1e12), repeats=1)
    table = Table("dynamics", "s", "of the flow")
    table.add_row(f"flow, K = {K}, to t = {END:g} (modes apart by {apart:.1g})", f"{fast:.3f}", "1")
    table.add_row(f"gradient descent, steps of {STEP}", f"{slow:.2f}", f"{slow / fast:.0f}")
    table.add_row("flow, K = 1024, to t = 1e12", f"{large:.2f}", "")
    Console().print(table)

    x, y = torch.randn(20_000, 784), torch.arange(20_000) % 10
    model = mlp([784, 512, 128, 10], activation=torch.nn.ReLU)
    loader = list(zip(x.split(500), y.split(500), strict=True))

    def forward() -> None:
        with torch.no_grad():
            for inputs, _ in loader:
                model(inputs)

    plain, _ = timed(forward)
    measured, _ = timed(CollapseTracker(model, head="5", loader=loader).measure)
    table = Table("20,000 examples", "s", "of the forward")
    table.add_row("forward", f"{plain:.2f}", "1")
    table.add_row("collapse report", f"{measured:.2f}", f"{measured / plain:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
