"""The baselines against brute-force twins and, where they are installed, the peers themselves."""

import itertools
import sys

import numpy as np
import pytest
from scipy.stats import f as f_distribution
from scipy.stats import norm

from fairtrial.errors import InputError, MissingExtraError
from fairtrial.evaluation.sample_gain.baselines import (
    almost_stochastic_order,
    five_by_two_f_test,
    nested_cross_validation,
    stratified_bootstrap,
    two_on_single,
)
from fairtrial.stats import mean_interval

RNG = np.random.default_rng(0)


def mean_model(y):
    return lambda splits: [-((y[test] - y[train].mean()) ** 2) for train, test in splits]


@pytest.mark.parametrize(("n", "folds", "repeats"), [(60, 5, 3), (47, 4, 2)])
def test_nested_cross_validation_is_its_authors_algorithm(n, folds, repeats):
    y = np.random.default_rng(n).standard_t(3, size=n)
    asked = []

    def score(splits):
        asked.extend(splits)
        return mean_model(y)(splits)

    one = nested_cross_validation(score, n, folds=folds, repeats=repeats)
    assert len(asked) == repeats * folds * (folds + 1) // 2
    by_test = {tuple(sorted(test)): test for _, test in asked}
    assert all(not set(train) & set(test) for train, test in asked)
    # The twin takes the partitions from the splits asked for and loops over folds as the paper's algorithm does.
    squares, inner_errors, outer_errors = [], [], []
    per_repeat = folds * (folds + 1) // 2
    for r in range(repeats):
        parts = [test for _, test in asked[r * per_repeat : (r + 1) * per_repeat] if len(test) == n // folds]
        assert sorted(np.concatenate(parts)) == sorted(set(np.concatenate(parts)))
        everyone = np.concatenate(parts)
        for k in range(folds):
            outer = (y[parts[k]] - y[np.setdiff1d(everyone, parts[k])].mean()) ** 2
            inner = []
            for j in range(folds):
                if j != k:
                    rest = np.setdiff1d(everyone, np.concatenate([parts[j], parts[k]]))
                    inner.append((y[parts[j]] - y[rest].mean()) ** 2)
            squares.append((np.mean(inner) - outer.mean()) ** 2 - outer.var(ddof=1) / len(outer))
            inner_errors.append(np.concatenate(inner))
            outer_errors.append(outer)
    naive = np.concatenate(inner_errors).var(ddof=1) / n
    variance = np.clip(np.mean(squares) * (folds - 1) / folds, naive, folds * naive)
    assert one.mean == pytest.approx(-np.mean(outer_errors))
    assert one.variance == pytest.approx(variance)
    half = norm.ppf(0.975) * np.sqrt(variance)
    assert (one.low, one.high) == pytest.approx((one.mean - half, one.mean + half))
    assert len(by_test) > 0


def test_nested_cross_validation_refuses_what_makes_no_folds():
    for bad in ({"folds": 2}, {"repeats": 0}, {"folds": 8}):
        with pytest.raises(InputError, match="give a whole number"):
            nested_cross_validation(mean_model(np.zeros(15)), 15, **bad)


def test_the_f_test_is_alpaydins():
    d = RNG.normal(0.1, 0.1, size=(5, 2))
    result = five_by_two_f_test(d)
    statistic = sum(x**2 for x in d.flat) / (2 * sum((a - (a + b) / 2) ** 2 + (b - (a + b) / 2) ** 2 for a, b in d))
    assert result.statistic == pytest.approx(statistic)
    assert result.p_value == pytest.approx(f_distribution.sf(statistic, 10, 5))
    assert five_by_two_f_test(np.zeros((5, 2))).p_value == 1
    assert five_by_two_f_test(np.ones((5, 2))).p_value == 0
    with pytest.raises(InputError, match=r"\(5, 2\) differences"):
        five_by_two_f_test(np.zeros(10))


def test_the_f_test_keeps_its_level_for_independent_gaussian_differences():
    rejected = [five_by_two_f_test(d).p_value < 0.05 for d in RNG.normal(size=(3000, 5, 2))]
    assert np.mean(rejected) < 0.05  # the five numerators are not independent of the variances: it is conservative


def test_the_stratified_bootstrap_resamples_runs_within_tasks():
    shifted = RNG.normal(size=(12, 1)) + 100 * np.arange(3)  # tasks differ hugely, and never mix
    low, high = stratified_bootstrap(shifted, draws=20_000)
    spread = shifted[:, 0].std() / np.sqrt(12 * 3)
    assert high - low == pytest.approx(2 * 1.96 * spread, rel=0.05)
    with pytest.raises(InputError, match=r"\(runs, tasks\) matrix"):
        stratified_bootstrap(np.zeros(5))


def test_rliables_intervals_are_ours():
    library = pytest.importorskip("rliable.library")
    x = RNG.normal(size=(10, 4))
    _, theirs = library.get_interval_estimates({"x": x}, lambda scores: np.array([scores.mean()]), reps=20_000)
    np.testing.assert_allclose(stratified_bootstrap(x, draws=20_000), theirs["x"][:, 0], atol=0.02)


@pytest.mark.parametrize("runs", [1, 4])
def test_baycomps_posterior_is_nadeau_and_bengios(runs):
    pytest.importorskip("baycomp")
    a, b = RNG.normal(0.8, 0.05, size=(2, 5 * runs))
    worse, better = two_on_single(a, b, runs=runs)
    one = mean_interval(a - b, variance="nadeau_bengio", n_test=20, n_train=80)
    assert worse + better == pytest.approx(1)
    assert worse == pytest.approx(one.p_value(0, "greater"))
    assert len(two_on_single(a, b, runs=runs, rope=0.01)) == 3


def test_without_a_peer_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "baycomp", None)
    monkeypatch.setitem(sys.modules, "deepsig", None)
    with pytest.raises(MissingExtraError, match="baycomp is not installed"):
        two_on_single([1, 2], [1, 2])
    with pytest.raises(InputError, match="pip install deepsig"):
        almost_stochastic_order([1, 2], [1, 2])


@pytest.mark.slow
def test_almost_stochastic_order_of_a_dominating_candidate():
    pytest.importorskip("deepsig")
    a = RNG.normal(size=10)
    assert almost_stochastic_order(a + 5, a) < 0.05
    assert almost_stochastic_order(a, a + 5) > 0.95


def test_seeds_decide_the_draws():
    x = RNG.normal(size=(6, 2))
    assert stratified_bootstrap(x, seed=1) == stratified_bootstrap(x, seed=1) != stratified_bootstrap(x, seed=2)
    y = RNG.normal(size=40)
    ones = [nested_cross_validation(mean_model(y), 40, folds=4, repeats=1, seed=seed).mean for seed in (1, 1, 2)]
    assert ones[0] == ones[1] != ones[2]
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    nested_cross_validation(mean_model(y), 40, folds=4, repeats=1)
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_pairs_of_folds_are_each_left_out_once():
    n, folds = 20, 4
    asked = []

    def score(splits):
        asked.extend(splits)
        return [np.zeros(len(test)) + np.arange(len(test)) for _, test in splits]

    nested_cross_validation(score, n, folds=folds, repeats=1)
    parts = [frozenset(test) for _, test in asked if len(test) == 5]
    pairs = {frozenset(test) for _, test in asked if len(test) == 10}
    assert pairs == {a | b for a, b in itertools.combinations(parts, 2)}
