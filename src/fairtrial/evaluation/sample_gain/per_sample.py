"""Per-sample values of scikit-learn's scorers: what a split's score is the mean of.

A scorer returns one number a split; the variance of many splits needs what it is made of. Three kinds:

    means of single scores (accuracy, log loss, Brier score, squared and absolute errors)    the scores themselves
    area under the ROC curve                                                                 DeLong's placements
    any other scorer that asks an estimator only for its answers (F1, R2, ...)               delete-one pseudo-values

In each case the mean of the values is the scorer's own number. What has no such values (a scorer of the user's that may
look at anything, a metric undefined without one of the samples) has None, and only the fold's number counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import get_scorer

from fairtrial.errors import InputError
from fairtrial.stats import auc_influence, pseudo_values

Array = NDArray[Any]
ANSWERS = ("predict", "predict_proba", "decision_function")
MADE_BY_SKLEARN = type(get_scorer("accuracy"))  # asks an estimator for its answers and looks at nothing else


class Recorder:
    """A fitted estimator that keeps what it answers, so that a scorer's number can be taken apart."""

    def __init__(self, estimator: Any) -> None:
        self.estimator = estimator
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.estimator, name)
        if name not in ANSWERS:
            return found

        @wraps(found)  # scikit-learn asks for its name
        def answer(X: Any) -> Any:
            self.answers[name] = found(X)
            return self.answers[name]

        return answer


class Replay:
    """An estimator that repeats recorded answers; its samples are their row numbers."""

    def __init__(self, recorded: Recorder) -> None:
        self.recorded = recorded

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.recorded.estimator, name)
        if name not in self.recorded.answers:
            return found
        return wraps(found)(lambda rows: np.asarray(self.recorded.answers[name])[rows])


class PerSampleScorer:
    """A scikit-learn scorer that also keeps per-sample values of each call in ``rows``, (m,) or None.

    Parameters
    ----------
    scoring : a scorer's name of scikit-learn, or a callable scorer

    Examples
    --------
    >>> from sklearn.dummy import DummyClassifier
    >>> scorer = PerSampleScorer("accuracy")
    >>> majority = DummyClassifier().fit([[0], [0], [0]], [1, 1, 0])
    >>> scorer(majority, np.zeros((4, 1)), np.array([1, 1, 1, 0])), scorer.rows[0]
    (0.75, array([1., 1., 1., 0.]))
    """

    def __init__(self, scoring: str | Callable) -> None:
        self.scorer = get_scorer(scoring)
        self.name = scoring if isinstance(scoring, str) else getattr(scoring, "__name__", "score")
        self.rows: list[Array | None] = []

    def __call__(self, estimator: Any, X: Any, y: Any = None, **params: Any) -> float:
        """Score as scikit-learn does, and keep the values."""
        if not isinstance(self.scorer, MADE_BY_SKLEARN):
            self.rows.append(None)
            value = self.scorer(estimator, X, y, **params)
            if np.ndim(value) or not isinstance(value := np.asarray(value).item(), Real):
                raise InputError(
                    f"scoring={self.name} returns {type(value).__name__}: give a scorer of one number; call again for "
                    "another metric"
                )
            return float(value)
        recorded = Recorder(estimator)
        value = self.scorer(recorded, X, y, **params)
        self.rows.append(self._values(recorded, np.asarray(y), value, params))
        return value

    def get_metadata_routing(self) -> Any:
        """Ask for what the scorer asks for."""
        return self.scorer.get_metadata_routing()

    def _values(self, recorded: Recorder, y: Array, value: float, params: Mapping[str, Any]) -> Array | None:
        try:
            if self.name in MEANS:
                rows = MEANS[self.name](recorded, y)
                if (weight := params.get("sample_weight")) is not None:  # influence of each sample on a weighted mean
                    weight = np.asarray(weight, dtype=float)
                    rows = value + weight / weight.mean() * (rows - value)
                if abs(rows.mean() - value) <= 1e-9 * max(1.0, abs(value)):
                    return rows
            if self.name == "roc_auc" and len(recorded.estimator.classes_) == 2 and not params:
                return auc_influence(y == recorded.estimator.classes_[1], _decision(recorded))
            if self.name in FAST and not params:
                metric, labels = FAST[self.name], np.unique(y)
                answer = np.asarray(recorded.answers["predict"])
                if abs(metric(y, answer, labels) - value) <= 1e-9 * max(1.0, abs(value)):
                    return pseudo_values(lambda truth, said: metric(truth, said, labels), y, answer)
            given = {name: np.asarray(values) for name, values in params.items()}
            replay = Replay(recorded)

            def again(rows: Array, truth: Array) -> float:
                return self.scorer(replay, rows, truth, **{name: values[rows] for name, values in given.items()})

            with warnings.catch_warnings():
                warnings.simplefilter("error")  # a metric that has no value without a sample warns and makes one up
                return pseudo_values(again, np.arange(len(y)), y)
        except (InputError, ValueError, ZeroDivisionError, Warning):  # such as one class only
            return None


# ---------------------------------------------------------------------------------------------- means of single scores


def _accuracy(recorded: Recorder, y: Array) -> Array:
    right = np.asarray(recorded.answers["predict"]) == y
    return (right if right.ndim == 1 else right.all(axis=1)).astype(float)


def _log_loss(recorded: Recorder, y: Array) -> Array:
    probability = np.asarray(recorded.answers["predict_proba"])  # (m, classes)
    probability = probability[np.arange(len(y)), np.searchsorted(recorded.estimator.classes_, y)]
    return np.log(np.clip(probability, np.finfo(probability.dtype).eps, 1 - np.finfo(probability.dtype).eps))


def _brier(recorded: Recorder, y: Array) -> Array:
    classes = np.asarray(recorded.estimator.classes_)
    error = np.asarray(recorded.answers["predict_proba"]) - (y[:, None] == classes)  # (m, classes)
    return -(error**2).sum(axis=1) / (2 if len(classes) == 2 else 1)


def _error(of: Callable[[Array], Array]) -> Callable[[Recorder, Array], Array]:
    def score(recorded: Recorder, y: Array) -> Array:
        errors = of(np.asarray(recorded.answers["predict"], dtype=float) - y)
        return -(errors if errors.ndim == 1 else errors.mean(axis=1))

    return score


MEANS: dict[str, Callable[[Recorder, Array], Array]] = {
    "accuracy": _accuracy,
    "neg_log_loss": _log_loss,
    "neg_brier_score": _brier,
    "neg_mean_squared_error": _error(np.square),
    "neg_mean_absolute_error": _error(np.abs),
}


# ----------------------------------------------------- metrics of (truth, answer, labels): scikit-learn's own take 1 ms


def _balanced_accuracy(y: Array, answer: Array, labels: Array) -> float:
    recalls = [float((answer[y == label] == label).sum()) / float((y == label).sum()) for label in labels]
    return sum(recalls) / len(recalls)


def _f1(y: Array, answer: Array, labels: Array) -> float:
    truth, said = y == labels[-1], answer == labels[-1]
    return 2 * float((truth & said).sum()) / float(truth.sum() + said.sum())


def _r2(y: Array, answer: Array, _: Array) -> float:
    error, spread = y - answer, y - y.mean()
    return 1 - float(error @ error) / float(spread @ spread)


def _neg_root_mean_square(y: Array, answer: Array, _: Array) -> float:
    return -float(np.sqrt(np.mean((y - answer) ** 2)))


FAST: dict[str, Callable[[Array, Array, Array], float]] = {
    "balanced_accuracy": _balanced_accuracy,
    "f1": _f1,
    "r2": _r2,
    "neg_root_mean_squared_error": _neg_root_mean_square,
}


def _decision(recorded: Recorder) -> Array:
    if "decision_function" in recorded.answers:
        return np.asarray(recorded.answers["decision_function"])
    return np.asarray(recorded.answers["predict_proba"])[:, 1]
