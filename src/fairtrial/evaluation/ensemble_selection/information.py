"""Mutual information between a label and the answers of a set of models, estimated from items.

Three estimators, each a state that holds a set S of models and answers one question fast: what would the information
be with each of some candidates added? Information is in bits and given as one term an item, whose mean it is, so that
two sets can be compared item by item.

    Counts       plug-in on answer tuples with the correction of Miller and Madow
    Shrunk       cell probabilities shrunk towards naive Bayes (Hausser and Strimmer 2009)
    Variational  H(Y) + mean log2 q(y | x_S), q cross-fitted (Barber and Agakov 2003): a lower bound in expectation
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, overload

import numpy as np

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.ensemble_selection.answers import Answers, as_frame, check_rows, classes_of, encode
from fairtrial.evaluation.ensemble_selection.softmax import Floats, Ints, extend, fit, softmax
from fairtrial.seeds import generator

Estimator: TypeAlias = Literal["variational", "counts", "shrunk"]

FOLDS = 4
MOST_CELLS = 2**22  # of a table of probabilities
ITEMS_A_CELL = 5  # below that many items for each possible tuple of answers, counts are biased upwards
ITEMS_A_PAIR = 50  # items, for each class and pair of models, from which agreement is a feature


class Information(Protocol):
    """The information in a set of models, and in that set with one more."""

    terms: Floats  # (n,) bits; their mean is the estimate

    def allowed(self, model: int) -> bool:
        """Whether the estimate with ``model`` added can be trusted."""
        ...

    def with_each(self, models: Sequence[int]) -> Floats:
        """Return the terms (len(models), n) with each model added alone."""
        ...

    def add(self, model: int) -> Information:
        """Return the state with ``model`` added for good."""
        ...


@overload
def mutual_information(X: Any, y: Any, estimator: Estimator = ..., *, seed: int = ...) -> float: ...


@overload
def mutual_information(
    X: Any, y: Any, estimator: Estimator = ..., return_terms: Literal[True] = ..., *, seed: int = ...
) -> tuple[float, Floats]: ...


def mutual_information(
    X: Any, y: Any, estimator: Estimator = "variational", return_terms: bool = False, *, seed: int = 0
) -> float | tuple[float, Floats]:
    """Estimate I(Y; X), the information in the answers of a set of models about the label, in bits.

    Parameters
    ----------
    X
        (n, M) answers of any hashable values; None and NaN are an answer of their own.
    y
        (n,) labels.
    estimator
        "variational": H(Y) + the mean log2-probability that a softmax regression of the answers, fitted on the other
        folds, gives to the label: a lower bound in expectation, whatever M. "counts": plug-in with the correction of
        Miller and Madow, right while every possible tuple of answers has some five items. "shrunk": cell probabilities
        shrunk towards naive Bayes, for a few thousand possible tuples.
    return_terms
        Return the items' terms too.
    seed
        Of the folds.

    Returns
    -------
    bits : float, or (bits, terms (n,)) whose mean is ``bits``.

    Raises
    ------
    InputError
        More possible tuples of answers than the estimator can serve; too few items; a constant label.

    Examples
    --------
    >>> y = [0, 1] * 500
    >>> round(mutual_information(np.column_stack([y]), y, "counts"), 2)
    1.0
    """
    frame = as_frame(X)
    classes, labels = classes_of(y)
    check_sizes(len(frame), labels, len(classes))
    answers = encode(frame)
    state = start(estimator, answers, labels, len(classes), seed)
    for model in range(answers.codes.shape[1]):
        if not state.allowed(model):
            raise InputError(_beyond(estimator, answers, labels, len(classes), model))
        state = state.add(model)
    bits = float(state.terms.mean())
    return (bits, state.terms) if return_terms else bits


def check_sizes(items: int, labels: Ints, classes: int) -> None:
    """Refuse answers and labels of different length, and fewer than ten items a class."""
    check_rows(items, labels)
    if items < 10 * classes:
        bias = (classes - 1) ** 2 / (2 * items * math.log(2))
        raise InputError(
            f"{items} items are too few for {classes} classes, a single model's information would be biased by "
            f"{bias:.2f} bits: give at least {10 * classes}"
        )


def start(estimator: str, answers: Answers, y: Ints, classes: int, seed: int) -> Information:
    """Return the state of the empty set."""
    if estimator == "counts":
        return Counts(answers.codes, y)
    if estimator == "shrunk":
        return Shrunk(answers.codes, y)
    if estimator == "variational":
        return Variational(answers, y, classes, folds_of(y, seed))
    raise UnknownNameError("estimator", estimator, ("variational", "counts", "shrunk"))


def _beyond(estimator: str, answers: Answers, y: Ints, classes: int, model: int) -> str:
    n = len(y)
    tuples = math.prod(len(np.unique(answers.codes[:, j])) for j in range(model + 1))
    bias = (tuples - 1) * (classes - 1) / (2 * n * math.log(2))
    where = f"{model + 1} models have {tuples} possible tuples of answers to {n} items"
    if estimator == "counts":
        where += f": counts would be biased upwards by up to {bias:.2f} bits"
    return f"{where}: give fewer models, or estimator='variational'"


def entropy(y: Ints) -> float:
    """Return the entropy of labels as they occur, in bits.

    >>> entropy(np.array([0, 1, 2, 3]))
    2.0
    """
    share = np.bincount(y) / len(y)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def folds_of(y: Ints, seed: int, folds: int = FOLDS) -> Ints:
    """Return the fold of each item, every class spread evenly over the folds."""
    order = np.lexsort((generator(seed, "folds").random(len(y)), y))
    fold = np.empty(len(y), dtype=np.int64)
    fold[order] = np.arange(len(y)) % folds
    return fold


# --------------------------------------------------------------------------------------------------------------- counts


class Counts:
    """I = H(Y) + H(X_S) - H(Y, X_S) of shares, less (K_YX - K_Y - K_X + 1) / (2 n ln 2), K counting non-empty cells."""

    def __init__(self, codes: Ints, y: Ints, cell: Ints | None = None, tuples: int = 1) -> None:
        self.codes, self.y = codes, y
        self.cell = np.zeros(len(y), dtype=np.int64) if cell is None else cell  # which tuple of answers an item has
        self.tuples = tuples  # how many are possible
        self.terms = self._terms(self.cell)

    def allowed(self, model: int) -> bool:
        """Whether there are five items for each possible tuple of answers."""
        return self.tuples * self._kinds(model) * ITEMS_A_CELL <= len(self.y)

    def with_each(self, models: Sequence[int]) -> Floats:
        """Return the terms with each model added alone."""
        return np.array([self._terms(self._joined(model)) for model in models])

    def add(self, model: int) -> Counts:
        """Return the state with ``model`` added."""
        return Counts(self.codes, self.y, self._joined(model), self.tuples * self._kinds(model))

    def _kinds(self, model: int) -> int:
        return len(np.unique(self.codes[:, model]))

    def _joined(self, model: int) -> Ints:
        key = self.cell * (self.codes[:, model].max() + 1) + self.codes[:, model]
        return np.unique(key, return_inverse=True)[1]

    def _terms(self, cell: Ints) -> Floats:
        n, classes = len(self.y), int(self.y.max()) + 1
        _, both, of_both = np.unique(cell * classes + self.y, return_inverse=True, return_counts=True)
        of_cell, of_label = np.bincount(cell), np.bincount(self.y)
        surplus = len(of_both) - np.count_nonzero(of_label) - np.count_nonzero(of_cell) + 1
        ratio = n * of_both[both] / (of_cell[cell] * of_label[self.y])
        return np.log2(ratio) - surplus / (2 * n * math.log(2))


# --------------------------------------------------------------------------------------------------------------- shrunk


class Shrunk:
    """The same entropies of p = k t + (1 - k) shares, t = p(y) prod_j p(x_j | y), k the James-Stein intensity.

    k = (1 - sum of squared shares) / ((n - 1) sum of (t - share)^2), at most 1 (Hausser and Strimmer 2009).
    """

    def __init__(self, codes: Ints, y: Ints, chosen: tuple[int, ...] = ()) -> None:
        self.y, self.chosen = y, chosen
        self.codes = np.column_stack([np.unique(column, return_inverse=True)[1] for column in codes.T])
        self.kinds = self.codes.max(0) + 1
        self.classes = int(y.max()) + 1
        share = np.bincount(y, minlength=self.classes) / len(y)
        self.target = share[:, None]  # (C, tuples of answers)
        self.cell = np.zeros(len(y), dtype=np.int64)
        for model in chosen:
            self.target, self.cell = self._joined(model)
        self.terms = self._terms(self.target, self.cell)

    def allowed(self, model: int) -> bool:
        """Whether the table of probabilities has a bearable size."""
        return self.target.size * self.kinds[model] <= MOST_CELLS

    def with_each(self, models: Sequence[int]) -> Floats:
        """Return the terms with each model added alone."""
        return np.array([self._terms(*self._joined(model)) for model in models])

    def add(self, model: int) -> Shrunk:
        """Return the state with ``model`` added."""
        return Shrunk(self.codes, self.y, (*self.chosen, model))

    def _joined(self, model: int) -> tuple[Floats, Ints]:
        kinds, answer = self.kinds[model], self.codes[:, model]
        counts = np.bincount(self.y * kinds + answer, minlength=self.classes * kinds).reshape(self.classes, kinds)
        given = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        target = (self.target[:, :, None] * given[:, None]).reshape(self.classes, -1)
        return target, self.cell * kinds + answer

    def _terms(self, target: Floats, cell: Ints) -> Floats:
        n = len(self.y)
        share = np.bincount(self.y * target.shape[1] + cell, minlength=target.size).reshape(target.shape) / n
        away = ((target - share) ** 2).sum()
        intensity = min(1.0, (1 - (share**2).sum()) / ((n - 1) * away)) if away > 0 else 0.0
        joint = intensity * target + (1 - intensity) * share
        apart = joint.sum(1, keepdims=True) * joint.sum(0)
        ratio = np.log2(joint, out=np.zeros_like(joint), where=joint > 0)
        ratio -= np.log2(apart, out=np.zeros_like(joint), where=apart > 0)
        terms = ratio[self.y, cell]
        return terms + (float((joint * ratio).sum()) - terms.mean())  # the mean is that of the shrunk table


# ---------------------------------------------------------------------------------------------------------- variational


class Variational:
    """I >= H(Y) + mean log2 q(y | x_S), q a softmax regression fitted on the folds an item is not in.

    Features are indicators of each answer, and of agreement on each class for pairs among the first models chosen, as
    many of them, s, as n >= 50 C s^2 allows.
    """

    def __init__(self, answers: Answers, y: Ints, classes: int, fold: Ints) -> None:
        self.answers, self.y, self.classes, self.fold = answers, y, classes, fold
        self.symbols = answers.symbols
        self.paired = math.isqrt(len(y) // (ITEMS_A_PAIR * classes))
        self.chosen: tuple[int, ...] = ()
        self.design = np.ones((len(y), 1))
        self._extended: dict[int, list[Floats]] = {}
        share = np.bincount(y, minlength=classes) / len(y)
        self._base = np.log2(share)[y]  # its mean is -H(Y)
        self.terms = np.zeros(len(y))
        self.probabilities = np.broadcast_to(share, (len(y), classes))  # (n, C), cross-fitted
        self._fits = [fit(self.design[fold != f], y[fold != f], classes) for f in range(fold.max() + 1)]

    def allowed(self, model: int) -> bool:
        """Return True: a lower bound flatters nobody."""
        return True

    def with_each(self, models: Sequence[int]) -> Floats:
        """Return the terms with each model added alone."""
        own = self._columns(models)
        likelihood = np.empty((len(models), len(self.y)))
        weights: list[list[Floats]] = [[] for _ in models]
        for f, (shared, hessian) in enumerate(self._fits):
            train, test = self.fold != f, self.fold == f
            of_shared, of_own = extend(self.design[train], own[:, :, train], self.y[train], shared, hessian)
            logits = of_shared @ self.design[test].T + of_own @ own[:, :, test]  # (M, C, held out)
            total = softmax(logits, axis=1)[1]
            likelihood[:, test] = logits[:, self.y[test], np.arange(test.sum())] - total
            for mine, *both in zip(weights, of_shared, of_own, strict=True):
                mine.append(np.concatenate(both, axis=1).T)
        self._extended = dict(zip(models, weights, strict=True))
        return likelihood / math.log(2) - self._base

    def add(self, *models: int) -> Variational:
        """Return the state with ``models`` added, fitted to convergence."""
        new = copy.copy(self)
        new._extended = {}
        for model in models:
            new.design = np.concatenate([new.design, new._columns([model])[0].T], axis=1)
            new.chosen = (*new.chosen, model)
        more = new.design.shape[1] - self.design.shape[1]
        starts = [np.concatenate([weights, np.zeros((more, self.classes))]) for weights, _ in self._fits]
        if len(models) == 1:
            starts = self._extended.get(models[0], starts)
        new._fits, new.probabilities = [], np.empty((len(self.y), self.classes))
        for f, begin in enumerate(starts):
            train, test = self.fold != f, self.fold == f
            new._fits.append(fit(new.design[train], self.y[train], self.classes, begin))
            new.probabilities[test] = softmax(new.design[test] @ new._fits[f][0], axis=1)[0]
        new.terms = np.log2(new.probabilities[np.arange(len(self.y)), self.y]) - self._base
        return new

    def _columns(self, models: Sequence[int]) -> Floats:
        """Return the columns (len(models), q, n) that each model would add."""
        return columns_of(self.answers, self.chosen, models, self.symbols, self.paired)


def columns_of(answers: Answers, chosen: Sequence[int], models: Sequence[int], symbols: int, paired: int) -> Floats:
    """Return the columns (len(models), q, n) that each of ``models`` adds to those of ``chosen``."""
    own = answers.one_hot(models, symbols)  # (M, A, n)
    if not chosen or len(chosen) >= paired:
        return own
    said = answers.one_hot(chosen, len(answers.alphabet))  # (S, C, n)
    agree = said * own[:, None, : len(answers.alphabet)]  # (M, S, C, n)
    return np.concatenate([own, agree.reshape(len(models), -1, agree.shape[-1])], axis=1)
