"""What trusting a cross-validation costs: our ``cross_validate`` beside scikit-learn's, at fits of 1 ms.

    python benchmarks/evaluation/sample_gain.py

The same splits, estimator and scorer, in turns; the least of several rounds counts. The variance components alone are
compared with statsmodels' MixedLM in ``stats_components.py``.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import RepeatedKFold
from sklearn.model_selection import cross_validate as sklearn_cross_validate

from fairtrial.evaluation.sample_gain import StopWhenFlat, cross_validate

ROUNDS = 15


class OneMillisecond(ClassifierMixin, BaseEstimator):
    """Fits for a millisecond of the processor, then guesses."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> "OneMillisecond":  # noqa: D102
        until = time.perf_counter() + 0.001
        self.classes_ = np.array([0, 1])
        while time.perf_counter() < until:
            pass
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:  # noqa: D102
        return (X[:, 0] > 0).astype(int)

    def predict_proba(self, X: np.ndarray) -> np.ndarray:  # noqa: D102
        positive = 1 / (1 + np.exp(-X[:, 0]))
        return np.column_stack([1 - positive, positive])


def ratio(ours: Callable[[], object], peer: Callable[[], object]) -> tuple[float, float]:
    """Return our seconds over the peer's, and the peer's, in turns, so that a busy machine favours neither."""
    least = [float("inf")] * 2
    for _ in range(ROUNDS):
        for which, call in enumerate((peer, ours)):
            start = time.perf_counter()
            call()
            least[which] = min(least[which], time.perf_counter() - start)
    return least[1] / least[0], least[0]


def main() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 10))
    y = (X[:, 0] + rng.normal(size=200) > 0).astype(int)
    cv = RepeatedKFold(n_splits=5, n_repeats=20, random_state=0)
    print(f"{'100 splits of 200 samples, fits of 1 ms':<44}{'sklearn s':>10}{'ratio':>8}{'wanted':>8}")
    never = StopWhenFlat(min_gain=-1.0)  # looks after every split and never stops
    for name, scoring, stop, wanted in (
        ("accuracy", "accuracy", None, "1.03"),
        ("accuracy, a look after every split", "accuracy", never, "1.03"),
        ("log loss", "neg_log_loss", None, "1.03"),
        ("area under the curve, by influence", "roc_auc", None, "1.03"),
        ("F1, by pseudo-values", "f1", None, ""),
        ("macro F1, scored again without each sample", "f1_macro", None, ""),
    ):
        measured, seconds = ratio(
            partial(cross_validate, OneMillisecond(), X, y, cv=cv, scoring=scoring, stop=stop),
            partial(sklearn_cross_validate, OneMillisecond(), X, y, cv=cv, scoring=scoring),
        )
        print(f"{name:<44}{seconds:>10.3f}{measured:>8.3f}{wanted:>8}")


if __name__ == "__main__":
    main()
