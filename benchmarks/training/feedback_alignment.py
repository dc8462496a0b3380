"""A direct-feedback step against backpropagation's: seconds, held activations, and the critical path.

With ``--cuda`` the backward pass of torchvision's ResNet-18, on streams, against backpropagation's.
biotorch, the peer for layerwise feedback alignment, is measured where it imports; its pins are old.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from fairtrial.training.feedback_alignment import DirectFeedback, feedback_alignment, held_bytes, resnet8, vit4
from fairtrial.training.networks import mlp

BATCH, STEPS = 64, 15
RULES: dict[str, dict] = {
    "backpropagation": {},
    "NDFA": {},
    "NDFA, fitted every second step": {"surrogate_every": 2},
    "NDFA, in threads": {"executor": "threads"},
    "NDFA, surrogates frozen": {"learn": False},
    "DFA": {"method": "dfa"},
    "learned linear": {"surrogate": "linear"},
}


def stepper(rule: str, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Callable[[], None], DirectFeedback | None]:
    """Return one training step, and the feedback it uses."""
    feedback = None if rule == "backpropagation" else DirectFeedback(model, **RULES[rule])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        optimizer.zero_grad()
        if feedback is None:
            loss.backward()
        else:
            feedback.backward(loss, logits)
        optimizer.step()

    return step, feedback


def measured(build: Callable[[], nn.Module], x: Tensor, y: Tensor, title: str) -> Table:
    """Return the table of all rules; steps of the rules take turns, and processor seconds are compared."""
    made = {rule: (*stepper(rule, model, x, y), model) for rule in RULES for model in [build()]}
    seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
    for _ in range(STEPS):
        for rule, (step, _, _) in made.items():
            began = time.process_time()
            step()
            seconds[rule].append(time.process_time() - began)
    table = Table(title, "ms", "of BP", "held MB", "of BP", "critical path of all jobs")
    plain_time = plain_held = 0.0
    for rule, (step, feedback, model) in made.items():
        took = statistics.median(seconds[rule][2:])
        held = held_bytes(step, keep=(x, *model.parameters()))
        plain_time, plain_held = plain_time or took, plain_held or held
        path = ""
        if feedback is not None:
            timing = feedback.timing()
            path = f"{timing.critical_path / timing.serial:.2f}"
        table.add_row(rule, f"{took * 1e3:.1f}", f"{took / plain_time:.2f}", f"{held / 1e6:.1f}",
                      f"{held / plain_held:.2f}", path)  # fmt: skip
    return table


def layerwise(x: Tensor, y: Tensor) -> Table:
    """Return the seconds of layerwise feedback alignment, ours and biotorch's where it imports."""
    table = Table("layerwise feedback alignment, resnet8", "ms")
    model = resnet8(stride=4)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()

    with feedback_alignment(model):
        table.add_row("ours", f"{middle(step) * 1e3:.1f}")
    table.add_row("backpropagation", f"{middle(step) * 1e3:.1f}")
    if importlib.util.find_spec("biotorch") is None:
        table.add_row("biotorch", "does not import here")
    else:
        from biotorch.module.biomodule import BioModule

        peer = BioModule(resnet8(stride=4), mode="fa")
        table.add_row("biotorch", f"{middle(lambda: F.cross_entropy(peer(x), y).backward()) * 1e3:.1f}")
    return table


def middle(step: Callable[[], None]) -> float:
    """Return the median processor seconds of a step."""
    taken = []
    for _ in range(STEPS):
        began = time.process_time()
        step()
        taken.append(time.process_time() - began)
    return statistics.median(taken[2:])


def streams() -> Table:
    """Return the wall time of a backward pass on the device."""
    from torchvision.models import resnet18

    x, y = torch.randn(128, 3, 64, 64, device="cuda"), torch.randint(10, (128,), device="cuda")
    table = Table("backward pass of a ResNet-18, CUDA", "ms", "of BP")
    plain = 0.0
    for rule, options in {"backpropagation": None, "serial": {}, "streams": {"executor": "streams"}}.items():
        model = resnet18(num_classes=10).cuda()
        feedback = None if options is None else DirectFeedback(model, **options)
        taken = []
        for _ in range(30):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            model.zero_grad()
            torch.cuda.synchronize()
            began = time.perf_counter()
            if feedback is None:
                loss.backward()
            else:
                feedback.backward(loss, logits)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        took = statistics.median(taken[10:])
        plain = plain or took
        table.add_row(rule, f"{took * 1e3:.1f}", f"{took / plain:.2f}")
    return table


def main() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    console = Console()
    if "--cuda" in sys.argv:
        console.print(streams())
        return
    console.print(measured(lambda: resnet8(stride=2), x, y, "resnet8, 28 x 28"))
    console.print(measured(vit4, x, y, "vit4, 28 x 28"))
    console.print(measured(lambda: mlp([784, 128, 128, 128, 128, 10]), x, y, "MLP of four hidden layers"))
    console.print(layerwise(x, y))


if __name__ == "__main__":
    main()
