"""What direct feedback is compared with and has no option for: feedback alignment layer by layer, and a control."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.seeds import derive, torch_generator
from fairtrial.training.feedback_alignment.direct import DirectFeedback


class _FeedBack(torch.autograd.Function):
    """Pass a layer's output on; its gradient goes to the output, and through ``fixed`` to the layer's input."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, fixed: Tensor, layer: nn.Linear | nn.Conv2d) -> Tensor:
        ctx.save_for_backward(fixed)
        ctx.shape, ctx.layer = x.shape, layer
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        (fixed,), layer = ctx.saved_tensors, ctx.layer
        if isinstance(layer, nn.Linear):
            return gradient, gradient @ fixed, None, None
        how = layer.stride, layer.padding, layer.dilation, layer.groups
        return gradient, torch.nn.grad.conv2d_input(ctx.shape, fixed, gradient, *how), None, None


@contextmanager
def feedback_alignment(model: nn.Module, *, seed: int = 0) -> Iterator[None]:
    """Send gradients back through fixed random weights (Lillicrap et al. 2016), in every linear layer and convolution.

    The forward pass and each layer's weight gradient are as before; only what goes on to the layer's input passes
    through a fixed matrix drawn as PyTorch draws the layer's first weights. Weights that a module uses without a layer,
    as ``nn.MultiheadAttention`` does, stay with backpropagation.

    Parameters
    ----------
    model : nn.Module
        Changed inside the ``with`` block only.
    seed : of the fixed weights.

    Raises
    ------
    InputError
        If the model has no linear layer and no convolution, or one with padding other than zeros.

    Examples
    --------
    >>> layer = nn.Linear(2, 1, bias=False)
    >>> x = torch.ones(1, 2, requires_grad=True)
    >>> with feedback_alignment(layer): layer(x).sum().backward()
    >>> torch.equal(layer.weight.grad, x), torch.equal(x.grad, layer.weight)
    (True, False)
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    if not layers:
        raise InputError(f"{type(model).__name__} has neither linear layers nor convolutions to send feedback through")
    padded = [
        name
        for name, m in layers.items()
        if isinstance(m, nn.Conv2d) and (m.padding_mode != "zeros" or isinstance(m.padding, str))
    ]
    if padded:
        raise InputError(f"the convolution {padded[0]!r} pads by a name: zeros and a number are needed")
    for name, layer in layers.items():
        g = torch_generator(seed, "fixed", name)
        bound = 1 / math.sqrt(layer.weight[0].numel())
        fixed = (torch.rand(layer.weight.shape, generator=g) * (2 * bound) - bound).to(layer.weight)
        layer.forward = partial(_through, layer, fixed)
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def _through(layer: nn.Linear | nn.Conv2d, fixed: Tensor, x: Tensor) -> Tensor:
    output = type(layer).forward(layer, x.detach())
    return _FeedBack.apply(output, x, fixed, layer) if x.requires_grad and torch.is_grad_enabled() else output


class PermutedFeedback(DirectFeedback):
    """A control: every example's block feedback is computed from another example's error."""

    def _feedback(
        self, surrogate: nn.Module, h: Tensor, error: Tensor, labels: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        g = torch_generator(derive(self.seed, "permuted", self.steps))
        order = torch.randperm(len(error), generator=g).to(error.device)
        return super()._feedback(surrogate, h, error[order], labels, keep=keep)
