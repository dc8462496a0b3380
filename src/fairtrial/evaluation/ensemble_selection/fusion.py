"""Fusion: one answer from the answers of the chosen models.

Four scikit-learn classifiers of tables of answers, (n, k). No answer is a category of its own to the two that learn
and no vote to the two that count votes. ``predict`` and ``predict_proba`` take the class shares to expect where they
differ from those of the fitted items.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_is_fitted

from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection.answers import Answers, as_frame, check_rows, classes_of, encode
from fairtrial.evaluation.ensemble_selection.information import ITEMS_A_PAIR, columns_of
from fairtrial.evaluation.ensemble_selection.softmax import Floats, Ints, fit, softmax
from fairtrial.options import checked_number

Prior = Mapping[Any, float]


class Fusion(ClassifierMixin, BaseEstimator):
    """What the four rules share: reading tables, the class prior, the most probable class.

    Parameters
    ----------
    abstain : take an answer outside the classes for no answer, instead of refusing it.
    """

    def __init__(self, abstain: bool = False) -> None:
        self.abstain = abstain

    def fit(self, X: Any, y: Any) -> Self:
        """Fit the rule on answers (n, k) and labels (n,)."""
        frame = pd.DataFrame(index=range(len(y))) if _is_empty(X) else as_frame(X)
        self.classes_, labels = classes_of(y)
        check_rows(len(frame), labels)
        self.n_features_in_ = frame.shape[1]
        self.prior_ = np.bincount(labels) / len(labels)
        self._fit(self._encode(frame), labels)
        return self

    def predict_proba(self, X: Any, prior: Prior | None = None) -> Floats:
        """Return the probability of each class, (n, C), in the order of ``classes_``.

        ``prior`` maps every class to its share where the rule is used; left out, the shares of the fitted items.
        """
        check_is_fitted(self)
        frame = pd.DataFrame(index=range(len(X))) if _is_empty(X) else as_frame(X)
        if frame.shape[1] != self.n_features_in_:
            raise InputError(f"answers of {frame.shape[1]} models: the rule was fitted on {self.n_features_in_}")
        score = self._score(self._encode(frame))
        if prior is not None:
            score = score + np.log(_checked(prior, self.classes_) / self.prior_)
        return softmax(score, axis=1)[0]

    def predict(self, X: Any, prior: Prior | None = None) -> np.ndarray:
        """Return the most probable class of each item, (n,)."""
        probability = self.predict_proba(X, prior)
        return self.classes_[probability.argmax(1)]

    def _encode(self, frame: pd.DataFrame) -> Answers:
        if frame.shape[1] == 0:
            return Answers([], self.classes_, np.empty((len(frame), 0), dtype=np.int64))
        return encode(frame, self.classes_, abstain=self.abstain, most_missing=1.0)

    def _fit(self, answers: Answers, y: Ints) -> None:
        raise NotImplementedError

    def _score(self, answers: Answers) -> Floats:
        """Return log-probabilities of the classes up to a constant, (n, C)."""
        raise NotImplementedError


class SoftmaxFusion(Fusion):
    """Softmax regression on the answers and, where items allow, on the agreement of pairs: the default.

    The penalty is 1/n, and the features are those of the estimator "variational".

    Examples
    --------
    >>> X, y = [["a", "b"], ["b", "b"], ["a", "a"]] * 8, ["a", "b", "a"] * 8
    >>> SoftmaxFusion().fit(X, y).predict([["a", "b"], ["b", "a"]]).tolist()
    ['a', 'b']
    """

    def _fit(self, answers: Answers, y: Ints) -> None:
        self.paired_ = math.isqrt(len(y) // (ITEMS_A_PAIR * len(self.classes_)))
        self.weights_, _ = fit(self._design(answers), y, len(self.classes_))

    def _score(self, answers: Answers) -> Floats:
        return self._design(answers) @ self.weights_

    def _design(self, answers: Answers) -> Floats:
        n, k = answers.codes.shape
        symbols = len(self.classes_) + 1  # no answer may come later, if it did not yet
        columns = [columns_of(answers, range(j), [j], symbols, self.paired_)[0].T for j in range(k)]
        return np.concatenate([np.ones((n, 1)), *columns], axis=1)


class NaiveBayesFusion(Fusion):
    """log p(y) + sum_j log p(x_j | y), shares with one added to each count: right if models err independently."""

    def _fit(self, answers: Answers, y: Ints) -> None:
        truth = np.eye(len(self.classes_))[y]  # (n, C)
        given = answers.one_hot(range(answers.codes.shape[1]), len(self.classes_) + 1)  # (k, C + 1, n)
        counts = given @ truth + 1  # (k, C + 1, C)
        self.log_given_ = np.log(counts / counts.sum(1, keepdims=True))

    def _score(self, answers: Answers) -> Floats:
        each = range(answers.codes.shape[1])
        return np.log(self.prior_) + sum(self.log_given_[j][answers.codes[:, j]] for j in each)


class WeightedVote(Fusion):
    """log p(y) + the sum of w_j over models that say y, w_j = log((C - 1) a_j / (1 - a_j)), a_j the accuracy.

    The log-linear rule that is right if models err independently and all wrong answers are alike.
    """

    def _fit(self, answers: Answers, y: Ints) -> None:
        right = (answers.codes == y[:, None]).sum(0)
        self.weights_ = np.log((len(self.classes_) - 1) * (right + 0.5) / (len(y) - right + 0.5))  # (k,)

    def _score(self, answers: Answers) -> Floats:
        return np.log(self.prior_) + _votes(answers, self.weights_)


class MajorityVote(Fusion):
    """The answer given most often; ties go to the one that the most accurate of the tied models gives.

    Probabilities are shares of votes (before another prior), which is no statement of confidence.

    Examples
    --------
    >>> X, y = [["a", "b", "a"], ["b", "b", "a"]] * 10, ["a", "b"] * 10
    >>> MajorityVote().fit(X, y).predict([["a", "b", "b"], ["a", None, "b"]]).tolist()
    ['b', 'a']
    """

    def _fit(self, answers: Answers, y: Ints) -> None:
        right = (answers.codes == y[:, None]).mean(0)
        rank = np.argsort(np.argsort(-right, kind="stable"))
        self.weights_ = 1 + np.exp2(-1.0 - rank)  # what the halves add never makes up for a vote

    def _score(self, answers: Answers) -> Floats:
        votes = _votes(answers, self.weights_)  # (n, C)
        total = votes.sum(1, keepdims=True)
        share = np.divide(votes, total, out=np.tile(self.prior_, (len(votes), 1)), where=total > 0)
        return np.log(np.maximum(share, 1e-12))


def _votes(answers: Answers, weights: Floats) -> Floats:
    """Return the sum of the weights of the models that say each class, (n, C)."""
    said = answers.one_hot(range(answers.codes.shape[1]), len(answers.alphabet))  # (k, C, n)
    return np.einsum("kcn,k->nc", said, weights)


def _is_empty(X: Any) -> bool:
    return getattr(X, "ndim", 0) == 2 and X.shape[1] == 0


def _checked(prior: Prior, classes: np.ndarray) -> Floats:
    """Return a prior as shares in the order of classes."""
    named = isinstance(prior, Mapping) and set(prior) == set(classes.tolist())
    if not named or not sum(checked_number(share, "prior", least=0) for share in prior.values()) > 0:
        raise InputError(f"prior {prior!r}: give a share for each of the classes {', '.join(map(repr, classes))}")
    share = np.array([prior[name] for name in classes.tolist()], dtype=float)
    return np.maximum(share / share.sum(), 1e-12)
