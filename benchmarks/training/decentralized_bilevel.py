"""What tracker, gossip and normalisation cost beside the gradients, and eight nodes beside one of an 8-fold batch."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from fairtrial.training.decentralized_bilevel import DecentralizedBilevel, Network, Problem, Ring
from fairtrial.training.networks import mlp

NODES, BATCH, WIDTHS = 8, 64, (784, 128, 10)  # 101,770 parameters


def seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """Return the median time of ``work``."""
    work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def problem(examples: int) -> Problem:
    return Problem.hyper_cleaning(mlp(WIDTHS, activation=nn.ReLU), F.cross_entropy, examples=examples)


def batches(nodes: int, size: int, examples: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [
        {
            "index": torch.randint(examples, (size,), generator=g),
            "input": torch.randn(size, WIDTHS[0], generator=g),
            "label": torch.randint(10, (size,), generator=g),
        }
        for _ in range(nodes)
    ]


def main() -> None:
    torch.set_num_threads(1)
    examples = 1000
    table = Table("", "ms", "ratio", "of")
    opt = DecentralizedBilevel(**vars(problem(examples)), network=Ring(NODES), init_batches=1, private_upper=True)
    given = batches(NODES, BATCH, examples)
    opt.step(given, given)
    points = opt._all("w"), opt._all("before")
    gradients = seconds(lambda: opt._evaluate(points, given, given))
    whole = seconds(lambda: opt.step(given, given))
    table.add_row("six gradients of 8 nodes, 101,770 parameters", f"{gradients * 1e3:.0f}", "1", "")
    table.add_row("a whole step", f"{whole * 1e3:.0f}", f"{whole / gradients:.2f}", "the gradients")
    one = DecentralizedBilevel(**vars(problem(examples)), network=Network([[1.0]]), init_batches=1, private_upper=True)
    large = batches(1, NODES * BATCH, examples)
    one.step(large, large)
    single = seconds(lambda: one.step(large, large))
    table.add_row("one node of an 8-fold batch", f"{single * 1e3:.0f}", f"{whole / single:.2f}", "8 nodes over this")
    Console().print(table)


if __name__ == "__main__":
    main()
