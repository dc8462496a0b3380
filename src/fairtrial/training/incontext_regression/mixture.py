"""Prompts whose inputs lie near several manifolds, with everything about the geometry known.

A prompt is a context ``(x_i, y_i)`` and a query. The manifolds are fixed by the mixture's seed; every prompt draws a
regression function of its own on each of them, so that it can only be learned from the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import numpy as np
import torch

from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.training.incontext_regression.polynomial import fit_local, kernel_weights

FEATURES = 12  # sinusoids behind a generic sheet
BEND = 1.5  # standard deviation of their frequencies: radians over the sheet's width
WAVE = 4.0  # radians that the regression function's first octave turns over the sheet's width
OCTAVES = 6
SAMPLED = 1000  # points of a manifold that an atlas is laid over
LEAN = 0.5  # cosine of the greatest angle, 60 degrees, between a chart's frame and the tangents of what it answers


class AggregateRate(NamedTuple):
    """The minimax rate of a mixture.

    Attributes
    ----------
    rate : sum over components of ``pi (n pi)^(-2 beta / (2 beta + d))``, up to constants.
    slope : its local slope, d log rate / d log n.
    shares : (M,) each component's part of the rate; the parts sum to 1.
    """

    rate: float
    slope: float
    shares: np.ndarray


def aggregate_rate(
    pi: Sequence[float] | np.ndarray, d: Sequence[int] | np.ndarray, beta: Sequence[float] | np.ndarray, n: int
) -> AggregateRate:
    """Return the rate at which the risk of a mixture of manifolds can fall, and how it falls at ``n``.

    Parameters
    ----------
    pi : (M,) weights of the components, positive, of sum 1.
    d : (M,) their dimensions.
    beta : (M,) smoothness of the regression function on each; one number for all will do, as for ``d``.
    n : context length.

    Raises
    ------
    InputError
        If a weight, dimension or smoothness is not positive, or the weights do not sum to 1.

    Notes
    -----
    "Tangent local polynomials in context": the lower bound adds up the difficulty of the components. A component
    weighted ``pi`` sees ``n pi`` points, hence the sum above.

    Examples
    --------
    >>> round(aggregate_rate([1.0], 1, 2.0, 1000).slope, 6)
    -0.8
    """
    weights = np.atleast_1d(np.asarray(pi, float))
    dim, smooth = (np.asarray(v, float) for v in (d, beta))
    if any(v.shape not in ((), weights.shape) for v in (dim, smooth)):
        raise InputError(f"pi={pi}, d={d}, beta={beta}: give one dimension and smoothness a weight, or one for all")
    if not all((v > 0).all() for v in (weights, dim, smooth)) or abs(weights.sum() - 1) > 1e-8 or not n >= 1:
        raise InputError(f"pi={pi}, d={d}, beta={beta}, n={n}: all positive, and pi of sum 1")
    exponent = np.broadcast_to(-2 * smooth / (2 * smooth + dim), weights.shape)
    parts = weights * (n * weights) ** exponent
    shares = parts / parts.sum()
    return AggregateRate(float(parts.sum()), float(shares @ exponent), shares)


@dataclass(frozen=True)
class Chart:
    """A neighbourhood of a manifold.

    Attributes
    ----------
    center : (D,) a point of the manifold.
    frame : (D, dim) columns that span a space within about 60 degrees of the chart's tangent spaces.
    smoothness : of the regression function, beta.
    bandwidth : radius of the points that a prediction looks at.
    radius : of the ball of queries that the chart answers.
    """

    center: np.ndarray
    frame: np.ndarray
    dim: int
    smoothness: float
    bandwidth: float
    radius: float


@dataclass(frozen=True)
class Prompt:
    """A batch of prompts, all of one context length.

    Attributes
    ----------
    x, y : (B, n, D) and (B, n) the contexts, float64.
    query, target : (B, D) and (B,) what is asked, and the regression function there, without noise.
    chart : (B,) number of the query's manifold.
    context_chart : (B, n) numbers of the context's manifolds.
    frame : (B, D, d_max) orthonormal tangents at the queries; columns beyond the manifold's dimension are 0.
    """

    x: torch.Tensor
    y: torch.Tensor
    query: torch.Tensor
    target: torch.Tensor
    chart: torch.Tensor
    context_chart: torch.Tensor
    frame: torch.Tensor

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, rows: slice) -> Prompt:
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})


class ManifoldMixture:
    """A mixture of curved sheets or spheres in R^D, and the tasks on it.

    Parameters
    ----------
    ambient : int
        D.
    dims : sequence of int
        Dimensions; manifold m has ``dims[m % len(dims)]``.
    charts : int
        Number of manifolds M, of equal weight.
    shape : {"generic", "sphere"}
        ``generic``: ``c + Q sin(A s + phase)``, s uniform on the unit cube, 12 sinusoids and Q orthonormal columns.
        ``sphere``: unit circles, 2-spheres, ... around c in random subspaces.
    smoothness : float
        beta of the regression functions, which are Weierstrass sums: every octave bends as much as the one before for
        2, so that nothing can be won by terms of higher degree.
    noise : float
        Standard deviation of the noise on y; the functions have variance about 1.
    blur : float
        Standard deviation of isotropic noise on the context's x: points lie near the manifolds, not on them.
    seed : int
        Of the manifolds.

    Raises
    ------
    InputError
        If a manifold does not fit into R^D, or a number is out of range.

    Examples
    --------
    >>> tasks = ManifoldMixture(ambient=8, dims=(1, 2), charts=4)
    >>> prompt = tasks.sample(batch=3, n=40)
    >>> tuple(prompt.x.shape), tuple(prompt.query.shape), len(tasks.atlas(k=5))
    ((3, 40, 8), (3, 8), 20)
    """

    def __init__(
        self,
        ambient: int = 20,
        dims: Sequence[int] = (1, 2),
        charts: int = 4,
        *,
        shape: Literal["generic", "sphere"] = "generic",
        smoothness: float = 2.0,
        noise: float = 0.3,
        blur: float = 0.0,
        seed: int = 0,
    ) -> None:
        if shape not in ("generic", "sphere"):
            raise InputError(f"shape={shape!r}: 'generic' or 'sphere'")
        if charts < 1 or not dims or min(dims) < 1 or max(dims) + (shape == "sphere") > ambient:
            raise InputError(f"charts={charts}, dims={tuple(dims)}: manifolds of these dimensions in R^{ambient}")
        if not (smoothness > 0 and noise >= 0 and blur >= 0):  # nan is none of these
            raise InputError(f"smoothness={smoothness}, noise={noise}, blur={blur}: positive, and at least 0")
        self.ambient, self.charts, self.shape = ambient, charts, shape
        self.dims = tuple(dims[m % len(dims)] for m in range(charts))
        self.smoothness, self.noise, self.blur, self.seed = smoothness, noise, blur, seed
        rng = generator(seed, "manifolds", shape)
        self.centers = rng.standard_normal((charts, ambient))  # (M, D)
        wide = max(self.dims)
        if shape == "generic":
            self._frequency = BEND * rng.standard_normal((charts, FEATURES, wide))
            self._phase = rng.uniform(0, 2 * np.pi, (charts, FEATURES))
            self._embedding = np.stack([_orthonormal(rng, ambient, FEATURES) for _ in range(charts)])  # (M, D, 12)
        else:
            self._embedding = np.stack([_orthonormal(rng, ambient, wide + 1) for _ in range(charts)])

    @property
    def weights(self) -> np.ndarray:
        """(M,) the manifolds' shares of the points."""
        return np.full(self.charts, 1 / self.charts)

    def sample(self, batch: int, n: int, *, seed: int | np.random.Generator = 0, among: int | None = None) -> Prompt:
        """Return ``batch`` prompts of ``n`` points, each with functions of its own and one query.

        ``among`` takes only that many of the manifolds, the first ones.

        Raises
        ------
        InputError
            If ``batch`` or ``n`` is not positive, or there are fewer manifolds than ``among``.
        """
        return self._draw(batch, n, 1, seed, among or self.charts)

    def ask(self, queries: int, n: int, *, seed: int | np.random.Generator = 0) -> Prompt:
        """Return ``queries`` prompts that share one context of ``n`` points (by views, not copies)."""
        return self._draw(1, n, queries, seed, self.charts)

    def _draw(self, batch: int, n: int, queries: int, seed: int | np.random.Generator, among: int) -> Prompt:
        if min(batch, n, queries) < 1 or not 1 <= among <= self.charts:
            raise InputError(
                f"{batch} prompts of {n} points and {queries} queries on {among} of {self.charts} manifolds"
            )
        rng = seed if isinstance(seed, np.random.Generator) else generator(seed, "prompts")
        total, wide = n + queries, max(self.dims)
        member = rng.integers(among, size=(batch, total))
        if self.shape == "generic":
            latent = rng.uniform(size=(batch, total, wide))
        else:
            latent = _directions(rng, batch, total, wide + 1)
        wave = WAVE * _directions(rng, batch, self.charts, OCTAVES, latent.shape[-1])  # (B, M, octaves, d_max or more)
        phase = rng.uniform(0, 2 * np.pi, (batch, self.charts, OCTAVES))
        x = np.empty((batch, total, self.ambient))
        frame = np.zeros((batch, total, self.ambient, wide))
        clean = np.empty((batch, total))
        for m in range(self.charts):
            b, t = np.nonzero(member == m)
            s = self._coordinates(m, latent[b, t])  # (rows, d or d + 1)
            x[b, t] = self.points(m, s)
            clean[b, t] = self._function(s, wave[b, m, :, : s.shape[1]], phase[b, m])
            asked = t >= n
            frame[b[asked], t[asked], :, : self.dims[m]] = self.tangents(m, s[asked])
        y = clean[:, :n] + self.noise * rng.standard_normal((batch, n))
        context = x[:, :n] + self.blur * rng.standard_normal((batch, n, self.ambient))

        def shared(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).expand(batch * queries, *values.shape[1:])

        def asked_of(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values[:, n:].reshape(batch * queries, *values.shape[2:])))

        return Prompt(
            shared(context), shared(y), asked_of(x), asked_of(clean), asked_of(member), shared(member[:, :n].copy()),
            asked_of(frame),
        )  # fmt: skip

    def _function(self, s: np.ndarray, wave: np.ndarray, phase: np.ndarray) -> np.ndarray:
        """Return ``sum_j 2^(-beta j) sin(2^j wave_j . s + phase_j)``, (n,), of variance 1: no smoother than beta.

        ``s`` (n, d), ``wave`` (n, octaves, d), ``phase`` (n, octaves).
        """
        octave = 2.0 ** np.arange(OCTAVES)
        height = octave**-self.smoothness
        angle = octave * (wave @ s[:, :, None])[..., 0] + phase
        return np.sin(angle) @ height * np.sqrt(2 / (height**2).sum())

    def _coordinates(self, m: int, latent: np.ndarray) -> np.ndarray:
        """Return what places points on manifold m: coordinates (n, d) of a sheet, unit vectors (n, d + 1)."""
        if self.shape == "generic":
            return latent[:, : self.dims[m]]
        s = latent[:, : self.dims[m] + 1]
        return s / np.linalg.norm(s, axis=1, keepdims=True)

    def points(self, m: int, s: np.ndarray) -> np.ndarray:
        """Return the points (n, D) of manifold ``m`` at ``s``: (n, d) in the unit cube, or unit vectors (n, d + 1)."""
        if self.shape == "sphere":
            return self.centers[m] + s @ self._embedding[m][:, : s.shape[1]].T
        angle = s @ self._frequency[m][:, : s.shape[1]].T + self._phase[m]  # (n, 12)
        return self.centers[m] + np.sin(angle) @ self._embedding[m].T

    def tangents(self, m: int, s: np.ndarray) -> np.ndarray:
        """Return orthonormal tangents (n, D, d) of manifold ``m`` at ``s``, as :meth:`points` takes it."""
        d = self.dims[m]
        if self.shape == "sphere":
            # The normal completed to a basis by its QR factor: the other columns are the tangents.
            basis = np.linalg.qr(np.concatenate([s[:, :, None], np.broadcast_to(np.eye(d + 1), (len(s), d + 1, d + 1))],
                                                axis=2))[0]  # fmt: skip
            return self._embedding[m][:, : d + 1] @ basis[:, :, 1:]
        slope = np.cos(s @ self._frequency[m][:, :d].T + self._phase[m])  # (n, 12)
        jacobian = self._embedding[m] @ (slope[:, :, None] * self._frequency[m][:, :d])  # (n, D, d)
        return np.linalg.qr(jacobian)[0]

    def atlas(self, k: int = 6, *, n: int = 512, scale: float = 1.0) -> tuple[Chart, ...]:
        """Return ``k`` charts of each manifold, with the tangents at their centres as frames.

        Centres are chosen one after the other, each the farthest point from those before among the points that no
        chart answers yet, then among all. A chart ends where the manifold's tangents lean 60 degrees from its frame.
        Strongly bent manifolds need many charts: a query outside all of them is in ``outside="nearest"``'s hands.

        Parameters
        ----------
        k : int
            Charts a manifold.
        n : int
            Context length that bandwidths are for: ``scale (n pi)^(-1 / (2 beta + d))``.
        scale : float
            The constant in it.
        """
        if not (isinstance(k, int) and k >= 1 and n >= 1 and scale > 0):
            raise InputError(f"k={k}, n={n}, scale={scale}: all positive, and k a whole number")
        rng = generator(self.seed, "atlas")
        found = []
        for m, d in enumerate(self.dims):
            latent = rng.uniform(size=(SAMPLED, d)) if self.shape == "generic" else _directions(rng, SAMPLED, d + 1)
            s = self._coordinates(m, latent)
            x, tangents = self.points(m, s), self.tangents(m, s)
            centers, radii = _cover(x, tangents, k)
            found += [
                Chart(x[i], tangents[i], d, self.smoothness, self.bandwidth(m, n, scale), radius)
                for i, radius in zip(centers, radii.tolist(), strict=True)
            ]
        return tuple(found)

    def bandwidth(self, m: int, n: int, scale: float = 1.0) -> float:
        """Return ``scale (n pi_m)^(-1 / (2 beta + d_m))``."""
        return scale * float(n * self.weights[m]) ** (-1 / (2 * self.smoothness + self.dims[m]))


def oracle_estimate(tasks: ManifoldMixture, prompt: Prompt, *, scale: float = 1.0, degree: int = 1) -> np.ndarray:
    """Return the predictions (B,) of the oracle: true tangent, true manifold, bandwidth of the rate.

    Only points of the query's manifold count, within ``scale (n pi)^(-1 / (2 beta + d))`` of it, in the coordinates
    of its true tangent space; the radius reaches at least ``3 (d + 1)`` points.

    Raises
    ------
    InputError
        If the context has no point of a query's manifold.
    """
    query, frames, own = prompt.query.numpy(), prompt.frame.numpy(), prompt.chart.numpy()
    result = np.full(len(prompt), np.nan)
    n = prompt.x.shape[1]
    for m in np.unique(own):
        d = tasks.dims[m]
        for b in np.flatnonzero(own == m):
            inside = prompt.context_chart[b].numpy() == m
            x, y = prompt.x[b].numpy()[inside], prompt.y[b].numpy()[inside]
            delta = x - query[b]
            distance = np.linalg.norm(delta, axis=1)
            if not len(x):
                raise InputError(f"query {b}: no context point on its manifold; give a longer context")
            enough = np.sort(distance)[min(3 * d + 3, len(x)) - 1]
            h = max(tasks.bandwidth(m, n, scale), float(enough) * (1 + 1e-9))
            near = distance < h
            w = kernel_weights(distance[near], h)
            fitted = fit_local(delta[None, near] @ frames[b, :, :d] / h, w[None], degree if len(w) > d + 1 else 0)
            result[b] = float(fitted.weights[0] @ y[near])
    return result


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Return a random matrix with orthonormal columns, or rows where there are fewer."""
    q = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))[0]
    return q if rows >= columns else q.T


def _directions(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return unit vectors (..., d), uniform on the sphere."""
    g = rng.standard_normal(shape)
    return g / np.linalg.norm(g, axis=-1, keepdims=True)


def _cover(x: np.ndarray, tangents: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``k`` rows of points ``x`` (n, D) with ``tangents`` (n, D, d), and the radius of the chart at each."""
    chosen: list[int] = []
    limits: list[float] = []
    covered = np.full(len(x), np.inf)  # distance to the nearest chart that answers a point
    nearest = np.full(len(x), np.inf)  # to the nearest centre
    i = int(np.linalg.norm(x - x.mean(0), axis=1).argmin())
    while len(chosen) < min(k, len(x)):
        distance = np.linalg.norm(x - x[i], axis=1)
        lean = np.linalg.svd(tangents[i].T @ tangents, compute_uv=False)[:, -1]  # smallest cosine of principal angles
        limit = distance[lean < LEAN].min(initial=np.inf)
        chosen.append(i)
        limits.append(float(limit))
        covered = np.minimum(covered, np.where(distance < limit, distance, np.inf))
        nearest = np.minimum(nearest, distance)
        left = np.isinf(covered)
        i = int(np.where(left, nearest, -1.0).argmax() if left.any() else covered.argmax())
    # A tenth more than what covers the sample, so that a query between its points has a chart too.
    reach = 1.1 * covered[np.isfinite(covered)].max()
    return np.array(chosen), np.minimum(limits, reach)
