"""scikit-learn's ``cross_validate`` that says how far its mean can be trusted, and stops when it is sharp enough."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel, delayed, effective_n_jobs
from numpy.typing import NDArray
from sklearn import get_config
from sklearn.base import is_classifier
from sklearn.metrics import get_scorer, get_scorer_names
from sklearn.model_selection import RepeatedKFold, check_cv
from sklearn.model_selection import cross_validate as sklearn_cross_validate
from sklearn.utils import indexable

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.sample_gain.per_sample import PerSampleScorer
from fairtrial.stats import SplitScores, StopWhenFlat, interval, sample_gain

Array = NDArray[Any]
Split = tuple[Array, Array]
REPEATED = RepeatedKFold(n_splits=5, n_repeats=20, random_state=0)
NO_ROWS = "the scorer has no per-sample values: Nadeau and Bengio's variance of the fold scores"


def cross_validate(
    estimator: Any,
    X: Any,
    y: Any,
    *,
    cv: Any = REPEATED,
    scoring: str | Any = "accuracy",
    stop: Any = None,
    groups: Any = None,
    n_jobs: int | None = None,
    params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Cross-validate an estimator: scikit-learn's result, its interval, its sample gain, and a time to stop.

    The estimand is the expected score of the *algorithm* trained on as many fresh samples as one split's training set,
    not that of one fitted model. See :mod:`fairtrial.stats` for the variance: it follows from the index sets, so that
    splits which share samples are not counted as independent.

    Parameters
    ----------
    estimator : a scikit-learn estimator; it is cloned for every split
    X, y : (n, ...) samples and (n,) targets
    cv : a number of folds, a splitter, or an iterable of (train, test) index arrays
    scoring : a scorer's name of scikit-learn, or a callable scorer; higher is better
    stop : :class:`StopWhenFlat`, or any object with ``update(train, test, scores) -> bool``; None runs all splits.
        It is copied, so that it may be used again; the splits of ``cv`` are its plan
    groups : (n,) labels; the group is then the unit that is sampled, and may not be on both sides of a split
    n_jobs : as in scikit-learn; what comes out does not depend on it
    params : what ``fit`` (with metadata routing: splitter, ``fit`` and scorer) is given, such as ``sample_weight``

    Returns
    -------
    dict
        scikit-learn's ``fit_time``, ``score_time`` and ``test_score``, (K,) each, of the splits that were run;
        ``test_indices`` and ``per_sample``, K arrays each, whose means are the test scores (``per_sample`` is None
        where the scorer has no per-sample values); ``interval`` (:class:`fairtrial.stats.Interval`) and
        ``sample_gain`` (:class:`fairtrial.stats.SampleGain`; None for a single split)

    Warns
    -----
    UserWarning
        The estimator has a ``random_state``: one seed for all splits, and the interval is for that seed.

    Raises
    ------
    InputError
        A split that trains on a test sample, a group on both sides, a score that is not finite, a single split of
        scores other than 0 and 1. Before any fit where that can be seen.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> out = cross_validate(GaussianNB(), X, y, stop=StopWhenFlat(min_gain=0.05))
    >>> print(len(out["test_score"]), "splits of 100;", out["interval"])
    10 splits of 100; 0.9403 [0.9205, 0.96] (95%, 10 cells; kappa = 1 assumed, measured .4-2.2)
    """
    check_scoring(scoring)
    check_stop(stop)
    X, y = indexable(X, y)
    plan = planned(estimator, X, y, cv, groups, params)
    rule = None if stop is None else rule_of([stop], plan, lambda rows: rows)
    (run,) = run_splits([estimator], X, y, plan, scoring, rule, n_jobs)
    scores = run.table(plan, estimator, rows=run.has_rows)
    one = interval(scores)
    return {
        "fit_time": np.array(run.fit_time),
        "score_time": np.array(run.score_time),
        "test_score": np.array(run.test_score),
        "test_indices": [test for _, test in run.splits],
        "per_sample": run.rows if run.has_rows else None,
        "interval": one if run.has_rows else replace(one, notes=(*one.notes, NO_ROWS)),
        "sample_gain": sample_gain(scores) if scores.n_splits > 1 else None,
    }


def check_scoring(scoring: Any) -> None:
    """Refuse what is not the name of one scorer, nor one callable scorer."""
    if isinstance(scoring, str):
        try:
            get_scorer(scoring)
        except (ValueError, KeyError):
            raise UnknownNameError("scoring", scoring, get_scorer_names()) from None
    elif not callable(scoring):
        raise InputError(f"scoring={scoring!r}: give one scorer's name or one callable; call again for another metric")


def check_stop(stop: Any) -> None:
    """Refuse what is no rule of when to stop."""
    if stop is not None and (isinstance(stop, type) or not callable(getattr(stop, "update", None))):
        raise InputError(
            f"stop={stop!r}: give StopWhenFlat(), or an object with update(train, test, scores) -> bool; None runs all"
        )


# ---------------------------------------------------------------------------------------------------- what is to be run


@dataclass(frozen=True)
class Plan:
    """Splits of n samples, all of them checked, with what is passed on to ``fit``.

    ``unit`` (n,) is the code of each sample's group, where groups are given.
    """

    splits: list[Split]
    n: int
    unit: Array | None
    params: Mapping[str, Any] | None


def planned(estimator: Any, X: Any, y: Any, cv: Any, groups: Any, params: Mapping[str, Any] | None) -> Plan:
    """Return the splits of ``cv``; refuse a training set that holds a test sample, or one of its group."""
    if get_config()["enable_metadata_routing"] and params and "groups" in params:
        groups, params = params["groups"], {name: value for name, value in params.items() if name != "groups"}
    if y is None:
        raise InputError("y is None: give (n,) targets")
    if groups is not None and np.ndim(groups) != 1:
        raise InputError(f"groups have the shape {np.shape(groups)}: give one label a sample, (n,)")
    if groups is not None and (missing := pd.isna(np.asarray(groups, dtype=object)).ravel()).any():
        raise InputError(f"groups has none for sample {int(missing.argmax())}: give every sample one")
    n = len(y)
    splitter = check_cv(cv, y, classifier=is_classifier(estimator))
    splits = [
        (_indices(train, n, f"training set of split {k}"), _indices(test, n, f"test set of split {k}"))
        for k, (train, test) in enumerate(splitter.split(X, y, groups))
    ]
    if not splits:
        raise InputError("cv gives no split: give a number of folds, a splitter, or (train, test) pairs")
    unit = None if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if unit is not None and len(unit) != n:
        raise InputError(f"groups has {len(unit)} labels for {n} samples: give one a sample")
    for k, (train, test) in enumerate(splits):
        if len(train) == 0 or len(test) == 0:
            raise InputError(f"split {k} trains on {len(train)} samples and tests {len(test)}: it needs some of both")
        for name, of in (("sample", np.arange(n)), ("group", unit)):
            if of is None:
                continue
            trained = np.zeros(n, dtype=bool)
            trained[of[train]] = True
            if trained[of[test]].any():
                both = test[np.argmax(trained[of[test]])]
                label = both if name == "sample" else np.asarray(groups)[both]
                how = "leave it out of one" if name == "sample" else "use a splitter such as GroupKFold"
                raise InputError(f"{name} {label} is in both the training and the test set of split {k}: {how}")
    return Plan(splits, n, unit, params)


def _indices(given: Any, n: int, name: str) -> Array:
    """Return the indices of samples; a mask of all of them is taken for the samples it marks."""
    found = np.asarray(given)
    if found.dtype == bool and found.shape == (n,):
        return np.flatnonzero(found)
    if found.size and (found.ndim != 1 or not np.issubdtype(found.dtype, np.integer)):
        raise InputError(f"the {name} is an array {found.shape} of {found.dtype}: give indices, or a mask of all {n}")
    if found.size and (found.min() < 0 or found.max() >= n):
        raise InputError(
            f"the {name} has sample {found.min() if found.min() < 0 else found.max()}: there are 0..{n - 1}"
        )
    return found


Rule = Callable[[Split, Sequence[Array]], bool]  # a finished split and each estimator's values on it -> stop?


def rule_of(stops: Sequence[Any], plan: Plan, values: Callable[..., Array | Sequence[Array]]) -> Rule:
    """Return a rule that stops when all ``stops`` say so, each of one of ``values(*rows of the estimators)``."""
    splits = plan.splits if plan.unit is None else [(_units(plan, a), _units(plan, b)) for a, b in plan.splits]
    fresh = [
        StopWhenFlat(s.min_gain, s.ahead, s.min_splits, s.max_splits, plan=splits, kappa=s.kappa)
        if isinstance(s, StopWhenFlat)
        else copy.deepcopy(s)
        for s in stops
    ]

    def stop(split: Split, rows: Sequence[Array]) -> bool:
        train, test = split
        series = np.atleast_2d(values(*rows))  # (stops, m)
        if plan.unit is not None:
            tested, place = np.unique(plan.unit[test], return_inverse=True)
            series = np.array([np.bincount(place, row) / np.bincount(place) for row in series])
            train, test = _units(plan, train), tested
        said = [rule.update(train, test, row) for rule, row in zip(fresh, series, strict=True)]  # each sees every split
        return all(said)

    return stop


def _units(plan: Plan, samples: Array) -> Array:
    assert plan.unit is not None
    return np.unique(plan.unit[samples])


# ---------------------------------------------------------------------------------------------------------- running it


@dataclass
class SplitRun:
    """The splits of one estimator that were run, in order; ``rows`` are per-sample values, or None."""

    splits: list[Split] = field(default_factory=list)
    fit_time: list[float] = field(default_factory=list)
    score_time: list[float] = field(default_factory=list)
    test_score: list[float] = field(default_factory=list)
    rows: list[Array | None] = field(default_factory=list)

    def extend(self, other: SplitRun) -> None:
        """Append the splits of another run of the same estimator."""
        for column in fields(self):
            getattr(self, column.name).extend(getattr(other, column.name))

    @property
    def has_rows(self) -> bool:
        """Whether every split has per-sample values."""
        return all(row is not None for row in self.rows)

    def table(self, plan: Plan, estimator: Any, *, rows: bool) -> SplitScores:
        """Return the scores as a table, by sample (or group) or only by fold.

        An estimator with a seed of its own has that seed in all splits, which is warned about.
        """
        train, test = zip(*self.splits, strict=True)
        if not rows:
            return SplitScores.from_folds(self.test_score, [len(x) for x in test], [len(x) for x in train])
        values = [row for row in self.rows if row is not None]
        given = [value for name, value in estimator.get_params().items() if name.endswith("random_state")]
        seeded = any(value is not None for value in given)
        scores = SplitScores.from_arrays(test, values, train, plan.n, seeds=["fixed"] * len(test) if seeded else None)
        return scores if plan.unit is None else scores.by_group(plan.unit)


class LazySplits:
    """A splitter that asks the rule, after each split that was fitted and scored, whether to give another."""

    def __init__(self, splits: Sequence[Split], rows: list[Array | None], rule: Rule | None) -> None:
        self.splits, self.rows, self.rule, self.given = splits, rows, rule, 0

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        """Return how many splits there may be."""
        return len(self.splits)

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[Split]:
        """Yield the splits until the rule says stop."""
        for split in self.splits:
            self.given += 1
            yield split
            if self.rule is not None and self.rule(split, _complete(self.rows[-1:])):
                return


def run_splits(
    estimators: Sequence[Any], X: Any, y: Any, plan: Plan, scoring: Any, rule: Rule | None, n_jobs: int | None
) -> list[SplitRun]:
    """Fit and score every estimator on the same splits, in order, until the rule says stop.

    On one worker all splits of an estimator are one call of scikit-learn's. Several work on a few splits at a time, and
    what they did beyond the split at which the rule stops is dropped: the result does not depend on their number.
    """
    workers = effective_n_jobs(n_jobs)
    if workers == 1 and (rule is None or len(estimators) == 1):
        return [_run(estimator, X, y, plan.splits, scoring, plan.params, rule) for estimator in estimators]
    runs = [SplitRun() for _ in estimators]
    wave = len(plan.splits) if rule is None else workers
    with Parallel(n_jobs=n_jobs) as parallel:
        for first in range(0, len(plan.splits), wave):
            splits = plan.splits[first : first + wave]
            done = parallel(
                delayed(_run)(estimator, X, y, [split], scoring, plan.params)
                for split in splits
                for estimator in estimators
            )
            for at, split in enumerate(splits):
                of_split = done[at * len(runs) : (at + 1) * len(runs)]
                for run, one in zip(runs, of_split, strict=True):
                    run.extend(one)
                if rule is not None and rule(split, _complete([one.rows[0] for one in of_split])):
                    return runs
    return runs


def _run(
    estimator: Any,
    X: Any,
    y: Any,
    splits: Sequence[Split],
    scoring: Any,
    params: Mapping[str, Any] | None,
    rule: Rule | None = None,
) -> SplitRun:
    scorer = PerSampleScorer(scoring)
    lazy = LazySplits(splits, scorer.rows, rule)
    out = sklearn_cross_validate(
        estimator, X, y, cv=lazy, scoring=scorer, params=params, n_jobs=1, error_score="raise"
    )  # with one job a split is fitted and scored before the next is asked for
    return SplitRun(
        list(splits[: lazy.given]),
        out["fit_time"].tolist(),
        out["score_time"].tolist(),
        out["test_score"].tolist(),
        scorer.rows,
    )


def _complete(rows: Sequence[Array | None]) -> list[Array]:
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        raise InputError("stop= looks at per-sample scores, which this scorer has not: leave stop= out")
    return known
