"""Per-sample values for metrics that are not means of per-sample scores.

Each function returns values whose mean is the metric itself and whose spread is that of its first-order influence, so
they can stand for the scores e_ki of a split in every other function of this package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError
from fairtrial.stats.tables import Array


def auc_influence(positive: ArrayLike, score: ArrayLike) -> Array:
    """Per-sample values of the area under the ROC curve (DeLong's placements).

    The placement of a positive is the share of negatives scored below it (ties half), of a negative the share of
    positives above it; each class's deviations from the AUC are scaled by m over the class size.

    Parameters
    ----------
    positive : (m,) truth of each test sample
    score : (m,) score, higher for positive

    Returns
    -------
    (m,) values; their mean is the AUC, and sum((v - AUC)^2) / m^2 is DeLong's variance

    Raises
    ------
    InputError
        A class is missing from the test set: stratify, or use the fold means with variance="nadeau_bengio".

    Examples
    --------
    >>> float(auc_influence([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]).mean())
    0.75
    """
    truth, x = np.asarray(positive).astype(bool), np.asarray(score, dtype=float)
    if truth.shape != x.shape or x.ndim != 1 or not np.isfinite(x).all():
        raise InputError("AUC needs two vectors of one length, the scores finite")
    above, below = np.sort(x[truth]), np.sort(x[~truth])
    if not len(above) or not len(below):
        raise InputError(
            "AUC needs both classes in the test set: stratify the splits, or use the fold means with "
            "variance='nadeau_bengio'"
        )
    placement = np.empty(len(x))
    placement[truth] = _share_below(below, x[truth])
    placement[~truth] = 1 - _share_below(above, x[~truth])
    auc = placement[truth].mean()
    class_size = np.where(truth, len(above), len(below))
    return auc + (placement - auc) * len(x) / class_size


def _share_below(reference: Array, x: Array) -> Array:
    """Share of the sorted ``reference`` below each x, ties counted half."""
    return (np.searchsorted(reference, x, "left") + np.searchsorted(reference, x, "right")) / (2 * len(reference))


def pseudo_values(metric: Callable[..., float], *arrays: ArrayLike) -> Array:
    """Per-sample values of any metric: delete-one pseudo-values, shifted so that their mean is the metric.

    m metric(all) - (m - 1) metric(all but i); m + 1 evaluations of ``metric``.

    Parameters
    ----------
    metric : called as ``metric(*arrays)``
    arrays : (m, ...) test arrays such as truth and prediction

    Raises
    ------
    InputError
        The metric is not finite, on all samples or without one of them.

    Examples
    --------
    >>> accuracy = pseudo_values(lambda y, p: float(np.mean(y == p)), [0, 1, 1], [0, 1, 0])
    >>> np.allclose(accuracy, [1, 1, 0])
    True
    """
    data = [np.asarray(array) for array in arrays]
    m = len(data[0]) if data else 0
    if m < 2 or any(len(array) != m for array in data):
        raise InputError("pseudo-values need arrays of one length, two samples or more")
    value = float(metric(*data))
    keep = np.ones(m, dtype=bool)
    without = np.empty(m)
    for i in range(m):
        keep[i] = False
        without[i] = metric(*(array[keep] for array in data))
        keep[i] = True
    if not np.isfinite(value) or not np.isfinite(without).all():
        raise InputError(
            "the metric is not finite without one of the test samples: use the fold means with variance='nadeau_bengio'"
        )
    return value + (m - 1) * (without.mean() - without)
