"""Patch geometry before any training: which points of a collection a neuron can single out, and what that costs.

A neuron active on one patch alone memorises its example for next to nothing: all points of a sphere can be singled out
so, few of the small patches of a natural image. Whether a half-space holds a point and no other is a linear program;
its margin, relative to the collection's size, says whether the neuron would need large weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import pandas as pd
import torch

from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.stats.intervals import Binomial
from fairtrial.training.sparse_connectivity.patches import extract, uncovered

MARGINS = (0.0, 0.05, 0.1, 0.2)  # of the collection's root mean square radius
TOLERANCE = 1e-9


@dataclass(frozen=True)
class PatchGeometry:
    """What a collection of patches allows a neuron.

    Attributes
    ----------
    isolable : DataFrame
        A row a margin: ``share`` of the sampled patches that a half-space separates from all others by that margin,
        with ``low`` and ``high`` of its 95 % interval.
    memorisable_fraction : float
        Share of the sampled examples that own a patch that can be isolated at margin 0.1.
    depth_quantiles : dict
        0.05, 0.25 and 0.5 of the approximate Tukey depth: the share of patches on the smaller side of a half-space
        through a patch.
    effective_dimension : float
        Of the patches' covariance, (sum of eigenvalues)^2 / sum of their squares.
    memorisation_cost : float
        Mean least sharpness budget that reproduces a unit residual of one example.
    points, distinct : int
        Patches, and those left after duplicates are dropped.
    dimension : int
        Entries of a patch.
    notes : tuple of str
    """

    isolable: pd.DataFrame
    memorisable_fraction: float
    depth_quantiles: dict[float, float]
    effective_dimension: float
    memorisation_cost: float
    points: int
    distinct: int
    dimension: int
    notes: tuple[str, ...] = ()

    def isolable_fraction(self, margin: float = 0.1) -> float:
        """Return the share of patches that can be isolated by ``margin``, one of those measured."""
        row = self.isolable[np.isclose(self.isolable["margin"], margin)]
        if row.empty:
            raise InputError(f"margin={margin}: measured are {', '.join(f'{m:g}' for m in self.isolable['margin'])}")
        return float(row["share"].iloc[0])


def patch_geometry(
    images: np.ndarray,
    *,
    size: int,
    stride: int = 1,
    samples: int = 200,
    most: int = 20_000,
    seed: int = 0,
) -> PatchGeometry:
    """Measure the patches of vectors or images.

    Parameters
    ----------
    images : (n, d) or (n, h, w)
    size, stride : of the patches; the size of a vector, whole, for a dense layer.
    samples : patches that are tested by a linear program each.
    most : patches in the collection; more are subsampled.
    seed : of both samples and of directions.

    Raises
    ------
    InputError
        If a patch is larger than an input, or inputs are not finite.

    Examples
    --------
    >>> angles = np.linspace(0, 2 * np.pi, 30, endpoint=False)
    >>> circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    >>> patch_geometry(circle, size=2).isolable_fraction(0.0)
    1.0
    """
    try:
        x = np.asarray(images, dtype=float)
    except (TypeError, ValueError):
        raise InputError("the inputs are no array of real numbers") from None
    if not (isinstance(samples, Integral) and isinstance(most, Integral) and samples >= 1 and most >= 2):
        raise InputError(f"samples={samples}, most={most}: whole numbers, at least 1 and 2")
    if x.ndim not in (2, 3) or not len(x):
        raise InputError(f"inputs of shape {x.shape}: vectors (n, d) or images (n, h, w) are needed")
    if not np.isfinite(x).all():
        raise InputError(f"input {int(np.argwhere(~np.isfinite(x))[0][0])} is not finite")
    patches = extract(torch.from_numpy(x), size, stride).numpy()  # (n, J, m)
    n, per, m = patches.shape
    owner = np.repeat(np.arange(n), per)
    flat = patches.reshape(-1, m)
    rng = generator(seed, "patches")
    chosen = np.sort(rng.permutation(len(flat))[:most])
    owner, flat = owner[chosen], flat[chosen]
    centred = flat - flat.mean(0)
    scale = math.sqrt((centred**2).sum(1).mean())
    notes = []
    if scale == 0:
        raise InputError("all patches are the same: there is no geometry")
    unit = centred / scale
    distinct, index = np.unique(np.round(unit / TOLERANCE) * TOLERANCE, axis=0, return_inverse=True)
    index = index.reshape(-1)
    if len(distinct) < len(unit):
        notes.append(f"{len(unit) - len(distinct)} duplicates were dropped")
    if lost := max(uncovered(side, size, stride) for side in x.shape[1:]):
        notes.append(f"{lost} entries of a side lie in no patch")
    if len(distinct) <= m:
        notes.append("fewer patches than dimensions: all can be isolated, whatever their geometry")
    tested = rng.permutation(len(distinct))[:samples]
    margins = np.array([isolation_margin(distinct, int(i)) for i in tested])
    rows = []
    for margin in MARGINS:
        hits = int((margins > max(margin, TOLERANCE)).sum())
        low, high = Binomial(hits, len(tested)).bounds(0.05)
        rows.append({"margin": margin, "share": hits / len(tested), "low": low, "high": high})
    isolated = dict(zip(tested.tolist(), margins > 0.1, strict=True))
    by_example: dict[int, bool] = {}
    for place, who in zip(index, owner, strict=True):
        if place in isolated:
            by_example[who] = by_example.get(who, False) or bool(isolated[place])
    costs = [memorisation_cost(flat, owner, int(i), per, rng) for i in rng.permutation(np.unique(owner))[:30]]
    return PatchGeometry(
        isolable=pd.DataFrame(rows),
        memorisable_fraction=float(np.mean(list(by_example.values()))) if by_example else math.nan,
        depth_quantiles=_depths(unit, tested_points=distinct[tested], rng=rng),
        effective_dimension=_effective_dimension(unit),
        memorisation_cost=float(np.nanmean(costs)),
        points=len(flat),
        distinct=len(distinct),
        dimension=m,
        notes=tuple(notes),
    )


def isolation_margin(points: np.ndarray, i: int) -> float:
    """Return the largest margin |u|_2 = 1 by which a half-space separates point ``i`` from all others, at least 0.

    Solved with |u|_inf <= 1, which keeps it linear, and read in the Euclidean norm of the solution.

    >>> points = np.array([[0.0], [1.0], [3.0]])
    >>> round(isolation_margin(points, 2), 6), isolation_margin(points, 1)
    (2.0, 0.0)
    """
    from scipy.optimize import linprog

    others = np.delete(points, i, axis=0)
    m = points.shape[1]
    if not len(others):
        return math.inf
    # u . (p_i - p_j) >= s for all j; maximise s.
    constraints = np.concatenate([others - points[i], np.ones((len(others), 1))], axis=1)
    solved = linprog(
        np.append(np.zeros(m), -1.0), A_ub=constraints, b_ub=np.zeros(len(others)),
        bounds=[(-1, 1)] * m + [(0, None)], method="highs",
    )  # fmt: skip
    if solved.status != 0 or solved.x[-1] <= TOLERANCE:
        return 0.0
    return float(solved.x[-1] / np.linalg.norm(solved.x[:-1]))


def memorisation_cost(
    flat: np.ndarray, owner: np.ndarray, example: int, per: int, rng: np.random.Generator, directions: int = 64
) -> float:
    """Return the least g(u, t) / response over candidate half-spaces that single out patches of one example.

    ``response`` is what the neuron adds to f of the example, a mean over its ``per`` patches: the cost times a residual
    is the sharpness budget that reproducing it takes.
    """
    own = np.flatnonzero(owner == example)
    if not len(own):
        return math.nan
    best = math.inf
    centre = flat.mean(0)
    for i in own[:8]:
        near = flat[np.argsort(((flat - flat[i]) ** 2).sum(1))[1:17]]
        candidates = np.stack(
            [flat[i] - centre, flat[i] - near.mean(0), *rng.standard_normal((directions, flat.shape[1]))]
        )
        lengths = np.linalg.norm(candidates, axis=1)
        u = candidates[lengths > 0] / lengths[lengths > 0, None]
        heights = flat @ u.T  # (N, c)
        at = heights[i]
        below = np.where(heights < at - 1e-12, heights, -np.inf).max(0)
        t = np.where(np.isfinite(below), (at + below) / 2, at - 1.0)
        on = heights > t
        response = (np.maximum(heights[own] - t, 0)).sum(0) / per
        g = half_space_cost(flat, heights, t, on)
        with np.errstate(divide="ignore"):
            best = min(best, float(np.min(g / response)))
    return best


def half_space_cost(flat: np.ndarray, heights: np.ndarray, t: np.ndarray, on: np.ndarray) -> np.ndarray:
    """Return g(u, t) of half-spaces, (c,), from the heights (N, c) of all patches."""
    count = on.sum(0)
    share = count / len(flat)
    excess = np.where(on, heights - t, 0).sum(0) / np.maximum(count, 1)
    centre = (on.T @ flat) / np.maximum(count, 1)[:, None]
    return share**2 * excess * np.sqrt(1 + (centre**2).sum(1))


def _depths(unit: np.ndarray, tested_points: np.ndarray, rng: np.random.Generator) -> dict[float, float]:
    """Approximate Tukey depths by 2000 directions, half of them through points."""
    m = unit.shape[1]
    through = unit[rng.integers(len(unit), size=1000)]
    u = np.concatenate([rng.standard_normal((1000, m)), through])
    u = u[np.linalg.norm(u, axis=1) > 0]
    depth = np.full(len(tested_points), 1.0)
    for block in np.array_split(u, 20):
        heights = np.sort(unit @ block.T, axis=0)  # (N, c)
        mine = tested_points @ block.T
        for column in range(block.shape[0]):
            above = 1 - np.searchsorted(heights[:, column], mine[:, column] - 1e-12) / len(unit)
            depth = np.minimum(depth, above)
    return {q: float(np.quantile(depth, q)) for q in (0.05, 0.25, 0.5)}


def _effective_dimension(unit: np.ndarray) -> float:
    values = np.linalg.eigvalsh(unit.T @ unit / len(unit))
    return float(values.sum() ** 2 / (values**2).sum())


def plan_receptive_field(
    images: np.ndarray, sizes: Sequence[int], *, strides: Sequence[int] = (1,), samples: int = 100, seed: int = 0
) -> pd.DataFrame:
    """Rank receptive fields by how strongly stability would restrain them; labels are never seen.

    Returns
    -------
    DataFrame with a row a size and stride: ``isolable`` at margin 0.1, ``effective_dimension``, ``points`` and
    ``memorisation_cost``, the most restrained first.

    Raises
    ------
    InputError
        If no size fits.

    Examples
    --------
    >>> images = generator(0, "doc").standard_normal((20, 8, 8))
    >>> plan_receptive_field(images, [2, 8], samples=20)["size"].tolist()
    [2, 8]
    """
    rows = []
    for size in sizes:
        for stride in strides:
            geometry = patch_geometry(images, size=size, stride=stride, samples=samples, seed=seed)
            rows.append(
                {
                    "size": size, "stride": stride, "isolable": geometry.isolable_fraction(0.1),
                    "effective_dimension": geometry.effective_dimension, "points": geometry.points,
                    "memorisation_cost": geometry.memorisation_cost,
                }
            )  # fmt: skip
    if not rows:
        raise InputError("no sizes: give at least one")
    return pd.DataFrame(rows).sort_values("memorisation_cost", ascending=False, ignore_index=True)
