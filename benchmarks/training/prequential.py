"""What the meter costs a training run, per step and in all, and the three codes beside plain training."""

from __future__ import annotations

import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from fairtrial.data.images import garments
from fairtrial.training.networks import mlp
from fairtrial.training.prequential import PrequentialMeter, PrequentialSampler, block_code

N, BATCH, EPOCHS, WIDTH = 1000, 50, 25, 256  # the default trial


def train(x: torch.Tensor, y: torch.Tensor, *, metered: bool) -> tuple[float, float]:
    """Return seconds of the whole run and of the meter in it."""
    model = mlp([x.shape[1], WIDTH, WIDTH, 10], activation=torch.nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    meter = PrequentialMeter(len(y), 10)
    g = torch.Generator().manual_seed(0)
    inside, began = 0.0, time.perf_counter()
    for _ in range(EPOCHS):
        for idx in torch.randperm(len(y), generator=g).split(BATCH):
            logits = model(x[idx])
            if metered:
                start = time.perf_counter()
                meter.update(idx, logits, y[idx])
                inside += time.perf_counter() - start
            optimizer.zero_grad()
            F.cross_entropy(logits, y[idx]).backward()
            optimizer.step()
    return time.perf_counter() - began, inside


def replay(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return seconds of a replay of the same number of steps."""
    model = mlp([x.shape[1], WIDTH, WIDTH, 10], activation=torch.nn.ReLU)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    meter = PrequentialMeter(len(y), 10)
    began = time.perf_counter()
    for batch in PrequentialSampler(len(y), EPOCHS * N // BATCH, BATCH):
        idx = torch.tensor(batch)
        logits = model(x[idx])
        meter.update(idx, logits, y[idx])
        optimizer.zero_grad()
        F.cross_entropy(logits, y[idx]).backward()
        optimizer.step()
    return time.perf_counter() - began


def blocks(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return seconds of the code by retraining, its last fit included."""

    def fit(x: torch.Tensor, y: np.ndarray):
        model = mlp([x.shape[1], WIDTH, WIDTH, 10], activation=torch.nn.ReLU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
        labels = torch.from_numpy(y)
        for _ in range(EPOCHS):
            for idx in torch.randperm(len(y)).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(x[idx]), labels[idx]).backward()
                optimizer.step()
        return lambda z: model(z).softmax(1).detach().numpy()

    began = time.perf_counter()
    block_code(fit, x, y.numpy(), num_classes=10, blocks=5)
    return time.perf_counter() - began


def main() -> None:
    x, y = garments(N)
    x = x.flatten(1)
    train(x, y, metered=True)
    plain = min(train(x, y, metered=False)[0] for _ in range(3))
    _, inside = min(train(x, y, metered=True) for _ in range(3))
    table = Table("", "s", "of plain training")
    table.add_row("plain training", f"{plain:.2f}", "1")
    table.add_row("first-pass meter alone", f"{inside:.3f}", f"{inside / plain:.3f}")
    for name, seconds in (("replay", replay(x, y)), ("blocks, all prefixes", blocks(x, y))):
        table.add_row(name, f"{seconds:.2f}", f"{seconds / plain:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
