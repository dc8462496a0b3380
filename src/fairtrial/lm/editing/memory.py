"""Why anchoring works, exactly: a linear memory written with values that start from what it gives.

W is (d, d), keys are isotropic with |k|^2 = d, a value is W k + c |W k| u with u a random direction, and each write
makes W k = v. The relative clamp c bounds the increment, not the growth: E|W|^2 gains the factor 1 + c^2 / d an edit.
With values at norm rho instead E|W|^2 becomes (1 - 1/d) E|W|^2 + rho^2 / d, a contraction.
"""

from __future__ import annotations

import numpy as np

from fairtrial.errors import InputError
from fairtrial.seeds import generator


def expected_growth(d: int, clamp: float, edits: int) -> float:
    """Return E|W|^2 after edits over that before, without anchoring.

    >>> round(expected_growth(64, 0.75, 128), 2)
    3.07
    """
    return (1 + clamp**2 / d) ** edits


def simulate(d: int, clamp: float, edits: int, *, anchored: bool, seed: int = 0) -> float:
    """Return |W|^2 after edits over that before, of one linear memory.

    Parameters
    ----------
    d
        Width, at least 2.
    clamp
        Length of the increment in lengths of the output.
    edits
        How many are written.
    anchored
        Whether values are rescaled to the norm outputs had at first.
    seed
        Of keys and directions.

    Raises
    ------
    InputError
        A width below 2, a negative clamp or number of edits.
    """
    if d < 2 or clamp < 0 or edits < 0:
        raise InputError(f"d={d}, clamp={clamp}, edits={edits}: give a width of 2 or more, and nothing negative")
    rng = generator(seed, "memory", d)
    W = rng.standard_normal((d, d)) / np.sqrt(d)
    before = np.square(W).sum()
    rho = np.sqrt(before)  # E|W k|^2 = |W|^2 where E[k k'] = I
    for _ in range(edits):
        k, u = rng.standard_normal((2, d))
        k *= np.sqrt(d) / np.linalg.norm(k)
        h = W @ k
        v = h + clamp * np.linalg.norm(h) * u / np.linalg.norm(u)
        if anchored:
            v *= rho / np.linalg.norm(v)
        W += np.outer(v - h, k) / d
    return float(np.square(W).sum() / before)
