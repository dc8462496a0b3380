"""Where a causal language model keeps its dense feed-forward layers, and their weights as (out, in) matrices.

Gated: Llama, Mistral, Qwen, Gemma, OLMo, Granite, SmolLM3 (separate gate and up) and Phi-3 (fused). Plain: GPT-2,
GPT-NeoX, Phi.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fairtrial.errors import InputError


@dataclass(frozen=True)
class _Form:
    """Names of the linears of a feed-forward module; ``gate == up`` is one fused matrix, gate first."""

    gate: str | None
    up: str
    down: str


_FORMS = (
    _Form("gate_proj", "up_proj", "down_proj"),
    _Form("gate_up_proj", "gate_up_proj", "down_proj"),
    _Form(None, "c_fc", "c_proj"),
    _Form(None, "dense_h_to_4h", "dense_4h_to_h"),
    _Form(None, "fc1", "fc2"),
)
_KNOWN = "Llama, Mistral, Qwen, Gemma, OLMo 2, Granite, SmolLM3, Phi, Phi-3, GPT-2 and GPT-NeoX"
_ACTIVATIONS = ("act_fn", "activation_fn", "act")


@dataclass(frozen=True, eq=False)
class DenseFeedForward:
    """The weights of one dense FFN, sharing memory with the model, outside autograd.

    ``up`` (m, d), ``down`` (d, m), ``gate`` (m, d) or ``None``; ``up_bias`` (m,) and ``down_bias`` (d,) or ``None``.
    """

    gate: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: nn.Module
    dropout: float

    @property
    def size(self) -> tuple[int, int]:
        """(m, d): neurons and width."""
        return self.up.shape[0], self.up.shape[1]

    def matrices(self) -> list[torch.Tensor]:
        """Return gate (where there is one), up and down."""
        return [matrix for matrix in (self.gate, self.up, self.down) if matrix is not None]


@dataclass(frozen=True, eq=False)
class Place:
    """A block's attribute that holds its feed-forward module; ``name`` is the module's path in the model."""

    name: str
    block: nn.Module
    attribute: str

    @property
    def module(self) -> nn.Module:
        """The feed-forward module."""
        return getattr(self.block, self.attribute)


def feed_forwards(model: Any) -> list[Place]:
    """Return the feed-forward modules of every block, in order of depth.

    Raises
    ------
    InputError
        An architecture without such modules, one that is a mixture of experts already, or quantised weights.
    """
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None) is not None:
        raise InputError(
            f"{type(model).__name__} is quantised: dequantise it and save it, or load the original weights"
        )
    places = [
        Place(f"{path}.mlp" if path else "mlp", block, "mlp")
        for path, block in model.named_modules()
        if isinstance(getattr(block, "mlp", None), nn.Module)
    ]
    experts = [p.name for p in places if {"experts", "router"} & {name for name, _ in p.module.named_children()}]
    if experts:
        raise InputError(f"{experts[0]} is a mixture of experts already: give a dense model")
    if not places or not all(_form(place.module) for place in places):
        known = f"known are {_KNOWN}"
        raise InputError(f"{type(model).__name__} keeps no dense feed-forward layer in its blocks' 'mlp': {known}")
    return places


def read_feed_forward(module: nn.Module, where: str = "the feed-forward layer") -> DenseFeedForward:
    """Return the weights of a feed-forward module of a known form.

    Raises
    ------
    InputError
        Unknown form; weights that are no floating-point matrices; biases in a gated layer.
    """
    form = _form(module)
    if form is None:
        raise InputError(f"{where}: {type(module).__name__} is of no known form: known are the layers of {_KNOWN}")
    (up, up_bias), (down, down_bias) = _linear(module, form.up, where), _linear(module, form.down, where)
    gate = None
    if form.gate is not None:
        if up_bias is not None or down_bias is not None:
            raise InputError(f"{where}: a gated layer with biases (mlp_bias=True) is not supported")
        gate, up = up.chunk(2) if form.gate == form.up else (_linear(module, form.gate, where)[0], up)
    activation = next((getattr(module, name) for name in _ACTIVATIONS if hasattr(module, name)), None)
    if not isinstance(activation, nn.Module):
        raise InputError(f"{where}: {type(module).__name__} has no activation module ({', '.join(_ACTIVATIONS)})")
    dropout = getattr(module, "dropout", None)
    return DenseFeedForward(
        gate, up, down, up_bias, down_bias, activation, dropout.p if isinstance(dropout, nn.Dropout) else 0.0
    )


def _form(module: nn.Module) -> _Form | None:
    children = {name for name, _ in module.named_children()}
    return next((form for form in _FORMS if {form.gate or form.up, form.up, form.down} <= children), None)


def _linear(module: nn.Module, name: str, where: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a linear's (out, in) weight and its bias."""
    linear = getattr(module, name)
    weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise InputError(f"{where}.{name} holds no floating-point matrix: quantised weights are refused")
    weight = weight.detach().T if type(linear).__name__ == "Conv1D" else weight.detach()  # Conv1D stores (in, out)
    return weight, None if bias is None else bias.detach()
