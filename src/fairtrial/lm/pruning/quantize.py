"""Symmetric integer quantisation that keeps the zeros of a pruned model: zero is a code, and nothing is shifted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairtrial.causal_lm.layout import ChainSpec, block_layouts
from fairtrial.errors import InputError


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix as integer codes and one scale a group of consecutive inputs.

    Attributes
    ----------
    codes
        int8, (out, in), in -(2^(bits-1)-1) .. 2^(bits-1)-1.
    scales
        (out, ceil(in / group_size)), float32; the weight is code * scale of its group.
    bits, group_size
        4 or 8; inputs a group.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group_size: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights, (out, in); a code of 0 is exactly 0."""
        scales = self.scales.repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]
        return (self.codes * scales).to(dtype)

    @property
    def n_bytes(self) -> int:
        """Bytes of the codes at ``bits`` each and of the scales in half precision."""
        return -(-self.codes.numel() * self.bits // 8) + 2 * self.scales.numel()


def quantize_matrix(weight: Tensor, *, bits: int = 4, group_size: int = 128) -> QuantizedMatrix:
    """Quantise one matrix to symmetric integers, the largest magnitude of a group at the largest code.

    Parameters
    ----------
    weight
        (out, in).
    bits
        4 or 8.
    group_size
        Consecutive inputs that share a scale; the last group may be shorter.

    Examples
    --------
    >>> quantize_matrix(torch.tensor([[0.7, 0.0, -0.2]])).codes
    tensor([[ 7,  0, -2]], dtype=torch.int8)
    """
    if bits not in (4, 8):
        raise InputError(f"bits must be 4 or 8, got {bits}")
    if group_size < 1:
        raise InputError(f"group_size must be positive, got {group_size}")
    n_in = weight.shape[1]
    padded = nn.functional.pad(weight.float(), (0, -n_in % group_size)).unflatten(1, (-1, group_size))
    top = 2 ** (bits - 1) - 1
    scales = padded.abs().amax(2) / top  # (out, groups)
    codes = (padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round_()
    codes = codes.clamp_(-top, top).to(torch.int8)
    return QuantizedMatrix(codes.flatten(1)[:, :n_in].contiguous(), scales, bits, group_size)


@torch.no_grad()
def quantize_weights(model: nn.Module, *, bits: int = 4, group_size: int = 128, spec: ChainSpec | None = None) -> int:
    """Round every matrix of the decoder blocks to symmetric integers, in place, and return the bytes they would take.

    The weights stay in the model's dtype, at the values an integer kernel would use, so the model runs, is measured and
    is saved as before; zeros stay zeros. Embeddings, head and norms are left alone.

    Parameters
    ----------
    model
        A causal language model of a known architecture (or with a ``spec``).
    bits, group_size
        As in :func:`quantize_matrix`.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> quantize_weights(model, bits=8)       # 4 x 8 x 8 and 3 x 12 x 8 codes, 64 scales of two bytes
    672
    """
    n_bytes = 0
    for layout in block_layouts(model, spec):
        for view in layout:
            matrix = quantize_matrix(view.weight, bits=bits, group_size=group_size)
            view.weight.copy_(matrix.dequantize().to(view.weight))
            n_bytes += matrix.n_bytes
    return n_bytes
