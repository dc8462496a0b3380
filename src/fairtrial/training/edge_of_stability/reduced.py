"""The reduced model of a run at the edge with weight decay, and what it predicts from measurements.

x is the displacement along the top eigenvector, y = S - edge. Damian, Nichani and Lee (2023) describe how progressive
sharpening alpha and self-stabilisation beta play against each other; decay adds a pull of lambda A(y) on the sharpness,
with A(y) = kappa (edge + y):

    x' = -(1 + eta y) x          y' = y + eta (alpha - lambda A(y) - beta x^2 / 2)

Below lambda_c = alpha / A(0) the run stays at the edge, as a damped spiral instead of a cycle; above it the sharpness
settles under the edge, where alpha = lambda A.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fairtrial.errors import InputError
from fairtrial.seeds import generator

APPROACH = (0.8, 0.97)
"""Of the edge: where alpha is read, on the first approach. Once the run oscillates, alpha means nothing."""
FEWEST = 5
"""Measurements on the approach below which nothing is predicted."""


def simulate_reduced(
    alpha: float,
    beta: float,
    kappa: float,
    lambda_: float,
    eta: float,
    steps: int,
    *,
    x0: float = 1e-3,
    y0: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, each (steps + 1,), of the reduced map.

    Like the descent it stands for it moves in steps: where ``eta (alpha - lambda A)`` exceeds half of ``lambda kappa``
    these drive the oscillation more than decay damps it, and the map may leave for infinity.

    Parameters
    ----------
    alpha, beta, kappa : progressive sharpening, self-stabilisation and the degree of homogeneity of the sharpness.
    lambda_, eta : weight decay and learning rate; the edge is ``2 / eta - lambda_``.
    steps : of the map.
    x0, y0 : the start.

    >>> x, y = simulate_reduced(0.5, 1.0, 2.0, lambda_=0.05, eta=0.1, steps=5000)
    >>> round(float(y[-1]), 3), bool(abs(x[-1]) < 1e-6)  # lambda A = alpha at S = 5, far under the edge 19.95
    (-14.95, True)
    """
    if not (0 < eta < np.inf and steps >= 0):
        raise InputError(f"eta={eta}, steps={steps}: a positive learning rate and a number of steps from 0 are needed")
    edge = 2 / eta - lambda_
    x, y = np.empty(steps + 1), np.empty(steps + 1)
    x[0], y[0] = x0, y0
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(steps):
            x[t + 1] = -(1 + eta * y[t]) * x[t]
            y[t + 1] = y[t] + eta * (alpha - lambda_ * kappa * (edge + y[t]) - beta * x[t] ** 2 / 2)
    return x, y


@dataclass(frozen=True)
class Prediction:
    """The critical weight decay predicted from one run.

    Attributes
    ----------
    lambda_c : float
        Above it the sharpness is expected to settle under the edge; nan where nothing can be predicted.
    low, high : float
        95 % bootstrap interval over the measurements used.
    alpha, kappa : float
        Their medians over the measurements used.
    used : int
        Measurements between 0.8 and 0.97 of the edge on the first approach.
    reason : str or None
        Why there is no prediction.
    """

    lambda_c: float
    low: float
    high: float
    alpha: float
    kappa: float
    used: int
    reason: str | None = None


def predict_regime(frame: pd.DataFrame, *, draws: int = 2000, seed: int = 0) -> Prediction:
    """Predict the critical weight decay ``alpha / (kappa edge)`` from a run's first approach to the edge.

    Parameters
    ----------
    frame : DataFrame
        Of :class:`~fairtrial.training.edge_of_stability.monitor.StabilityMonitor`: columns ``step``, ``sharpness``,
        ``edge``, ``alpha`` and ``kappa``, the last two nan where no gradient was measured.
    draws, seed : of the bootstrap.

    Raises
    ------
    InputError
        If a column is missing.
    """
    if lacking := {"step", "sharpness", "edge", "alpha", "kappa"} - set(frame):
        raise InputError(f"the frame lacks {', '.join(sorted(lacking))}: give a StabilityMonitor's")
    ratio = frame["sharpness"] / frame["edge"]
    beyond = np.flatnonzero(ratio >= APPROACH[1])
    first = frame.iloc[: beyond[0]] if len(beyond) else frame
    inside = (first["sharpness"] / first["edge"]).between(*APPROACH) & first["alpha"].notna()
    rows = first[inside]
    if len(rows) < FEWEST:
        reason = (
            "the edge was not approached"
            if not (ratio > APPROACH[0]).any()
            else f"{len(rows)} measurements with a gradient on the first approach, {FEWEST} needed"
        )
        nan = float("nan")
        return Prediction(nan, nan, nan, nan, nan, len(rows), reason)
    alpha, at_edge = rows["alpha"].to_numpy(), (rows["kappa"] * rows["edge"]).to_numpy()
    index = generator(seed, "predict").integers(len(rows), size=(draws, len(rows)))
    resampled = np.median(alpha[index], axis=1) / np.median(at_edge[index], axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Prediction(
        float(np.median(alpha) / np.median(at_edge)), float(low), float(high),
        float(np.median(alpha)), float(rows["kappa"].median()), len(rows),
    )  # fmt: skip
