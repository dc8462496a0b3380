"""What Fast Gauss-Newton is compared with: the same control of damping and steps around other curvature matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fairtrial.training.curvature import flatten, unflatten
from fairtrial.training.gauss_newton.gap import gauss_newton_product
from fairtrial.training.gauss_newton.linearised import Linearised
from fairtrial.training.gauss_newton.optimizer import FastGaussNewton
from fairtrial.training.gauss_newton.solving import Direction, conjugate_gradients


class GaussNewtonCG(FastGaussNewton):
    """The full generalized Gauss-Newton matrix, by conjugate gradients among the parameters."""

    def _direction(self, batch: Linearised, right: list[Tensor], damping: float, rho_is_known: bool) -> Direction:
        like = batch.parameters
        solution = conjugate_gradients(
            lambda v: torch.add(flatten(gauss_newton_product(batch, unflatten(v, like))), v, alpha=damping),
            -flatten(right),
            tol=self.cg_tol,
            max_iter=self.cg_max_iter,
        )
        d = solution.x  # d' G d = d . (-h - residual - damping d)
        along = -flatten(right) - solution.residual - damping * d
        return Direction(unflatten(d, like), float(torch.dot(d, along)), solution)


class SampledFisher(FastGaussNewton):
    """The Fisher matrix estimated by one label an example, drawn from the model: unbiased, and as many rows.

    ``generator`` draws the labels; like a closure's, its draws are part of the run and no part of ``state_dict``.
    """

    def __init__(self, params: Any, *, generator: torch.Generator, **how: Any) -> None:
        super().__init__(params, **how)
        self.generator = generator

    def _rows(self, batch: Linearised) -> tuple[Tensor, Tensor | None]:
        return sampled_slopes(batch.logits, self.generator) / math.sqrt(batch.total), None


def sampled_slopes(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return e_drawn - p for labels drawn from softmax(logits), (B, K): the mean of its outer products is the Hessian.

    >>> p = torch.tensor([[0.5, 0.5]])
    >>> sampled_slopes(p.log(), torch.Generator().manual_seed(0)).abs()
    tensor([[0.5000, 0.5000]])
    """
    p = logits.softmax(1)
    drawn = torch.multinomial(p, 1, generator=generator)
    return torch.zeros_like(p).scatter(1, drawn, 1.0) - p


class EmpiricalFisher(FastGaussNewton):
    """The mean outer product of the examples' gradients: Fast Gauss-Newton without its odds p_y / (1 - p_y)."""

    def _rows(self, batch: Linearised) -> tuple[Tensor, Tensor | None]:
        found = batch.margins
        rho = torch.full_like(found.margin, 1 / math.sqrt(batch.total), dtype=torch.float64)
        return found.slope * (-found.residual / math.sqrt(batch.total))[:, None], rho


class ShuffledWeights(FastGaussNewton):
    """A control: Fast Gauss-Newton with the weights s_i dealt to other examples."""

    def __init__(self, params: Any, *, generator: torch.Generator, **how: Any) -> None:
        super().__init__(params, **how)
        self.generator = generator

    def _rows(self, batch: Linearised) -> tuple[Tensor, Tensor | None]:
        found = batch.margins
        order = torch.randperm(len(found.weight), generator=self.generator)
        return found.slope * (found.weight[order] / batch.total).sqrt()[:, None], None


class DampedIdentity(FastGaussNewton):
    """A control: no curvature at all, gradient descent with the rate 1 / lam."""

    def _rows(self, batch: Linearised) -> tuple[Tensor, Tensor | None]:
        return torch.zeros_like(batch.logits), None
