import math
import pickle

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import estimator_checks as checks

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.ensemble_selection import MutualInformationSelector, fano_floor, mutual_information
from fairtrial.evaluation.ensemble_selection.baselines import best_subset
from fairtrial.evaluation.ensemble_selection.information import Counts
from fairtrial.evaluation.ensemble_selection.simulation import simulate


def noisy(rng, y, errors, classes=2):
    wrong = rng.random((len(y), len(errors))) < errors
    return np.where(wrong, (y[:, None] + rng.integers(1, classes, size=wrong.shape)) % classes, y[:, None])


@pytest.fixture(scope="module")
def table():
    """Answers of four models to 400 items, the second a clone of the first, as text."""
    rng = np.random.default_rng(0)
    y = rng.permutation(np.arange(400) % 2)
    good, fair, weak = noisy(rng, y, [0.15, 0.2, 0.3]).T
    names = np.array(["no", "yes"])
    frame = pd.DataFrame({"good": names[good], "clone": names[good], "fair": names[fair], "weak": names[weak]})
    return frame, pd.Series(names[y])


@pytest.mark.parametrize("estimator", ["variational", "counts", "shrunk"])
def test_a_duplicate_adds_nothing_and_is_never_chosen_while_an_informative_model_is_left(table, estimator):
    frame, y = table
    selector = MutualInformationSelector(budget=3, estimator=estimator).fit(frame, y)
    assert selector.selected_[:2] == ["good", "fair"]
    assert "clone" not in selector.selected_
    alone, twice = (mutual_information(frame[list(columns)], y, estimator) for columns in (["good"], ["good", "clone"]))
    assert twice - alone < 0.01


def test_it_stops_when_no_further_model_surely_helps(table):
    frame, y = table
    selector = MutualInformationSelector(budget=4).fit(frame[["good", "clone"]], y)
    assert selector.selected_ == ["good"]
    assert selector.stopped_.startswith("no further model helps: the best, clone, adds")
    whole = MutualInformationSelector(budget=2, min_gain=-math.inf).fit(frame[["good", "clone"]], y)
    assert whole.selected_ == ["good", "clone"]
    assert whole.stopped_ == "all models are chosen"


def test_shuffled_labels_choose_nothing_and_the_rule_is_the_prior(table):
    frame, _ = table
    shuffled = np.random.default_rng(1).permutation(np.r_[["yes"] * 300, ["no"] * 100])
    selector = MutualInformationSelector().fit(frame, shuffled)
    assert selector.selected_ == []
    assert selector.gains_.empty
    assert not selector.get_support().any()
    assert selector.transform(frame).shape == selector.transform(frame.to_dict("list")).shape == (400, 0)
    np.testing.assert_allclose(selector.predict_proba(frame), [[0.25, 0.75]] * 400, atol=1e-4)
    assert selector.predict(frame.to_dict("list")).tolist() == ["yes"] * 400


@pytest.mark.parametrize("estimator", ["variational", "counts", "shrunk"])
def test_a_pair_whose_exclusive_or_is_the_label_needs_a_seed_of_two(estimator):
    rng = np.random.default_rng(2)
    a, b = rng.integers(2, size=(2, 800))
    X = np.column_stack([rng.integers(2, size=(800, 2)), a, b])
    one, two = (MutualInformationSelector(2, estimator=estimator, seed_size=size).fit(X, a ^ b) for size in (1, 2))
    assert sorted(two.selected_) == [2, 3]
    assert two.gains_.information.iloc[-1] > 0.9
    assert set(one.selected_) != {2, 3}


def test_greedy_reaches_its_share_of_the_best_where_models_err_independently():
    rng = np.random.default_rng(3)
    for _ in range(50):
        y = rng.permutation(np.arange(240) % 2)
        X = noisy(rng, y, rng.uniform(0.1, 0.5, 8))
        empty = Counts(X, y)
        selector = MutualInformationSelector(3, estimator="counts", min_gain=-math.inf)
        chosen, states = selector._greedy(empty, range(8), np.ones(8))
        assert len(chosen) == 3
        best = empty
        for model in best_subset(empty, 8, 3):
            best = best.add(model)
        assert states[-1].terms.mean() >= (1 - 1 / math.e) * best.terms.mean()


def test_costs_are_kept_and_the_better_of_ratio_and_single_is_returned():
    rng = np.random.default_rng(4)
    y = rng.permutation(np.arange(400) % 2)
    X = pd.DataFrame(noisy(rng, y, [0.05, 0.2, 0.25]), columns=["big", "small", "tiny"])
    costs = {"big": 10, "small": 1, "tiny": 1}
    selector = MutualInformationSelector(10, costs=costs).fit(X, y)
    assert selector.selected_ == ["big"]  # the small ones gain more a cost, and leave no room
    assert selector.gains_.cost.tolist() == [10.0]
    assert "single" in selector.stopped_
    cheap = MutualInformationSelector(2, costs=[10, 1, 1]).fit(X, y)
    assert set(cheap.selected_) <= {"small", "tiny"}
    assert cheap.gains_.cost.iloc[-1] <= 2


def test_the_table_of_prefixes_adds_up(table):
    frame, y = table
    gains = MutualInformationSelector(budget=3).fit(frame, y).gains_
    np.testing.assert_allclose(gains.gain.cumsum(), gains.information)
    assert (gains.low <= gains.gain).all()
    assert (gains.gain <= gains.high).all()
    assert (gains.accuracy_low <= gains.accuracy).all()
    assert gains.cost.tolist() == list(range(1, len(gains) + 1))


def test_it_beats_the_most_accurate_models_where_these_err_together():
    rng = np.random.default_rng(5)
    X, y = simulate(rng, 2300, 2)
    train, test = slice(0, 300), slice(300, None)
    selector = MutualInformationSelector(3, min_gain=-math.inf).fit(X[train], y[train])
    best = np.argsort(-(X[train] == y[train, None]).mean(0))[:1]
    assert selector.score(X[test], y[test]) > (X[test][:, best] == y[test, None]).mean()


def test_only_the_chosen_models_need_be_asked_afterwards(table):
    frame, y = table
    selector = MutualInformationSelector(budget=2).fit(frame, y)
    few = frame[selector.selected_[::-1]]
    assert (selector.predict(few) == selector.predict(frame)).all()
    assert list(selector.transform(few).columns) == selector.selected_
    with pytest.raises(InputError, match="no answers of 'good'"):
        selector.predict(frame[["fair"]])
    array = MutualInformationSelector(budget=2).fit(frame.to_numpy(), y)
    assert (array.predict(frame.to_numpy()) == selector.predict(frame)).all()
    with pytest.raises(InputError, match="answers of 2 models: 4 were fitted"):
        array.predict(frame.to_numpy()[:, :2])


def test_support_is_a_mask_over_columns(table):
    frame, y = table
    selector = MutualInformationSelector(budget=2).fit(frame, y)
    assert selector.get_support().tolist() == [True, False, True, False]
    assert selector.get_support(indices=True).tolist() == [0, 2]


def test_the_class_prior_may_be_overridden(table):
    frame, y = table
    selector = MutualInformationSelector(budget=2).fit(frame, y)
    even, rare = selector.predict_proba(frame), selector.predict_proba(frame, prior={"yes": 0.01, "no": 0.99})
    odds = even[:, 1] / even[:, 0] * (0.01 / 0.99) / (y.eq("yes").mean() / y.eq("no").mean())
    np.testing.assert_allclose(rare[:, 1] / rare[:, 0], odds)
    for prior in ({"yes": 1.0}, {"yes": 0, "no": 0}, [0.5, 0.5]):
        with pytest.raises(InputError, match="a share for each of the classes"):
            selector.predict(frame, prior=prior)
    with pytest.raises(InputError, match="prior='1'"):
        selector.predict(frame, prior={"yes": "1", "no": 1})


def test_fitting_twice_chooses_the_same(table):
    frame, y = table
    selector = MutualInformationSelector(budget=3, random_state=7)
    first = selector.fit(frame, y).gains_.copy()
    pd.testing.assert_frame_equal(first, clone(selector).fit(frame, y).gains_)
    again = pickle.loads(pickle.dumps(selector))
    assert (again.predict(frame) == selector.predict(frame)).all()


@pytest.mark.parametrize(
    "check",
    [
        checks.check_estimator_cloneable,
        checks.check_estimator_repr,
        checks.check_no_attributes_set_in_init,
        checks.check_parameters_default_constructible,
        checks.check_get_params_invariance,
        checks.check_set_params,
        checks.check_mixin_order,
    ],
)
def test_scikit_learns_checks_that_need_no_numbers(check):
    check("MutualInformationSelector", MutualInformationSelector())


def test_before_fit_it_says_so(table):
    with pytest.raises(NotFittedError):
        MutualInformationSelector().predict(table[0])


@pytest.mark.parametrize("fusion", ["weighted", "naive_bayes", "majority"])
def test_other_rules_may_fuse(table, fusion):
    frame, y = table
    assert MutualInformationSelector(3, fusion=fusion).fit(frame, y).score(frame, y) > 0.84


def test_fanos_bound_is_below_the_error_of_the_rule(table):
    frame, y = table
    selector = MutualInformationSelector(3).fit(frame, y)
    assert 0 < selector.floor_ < 1 - selector.score(frame, y)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("error", [0.001, 0.1, 0.4])
def test_fano_inverts_its_inequality(classes, error):
    bits = -error * math.log2(error) - (1 - error) * math.log2(1 - error) + error * math.log2(classes - 1)
    assert fano_floor(bits, classes) == pytest.approx(error, abs=1e-9)


def with_one(frame, row, column, value):
    frame = frame.copy()
    frame.loc[row, column] = value
    return frame


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        (lambda f: with_one(with_one(f, 0, "weak", "maybe"), 1, "weak", "maybe"), {},
         r"no class: 'maybe' \(2\), of weak; the classes are 'no', 'yes': .*abstain=True"),
        (lambda f: with_one(f, slice(0, 210), "weak", None), {}, "'weak' has no answer to 53% of the items"),
        (lambda f: f, {"budget": 0.5}, "budget=0.5 is below the cheapest cost, 1"),
        (lambda f: f, {"costs": {"good": 1}}, "no cost for the model 'clone'"),
        (lambda f: f, {"costs": [1, 2]}, "2 costs and 4 models"),
        (lambda f: f, {"costs": [1, 2, 0, 1]}, "a cost is 0"),
        (lambda f: f, {"costs": ["much"] * 4}, "give positive numbers"),
        (lambda f: f, {"costs": [True] * 4}, "give positive numbers"),
        (lambda f: f, {"random_state": 1.5}, "seed=1.5: give a whole number"),
        (lambda f: f, {"random_state": "x"}, "seed='x'"),
        (lambda f: f, {"budget": math.nan}, "budget=nan"),
        (lambda f: f, {"budget": "5"}, "budget='5'"),
        (lambda f: f, {"min_gain": math.nan}, "min_gain=nan"),
        (lambda f: f, {"min_gain": "0"}, "min_gain='0'"),
        (lambda f: f, {"seed_size": 3}, "seed_size=3"),
        (lambda f: f.set_axis(["a", "a", "b", "c"], axis=1), {}, "two models are called 'a'"),
        (lambda f: f.iloc[:, :0], {}, "has no column"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(table, change, how, message):
    frame, y = table
    with pytest.raises(InputError, match=message):
        MutualInformationSelector(**how).fit(change(frame), y)


def test_unknown_names_are_refused(table):
    for how in ({"fusion": "mean"}, {"estimator": "knn"}):
        with pytest.raises(UnknownNameError):
            MutualInformationSelector(**how).fit(*table)


def test_abstentions_are_allowed_where_asked_for(table):
    frame, y = table
    odd = with_one(frame, slice(0, 9), "good", "maybe")
    selector = MutualInformationSelector(2, abstain=True).fit(odd, y)
    assert selector.selected_[0] == "clone"  # now better than what it is a clone of
    assert (selector.predict(odd) == y).mean() > 0.8


def test_counts_stop_where_they_would_be_biased():
    rng = np.random.default_rng(6)
    y = rng.permutation(np.arange(80) % 2)
    selector = MutualInformationSelector(8, estimator="counts", min_gain=-math.inf).fit(noisy(rng, y, [0.2] * 8), y)
    assert len(selector.selected_) == 4  # 2^4 tuples have five items each
    assert "too few items for estimator='counts' to judge more than 4 models" in selector.stopped_


@pytest.mark.parametrize(("bits", "classes"), [(0.5, 1), (0.5, 2.5), (math.nan, 2), ("1", 2)])
def test_fanos_bound_is_of_bits_and_classes(bits, classes):
    with pytest.raises(InputError, match="give a"):
        fano_floor(bits, classes)
