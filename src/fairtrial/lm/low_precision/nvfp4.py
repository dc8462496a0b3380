"""The format NVFP4: 4-bit numbers in blocks of 16, with an 8-bit scale a block and one scale for the tensor.

A block runs along the axis that a product contracts. With tensor scale t, the block scale is s = E4M3(amax / (6 t)) and
the value kept is E2M1(x / (s t)) * s * t. The usual recipe takes t from the tensor's largest value; on unit rows a
constant does as well.

>>> import torch
>>> packed = quantize_nvfp4(torch.eye(2, 16), axis=-1)
>>> packed.codes.shape, packed.scales.shape, packed.dequantize()[0, 0].item()
(torch.Size([2, 8]), torch.Size([2, 1]), 1.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fairtrial.errors import InputError
from fairtrial.lm.low_precision.rounding import E2M1_MAX, E4M3_MAX, check_device, round_e2m1, round_e2m1_, round_e4m3
from fairtrial.options import checked_count

BLOCK = 16


@dataclass(frozen=True)
class NVFP4Tensor:
    """A tensor in NVFP4.

    Attributes
    ----------
    codes
        uint8 (..., K / 2): two numbers a byte, the first in the low four bits (sign, two bits of exponent, one of
        mantissa). The contracted axis is last.
    scales
        float8_e4m3fn (..., K / 16).
    tensor_scale
        The one factor of all scales.
    axis
        Where the contracted axis was.
    dtype
        Of the tensor that was quantized.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: float
    axis: int
    dtype: torch.dtype

    def dequantize(self) -> torch.Tensor:
        """Return the values, in the shape and dtype of the tensor that was quantized."""
        values = decode(unpack(self.codes)).unflatten(-1, (-1, BLOCK))
        values = values * (self.scales.float() * self.tensor_scale)[..., None]
        return values.flatten(-2).movedim(-1, self.axis).to(self.dtype)


def quantize_nvfp4(
    x: torch.Tensor,
    axis: int = -1,
    *,
    tensor_scale: float | str = "tensor",
    rounding: str = "nearest",
    scale_rounding: str = "nearest",
    block: str = "1x16",
    generator: torch.Generator | None = None,
) -> NVFP4Tensor:
    """Quantize a tensor to NVFP4 and pack it.

    Parameters
    ----------
    x
        Floating point, at least one axis, of any shape.
    axis
        The axis a product will contract; blocks run along it. Its length is a multiple of 16.
    tensor_scale
        A positive number, or ``"tensor"``: the largest absolute value over 6 * 448.
    rounding
        Of the numbers: ``"nearest"`` or ``"stochastic"`` (needs ``generator``).
    scale_rounding
        Of block scales: ``"nearest"``, whose block maxima may be clipped, or ``"up"``, which never clips and which
        unbiased stochastic rounding needs.
    block
        ``"1x16"``, or ``"16x16"`` over ``axis`` and the last of the others, so that a matrix and its transpose get the
        same values.

    Returns
    -------
    NVFP4Tensor
        NaN and infinities make their whole block NaN.

    Raises
    ------
    InputError
        Another dtype or option, an axis that is not there or not of whole blocks, a tensor scale that is not positive.
    """
    check_float(x)
    check_options(rounding, scale_rounding, block)
    checked_count(axis, "axis", least=-x.ndim, most=x.ndim - 1)
    if x.shape[axis] % BLOCK or not x.numel():
        raise InputError(
            f"axis {axis} has length {x.shape[axis]}, which is not made of blocks of {BLOCK}: pad it with zeros first "
            "(NVFP4Linear does so itself)"
        )
    if (rounding == "stochastic") != (generator is not None):
        raise InputError(f"rounding={rounding!r}: give a torch.Generator with 'stochastic', and only then")
    if generator is not None:
        check_device(str(x.device))
    t = amax_scale(x) if tensor_scale == "tensor" else checked_scale(tensor_scale)
    blocks, scales = block_scales(x.detach().movedim(axis, -1), t, up=scale_rounding == "up", square=block == "16x16")
    codes = encode(round_e2m1(blocks * reciprocal(scales, t), generator))
    return NVFP4Tensor(pack(codes.flatten(-2)), scales[..., 0].contiguous(), float(t), axis, x.dtype)


def fake_quantize(
    x: torch.Tensor,
    axis: int,
    tensor_scale: float | torch.Tensor,
    *,
    up: bool = False,
    square: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return what NVFP4 makes of a tensor, in its own dtype: equal to quantizing, packing and dequantizing.

    The hot path of emulation: one pass for the blocks' maxima, one for the division, and rounding in place.

    Parameters
    ----------
    x
        Floating point; the length of ``axis`` is a multiple of 16.
    axis
        The contracted axis, the last or the one before it.
    tensor_scale
        A number or a scalar tensor.
    up
        Whether block scales are rounded up.
    square
        Blocks of 16 x 16 over the last two axes.
    generator
        For stochastic rounding.

    Returns
    -------
    torch.Tensor
        Of the shape of ``x``, contiguous.
    """
    axis = axis % x.ndim
    blocks = x.float().unflatten(axis, (-1, BLOCK))  # (..., K / 16, 16, ...)
    amax = blocks.abs().amax(axis + 1, keepdim=True)
    if square:
        amax = square_amax(amax, x.ndim if axis == x.ndim - 2 else axis - 1)
    scales = round_e4m3(amax / (E2M1_MAX * tensor_scale), up=up).float()
    rounded = round_e2m1_(torch.mul(blocks, reciprocal(scales, tensor_scale)).contiguous(), generator)
    return rounded.mul_(scales * tensor_scale).view(x.shape).to(x.dtype)


def block_scales(x: torch.Tensor, t: float, *, up: bool, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks (..., K / 16, 16) of the last axis, float32, and their E4M3 scales (..., K / 16, 1)."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    if square:
        amax = square_amax(amax, x.ndim - 2)
    return blocks, round_e4m3(amax / (E2M1_MAX * t), up=up)


def square_amax(amax: torch.Tensor, axis: int) -> torch.Tensor:
    """Return maxima over 16 neighbours along ``axis`` of maxima that were taken along the other axis."""
    if axis < 0 or amax.shape[axis] % BLOCK:
        raise InputError("blocks of 16 x 16 need a matrix both of whose sides are multiples of 16")
    wide = amax.unflatten(axis, (-1, BLOCK)).amax(axis + 1, keepdim=True)
    return wide.expand(*wide.shape[: axis + 1], BLOCK, *wide.shape[axis + 2 :]).flatten(axis, axis + 1)


def reciprocal(scales: torch.Tensor, t: float | torch.Tensor) -> torch.Tensor:
    """Return 1 / (s t), and 0 where the scale is 0, so that a block of zeros stays one."""
    scales = scales.float()
    return torch.where(scales == 0, 0.0, 1 / (scales * t))


def amax_scale(x: torch.Tensor) -> float:
    """Return the usual tensor scale, amax / (6 * 448); 1 for a tensor of zeros or one that is not finite."""
    amax = float(x.detach().abs().max())
    return amax / (E2M1_MAX * E4M3_MAX) if 0 < amax < math.inf else 1.0


# ------------------------------------------------------------------------------------------------------------- packing


def encode(values: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes (uint8, 0 to 15) of E2M1 values; NaN, which no code means, becomes 0."""
    size = values.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).nan_to_num(0.0)
    return code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 values (float32) of 4-bit codes."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
    return torch.cat([table, -table])[codes.long()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return codes (..., K) as bytes (..., K / 2), the first of two in the low four bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes (..., K) of bytes (..., K / 2)."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


# ------------------------------------------------------------------------------------------------------------- checking


def check_float(x: object) -> None:
    """Refuse what is not a floating-point tensor with an axis."""
    if not isinstance(x, torch.Tensor):
        raise InputError(f"a tensor is quantized, not a {type(x).__name__}: give a torch.Tensor")
    if not x.is_floating_point():
        raise InputError(f"a tensor of {x.dtype} cannot be quantized: convert it to float32 first")
    if not x.ndim:
        raise InputError("a scalar has no axis to quantize along: give a vector or a matrix")


def checked_scale(scale: object) -> float:
    """Return a tensor scale, a positive number that float32 holds the products of."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 2**-64 <= scale <= 2**64:
        raise InputError(f"tensor_scale={scale!r}: give a positive number such as 2**-4, or 'tensor'")
    return float(scale)


def check_options(rounding: str, scale_rounding: str, block: str) -> None:
    """Refuse unknown ways to round and block shapes."""
    for name, value, known in (
        ("rounding", rounding, ("nearest", "stochastic")),
        ("scale_rounding", scale_rounding, ("nearest", "up")),
        ("block", block, ("1x16", "16x16")),
    ):
        if value not in known:
            raise InputError(f"{name}={value!r}: give {' or '.join(map(repr, known))}")
