"""What Fast Gauss-Newton drops on a given model and batch, and how far its step then is from the full one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.training.curvature import flatten, unflatten
from fairtrial.training.gauss_newton.linearised import Linearised
from fairtrial.training.gauss_newton.solving import ProductRows, conjugate_gradients, row_space_direction

TOLERANCE = 1e-6
LARGE = 0.1  # a relative error that a damped step hardly feels


@dataclass(frozen=True)
class CurvatureGap:
    """How far Fast Gauss-Newton is from the generalized Gauss-Newton matrix on a batch.

    Attributes
    ----------
    kept_trace, dropped_trace : (B,)
        Of the two parts of each example's softmax Hessian, by the logits.
    effective_competitors : (B,)
        ``1 / |q|^2``: 1 where a single class competes, K - 1 where all do alike.
    dampings : (L,)
    cosine : (L,)
        Between the damped steps of the two matrices.
    relative_error : (L,)
        ``|d_F - d_G| / |d_G|``.
    residual : (L,)
        The larger relative residual of the two solves.
    """

    kept_trace: np.ndarray
    dropped_trace: np.ndarray
    effective_competitors: np.ndarray
    dampings: np.ndarray
    cosine: np.ndarray
    relative_error: np.ndarray
    residual: np.ndarray

    @property
    def dropped_share(self) -> float:
        """Of the batch's whole trace, in [0, 1]."""
        return float(self.dropped_trace.sum() / (self.dropped_trace.sum() + self.kept_trace.sum()))

    def __str__(self) -> str:
        lines = [
            f"{self.dropped_share:.1%} of the trace is dropped; "
            f"{np.median(self.effective_competitors):.1f} effective competitors (median)"
        ]
        for damping, cosine, error in zip(self.dampings, self.cosine, self.relative_error, strict=True):
            like = "like" if error < LARGE else "unlike"
            lines.append(
                f"damping {damping:g}: {like} the full matrix, relative error {error:.3g}, cosine {cosine:.3f}"
            )
        return "\n".join(lines)


def curvature_gap(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    dampings: Sequence[float] = (1e-3, 1e-1, 1.0),
    max_iter: int = 1000,
) -> CurvatureGap:
    """Measure, before training, whether Fast Gauss-Newton will act like the full Gauss-Newton matrix on your model.

    Parameters
    ----------
    model : nn.Module
        Maps ``x`` to logits (..., K); those parameters that require gradients count.
    x, y : tensors
        A batch and its integer labels; as large as those to train with.
    dampings : sequence of floats
        At the scale of the mean loss.
    max_iter : int
        Most conjugate gradient iterations of a solve, each two passes through the model; both steps are solved to a
        relative residual of 1e-6.

    Returns
    -------
    CurvatureGap
        Printed, it says what matters.

    Raises
    ------
    InputError
        As the optimizer does, or for a damping that is not positive.

    Notes
    -----
    By d_F - d_G = (F + lam)^-1 R d_G for the dropped R = G - F >= 0, the error is at most the largest eigenvalue of R
    over lam.

    Examples
    --------
    >>> model = nn.Linear(4, 2)
    >>> x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    >>> gap = curvature_gap(model, x, torch.arange(16) % 2, dampings=[0.1])
    >>> bool(gap.relative_error[0] < 1e-4), round(gap.dropped_share, 6)  # two classes: nothing is dropped
    (True, 0.0)
    """
    if not len(dampings) or not all(0 < damping < math.inf for damping in dampings):
        raise InputError(f"dampings={tuple(dampings)}: give one or more, all positive")
    if max_iter < 1:
        raise InputError(f"max_iter={max_iter}: at least 1")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient")
    with torch.enable_grad():
        batch = Linearised([lambda: (model(x), y)], parameters)
    found = batch.margins
    q2 = found.slope.square().sum(1) - 1  # |q|^2
    scaled = found.slope * (found.weight / batch.total).sqrt()[:, None]
    gradient = batch.pull(found.slope * (found.residual / batch.total)[:, None])
    flat = flatten(gradient)
    cosines, errors, residuals = [], [], []
    for damping in dampings:
        ours = row_space_direction(ProductRows(batch, scaled), gradient, damping, tol=TOLERANCE, max_iter=max_iter)
        full = conjugate_gradients(
            partial(_damped_product, batch, damping),
            -flat,
            tol=TOLERANCE,
            max_iter=max_iter,
        )
        step = flatten(ours.vector)
        cosines.append(float(torch.cosine_similarity(step, full.x, dim=0)))
        errors.append(float((step - full.x).norm() / full.x.norm()))
        residuals.append(max(ours.solution.relative, full.relative))
    return CurvatureGap(
        kept_trace=(found.weight * (1 + q2)).cpu().numpy(),
        dropped_trace=(-found.residual * (1 - q2).clamp_min(0)).cpu().numpy(),
        effective_competitors=(1 / q2).cpu().numpy(),
        dampings=np.array(dampings, dtype=float),
        cosine=np.array(cosines),
        relative_error=np.array(errors),
        residual=np.array(residuals),
    )


def _damped_product(batch: Linearised, damping: float, v: Tensor) -> Tensor:
    return torch.add(flatten(gauss_newton_product(batch, unflatten(v, batch.parameters))), v, alpha=damping)


def gauss_newton_product(batch: Linearised, vector: Sequence[Tensor]) -> list[Tensor]:
    """Return the product of the full generalized Gauss-Newton matrix of the mean loss with a parameter vector."""
    p = batch.logits.softmax(1)
    pushed = p * batch.push(vector)  # (B, K)
    return batch.pull((pushed - p * pushed.sum(1, keepdim=True)) / batch.total)
