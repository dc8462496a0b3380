"""With a few labels: which encoders to evaluate next, and which to choose from what was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.encoder_ranking.probe import RidgeProbe
from fairtrial.evaluation.encoder_ranking.ranking import Ranking, Source
from fairtrial.evaluation.encoder_ranking.subspace import Features
from fairtrial.options import checked_count
from fairtrial.seeds import generator
from fairtrial.stats import mean_interval

Array = np.ndarray
ONE_ERROR = 0.6827  # level of an interval of one standard error either way
WIDER = 4  # a bandit begins with this many encoders for each that it could evaluate in full


class FewLabelSelector:
    """Spends a budget of labelled evaluations on the encoders of a ranking and chooses one.

    ``strategy="prior"`` evaluates the ``budget`` best of the ranking in its order; where there are more families than
    that, the best of each family first. ``strategy="bandit"`` begins with four times as many on small nested subsets of
    the labelled items, drops the worse half and goes on with twice the items (successive halving, Karnin et al. 2013):
    the same number of labelled evaluations in all.

    Of those evaluated on the same items the choice is not simply the best: among encoders whose paired difference to it
    lies within one standard error, the one that ranked higher without labels.

    Parameters
    ----------
    ranking : of :func:`~fairtrial.evaluation.encoder_ranking.ranking.rank_encoders`
    probe : from features (n, d) and labels (n,) to whether each item is classified correctly (n,), out of sample
    budget : full evaluations
    strategy : ``"prior"`` or ``"bandit"``
    seed : of the order in which labelled items enter nested subsets

    Examples
    --------
    Ask and tell, with evaluations made elsewhere:

    >>> ranking = Ranking(("a", "b", "c"), dict(a=3.0, b=2.0, c=1.0), {}, {}, 3)
    >>> selector = FewLabelSelector(ranking, budget=2)
    >>> while (name := selector.next()) is not None:
    ...     selector.tell(name, np.arange(100) % 10 < {"a": 7, "b": 9}[name])
    >>> selector.best_, round(selector.regret_bound_, 2)
    ('b', 0.0)
    """

    def __init__(
        self,
        ranking: Ranking,
        probe: Callable[[Any, Any], ArrayLike] | None = None,
        budget: int = 5,
        strategy: Literal["prior", "bandit"] = "prior",
        seed: int = 0,
    ) -> None:
        if strategy not in ("prior", "bandit"):
            raise UnknownNameError("strategy", strategy, ["prior", "bandit"])
        self.ranking = ranking
        self.probe = probe or RidgeProbe()
        self.budget = checked_count(budget, "budget")
        self.strategy = strategy
        self.seed = seed
        order = evaluation_order(ranking, budget)
        count = len(order)
        self._rounds = 1
        if strategy == "bandit" and count > budget:
            count = min(count, WIDER * budget)
            self._rounds = max(1, math.ceil(math.log2(count)))
        else:
            count = min(count, budget)
        self._alive = order[:count]
        self._queue = list(self._alive)
        self._round: dict[str, Array] = {}
        self.observed: dict[str, Array] = {}
        """What was told of each encoder last, (n,) of 0 and 1."""

    @property
    def share(self) -> float:
        """The share of the labelled items, from the first, on which the next encoder is to be evaluated."""
        return min(1.0, self.budget / (self._rounds * len(self._alive))) if self._rounds > 1 else 1.0

    def next(self) -> str | None:
        """Return the encoder to evaluate next, or None where the budget is spent."""
        return self._queue[0] if self._queue else None

    def tell(self, name: str, per_sample_correct: ArrayLike) -> None:
        """Take in whether each labelled item was classified correctly with the encoder that :meth:`next` named.

        Raises
        ------
        InputError
            Another encoder than the one asked for, values outside [0, 1], or not as many as for those before it.
        """
        correct = np.asarray(per_sample_correct, dtype=float)
        if name != self.next():
            raise InputError(f"told of {name!r} while {self.next()!r} was to be evaluated")
        if correct.ndim != 1 or not len(correct) or not ((correct >= 0) & (correct <= 1)).all():
            raise InputError(f"{name}: give a vector of 0 and 1, whether each item was classified correctly")
        if wrong := [other for other, seen in self._round.items() if len(seen) != len(correct)]:
            raise InputError(f"{name}: {len(correct)} items, and {len(self._round[wrong[0]])} of {wrong[0]}: pair them")
        self._round[name] = self.observed[name] = correct
        self._queue.pop(0)
        if not self._queue and len(self._alive) > 2 and self._rounds > 1:
            by_accuracy = sorted(self._alive, key=lambda one: -self._round[one].mean())  # stable: ties by the prior
            survivors = set(by_accuracy[: math.ceil(len(by_accuracy) / 2)])
            self._alive = [one for one in self._alive if one in survivors]
            self._queue, self._round = list(self._alive), {}

    def fit(self, features: Mapping[str, Source], labels: ArrayLike) -> FewLabelSelector:
        """Evaluate with the probe until the budget is spent.

        Parameters
        ----------
        features : of the encoders in the ranking, for the labelled items (n, d), or callables that return them
        labels : (n,) of any type

        Raises
        ------
        InputError
            An encoder's features that are not there or of other items; fewer labels than two a class.
        """
        y = np.asarray(labels)
        classes = len(np.unique(y))
        if classes < 2 or len(y) < 2 * classes:
            raise InputError(f"{len(y)} labels of {classes} classes: give two classes or more, two labels each")
        nested = generator(self.seed, "nested").permutation(len(y))
        while (name := self.next()) is not None:
            if name not in features:
                raise UnknownNameError("encoder", name, features)
            source = features[name]
            values = Features(source() if callable(source) else source, name)
            if values.items != len(y):
                raise InputError(f"{name} has {values.items} items and there are {len(y)} labels: give one a label")
            least = min(len(y), 4 * classes)  # a probe of fewer items says nothing
            rows = np.sort(nested[: max(least, math.ceil(self.share * len(y)))])
            self.tell(name, self.probe(values.centred[rows], y[rows]))
        return self

    @property
    def best_(self) -> str:
        """The encoder chosen from what was told."""
        ranked = self._last_round()
        best = max(ranked, key=lambda one: ranked[one].mean())
        return next(name for name in ranked if _within_noise(ranked[best] - ranked[name]))

    @property
    def regret_bound_(self) -> float:
        """Upper bound, 95 % for all together, on what another of the encoders evaluated with it gains over the choice.

        In accuracy. Nothing is said of encoders that were not evaluated.
        """
        ranked, best = self._last_round(), self.best_
        others = [seen - ranked[best] for name, seen in ranked.items() if name != best]
        level = 1 - 2 * 0.05 / max(1, len(others))
        bounds = [mean_interval(gain, level=level).high if np.ptp(gain) else gain[0] for gain in others]
        return max([0.0, *map(float, bounds)])

    def _last_round(self) -> dict[str, Array]:
        """Return what was told of the encoders still in the race, in the order of the ranking."""
        if not self._round:
            raise InputError("nothing was told yet: evaluate what next() names")
        return {name: self._round[name] for name in self.ranking.order if name in self._round}


def evaluation_order(ranking: Ranking, budget: int) -> list[str]:
    """Return the encoders in the order of evaluation: by rank, or the best of each family first if these exceed it.

    >>> ranking = Ranking(("a", "b", "c"), {}, {}, {}, 3, families={"a": "x", "b": "x", "c": "y"})
    >>> evaluation_order(ranking, 1), evaluation_order(ranking, 2)
    (['a', 'c', 'b'], ['a', 'b', 'c'])
    """
    first: dict[str, str] = {}
    for name in ranking.order:
        first.setdefault(ranking.families.get(name, name), name)
    if not ranking.families or budget >= len(first):
        return list(ranking.order)
    return [*first.values(), *(name for name in ranking.order if name not in first.values())]


def _within_noise(lead: Array) -> bool:
    """Whether a paired lead (n,) is within one standard error of nothing."""
    if not np.ptp(lead):
        return bool(lead[0] <= 0)
    return mean_interval(lead, level=ONE_ERROR).low <= 0
