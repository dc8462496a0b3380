"""What is quantized how: a recipe names, for each of the six operands of a linear layer, axis, rounding and scales.

A recipe is hashable and prints itself, so that two runs of "the same" recipe can be told apart.

>>> print(make_recipe("nvfp4"))
nvfp4
  Y  = X W^T   X   along in features   nvfp4 1x16, nearest, block scale nearest, tensor scale 0.0625
  Y  = X W^T   W   along in features   nvfp4 1x16, nearest, block scale nearest, tensor scale 0.0625
  dX = dY W    dY  along out features  nvfp4 1x16, stochastic, block scale up, tensor scale pow2-delayed
  dX = dY W    W   along out features  nvfp4 1x16, nearest, block scale nearest, tensor scale 0.0625
  dW = dY^T X  dY  along tokens        nvfp4 1x16, stochastic, block scale up, tensor scale pow2-delayed
  dW = dY^T X  X   along tokens        nvfp4 1x16, nearest, block scale nearest, tensor scale 0.0625
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.low_precision.nvfp4 import check_options, checked_scale

RECIPES = ("none", "nvfp4", "int4")
FORMATS = ("none", "nvfp4", "int4")
SCALES = ("tensor", "pow2-delayed")
_OPERANDS = {
    "y_x": "Y  = X W^T   X   along in features ",
    "y_w": "Y  = X W^T   W   along in features ",
    "dx_g": "dX = dY W    dY  along out features",
    "dx_w": "dX = dY W    W   along out features",
    "dw_g": "dW = dY^T X  dY  along tokens      ",
    "dw_x": "dW = dY^T X  X   along tokens      ",
}


@dataclass(frozen=True)
class Operand:
    """How one operand of a product is quantized along the axis that the product contracts.

    Attributes
    ----------
    format
        ``"nvfp4"``; ``"int4"``, whole numbers from -7 to 7 with one scale for the tensor; or ``"none"``, as it is.
    rounding
        ``"nearest"`` or ``"stochastic"``.
    scale_rounding
        Of the block scales: ``"nearest"``, or ``"up"``, without which stochastic rounding is biased by clipping.
    tensor_scale
        A positive number; ``"tensor"``, from the largest value of the tensor at hand; or ``"pow2-delayed"``, a power
        of two from the largest value of the step before.
    block
        ``"1x16"`` or ``"16x16"``.
    """

    format: str = "nvfp4"
    rounding: str = "nearest"
    scale_rounding: str = "nearest"
    tensor_scale: float | str = 2**-4
    block: str = "1x16"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UnknownNameError("number format", self.format, FORMATS)
        check_options(self.rounding, self.scale_rounding, self.block)
        if self.tensor_scale not in SCALES:
            checked_scale(self.tensor_scale)

    def __str__(self) -> str:
        if self.format == "none":
            return "not quantized"
        if self.format == "int4":
            return f"int4, {self.rounding}, tensor scale tensor"
        return (
            f"nvfp4 {self.block}, {self.rounding}, block scale {self.scale_rounding}, tensor scale {self.tensor_scale}"
        )


@dataclass(frozen=True)
class Recipe:
    """The six operands of the three products of a linear layer Y = X W^T.

    Attributes
    ----------
    name
        For reading only.
    y_x, y_w
        Of the forward product.
    dx_g, dx_w
        Of the gradient of the inputs.
    dw_g, dw_x
        Of the gradient of the weights.
    hadamard
        Whether both operands of dW are rotated first, see :func:`~fairtrial.lm.low_precision.rotation.rotate`.
    """

    name: str
    y_x: Operand
    y_w: Operand
    dx_g: Operand
    dx_w: Operand
    dw_g: Operand
    dw_x: Operand
    hadamard: bool = False

    def __str__(self) -> str:
        lines = [f"  {_OPERANDS[f.name]}  {getattr(self, f.name)}" for f in fields(self) if f.name in _OPERANDS]
        return "\n".join([self.name + (" with Hadamard rotation of dW" if self.hadamard else ""), *lines])

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The six operands."""
        return tuple(getattr(self, name) for name in _OPERANDS)

    @property
    def stochastic(self) -> bool:
        """Whether anything is rounded at random."""
        return any(operand.rounding == "stochastic" and operand.format != "none" for operand in self.operands)

    @property
    def shares_weight(self) -> bool:
        """Whether the weights get the same values in the forward product and in the gradient of the inputs."""
        return self.y_w == self.dx_w and (self.y_w.block == "16x16" or self.y_w.format in ("none", "int4"))


def make_recipe(
    name: str = "nvfp4",
    *,
    tensor_scale: float | str = 2**-4,
    grad_scale: float | str = "pow2-delayed",
    weight_block: str = "1x16",
    hadamard: bool = False,
) -> Recipe:
    """Return a recipe by name.

    Parameters
    ----------
    name
        ``"nvfp4"``: forward operands to nearest, gradients at random with block scales rounded up. ``"int4"``: 4-bit
        whole numbers with one scale a tensor, a control. ``"none"``: nothing is quantized.
    tensor_scale
        Of inputs and weights: a constant, which does on the unit sphere, or ``"tensor"``, the usual.
    grad_scale
        Of gradients, whose size nothing fixes: ``"pow2-delayed"``, ``"tensor"`` or a constant.
    weight_block
        ``"1x16"`` or ``"16x16"``: then W and W^T get the same values.
    hadamard
        Rotate both operands of dW.

    Raises
    ------
    UnknownNameError
        No such recipe.
    InputError
        A scale or block there is not.
    """
    if name not in RECIPES:
        raise UnknownNameError("recipe", name, RECIPES)
    if tensor_scale == "pow2-delayed":
        raise InputError("tensor_scale='pow2-delayed' is for gradients: give a number or 'tensor'")
    plain = Operand(name, tensor_scale=tensor_scale)
    weight = Operand(name, tensor_scale=tensor_scale, block=weight_block)
    if name == "none":
        return Recipe(name, plain, weight, plain, weight, plain, plain, hadamard)
    grad = Operand(name, "stochastic", "up", grad_scale)
    return Recipe(name, plain, weight, grad, weight, grad, plain, hadamard)
