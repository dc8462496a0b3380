"""Several candidates against a baseline on identical splits: one verdict each, corrected for their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.options import checked_number
from fairtrial.stats import Interval, SampleGain, SplitScores, Verdict, compare, holm, interval, sample_gain
from fairtrial.stats.moments import VarianceMode

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Comparison:
    """What a comparison with a baseline came to; prints one line a candidate.

    Attributes
    ----------
    baseline : the label that all others were compared with
    verdicts : label -> :class:`fairtrial.stats.Verdict`, the baseline left out. Its state comes from Holm's test over
        all of them, and its ``low`` and ``high`` are at the level of its Holm rank, ``level``: the two never disagree
    scores : label -> :class:`fairtrial.stats.Interval` of each candidate's own score, at the plain level
    gains : label -> :class:`fairtrial.stats.SampleGain` of each candidate's own score; None for a single split
    level : the level of all verdicts together
    plain : label -> (low, high) of the difference at the plain level, not corrected for the number of candidates
    """

    baseline: str
    verdicts: dict[str, Verdict]
    scores: dict[str, Interval]
    gains: dict[str, SampleGain | None]
    level: float
    plain: dict[str, tuple[float, float]]

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each candidate: its score, and its difference to the baseline (missing for that itself).

        ``low`` and ``high`` are at ``level``; ``low95`` and ``high95`` at 95% (at the level asked for) and uncorrected.
        """
        import pandas as pd

        rows = []
        for label, one in self.scores.items():
            row = {"candidate": label, "score": one.mean, "score_low": one.low, "score_high": one.high}
            gain = self.gains[label]
            row["score_gain"] = np.nan if gain is None else gain.value
            if label != self.baseline:
                verdict = self.verdicts[label]
                row |= {name: getattr(verdict, name) for name in VERDICT_COLUMNS}
                row["low95"], row["high95"] = self.plain[label]
            rows.append(row)
        return pd.DataFrame(rows).set_index("candidate")

    def __str__(self) -> str:
        width = max(len(str(label)) for label in self.scores)
        lines = [f"{label!s:<{width}}  {one}" for label, one in self.scores.items()]
        lines += [f"{label!s:<{width}}  against {self.baseline}: {verdict}" for label, verdict in self.verdicts.items()]
        return "\n".join(lines)


VERDICT_COLUMNS = (
    "state", "difference", "low", "high", "level", "cells", "p_value", "sample_gain", "paired_gain",
    "rope_probability", "cost_ratio", "note",
)  # fmt: skip


def compare_scores(
    candidates: Mapping[str, SplitScores],
    *,
    baseline: str,
    higher_is_better: bool = True,
    margin: float = 0.0,
    rope: float | None = None,
    level: float = 0.95,
    variance: VarianceMode | None = None,
) -> Comparison:
    """Compare tables of scores that were computed elsewhere; all must have the same splits.

    Parameters
    ----------
    candidates : label -> table, two or more
    baseline : the label that all others are compared with
    higher_is_better : False for errors and losses
    margin : what a difference must exceed
    rope : half width of the region of practical equivalence
    level : confidence level of all verdicts together
    variance : how two splits relate; left out, by what the tables know (:func:`fairtrial.stats.interval`)

    Raises
    ------
    InputError, UnknownNameError
        Fewer than two candidates, no such baseline, or splits that differ (the first that does is named).

    Examples
    --------
    >>> folds = {"mine": [0.91, 0.90, 0.93, 0.92, 0.94], "base": [0.89, 0.87, 0.92, 0.89, 0.90]}
    >>> tables = {label: SplitScores.from_folds(means, n_test=20, n_train=80) for label, means in folds.items()}
    >>> print(compare_scores(tables, baseline="base").verdicts["mine"])
    HOLDS: +0.026 [+0.004764, +0.04724] (95%, 5 cells)
    """
    check_candidates(candidates, baseline)
    for label, table in candidates.items():
        if not isinstance(table, SplitScores):
            raise InputError(f"{label}: give a SplitScores, such as SplitScores.from_folds(means, n_test=, n_train=)")
    check_margins(margin, rope)
    others = [label for label in candidates if label != baseline]

    def verdict(label: str, at: float) -> Verdict:
        return compare(
            candidates[label], candidates[baseline],
            margin=margin, higher_is_better=higher_is_better, level=at, variance=variance, rope=rope,
        )  # fmt: skip

    plain = {label: verdict(label, level) for label in others}
    # Two cells decide nothing, whatever their p-value.
    _, levels = holm([1.0 if v.cells < 3 or v.p_value is None else v.p_value for v in plain.values()], level)
    return Comparison(
        baseline=baseline,
        verdicts={label: verdict(label, float(at)) for label, at in zip(others, levels, strict=True)},
        scores={label: interval(table, level=level, variance=variance) for label, table in candidates.items()},
        gains={label: gain_of(table, variance) for label, table in candidates.items()},
        level=level,
        plain={label: (v.low, v.high) for label, v in plain.items()},
    )


def gain_of(table: SplitScores, variance: VarianceMode | None) -> SampleGain | None:
    """Return the sample gain of a table, None for a single split."""
    return sample_gain(table, variance=variance) if table.n_splits > 1 else None


def check_candidates(candidates: Mapping[str, Any], baseline: str) -> None:
    """Refuse fewer than two candidates, and a baseline that is none of them."""
    if not isinstance(candidates, Mapping) or len(candidates) < 2:
        raise InputError("a comparison needs a mapping of labels to two candidates or more, the baseline among them")
    if all(isinstance(label, str) for label in (baseline, *candidates)):
        if baseline not in candidates:
            raise UnknownNameError("candidate", baseline, candidates)
    elif baseline not in list(candidates):
        raise InputError(f"baseline={baseline!r} is none of {', '.join(map(repr, candidates))}")


def check_margins(margin: float, rope: float | None) -> None:
    """Refuse a margin that is no number, and a negative region of equivalence."""
    checked_number(margin, "margin")
    if rope is not None:
        checked_number(rope, "rope", least=0)


def compare_estimators(
    estimators: Mapping[str, Any],
    X: Any,
    y: Any,
    *,
    baseline: str,
    cv: Any = None,
    scoring: str | Any = "accuracy",
    stop: Any = None,
    groups: Any = None,
    n_jobs: int | None = None,
    params: Mapping[str, Any] | None = None,
    margin: float = 0.0,
    rope: float | None = None,
    level: float = 0.95,
) -> Comparison:
    """Compare scikit-learn estimators with a baseline, pairwise on identical splits.

    Parameters
    ----------
    estimators : label -> estimator, two or more
    baseline : the label that all others are compared with
    cv, scoring, groups, n_jobs, params : as in :func:`cross_validate`; cv=None is its default, 20 passes of 5-fold
    stop : as there; it looks at the differences to the baseline and stops when all of them are flat
    margin, rope, level : as in :func:`compare_scores`

    Returns
    -------
    Comparison
        ``cost_ratio`` of a verdict is its seconds of fitting and scoring over the baseline's.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.dummy import DummyClassifier
    >>> from sklearn.naive_bayes import GaussianNB
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> estimators = {"bayes": GaussianNB(), "majority": DummyClassifier()}
    >>> verdict = compare_estimators(estimators, X, y, baseline="majority", cv=5).verdicts["bayes"]
    >>> verdict.state, round(verdict.difference, 2)
    ('HOLDS', 0.31)
    """
    from sklearn.utils import indexable

    from fairtrial.evaluation.sample_gain.cross_validation import (
        NO_ROWS,
        REPEATED,
        check_scoring,
        check_stop,
        planned,
        rule_of,
        run_splits,
    )

    check_candidates(estimators, baseline)
    check_margins(margin, rope)
    check_scoring(scoring)
    check_stop(stop)
    X, y = indexable(X, y)
    labels, others = list(estimators), [label for label in estimators if label != baseline]
    plan = planned(estimators[baseline], X, y, REPEATED if cv is None else cv, groups, params)

    def differences(*rows: NDArray[Any]) -> NDArray[Any]:  # (candidates, m) of one split
        of = dict(zip(labels, rows, strict=True))
        return np.array([of[label] - of[baseline] for label in others])

    rule = None if stop is None else rule_of([stop] * len(others), plan, differences)
    runs = dict(zip(labels, run_splits(list(estimators.values()), X, y, plan, scoring, rule, n_jobs), strict=True))
    rows_known = all(run.has_rows for run in runs.values())
    result = compare_scores(
        {label: run.table(plan, estimators[label], rows=rows_known) for label, run in runs.items()},
        baseline=baseline, margin=margin, rope=rope, level=level,
    )  # fmt: skip
    seconds = {label: sum(run.fit_time) + sum(run.score_time) for label, run in runs.items()}
    for label, verdict in result.verdicts.items():
        ratio = seconds[label] / seconds[baseline] if seconds[baseline] > 0 else None
        note = "; ".join(filter(None, (verdict.note, "" if rows_known else NO_ROWS)))
        result.verdicts[label] = replace(verdict, cost_ratio=ratio, note=note)
    return result
