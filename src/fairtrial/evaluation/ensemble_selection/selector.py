"""Choose which models to query: greedy maximisation of the information their answers hold about the label."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin
from sklearn.utils.validation import check_is_fitted

from fairtrial import stats
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.ensemble_selection.answers import as_frame, classes_of, encode
from fairtrial.evaluation.ensemble_selection.fusion import (
    Fusion,
    MajorityVote,
    NaiveBayesFusion,
    Prior,
    SoftmaxFusion,
    WeightedVote,
)
from fairtrial.evaluation.ensemble_selection.information import (
    Estimator,
    Information,
    Variational,
    check_sizes,
    entropy,
    folds_of,
    start,
)
from fairtrial.evaluation.ensemble_selection.softmax import Floats
from fairtrial.options import checked_count, checked_number

FUSIONS: Mapping[str, type[Fusion]] = {
    "softmax": SoftmaxFusion,
    "weighted": WeightedVote,
    "naive_bayes": NaiveBayesFusion,
    "majority": MajorityVote,
}


class MutualInformationSelector(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """Select models whose answers together tell most about the label, and fuse their answers.

    Maximises I(Y; X_S), the mutual information between the label and the answers of the chosen models S, subject to a
    budget: S starts empty, and the model with the largest gain I(Y; X_S, X_j) - I(Y; X_S) is added (with unequal costs
    the largest gain per cost, and the best affordable single model is returned if it tells more). It ends with the
    budget, or when the 95 % interval of the largest gain over the items reaches down to ``min_gain``: no further model
    helps.

    Parameters
    ----------
    budget
        What the queries for one item may cost together; without ``costs``, how many models; ``inf`` = no limit.
    costs
        The cost of each model: a mapping from its name, or a sequence in the order of columns. ``None`` = 1 each.
    estimator
        "variational" (a cross-fitted lower bound), "counts" or "shrunk": see
        :func:`~fairtrial.evaluation.ensemble_selection.mutual_information`. The last two stop where they would become
        biased or large.
    min_gain
        Bits that a model must surely add. ``-inf`` spends the whole budget.
    seed_size
        2 = begin with the best pair instead of the best model: two answers may tell nothing apart and all together.
        It takes M times as long for the first step.
    fusion
        "softmax", "weighted" (log-linear vote), "naive_bayes" or "majority".
    abstain
        Take an answer that is no class for no answer, instead of refusing it.
    random_state
        Seed of the folds; ``None`` = 0: the same choice every time.

    Attributes
    ----------
    selected_ : list
        Names of the chosen models (indices, of an array), in the order of choice.
    gains_ : pandas.DataFrame
        One row a chosen model: ``model``, ``gain`` (bits) with ``low`` and ``high``, ``information`` of the models so
        far, their ``cost`` together, and the cross-fitted ``accuracy`` of their fusion by softmax with
        ``accuracy_low`` and ``accuracy_high``, which does not count that the models were chosen on these items.
    stopped_ : str
        Why no further model was chosen.
    floor_ : float
        Fano's bound: no rule whatever on the answers of *all* models has a smaller error, if the bits they hold are
        what "variational" estimates.
    fusion_ : Fusion
        The rule, a classifier of the answers of the chosen models.
    classes_, n_features_in_, feature_names_in_
        As in scikit-learn.

    Raises
    ------
    InputError
        Answers that are no class; a model that left more than half of the items unanswered; fewer than ten items a
        class; a constant label; a budget below the cheapest cost; costs that are not positive or lack a model.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.integers(2, size=400)
    >>> wrong = rng.random((400, 3)) < [0.2, 0.25, 0.3]
    >>> good, fair, weak = (y[:, None] ^ wrong).T
    >>> answers = pd.DataFrame({"good": good, "its clone": good, "fair": fair, "weak": weak})
    >>> selector = MutualInformationSelector(budget=2).fit(answers, y)
    >>> selector.selected_
    ['good', 'fair']
    >>> selector.predict(answers[["good", "fair"]]).shape  # the others need not be asked any more
    (400,)
    """

    def __init__(
        self,
        budget: float = 5,
        costs: Mapping[Any, float] | Sequence[float] | None = None,
        estimator: Estimator = "variational",
        min_gain: float = 0.0,
        seed_size: Literal[1, 2] = 1,
        fusion: str = "softmax",
        abstain: bool = False,
        random_state: int | None = None,
    ) -> None:
        self.budget = budget
        self.costs = costs
        self.estimator = estimator
        self.min_gain = min_gain
        self.seed_size = seed_size
        self.fusion = fusion
        self.abstain = abstain
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Choose models from their answers X (n, M) to items with labels y (n,)."""
        frame = as_frame(X)
        self.classes_, labels = classes_of(y)
        check_sizes(len(frame), labels, len(self.classes_))
        if self.fusion not in FUSIONS:
            raise UnknownNameError("fusion", self.fusion, FUSIONS)
        if self.seed_size not in (1, 2):
            raise InputError(f"seed_size={self.seed_size!r}: give 1, or 2 to begin with the best pair")
        if self.min_gain != -math.inf:
            checked_number(self.min_gain, "min_gain")
        costs = self._costs(frame)
        answers = encode(frame, self.classes_, abstain=self.abstain)
        seed = self.random_state or 0
        empty = start(self.estimator, answers, labels, len(self.classes_), seed)

        chosen, states = self._greedy(empty, list(frame.columns), costs)
        if len(set(costs)) > 1:
            single = self._best_single(empty, costs)
            if single is not None and chosen and single[1].terms.mean() > states[-1].terms.mean():
                chosen, states = [single[0]], [single[1]]
                self.stopped_ = "the best single model tells more than all that gain most for their cost"

        fold = folds_of(labels, seed)
        nothing = prefix = Variational(answers, labels, len(self.classes_), fold)
        rows, before = [], empty.terms
        for position, (model, state) in enumerate(zip(chosen, states, strict=True)):
            prefix = state if isinstance(state, Variational) else prefix.add(model)
            gain = stats.mean_interval(state.terms - before)
            right = stats.mean_interval((prefix.probabilities.argmax(1) == labels).astype(float))
            rows.append(
                {
                    "model": frame.columns[model],
                    "gain": gain.mean,
                    "low": gain.low,
                    "high": gain.high,
                    "information": float(state.terms.mean()),
                    "cost": float(costs[chosen[: position + 1]].sum()),
                    "accuracy": right.mean,
                    "accuracy_low": max(0.0, right.low),
                    "accuracy_high": min(1.0, right.high),
                }
            )
            before = state.terms
        told = max(0.0, float(nothing.add(*range(frame.shape[1])).terms.mean()))
        self.floor_ = fano_floor(entropy(labels) - told, len(self.classes_))

        self.gains_ = pd.DataFrame(rows, columns=_COLUMNS)
        self.selected_ = [_plain(frame.columns[model]) for model in chosen]
        self.n_features_in_ = frame.shape[1]
        self._names = list(frame.columns)
        if isinstance(X, pd.DataFrame):
            self.feature_names_in_ = np.array(self._names, dtype=object)
        self.fusion_ = FUSIONS[self.fusion](abstain=self.abstain).fit(frame.iloc[:, chosen], y)
        return self

    def get_support(self, indices: bool = False) -> np.ndarray:
        """Return which models were chosen, (M,) bool, or their indices in the order of columns."""
        check_is_fitted(self)
        mask = np.array([name in self.selected_ for name in self._names])
        return np.flatnonzero(mask) if indices else mask

    def transform(self, X: Any) -> Any:
        """Return the answers of the chosen models, (n, k), in the order of choice.

        A DataFrame or dict need hold these models only; an array needs all the columns that were fitted.
        """
        check_is_fitted(self)
        if isinstance(X, pd.DataFrame | dict):
            lacking = [name for name in self.selected_ if name not in X]
            if lacking:
                raise InputError(f"there are no answers of {lacking[0]!r}: the chosen models are {self.selected_}")
            return pd.DataFrame(X, columns=self.selected_, index=None if self.selected_ else range(_length(X)))
        array = as_frame(X).to_numpy()
        if array.shape[1] != self.n_features_in_:
            raise InputError(f"answers of {array.shape[1]} models: {self.n_features_in_} were fitted, give these")
        return array[:, [self._names.index(name) for name in self.selected_]]

    def predict_proba(self, X: Any, prior: Prior | None = None) -> Floats:
        """Return the fused probability of each class, (n, C); see :meth:`transform` for X.

        ``prior`` maps every class to its share where the models are used; left out, the shares of the fitted items.
        """
        answers = self.transform(X)
        return self.fusion_.predict_proba(answers, prior)

    def predict(self, X: Any, prior: Prior | None = None) -> np.ndarray:
        """Return the fused answer to each item, (n,)."""
        answers = self.transform(X)
        return self.fusion_.predict(answers, prior)

    def _costs(self, frame: pd.DataFrame) -> Floats:
        """Return the cost of each model, (M,)."""
        if self.costs is None:
            costs = np.ones(frame.shape[1])
        elif isinstance(self.costs, Mapping):
            lacking = [name for name in frame.columns if name not in self.costs]
            if lacking:
                raise InputError(f"costs has no cost for the model {lacking[0]!r}: give one for every model")
            costs = _numbers([self.costs[name] for name in frame.columns])
        else:
            costs = _numbers(self.costs)
            if costs.shape != (frame.shape[1],):
                raise InputError(f"there are {costs.size} costs and {frame.shape[1]} models: give one a model")
        if not (np.isfinite(costs).all() and (costs > 0).all()):
            raise InputError(f"a cost is {costs.min():g}: costs are positive numbers, in the unit of the budget")
        if self.budget != math.inf and checked_number(self.budget, "budget", above=0) < costs.min():
            raise InputError(
                f"budget={self.budget:g} is below the cheapest cost, {costs.min():g}: nothing can be asked"
            )
        return costs

    def _greedy(self, empty: Information, names: Sequence[Any], costs: Floats) -> tuple[list[int], list[Information]]:
        """Return the chosen models and the state after each; sets ``stopped_``."""
        power = 1.0 if len(set(costs)) > 1 else 0.0
        chosen: list[int] = []
        states: list[Information] = []
        state, left = empty, float(self.budget)
        while True:
            open_ = [j for j in range(len(costs)) if j not in chosen]
            affordable = [j for j in open_ if costs[j] <= left + 1e-12]
            if not affordable:
                self.stopped_ = "the budget is spent" if open_ else "all models are chosen"
                return chosen, states
            allowed = [j for j in affordable if state.allowed(j)]
            if not allowed:
                self.stopped_ = (
                    f"there are too few items for estimator='{self.estimator}' to judge more than {len(chosen)} models"
                )
                return chosen, states
            if not chosen and self.seed_size == 2 and (pair := _best_pair(state, allowed, costs, left, power)):
                more = list(pair)
            else:
                gains = (state.with_each(allowed) - state.terms).mean(1) / costs[allowed] ** power
                more = [allowed[int(gains.argmax())]]
            new, after = [], state
            for model in more:
                after = after.add(model)
                new.append(after)
            gain = stats.mean_interval(after.terms - state.terms)
            if gain.low <= self.min_gain:
                best = " with ".join(str(names[j]) for j in more)
                bits = f"{gain.mean:.3f} [{gain.low:.3f}, {gain.high:.3f}]"
                self.stopped_ = f"no further model helps: the best, {best}, adds {bits} bits"
                return chosen, states
            chosen += more
            states += new
            state, left = after, left - float(costs[more].sum())

    def _best_single(self, empty: Information, costs: Floats) -> tuple[int, Information] | None:
        """Return the affordable model that tells most, and its state."""
        affordable = [j for j in range(len(costs)) if costs[j] <= self.budget and empty.allowed(j)]
        if not affordable:
            return None
        best = affordable[int(empty.with_each(affordable).mean(1).argmax())]
        return best, empty.add(best)


_COLUMNS = ["model", "gain", "low", "high", "information", "cost", "accuracy", "accuracy_low", "accuracy_high"]


def _best_pair(
    empty: Information, models: Sequence[int], costs: Floats, budget: float, power: float
) -> tuple[int, int] | None:
    """Return the affordable pair that tells most (per cost), the better of the two first, if there is one."""
    alone = empty.with_each(models).mean(1)
    best, pair = -math.inf, None
    for position, first in enumerate(models):
        state = empty.add(first)
        partners = [j for j in models[position + 1 :] if costs[first] + costs[j] <= budget and state.allowed(j)]
        if not partners:
            continue
        value = state.with_each(partners).mean(1) / (costs[first] + costs[partners]) ** power
        if value.max() > best:
            best, second = float(value.max()), partners[int(value.argmax())]
            swap = alone[models.index(second)] > alone[position]
            pair = (second, first) if swap else (first, second)
    return pair


def fano_floor(bits_left: float, classes: int) -> float:
    """Return the smallest error e with h2(e) + e log2(C - 1) >= H(Y | X): Fano's bound, free of any distribution.

    Parameters
    ----------
    bits_left
        H(Y | X), the entropy that the answers leave, in bits.
    classes
        C.

    Examples
    --------
    >>> round(fano_floor(0.5, 2), 4), fano_floor(1.0, 2), fano_floor(0.0, 4)
    (0.11, 0.5, 0.0)
    """
    classes = checked_count(classes, "classes", least=2)
    bits_left = checked_number(bits_left, "bits_left")
    most = 1 - 1 / classes

    def bits(error: float) -> float:
        sides = sum(-p * math.log2(p) for p in (error, 1 - error) if p > 0)
        return sides + error * math.log2(classes - 1)

    if bits_left <= 0:
        return 0.0
    if bits_left >= bits(most):
        return most
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if bits(middle) >= bits_left else (middle, high)
    return high


def _numbers(costs: Any) -> Floats:
    found = np.asarray(costs)
    if found.dtype.kind not in "iuf":
        raise InputError(f"costs={costs!r}: give positive numbers, one a model")
    return found.astype(float)


def _plain(name: Any) -> Any:
    return name.item() if isinstance(name, np.generic) else name


def _length(X: Any) -> int:
    return len(X) if isinstance(X, pd.DataFrame) else len(next(iter(X.values()), ()))
