"""From preferences to strengths: the Bradley-Terry model with ties."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri, softmax

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.judges.asking import Side

Array = NDArray[np.float64]
_SIDES = ("first", "tie", "second")


@dataclass(frozen=True, eq=False)
class Strengths:
    """Strengths of the compared.

    Attributes
    ----------
    names : tuple of str
        Sorted.
    strength : (n,) array
        Log-strengths, their mean 0.
    covariance : (n, n) array
        Of the strengths.
    tie : float
        How readily ties occur: between equals a tie is ``tie`` times as likely as a win.
    """

    names: tuple[str, ...]
    strength: Array
    covariance: Array
    tie: float

    def probabilities(self, first: str, second: str) -> tuple[float, float, float]:
        """Return the chance that the first wins, of a tie, and that the second wins."""
        difference = self.strength[self._index(first)] - self.strength[self._index(second)]
        win, tie, loss = softmax([difference / 2, np.log(self.tie), -difference / 2])
        return float(win), float(tie), float(loss)

    def difference(self, first: str, second: str) -> tuple[float, float]:
        """Return the difference of two strengths and its standard error."""
        i, j = self._index(first), self._index(second)
        variance = self.covariance[i, i] + self.covariance[j, j] - 2 * self.covariance[i, j]
        return float(self.strength[i] - self.strength[j]), float(np.sqrt(variance))

    def to_frame(self, *, level: float = 0.95) -> pd.DataFrame:
        """Return name, strength, low and high, the strongest first."""
        half = float(ndtri((1 + level) / 2)) * np.sqrt(np.diag(self.covariance))
        frame = pd.DataFrame(
            {
                "name": self.names,
                "strength": self.strength,
                "low": self.strength - half,
                "high": self.strength + half,
            }
        )
        return frame.sort_values("strength", ascending=False, ignore_index=True)

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise UnknownNameError("item", name, self.names)
        return self.names.index(name)


def bradley_terry(comparisons: Iterable[tuple[str, str, Side]], *, spread: float = 3.0) -> Strengths:
    """Fit strengths to wins, losses and ties (Davidson 1970).

    The first wins, the two tie, or the second wins in the ratio  exp(s_i) : tie * exp((s_i + s_j) / 2) : exp(s_j).
    Strengths and log(tie) have normal priors with mean 0 and standard deviation ``spread``, weak beside a few
    comparisons, which keep the undefeated finite; the maximum of the posterior is found by Newton's method (the log
    posterior is concave), and the covariance is the inverse of its curvature there.

    Items that no chain of comparisons connects are compared by the prior alone: their difference has a standard error
    near ``spread``.

    Parameters
    ----------
    comparisons
        (first, second, outcome) with the outcome "first", "second" or "tie"; it does not matter who is named first.
    spread
        Standard deviation of the priors, in log-strength: 3 says that odds of 400 between two items are unusual.

    Raises
    ------
    InputError
        No comparison, one of an item with itself, or another outcome.

    Examples
    --------
    >>> games = [("a", "b", "first")] * 6 + [("a", "b", "second")] * 2 + [("b", "c", "first")] * 5 + [("a", "c", "tie")]
    >>> fit = bradley_terry(games)
    >>> fit.to_frame()["name"].tolist()
    ['a', 'b', 'c']
    """
    games = list(comparisons)
    for at, game in enumerate(games):
        if game[2] not in _SIDES or game[0] == game[1]:
            raise InputError(f"comparison {at} is {game}: give two different items and first, second or tie")
    if not games or not spread > 0:
        raise InputError(f"strengths need comparisons and a spread above 0: here {len(games)} and {spread}")
    names = sorted({name for game in games for name in game[:2]})
    index = {name: i for i, name in enumerate(names)}
    first = np.array([index[game[0]] for game in games])  # (m,)
    second = np.array([index[game[1]] for game in games])
    outcome = np.array([_SIDES.index(game[2]) for game in games])
    n, precision = len(names), spread**-2

    def log_posterior(x: Array) -> tuple[float, Array, Array]:
        """Value, gradient (n + 1,) and curvature (n + 1, n + 1) at x = (strengths, log tie)."""
        d = x[first] - x[second]
        logits = np.stack([d / 2, np.full(len(d), x[n]), -d / 2], axis=1)  # (m, 3): win, tie, loss
        p = softmax(logits, axis=1)
        value = np.take_along_axis(logits, outcome[:, None], axis=1).sum() - np.logaddexp.reduce(logits, axis=1).sum()
        lead = p[:, 0] - p[:, 2]
        toward_first = (1 - outcome - lead) / 2
        gradient = np.append(
            np.bincount(first, toward_first, n) - np.bincount(second, toward_first, n),
            ((outcome == 1) - p[:, 1]).sum(),
        )
        within, cross = (p[:, 0] + p[:, 2] - lead**2) / 4, -lead * p[:, 1] / 2
        curvature = np.zeros((n + 1, n + 1))
        for i, j, sign in ((first, first, 1), (second, second, 1), (first, second, -1), (second, first, -1)):
            np.add.at(curvature, (i, j), sign * within)
        curvature[n, :n] = curvature[:n, n] = np.bincount(first, cross, n) - np.bincount(second, cross, n)
        curvature[n, n] = (p[:, 1] * (1 - p[:, 1])).sum()
        diagonal = np.arange(n + 1)
        curvature[diagonal, diagonal] += precision
        return float(value - precision * (x @ x) / 2), gradient - precision * x, curvature

    x = np.zeros(n + 1)
    value, gradient, curvature = log_posterior(x)
    while True:
        step = np.linalg.solve(curvature, gradient)
        while (trial := log_posterior(x + step))[0] < value - 1e-9 * abs(value):
            step /= 2
        x, (value, gradient, curvature) = x + step, trial
        if np.abs(step).max() < 1e-9:
            break
    centre = np.eye(n) - 1 / n
    covariance = centre @ np.linalg.inv(curvature)[:n, :n] @ centre
    return Strengths(tuple(names), centre @ x[:n], covariance, float(np.exp(x[n])))
