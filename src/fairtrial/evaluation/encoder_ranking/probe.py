"""The labelled probe: ridge regression on one-hot classes from standardised features, in dual form.

One Gram matrix of items (n, n) serves every strength, every held-out item and every set of labels at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError
from fairtrial.evaluation.encoder_ranking.subspace import Features
from fairtrial.options import checked_number
from fairtrial.seeds import generator

Array = np.ndarray


@dataclass(frozen=True)
class RidgeProbe:
    """Ridge classifier whose strength a holdout chooses.

    Parameters
    ----------
    strengths : what is tried, in units where the kernel's mean diagonal is 1
    holdout : share of the training items that chooses; the most accurate wins, of equals the strongest
    seed : of the holdout

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> labels = rng.integers(3, size=120)
    >>> features = np.eye(3)[labels] + rng.normal(size=(120, 3)) / 3
    >>> bool(RidgeProbe()(features, labels).mean() > 0.8)
    True
    """

    strengths: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
    holdout: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if not len(self.strengths):
            raise InputError("strengths is empty: give one positive number or more")
        for strength in self.strengths:
            checked_number(strength, "strengths", above=0)
        checked_number(self.holdout, "holdout", above=0, below=1)

    def __call__(self, features: Features | ArrayLike, labels: ArrayLike) -> Array:
        """Return for every item whether it is classified correctly by a probe of all others: exact leave-one-out.

        Parameters
        ----------
        features : (n, d)
        labels : (n,) of any type; or (n, t): t tasks on the same items, at the cost of one

        Returns
        -------
        (n,) or (n, t) of bool

        Raises
        ------
        InputError
            As many labels as items are needed, of two classes or more, and two a class on average.
        """
        kernel, tasks = self._prepared(features, labels)
        n = len(kernel)
        targets = [_one_hot(task) for task in tasks]
        chosen = self._strengths_of(kernel, tasks)
        squares, axes = np.linalg.eigh(_double_centred(kernel))
        correct = []
        for task, target, strength in zip(tasks, targets, chosen, strict=True):
            shrink = np.maximum(squares, 0) / (np.maximum(squares, 0) + strength)  # (n,)
            residual = target - target.mean(axis=0)  # (n, c)
            residual = residual - axes @ (shrink[:, None] * (axes.T @ residual))
            left_out = target - residual / (1 - 1 / n - axes**2 @ shrink)[:, None]  # predictions without the item
            correct.append(left_out.argmax(axis=1) == task)
        return np.stack(correct, axis=1).reshape(np.shape(labels))

    def test(self, features: Features | ArrayLike, labels: ArrayLike, train: ArrayLike) -> Array:
        """Return whether the items outside ``train`` are classified correctly by a probe of those inside.

        Parameters
        ----------
        features : (n, d), standardised over all items, which no label sees
        labels : (n,) or (n, t)
        train : (n,) of bool

        Returns
        -------
        (m,) or (m, t) of bool, of the m items outside, in order
        """
        inside = np.asarray(train, dtype=bool)
        kernel, tasks = self._prepared(features, labels)
        chosen = self._strengths_of(kernel[np.ix_(inside, inside)], [task[inside] for task in tasks])
        predicted = _predict(kernel, inside, [_one_hot(task)[inside] for task in tasks], self.strengths)
        correct = [
            scores[self.strengths.index(strength)].argmax(axis=1) == task[~inside]
            for scores, strength, task in zip(predicted, chosen, tasks, strict=True)
        ]
        return np.stack(correct, axis=1).reshape(-1, *np.shape(labels)[1:])

    def _prepared(self, features: Features | ArrayLike, labels: ArrayLike) -> tuple[Array, list[Array]]:
        """Return the kernel (n, n) of standardised features and each task's class numbers (n,)."""
        z, y = Features.of(features), np.asarray(labels)
        if y.ndim not in (1, 2) or len(y) != z.items:
            raise InputError(f"labels of shape {y.shape} for the {z.items} items of {z.name}: give one label an item")
        tasks = [np.unique(column, return_inverse=True)[1] for column in y.reshape(len(y), -1).T]
        for task in tasks:
            classes = int(task.max()) + 1
            if classes < 2 or len(task) < 2 * classes:
                raise InputError(f"{len(task)} labels of {classes} classes: give two classes or more, two labels each")
        scaled = z.centred[:, z.varies] / (z.deviation[z.varies] * np.sqrt(z.varies.sum()))
        return scaled @ scaled.T, tasks

    def _strengths_of(self, kernel: Array, tasks: list[Array]) -> list[float]:
        """Return the strength that classifies most of a random holdout, for each task."""
        n = len(kernel)
        inside = np.ones(n, dtype=bool)
        inside[generator(self.seed, "holdout", n).permutation(n)[: max(1, round(self.holdout * n))]] = False
        predicted = _predict(kernel, inside, [_one_hot(task)[inside] for task in tasks], self.strengths)
        chosen = []
        for scores, task in zip(predicted, tasks, strict=True):
            accuracy = (scores.argmax(axis=2) == task[~inside]).mean(axis=1)  # (strengths,)
            chosen.append(max(zip(accuracy, self.strengths, strict=True))[1])
        return chosen


def _one_hot(task: Array) -> Array:
    return np.eye(int(task.max()) + 1)[task]


def _double_centred(kernel: Array) -> Array:
    rows = kernel.mean(axis=0)
    return kernel - rows - rows[:, None] + rows.mean()


def _predict(kernel: Array, inside: Array, targets: list[Array], strengths: tuple[float, ...]) -> list[Array]:
    """Return for each task the predictions (strengths, m, c) of the items outside by ridge with an intercept."""
    own = kernel[np.ix_(inside, inside)]  # (n, n)
    mean = own.mean(axis=0)  # (n,)
    other = kernel[np.ix_(~inside, inside)]  # (m, n)
    other = other - mean - other.mean(axis=1, keepdims=True) + mean.mean()
    squares, axes = np.linalg.eigh(_double_centred(own))
    squares = np.maximum(squares, 0)
    across = other @ axes  # (m, n)
    shrink = 1 / (squares + np.array(strengths)[:, None])  # (strengths, n)
    predictions = []
    for target in targets:
        coordinates = axes.T @ (target - target.mean(axis=0))  # (n, c)
        predictions.append(across @ (shrink[:, :, None] * coordinates) + target.mean(axis=0))
    return predictions
