"""Weighted least squares on local monomials, for many queries at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RIDGE = 1e-8


class LocalFit(NamedTuple):
    """A local fit is linear in y: what remains of it is the weight each point has in the prediction.

    Attributes
    ----------
    weights : (Q, K) the prediction is ``sum_j weights_j y_j``; each row sums to 1.
    own : (Q,) the weight that a point at the query itself has: the hat value of a training point.
    """

    weights: np.ndarray
    own: np.ndarray


def kernel_weights(distance: np.ndarray, h: np.ndarray | float) -> np.ndarray:
    """Return ``(1 - r^2 / h^2)_+``."""
    return np.maximum(1 - (distance / h) ** 2, 0)


def exponents(dim: int, degree: int) -> list[tuple[int, int]]:
    """Return how monomials of ``dim`` coordinates up to ``degree`` arise: (parent monomial, coordinate) after the 1.

    >>> exponents(2, 2)  # u1, u2, u1 u1, u1 u2, u2 u2
    [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]
    """
    made: list[tuple[int, int]] = []
    last = [(0, 0)]  # monomials of the degree before, with the first coordinate that may follow
    for _ in range(degree):
        following = []
        for parent, first in last:
            for coordinate in range(first, dim):
                made.append((parent, coordinate))
                following.append((len(made), coordinate))
        last = following
    return made


def monomials(u: np.ndarray, degree: int) -> np.ndarray:
    """Return the monomials (..., q) of coordinates ``u`` (..., d) up to ``degree``, the constant first."""
    columns = [np.ones(u.shape[:-1])]
    for parent, coordinate in exponents(u.shape[-1], degree):
        columns.append(columns[parent] * u[..., coordinate])
    return np.stack(columns, axis=-1)


def fit_local(u: np.ndarray, w: np.ndarray, degree: int, *, ridge: float = RIDGE, refinements: int = 0) -> LocalFit:
    """Fit polynomials in ``u`` by weighted least squares, and return what the value at ``u = 0`` is made of.

    Parameters
    ----------
    u : (Q, K, d) coordinates of the neighbours around each query, over the bandwidth.
    w : (Q, K) weights, of positive sum; a neighbour of weight 0 is none.
    degree : of the polynomial.
    ridge : penalty on all coefficients but the constant, over the trace of the normal matrix and q. Directions that
        the neighbours do not span are left out by it, and constants are still reproduced.
    refinements : rounds of iterative refinement, which undo the ridge in directions that the neighbours do span.

    Notes
    -----
    "Tangent local polynomials in context": theta = argmin sum_i w_i (y_i - theta . phi(u_i))^2 + ridge; the prediction
    is theta's constant.
    """
    total = w.sum(1)
    if degree == 0:
        return LocalFit(w / total[:, None], 1 / total)
    phi = monomials(u, degree)  # (Q, K, q)
    weighted = phi * (w / total[:, None])[..., None]
    normal = weighted.transpose(0, 2, 1) @ phi  # (Q, q, q)
    q = normal.shape[1]
    penalised = np.arange(1, q)
    ridged = normal.copy()
    ridged[:, penalised, penalised] += ridge * np.trace(normal, axis1=1, axis2=2)[:, None] / q
    first = np.zeros((len(u), q, 1))
    first[:, 0] = 1
    a = np.linalg.solve(ridged, first)  # (Q, q, 1): the first column of the inverse
    for _ in range(refinements):
        a += np.linalg.solve(ridged, first - normal @ a)
    return LocalFit((weighted @ a)[..., 0], a[:, 0, 0] / total)
