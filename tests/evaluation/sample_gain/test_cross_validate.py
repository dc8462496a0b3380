"""scikit-learn's cross_validate with an interval, a sample gain and a stop."""

import joblib
import numpy as np
import pytest
import sklearn
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, make_scorer
from sklearn.model_selection import (
    GroupKFold,
    KFold,
    LeaveOneGroupOut,
    RepeatedKFold,
    ShuffleSplit,
    StratifiedKFold,
    TimeSeriesSplit,
)
from sklearn.model_selection import cross_validate as sklearn_cross_validate
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.tree import DecisionTreeClassifier

from fairtrial import stats
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.sample_gain import SplitScores, StopWhenFlat, compare_estimators, cross_validate

RNG = np.random.default_rng(0)
X = RNG.normal(size=(90, 3))
Y = (X[:, 0] + RNG.normal(size=90) > 0).astype(int)
FOUR = KFold(4)
REPEATED = RepeatedKFold(n_splits=5, n_repeats=3, random_state=0)


@pytest.mark.parametrize(
    "cv",
    [
        4,
        REPEATED,
        StratifiedKFold(3),
        ShuffleSplit(6, random_state=1),
        list(FOUR.split(X)),
        iter(list(FOUR.split(X))),
    ],
    ids=["int", "repeated", "stratified", "random", "list", "iterator"],
)
def test_without_stop_the_test_scores_are_scikit_learns_element_wise(cv):
    same = list(FOUR.split(X)) if hasattr(cv, "__next__") else cv
    ours = cross_validate(GaussianNB(), X, Y, cv=cv)
    theirs = sklearn_cross_validate(GaussianNB(), X, Y, cv=same, scoring="accuracy")
    assert set(theirs) <= set(ours)
    assert np.array_equal(ours["test_score"], theirs["test_score"])
    assert {name: ours[name].shape for name in theirs} == {name: theirs[name].shape for name in theirs}


@pytest.mark.parametrize("scoring", ["neg_log_loss", "roc_auc", "f1", "balanced_accuracy"])
def test_other_scorers_are_scikit_learns_too(scoring):
    ours = cross_validate(GaussianNB(), X, Y, cv=REPEATED, scoring=scoring)
    theirs = sklearn_cross_validate(GaussianNB(), X, Y, cv=REPEATED, scoring=scoring)
    assert np.array_equal(ours["test_score"], theirs["test_score"])
    np.testing.assert_allclose([rows.mean() for rows in ours["per_sample"]], ours["test_score"], rtol=1e-8)
    assert ours["interval"].mean == pytest.approx(ours["test_score"].mean(), rel=1e-8)


def test_interval_and_gain_are_those_of_the_design():
    out = cross_validate(GaussianNB(), X, Y, cv=REPEATED)
    splits = list(REPEATED.split(X))
    right = [(GaussianNB().fit(X[a], Y[a]).predict(X[b]) == Y[b]).astype(float) for a, b in splits]
    table = SplitScores.from_arrays([b for _, b in splits], right, train=[a for a, _ in splits], n=90)
    expected = stats.interval(table, variance="design")
    assert (out["interval"].low, out["interval"].high) == pytest.approx((expected.low, expected.high))
    assert out["sample_gain"].value == pytest.approx(stats.sample_gain(table).value)
    for rows, known, indices, (_, test) in zip(out["per_sample"], right, out["test_indices"], splits, strict=True):
        assert np.array_equal(rows, known)
        assert np.array_equal(indices, test)


def test_the_default_is_twenty_passes_of_five_fold():
    out = cross_validate(DummyClassifier(), X, Y)
    assert len(out["test_score"]) == 100
    assert "kappa = 1 assumed" in str(out["interval"])


# stopping -----------------------------------------------------------------------------------------------------------


def test_it_stops_where_the_rule_says_and_returns_the_splits_that_were_run():
    stop = StopWhenFlat(min_gain=0.05)
    out = cross_validate(GaussianNB(), X, Y, stop=stop)
    ran = len(out["test_score"])
    whole = cross_validate(GaussianNB(), X, Y)
    assert 6 < ran < 100
    assert np.array_equal(out["test_score"], whole["test_score"][:ran])
    assert {len(out[name]) for name in ("fit_time", "score_time", "per_sample", "test_indices")} == {ran}
    splits = list(RepeatedKFold(n_splits=5, n_repeats=20, random_state=0).split(X))
    twin = StopWhenFlat(min_gain=0.05, plan=splits)
    said = [twin.update(*split, rows) for split, rows in zip(splits, whole["per_sample"], strict=True)]
    assert said.index(True) + 1 == ran
    assert stop.gains == []  # a copy was used: the rule may be used again
    assert len(cross_validate(GaussianNB(), X, Y, stop=stop)["test_score"]) == ran


def test_no_split_beyond_the_stop_is_fitted():
    class Counting(GaussianNB):
        fits = 0

        def fit(self, X, y):
            Counting.fits += 1
            return super().fit(X, y)

    out = cross_validate(Counting(), X, Y, stop=StopWhenFlat(min_gain=0.05))
    assert Counting.fits == len(out["test_score"])


@pytest.mark.parametrize("stop", [None, StopWhenFlat(min_gain=0.05)])
def test_the_number_of_workers_changes_nothing(stop):
    one = cross_validate(GaussianNB(), X, Y, cv=REPEATED, stop=stop)
    with joblib.parallel_config(backend="threading"):
        two = cross_validate(GaussianNB(), X, Y, cv=REPEATED, stop=stop, n_jobs=2)
    assert np.array_equal(one["test_score"], two["test_score"])
    assert one["interval"] == two["interval"]


def test_any_object_with_update_may_stop_it():
    class AfterThree:
        seen = 0

        def update(self, train, test, scores):
            assert len(test) == len(scores)
            self.seen += 1
            return self.seen == 3

    assert len(cross_validate(GaussianNB(), X, Y, stop=AfterThree())["test_score"]) == 3


# what is passed on --------------------------------------------------------------------------------------------------


def test_params_reach_fit_as_in_scikit_learn():
    weight = RNG.exponential(size=90)
    given = {"params": {"sample_weight": weight}, "cv": 4}
    ours, theirs = (run(LogisticRegression(C=0.1), X, Y, **given) for run in (cross_validate, sklearn_cross_validate))
    assert np.array_equal(ours["test_score"], theirs["test_score"])


def test_metadata_is_routed_to_fit_scorer_and_splitter():
    weight, groups = RNG.exponential(size=90), np.arange(90) // 3
    with sklearn.config_context(enable_metadata_routing=True):
        estimator = LogisticRegression().set_fit_request(sample_weight=True)
        scoring = make_scorer(accuracy_score).set_score_request(sample_weight=True)
        given = {"params": {"sample_weight": weight, "groups": groups}, "cv": GroupKFold(5), "scoring": scoring}
        theirs = sklearn_cross_validate(estimator, X, Y, **given)
        ours = cross_validate(estimator, X, Y, **given)
    assert np.array_equal(ours["test_score"], theirs["test_score"])
    np.testing.assert_allclose([rows.mean() for rows in ours["per_sample"]], ours["test_score"])


def test_with_groups_the_group_is_the_sample():
    groups = np.repeat(np.arange(15), 6)
    y = (groups % 3 == 0).astype(int)  # samples of a group are alike
    cv = [split for seed in range(3) for split in GroupKFold(5, shuffle=True, random_state=seed).split(X, y, groups)]
    out = cross_validate(GaussianNB(), X, y, cv=cv, groups=groups)
    table = SplitScores.from_arrays(out["test_indices"], out["per_sample"]).by_group(groups)
    expected = stats.interval(table, variance="design")
    assert (out["interval"].low, out["interval"].high) == pytest.approx((expected.low, expected.high))
    alone = cross_validate(GaussianNB(), X, y, cv=cv)["interval"]
    assert out["interval"].high - out["interval"].low > alone.high - alone.low
    stopped = cross_validate(GaussianNB(), X, y, cv=cv, groups=groups, stop=StopWhenFlat(min_gain=10.0))
    assert len(stopped["test_score"]) == 7  # two looks, at 6 and 7


# what cannot be done ------------------------------------------------------------------------------------------------


def never_fitted():
    class Never(GaussianNB):
        def fit(self, X, y):
            raise AssertionError("fitted")

    return Never()


def test_a_sample_in_both_train_and_test_is_refused_before_any_fit():
    with pytest.raises(InputError, match="sample 5 is in both the training and the test set of split 1"):
        cross_validate(never_fitted(), X, Y, cv=[(np.arange(5, 90), np.arange(5)), (np.arange(6), np.arange(5, 90))])


def test_a_group_on_both_sides_is_refused_before_any_fit():
    groups, cv = np.array(["a", "b", "c"]).repeat(30), [(np.arange(70), np.arange(70, 90))]
    with pytest.raises(InputError, match=r"group c is in both .* set of split 0: use a splitter such as GroupKFold"):
        cross_validate(never_fitted(), X, Y, cv=cv, groups=groups)
    with pytest.raises(InputError, match="groups has 3 labels for 90 samples"):
        cross_validate(never_fitted(), X, Y, cv=cv, groups=["a", "b", "c"])
    with pytest.raises(InputError, match=r"groups have the shape \(90, 1\): give one label a sample"):
        cross_validate(never_fitted(), X, Y, cv=GroupKFold(3), groups=groups[:, None])


def test_a_single_split_has_the_binomial_interval_if_scores_are_0_or_1_and_none_else():
    out = cross_validate(GaussianNB(), X, Y, cv=ShuffleSplit(1, random_state=0))
    assert "binomial" in str(out["interval"])
    assert out["sample_gain"] is None
    with pytest.raises(InputError, match="one split: an interval needs at least two"):
        cross_validate(GaussianNB(), X, Y, cv=ShuffleSplit(1, random_state=0), scoring="neg_log_loss")


def test_scores_that_are_not_finite_are_refused_with_split_and_sample():
    class Explodes(Ridge):
        def predict(self, X):
            return np.full(len(X), np.nan)

    def nan(estimator, X, y):
        return np.nan

    with pytest.raises(ValueError, match="NaN"):  # scikit-learn's own metric looks first
        cross_validate(Explodes(), X, X[:, 0], cv=4, scoring="neg_mean_squared_error")
    with pytest.raises(InputError, match="the mean of split 0 is nan"):
        cross_validate(GaussianNB(), X, Y, cv=4, scoring=nan)


def test_one_seed_for_all_splits_raises_a_warning():
    tree = DecisionTreeClassifier(max_depth=2)
    cross_validate(tree, X, Y, cv=4)
    for seeded in (tree.set_params(random_state=0), make_pipeline(DecisionTreeClassifier(random_state=0))):
        with pytest.warns(UserWarning, match="one seed for all splits: the verdict is for that seed only"):
            cross_validate(seeded, X, Y, cv=4)


def test_all_scores_identical_have_the_rule_of_three_never_a_point():
    out = cross_validate(DummyClassifier(), X, np.ones(90, dtype=int), cv=REPEATED)
    assert out["interval"].low < 1 == out["interval"].high
    assert "rule of three" in str(out["interval"])


def test_a_scorer_without_per_sample_form_gets_nadeau_and_bengios_interval_and_says_so():
    def spread(estimator, X, y):
        return float(estimator.predict(X).std())

    out = cross_validate(GaussianNB(), X, Y, cv=REPEATED, scoring=spread)
    assert out["per_sample"] is None
    assert "no per-sample values" in str(out["interval"])
    sizes = {"n_test": 18, "n_train": 72}
    expected = stats.mean_interval(out["test_score"], variance="nadeau_bengio", **sizes)
    assert (out["interval"].low, out["interval"].high) == pytest.approx((expected.low, expected.high))
    with pytest.raises(InputError, match="leave stop= out"):
        cross_validate(GaussianNB(), X, Y, cv=REPEATED, scoring=spread, stop=StopWhenFlat())
    with pytest.raises(InputError, match=r"add n_test= and n_train="):  # without sizes: which argument to add
        stats.mean_interval(out["test_score"], variance="nadeau_bengio")


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"scoring": "acuracy"}, UnknownNameError, "did you mean 'accuracy'"),
        ({"scoring": ["accuracy", "f1"]}, InputError, "call again for another metric"),
        ({"cv": []}, InputError, "cv gives no split"),
        ({"cv": [(np.arange(5), [])]}, InputError, "split 0 trains on 5 samples and tests 0"),
    ],
)
def test_what_cannot_be_run_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        cross_validate(never_fitted(), X, Y, **given)


def test_time_series_splits_that_do_not_train_on_all_others_are_known_as_they_are():
    cv = TimeSeriesSplit(6, max_train_size=30)
    out = cross_validate(GaussianNB(), X, Y, cv=cv)
    splits = list(cv.split(X))
    table = SplitScores.from_arrays([b for _, b in splits], out["per_sample"], train=[a for a, _ in splits], n=90)
    assert out["interval"].variance == pytest.approx(stats.interval(table, variance="design").variance)


def test_leave_one_group_out_takes_the_groups():
    out = cross_validate(GaussianNB(), X, Y, cv=LeaveOneGroupOut(), groups=np.arange(90) % 6)
    assert len(out["test_score"]) == 6


def test_masks_are_taken_for_the_samples_they_mark():
    splits = [*KFold(4).split(X)]
    marked = [tuple(np.isin(np.arange(len(Y)), indices) for indices in split) for split in splits]
    by_index, by_mask = (cross_validate(GaussianNB(), X, Y, cv=cv) for cv in (splits, marked))
    assert by_index["interval"] == by_mask["interval"]
    for one, other in zip(by_index["test_indices"], by_mask["test_indices"], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("test", "word"),
    [([0, 10**6], "sample 1000000"), ([-1], "sample -1"), ([0.5], "float64"), ([[0]], "indices"), ([True], "bool")],
)
def test_splits_that_are_no_indices_are_refused_by_name(test, word):
    with pytest.raises(InputError, match="test set of split 0") as told:
        cross_validate(GaussianNB(), X, Y, cv=[([2, 3, 4], test)])
    assert word in str(told.value)


@pytest.mark.parametrize("stop", [True, 3, StopWhenFlat])
def test_what_is_no_rule_of_when_to_stop_is_refused(stop):
    with pytest.raises(InputError, match="give StopWhenFlat"):
        cross_validate(GaussianNB(), X, Y, stop=stop)
    with pytest.raises(InputError, match="give StopWhenFlat"):
        compare_estimators({1: GaussianNB(), 2: GaussianNB()}, X, Y, baseline=1, stop=stop)


def test_a_callable_of_many_metrics_is_refused():
    with pytest.raises(InputError, match="returns dict"):
        cross_validate(GaussianNB(), X, Y, cv=3, scoring=lambda estimator, rows, truth: {"a": 1.0})


def test_labels_may_be_numbers():
    told = str(compare_estimators({1: GaussianNB(), 10: GaussianNB(var_smoothing=1.0)}, X, Y, baseline=1, cv=3))
    assert told.startswith("1   0")
    assert "10  against 1:" in told
