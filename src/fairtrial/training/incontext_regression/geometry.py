"""Tangent spaces and dimensions of manifolds, from the neighbours of many queries at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fairtrial.training.incontext_regression.polynomial import kernel_weights

GAP = 0.1  # an eigenvalue below this share of the leading one is no tangent direction
PURITY = 3.0  # curvature scales that a point may lie off the tangent space


class LocalGeometry(NamedTuple):
    """What the neighbours of each query say about the manifold there.

    Attributes
    ----------
    frames : (Q, D, m) orthonormal principal directions, the leading first.
    dims : (Q,) dimensions.
    spectrum : (Q, m) second moments along ``frames``.
    """

    frames: np.ndarray
    dims: np.ndarray
    spectrum: np.ndarray


def local_geometry(
    delta: np.ndarray, distance: np.ndarray, pilot: np.ndarray, max_dim: int, dim: int | None = None
) -> LocalGeometry:
    """Return frames and dimensions by weighted local principal components around each query.

    Parameters
    ----------
    delta, distance : (Q, K, D) and (Q, K) neighbours less the query, and their lengths, ascending.
    pilot : (Q,) radius of the neighbourhood looked at.
    max_dim : the highest dimension found.
    dim : the dimension, where it is known.

    Notes
    -----
    Moments are taken about the weighted mean: about the query, the sheet's bend would count three times as much. The
    dimension is the first k whose next eigenvalue falls below a tenth of the leading one, both over the
    noise floor, which is the mean of the eigenvalues that no dimension up to ``max_dim`` can explain. The *largest* gap
    would be wrong: on a noise-free curve the gaps between powers of its curvature are larger still. Without any such
    gap it is Levina and Bickel's estimate from the distances.
    """
    d_all = delta.shape[2]
    keep = min(max_dim + 1 if dim is None else dim, d_all)
    w = kernel_weights(distance, pilot[:, None])
    w /= np.maximum(w.sum(1, keepdims=True), 1e-300)
    scaled = (delta - w[:, None] @ delta) * np.sqrt(w)[..., None]
    if delta.shape[1] < d_all:  # fewer neighbours than coordinates: their Gram matrix has the same eigenvalues
        values, vectors = np.linalg.eigh(scaled @ scaled.transpose(0, 2, 1))
        values, vectors = values[:, ::-1], vectors[:, :, ::-1][:, :, :keep]
        frames = scaled.transpose(0, 2, 1) @ vectors
        frames /= np.maximum(np.linalg.norm(frames, axis=1, keepdims=True), 1e-300)
    else:
        values, vectors = np.linalg.eigh(scaled.transpose(0, 2, 1) @ scaled)
        values, frames = values[:, ::-1], vectors[:, :, ::-1][:, :, :keep]
    values = np.maximum(values, 0)
    if dim is not None:
        dims = np.full(len(delta), keep)
    else:
        rest = values[:, max_dim + 1 :]
        floor = rest.mean(1, keepdims=True) if rest.shape[1] else 0.0
        over = np.maximum(values[:, : max_dim + 1] - floor, 0)
        small = over[:, 1:] <= GAP * over[:, :1]  # (Q, max_dim): is there a gap after 1, 2, ...
        found = small.any(1)
        dims = np.where(found, small.argmax(1) + 1, _from_distances(distance, max_dim))
    return LocalGeometry(frames, np.minimum(dims, d_all), values[:, :keep])


def on_sheet(delta: np.ndarray, distance: np.ndarray, h: np.ndarray, frames: np.ndarray) -> np.ndarray:
    """Return which neighbours (Q, K) are of the query's sheet: near the space of ``frames`` (Q, D, d), for its bend.

    The curvature scale of a query is the median of its neighbours' residuals over their squared distances; a neighbour
    may be off by three times what it amounts to at the pilot radius ``h``. Points of a crossing sheet are off by more.
    """
    along = delta @ frames  # (Q, K, d)
    off = np.sqrt(np.maximum(distance**2 - (along**2).sum(2), 0))
    curvature = np.median(off / np.maximum(distance**2, 1e-300), axis=1)
    # Where there is no bend at all, rounding must not count as one.
    return off <= (PURITY * curvature * h**2 + 1e-6 * h)[:, None]


def _from_distances(distance: np.ndarray, max_dim: int) -> np.ndarray:
    """Return dimensions by maximum likelihood from distances (Q, K), ascending; zeros are duplicates and left out."""
    apart = distance > 0
    logs = np.where(apart, np.log(distance[:, -1:] / np.where(apart, distance, 1), where=distance[:, -1:] > 0,
                                  out=np.zeros_like(distance)), 0)  # fmt: skip
    dims = (apart.sum(1) - 1) / np.maximum(logs.sum(1), 1e-12)
    return np.clip(np.rint(dims), 1, max_dim).astype(int)
