"""A bilevel problem of quadratics whose solution, value and gradient are known in closed form."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fairtrial.seeds import torch_generator


class QuadraticOracle:
    """Node i: f_i = |y - t_i|^2 / 2 + mu |x - u_i|^2 / 2 and g_i = y'A_i y / 2 - y'(B_i x + c_i).

    The mean of A_i has eigenvalues from 1 to 3, so that y*(x) = A^-1 (B x + c) with the means A, B, c, and F is a
    quadratic. B is small enough for x, y and z to be moved at one speed: with a the least eigenvalue of A and b the
    largest singular value of B, the three in a loop are stable where b^2 < 2 a^3.
    A batch is the noise of a sample: a dict with ``x`` (dx,) and ``y`` (dy,), added to the gradients.

    Parameters
    ----------
    n, dx, dy : int
        Nodes and lengths of x and y.
    mu : float
        Curvature of f in x.
    spread : float
        How much the nodes differ; 0: not at all.
    seed : int

    Attributes
    ----------
    x_star : (dx,) minimiser of F; ``f_star``, its least value.

    Examples
    --------
    >>> oracle = QuadraticOracle(4, 2, 3)
    >>> bool(oracle.gradient(oracle.x_star).norm() < 1e-12)
    True
    """

    def __init__(
        self, n: int = 8, dx: int = 10, dy: int = 20, *, mu: float = 0.1, spread: float = 0.5, seed: int = 0
    ) -> None:
        g = torch_generator(seed, "quadratic oracle")

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        def about(mean: Tensor, scale: float) -> Tensor:  # (n, ...) whose mean is ``mean``
            off = scale * spread * draw(n, *mean.shape)
            return mean + off - off.mean(0)

        self.n, self.sizes, self.mu = n, [dx, dy, dy], mu
        basis = torch.linalg.qr(draw(dy, dy))[0]
        curvature = (basis * torch.linspace(1.0, 3.0, dy, dtype=torch.float64)) @ basis.T
        half = about(torch.zeros(dy, dy, dtype=torch.float64), 0.5 / math.sqrt(dy))
        self.a = curvature + (half + half.mT) / 2  # (n, dy, dy)
        self.b = about(0.8 * draw(dy, dx) / math.sqrt(dy), 1 / math.sqrt(dy))  # (n, dy, dx)
        self.c = about(draw(dy), 1.0)
        self.target, self.u = about(2 * draw(dy), 1.0), about(draw(dx), 1.0)
        inverse = torch.linalg.inv(self.a.mean(0))
        self._slope, self._offset = inverse @ self.b.mean(0), inverse @ self.c.mean(0)  # y*(x) = slope x + offset
        hessian = self._slope.T @ self._slope + mu * torch.eye(dx, dtype=torch.float64)
        start = torch.zeros(dx, dtype=torch.float64)
        self.x_star = -torch.linalg.solve(hessian, self.gradient(start))
        self.f_star = float(self.value(self.x_star))
        size = dx + 2 * dy
        self._shift = self._pieces(torch.zeros(1, n, size, dtype=torch.float64))
        each = torch.eye(size, dtype=torch.float64)[:, None].expand(size, n, size)
        self._map = (self._pieces(each) - self._shift).transpose(0, 1).contiguous()  # (n, size, 2 dx + 3 dy)

    def upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        """Return f of the node that ``batch["node"]`` names, with its noise."""
        i = batch["node"]
        value = 0.5 * (y - self.target[i]).square().sum() + 0.5 * self.mu * (x - self.u[i]).square().sum()
        return value + x @ batch["x"] + y @ batch["y"]

    def lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        """Return g of the node that ``batch["node"]`` names, with its noise."""
        i = batch["node"]
        return 0.5 * y @ self.a[i] @ y - y @ (self.b[i] @ x + self.c[i]) + x @ batch["x"] + y @ batch["y"]

    def pieces(self, w: Tensor) -> Tensor:
        """Return the noise-free pieces (..., n, 2 dx + 3 dy) at ``w`` (..., n, dx + 2 dy), all nodes at once."""
        flat = w.reshape(-1, *w.shape[-2:])
        return (torch.einsum("bnp,npq->bnq", flat, self._map) + self._shift).reshape(*w.shape[:-1], -1)

    def _pieces(self, w: Tensor) -> Tensor:
        """Return what :meth:`pieces` does, block by block: affine in ``w`` (k, n, dx + 2 dy)."""
        x, y, z = w.split(self.sizes, -1)

        def times(matrix: Tensor, v: Tensor) -> Tensor:
            return torch.einsum("nrk,bnk->bnr", matrix, v)

        linear = times(self.b, x) + self.c
        parts = [
            self.mu * (x - self.u),
            times(self.b.mT, z - y),
            y - self.target,
            times(self.a, y) - linear,
            times(self.a, z) - linear,
        ]
        return torch.cat(parts, -1)

    def minimiser(self, x: Tensor) -> Tensor:
        """Return y*(x), (..., dy)."""
        return x @ self._slope.T + self._offset

    def value(self, x: Tensor) -> Tensor:
        """Return F(x), (...), of x (..., dx)."""
        y = self.minimiser(x)[..., None, :]
        fit = (y - self.target).square().sum(-1).mean(-1)
        return 0.5 * fit + 0.5 * self.mu * (x[..., None, :] - self.u).square().sum(-1).mean(-1)

    def gradient(self, x: Tensor) -> Tensor:
        """Return the gradient of F, (..., dx)."""
        residual = self.minimiser(x) - self.target.mean(0)
        return residual @ self._slope + self.mu * (x - self.u.mean(0))

    def penalised(self, penalty: float) -> Tensor:
        """Return the x (dx,) at which all combined gradients vanish for a fixed penalty: off x_star by about 1/lam."""
        a, b, c, t = (v.mean(0) for v in (self.a, self.b, self.c, self.target))
        dx, dy = self.sizes[:2]
        eye = torch.eye(dy, dtype=torch.float64)
        # y = (I/lam + A)^-1 (t/lam + B x + c), z = A^-1 (B x + c), mu (x - u) + lam B'(z - y) = 0
        m = torch.linalg.inv(eye / penalty + a)
        gap, inverse = torch.linalg.inv(a) - m, m / penalty
        left = self.mu * torch.eye(dx, dtype=torch.float64) + penalty * b.T @ gap @ b
        right = self.mu * self.u.mean(0) - penalty * b.T @ (gap @ c - inverse @ t)
        return torch.linalg.solve(left, right)


def student(shape: tuple[int, ...], df: float, g: torch.Generator) -> Tensor:
    """Return float64 draws of Student's t (Bailey's polar method), or of a normal where ``df`` is inf.

    >>> draws = student((200_000,), 1.5, torch.Generator().manual_seed(0))
    >>> 3.6 < float(draws.abs().quantile(0.9)) < 3.8  # 3.705 by its distribution function
    True
    """
    if math.isinf(df):
        return torch.randn(shape, generator=g, dtype=torch.float64)
    u = 1 - torch.rand(shape, generator=g, dtype=torch.float64)  # (0, 1]
    v = torch.rand(shape, generator=g, dtype=torch.float64)
    return (df * (u.pow(-2 / df) - 1)).sqrt() * (2 * math.pi * v).cos()
