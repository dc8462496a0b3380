"""Codes by retraining on prefixes (Blier and Ollivier 2018): the strongest, and for estimators that only fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.training.prequential.report import PrequentialReport, prequential_report
from fairtrial.training.prequential.sampler import split_blocks

Predict = Callable[[Any], np.ndarray]


def block_code(
    fit: Callable[[Any, np.ndarray], Predict],
    x: Any,
    y: np.ndarray,
    *,
    num_classes: int,
    blocks: int = 6,
    first: int | None = None,
    eps: float = 1e-3,
    seed: int | None = 0,
) -> PrequentialReport:
    """Code each block of labels by a model fitted on all blocks before it.

    Parameters
    ----------
    fit : callable
        ``fit(x, y)`` returns ``predict``, and ``predict(x)`` probabilities (n, K).
    x, y : (n, ...) and (n,)
        Labels are 0 to K - 1. Indexed by integer arrays.
    num_classes : int
    blocks : int
        Refits; blocks grow geometrically.
    first : int, optional
        Examples coded uniformly; left out, a fiftieth of them, at least 8 (all of them where there are fewer).
    eps : float
        As in :class:`~fairtrial.training.prequential.meter.PrequentialMeter`.
    seed : int or None
        Shuffles the examples; None keeps their order.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 200)[:, None]; y = (x[:, 0] > 0).astype(int)
    >>> fit = lambda x, y: lambda z: np.where((z > 0), [[0.05, 0.95]], [[0.95, 0.05]])
    >>> report = block_code(fit, x, y, num_classes=2, eps=0.0)
    >>> round(report.code_length, 2)  # 8 uniformly, 192 at -log 0.95
    15.39
    """
    n = len(y)
    order = np.arange(n) if seed is None else generator(seed, "order").permutation(n)
    first = min(n, max(8, n // 50)) if first is None else first
    if not 1 <= first <= n or blocks < 1:
        raise InputError(f"first={first}, blocks={blocks}: from 1 to {n}, and at least 1")
    losses = np.full(n, math.log(num_classes))  # in the order of arrival

    def code(predict: Predict, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p = np.asarray(predict(x[rows]), dtype=float)
        if p.shape != (len(rows), num_classes):
            raise InputError(f"probabilities of shape {p.shape}: ({len(rows)}, {num_classes}) are needed")
        mixed = (1 - eps) * p[np.arange(len(rows)), y[rows]] + eps / num_classes
        with np.errstate(divide="ignore"):
            return -np.log(mixed), p.argmax(1) == y[rows]

    for start, stop in split_blocks(n, first, blocks) if first < n else []:
        losses[start:stop], _ = code(fit(x[order[:start]], y[order[:start]]), order[start:stop])
    final, correct = code(fit(x[order], y[order]), order)
    table = pd.DataFrame(
        {"example": order, "arrival": np.arange(n), "loss_first": losses, "loss_final": final, "correct": correct}
    )
    return prequential_report(table, num_classes=num_classes)


def prequential_score(
    estimator: Any, X: Any, y: Any, *, blocks: int = 10, eps: float = 1e-3, seed: int | None = 0
) -> PrequentialReport:
    """Code the labels of a data set by a scikit-learn classifier.

    An estimator with ``partial_fit`` learns block after block, each coded before; another is refitted on every prefix.

    Parameters
    ----------
    estimator : classifier with ``predict_proba``
        It is cloned; yours stays as it is.
    X : (n, d) array
    y : (n,) labels of any kind
    blocks, eps, seed
        As in :func:`block_code`.

    Examples
    --------
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from sklearn.datasets import load_iris
    >>> report = prequential_score(GaussianNB(), *load_iris(return_X_y=True))
    >>> report.compression_ratio < 0.5
    True
    """
    from sklearn.base import clone

    X, y = np.asarray(X), np.asarray(y)
    if len(X) != len(y):
        raise InputError(f"X has {len(X)} rows and y {len(y)} labels: give one a row")
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise InputError("y holds a single class: there is nothing to code")
    if not hasattr(estimator, "predict_proba"):
        raise InputError(f"{type(estimator).__name__} has no predict_proba: a code needs probabilities")
    online = clone(estimator) if hasattr(estimator, "partial_fit") else None
    known = 0

    def fit(x: np.ndarray, z: np.ndarray) -> Predict:
        nonlocal known
        if online is not None:
            if len(x) > known:
                online.partial_fit(x[known:], classes[z[known:]], classes=classes)
                known = len(x)
            fitted = online
        elif len(np.unique(z)) < 2:  # a prefix of one class teaches nothing that could be refitted
            return lambda rows: np.full((len(rows), len(classes)), 1 / len(classes))
        else:
            fitted = clone(estimator).fit(x, classes[z])

        def predict(rows: np.ndarray) -> np.ndarray:
            p = np.zeros((len(rows), len(classes)))
            p[:, np.searchsorted(classes, fitted.classes_)] = fitted.predict_proba(rows)
            return p

        return predict

    return block_code(fit, X, labels, num_classes=len(classes), blocks=blocks, eps=eps, seed=seed)
