"""Several candidates against a baseline: one verdict each, corrected for their number."""

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import RepeatedKFold
from sklearn.naive_bayes import GaussianNB

from fairtrial import stats
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.sample_gain import (
    SplitScores,
    StopWhenFlat,
    compare_estimators,
    compare_scores,
    cross_validate,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 3))
Y = (X[:, 0] + RNG.normal(size=100) > 0).astype(int)
REPEATED = RepeatedKFold(n_splits=5, n_repeats=2, random_state=0)
THREE = {"bayes": GaussianNB(), "logistic": LogisticRegression(), "majority": DummyClassifier()}


def folds(*means):
    return SplitScores.from_folds(means, n_test=20, n_train=80)


def test_estimators_are_compared_on_the_rows_of_the_same_splits():
    result = compare_estimators(THREE, X, Y, baseline="majority", cv=REPEATED)
    tables = {}
    for label, estimator in THREE.items():
        out = cross_validate(estimator, X, Y, cv=REPEATED)
        tables[label] = SplitScores.from_arrays(out["test_indices"], out["per_sample"])
        assert result.scores[label].mean == pytest.approx(out["interval"].mean)
        assert result.gains[label].value == pytest.approx(out["sample_gain"].value)
    for label in ("bayes", "logistic"):
        expected = stats.compare(tables[label], tables["majority"], higher_is_better=True, variance="design")
        assert result.plain[label] == pytest.approx((expected.low, expected.high))
        assert result.verdicts[label].difference == pytest.approx(expected.difference)
        assert result.verdicts[label].paired_gain == pytest.approx(expected.paired_gain)
        assert result.verdicts[label].cost_ratio > 0  # which of them costs more depends on the machine


def test_printed_interval_and_state_follow_holms_levels():
    better, doubtful = folds(0.9, 0.91, 0.9, 0.92, 0.9), folds(0.86, 0.8, 0.85, 0.83, 0.84)
    same = folds(0.8, 0.8, 0.79, 0.81, 0.79)
    base = folds(0.8, 0.79, 0.81, 0.8, 0.8)
    result = compare_scores({"a": better, "b": doubtful, "base": base, "c": same}, baseline="base")
    plain = [stats.compare(table, base, higher_is_better=True) for table in (better, doubtful, same)]
    _, levels = stats.holm([verdict.p_value for verdict in plain])
    assert [v.level for v in result.verdicts.values()] == pytest.approx(levels)
    for verdict in result.verdicts.values():
        assert (verdict.state == "HOLDS") == (verdict.low > 0)
        assert (verdict.state == "FAILS") == (verdict.high < 0)
    assert result.plain["b"][0] > 0 > result.verdicts["b"].low  # alone it would hold


def test_two_cells_decide_nothing_and_take_nothing_from_the_others():
    result = compare_scores({"a": folds(0.9, 0.9001), "base": folds(0.1, 0.1001)}, baseline="base")
    assert result.verdicts["a"].state == "UNDECIDED"


def test_losses_margins_and_ropes():
    low, high = folds(0.1, 0.12, 0.11, 0.1), folds(0.3, 0.31, 0.33, 0.3)
    result = compare_scores({"low": low, "high": high}, baseline="high", higher_is_better=False, rope=0.5)
    assert result.verdicts["low"].state == "HOLDS"
    assert result.verdicts["low"].rope_probability > 0.99
    wide = compare_scores({"low": low, "high": high}, baseline="high", higher_is_better=False, margin=0.5)
    assert wide.verdicts["low"].state == "FAILS"


def test_comparing_an_estimator_with_itself_decides_nothing():
    result = compare_estimators({"a": GaussianNB(), "b": GaussianNB()}, X, Y, baseline="a", cv=REPEATED)
    assert result.verdicts["b"].difference == 0
    assert result.verdicts["b"].state == "UNDECIDED"
    assert result.verdicts["b"].low < 0 < result.verdicts["b"].high  # the rule of three, never a point


def test_it_stops_when_all_differences_are_flat_at_the_same_split_for_all():
    stop, cv = StopWhenFlat(min_gain=0.1), RepeatedKFold(n_splits=5, n_repeats=6, random_state=0)
    result = compare_estimators(THREE, X, Y, baseline="majority", cv=cv, stop=stop)
    whole = {label: cross_validate(estimator, X, Y, cv=cv) for label, estimator in THREE.items()}
    splits = list(cv.split(X))
    rules = {label: StopWhenFlat(min_gain=0.1, plan=splits) for label in ("bayes", "logistic")}
    for k, split in enumerate(splits):
        said = [
            rule.update(*split, whole[label]["per_sample"][k] - whole["majority"]["per_sample"][k])
            for label, rule in rules.items()
        ]
        if all(said):
            break
    assert {one.n_cells for one in result.scores.values()} == {k + 1}
    assert k + 1 < 30


def test_without_per_sample_values_the_fold_means_are_compared_and_it_says_so():
    def right(estimator, X, y):
        return float(np.mean(estimator.predict(X) == y))

    result = compare_estimators(THREE, X, Y, baseline="majority", cv=REPEATED, scoring=right)
    assert "no per-sample values" in result.verdicts["bayes"].note
    means = {name: cross_validate(THREE[name], X, Y, cv=REPEATED)["test_score"] for name in ("bayes", "majority")}
    expected = stats.compare(*(SplitScores.from_folds(m, 20, 80) for m in means.values()), higher_is_better=True)
    assert result.plain["bayes"] == pytest.approx((expected.low, expected.high))


def test_the_frame_has_a_row_a_candidate_and_the_print_a_line_a_verdict():
    result = compare_estimators(THREE, X, Y, baseline="majority", cv=REPEATED)
    frame = result.to_frame()
    assert list(frame.index) == list(THREE)
    assert frame.loc["majority", ["state", "difference", "low95"]].isna().all()
    verdict = result.verdicts["bayes"]
    assert tuple(frame.loc["bayes", ["state", "difference", "low", "high", "level"]]) == (
        verdict.state, verdict.difference, verdict.low, verdict.high, verdict.level,
    )  # fmt: skip
    assert "bayes     against majority: " + str(verdict) in str(result)


@pytest.mark.parametrize(
    ("candidates", "baseline", "error", "message"),
    [
        ({"a": folds(1, 2)}, "a", InputError, "two candidates or more"),
        ({"a": folds(1, 2), "b": folds(1, 2)}, "c", UnknownNameError, "no candidate 'c'"),
        (["a", "b"], "a", InputError, "a mapping of labels"),
        ({"a": folds(1, 2), "b": folds(1, 2, 3)}, "a", InputError, "splits differ, first at split 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(candidates, baseline, error, message):
    with pytest.raises(error, match=message):
        compare_scores(candidates, baseline=baseline)
