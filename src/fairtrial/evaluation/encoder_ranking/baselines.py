"""What the corrected scores are compared with: further spectral scores, and two that see labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError
from fairtrial.evaluation.encoder_ranking.subspace import Features, rankme

Array = np.ndarray


def rankme_per_width(features: Features | ArrayLike, reference: object = None) -> float:
    """RankMe over the number of features, in (0, 1]: the first correction that comes to mind.

    >>> round(rankme_per_width(np.random.default_rng(0).normal(size=(700, 32))), 2)
    0.99
    """
    z = Features.of(features)
    return rankme(z) / z.width


def stable_rank(features: Features | ArrayLike, reference: object = None) -> float:
    """Squared Frobenius norm over squared spectral norm of the features as they come.

    >>> round(stable_rank(np.eye(3, 5).repeat(2, axis=0)), 6)
    3.0
    """
    squares = Features.of(features).singular_values ** 2
    return float(squares.sum() / squares.max())


def alpha_req(features: Features | ArrayLike, reference: object = None) -> float:
    """Minus the distance of the spectrum's power-law exponent from 1 (alpha-ReQ, Agrawal et al. 2022).

    The covariance's eigenvalues are taken to fall as j^-alpha; the slope is fitted by least squares to the logarithms.
    Near 1 the spectrum is neither dominated by a few directions nor flat.

    >>> rng = np.random.default_rng(0)
    >>> decaying = rng.normal(size=(2000, 50)) / np.arange(1, 51) ** 0.5
    >>> round(alpha_req(decaying), 1) == 0.0, alpha_req(rng.normal(size=(2000, 50))) < -0.7
    (True, True)
    """
    squares = _variances(Features.of(features))
    squares = squares[squares > 1e-10 * squares[0]]
    if len(squares) < 2:
        return -1.0  # one direction: as far from 1 as a flat spectrum
    place = np.log(np.arange(1, len(squares) + 1))
    return float(-abs(-np.polyfit(place, np.log(squares), 1)[0] - 1))


def nesum(features: Features | ArrayLike, reference: object = None) -> float:
    """Sum of the covariance's eigenvalues over the largest (NESUM, He and Ozay 2022): a centred stable rank.

    >>> round(nesum(np.vstack([np.eye(3), -np.eye(3)]) + 7), 6)
    3.0
    """
    squares = _variances(Features.of(features))
    return float(squares.sum() / squares[0])


def logme(features: Features | ArrayLike, labels: ArrayLike) -> float:
    """Maximum evidence of a Bayesian linear model of the labels, in nats an item (LogME, You et al. 2021).

    For each class the one-hot labels are N(F w, 1 / beta) with w ~ N(0, 1 / alpha); alpha and beta come from the fixed
    point of the evidence, and the mean over classes is returned. It sees the labels.

    Parameters
    ----------
    features, labels : (n, d) and (n,)

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(3, size=200)
    >>> logme(np.eye(3)[y] + rng.normal(size=(200, 3)), y) > logme(rng.normal(size=(200, 3)), y)
    True
    """
    z, targets = Features.of(features), _classes(features, labels)  # (n, c)
    left, values = z.components  # U (n, q)
    squares = values[:, None] ** 2  # (q, 1)
    targets = targets - targets.mean(axis=0)  # features are centred, so the mean is not theirs to explain
    along = (left.T @ targets) ** 2  # (q, c)
    outside = np.maximum((targets**2).sum(axis=0) - along.sum(axis=0), 0.0)  # (c,)
    n = z.items
    alpha, beta = np.ones(targets.shape[1]), np.ones(targets.shape[1])
    for _ in range(100):
        ratio = alpha / beta  # (c,)
        gamma = (squares / (squares + ratio)).sum(axis=0)
        weights = (squares * along / (squares + ratio) ** 2).sum(axis=0)  # |w|^2
        residual = (along * (ratio / (squares + ratio)) ** 2).sum(axis=0) + outside
        alpha, beta = gamma / np.maximum(weights, 1e-12), (n - gamma) / np.maximum(residual, 1e-12)
        if np.allclose(alpha / beta, ratio, rtol=1e-3):
            break
    logs = 0.5 * (np.log(alpha) - np.log(alpha + beta * squares)).sum(axis=0)
    evidence = logs + n / 2 * np.log(beta / (2 * np.pi)) - beta / 2 * residual - alpha / 2 * weights
    return float(evidence.mean() / n)


def h_score(features: Features | ArrayLike, labels: ArrayLike) -> float:
    """Trace of the shrunk covariance's inverse times the covariance of class means (H-score, Bao et al. 2019).

    The covariance is shrunk to a multiple of the identity by Ledoit and Wolf's estimate, as Ibrahim et al. (2022)
    propose where features are many. It sees the labels.

    Parameters
    ----------
    features, labels : (n, d) and (n,)

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(3, size=200)
    >>> h_score(np.eye(3)[y] + rng.normal(size=(200, 3)), y) > h_score(rng.normal(size=(200, 3)), y)
    True
    """
    z, targets = Features.of(features), _classes(features, labels)
    n, d = z.items, z.width
    left, values = z.components  # U (n, q)
    squares = values**2 / n  # eigenvalues of the covariance, (q,)
    scale = z.energy / n / d
    spread = (squares**2).sum() - d * scale**2  # |S - scale I|^2
    noise = min(((z.lengths**2).sum() / n - (squares**2).sum()) / n, spread)
    shrinkage = noise / spread if spread > 0 else 1.0
    counts = targets.sum(axis=0)
    means = targets.T @ (left * values) / counts[:, None]  # (c, q) on principal axes
    between = (counts[:, None] / n * means**2).sum(axis=0)  # (q,)
    return float((between / ((1 - shrinkage) * squares + shrinkage * scale)).sum())


def _variances(features: Features) -> Array:
    """Eigenvalues of the centred Gram matrix, largest first, none negative."""
    return np.maximum(np.linalg.eigvalsh(features.gram)[::-1], 0.0)


def _classes(features: Features | ArrayLike, labels: ArrayLike) -> Array:
    """Return one-hot labels (n, c)."""
    z, y = Features.of(features), np.asarray(labels)
    if y.shape != (z.items,):
        raise InputError(f"labels of shape {y.shape} for the {z.items} items of {z.name}: give one label an item")
    classes, numbers = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise InputError("all labels are the same: give two classes or more")
    return np.eye(len(classes))[numbers]
