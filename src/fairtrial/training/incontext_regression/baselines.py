"""What the tangent local polynomial is compared with, each tuned on its own training rows over twelve points.

Nadaraya-Watson is ``TangentLocalPolynomial(degree=0)`` and ambient local linear regression is ``dim=X.shape[1]``: they
share its neighbours, kernel and leave-one-out ladder, so that a difference is due to the tangent space alone.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.neighbors import KNeighborsRegressor, NearestNeighbors

from fairtrial.training.incontext_regression.regressor import TangentLocalPolynomial

STEPS = 12
FITTED = 300  # rows that a Gaussian process chooses its kernel's parameters on


class TunedNeighbors(RegressorMixin, BaseEstimator):
    """k-nearest neighbours, k chosen among twelve by leave-one-out."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> TunedNeighbors:
        """Choose k and keep the rows X (n, D), y (n,) or (n, T)."""
        tried = np.unique(np.geomspace(1, max(len(X) // 4, 2), STEPS).round().astype(int))
        index = NearestNeighbors().fit(X).kneighbors(n_neighbors=int(tried[-1]), return_distance=False)  # without self
        means = y[index].cumsum(1)[:, tried - 1] / tried.reshape(-1, *[1] * (y.ndim - 1))  # (n, ks, ...)
        errors = ((means - y[:, None]) ** 2).reshape(len(X), len(tried), -1).mean((0, 2))
        self.model_ = KNeighborsRegressor(int(tried[errors.argmin()])).fit(X, y)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Return the means of the neighbours."""
        return self.model_.predict(X)


class TunedKernelRidge(RegressorMixin, BaseEstimator):
    """Kernel ridge regression, Gaussian kernel; penalty and width chosen among 4 x 3 by leave-one-out."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> TunedKernelRidge:
        """Choose and solve for the rows X (n, D), y (n,) or (n, T)."""
        self.X_, self.mean_ = X, y.mean(0)
        target = (y - self.mean_).reshape(len(X), -1)
        scale = 1 / (X.shape[1] * X.var())
        best = np.inf
        for gamma in scale * np.array([0.3, 1.0, 3.0]):
            values, vectors = np.linalg.eigh(rbf_kernel(X, gamma=gamma))
            for penalty in (1e-3, 1e-2, 1e-1, 1.0):
                inverse = vectors / (np.maximum(values, 0) + penalty)
                dual = inverse @ (vectors.T @ target)
                # Leave-one-out residual of a linear smoother: the dual coefficient over the inverse's diagonal.
                error = float(((dual / (inverse * vectors).sum(1)[:, None]) ** 2).mean())
                if error < best:
                    best, self.gamma_, self.dual_ = error, gamma, dual.reshape(y.shape)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Return the kernel's weighted sums."""
        return self.mean_ + rbf_kernel(X, self.X_, gamma=self.gamma_) @ self.dual_


class TunedForest(RegressorMixin, BaseEstimator):
    """Random forest; features a split and rows a leaf chosen among 3 x 4 by out-of-bag error of smaller forests."""

    def __init__(self, random_state: int = 0) -> None:
        self.random_state = random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> TunedForest:
        """Choose and grow on the rows X (n, D), y (n,) or (n, T)."""

        def forest(trees: int, share: float, leaf: int, judged: bool) -> RandomForestRegressor:
            return RandomForestRegressor(
                trees, max_features=share, min_samples_leaf=leaf, oob_score=judged, random_state=self.random_state
            ).fit(X, y)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a row that every one of few trees has seen
            scores = {(share, leaf): forest(20, share, leaf, True).oob_score_
                      for share in (0.2, 0.5, 1.0) for leaf in (1, 2, 4, 8)}  # fmt: skip
        self.model_ = forest(100, *max(scores, key=lambda point: scores[point]), False)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Return the trees' means."""
        return self.model_.predict(X)


class TunedProcess(RegressorMixin, BaseEstimator):
    """Gaussian process, isotropic Gaussian kernel; its parameters maximise the marginal likelihood of 300 rows."""

    def __init__(self, random_state: int = 0) -> None:
        self.random_state = random_state

    def fit(self, X: np.ndarray, y: np.ndarray) -> TunedProcess:
        """Choose on some of the rows X (n, D), y (n,) or (n, T), and condition on all."""
        width = np.sqrt(X.shape[1] * X.var())
        kernel = ConstantKernel(1.0, (1e-2, 1e2)) * RBF(width, (1e-2 * width, 1e2 * width)) + WhiteKernel(
            0.1, (1e-5, 1e1)
        )
        rows = np.random.default_rng(self.random_state).permutation(len(X))[:FITTED]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a parameter at its bound
            chosen = GaussianProcessRegressor(kernel, normalize_y=True).fit(X[rows], y[rows]).kernel_
        self.model_ = GaussianProcessRegressor(chosen, normalize_y=True, optimizer=None).fit(X, y)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Return the posterior's mean."""
        return self.model_.predict(X)


class RandomTangent(TangentLocalPolynomial):
    """The method with one random space for all queries in place of their tangent spaces: a control.

    ``dim`` is the dimension of the sheets.
    """

    def _frames(
        self, delta: np.ndarray, distance: np.ndarray, h: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | float]:
        dim = 1 if self.dim == "auto" else self.dim
        frame = np.linalg.qr(np.random.default_rng(0).standard_normal((delta.shape[2], dim)))[0]
        return np.broadcast_to(frame, (len(delta), *frame.shape)), np.full(len(delta), dim), np.ones(len(delta)), 1.0


class ShuffledTargets(TangentLocalPolynomial):
    """The method with the targets in random order: a control that must lose."""

    def fit(self, X: Any, y: Any) -> ShuffledTargets:
        """Fit to the rows X (n, D) with y (n,) or (n, T) in another order."""
        super().fit(X, np.random.default_rng(0).permutation(y))
        return self
