"""When a correction helps: the error falls exactly if it points the right way and is not twice too long.

With e0 = y(q) - y* the error without context, c = y(q, z) - y(q) the correction, cos its cosine to -e0 and
rho = |c| / |e0|, the error with context is e0 + c and |e|^2 - |e0|^2 = |e0|^2 (rho^2 - 2 rho cos). It falls iff
0 < rho < 2 cos, and most at rho = cos.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fairtrial.errors import InputError
from fairtrial.options import checked_number

VERDICTS = ("UNDER", "PROPER", "OVERSHOOT", "OVER", "MISDIRECTED")
TAU = 0.25  # how far from the best magnitude still counts as proper


@dataclass(frozen=True, eq=False)
class Corrections:
    """Corrections of n contexts.

    Attributes
    ----------
    cos : (n,) cosine to the way the error points back; ``nan`` where nothing was corrected or wrong.
    rho : (n,) length in lengths of the error.
    error_before, error_after : (n,) squared errors.
    efficiency : (n,) share of the squared error taken away, at most cos^2; -inf where there was none.
    verdict : (n,) of str: "UNDER", "PROPER", "OVERSHOOT" (too long, helps still), "OVER" (harms), "MISDIRECTED".
    """

    cos: np.ndarray
    rho: np.ndarray
    error_before: np.ndarray
    error_after: np.ndarray
    efficiency: np.ndarray
    verdict: np.ndarray

    @property
    def harmful(self) -> np.ndarray:
        """Which corrections raise the error, (n,) bool."""
        return (self.verdict == "OVER") | (self.verdict == "MISDIRECTED")


def finite(values: Any, name: str) -> np.ndarray:
    """Return answer vectors as an array; refuse what is not finite, real and numeric."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise InputError(f"{name}: answer vectors are finite real numbers")
    return array.astype(float)


def corrections(before: np.ndarray, after: np.ndarray, truth: np.ndarray, *, tau: float = TAU) -> Corrections:
    """Return what contexts do to answer vectors.

    Parameters
    ----------
    before, truth
        (C,) or (n, C): answers without context, and true ones.
    after
        (n, C): answers with a context.
    tau
        A magnitude within ``tau`` cos of the best counts as proper.

    Raises
    ------
    InputError
        Shapes that do not fit, values that are not finite, tau outside [0, 1).

    Examples
    --------
    >>> corrections(np.array([0.5, 0.5]), np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([1.0, 0.0])).verdict.tolist()
    ['PROPER', 'MISDIRECTED']
    """
    tau = checked_number(tau, "tau", least=0, below=1)
    y, y0, truth = (finite(x, name) for x, name in ((after, "after"), (before, "before"), (truth, "truth")))
    if y.ndim != 2:
        raise InputError(f"after has shape {y.shape}: give (contexts, answers)")
    try:
        y0, truth = (np.broadcast_to(x, y.shape) for x in (y0, truth))
    except ValueError:
        raise InputError(f"before and truth do not fit answers of shape {y.shape}") from None
    e0, c = y0 - truth, y - y0
    size, moved = np.linalg.norm(e0, axis=1), np.linalg.norm(c, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cos = -(c * e0).sum(1) / (moved * size)
        rho = np.where(size > 0, moved / size, np.where(moved > 0, np.inf, 0.0))
    before_, after_ = np.square(e0).sum(1), np.square(e0 + c).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        efficiency = np.where(moved > 0, 1 - after_ / before_, 0.0)
        verdict = np.select(
            [moved == 0, ~(cos > 0), rho < (1 - tau) * cos, rho <= (1 + tau) * cos, rho < 2 * cos * (1 - 1e-12)],
            ["UNDER", "MISDIRECTED", "UNDER", "PROPER", "OVERSHOOT"],
            "OVER",
        )
    return Corrections(np.where(moved > 0, cos, np.nan), rho, before_, after_, efficiency, verdict)
