"""Products of the shared curvature module beside curvlinops': the same numbers, and the time of each.

Needs curvlinops, in an environment or folder of its own (curvlinops.txt).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fairtrial.training.curvature import GaussNewton, Hessian
from fairtrial.training.networks import cnn, mlp


def seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """Return the least processor seconds of a call, after a first one."""
    work()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def main() -> None:
    if not importlib.util.find_spec("curvlinops"):
        print("curvlinops is not installed: pip install --no-deps -r benchmarks/training/curvlinops.txt elsewhere")
        return
    import curvlinops

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(256, 1, 28, 28, generator=draw), torch.randint(10, (256,), generator=draw)
    loss = nn.CrossEntropyLoss()
    table = Table("product", "columns", "difference", "s ours", "s held", "s curvlinops", "held / curvlinops")
    for network, model in (("mlp", mlp([784, 64, 64, 10])), ("cnn", cnn())):
        parameters = [p for p in model.parameters() if p.requires_grad]

        def mean_loss(batch: Any, model: nn.Module = model) -> Tensor:
            return loss(model(batch[0]), batch[1])

        pairs = {
            "Hessian": (Hessian(mean_loss, parameters, [(x, y)]), curvlinops.HessianLinearOperator),
            "GGN": (
                GaussNewton(lambda b, m=model: m(b[0]), lambda z, b: loss(z, b[1]), parameters, [(x, y)]),
                curvlinops.GGNLinearOperator,
            ),
        }
        for name, (ours, kind) in pairs.items():
            theirs = kind(model, loss, parameters, [(x, y)], progressbar=False, check_deterministic=False)
            for columns in (1, 8):
                v = torch.randn(columns, ours.size, generator=draw)
                mine, peer = ours.product(v), (theirs @ v.T).T
                difference = float((mine - peer).norm() / peer.norm())
                with ours.held() as product:
                    held = seconds(lambda p=product, v=v: p(v))
                fresh, other = seconds(lambda o=ours, v=v: o.product(v)), seconds(lambda t=theirs, v=v: t @ v.T)
                table.add_row(f"{name}, {network}", str(columns), f"{difference:.0e}", f"{fresh:.4f}", f"{held:.4f}",
                              f"{other:.4f}", f"{held / other:.2f}")  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
