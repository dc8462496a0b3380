import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.ensemble_selection import mutual_information
from fairtrial.evaluation.ensemble_selection.answers import classes_of, encode
from fairtrial.evaluation.ensemble_selection.information import Shrunk, entropy, folds_of, start

ESTIMATORS = ("counts", "shrunk", "variational")


def noisy(rng, y, errors, classes=2):
    wrong = rng.random((len(y), len(errors))) < errors
    return np.where(wrong, (y[:, None] + rng.integers(1, classes, size=wrong.shape)) % classes, y[:, None])


def by_hand(X, y):
    """Plug-in information with the Miller-Madow correction, by dictionaries."""
    n = len(y)
    rows = [tuple(row) for row in X.tolist()]
    counts = [{}, {}, {}]
    for row, label in zip(rows, y.tolist(), strict=True):
        for table, key in zip(counts, (label, row, (row, label)), strict=True):
            table[key] = table.get(key, 0) + 1
    h_y, h_x, h_yx = (-sum(c / n * math.log2(c / n) for c in table.values()) for table in counts)
    k_y, k_x, k_yx = map(len, counts)
    return h_y + h_x - h_yx - (k_yx - k_y - k_x + 1) / (2 * n * math.log(2))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 3), st.integers(1, 3))
def test_counts_are_the_plug_in_with_miller_madow(seed, classes, models):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(200) % classes)
    X = rng.integers(2, size=(200, models))
    assert mutual_information(X, y, "counts") == pytest.approx(by_hand(X, y), abs=1e-12)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(3)), st.permutations(range(3)), st.permutations(range(3)))
def test_counts_do_not_depend_on_names_nor_on_the_order_of_models(seed, labels, alphabet, order):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(300) % 3)
    X = noisy(rng, y, [0.2, 0.4, 0.5], 3)
    bits = mutual_information(X, y, "counts")
    relabelled = np.array(labels)
    assert mutual_information(relabelled[X], relabelled[y], "counts") == pytest.approx(bits, abs=1e-12)
    assert mutual_information(X[:, list(order)], y, "counts") == pytest.approx(bits, abs=1e-12)
    renamed = X.astype(object)
    renamed[:, 1] = np.array(["x", "yes", "no"])[np.array(alphabet)[X[:, 1]]]  # any bijection of one model's answers
    assert mutual_information(renamed, y, "counts") == pytest.approx(bits, abs=1e-12)


def test_a_perfect_model_tells_the_entropy_of_the_label():
    y = np.arange(3000) % 3
    perfect = y[:, None]
    bits = math.log2(3)
    assert mutual_information(perfect, y, "counts") == pytest.approx(bits, abs=2 * 4 / (2 * 3000 * math.log(2)))
    assert mutual_information(perfect, y, "shrunk") == pytest.approx(bits, abs=1e-9)
    assert bits - 0.02 < mutual_information(perfect, y, "variational") <= bits


def test_shuffled_labels_tell_nothing():
    rng = np.random.default_rng(0)
    found = {estimator: [] for estimator in ESTIMATORS}
    for _ in range(20):
        y = rng.permutation(np.arange(400) % 2)
        X = noisy(rng, rng.permutation(y), [0.2, 0.3])
        for estimator in ESTIMATORS:
            found[estimator].append(mutual_information(X, y, estimator))
    assert np.mean(found["variational"]) <= 0.01
    error = np.std(found["counts"]) / math.sqrt(20)
    assert abs(np.mean(found["counts"])) < 3 * error


@pytest.mark.slow
def test_given_joint_of_three_binary_models_is_recovered():
    rng = np.random.default_rng(1)
    joint = rng.dirichlet(np.ones(16)).reshape(2, 8)
    truth = sum(
        joint[k, x] * math.log2(joint[k, x] / (joint[k].sum() * joint[:, x].sum()))
        for k, x in itertools.product(range(2), range(8))
    )
    cell = rng.choice(16, size=200_000, p=joint.ravel())
    X = (cell[:, None] % 8 >> np.arange(3)) & 1
    assert mutual_information(X, cell // 8, "counts") == pytest.approx(truth, abs=0.003)
    assert mutual_information(X[:20_000], cell[:20_000] // 8, "shrunk") == pytest.approx(truth, abs=0.01)
    assert mutual_information(X[:20_000], cell[:20_000] // 8, "variational") <= truth + 0.01


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_terms_average_to_the_estimate(estimator):
    rng = np.random.default_rng(2)
    y = np.arange(400) % 2
    bits, terms = mutual_information(noisy(rng, y, [0.2, 0.3]), y, estimator, return_terms=True)
    assert terms.shape == (400,)
    assert bits == pytest.approx(terms.mean())


@pytest.mark.parametrize("estimator", ["counts", "shrunk"])
def test_each_model_added_alone_is_what_adding_it_gives(estimator):
    rng = np.random.default_rng(3)
    y = np.arange(300) % 2
    answers = encode(pd.DataFrame(noisy(rng, y, [0.2, 0.3, 0.4])))
    state = start(estimator, answers, y, 2, 0).add(1)
    each = state.with_each([0, 2])
    for row, model in zip(each, (0, 2), strict=True):
        np.testing.assert_allclose(row, state.add(model).terms, atol=1e-12)


def test_each_model_added_alone_is_nearly_what_fitting_it_to_convergence_gives():
    rng = np.random.default_rng(3)
    y = np.arange(300) % 3
    answers = encode(pd.DataFrame(noisy(rng, y, [0.2, 0.3, 0.4, 0.5], 3)))
    state = start("variational", answers, y, 3, 0).add(1)
    for row, model in zip(state.with_each([0, 2, 3]), (0, 2, 3), strict=True):
        assert row.mean() == pytest.approx(state.add(model).terms.mean(), abs=2e-3)


def test_gains_by_counts_add_up_to_the_whole():
    rng = np.random.default_rng(4)
    y = np.arange(500) % 2
    X = noisy(rng, y, [0.2, 0.3, 0.4])
    state, total = start("counts", encode(pd.DataFrame(X)), y, 2, 0), 0.0
    for model in (2, 0, 1):
        new = state.add(model)
        total += (new.terms - state.terms).mean()
        state = new
    assert total == pytest.approx(mutual_information(X, y, "counts"), abs=1e-12)


def test_shrinking_uses_the_james_stein_intensity():
    rng = np.random.default_rng(5)
    y = rng.integers(2, size=100)
    X = noisy(rng, y, [0.3, 0.3])
    state = Shrunk(X, y).add(0).add(1)
    share = np.zeros((2, 4))
    np.add.at(share, (y, X @ [2, 1]), 0.01)
    given_y = [np.array([[(X[y == k, j] == a).mean() for a in (0, 1)] for k in (0, 1)]) for j in (0, 1)]
    target = np.array(
        [[(y == k).mean() * given_y[0][k, a] * given_y[1][k, b] for a in (0, 1) for b in (0, 1)] for k in (0, 1)]
    )
    weight = (1 - (share**2).sum()) / (99 * ((target - share) ** 2).sum())
    joint = min(1.0, weight) * target + max(0.0, 1 - weight) * share
    bits = (joint * np.log2(joint / (joint.sum(1, keepdims=True) * joint.sum(0)))).sum()
    assert state.terms.mean() == pytest.approx(bits, abs=1e-12)


def test_missing_answers_are_an_answer_of_their_own():
    y = np.arange(400) % 2
    X = np.where(y == 1, "yes", None)[:, None]  # silent on one class: silence tells everything
    for estimator in ESTIMATORS:
        assert mutual_information(X, y, estimator) > 0.95


def test_folds_spread_every_class_evenly_and_repeat():
    y = np.array([0] * 40 + [1] * 13)
    fold = folds_of(y, 0)
    assert (fold == folds_of(y, 0)).all()
    assert (fold != folds_of(y, 1)).any()
    for k in (0, 1):
        assert np.ptp(np.bincount(fold[y == k], minlength=4)) <= 1


def test_beyond_the_regime_of_an_estimator_it_refuses_and_says_how_biased_it_would_be(monkeypatch):
    rng = np.random.default_rng(6)
    y = np.arange(60) % 2
    with pytest.raises(
        InputError, match=r"4 models have 16 possible tuples .* by up to 0.18 bits.*estimator='variational'"
    ):
        mutual_information(noisy(rng, y, [0.3] * 5), y, "counts")
    monkeypatch.setattr("fairtrial.evaluation.ensemble_selection.information.MOST_CELLS", 100)
    with pytest.raises(InputError, match=r"6 models .* fewer models"):
        mutual_information(noisy(rng, y, [0.3] * 8), y, "shrunk")


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        ([["a"]] * 19, ["a", "b"] * 9 + ["a"], r"19 items are too few for 2 classes.*0\.04 bits.*at least 20"),
        ([["a"]] * 40, ["a"] * 40, "every label is 'a'"),
        ([["a"]] * 40, ["a", None] * 20, "20 of 40 labels are missing"),
        ([["a"]] * 40, ["a", "b"] * 30, "answers to 40 items and 60 labels"),
        (["a"] * 40, ["a", "b"] * 20, "1 dimensions"),
        ([["a"]] * 40, ["a", 1] * 20, "several types"),
        ([["a"]] * 30 + [[None]] * 31, ["a", "b"] * 30 + ["a"], "no answer to 51% of the items"),
    ],
)
def test_bad_tables_are_refused(X, y, message):
    with pytest.raises(InputError, match=message):
        mutual_information(X, y)


def test_an_unknown_estimator_is_named():
    with pytest.raises(UnknownNameError, match="there is no estimator 'knn'"):
        mutual_information([[0], [1]] * 20, [0, 1] * 20, "knn")


def test_entropy_and_classes():
    assert entropy(np.array([0, 0, 1, 1])) == 1.0
    names, codes = classes_of(["b", "a", "b"])
    assert (names.tolist(), codes.tolist()) == (["a", "b"], [1, 0, 1])
