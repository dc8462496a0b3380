"""Neural collapse over training: a hook on the last layer and a measurement a call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.training.neural_collapse.report import CollapseReport, collapse_report


class CollapseTracker:
    """Measures a classifier on a fixed loader as it trains.

    Parameters
    ----------
    model : nn.Module
        Returns logits, or an object with ``.logits``.
    head : str
        Name of the last linear layer, as in ``model.named_modules()``.
    loader : iterable of (inputs, labels)
        Gone through once a measurement; features are kept in memory meanwhile, N x p floats.

    Raises
    ------
    InputError
        If there is no such layer (the linear ones are listed), or its outputs are not the model's logits: it is then
        not the last layer.

    Examples
    --------
    >>> torch.manual_seed(0); model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    <torch._C.Generator object at ...>
    >>> tracker = CollapseTracker(model, head="2", loader=[(torch.randn(20, 3), torch.arange(20) % 2)])
    >>> tracker.measure().nc4 >= 0, len(tracker.history)
    (True, 1)
    """

    def __init__(self, model: nn.Module, *, head: str, loader: Iterable[tuple[Any, Tensor]]) -> None:
        linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        if head not in linear:
            raise InputError(f"no linear layer {head!r}: {', '.join(map(repr, linear)) or 'the model has none'}")
        self.model, self.head, self.loader = model, linear[head], loader
        self.history: list[CollapseReport] = []

    def measure(self) -> CollapseReport:
        """Measure, append to ``history`` and return the report; the model's mode stays as it was."""
        seen: list[Tensor] = []
        features: list[Tensor] = []
        labels: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].detach()))
        mode = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                for inputs, y in self.loader:
                    seen.clear()
                    output = self.model(inputs)
                    logits = output.logits if hasattr(output, "logits") else output
                    if len(seen) != 1 or seen[0].dim() != 2:
                        raise InputError(
                            f"the head ran {len(seen)} times in a forward pass, on shapes "
                            f"{[tuple(h.shape) for h in seen]}: once, on (N, p), is needed"
                        )
                    if not features and not self._is_last(seen[0], logits):
                        raise InputError("the head's outputs are not the model's logits: name the last linear layer")
                    features.append(seen[0].float().cpu())
                    labels.append(y.cpu())
        finally:
            handle.remove()
            self.model.train(mode)
        if not features:
            raise InputError("the loader is empty")
        bias = None if self.head.bias is None else self.head.bias
        report = collapse_report(torch.cat(features), self.head.weight, torch.cat(labels), bias)
        self.history.append(report)
        return report

    def _is_last(self, inputs: Tensor, logits: Tensor) -> bool:
        """Whether the head makes the model's logits out of its inputs."""
        told = nn.functional.linear(inputs, self.head.weight, self.head.bias)
        return told.shape == logits.shape and torch.allclose(told, logits, rtol=1e-3, atol=1e-4)
