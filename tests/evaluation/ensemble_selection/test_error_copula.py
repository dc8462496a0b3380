import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri
from scipy.stats import multivariate_normal
from sklearn.exceptions import NotFittedError

from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection import (
    ErrorCopula,
    equicorrelated_floor,
    equicorrelated_information,
    equicorrelated_majority,
)
from fairtrial.evaluation.ensemble_selection import copula as module
from fairtrial.evaluation.ensemble_selection.confusion import Confusion
from fairtrial.evaluation.ensemble_selection.simulation import DISTRACTED, simulate


def errors(seed, n, models, error, correlation):
    rng = np.random.default_rng(seed)
    common = math.sqrt(correlation) * rng.standard_normal((n, 1))
    return common + math.sqrt(1 - correlation) * rng.standard_normal((n, models)) < ndtri(error)


@pytest.mark.parametrize(
    ("error", "correlation", "floor"),
    [(0.2, 0.5, 0.116978), (0.3, 0.3, 0.169178), (0.1, 0.8, 0.075955), (0.2, 0.1, 0.003890)],
)
def test_floors_of_the_specification(error, correlation, floor):
    assert equicorrelated_floor(error, correlation) == pytest.approx(floor, abs=1e-6)


def test_information_limits_of_the_specification():
    assert equicorrelated_information(0.2, 0.5) == pytest.approx(0.603350, abs=1e-6)
    assert equicorrelated_information(0.3, 0.3) == pytest.approx(0.458101, abs=1e-6)
    assert equicorrelated_information(0.2, 1.0) == pytest.approx(0.278072, abs=1e-6)  # one model
    assert equicorrelated_information(0.2, 0.0) == 1.0
    assert equicorrelated_information(0.5, 0.3) == 0.0
    # The order of limits: short of 1 an infinity of models still tells how hard an item is.
    assert equicorrelated_information(0.2, 0.999) > 0.278072 + 0.05


def test_majorities_of_the_specification():
    found = [equicorrelated_majority(0.2, 0.5, models) for models in (5, 21, 101)]
    assert found == pytest.approx([0.1470, 0.1253, 0.1188], abs=1e-4)


@given(st.floats(0.001, 0.499), st.floats(0.01, 0.99), st.floats(0.001, 0.3))
def test_the_floor_rises_with_error_and_correlation(error, correlation, more):
    floor = equicorrelated_floor(error, correlation)
    assert floor <= equicorrelated_floor(error, min(1.0, correlation + more)) + 1e-15
    assert floor <= equicorrelated_floor(min(0.5, error + more), correlation) + 1e-15
    assert equicorrelated_floor(error, 1.0) == error
    assert equicorrelated_floor(error, 0.0) == 0.0


@settings(max_examples=20, deadline=None)
@given(st.floats(0.01, 0.49), st.floats(0.01, 0.99), st.integers(0, 200))
def test_the_floor_is_below_every_odd_majority_and_even_ones_equal_the_odd_before(error, correlation, half):
    odd = equicorrelated_majority(error, correlation, 2 * half + 1)
    assert equicorrelated_floor(error, correlation) <= odd + 1e-6
    assert equicorrelated_majority(error, correlation, 2 * half + 2) == pytest.approx(odd, abs=1e-12)
    assert equicorrelated_majority(error, correlation, math.inf) == equicorrelated_floor(error, correlation)


def test_a_majority_is_what_simulation_finds():
    wrong = errors(0, 200_000, 9, 0.3, 0.4).sum(1) > 4
    assert equicorrelated_majority(0.3, 0.4, 9) == pytest.approx(wrong.mean(), abs=4 * wrong.std() / math.sqrt(200_000))


def test_the_tetrachoric_correlation_is_recovered():
    copula = ErrorCopula().fit(errors(1, 20_000, 4, 0.25, 0.6))
    off = copula.correlation_[np.triu_indices(4, 1)]
    np.testing.assert_allclose(off, 0.6, atol=0.03)
    np.testing.assert_allclose((copula.loadings_**2).ravel(), 0.6, atol=0.03)


def test_of_one_stratum_the_correlation_makes_both_errors_as_frequent_as_observed():
    table = errors(2, 500, 2, 0.3, 0.5)
    copula = ErrorCopula().fit(table)
    cut = ndtri(table.mean(0))
    both = multivariate_normal(cov=copula.correlation_).cdf(cut)
    assert both == pytest.approx((table[:, 0] & table[:, 1]).mean(), abs=1e-5)


@given(st.floats(-2.5, 2.5), st.floats(-2.5, 2.5), st.floats(-0.98, 0.98))
@settings(max_examples=20, deadline=None)
def test_bivariate_probabilities_are_scipys(h, k, r):
    ours = module._both_below(*(np.array([x]) for x in (h, k, r)), np.polynomial.legendre.leggauss(48))[0]
    assert ours == pytest.approx(multivariate_normal(cov=[[1, r], [r, 1]]).cdf([h, k]), abs=1e-5)


def test_a_pair_that_never_errs_together_is_reported_as_bounded():
    table = np.zeros((100, 3), dtype=bool)
    table[:20, 0] = table[20:50, 1] = table[10:40, 2] = True
    copula = ErrorCopula().fit(table)
    assert copula.bounded_ == [(0, 1)]
    assert -1 < copula.correlation_[0, 1] < -0.5
    never = ErrorCopula().fit(np.column_stack([table, np.zeros(100, dtype=bool)]))
    assert (2, 3) in never.bounded_
    assert np.isfinite(never.floor())


def test_two_factors_find_two_families():
    rng = np.random.default_rng(3)
    answers, y = simulate(rng, 20_000, 2)
    copula = ErrorCopula().fit(answers != y[:, None], factors=2)
    off = copula.loadings_ @ copula.loadings_.T
    assert off[:6, :6][np.triu_indices(6, 1)] == pytest.approx(0.85, abs=0.04)
    assert off[6:, 6:][np.triu_indices(6, 1)] == pytest.approx(0.2, abs=0.06)
    assert off[:6, 6:] == pytest.approx(0, abs=0.06)
    assert copula.goodness_of_fit().trusted
    assert not ErrorCopula().fit(answers != y[:, None]).goodness_of_fit().trusted


def brute_floor(copula, prior):
    """The Bayes error by summing over votes, the factor integrated on a fine grid."""
    u = np.linspace(-8, 8, 4001)
    density = np.exp(-(u**2) / 2) / np.exp(-(u**2) / 2).sum()
    p = copula._errs(u[:, None])
    p = np.repeat(p, 2, axis=0) if len(p) == 1 else p
    total = 0.0
    models = p.shape[2]
    for votes in range(2**models):
        said = (votes >> np.arange(models)) & 1
        joint = [prior[k] * (np.where(said != k, p[k], 1 - p[k]).prod(1) @ density) for k in (0, 1)]
        total += min(joint)
    return total


@pytest.mark.parametrize("by_class", [False, True])
def test_the_floor_is_the_bayes_error_of_the_fitted_copula(by_class):
    rng = np.random.default_rng(4)
    answers, y = simulate(rng, 400, 2)
    answers = answers[:, 3:9]
    known = {"answers": answers, "y": y} if by_class else {}
    copula = ErrorCopula().fit(answers != y[:, None], **known)
    prior = np.bincount(y) / 400 if by_class else [0.5, 0.5]
    assert copula.floor() == pytest.approx(brute_floor(copula, prior), abs=1e-5)


@pytest.mark.slow
def test_drawing_answers_agrees_with_enumerating_them(monkeypatch):
    answers, y = simulate(np.random.default_rng(5), 500, 2)
    copula = ErrorCopula().fit(answers != y[:, None], factors=2, answers=answers, y=y)
    exact = copula.floor()
    weights, p = copula._given()
    drawn = module._drawn_floor(weights, p, copula.prior_, copula._confusion)
    assert drawn == pytest.approx(exact, abs=0.006)
    monkeypatch.setattr(module, "ENUMERATED", 3)  # the way of more than 20 models
    assert module._drawn_floor(weights, p, copula.prior_, copula._confusion) == pytest.approx(drawn, abs=1e-9)
    assert copula.floor() == pytest.approx(exact, abs=0.006)


def test_patterns_of_errors_have_the_probabilities_of_independence_given_the_factor():
    rng = np.random.default_rng(6)
    weights, p = np.array([0.3, 0.7]), rng.random((2, 5))
    table = module._chances(weights, p)
    assert table.sum() == pytest.approx(1)
    for pattern in (0, 5, 19, 31):
        errs = (pattern >> np.arange(5)) & 1
        assert table[pattern] == pytest.approx(weights @ np.where(errs, p, 1 - p).prod(1))
        assert module._chances(weights, p, errs[None])[0] == table[pattern]


def test_majority_and_simultaneous_errors_are_those_of_samples():
    copula = ErrorCopula().fit(errors(7, 400, 8, 0.3, 0.4))
    drawn = copula.sample(100_000)
    number = drawn.sum(1)
    wrong = (number > 4) + 0.5 * (number == 4)
    assert copula.majority_error() == pytest.approx(wrong.mean(), abs=0.005)
    np.testing.assert_allclose(drawn.mean(0), copula.error_, atol=0.01)
    expected = copula.goodness_of_fit().expected
    np.testing.assert_allclose(expected / 400, np.bincount(number, minlength=9) / 100_000, atol=0.006)
    assert (copula.sample(5, seed=3) == copula.sample(5, seed=3)).all()


def test_equal_models_have_the_closed_forms():
    copula = ErrorCopula().fit(errors(8, 20_000, 6, 0.2, 0.5))
    copula._threshold[:], copula.loadings_[:] = ndtri(0.2), math.sqrt(0.5)
    assert copula.majority_error(math.inf) == pytest.approx(equicorrelated_floor(0.2, 0.5), abs=1e-3)
    assert copula.majority_error(21) == pytest.approx(equicorrelated_majority(0.2, 0.5, 21), abs=1e-3)
    assert copula.majority_error() == pytest.approx(equicorrelated_majority(0.2, 0.5, 6), abs=1e-6)
    assert copula.equivalent_ == pytest.approx((0.2, 0.5), abs=1e-6)
    assert copula.information_limit() == pytest.approx(0.60335, abs=1e-4)


def test_of_four_classes_floor_and_majority_are_those_of_the_simulator():
    rng = np.random.default_rng(9)
    answers, y = simulate(rng, 4000, 4)
    answers = answers[:, 6:]
    copula = ErrorCopula().fit(answers != y[:, None], answers=answers, y=y)
    votes = np.stack([(answers == k).sum(1) for k in range(4)], 1)
    best = votes == votes.max(1, keepdims=True)
    observed = 1 - (best[np.arange(4000), y] / best.sum(1)).mean()
    assert copula._confusion.shared == pytest.approx(DISTRACTED, abs=0.05)
    assert copula.majority_error() == pytest.approx(observed, abs=0.015)
    alone = copula._confusion._replace(shared=0.0)  # each model's confusion alone does not know that errors agree
    assert module._drawn_majority(*copula._given(), copula.prior_, alone) < observed - 0.02
    assert copula.floor() < copula.majority_error()
    with pytest.raises(InputError, match="only the fitted models' majority"):
        copula.majority_error(11)


def test_the_likelihood_of_wrong_answers_sums_to_one_and_is_that_of_draws():
    rng = np.random.default_rng(11)
    own = rng.dirichlet(np.ones(3), size=(3, 3))
    own[:, range(3), range(3)] = 0
    own /= own.sum(2, keepdims=True)
    confusion = Confusion(own, own.mean(0), 0.6)
    said = np.array([[a, b, c] for a in (0, 2) for b in (0, 2) for c in (0, 2)])
    chance = np.exp(confusion.log_likelihood(1, said))
    assert chance.sum() == pytest.approx(1)
    drawn = confusion.draw(rng, np.full(40_000, 1))
    share = [(drawn == row).all(1).mean() for row in said]
    np.testing.assert_allclose(share, chance, atol=0.01)
    some = said.copy()
    some[:, 0] = 1  # the first model is right
    assert np.exp(confusion.log_likelihood(1, some[:4])).sum() == pytest.approx(1)


def test_missing_answers_are_errors_of_their_own_kind():
    answers, y = simulate(np.random.default_rng(10), 400, 2)
    said = answers[:, :5].astype(object)
    said[:40, 0] = None
    wrong = said != y[:, None]
    copula = ErrorCopula().fit(wrong, answers=said, y=y)
    assert copula._confusion.own.shape == (5, 2, 3)
    assert 0 < copula.floor() < wrong.mean(0).min()


@pytest.mark.slow
def test_the_interval_of_the_floor_covers_the_truth():
    truth = equicorrelated_majority(0.25, 0.5, 7)  # of equal models the majority is the best rule
    covered = [
        interval.low <= truth <= interval.high
        for interval in (ErrorCopula().fit(errors(seed, 300, 7, 0.25, 0.5)).floor_interval() for seed in range(30))
    ]
    assert sum(covered) >= 24


def test_a_true_copula_is_seldom_rejected():
    rejected = [not ErrorCopula().fit(errors(seed, 300, 6, 0.3, 0.4)).goodness_of_fit().trusted for seed in range(12)]
    assert sum(rejected) <= 1


@pytest.mark.parametrize(
    ("table", "how", "message"),
    [
        (np.zeros((50, 1)), {}, "errors of 1 models to 50 items"),
        (np.zeros((9, 3)), {}, "errors of 3 models to 9 items"),
        (np.full((50, 3), 2), {}, "no table of true and false"),
        (np.eye(50)[:, :3], {"factors": 3}, "factors=3"),
        (np.eye(50)[:, :3], {"y": [0, 1] * 25}, "answers and y belong together"),
    ],
)
def test_bad_errors_are_refused(table, how, message):
    with pytest.raises(InputError, match=message):
        ErrorCopula().fit(table, **how)


@pytest.mark.parametrize(("error", "correlation"), [(0.6, 0.5), (0.2, 1.5), (-0.1, 0.2), ("0.2", 0.5), (0.2, None)])
def test_what_is_no_error_or_no_correlation_is_refused(error, correlation):
    with pytest.raises(InputError):
        equicorrelated_floor(error, correlation)


@pytest.mark.parametrize("models", [2.5, 0, math.nan, "3", None, True])
def test_half_a_model_is_refused(models):
    with pytest.raises(InputError, match="whole number"):
        equicorrelated_majority(0.2, 0.5, models)


def test_errors_answers_and_labels_are_of_the_same_items():
    errors = np.zeros((12, 2))
    with pytest.raises(InputError, match="12 items and 11 labels"):
        ErrorCopula().fit(errors, answers=errors, y=[0, 1] * 5 + [0])
    with pytest.raises(InputError, match=r"errors \(12, 2\) and answers \(12, 3\)"):
        ErrorCopula().fit(errors, answers=np.zeros((12, 3)), y=[0, 1] * 6)


@pytest.mark.parametrize("method", ["floor", "floor_interval", "majority_error", "goodness_of_fit"])
def test_a_copula_is_fitted_first(method):
    with pytest.raises(NotFittedError, match="call fit first"):
        getattr(ErrorCopula(), method)()
