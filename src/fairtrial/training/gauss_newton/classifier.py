"""A softmax head on fixed features, fitted by Fast Gauss-Newton, in scikit-learn's protocol."""

from __future__ import annotations

import math
import warnings
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from fairtrial.errors import InputError
from fairtrial.training.gauss_newton.optimizer import FastGaussNewton

LARGEST_FACTORISED = 4096  # examples whose inner products are held and factorised
SETTLED = 3  # steps in a row that hardly lower the objective


class FGNClassifier(ClassifierMixin, BaseEstimator):
    """Multinomial logistic regression by Fast Gauss-Newton: one equation an example, however many classes.

    Minimises ``C * sum of cross-entropies + |weights|^2 / 2`` as scikit-learn's ``LogisticRegression`` does, the
    intercepts without penalty. Worth it for many classes; for few, L-BFGS is faster.

    Parameters
    ----------
    C : float
        Inverse strength of the penalty, positive.
    batch_size : int, optional
        ``None`` takes all examples in each step, up to 4096 by an exact solve and beyond by conjugate gradients. A
        number takes random batches of that size, each step judged on the next batch.
    max_iter : int
        Steps, or passes over the data with ``batch_size``.
    tol : float
        Stop once three steps in a row each lower the objective by less than ``tol`` of itself; with ``batch_size``,
        once a pass does.
    random_state : int, RandomState or None
        Orders the batches.

    Attributes
    ----------
    classes_ : (K,)
    coef_ : (K, D)
    intercept_ : (K,)
    n_iter_ : int
        Steps or passes made.
    n_features_in_ : int

    Notes
    -----
    Source: Fast Gauss-Newton, the row-space system. For logits V x the inner products of its rows are
    (X X') o (C C') with C = sqrt(s) (e_y - q), so that nothing of size K D x K D appears.

    Computed in float64, or in float32 where X is.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> FGNClassifier(max_iter=500, tol=1e-4).fit(x, y).score(x, y) > 0.95
    True
    """

    _parameter_constraints = {  # noqa: RUF012 (scikit-learn's convention)
        "C": [Interval(Real, 0, None, closed="neither")],
        "batch_size": [Interval(Integral, 1, None, closed="left"), None],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="left")],
        "random_state": ["random_state"],
    }

    def __init__(
        self,
        C: float = 1.0,
        *,
        batch_size: int | None = None,
        max_iter: int = 50,
        tol: float = 1e-6,
        random_state: Any = None,
    ) -> None:
        self.C = C
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to features ``X`` (n, D) and labels ``y`` (n,) of at least two classes."""
        self._validate_params()
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError("y has 1 class: a classifier needs at least two")
        # The damping starts for rows of about unit length: of longer ones, w * scale is fitted to x / scale.
        scale = max(1.0, float(np.sqrt(np.square(X, dtype=np.float64).sum(1).mean())))
        x, labels = torch.from_numpy(np.ascontiguousarray(X / scale, dtype=X.dtype)), torch.from_numpy(codes)
        head = nn.utils.skip_init(nn.Linear, x.shape[1], len(self.classes_), dtype=x.dtype)
        for p in head.parameters():
            nn.init.zeros_(p)
        whole = self.batch_size is None or self.batch_size >= len(x)
        optimizer = FastGaussNewton(
            [{"params": [head.weight], "l2": 1 / (self.C * len(x) * scale**2)}, {"params": [head.bias]}],
            solver="gram" if min(len(x), self.batch_size or len(x)) <= LARGEST_FACTORISED else "cg",
            model=head,
            ratio_batch="same" if whole else "next",
        )
        settled = (
            self._fit_whole(optimizer, head, x, labels) if whole else self._fit_batches(optimizer, head, x, labels)
        )
        if not settled:
            warnings.warn(
                f"FGNClassifier did not settle in max_iter={self.max_iter}: raise it, scale the features, or raise tol",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.coef_, self.intercept_ = head.weight.detach().numpy() / X.dtype.type(scale), head.bias.detach().numpy()
        return self

    def _fit_whole(self, optimizer: FastGaussNewton, head: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> bool:
        small = 0
        for step in range(self.max_iter):
            self.n_iter_ = step + 1
            optimizer.step(lambda: (head(x), y))
            info = optimizer.last
            if not info.accepted and math.isnan(info.ratio):  # at the precision of the numbers
                return True
            small = small + 1 if info.accepted and info.loss - info.new_loss <= self.tol * abs(info.loss) else 0
            if small == SETTLED:
                return True
        return False

    def _fit_batches(self, optimizer: FastGaussNewton, head: nn.Linear, x: torch.Tensor, y: torch.Tensor) -> bool:
        rng = check_random_state(self.random_state)
        before = np.inf
        for epoch in range(self.max_iter):
            self.n_iter_ = epoch + 1
            losses = []
            for chosen in torch.from_numpy(rng.permutation(len(x))).split(self.batch_size):
                batch, labels = x[chosen], y[chosen]
                losses.append(float(optimizer.step(lambda batch=batch, labels=labels: (head(batch), labels))))
            mean = float(np.mean(losses))
            if abs(before - mean) <= self.tol * abs(mean):
                return True
            before = mean
        return False

    def decision_function(self, X: Any) -> np.ndarray:
        """Return the logits (n, K); for two classes their difference (n,), positive for the second."""
        logits = self._logits(X)
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probabilities (n, K) in the order of ``classes_``."""
        from scipy.special import softmax

        return softmax(self._logits(X), axis=1)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithms of the probabilities (n, K)."""
        from scipy.special import log_softmax

        return log_softmax(self._logits(X), axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row, (n,)."""
        best = self._logits(X).argmax(1)
        return self.classes_[best]

    def _logits(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=[np.float64, np.float32])
        return X @ self.coef_.T + self.intercept_
