"""The usual transformer that nGPT is compared with: RMSNorm before each part, SwiGLU, rotary positions.

>>> import torch
>>> model = GPT(TransformerConfig(vocab_size=16, width=32, layers=1, heads=2))
>>> model(torch.arange(16).view(2, 8)).logits.shape
torch.Size([2, 8, 16])
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
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
from fairtrial.seeds import torch_generator


class GPTAttention(nn.Module):
    """Causal attention."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q, self.k, self.v, self.o = (linear(config.width, config.width) for _ in range(4))
        self.products = AttentionProducts()

    def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return (B, T, d) of hidden states of that shape."""
        q, k, v = (split_heads(layer(h), self.heads) for layer in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o(merge_heads(self.products(q, k, v, q.shape[-1] ** -0.5)))


class GPTMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up, self.gate = (linear(config.width, config.inner) for _ in range(2))
        self.down = linear(config.inner, config.width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """Return (B, T, d) of hidden states of that shape."""
        return self.down(self.up(h) * F.silu(self.gate(h)))


class GPTBlock(nn.Module):
    """One block, with RMSNorm before each part."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = GPTAttention(config)
        self.mlp = GPTMLP(config)
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(config.width, eps=1e-6) for _ in range(2))

    def forward(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states (B, T, d)."""
        h = h + self.attention(self.attention_norm(h), cos, sin)
        return h + self.mlp(self.mlp_norm(h))


class GPT(nn.Module):
    """The language model.

    Parameters
    ----------
    config
        Its size.
    seed
        Of the initial weights: normal of deviation 0.02, less by the root of twice the blocks where they write to the
        residual stream.
    """

    def __init__(self, config: TransformerConfig, *, seed: int = 0) -> None:
        super().__init__()
        if not isinstance(config, TransformerConfig):
            raise InputError(f"a GPT is made from a TransformerConfig, not {type(config).__name__}")
        self.config = config
        self.embedding = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.width)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.lm_head = linear(config.width, config.vocab_size)
        generator = torch_generator(seed, "gpt weights")
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim == 2:
                    writes = name.endswith(("attention.o.weight", "mlp.down.weight"))
                    weight.normal_(0, 0.02 / (2 * config.layers) ** (0.5 * writes), generator=generator)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> LMOutput:
        """Return logits (B, T, V) of token ids (B, T), and the next-token loss where labels (the ids) are given."""
        if not torch.compiler.is_compiling():
            check_ids(ids, labels, self.config.vocab_size)
        h = self.embedding(ids)
        cos, sin = rotary(self.config, ids.shape[1], ids.device)
        for block in self.blocks:
            h = block(h, cos, sin)
        return with_loss(self.lm_head(self.norm(h)), labels)
