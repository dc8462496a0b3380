"""NC1 to NC4 of a classifier (Papyan, Han and Donoho 2020), and V: which class modes lag, and how long they will."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairtrial.errors import InputError
from fairtrial.training.neural_collapse.modes import lyapunov

FLOOR = 1e-12  # of the largest singular value


@dataclass(frozen=True)
class CollapseReport:
    """How far features and last layer are from neural collapse, where every number but ``accuracy`` is 0.

    Attributes
    ----------
    nc1 : float
        Within-class over between-class variance, ``trace(Sigma_W pinv(Sigma_B)) / K``.
    nc2_norm, nc2_angle : float
        Coefficient of variation of the class means' norms about the global mean; largest ``|cos + 1 / (K - 1)|``.
    nc3 : float
        ``|W / |W| - M' / |M||``, of the last layer and the class means, Frobenius.
    nc4 : float
        Share of examples where the network's class is not that of the nearest class mean.
    v_logit, v_weight, v_mean : float
        V of the K - 1 singular values of the centred class-mean logits, of the centred last layer and of the centred
        class means; inf where a mode is missing.
    modes : (K - 1,) array
        Singular values of the centred class-mean logits, descending.
    missing : int
        Modes below 1e-12 of the largest.
    lagging : (K,) array
        Class direction of the smallest mode: the classes of opposite sign are the ones not told apart.
    simplex_possible : bool
        Whether the feature dimension is at least K - 1.
    accuracy : float
    """

    nc1: float
    nc2_norm: float
    nc2_angle: float
    nc3: float
    nc4: float
    v_logit: float
    v_weight: float
    v_mean: float
    modes: np.ndarray
    missing: int
    lagging: np.ndarray
    simplex_possible: bool
    accuracy: float

    def slowdown(self, eps: float = 0.01) -> float:
        """Return by how much the mean mode must still grow for V_logit to fall below ``eps``: (K / 2) log(V / eps).

        Since modes grow with the logarithm of time, time itself grows by the exponential of it. The linear regime near
        collapse is assumed; 0 where V is below ``eps`` already.
        """
        if not 0 < eps < math.inf:
            raise InputError(f"eps={eps}: positive")
        return (len(self.modes) + 1) / 2 * max(0.0, math.log(self.v_logit / eps)) if self.v_logit > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, arrays as lists."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(self).items()}


def collapse_report(features: Any, weight: Any, labels: Any, bias: Any = None) -> CollapseReport:
    """Measure neural collapse.

    Parameters
    ----------
    features : (N, p) tensor or array
        What the last layer sees.
    weight : (K, p)
        The last layer.
    labels : (N,) integers from 0 to K - 1
    bias : (K,), optional

    Raises
    ------
    InputError
        If shapes do not match, a label is outside, a class has no example (it is named), or a feature is not finite.

    Examples
    --------
    >>> etf = np.eye(3) - 1 / 3
    >>> report = collapse_report(etf[[0, 0, 1, 1, 2, 2]], etf, [0, 0, 1, 1, 2, 2])
    >>> round(report.nc1, 9), round(report.nc2_angle, 9), round(report.nc3, 9), report.nc4, report.v_logit < 1e-9
    (0.0, 0.0, 0.0, 0.0, True)
    """
    try:
        h, w = _array(features), _array(weight)
        y = np.asarray(labels.cpu() if hasattr(labels, "cpu") else labels)
        if y.dtype != int and np.array_equal(y, whole := y.astype(int)):
            y = whole
    except (TypeError, ValueError) as error:
        raise InputError(f"features, weight and labels must be numbers: {error}") from None
    b = np.zeros(len(w)) if bias is None else _array(bias)
    k, p = w.shape if w.ndim == 2 else (0, 0)
    if h.ndim != 2 or k < 2 or h.shape[1] != p or y.shape != (len(h),) or b.shape != (k,):
        raise InputError(
            f"features {h.shape}, weight {w.shape}, labels {y.shape}, bias {b.shape}: (N, p), (K, p), (N,), (K,) needed"
        )
    if not len(y) or not np.issubdtype(y.dtype, np.integer) or y.min() < 0 or y.max() >= k:
        found = f"run from {y.min()} to {y.max()}" if len(y) else "are none"
        raise InputError(f"labels {found}: whole numbers from 0 to {k - 1} are needed")
    counts = np.bincount(y, minlength=k)
    if not counts.all():
        raise InputError(f"class {int(np.argmin(counts))} has no example")
    if not (np.isfinite(w).all() and np.isfinite(b).all()):
        raise InputError("weight or bias is not finite")
    if not (fine := np.isfinite(h).all(1)).all():
        raise InputError(f"features of example {int(np.argmin(fine))} are not finite")
    if counts.max() == 1:
        warnings.warn("every class has one example: NC1 is 0 by definition", stacklevel=2)
    order = np.argsort(y, kind="stable")
    means = np.add.reduceat(h[order], np.concatenate([[0], counts.cumsum()[:-1]])) / counts[:, None]  # (K, p)
    centred = means - means.mean(0)
    _, sizes, vt = np.linalg.svd(centred, full_matrices=False)
    rank = min(k - 1, int((sizes > FLOOR * sizes[0]).sum())) if sizes[0] > 0 else 0
    # In the eigenbasis of Sigma_B = M' M / K only K - 1 directions count.
    within = ((h - means[y]) @ vt[:rank].T) ** 2  # (N, rank)
    nc1 = float((within.mean(0) / sizes[:rank] ** 2).sum()) if rank else math.inf
    norms = np.linalg.norm(centred, axis=1)
    cosines = centred @ centred.T / np.maximum(np.outer(norms, norms), 1e-300)
    off = cosines[~np.eye(k, dtype=bool)]
    logits = h @ w.T + b
    nearest = ((means**2).sum(1) - 2 * h @ means.T).argmin(1)
    modes, lagging, missing = _modes((w @ means.T + b[:, None]) - (w @ means.T + b[:, None]).mean(0))
    return CollapseReport(
        nc1=nc1,
        nc2_norm=float(norms.std() / norms.mean()) if norms.mean() > 0 else math.nan,
        nc2_angle=float(np.abs(off + 1 / (k - 1)).max()),
        nc3=float(np.linalg.norm(w / np.linalg.norm(w) - centred / max(np.linalg.norm(centred), 1e-300))),
        nc4=float((logits.argmax(1) != nearest).mean()),
        v_logit=_v(modes),
        v_weight=_v(_modes(w - w.mean(0))[0]),
        v_mean=_v(_modes(centred)[0]),
        modes=modes,
        missing=missing,
        lagging=lagging,
        simplex_possible=p >= k - 1,
        accuracy=float((logits.argmax(1) == y).mean()),
    )


def _modes(centred: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the K - 1 singular values of a (K, .) matrix of centred columns, the last one's direction, the missing."""
    k = len(centred)
    # An orthonormal basis of the directions that sum to 0 keeps the constant one out of the null space.
    basis = np.linalg.qr(np.eye(k) - 1 / k)[0][:, : k - 1]
    u, s, _ = np.linalg.svd(basis.T @ centred)
    values = np.zeros(k - 1)
    values[: len(s)] = s
    gone = values <= FLOOR * max(values[0], 1e-300)
    values[gone] = 0.0
    return values, basis @ u[:, -1], int(gone.sum())


def _v(modes: np.ndarray) -> float:
    return float(lyapunov(modes)) if modes[0] > 0 else math.inf


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value, dtype=float)
