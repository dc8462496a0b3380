"""The damped step from rows: (W'W + lam I) d = -h solved through W W' + lam I, which has one row an example.

For a right-hand side in the row space, h = -W' rho, the step is d = W' u with (W W' + lam I) u = rho. For any other,
Woodbury's identity gives d = -(h - W' v) / lam with (W W' + lam I) v = W h, at the price of about log10(|W|^2 / lam)
digits. Row vectors are float64: they are short, and conjugate gradients live on their inner products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fairtrial.errors import InputError
from fairtrial.training.gauss_newton.linearised import LinearHead, Linearised

CHECK_EVERY = 5  # iterations between looks at the residual on a GPU, each of which waits for it
LEAST_ITERATIONS = 2
PROGRESS = 5e-4  # Martens' test: the mean relative progress an iteration that is worth going on for


class Rows(Protocol):
    """W, (B, P): one weighted row an example."""

    def apply(self, vector: Sequence[Tensor]) -> Tensor:
        """Return W v, (B,) float64."""

    def adjoint(self, u: Tensor) -> list[Tensor]:
        """Return W' u, a parameter vector."""


class ProductRows:
    """Rows ``scaled_i . dz_i/dtheta`` through products with the batch's Jacobian; ``scaled`` is (B, K)."""

    def __init__(self, batch: Linearised, scaled: Tensor) -> None:
        self.batch, self.scaled = batch, scaled

    def apply(self, vector: Sequence[Tensor]) -> Tensor:
        """Return W v: one Jacobian-vector product."""
        return torch.linalg.vecdot(self.scaled, self.batch.push(vector)).double()

    def adjoint(self, u: Tensor) -> list[Tensor]:
        """Return W' u: one vector-Jacobian product."""
        return self.batch.pull(self.scaled * u.to(self.scaled.dtype)[:, None])


class HeadRows(ProductRows):
    """The rows of a linear head, whose inner products are (X X') o (C C'): no row is ever formed."""

    def __init__(self, batch: LinearHead, scaled: Tensor, kernel: Tensor) -> None:
        super().__init__(batch, scaled)
        self.kernel = kernel

    def gram(self) -> Tensor:
        """Return W W', (B, B)."""
        return self.kernel * (self.scaled @ self.scaled.T)


class ExplicitRows:
    """Rows held in memory: tensors (B, *parameter.shape)."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows

    def apply(self, vector: Sequence[Tensor]) -> Tensor:
        """Return W v."""
        return torch.stack([r.flatten(1) @ v.flatten() for r, v in zip(self.rows, vector, strict=True)]).sum(0).double()

    def adjoint(self, u: Tensor) -> list[Tensor]:
        """Return W' u."""
        return [torch.tensordot(u.to(r.dtype), r, dims=1) for r in self.rows]

    def gram(self) -> Tensor:
        """Return W W', (B, B)."""
        return torch.stack([r.flatten(1) @ r.flatten(1).T for r in self.rows]).sum(0)


@dataclass(frozen=True)
class Solution:
    """The solution of A x = b.

    Attributes
    ----------
    x, residual : as b
        ``residual = b - A x``.
    iterations : int
        Of conjugate gradients; 0 where a factorisation solved it.
    relative : float
        ``|residual| / |b|``.
    top : float
        The largest Rayleigh quotient of A that was met: a lower bound of its largest eigenvalue.
    """

    x: Tensor
    residual: Tensor
    iterations: int
    relative: float
    top: float


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    *,
    tol: float,
    max_iter: int,
    dot: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Solution:
    """Solve A x = b for a positive definite A given by its products, from x = 0.

    Parameters
    ----------
    product : callable
        Maps a vector like ``b`` to A times it.
    b : (n,) tensor
    tol : float
        Stop at ``|residual| <= tol |b|``, or when Martens' test finds that the quadratic fell by less than 0.05 % of
        itself an iteration over the last ``max(10, i / 10)``; never before two iterations.
    max_iter : int
    dot : callable, optional
        The inner product, a float64 scalar; summed over ranks where vectors are divided among them.

    Examples
    --------
    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    >>> b = torch.tensor([3.0, 4.0], dtype=torch.float64)
    >>> conjugate_gradients(lambda v: a @ v, b, tol=0.01, max_iter=9).iterations
    2
    """
    dot = dot or (lambda u, v: torch.dot(u, v).double())
    look = CHECK_EVERY if b.is_cuda else 1
    x, residual, direction = torch.zeros_like(b), b.clone(), b.clone()
    square = start = dot(b, b)
    top = torch.zeros_like(start)
    energies: list[Tensor] = []  # x'Ax/2 - b'x after each iteration
    done = 0
    while done < max_iter:
        along = product(direction)
        curvature, length = dot(direction, along), dot(direction, direction)
        step = torch.where(curvature > 0, square / curvature, 0.0)
        top = torch.maximum(top, torch.where(length > 0, curvature / length, 0.0))
        x += step.to(x.dtype) * direction
        residual -= step.to(x.dtype) * along
        before, square = square, dot(residual, residual)
        energies.append(-0.5 * dot(x, residual + b))
        done += 1
        if done >= LEAST_ITERATIONS and done % look == 0:
            if bool(square <= tol**2 * start):
                break
            span = max(10, done // 10)
            if done > span and bool(energies[-1] - energies[-1 - span] > span * PROGRESS * energies[-1]):
                break
        direction = residual + torch.where(before > 0, square / before, 0.0).to(x.dtype) * direction
    relative = float((square / start).sqrt()) if bool(start > 0) else 0.0
    return Solution(x, residual, done, relative, float(top))


def factorised(gram: Tensor, damping: float, b: Tensor) -> Solution:
    """Solve (G + damping I) x = b by Cholesky, for ``gram`` (B, B), in its dtype."""
    shifted = gram.clone()
    shifted.diagonal().add_(damping)
    factor, info = torch.linalg.cholesky_ex(shifted)
    if bool(info > 0):  # G is semidefinite but for rounding
        raise InputError(
            f"damping={damping:.3g} is lost in the rounding of the rows' inner products in "
            f"{str(gram.dtype).removeprefix('torch.')}: raise it, or use float64"
        )
    x = torch.cholesky_solve(b.to(gram.dtype)[:, None], factor)[:, 0].double()
    residual = b - (torch.mv(gram, x.to(gram.dtype)).double() + damping * x)
    size = float(b.norm())
    return Solution(x, residual, 0, float(residual.norm()) / size if size else 0.0, float(gram.diagonal().sum()))


@dataclass(frozen=True)
class Direction:
    """A damped step d.

    Attributes
    ----------
    vector : list of tensors
        d, in the shapes of the parameters.
    curvature : float
        d' B d for the curvature matrix B, without damping.
    solution : Solution
        Of the linear system behind it.
    """

    vector: list[Tensor]
    curvature: float
    solution: Solution


def row_space_direction(
    rows: Rows,
    right: Sequence[Tensor],
    damping: float,
    *,
    rho: Tensor | None = None,
    tol: float = 1e-2,
    max_iter: int = 20,
    total: Any = None,
) -> Direction:
    """Return the d that solves (W'W + damping I) d = -right.

    Parameters
    ----------
    rows : Rows
        W. With a method ``gram`` the system is factorised, without it solved by conjugate gradients.
    right : parameter vector
        h.
    damping : float
    rho : (B,) float64 tensor, optional
        Where h = -W' rho: then the paper's form is solved, otherwise Woodbury's.
    tol, max_iter
        Of conjugate gradients.
    total : callable, optional
        Sums a scalar over ranks.
    """
    add = total or (lambda scalar: scalar)
    b = rows.apply(right) if rho is None else rho
    if hasattr(rows, "gram"):
        solution = factorised(rows.gram(), damping, b)
    else:
        solution = conjugate_gradients(
            lambda u: rows.apply(rows.adjoint(u)) + damping * u,
            b,
            tol=tol,
            max_iter=max_iter,
            dot=lambda u, v: add(torch.dot(u, v)),
        )
    vector = rows.adjoint(solution.x)
    if rho is None:
        torch._foreach_sub_(vector, list(right))
        torch._foreach_div_(vector, damping)
        along = -(solution.x + solution.residual / damping)  # W d
    else:
        along = rho - solution.residual - damping * solution.x
    return Direction(vector, float(add(torch.dot(along, along))), solution)
