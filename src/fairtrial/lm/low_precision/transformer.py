"""What the two language models share: rotary positions, causal attention, the next-token loss and their output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.lm.low_precision.nvfp4 import BLOCK
from fairtrial.lm.low_precision.products import Noise, quantized_matmul
from fairtrial.lm.low_precision.recipe import Recipe
from fairtrial.options import checked_count, checked_number


@dataclass(frozen=True)
class TransformerConfig:
    """The size of a decoder.

    Attributes
    ----------
    vocab_size
        Number of tokens.
    width
        Of the hidden states, d.
    layers
        Number of blocks.
    heads
        Of attention; they divide the width into heads of even length.
    hidden
        Width inside the MLP; ``None`` is 8/3 of the width, rounded to a multiple of 16.
    rope_base
        Of the rotary positions.
    tie_embeddings
        Refused: nGPT needs input and output embeddings of their own, and GPT is kept like it.
    """

    vocab_size: int
    width: int = 512
    layers: int = 8
    heads: int = 8
    hidden: int | None = None
    rope_base: float = 10_000.0
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", *(["hidden"] if self.hidden is not None else [])):
            checked_count(getattr(self, name), name)
        if self.width % self.heads or self.width // self.heads % 2:
            raise InputError(f"width={self.width} is not {self.heads} heads of even length: change width or heads")
        checked_number(self.rope_base, "rope_base", above=1)
        if self.tie_embeddings:
            raise InputError(
                "tie_embeddings=True: tied embeddings are not supported, as input and output embeddings lie on the "
                "sphere each with a scale of its own: leave it False"
            )

    @property
    def inner(self) -> int:
        """The width inside the MLP."""
        return self.hidden or max(1, round(8 * self.width / 3 / BLOCK)) * BLOCK

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a configuration from what :meth:`to_dict` gave."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted({*values} - known):
            raise InputError(f"unknown key {unknown[0]!r} in the configuration: known are {', '.join(sorted(known))}")
        return cls(**values)


@dataclass
class LMOutput:
    """What a language model returns: ``logits`` (B, T, V) and, with labels, the mean next-token ``loss``."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class AttentionProducts(nn.Module):
    """Causal attention of given queries, keys and values; its two products can be quantized as well."""

    def __init__(self) -> None:
        super().__init__()
        self.recipe: Recipe | None = None
        self.noise: Noise | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Return (B, heads, T, d_head) of queries, keys and values of that shape."""
        if self.recipe is None or self.noise is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        scores = quantized_matmul(q, k, self.recipe, self.noise) * scale  # (B, heads, T, T)
        length = q.shape[-2]
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return quantized_matmul(weights, v.mT.contiguous(), self.recipe, self.noise)


def rotary(config: TransformerConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (T, d_head / 2) of rotary positions."""
    half = config.width // config.heads // 2
    frequency = config.rope_base ** (-torch.arange(half, device=device) / half)
    angle = torch.outer(torch.arange(length, device=device), frequency)
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of every head (B, heads, T, d_head) by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (B, heads, T, d_head) of (B, T, d)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: torch.Tensor) -> torch.Tensor:
    """Return (B, T, d) of (B, heads, T, d_head)."""
    return x.transpose(1, 2).flatten(2)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without bias whose weights are not drawn yet."""
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)


def with_loss(logits: torch.Tensor, labels: torch.Tensor | None) -> LMOutput:
    """Return the output, with the mean loss of each token given those before it; labels of -100 do not count."""
    if labels is None:
        return LMOutput(logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().long())
    return LMOutput(logits, loss)


def check_ids(ids: object, labels: object, vocab_size: int) -> None:
    """Refuse what are no token ids (B, T); their range is looked at on the CPU only, where that is free."""
    for name, value in (("ids", ids), *([("labels", labels)] if labels is not None else [])):
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32) or value.ndim != 2:
            raise InputError(f"{name}: give token ids, an integer tensor of shape (batch, length)")
    assert isinstance(ids, torch.Tensor)
    if isinstance(labels, torch.Tensor) and labels.shape != ids.shape:
        raise InputError(f"labels of shape {tuple(labels.shape)} for ids of {tuple(ids.shape)}: give the ids as labels")
    if not ids.numel():
        raise InputError("ids: the batch is empty")
    if labels is not None and ids.shape[1] < 2:
        raise InputError("labels: texts of one token have no next one: give at least two")
    if isinstance(labels, torch.Tensor) and labels.device.type == "cpu" and int(labels.max()) >= vocab_size:
        raise InputError(f"labels reach to {int(labels.max())}, but vocab_size is {vocab_size}")
    if ids.device.type == "cpu" and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise InputError(f"ids reach from {int(ids.min())} to {int(ids.max())}, but vocab_size is {vocab_size}")
