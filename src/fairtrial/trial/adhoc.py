"""``fairtrial.compare``: the engine for the user's own candidates, without a card."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from pydantic import BaseModel

from fairtrial.errors import InputError, MissingExtraError, UnknownNameError
from fairtrial.trial.declare import Candidate, Cell, Claim, Factor, Items, Metric, Part, Trial, Variance, difference
from fairtrial.trial.engine import Until
from fairtrial.trial.result import Result
from fairtrial.trial.runner import run_declared


class NoParams(BaseModel):
    """A comparison of the user's own has no parameters."""


def compare(
    candidates: Mapping[str, Any],
    X: Any = None,
    y: Any = None,
    *,
    baseline: str,
    metric: Metric | None = None,
    cells: Iterable[Any] | None = None,
    scoring: str | Callable | None = None,
    cv: Any = 5,
    groups: Any = None,
    controls: Sequence[str] = (),
    margin: float = 0.0,
    variance: Variance | None = None,
    out: str | os.PathLike[str] = "runs/compare",
    jobs: int | None = None,
    threads: int | None = None,
    engine: str = "local",
    time_limit: float | None = None,
    until: Until | None = None,
    retry: bool = False,
    level: float = 0.95,
    version: str | None = None,
    progress: bool = False,
) -> Result:
    """Compare candidates with a baseline, pairwise on identical cells, and return the verdicts.

    Two forms. Plain callables: ``compare({"mine": f, "base": g}, cells=range(20), baseline="base", metric=...)`` calls
    each with each cell; it returns the metric's value, or a mapping that holds it. Scikit-learn estimators:
    ``compare({"rf": rf, "lr": lr}, X, y, baseline="lr", scoring="accuracy", cv=5)`` fits a clone on each split's
    training set and scores its test set.

    Parameters
    ----------
    candidates : label to callable or estimator.
    X, y : (n, ...) samples and (n,) targets, for estimators.
    baseline : the label that all others are compared with.
    metric : what callables return; for estimators it follows from ``scoring``.
    cells : seeds or other JSON values, one a replicate. No two may share data, items or seeds, unless ``variance``
        says otherwise.
    scoring : a scorer's name of scikit-learn or a callable scorer; None for the estimator's own.
    cv : a number of folds, a splitter, or an iterable of (train, test) index pairs.
    groups : (n,) group of each sample, for splitters that keep groups whole.
    controls : labels whose role is control: they must lose.
    margin : what a difference must exceed for the claim to hold.
    variance : how cells relate; ``independent`` for callables, by the splits for estimators.
    out : the output folder: finished cells in it are not computed again.
    version : names the code of callables whose source cannot be seen; change it to compute again.
    jobs, threads, engine, time_limit, until, retry, level, progress : as in :func:`fairtrial.run`.

    Returns
    -------
    Result
        One verdict a candidate, in order, the baseline left out; ``.to_frame()`` and ``.report(path)``.

    Examples
    --------
    >>> import fairtrial, tempfile
    >>> result = fairtrial.compare(
    ...     {"mine": lambda seed: 0.9 + 0.001 * (seed % 3), "base": lambda seed: 0.8},
    ...     cells=range(6),
    ...     baseline="base",
    ...     metric=fairtrial.Metric("accuracy", higher_is_better=True),
    ...     out=tempfile.mkdtemp(),
    ...     jobs=1,
    ... )
    >>> result.verdicts[0].state
    'HOLDS'
    """
    _check_labels(candidates, baseline, controls)
    if metric is not None and not isinstance(metric, Metric):
        raise InputError(f"metric={metric!r}: give fairtrial.Metric({str(metric)!r}, higher_is_better=...)")
    if variance is not None and variance not in get_args(Variance):
        raise UnknownNameError("variance", variance, get_args(Variance))
    if X is not None:
        measures, values, metric, own = _estimators(candidates, X, y, scoring, cv, groups)
        variance = variance or own
    else:
        if cells is None or metric is None:
            raise InputError("compare needs cells= and metric= for callables, or X and y for estimators")
        measures, values = dict(candidates), _checked_cells(cells)
        for label, function in measures.items():
            if not callable(function):
                raise InputError(f"candidate {label!r} is not callable: give a function of a cell")
    role = {**dict.fromkeys(controls, "control"), baseline: "baseline"}
    if until == "decided" and variance is None:
        raise InputError("until='decided' needs an explicit variance=: say what two cells share")
    part = Part(
        name="comparison",
        candidates=tuple(
            Candidate(label, role.get(label, "method"), uses=(function,))  # type: ignore[arg-type]
            for label, function in measures.items()
        ),
        metrics=(metric,),
        factors=(Factor("cell", values, kind="replicate"),),
        variance=variance or "independent",
        claims=tuple(
            Claim(
                label,
                f"{label} is better than {baseline} in {metric.name}" + (f" by more than {margin:g}" if margin else ""),
                difference(label, baseline, metric.name),
                above=margin,
            )
            for label in measures
            if label != baseline
        ),
        measure=functools.partial(_measure, metric.name),
        group=("cell",),
    )
    return run_declared(
        Trial("compare", NoParams, functools.partial(_constant, (part,))), NoParams(), "compare",
        out=Path(out), jobs=jobs, threads=threads, engine=engine, time_limit=time_limit, until=until, retry=retry,
        level=level, version=version, progress=progress, command="fairtrial.compare(...)",
    )  # fmt: skip


def _check_labels(candidates: Mapping[str, Any], baseline: str, controls: Sequence[str]) -> None:
    if not isinstance(candidates, Mapping):
        raise InputError("candidates: give a mapping of labels to callables or estimators")
    if len(candidates) < 2:
        raise InputError("compare needs two candidates at least: the baseline and one other")
    for label in candidates:
        if not isinstance(label, str) or not label.strip():
            raise InputError(f"candidate {label!r}: a label is a text that is not empty")
    for label in (baseline, *controls):
        if label not in candidates:
            raise UnknownNameError("candidate", label, candidates)


def _checked_cells(cells: Iterable[Any]) -> list[Any]:
    """Return the cells as a list: two or more JSON values, no two alike."""
    if not isinstance(cells, Iterable) or isinstance(cells, str | Mapping):
        raise InputError(f"cells={cells!r}: give several, such as range(20)")
    values = list(cells)
    try:
        texts = [json.dumps(value) for value in values]
    except TypeError as error:
        raise InputError(f"cells: each must be a JSON value, such as a seed or a name ({error})") from None
    if len(values) < 2:
        raise InputError(f"cells has {len(values)}: give at least two")
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise InputError(f"cells: {twice} comes twice, and a cell is measured once")
    return values


def _constant(parts: tuple[Part, ...], _params: Any) -> tuple[Part, ...]:
    return parts


def _measure(metric: str, candidate: Candidate, cell: Cell, _params: Any, _stages: Any) -> dict[str, Any]:
    function = candidate.uses[0]
    assert callable(function)
    value = function(cell["cell"])
    if isinstance(value, Mapping):
        if metric not in value:
            raise InputError(f"candidate {candidate.label!r} returned {sorted(value)}, without {metric!r}")
        value = value[metric]
    return {metric: value}


# ---------------------------------------------------------------------------------------------------------- estimators


@dataclass(frozen=True)
class _Folds:
    """Fits a clone of an estimator on one split and scores it."""

    estimator: Any
    X: Any
    y: Any
    splits: list[tuple[np.ndarray, np.ndarray]]
    scoring: Any

    def __call__(self, split: int) -> Items:
        from sklearn.base import clone
        from sklearn.metrics import check_scoring
        from sklearn.utils import _safe_indexing as take

        train, test = self.splits[split]
        fitted = clone(self.estimator)
        fitted.fit(take(self.X, train), *([] if self.y is None else [take(self.y, train)]))
        held, truth = take(self.X, test), None if self.y is None else np.asarray(take(self.y, test))
        scores = _per_sample(fitted, held, truth, self.scoring)
        if scores is None:
            value = float(check_scoring(fitted, scoring=self.scoring)(fitted, held, truth))
            scores = np.full(len(test), value)
        return Items(test, scores, train)


def _per_sample(fitted: Any, X: Any, y: np.ndarray | None, scoring: Any) -> np.ndarray | None:
    """Return the score of each sample where the metric is a mean of such, or their influence values, else None."""
    from fairtrial.stats import auc_influence

    if scoring is None or not isinstance(scoring, str) or y is None:
        return None
    if scoring == "accuracy":
        return (fitted.predict(X) == y).astype(float)
    if scoring in ("neg_mean_squared_error", "neg_mean_absolute_error"):
        error = np.abs(np.asarray(fitted.predict(X), dtype=float) - y)
        return -(error**2 if "squared" in scoring else error)
    if scoring == "neg_log_loss":
        probability = fitted.predict_proba(X)[np.arange(len(y)), np.searchsorted(fitted.classes_, y)]
        return np.log(np.clip(probability, np.finfo(float).eps, 1.0))
    if scoring == "roc_auc" and len(fitted.classes_) == 2:
        score = fitted.decision_function(X) if hasattr(fitted, "decision_function") else fitted.predict_proba(X)[:, 1]
        return auc_influence(y == fitted.classes_[1], score)
    return None


def _estimators(
    candidates: Mapping[str, Any], X: Any, y: Any, scoring: Any, cv: Any, groups: Any
) -> tuple[dict[str, Any], list[int], Metric, Variance]:
    """Return the callables of estimators on the splits of ``cv``, the splits' numbers, the metric, the variance."""
    try:
        from sklearn.base import is_classifier
        from sklearn.metrics import get_scorer
        from sklearn.model_selection import check_cv
    except ImportError:
        raise MissingExtraError("evaluation", "scikit-learn") from None
    for label, estimator in candidates.items():
        if not hasattr(estimator, "fit") or isinstance(estimator, type):
            raise InputError(f"candidate {label!r} is not an estimator: give an instance with fit and predict")
    first = next(iter(candidates.values()))
    scoring = scoring or ("accuracy" if is_classifier(first) else "r2")
    if isinstance(scoring, str):
        try:
            get_scorer(scoring)
        except (ValueError, KeyError):
            from sklearn.metrics import get_scorer_names

            raise UnknownNameError("scoring", scoring, get_scorer_names()) from None
    splitter = check_cv(cv, y, classifier=is_classifier(first))
    splits = [(np.asarray(train), np.asarray(test)) for train, test in splitter.split(X, y, groups)]
    name = scoring if isinstance(scoring, str) else getattr(scoring, "__name__", "score")
    additive = scoring in ("accuracy", "neg_mean_squared_error", "neg_mean_absolute_error", "neg_log_loss", "roc_auc")
    measures = {label: _Folds(estimator, X, y, splits, scoring) for label, estimator in candidates.items()}
    metric = Metric(name, higher_is_better=True)
    return measures, list(range(len(splits))), metric, "design" if additive else "nadeau_bengio"
