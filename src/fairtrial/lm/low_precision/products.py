"""Products of which both operands are quantized, forward and backward.

The three products of Y = A B^T contract different axes, so that A and B are quantized twice each, along the axis at
hand, and so is the gradient. This is training in 4 bits, not quantization-aware training, whose gradients are exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.lm.low_precision.nvfp4 import BLOCK, fake_quantize
from fairtrial.lm.low_precision.recipe import Operand, Recipe
from fairtrial.lm.low_precision.rotation import rotate
from fairtrial.lm.low_precision.rounding import E2M1_MAX, E4M3_MAX, check_device, uniform_bits
from fairtrial.seeds import torch_generator

HEADROOM = 3
"""Powers of two left above the last step's largest gradient, of the 17 that block scales span."""


class Noise:
    """The random numbers of stochastic rounding: a generator a device, all of one seed.

    The first use on a device tests its rounding.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._generators: dict[str, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device."""
        name = str(device)
        if name not in self._generators:
            check_device(name)
            self._generators[name] = torch_generator(self.seed, "stochastic rounding", device=device)
        return self._generators[name]


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b^T of (..., M, K) and (..., N, K), accumulated in high precision. A 4-bit kernel would go here."""
    return a @ b.mT


def quantized_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    recipe: Recipe,
    noise: Noise,
    grad_amax: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a b^T with all operands of it and of its gradients quantized.

    Parameters
    ----------
    a, b
        (..., M, K) and (..., N, K), of a floating dtype. K, M and N need not be multiples of 16: blocks are filled up
        with zeros.
    recipe
        ``y_x``, ``dw_x`` are of ``a``; ``y_w``, ``dx_w`` of ``b``.
    noise
        For stochastic rounding.
    grad_amax
        A scalar in which the gradient's largest value is kept for the step after (``"pow2-delayed"``).
    bias
        (N,), added as it is.

    Returns
    -------
    torch.Tensor
        (..., M, N) in the dtype of ``a``; differentiable once.
    """
    if a.shape[-1] != b.shape[-1]:  # filled up with zeros, both might fit
        raise InputError(f"{tuple(a.shape)} and {tuple(b.shape)} do not contract: their last axes differ in length")
    return _Product.apply(a, b, bias, recipe, noise, grad_amax)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, bias: Any, recipe: Recipe, noise: Noise, grad_amax: Any) -> torch.Tensor:
        qa = quantized(a, -1, recipe.y_x, noise)
        qb = quantized(b, -1, recipe.y_w, noise).to(a.dtype)
        ctx.save_for_backward(a, qb[..., : b.shape[-1]] if recipe.shares_weight else b)
        ctx.recipe, ctx.noise, ctx.grad_amax, ctx.b_dtype = recipe, noise, grad_amax, b.dtype
        if bias is not None or qb.ndim == 2:
            return F.linear(qa, qb, None if bias is None else bias.to(a.dtype))
        return multiply(qa, qb)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        recipe, noise = ctx.recipe, ctx.noise
        need_a, need_b, need_bias, *_ = ctx.needs_input_grad
        g = g.contiguous()
        delayed = "pow2-delayed" in (recipe.dx_g.tensor_scale, recipe.dw_g.tensor_scale)
        t = delayed_scale(g, ctx.grad_amax) if delayed else None
        da = db = None
        if need_a:
            qg = quantized(g, -1, recipe.dx_g, noise, t)
            if recipe.shares_weight:
                qb = padded(b, -2) if recipe.dx_g.format == "nvfp4" else b
            else:
                qb = quantized(b, -2, recipe.dx_w, noise).to(g.dtype)
            da = multiply(qg, qb.mT)
        if need_b:
            if b.ndim == 2:  # the weights of a layer: all tokens are one axis
                g, a = g.reshape(-1, g.shape[-1]), a.reshape(-1, a.shape[-1])
            if recipe.hadamard:
                g_, a_ = rotate(padded(g, -2), -2), rotate(padded(a, -2), -2)
            else:
                g_, a_ = g, a
            qg, qa = quantized(g_, -2, recipe.dw_g, noise, t), quantized(a_, -2, recipe.dw_x, noise)
            db = multiply(qg.mT, qa.mT).to(ctx.b_dtype)
        dbias = g.reshape(-1, g.shape[-1]).sum(0) if need_bias else None
        return da, db, dbias, None, None, None


def quantized(
    x: torch.Tensor, axis: int, operand: Operand, noise: Noise, delayed: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what is left of an operand (..., M, N) quantized along ``axis``, filled up with zeros to whole blocks."""
    if operand.format == "none":
        return x
    generator = noise.on(x.device) if operand.rounding == "stochastic" else None
    if operand.format == "int4":
        return fake_int4(x, generator)
    square = operand.block == "16x16"
    rows = x.shape[-1 if axis == -2 else -2]
    x = padded(padded(x, axis), -3 - axis) if square else padded(x, axis)
    if operand.tensor_scale == "tensor":
        t: float | torch.Tensor = amax_or_one(x) / (E2M1_MAX * E4M3_MAX)
    elif operand.tensor_scale == "pow2-delayed":
        t = delayed_scale(x, None) if delayed is None else delayed
    else:
        t = operand.tensor_scale  # type: ignore[assignment]
    found = fake_quantize(x, axis, t, up=operand.scale_rounding == "up", square=square, generator=generator)
    return found.narrow(-3 - axis, 0, rows) if square else found


def fake_int4(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return what 4-bit whole numbers from -7 to 7 with one scale make of a tensor, in its own dtype."""
    scale = amax_or_one(x) / 7
    units = x.float() / scale
    if generator is None:
        units.round_()
    else:
        units.add_(uniform_bits(units, generator), alpha=2**-16).add_(0.5 + 2**-17).floor_()
    return units.clamp_(-7, 7).mul_(scale).to(x.dtype)


def padded(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a tensor with zeros at the end of its last axis or the one before, up to a multiple of 16."""
    missing = -x.shape[axis] % BLOCK
    return F.pad(x, (0, missing) if axis == -1 else (0, 0, 0, missing)) if missing else x


def amax_or_one(x: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value as a scalar tensor, without waiting for it; 1 for zeros."""
    amax = x.detach().abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
    return torch.where(amax == 0, 1.0, amax)


def delayed_scale(g: torch.Tensor, history: torch.Tensor | None) -> torch.Tensor:
    """Return a power of two as tensor scale for a gradient from the step before, or from itself the first time.

    ``history``, a scalar that is 0 at first, is given this gradient's largest value, unless that is 0 or not finite.
    """
    amax = g.detach().abs().amax().float() if g.numel() else torch.zeros((), device=g.device)
    last = amax if history is None else torch.where(history == 0, amax, history)
    if history is not None:
        history.copy_(torch.where((amax > 0) & amax.isfinite(), amax, history))
    exponent = torch.ceil(torch.log2(last / (E2M1_MAX * E4M3_MAX))) + HEADROOM
    return torch.where(last == 0, 1.0, torch.exp2(exponent))
