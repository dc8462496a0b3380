"""The learners whose cross-validation the trial looks at: small ones in numpy, scikit-learn's, and the user's own.

A learner maps (X_train, y_train, X_test, y_test, rng) to the (m,) scores of the test samples, higher is better. Those
here score 1 for a right class and 0 for a wrong one, classes being 0, 1, ...; everything random comes from ``rng``.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import InputError, UnknownNameError

Array = NDArray[Any]
Rng = np.random.Generator
Learner = Callable[[Array, Array, Array, Array, Rng], Array]
Classifier = Callable[[Array, Array, Array, Rng], Array]

RIDGE = 0.05  # penalty of a standardised feature, as a share of its sum of squares
THRESHOLD_NOISE = 0.5  # standard deviation of the noisy ridge's offsets; targets are -1 and 1
DEPTH = 6


def ridge_scores(X: Array, y: Array, X_test: Array) -> Array:
    """Return (m, classes) outputs of one-against-all ridge regression on standardised features."""
    mean, scale = X.mean(axis=0), X.std(axis=0)
    Z = (X - mean) / np.where(scale > 0, scale, 1.0)  # (n, p)
    target = 2.0 * (y[:, None] == np.arange(y.max() + 1)) - 1  # (n, classes)
    offset = target.mean(axis=0)
    weights = np.linalg.solve(Z.T @ Z + RIDGE * len(Z) * np.eye(Z.shape[1]), Z.T @ (target - offset))
    return (X_test - mean) / np.where(scale > 0, scale, 1.0) @ weights + offset


def ridge(X: Array, y: Array, X_test: Array, rng: Rng) -> Array:
    """Classify by ridge regression on -1 and 1."""
    return ridge_scores(X, y, X_test).argmax(axis=1)


def noisy_ridge(X: Array, y: Array, X_test: Array, rng: Rng) -> Array:
    """Classify by ridge regression whose threshold differs from fit to fit, as that of a stochastic learner may."""
    outputs = ridge_scores(X, y, X_test)
    return (outputs + THRESHOLD_NOISE * rng.normal(size=outputs.shape[1])).argmax(axis=1)


def centroid(X: Array, y: Array, X_test: Array, rng: Rng) -> Array:
    """Classify by the nearest class mean of standardised features."""
    scale = X.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    member = y[:, None] == np.arange(y.max() + 1)  # (n, classes)
    means = member.T @ (X / scale) / np.maximum(member.sum(axis=0), 1)[:, None]  # (classes, p)
    distance = -2 * (X_test / scale) @ means.T + (means**2).sum(axis=1)
    return np.where(member.any(axis=0), distance, np.inf).argmin(axis=1)


def _of_sklearn(make: Callable[[int], Any]) -> Classifier:
    def classify(X: Array, y: Array, X_test: Array, rng: Rng) -> Array:
        return make(int(rng.integers(2**31))).fit(X, y).predict(X_test)

    return classify


def _tree(seed: int) -> Any:
    from sklearn.tree import DecisionTreeClassifier

    return DecisionTreeClassifier(max_depth=DEPTH, random_state=0)  # the same ties at every fit: deterministic


def _forest(seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(50, random_state=seed)


def _mlp(seed: int) -> Any:
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    net = MLPClassifier((16,), solver="lbfgs", alpha=1.0, max_iter=1000, random_state=seed)
    return make_pipeline(StandardScaler(), net)


def _logistic(seed: int) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))


CLASSIFIERS: Mapping[str, Classifier] = {
    "ridge": ridge,
    "noisy ridge": noisy_ridge,
    "tree": _of_sklearn(_tree),
    "centroid": centroid,
    "logistic": _of_sklearn(_logistic),
    "forest": _of_sklearn(_forest),
    "mlp": _of_sklearn(_mlp),
}
STOCHASTIC = frozenset({"noisy ridge", "forest", "mlp"})  # two fits on the same data differ


def is_own(name: str) -> bool:
    """Whether a learner's name is a dotted path to the user's own estimator."""
    return ":" in name


def own_estimator(name: str) -> Any:
    """Return the estimator at ``module:attribute``: an instance, or what a class or function without arguments makes.

    Modules are looked for in the current folder first.
    """
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"learner {name}: {error}; give module:attribute of an estimator") from None
    estimator = found() if inspect.isclass(found) or inspect.isfunction(found) else found
    if not hasattr(estimator, "fit") or not hasattr(estimator, "get_params"):
        raise InputError(f"learner {name} is no scikit-learn estimator: it needs fit, predict and get_params")
    return estimator


def source_digest(name: str) -> str:
    """Return a digest of the file of the user's own estimator; empty for a learner of this module."""
    if not is_own(name):
        return ""
    own_estimator(name)
    file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() if file else name


def learner(name: str, scoring: str) -> Learner:
    """Return a learner by name; ``scoring`` is the scorer of the user's own estimators.

    Raises
    ------
    UnknownNameError
        There is no such learner.
    """
    if is_own(name):
        return _own(name, scoring)
    if name not in CLASSIFIERS:
        raise UnknownNameError("learner", name, CLASSIFIERS)
    classify = CLASSIFIERS[name]
    return lambda X, y, X_test, y_test, rng: (classify(X, y, X_test, rng) == y_test).astype(float)


def _own(name: str, scoring: str) -> Learner:
    from sklearn.base import clone

    from fairtrial.evaluation.sample_gain.per_sample import PerSampleScorer

    estimator, scorer = own_estimator(name), PerSampleScorer(scoring)

    def score(X: Array, y: Array, X_test: Array, y_test: Array, rng: Rng) -> Array:
        fresh = clone(estimator)
        if "random_state" in fresh.get_params():
            fresh.set_params(random_state=int(rng.integers(2**31)))
        scorer(fresh.fit(X, y), X_test, y_test)
        rows = scorer.rows.pop()
        if rows is None:
            raise InputError(f"scoring={scoring}: learner {name} has no per-sample scores by it; try accuracy")
        return rows

    return score
