"""The trial sample-gain."""

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_wine
from sklearn.model_selection import cross_val_score
from sklearn.tree import DecisionTreeClassifier

from fairtrial import stats
from fairtrial.errors import InputError, MissingSampleError, UnknownNameError
from fairtrial.evaluation.sample_gain import trial as module_of_trial
from fairtrial.evaluation.sample_gain.trial import (
    FOLDS,
    INTERVALS,
    RULES,
    TESTS,
    SampleGainParams,
    complements,
    embedded_sentences,
    flat_rule,
    halves,
    held_out,
    measure_intervals,
    measure_pairs,
    measure_stopping,
    parts,
    population,
    read_table,
    splits_until,
    table,
    trial,
    truth_of,
    usual_cost,
    yardstick,
)
from fairtrial.seeds import generator
from fairtrial.testing import check_trial
from fairtrial.trial.params import make_params

SMALL = SampleGainParams(data=["wine"], learners=["ridge", "tree"], n=50, splits=10, data_sets=3, truth=20)
CELL = {"data_set": 1, "data": "wine", "learner": "tree"}


class Direct:
    """Stages without a store, each computed once."""

    def __init__(self):
        self.known = {}

    def __call__(self, function, *arguments):
        key = (function.__name__, repr(arguments))
        if key not in self.known:
            wants = function.__code__.co_varnames[:1] == ("stages",)
            self.known[key] = function(self, *arguments) if wants else function(*arguments)
        return self.known[key]


STAGES = Direct()


def candidate(candidates, label):
    return next(c for c in candidates if c.label == label)


def test_the_trial_is_sound():
    check_trial(trial)


# data and splits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "shape"), [("synthetic", (20_000, 20)), ("wine", (178, 13)), ("digits", (1797, 64))])
def test_sets_are_drawn_from_as_they_are(data, shape):
    X, y = population(STAGES, data, SMALL)
    assert X.shape == shape
    assert np.array_equal(np.unique(y), np.arange(y.max() + 1))


def test_a_data_set_is_at_most_a_third_of_its_set():
    big = SMALL.model_copy(update={"n": 200})
    assert len(table(STAGES, 0, "wine", "ridge", big).samples) == 59
    assert len(table(STAGES, 0, "wine", "ridge", SMALL).samples) == 50


@pytest.mark.parametrize("design", ["k-fold", "random"])
def test_splits_are_passes_of_five_fold_or_random_fifths(design):
    params = SMALL.model_copy(update={"design": design})
    tests = held_out(generator(0), 53, params)
    assert len(tests) == 10
    assert {len(test) for test in tests} <= {10, 11}
    first_pass = np.sort(np.concatenate(tests[:FOLDS]))
    assert np.array_equal(first_pass, np.arange(53)) == (design == "k-fold")
    for train, test in complements(tests, 53):
        assert np.array_equal(np.sort(np.r_[train, test]), np.arange(53))


def test_all_learners_have_the_same_samples_and_splits():
    a, b = (table(STAGES, 2, "wine", name, SMALL) for name in ("ridge", "tree"))
    assert a.minus(b).n_splits == 10


def test_a_cell_is_scikit_learns_cross_validation_of_the_subsample():
    X, y = load_wine(return_X_y=True)
    chosen = generator(1, "data set", "wine").choice(178, 50, replace=False)
    scores = table(STAGES, 1, "wine", "tree", SMALL)
    splits = complements([scores.test(k) for k in range(10)], 50)
    tree = DecisionTreeClassifier(max_depth=6, random_state=0)
    np.testing.assert_allclose(scores.means, cross_val_score(tree, X[chosen], y[chosen], cv=splits))


# truth --------------------------------------------------------------------------------------------------------------


def test_the_truth_is_the_mean_score_of_fresh_training_sets_on_the_rest():
    X, y = load_wine(return_X_y=True)
    order = generator(0, "truth", "wine").permutation(178)
    right = DecisionTreeClassifier(max_depth=6, random_state=0).fit(X[order[:40]], y[order[:40]]).predict(X[order[40:]])
    known = truth_of(STAGES, "wine", "tree", SMALL)
    assert known["mean"].shape == (20,)
    assert known["mean"][0] == pytest.approx(np.mean(right == y[order[40:]]))
    mean, unit, shrink = yardstick(STAGES, CELL, SMALL)
    assert mean == pytest.approx(known["mean"].mean())
    assert unit == pytest.approx(known["variance"].mean() / 10 + known["mean"].var(ddof=1))
    assert shrink == pytest.approx(np.sqrt(1 - 50 / 178))


def test_errors_are_those_of_fresh_samples():
    """Means of n of N numbers without replacement err by sqrt(1 - n / N) less: what the division undoes."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=178)
    errors = [rng.choice(numbers, 50, replace=False).mean() - numbers.mean() for _ in range(4000)]
    assert np.std(errors) / np.sqrt(1 - 50 / 178) == pytest.approx(numbers.std(ddof=1) / np.sqrt(50), rel=0.04)


@pytest.mark.slow
def test_one_splits_variance_is_that_over_fresh_data_sets():
    params = SampleGainParams(data=["synthetic"], learners=["ridge"], n=100, splits=10, truth=300)
    cell = {"data": "synthetic", "learner": "ridge", "data_set": 0}
    mean, unit, _ = yardstick(STAGES, cell, params)
    first = [table(STAGES, k, "synthetic", "ridge", params).means[0] for k in range(600)]
    assert np.mean(first) == pytest.approx(mean, abs=4 * np.sqrt(unit / 600))
    assert np.var(first) == pytest.approx(unit, rel=0.2)


# measures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "variance"), [("design", "design"), ("nadeau-bengio", "nadeau_bengio"), ("naive t", "independent")]
)
def test_intervals_are_those_of_the_engine(label, variance):
    scores = table(STAGES, 1, "wine", "tree", SMALL)
    found = measure_intervals(candidate(INTERVALS, label), CELL, SMALL, STAGES)
    mean, unit, shrink = yardstick(STAGES, CELL, SMALL)
    for name, splits in (("5", 5), ("all", 10)):
        one = stats.interval(scores.take(range(splits)), variance=variance)
        assert found[f"length at {name}"] == pytest.approx(one.high - one.low)
        assert found[f"variance at {name}"] == pytest.approx(one.variance / unit)
        assert found[f"covered at {name}"] == (abs(one.mean - mean) / shrink <= (one.high - one.low) / 2)
    assert found["squared error"] == pytest.approx((scores.means.mean() - mean) ** 2 / shrink**2 / unit)


def test_nested_cross_validation_has_as_many_fits_as_the_others_and_none_at_5(monkeypatch):
    params, fits = SMALL.model_copy(update={"splits": 15}), []
    original = module_of_trial.scores_on

    def counted(stages, data_set, data, learner, splits, params, kind):
        fits.append((kind, len(splits)))
        return original(stages, data_set, data, learner, splits, params, kind)

    monkeypatch.setattr(module_of_trial, "scores_on", counted)
    found = measure_intervals(candidate(INTERVALS, "nested CV"), CELL, params, Direct())
    assert fits == [("splits", 15), ("nested", 15)]
    assert found["length at 5"] is None
    assert found["length at all"] > 0


def test_every_candidate_is_measured():
    pair = {"data_set": 0, "data": "wine", "pair": "ridge against tree"}
    for candidates, measure, cell in (
        (INTERVALS, measure_intervals, CELL),
        (RULES, measure_stopping, CELL),
        ([c for c in TESTS if c.label != "aso"], measure_pairs, pair),
    ):
        names = {frozenset(measure(c, cell, SMALL, STAGES)) for c in candidates}
        assert len(names) == 1


def test_the_rule_stops_where_cross_validate_stops():
    from fairtrial.evaluation.sample_gain import StopWhenFlat, cross_validate

    X, y = load_wine(return_X_y=True)
    chosen = generator(1, "data set", "wine").choice(178, 50, replace=False)
    scores = table(STAGES, 1, "wine", "tree", SMALL)
    splits = complements([scores.test(k) for k in range(10)], 50)
    tree = DecisionTreeClassifier(max_depth=6, random_state=0)
    with pytest.warns(UserWarning, match="one seed"):
        out = cross_validate(tree, X[chosen], y[chosen], cv=splits, stop=StopWhenFlat(max_splits=10))
    assert splits_until(flat_rule(scores, SMALL), scores) == len(out["test_score"])
    found = measure_stopping(candidate(RULES, "flat"), CELL, SMALL, STAGES)
    assert found["splits"] == len(out["test_score"])
    assert measure_stopping(candidate(RULES, "all splits"), CELL, SMALL, STAGES)["share of splits"] == 1


def test_the_coins_cost_comes_from_data_sets_of_no_cell():
    cost = usual_cost(STAGES, ["wine"], ["ridge", "tree"], ["", ""], SMALL)
    assert 6 <= cost <= 10
    drawn = [arguments for name, arguments in STAGES.known if name == "cross_validated"]
    assert any(int(arguments.split(",")[0].strip("(")) > 10**6 for arguments in drawn)


def test_a_pair_is_right_only_with_the_sign_of_the_truth():
    cell = {"data_set": 0, "data": "wine", "pair": "ridge against tree"}
    swapped = {**cell, "pair": "tree against ridge"}
    for c in (candidate(TESTS, label) for label in ("design", "single split", "5x2cv F", "two_on_single")):
        one, other = (measure_pairs(c, x, SMALL, STAGES) for x in (cell, swapped))
        assert (one["right"], one["wrong"]) == (other["right"], other["wrong"])
    ridge, tree = (truth_of(STAGES, "wine", name, SMALL)["mean"].mean() for name in ("ridge", "tree"))
    assert ridge > tree
    assert measure_pairs(candidate(TESTS, "design"), cell, SMALL, STAGES)["right"] == 1.0


def test_halves_train_on_half():
    means = np.array(halves(STAGES, 0, "wine", "ridge", SMALL))
    assert means.shape == (5, 2)
    np.testing.assert_allclose(means * 25, np.round(means * 25))


# the user's own -----------------------------------------------------------------------------------------------------


def test_a_table_is_features_and_a_class_or_a_number(tmp_path):
    frame = pd.DataFrame({"a": [1, 2, 3], "b": [0.5, 0.1, 0.2], "kind": ["x", "y", "x"], "amount": [0.5, 1.5, 2.0]})
    file = str(tmp_path / "mine.csv")
    frame.drop(columns="amount").to_csv(file, index=False)
    X, y = read_table(file, "kind")
    assert X.shape == (3, 2)
    assert y.tolist() == [0, 1, 0]
    frame.drop(columns="kind").to_parquet(tmp_path / "mine.parquet")
    assert read_table(str(tmp_path / "mine.parquet"), "amount")[1].tolist() == [0.5, 1.5, 2.0]


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.csv"
    pd.DataFrame(np.c_[np.random.default_rng(0).normal(size=(90, 2)), np.arange(90) % 2],
                 columns=["a", "b", "target"]).to_csv(file, index=False)  # fmt: skip
    return file


def test_a_table_takes_the_place_of_the_data(mine):
    params = make_params(trial, "smoke", {"table": str(mine), "learners": ["ridge"]})
    trial.check(params)
    (data,) = {tuple(factor.values) for part in parts(params) for factor in part.factors if factor.name == "data"}
    assert data == ("table",)
    assert [part.name for part in parts(params)] == ["intervals", "stopping"]  # one learner makes no pair
    assert len(table(Direct(), 0, "table", "ridge", params).samples) == 30


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        (None, {"target": "label"}, "has no column 'label'"),
        (lambda f: f.assign(a="word"), {}, "column 'a' holds no numbers"),
        (lambda f: f.assign(b=[None, *f.b[1:]]), {}, "column 'b' is empty in 1 rows"),
        (lambda f: f[["target"]], {}, "has no column beside 'target'"),
        (lambda f: f.iloc[:50], {}, "has 50 rows: a third of them must be 20 or more"),
        (lambda f: f.assign(target=f.target + 0.5), {}, "'target' is no class"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_before_any_worker_starts(mine, change, values, message):
    if change:
        change(pd.read_csv(mine)).to_csv(mine, index=False)
    with pytest.raises(InputError, match=message):
        trial.check(make_params(trial, "smoke", {"table": str(mine), **values}))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"data": ["whine"]}, InputError, "no data set"),
        ({"learners": ["rigde"]}, InputError, "did you mean 'ridge'"),
        ({"learners": ["ridge", "ridge"]}, InputError, "named twice"),
        ({"learners": ["no_such:thing"]}, InputError, "No module named"),
        ({"table": "nowhere.csv"}, InputError, "no such file"),
        ({"scoring": "neg_log_loss"}, InputError, "built-in learners are scored by accuracy"),
        ({"splits": 12}, InputError, "multiple of 5"),
    ],
)
def test_parameters_that_cannot_be_used_are_refused(values, error, message):
    with pytest.raises((error, UnknownNameError), match=message):
        trial.check(make_params(trial, "smoke", values))


def test_without_the_samples_the_command_that_fetches_them_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    with pytest.raises(MissingSampleError, match="fairtrial samples get vader"):
        trial.check(make_params(trial, "smoke", {"data": ["sentences"]}))


def test_your_own_estimators_code_counts(tmp_path, monkeypatch):
    (tmp_path / "own_of_trial.py").write_text("from sklearn.naive_bayes import GaussianNB\nbayes = GaussianNB()\n")
    monkeypatch.syspath_prepend(tmp_path)
    params = make_params(trial, "smoke", {"learners": ["own_of_trial:bayes", "ridge"]})
    trial.check(params)
    for part in parts(params):
        assert all(any(callable(use) for use in c.uses) for c in part.candidates)
    assert "and yours" in parts(params)[0].claims[0].text
    assert 0.5 < table(Direct(), 0, "synthetic", "own_of_trial:bayes", params).means.mean() <= 1


@pytest.mark.slow
def test_sentences_are_embedded(monkeypatch):
    try:
        found = embedded_sentences()
    except MissingSampleError:
        pytest.skip("the samples vader and minilm are not here")
    assert found["X"].shape == (5000, 384)
    assert 0.3 < found["y"].mean() < 0.7


def test_the_optional_peer_is_a_candidate_only_when_asked_for():
    labels = [{c.label for c in parts(SampleGainParams(aso=aso))[2].candidates} for aso in (False, True)]
    assert labels[1] - labels[0] == {"aso"}
