"""Seconds of predictions against k nearest neighbours, a loop over queries and statsmodels, and of attention layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from sklearn.neighbors import KNeighborsRegressor
from statsmodels.nonparametric.kernel_regression import KernelReg

from fairtrial.training.incontext_regression import ConstructedRegressor, ManifoldMixture, TangentLocalPolynomial
from fairtrial.training.incontext_regression.transformer import LinearAttention

ROWS, QUERIES, LOOPED = 10_000, 2000, 100


def timed(work: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result


def estimators() -> Table:
    prompt = ManifoldMixture(ambient=20, dims=(1, 2), charts=4, seed=0).ask(QUERIES, ROWS, seed=1)
    x, y, queries = prompt.x[0].numpy(), prompt.y[0].numpy(), prompt.query.numpy()
    target = prompt.target.numpy()
    fitting, model = timed(lambda: TangentLocalPolynomial().fit(x, y), repeats=1)
    batched, ours = timed(lambda: model.predict(queries))
    looped, _ = timed(lambda: [model.predict(query[None]) for query in queries[:LOOPED]], repeats=1)
    neighbours = KNeighborsRegressor(model.neighbors_).fit(x, y)
    nearest, theirs = timed(lambda: neighbours.predict(queries))
    # statsmodels loops over queries too; its bandwidth is given, since choosing it takes hours here
    width = float(np.median(model.local_report(queries)["bandwidth"]))
    kernel = KernelReg(y, x, "c" * 20, reg_type="ll", bw=[width] * 20)
    slow, smooth = timed(lambda: kernel.fit(queries[:10])[0], repeats=1)
    table = Table(
        f"{ROWS:,} rows, D = 20", "ms a query", "of ours", "MSE", title=f"fit with leave-one-out: {fitting:.1f} s"
    )
    for name, seconds, count, predicted in (
        ("tangent local polynomial", batched, QUERIES, ours),
        (f"k nearest neighbours, k = {model.neighbors_}", nearest, QUERIES, theirs),
        ("the same, one query a call", looped, LOOPED, None),
        ("statsmodels KernelReg, local linear in R^20", slow, 10, smooth),
    ):
        error = "" if predicted is None else f"{np.square(predicted - target[: len(predicted)]).mean():.4f}"
        table.add_row(name, f"{1e3 * seconds / count:.3f}", f"{seconds / count / (batched / QUERIES):.2f}", error)
    return table


def layers() -> Table:
    table = Table("context", "linear layer, ms", "n x n form, ms", "ratio", "constructed network, ms a prompt")
    random = torch.Generator().manual_seed(0)
    maps = [torch.randn(1, 64, 16, generator=random) for _ in range(3)]
    layer = LinearAttention(*maps, torch.randn(1, 16, 64, generator=random), over="tokens")
    tasks = ManifoldMixture(ambient=20, dims=(1,), charts=4, seed=0)
    for n in (500, 2000, 8000):
        stream, mask = torch.randn(1, n, 64, generator=random), torch.ones(1, n)

        def linear(stream: torch.Tensor = stream, mask: torch.Tensor = mask) -> torch.Tensor:
            with torch.no_grad():
                return layer(stream, mask)

        def square(stream: torch.Tensor = stream, n: int = n) -> torch.Tensor:
            q, k, v = (stream[0] @ map[0] for map in maps)
            return (q @ k.T / n) @ v @ layer.out[0].detach()

        fast, one = timed(linear)
        slow, other = timed(square)
        assert torch.allclose(one[0], other, rtol=1e-2, atol=1e-2)
        prompt = tasks.sample(4, n, seed=1)
        model = ConstructedRegressor(tasks.atlas(k=6, n=n), outside="nearest")
        whole, _ = timed(lambda model=model, prompt=prompt: model(prompt.x, prompt.y, prompt.query))
        table.add_row(
            f"{n:,}", f"{1e3 * fast:.2f}", f"{1e3 * slow:.2f}", f"{slow / fast:.1f}", f"{1e3 * whole / 4:.0f}"
        )
    return table


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    console.print(estimators())
    console.print(layers())


if __name__ == "__main__":
    main()
