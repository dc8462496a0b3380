"""nGPT: a transformer all of whose vectors along the width lie on the unit sphere (Loshchilov et al. 2024).

A block moves the hidden state towards what attention and the MLP suggest, and puts it back on the sphere:

    h = Norm(h + a_A * (Norm(Attn(h)) - h))        h = Norm(h + a_M * (Norm(MLP(h)) - h))

with learned steps a >= 0 a dimension. There is no RMSNorm, no weight decay and no warm-up; weights return to the sphere
after every step of the optimizer, see :class:`~fairtrial.lm.low_precision.sphere.HypersphereHook`.

>>> import torch
>>> model = NGPT(NGPTConfig(vocab_size=16, width=32, layers=1, heads=2))
>>> ids = torch.arange(16).view(2, 8)
>>> model(ids, labels=ids).logits.shape
torch.Size([2, 8, 16])
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.lm.low_precision.sphere import SphereMatrix, check_on_sphere, normalize_matrices
from fairtrial.lm.low_precision.transformer import (
    AttentionProducts,
    LMOutput,
    TransformerConfig,
    check_ids,
    linear,
    merge_heads,
    rotary,
    rotate,
    split_heads,
    with_loss,
)
from fairtrial.options import checked_number
from fairtrial.seeds import torch_generator


@dataclass(frozen=True)
class NGPTConfig(TransformerConfig):
    """The size of an nGPT, see :class:`~fairtrial.lm.low_precision.transformer.TransformerConfig`.

    Attributes
    ----------
    step
        Initial value of the steps a_A and a_M, of the order of 1 / layers.
    """

    step: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_number(self.step, "step", least=0, most=1)


class StoredScaled(nn.Module):
    """A vector of parameters kept at another size, which sets the size of its steps under Adam.

    ``weight`` starts at ``scale``; what is returned is ``weight * init / scale``, which starts at ``init``.
    """

    def __init__(self, size: int, init: float, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), scale))
        self.factor = init / scale

    def forward(self) -> torch.Tensor:
        """Return the vector (size,)."""
        return self.weight * self.factor


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors at length 1 along the last axis, computed in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.normalize(wide, dim=-1).to(x.dtype)


class NGPTAttention(nn.Module):
    """Attention with queries and keys on the sphere of their head, scaled by learned s_qk."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.o = (linear(config.width, config.width) for _ in range(4))
        self.qk_scale = StoredScaled(config.width, 1.0, config.width**-0.5)
        self.products = AttentionProducts()

    def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return (B, T, d) of hidden states of that shape."""
        q, k, v = (split_heads(layer(h), self.heads) for layer in (self.q, self.k, self.v))  # (B, heads, T, d_head)
        scale = self.qk_scale().view(self.heads, 1, -1).to(h.dtype)
        q, k = (unit(rotate(x, cos, sin)) * scale for x in (q, k))
        return self.o(merge_heads(self.products(q, k, v, math.sqrt(q.shape[-1]))))


class NGPTMLP(nn.Module):
    """SwiGLU whose two inputs are scaled by learned vectors, the gate by sqrt(d) too."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        self.up, self.gate = (linear(config.width, config.inner) for _ in range(2))
        self.down = linear(config.inner, config.width)
        self.up_scale, self.gate_scale = (StoredScaled(config.inner, 1.0, 1.0) for _ in range(2))
        self.root = math.sqrt(config.width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return (B, T, d) of hidden states of that shape."""
        up = self.up(h) * self.up_scale().to(h.dtype)
        gate = self.gate(h) * (self.gate_scale() * self.root).to(h.dtype)
        return self.down(up * F.silu(gate))


class NGPTBlock(nn.Module):
    """One block: a step towards attention's output, and one towards the MLP's."""

    def __init__(self, config: NGPTConfig) -> None:
        super().__init__()
        self.attention = NGPTAttention(config)
        self.mlp = NGPTMLP(config)
        init, scale = config.step, config.width**-0.5
        self.attention_step, self.mlp_step = (StoredScaled(config.width, init, scale) for _ in range(2))

    def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states (B, T, d), of length 1."""
        h = towards(h, self.attention(h, cos, sin), self.attention_step())
        return towards(h, self.mlp(h), self.mlp_step())


def towards(h: torch.Tensor, suggestion: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return Norm(h + |a| (Norm(suggestion) - h))."""
    return unit(h + step.abs().to(h.dtype) * (unit(suggestion) - h))


class NGPT(nn.Module):
    """The language model.

    Parameters
    ----------
    config
        Its size.
    seed
        Of the initial weights: normal, then put on the sphere.

    Notes
    -----
    In training mode the forward pass refuses to run after a step of an optimizer without
    :class:`~fairtrial.lm.low_precision.sphere.HypersphereHook`.
    """

    def __init__(self, config: NGPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(config, NGPTConfig):
            raise InputError(f"an nGPT is made from an NGPTConfig, not {type(config).__name__}")
        self.config = config
        self.embedding = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.width)
        self.blocks = nn.ModuleList(NGPTBlock(config) for _ in range(config.layers))
        self.lm_head = linear(config.width, config.vocab_size)
        self.logit_scale = StoredScaled(config.vocab_size, 1.0, config.width**-0.5)
        generator = torch_generator(seed, "ngpt weights")
        with torch.no_grad():
            for matrix in self.sphere_matrices():
                matrix.weight.normal_(generator=generator)
        normalize_matrices([*self.sphere_matrices()])

    def sphere_matrices(self) -> Iterator[SphereMatrix]:
        """Yield the matrices that live on the sphere, with the axis that runs along the width."""
        yield SphereMatrix("embedding.weight", self.embedding.weight, 1)
        yield SphereMatrix("lm_head.weight", self.lm_head.weight, 1)
        for i, block in enumerate(self.blocks):
            for path in ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate"):
                yield SphereMatrix(f"blocks.{i}.{path}.weight", block.get_submodule(path).weight, 1)  # type: ignore[arg-type]
            for path in ("attention.o", "mlp.down"):
                yield SphereMatrix(f"blocks.{i}.{path}.weight", block.get_submodule(path).weight, 0)  # type: ignore[arg-type]

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> LMOutput:
        """Return logits (B, T, V) of token ids (B, T), and the next-token loss where labels (the ids) are given.

        Raises
        ------
        InputError
            Not such ids; in training mode, weights that have left the sphere.
        """
        if not torch.compiler.is_compiling():
            check_ids(ids, labels, self.config.vocab_size)
            if self.training:
                check_on_sphere(self.sphere_matrices())
        h = unit(self.embedding(ids))
        cos, sin = rotary(self.config, ids.shape[1], ids.device)
        for block in self.blocks:
            h = block(h, cos, sin)
        return with_loss(self.lm_head(h) * self.logit_scale().to(h.dtype), labels)
