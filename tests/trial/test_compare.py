"""fairtrial.compare: the engine for the user's own callables and scikit-learn estimators."""

import numpy as np
import pytest

import fairtrial
from fairtrial import stats
from fairtrial.errors import InputError, UnknownNameError

SCORE = fairtrial.Metric("score")


@pytest.fixture
def compare(inline, tmp_path):
    def run(*arguments, **options):
        options = {"out": tmp_path / "out", "engine": inline, "jobs": 1, "threads": 1, **options}
        return fairtrial.compare(*arguments, **options)

    return run


def noisy(seed):
    return float(np.random.default_rng(seed).normal())


def test_all_others_are_compared_with_the_baseline_in_order(compare):
    candidates = {"a": lambda c: noisy(c) + 1, "base": noisy, "b": lambda c: {"score": noisy(c + 100), "other": 3}}
    result = compare(candidates, baseline="base", cells=range(8), metric=SCORE, controls=["b"])
    assert [v.id for v in result.verdicts] == ["a", "b"]
    assert result.to_frame().groupby("candidate").role.first().to_dict() == {
        "a": "method",
        "b": "control",
        "base": "baseline",
    }
    differences = [noisy(c + 100) - noisy(c) for c in range(8)]
    low, high = stats.mean_interval(differences).at(0.95)
    assert (result.verdict("b").low95, result.verdict("b").high95) == pytest.approx((low, high))


def test_margin_level_and_direction(compare):
    metric = fairtrial.Metric("loss", higher_is_better=False)
    candidates = {"low": lambda c: noisy(c) / 10, "base": lambda c: 1 + noisy(c + 50) / 10}
    result = compare(candidates, baseline="base", cells=range(8), metric=metric, margin=0.5, level=0.9)
    (verdict,) = result.verdicts
    assert verdict.state == "HOLDS"
    assert verdict.bound == {"above": 0.5}
    assert verdict.level == 0.9
    assert "by more than 0.5" in verdict.text


def test_cells_may_be_any_json(compare):
    cells = [{"fold": 0, "seed": [1, 2]}, {"fold": 1, "seed": [3]}, [1, 2], "name", 5]
    result = compare({"a": lambda c: 1.0, "b": lambda c: 0.0}, baseline="b", cells=cells, metric=SCORE)
    assert len(result.to_frame()) == 10
    again = compare({"a": lambda c: 1.0, "b": lambda c: 0.0}, baseline="b", cells=cells, metric=SCORE)
    assert again.verdicts[0].units == 5


def test_only_a_changed_candidate_runs_again(compare, tmp_path):
    log = str(tmp_path / "log")

    def run(factor):
        def mine(cell):
            with open(log, "a") as stream:
                stream.write("m")
            return factor * cell

        def base(cell):
            with open(log, "a") as stream:
                stream.write("b")
            return 0.0

        result = compare({"mine": mine, "base": base}, baseline="base", cells=range(3), metric=SCORE)
        with open(log) as stream:
            return stream.read(), result.document["notes"]

    assert run(1)[0].count("b") == 3
    assert run(1)[0].count("m") == 3
    ran, notes = run(2)
    assert (ran.count("m"), ran.count("b")) == (6, 3)
    assert notes[0].startswith("3 cells run again: value of ")
    assert "mine.factor changed" in notes[0]


def test_code_that_cannot_be_seen_is_computed_again_and_says_so_unless_it_has_a_version(compare):
    unseen = {"up": "abc".count, "base": lambda c: 0.0}
    times = []
    for options in ({}, {}, {"version": "1"}, {"version": "1"}, {"version": "2"}):
        result = compare(unseen, baseline="base", cells=["a", "b"], metric=SCORE, **options)
        times.append([row.finished for row in result.rows if row.candidate == "up"])
        said = any("give version= to keep results" in note for note in result.document["notes"])
        assert said == (not options)
    assert times[0] != times[1]
    assert times[2] == times[3] != times[4]


@pytest.mark.parametrize(
    ("candidates", "options", "error", "message"),
    [
        ({"a": noisy, "b": noisy}, {"baseline": "c"}, UnknownNameError, "no candidate 'c'"),
        ({"a": noisy, "b": noisy}, {"baseline": "b", "controls": ["x"]}, UnknownNameError, "no candidate 'x'"),
        ({"a": noisy}, {"baseline": "a"}, InputError, "two candidates at least"),
        ({"a": noisy, "b": 3}, {"baseline": "a"}, InputError, "'b' is not callable"),
        ({"a": noisy, "b": noisy}, {"baseline": "a", "cells": []}, InputError, "cells has 0: give at least two"),
        ({"a": noisy, "b": noisy}, {"baseline": "a", "cells": None}, InputError, "needs cells= and metric="),
        ({"a": noisy, "b": noisy}, {"baseline": "a", "metric": None}, InputError, "needs cells= and metric="),
        ({"a": noisy, "b": noisy}, {"baseline": "a", "until": "decided"}, InputError, "needs an explicit variance="),
        ({"a": noisy, "b": noisy}, {"baseline": "a", "level": 95}, InputError, "between 0 and 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(compare, tmp_path, candidates, options, error, message):
    with pytest.raises(error, match=message):
        compare(candidates, **{"cells": range(3), "metric": SCORE, **options})
    assert not (tmp_path / "out").exists()


def test_a_callable_without_the_metric_loses_its_cells(compare):
    result = compare({"a": lambda c: {"speed": 1.0}, "b": noisy}, baseline="b", cells=range(2), metric=SCORE)
    assert result.document["lost"][0]["reason"] == "candidate 'a' returned ['speed'], without 'score'"


# estimators ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 4))
    return X, (X[:, 0] + rng.normal(size=120) > 0).astype(int)


def test_estimators_are_compared_on_the_splits_with_their_item_scores(compare, data):
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    X, y = data
    candidates = {"lr": LogisticRegression(), "dummy": DummyClassifier()}
    result = compare(candidates, X, y, baseline="dummy", scoring="accuracy", cv=5, controls=["dummy"])
    frame = result.to_frame()
    for label, estimator in candidates.items():
        expected = cross_val_score(estimator, X, y, cv=StratifiedKFold(5))
        np.testing.assert_allclose(frame[frame.candidate == label].accuracy, expected)
    verdict = result.verdicts[0]
    assert verdict.state == "HOLDS"
    splits = list(StratifiedKFold(5).split(X, y))
    scores = [
        [(estimator.fit(X[train], y[train]).predict(X[test]) == y[test]).astype(float) for train, test in splits]
        for estimator in candidates.values()
    ]
    table = stats.SplitScores.from_arrays(
        [t for _, t in splits], [a - b for a, b in zip(*scores, strict=True)], [t for t, _ in splits]
    )
    oracle = stats.interval(table, variance="design")
    assert (verdict.low, verdict.high) == pytest.approx(oracle.at(0.95), rel=0.05)


@pytest.mark.parametrize("kind", ["a number", "a splitter", "an iterable"])
def test_fold_scores_equal_scikit_learns_cross_validate_for_any_form_of_cv(compare, data, kind):
    from sklearn.dummy import DummyClassifier
    from sklearn.model_selection import RepeatedStratifiedKFold, cross_validate
    from sklearn.tree import DecisionTreeClassifier

    X, y = data
    splitter = RepeatedStratifiedKFold(n_splits=3, n_repeats=2, random_state=0)
    cv = {"a number": 4, "a splitter": splitter, "an iterable": list(splitter.split(X, y))}[kind]
    tree = DecisionTreeClassifier(max_depth=2, random_state=0)
    frame = compare({"tree": tree, "dummy": DummyClassifier()}, X, y, baseline="dummy", cv=cv).to_frame()
    expected = cross_validate(tree, X, y, cv=cv, scoring="accuracy")["test_score"]
    np.testing.assert_allclose(frame[frame.candidate == "tree"].accuracy, expected)


@pytest.mark.parametrize("scoring", ["neg_mean_squared_error", "neg_mean_absolute_error", "r2", None])
def test_each_scoring_has_the_folds_mean_that_scikit_learn_gives(compare, data, scoring):
    from sklearn.dummy import DummyRegressor
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import cross_val_score

    X, _ = data
    y = X[:, 0] + 0.1 * X[:, 1]
    result = compare({"ridge": Ridge(), "mean": DummyRegressor()}, X, y, baseline="mean", scoring=scoring, cv=4)
    frame = result.to_frame()
    expected = cross_val_score(Ridge(), X, y, cv=4, scoring=scoring)
    np.testing.assert_allclose(frame[frame.candidate == "ridge"][scoring or "r2"], expected)
    assert result.verdicts[0].state == "HOLDS"


def test_estimators_that_cannot_be_compared_are_refused(compare, data):
    from sklearn.linear_model import LogisticRegression

    X, y = data
    with pytest.raises(InputError, match="'b' is not an estimator"):
        compare({"a": LogisticRegression(), "b": LogisticRegression}, X, y, baseline="a")
    with pytest.raises(UnknownNameError, match="did you mean 'accuracy'"):
        compare({"a": LogisticRegression(), "b": LogisticRegression(C=2)}, X, y, baseline="a", scoring="acuracy")


def test_another_parameter_or_other_data_run_again(compare, data):
    from sklearn.linear_model import LogisticRegression

    X, y = data
    times = []
    for C, shift in ((1.0, 0), (1.0, 0), (2.0, 0), (1.0, 0.5)):
        candidates = {"a": LogisticRegression(C=C), "b": LogisticRegression(C=9.0)}
        result = compare(candidates, X + shift, y, baseline="b", scoring="accuracy", cv=3)
        times.append({label: [r.finished for r in result.rows if r.candidate == label] for label in "ab"})
    assert times[0] == times[1]
    assert times[2]["a"] != times[0]["a"]
    assert times[2]["b"] == times[0]["b"]
    assert times[3]["b"] != times[0]["b"]
