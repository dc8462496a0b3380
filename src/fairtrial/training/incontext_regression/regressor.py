"""Tangent local-polynomial regression: a local fit in tangent coordinates that are found from the neighbours.

A prediction is the constant of a polynomial fitted to the points within ``h`` of the query, in coordinates
``u = T^T (x - x_0) / h`` of the tangent space there, weighted ``(1 - r^2 / h^2)_+``. On a d-dimensional sheet it costs
what d dimensions cost, however many columns X has; that the sheet bends costs nothing in order, since projecting on
the tangent space is itself a chart.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import comb
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.neighbors import NearestNeighbors
from sklearn.utils.validation import check_is_fitted, validate_data

from fairtrial.errors import InputError
from fairtrial.training.incontext_regression.geometry import local_geometry, on_sheet
from fairtrial.training.incontext_regression.polynomial import RIDGE, fit_local, kernel_weights

MAX_DIM = 4
RISES = 3
STEPS = 12  # bandwidths that leave-one-out chooses from
JUDGED = 500  # training points that it looks at
PILOT = 1.5  # radius of the neighbourhood that shows the tangent space, over the bandwidth
LADDER = (0.5, 0.7, 1.0, 1.4, 2.0)  # bandwidths that Lepski's rule chooses from, over the left-one-out one
DOUBLINGS = 3  # of a radius without points, before a query counts as outside
CHUNK = 2_000_000  # numbers of the neighbours' coordinates held at once


class TangentLocalPolynomial(RegressorMixin, BaseEstimator):
    """Regressor for rows near low-dimensional sheets, which finds dimension, tangent space and bandwidth by itself.

    Parameters
    ----------
    degree : int
        Of the local polynomial: smoothness beta asks for ``ceil(beta) - 1``. 0 is Nadaraya-Watson.
    dim : "auto" or int
        Dimension of the sheets. ``"auto"`` finds it at every query, up to 4; all of X's columns make it an ordinary
        local polynomial.
    bandwidth : "loo", "lepski" or float
        ``"loo"``: the distance of a query's k-th neighbour, k chosen among 12 by leave-one-out on at most 500 training
        rows. ``"lepski"``: besides, at each query the largest of five multiples of it whose prediction agrees, within
        noise, with those of all smaller ones. A number is the radius itself.
    ridge : float
        Penalty of a local fit over the trace of its normal matrix; guards against neighbours that span too little.
    outside : {"warn", "nearest", "nan"}
        What a query gets that is farther from the nearest training row than eight of its bandwidths: that row's
        prediction, with a warning or without, or NaN.

    Attributes
    ----------
    neighbors_ : int
        The k chosen; 0 where ``bandwidth`` is a number.
    noise_ : float
        Root mean squared leave-one-out residual.
    loo_ : DataFrame
        ``neighbors`` and ``mse`` for every k tried, in ascending order until the error rose three times in a row.

    Raises
    ------
    InputError
        If a parameter is out of range or ``dim`` exceeds the columns of X.

    Notes
    -----
    "Tangent local polynomials in context", the data-driven version of its oracle estimator.

    Examples
    --------
    >>> import numpy as np
    >>> t = np.random.default_rng(0).uniform(0, 6.28, 300)
    >>> X, y = np.c_[np.cos(t), np.sin(t), np.zeros_like(t)], np.sin(3 * t)
    >>> model = TangentLocalPolynomial().fit(X, y)
    >>> bool(abs(model.predict([[1.0, 0.0, 0.0]])[0]) < 0.05)
    True
    >>> int(model.local_report([[1.0, 0.0, 0.0]])["dimension"].iloc[0])
    1
    """

    def __init__(
        self,
        degree: int = 1,
        dim: Literal["auto"] | int = "auto",
        bandwidth: Literal["loo", "lepski"] | float = "loo",
        *,
        ridge: float = RIDGE,
        outside: Literal["warn", "nearest", "nan"] = "warn",
    ) -> None:
        self.degree = degree
        self.dim = dim
        self.bandwidth = bandwidth
        self.ridge = ridge
        self.outside = outside

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any) -> TangentLocalPolynomial:
        """Keep the training rows, X (n, D) and y (n,) or (n, T), n at least 5, and choose the bandwidth."""
        self._check_parameters()
        X, y = validate_data(self, X, y, y_numeric=True, multi_output=True, dtype=np.float64, ensure_min_samples=5)
        if self.dim != "auto" and self.dim > X.shape[1]:
            raise InputError(f"dim={self.dim}, but X has {X.shape[1]} columns")
        self.X_ = X
        self.y_ = y[:, None] if y.ndim == 1 else y  # (n, T)
        self._flat = y.ndim == 1
        # Sheets have few dimensions of their own: a tree finds neighbours on them in any number of columns.
        self._index = NearestNeighbors(algorithm="kd_tree" if X.shape[1] <= 64 else "brute").fit(X)
        rows = np.unique(np.linspace(0, len(X) - 1, min(JUDGED, len(X))).astype(int))
        tried = self.ladder(len(X)) if isinstance(self.bandwidth, str) else np.array([0])
        errors = self._left_out(rows, tried)
        best = int(np.argmin(errors))
        self.loo_ = pd.DataFrame({"neighbors": tried[: len(errors)], "mse": errors})
        self.neighbors_ = int(tried[best])
        if self.neighbors_:  # a row is its own nearest neighbour and does not count
            self._radius = self._index.kneighbors(X, min(self.neighbors_ + 1, len(X)))[0][:, -1]
        else:
            self._radius = np.full(len(X), float(self.bandwidth))
        self.noise_ = float(np.sqrt(errors[best]))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return predictions (Q,) or (Q, T) at rows X (Q, D)."""
        X, outside = self._inside(X)
        predicted = self._chosen(X).values
        if self.outside == "nan":
            predicted[outside] = np.nan
        return predicted[:, 0] if self._flat else predicted

    def local_report(self, X: Any) -> pd.DataFrame:
        """Return what each prediction rests on, one row a query.

        Columns: ``dimension``; ``bandwidth``; ``neighbours`` of positive weight; ``condition``, the ratio of the
        largest to the smallest second moment along the tangent space; ``leverage``, the variance of the prediction
        over that of the noise; ``degree``, lower than asked for where there were too few neighbours; ``outside``.
        """
        X, outside = self._inside(X)
        found = self._chosen(X)
        return pd.DataFrame(
            {
                "dimension": found.dims, "bandwidth": found.h, "neighbours": found.counts, "condition": found.condition,
                "leverage": found.leverage, "degree": found.degrees, "outside": outside,
            }
        )  # fmt: skip

    def ladder(self, n: int) -> np.ndarray:
        """Return the numbers of neighbours that leave-one-out chooses from with ``n`` training rows."""
        least = comb((2 if self.dim == "auto" else self.dim) + self.degree, self.degree) + (2 if self.degree else 0)
        return np.unique(np.geomspace(min(least, n - 1), min(max(n // 4, 4 * least), n - 1), STEPS).round().astype(int))

    # ------------------------------------------------------------------------------------------------- where to look

    def _check_parameters(self) -> None:
        if not isinstance(self.degree, int | np.integer) or not 0 <= self.degree <= 5:
            raise InputError(f"degree={self.degree}: a whole number from 0 to 5")
        if self.dim != "auto" and (not isinstance(self.dim, int | np.integer) or self.dim < 1):
            raise InputError(f"dim={self.dim}: 'auto' or a whole number from 1")
        h = self.bandwidth
        if not (h in ("loo", "lepski") if isinstance(h, str) else isinstance(h, Real) and 0 < h < np.inf):
            raise InputError(f"bandwidth={h!r}: 'loo', 'lepski' or a positive number")
        if not isinstance(self.ridge, Real) or not self.ridge >= 0 or self.outside not in ("warn", "nearest", "nan"):
            raise InputError(f"ridge={self.ridge}, outside={self.outside!r}: at least 0; 'warn', 'nearest' or 'nan'")

    def _inside(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the queries, those outside moved to the nearest training row, and which they are."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        distance, nearest = (found[:, 0] for found in self._index.kneighbors(X, 1))
        outside = distance > 2**DOUBLINGS * np.maximum(self._radius[nearest], 1e-12)
        if outside.any() and self.outside == "warn":
            row = int(np.flatnonzero(outside)[0])
            warnings.warn(
                f"{outside.sum()} of {len(X)} queries, row {row} the first, are {distance[row]:.3g} and more from all "
                "training rows: they get the nearest row's prediction; outside='nan' marks them",
                stacklevel=3,
            )
        return np.where(outside[:, None], self.X_[nearest], X), outside

    def _reach(self, k: int) -> int:
        """Return how many neighbours fill the pilot ball where the k-th is at the bandwidth, on a sheet of d = 2."""
        return min(len(self.X_), max(3 * MAX_DIM + 3, int(np.ceil(PILOT**2 * k))))

    def _within(self, X: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return distances and indices (Q, K) of neighbours, K enough for the pilot ball of bandwidth ``h`` (Q,)."""
        count = self._reach(0)
        distance, index = self._index.kneighbors(X, count)
        while count < len(self.X_) and (distance[:, -1] < PILOT * h).any():
            count = min(2 * count, len(self.X_))
            distance, index = self._index.kneighbors(X, count)
        return distance, index

    # --------------------------------------------------------------------------------------------------- local fits

    def _chosen(self, X: np.ndarray) -> _Local:
        """Return the local fits at the bandwidth that the rule chooses."""
        rows = max(1, CHUNK // (self._reach(self.neighbors_) * X.shape[1]))
        return _joined([self._chosen_of(X[start : start + rows]) for start in range(0, len(X), rows)])

    def _chosen_of(self, X: np.ndarray) -> _Local:
        if self.bandwidth == "loo":
            distance, index = self._index.kneighbors(X, self._reach(self.neighbors_))
            return self._local(X, distance, index, distance[:, self.neighbors_ - 1])
        if self.bandwidth != "lepski":
            h = np.full(len(X), float(self.bandwidth))
            return self._local(X, *self._within(X, h), h)
        base = self._index.kneighbors(X, self.neighbors_)[0][:, -1]
        fits = [self._local(X, *self._within(X, c * base), c * base) for c in LADDER]
        chosen = np.zeros(len(X), dtype=int)
        alive = np.ones(len(X), dtype=bool)
        for i in range(1, len(LADDER)):
            for j in range(i):
                spread = self.noise_ * (np.sqrt(fits[i].leverage) + np.sqrt(fits[j].leverage))
                alive &= (np.abs(fits[i].values - fits[j].values) <= spread[:, None]).all(1)
            chosen[alive] = i
        return _Local(*(np.stack(field)[chosen, np.arange(len(X))] for field in zip(*fits, strict=True)))

    def _left_out(self, rows: np.ndarray, tried: np.ndarray) -> list[float]:
        """Return mean squared errors at training ``rows``, each predicted from all others by its hat value.

        ``tried``: ascending numbers of neighbours, or a 0 for the bandwidth that is given. After three rises in a row
        the rest, which cost most, are not tried.
        """
        X, y = self.X_[rows], self.y_[rows]
        fixed = np.full(len(X), 0.0 if tried[0] else float(self.bandwidth))
        most = min(self._reach(int(tried[-1])) + 1, len(self.X_))
        distance, index = self._index.kneighbors(X, most) if tried[0] else self._within(X, fixed)
        errors = []
        for k in tried:
            use = min(self._reach(int(k)) + 1, most) if k else distance.shape[1]
            h = distance[:, min(k, use - 1)] if k else fixed  # the row itself is the nearest, and not one of the k
            step = max(1, CHUNK // (use * X.shape[1]))
            found = _joined([
                self._local(X[i : i + step], distance[i : i + step, :use], index[i : i + step, :use], h[i : i + step])
                for i in range(0, len(X), step)
            ])  # fmt: skip
            rest = 1 - found.own[:, None]
            alone = rest < 1e-9  # nothing but itself within the bandwidth: the mean is all there is
            residual = np.where(alone, y - self.y_.mean(0), (y - found.values) / np.where(alone, 1, rest))
            errors.append(float((residual**2).mean()))
            if len(errors) > RISES and (np.diff(errors[-RISES - 1 :]) > 0).all():
                break
        return errors

    def _local(self, X: np.ndarray, distance: np.ndarray, index: np.ndarray, h: np.ndarray) -> _Local:
        """Fit at every query, from its neighbours' distances (Q, K), ascending, and indices, and its bandwidth (Q,)."""
        h = np.maximum(h, 1e-12)  # duplicates alone make a radius of zero: any positive one means the same
        w = kernel_weights(distance, h[:, None])
        for _ in range(DOUBLINGS):  # a radius without points is doubled
            h = np.where(w.sum(1) > 0, h, 2 * h)
            w = kernel_weights(distance, h[:, None])
        w[w.sum(1) <= 0, 0] = 1.0  # still none: the nearest row alone
        delta = self.X_[index] - X[:, None]  # (Q, K, D)
        frames, dims, condition, near = self._frames(delta, distance, h)
        w *= near
        w[w.sum(1) <= 0, 0] = 1.0
        counts = (w > 0).sum(1)
        degrees = np.full(len(X), self.degree)
        for degree in range(self.degree, 0, -1):  # too few neighbours for it: one degree less
            needed = np.array([comb(d + degree, degree) for d in range(X.shape[1] + 1)])[dims]
            degrees[(degrees == degree) & (counts < needed + 1)] = degree - 1
        weights, hat = np.empty_like(w), np.empty(len(X))
        for d, degree in {*zip(dims.tolist(), degrees.tolist(), strict=True)}:
            of = (dims == d) & (degrees == degree)
            u = delta[of] @ frames[of, :, :d] / h[of, None, None]
            weights[of], hat[of] = fit_local(u, w[of], degree, ridge=self.ridge)
        values = (weights[:, None] @ self.y_[index])[:, 0]  # (Q, T)
        return _Local(values, hat, dims, h, counts, condition, (weights**2).sum(1), degrees)

    def _frames(
        self, delta: np.ndarray, distance: np.ndarray, h: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | float]:
        """Return frames (Q, D, m), dimensions (Q,), conditions (Q,) and which neighbours are of the sheet (Q, K)."""
        count, width = len(delta), delta.shape[2]
        if self.degree == 0 or width in (1, self.dim):
            frames = np.broadcast_to(np.eye(width), (count, width, width))
            return frames, np.full(count, width), np.ones(count), 1.0
        least = min(3 * MAX_DIM + 3, distance.shape[1])
        pilot = np.maximum(PILOT * h, distance[:, least - 1] * (1 + 1e-9))
        known = None if self.dim == "auto" else self.dim
        frames, dims, spectrum = local_geometry(delta, distance, pilot, MAX_DIM, known)
        condition = spectrum[:, 0] / np.maximum(spectrum[np.arange(count), dims - 1], 1e-300)
        near = np.empty(distance.shape, dtype=bool)
        for d in np.unique(dims):
            of = dims == d
            near[of] = on_sheet(delta[of], distance[of], pilot[of], frames[of, :, :d])
        return frames, dims, condition, near


class _Local(NamedTuple):
    """Local fits at Q queries: predictions (Q, T), hat values of a point there, and what :meth:`local_report` shows."""

    values: np.ndarray
    own: np.ndarray
    dims: np.ndarray
    h: np.ndarray
    counts: np.ndarray
    condition: np.ndarray
    leverage: np.ndarray
    degrees: np.ndarray


def _joined(parts: Sequence[_Local]) -> _Local:
    return _Local(*(np.concatenate(field) for field in zip(*parts, strict=True)))
