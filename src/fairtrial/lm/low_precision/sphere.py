"""Keeping matrices on the unit sphere: a hook that puts them back after every step of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from fairtrial.errors import InputError

_MARK = "_version_on_sphere"


class SphereMatrix(NamedTuple):
    """A matrix whose vectors along ``axis`` (1: rows, 0: columns) have length 1."""

    name: str
    weight: nn.Parameter
    axis: int


class HypersphereHook:
    """Put a model's matrices back on the sphere after every step of an optimizer.

    Parameters
    ----------
    model
        With ``sphere_matrices()``, such as :class:`~fairtrial.lm.low_precision.ngpt.NGPT`; any model with ``axes``.
    axes
        For other models: the axis that runs along the width, by the name of the parameter.

    Raises
    ------
    InputError
        A model that names no such matrices, a name it does not have, an axis that is neither 0 nor 1, a row of zeros.

    Examples
    --------
    >>> layer = nn.Linear(4, 3)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> hook = HypersphereHook(layer, axes={"weight": 1}).attach(optimizer)
    >>> layer(torch.ones(2, 4)).sum().backward(); optimizer.step()
    >>> torch.allclose(layer.weight.norm(dim=1), torch.ones(3))
    True
    """

    def __init__(self, model: nn.Module, axes: dict[str, int] | None = None) -> None:
        if axes is not None:
            self.matrices = [_matrix(model, name, axis) for name, axis in axes.items()]
        elif hasattr(model, "sphere_matrices"):
            self.matrices = [*model.sphere_matrices()]  # type: ignore[operator]
        else:
            raise InputError(
                f"{type(model).__name__} does not say which matrices live on the sphere: give axes={{name: axis}}"
            )
        if not self.matrices:
            raise InputError("there is no matrix to keep on the sphere: name some in axes=")
        self._handle: Any = None
        self.normalize()

    def attach(self, optimizer: torch.optim.Optimizer) -> Self:
        """Run :meth:`normalize` after every step of ``optimizer``, and return this hook.

        Raises
        ------
        InputError
            The optimizer does not hold the model's own matrices, but other parameters (copies in float32) or none.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(f"a {type(optimizer).__name__} is no torch.optim.Optimizer: give the one that steps")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [m.name for m in self.matrices if m.weight.requires_grad and id(m.weight) not in held]
        if missing:
            raise InputError(
                f"the optimizer does not hold {missing[0]} ({len(missing)} of {len(self.matrices)} matrices): it steps "
                "copies, or was made before the model was converted: make it of model.parameters()"
            )
        if self._handle is not None:
            raise InputError("this hook is attached already: detach() it first, or make another")
        self._handle = optimizer.register_step_post_hook(lambda *_: self.normalize())
        return self

    def detach(self) -> None:
        """Stop running."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def normalize(self) -> None:
        """Put all matrices on the sphere now."""
        normalize_matrices(self.matrices)


def _matrix(model: nn.Module, name: str, axis: int) -> SphereMatrix:
    try:
        weight = model.get_parameter(name)
    except AttributeError as error:
        raise InputError(f"axes: the model has no parameter {name!r}") from error
    if axis not in (0, 1) or weight.ndim != 2:
        raise InputError(f"axes: {name!r} of shape {tuple(weight.shape)} along axis {axis}: give a matrix and 0 or 1")
    return SphereMatrix(name, weight, axis)


@torch.no_grad()
def normalize_matrices(matrices: Iterable[SphereMatrix]) -> None:
    """Divide matrices by the lengths of their vectors, computed in float32.

    Raises
    ------
    InputError
        A vector of zeros or one that is not finite, which has no direction; nothing is changed then.
    """
    matrices = list(matrices)
    lengths = [_lengths(matrix) for matrix in matrices]
    if not bool(torch.stack([_directed(length).all() for length in lengths]).all()):
        name, row = next(
            (m.name, int((~_directed(length)).flatten().nonzero()[0]))
            for m, length in zip(matrices, lengths, strict=True)
            if not bool(_directed(length).all())
        )
        raise InputError(
            f"{name}: vector {row} is all zeros or not finite and has no direction: initialise it, leave it out, or "
            "lower the learning rate"
        )
    for matrix, length in zip(matrices, lengths, strict=True):
        matrix.weight.copy_(matrix.weight / length)  # rounded once
        setattr(matrix.weight, _MARK, matrix.weight._version)


@torch.no_grad()
def check_on_sphere(matrices: Iterable[SphereMatrix]) -> None:
    """Refuse matrices that left the sphere. Only those are measured that were written to since they were put there."""
    for matrix in matrices:
        weight = matrix.weight
        if getattr(weight, _MARK, None) == weight._version:
            continue
        off = float((_lengths(matrix) - 1).abs().max())
        if off > 16 * torch.finfo(weight.dtype).eps:
            raise InputError(
                f"{matrix.name} is off the unit sphere by {off:.1e}: a step was taken without "
                "HypersphereHook(model).attach(optimizer), or other weights were loaded: attach it, or normalize()"
            )
        setattr(weight, _MARK, weight._version)


def _directed(length: torch.Tensor) -> torch.Tensor:
    return (length > 0) & length.isfinite()


def _lengths(matrix: SphereMatrix) -> torch.Tensor:
    weight = matrix.weight.detach()
    wide = weight if weight.dtype == torch.float64 else weight.float()
    return wide.norm(dim=matrix.axis, keepdim=True)
