"""A linear layer whose three products are done in 4 bits, and the conversion of any model's layers into it.

>>> import torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
>>> convert_linears(model, recipe="nvfp4", skip=("2",))
('0',)
>>> model(torch.ones(3, 32)).shape
torch.Size([3, 4])
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable

import torch
from torch import nn

from fairtrial.errors import InputError
from fairtrial.lm.low_precision.nvfp4 import BLOCK
from fairtrial.lm.low_precision.products import Noise, quantized_matmul
from fairtrial.lm.low_precision.recipe import Recipe, make_recipe
from fairtrial.lm.low_precision.transformer import AttentionProducts
from fairtrial.options import checked_count

logger = logging.getLogger(__name__)


class NVFP4Linear(nn.Linear):
    """``nn.Linear`` with 4-bit products, emulated: values are those of the format, sums those of the device.

    Y = q(X) q(W)^T, dX = sr(dY) q(W^T)^T, dW = sr(dY^T) q(X^T)^T, each operand quantized along its contracted axis. The
    weights stay in their own precision. Lengths that are no multiples of 16 are filled up with zeros.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As of ``nn.Linear``.
    recipe
        A name or a :class:`~fairtrial.lm.low_precision.recipe.Recipe`.
    noise
        The random numbers of stochastic rounding, shared with other layers; by default those of seed 0.

    Notes
    -----
    ``grad_amax`` holds the last gradient's largest value. It is not in the state dict: after loading, the first step
    takes its own.
    """

    grad_amax: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe = "nvfp4",
        noise: Noise | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = recipe if isinstance(recipe, Recipe) else make_recipe(recipe)
        self.noise = noise or Noise()
        self.register_buffer("grad_amax", torch.zeros((), device=device), persistent=False)
        for width in (in_features, out_features):
            if width % BLOCK and self.recipe.name != "none":
                log_padding(width)

    @classmethod
    def from_linear(cls, linear: nn.Linear, recipe: Recipe, noise: Noise) -> NVFP4Linear:
        """Return a layer that shares the parameters of ``linear``."""
        layer = cls(
            linear.in_features, linear.out_features, linear.bias is not None, "meta", recipe=recipe, noise=noise
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.grad_amax = torch.zeros((), device=linear.weight.device)
        return layer.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) of inputs (..., in_features)."""
        if not x.is_floating_point():
            raise InputError(f"a linear layer was given {x.dtype}: convert the inputs to float32 first")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return quantized_matmul(x, self.weight, self.recipe, self.noise, self.grad_amax, self.bias)

    def extra_repr(self) -> str:
        """Return the sizes and the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}"


@functools.cache
def log_padding(width: int) -> None:
    """Log once a width that blocks do not divide."""
    logger.warning("a layer of width %d is filled up with zeros to a multiple of %d", width, BLOCK)


def convert_linears(
    model: nn.Module,
    recipe: str | Recipe = "nvfp4",
    *,
    tensor_scale: float | str = 2**-4,
    grad_scale: float | str = "pow2-delayed",
    weight_block: str = "1x16",
    hadamard: bool = False,
    attention: str = "bf16",
    skip: Iterable[str] = ("lm_head",),
    skip_last: int = 0,
    seed: int = 0,
) -> tuple[str, ...]:
    """Replace the linear layers of any model by 4-bit ones, in place; names, order and parameters stay.

    Parameters
    ----------
    model
        Any module that holds ``nn.Linear``. Subclasses of it (LoRA, those of ``nn.MultiheadAttention``) stay.
    recipe
        ``"nvfp4"``, ``"int4"``, ``"none"`` or a :class:`~fairtrial.lm.low_precision.recipe.Recipe`; of a recipe given
        as such the next four parameters are not asked.
    tensor_scale, grad_scale, weight_block, hadamard
        See :func:`~fairtrial.lm.low_precision.recipe.make_recipe`.
    attention
        ``"bf16"`` leaves attention's own two products in the model's precision; ``"nvfp4"`` quantizes them too, in
        :class:`~fairtrial.lm.low_precision.ngpt.NGPT` and :class:`~fairtrial.lm.low_precision.gpt.GPT`.
    skip
        Layers to leave, by their whole dotted name or its last part.
    skip_last
        Leaves the linear layers of the last so many blocks.
    seed
        Of stochastic rounding.

    Returns
    -------
    tuple[str, ...]
        The names of the layers that were replaced.

    Raises
    ------
    InputError
        No layer is left to replace, a name in ``skip`` that no layer has, or an option there is not.
    UnknownNameError
        No such recipe.
    """
    if isinstance(model, nn.Linear):
        raise InputError("the model is one linear layer: make an NVFP4Linear, or wrap it in nn.Sequential")
    if not isinstance(recipe, Recipe):
        recipe = make_recipe(
            recipe, tensor_scale=tensor_scale, grad_scale=grad_scale, weight_block=weight_block, hadamard=hadamard
        )
    if attention not in ("bf16", "nvfp4"):
        raise InputError(f"attention={attention!r}: give 'bf16' or 'nvfp4'")
    names = [name for name, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear]
    skip = checked_skip(skip, names)
    chosen = [
        name
        for name in names
        if not any(is_called(name, left) for left in skip) and name not in _last(names, skip_last)
    ]
    if not chosen:
        raise InputError(f"{type(model).__name__} has no nn.Linear to replace, but for those that are skipped")
    products = [module for module in model.modules() if isinstance(module, AttentionProducts)]
    if attention == "nvfp4" and not products:
        raise InputError(f"attention='nvfp4' needs a model of this package, not {type(model).__name__}: leave 'bf16'")
    noise = Noise(seed)
    made: dict[int, NVFP4Linear] = {}
    for name in chosen:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        parent, _, last = name.rpartition(".")
        layer = made.setdefault(id(linear), NVFP4Linear.from_linear(linear, recipe, noise))
        model.get_submodule(parent)._modules[last] = layer
    if attention == "nvfp4":
        for module in products:
            module.recipe, module.noise = recipe, noise
    return tuple(chosen)


def checked_skip(skip: str | Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Return the names or last parts of names of layers to skip; a model may have no lm_head, but the others it has."""
    skip, names = (skip,) if isinstance(skip, str) else tuple(skip), list(names)
    for name in skip:
        if name != "lm_head" and not any(is_called(found, name) for found in names):
            raise InputError(f"skip={name!r}: no linear layer is called so: give a name or its last part")
    return skip


def is_called(name: str, wanted: str) -> bool:
    """Return whether a layer has a name, whole or as the last part of its own."""
    return name == wanted or name.rpartition(".")[2] == wanted


def _last(names: list[str], count: int) -> set[str]:
    """Return the names that belong to the last ``count`` blocks, blocks being the first number in a name."""
    numbers = {name: int(found.group(1)) for name in names if (found := re.search(r"(?:^|\.)(\d+)\.", name))}
    blocks = sorted({*numbers.values()})
    checked_count(count, "skip_last", least=0, most=len(blocks))
    last = blocks[len(blocks) - count :]
    return {name for name, number in numbers.items() if number in last}
