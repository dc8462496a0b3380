"""Rounding to the 4-bit numbers E2M1 and the 8-bit scales E4M3, to nearest or at random.

E2M1 holds 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign. Between two neighbours the spacing is half the largest power of
two that is at most the number (at least 0.5), so that rounding is one multiplication, one rounding to whole numbers and
one multiplication back, and ties go to the even mantissa because ``torch.round`` sends them to even multiples.

>>> import torch
>>> round_e2m1(torch.tensor([0.25, 0.75, 2.5, 3.5, 5.0, 7.0, -0.3]))
tensor([ 0.0000,  1.0000,  2.0000,  4.0000,  4.0000,  6.0000, -0.5000])
"""

from __future__ import annotations

import functools

import torch

from fairtrial.errors import FairtrialError
from fairtrial.seeds import torch_generator

E2M1_MAX = 6.0
E4M3_MAX = 448.0
_EXPONENT = 0x7F800000  # the exponent bits of a float32


class RoundingError(FairtrialError, RuntimeError):
    """Stochastic rounding does not work on this device: training on it would go wrong silently."""


def round_e2m1(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round to E2M1: to nearest (ties to even), or at random with ``generator``, up with the fractional part's chance.

    Parameters
    ----------
    x
        float32 of any shape. Beyond 6 it saturates; NaN stays NaN.
    generator
        On the device of ``x``. Rounding is then unbiased for ``|x| <= 6``, to the 16 bits that are drawn an element.

    Returns
    -------
    torch.Tensor
        Of the shape of ``x``, a new tensor, without a gradient.
    """
    return round_e2m1_(x.detach().float().clone(memory_format=torch.contiguous_format), generator)


def round_e2m1_(x: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Round a contiguous float32 tensor to E2M1 in place; see :func:`round_e2m1`."""
    x.clamp_(-E2M1_MAX, E2M1_MAX)
    power = torch.bitwise_and(x.view(torch.int32), _EXPONENT).view(torch.float32).clamp_min_(1.0)  # 1, 2 or 4
    x.add_(x).div_(power)  # in units of the spacing, power / 2
    if generator is None:
        x.round_()
    else:
        x.add_(uniform_bits(x, generator), alpha=2**-16).add_(0.5 + 2**-17).floor_()
    return x.mul_(power.mul_(0.5))


def uniform_bits(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return 16 random bits an element as int16, of the shape of ``like``: four elements a draw of the generator."""
    drawn = torch.empty((like.numel() + 3) // 4, dtype=torch.int64, device=like.device)
    drawn.random_(-(2**63), None, generator=generator)
    return drawn.view(torch.int16)[: like.numel()].view(like.shape)


def round_e4m3(scale: torch.Tensor, *, up: bool = False) -> torch.Tensor:
    """Round positive scales to E4M3: to nearest, or with ``up`` to the next that is not smaller.

    Parameters
    ----------
    scale
        float32, at least 0. Beyond 448 it saturates; NaN and infinity give NaN.

    Returns
    -------
    torch.Tensor
        float8_e4m3fn, of the same shape.
    """
    scale = torch.where(torch.isinf(scale), torch.nan, scale).clamp(max=E4M3_MAX)
    rounded = scale.to(torch.float8_e4m3fn)
    if up:  # the codes of positive numbers are in their order
        short = rounded.float() < scale
        rounded = (rounded.view(torch.uint8) + short.to(torch.uint8)).view(torch.float8_e4m3fn)
    return rounded


@functools.cache
def check_device(device: str) -> None:
    """Test stochastic rounding on a device, once a process.

    Raises
    ------
    RoundingError
        The mean of many draws is off, or there are more or fewer zeros than chance gives.
    """
    check_stochastic(round_e2m1, device)


def check_stochastic(rounding: object, device: str = "cpu") -> None:
    """Raise :class:`RoundingError` unless ``rounding(x, generator)`` is unbiased, gives neighbours only and both."""
    draws = 16384
    values = torch.tensor([0.125, 0.8, 1.3, 2.25, 3.7, 5.0], device=device)
    below = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0, 4.0], device=device)
    above = torch.tensor([0.5, 1.0, 1.5, 3.0, 4.0, 6.0], device=device)
    found = rounding(values.repeat(draws, 1), torch_generator(0, "self-test", device=device))  # type: ignore[operator]
    chance = (values - below) / (above - below)
    error = (chance * (1 - chance) / draws).sqrt() * (above - below)
    off = (found.mean(0) - values).abs() / error
    if bool(((found != below) & (found != above)).any()) or bool((off > 6).any()):
        zeros = float((found[:, 0] == 0).float().mean())
        raise RoundingError(
            f"stochastic rounding is broken on {device}: means {[round(v, 3) for v in found.mean(0).tolist()]} of "
            f"{[round(v, 3) for v in values.tolist()]}, zeros {zeros:.2f} instead of 0.75: do not train on it; "
            "update PyTorch or use another device"
        )
