import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError
from fairtrial.stats import (
    Components,
    SplitScores,
    StopWhenFlat,
    design_variance,
    sample_gain,
    variance_components,
)
from fairtrial.stats.components import Overlap
from fairtrial.stats.moments import moments_of_design


def random_splits(rng, n, m, k):
    orders = [rng.permutation(n) for _ in range(k)]
    return [(order[m:], order[:m]) for order in orders]


def k_fold_splits(rng, n, folds, passes):
    tests = [fold for _ in range(passes) for fold in np.array_split(rng.permutation(n), folds)]
    return [(np.setdiff1d(np.arange(n), test), test) for test in tests]


def moments_of_splits(splits, c, kappa=1.0, n=100):
    overlap = Overlap(n)
    for train, test in splits:
        overlap.add(test, train)
    return moments_of_design(overlap, c, kappa, 0.0)


def test_splits_that_share_nothing_gain_their_number():
    rng = np.random.default_rng(0)
    for k in (1, 2, 7, 30):
        splits = random_splits(rng, 100, 20, k)
        assert design_variance(splits, Components(1.0, 0.0, 0.0)) == pytest.approx(1 / k)
        if k > 1:
            assert moments_of_splits(splits, Components(1.0, 0.0, 0.0)).gain == pytest.approx(k, rel=1e-12)


def test_gain_of_thirty_splits_correlated_by_a_fifth():
    gain = sample_gain(SplitScores.from_folds(np.random.default_rng(0).normal(size=30), n_test=20, n_train=80))
    assert gain.value == pytest.approx(4.4117647, abs=1e-7)
    assert gain.value * (1 + gain.ahead[np.inf]) == pytest.approx(5.0)
    assert gain.correlation == pytest.approx(0.2)
    assert gain.ahead[5] == pytest.approx((35 / (1 + 34 * 0.2)) / (30 / (1 + 29 * 0.2)) - 1)


def test_independent_cells_gain_without_end():
    gain = sample_gain(np.random.default_rng(0).normal(size=8))
    assert gain.value == pytest.approx(8)
    assert gain.ahead[np.inf] == np.inf
    assert gain.ahead[8 if 8 in gain.ahead else 10] == pytest.approx(10 / 8)
    assert gain.correlation == 0


@pytest.mark.parametrize("kind", ["random", "k-fold"])
@pytest.mark.parametrize("further", [1, 5, 12])
def test_expected_variance_of_further_splits_is_the_mean_over_their_index_sets(kind, further):
    rng, c = np.random.default_rng(0), Components(0.1, 2.0, 3.0)
    if kind == "random":
        seen = random_splits(rng, 60, 12, 7)
        plans = [random_splits(rng, 60, 12, further) for _ in range(400)]
    else:
        seen = k_fold_splits(rng, 60, 5, 2)
        plans = [k_fold_splits(rng, 60, 5, 3)[:further] for _ in range(400)]
    expected = moments_of_splits(seen, c, n=60).further(further)
    simulated = [design_variance(seen + plan, c) for plan in plans]
    assert np.mean(simulated) == pytest.approx(expected, rel=2e-3)


def test_gain_ahead_in_the_middle_of_a_pass_counts_its_disjoint_folds():
    rng, c = np.random.default_rng(0), Components(0.0, 2.0, 3.0)
    whole = [k_fold_splits(rng, 60, 5, 3) for _ in range(400)]
    expected = np.mean([moments_of_splits(splits[:7], c, n=60).further(3) for splits in whole])
    assert np.mean([design_variance(splits[:10], c) for splits in whole]) == pytest.approx(expected, rel=5e-3)


def test_remaining_gain_is_the_limit_of_many_splits():
    splits = random_splits(np.random.default_rng(0), 60, 12, 7)
    m = moments_of_splits(splits, Components(0.1, 2.0, 3.0), n=60)
    assert m.gain_ahead(np.inf) == pytest.approx(m.gain_ahead(10**7), rel=1e-4)


def test_gain_of_scores_that_do_not_vary_is_unknown():
    gain = sample_gain(SplitScores.from_arrays([[0, 1], [2, 3]], np.ones((2, 2))))
    assert np.isnan(gain.value)
    assert np.isnan(gain.correlation)


def test_printing_a_gain():
    gain = sample_gain(SplitScores.from_folds([0.8, 0.9, 0.7, 0.8], 20, 80))
    assert str(gain).startswith("sample gain 2.5 (splits correlate 0.2; 1 more: +")


def test_ahead_counts_splits():
    with pytest.raises(InputError, match="positive whole numbers"):
        sample_gain([1.0, 2.0], ahead=(1.5,))


# --- stopping --------------------------------------------------------------------------------------------------------


def stop_after(stop, splits, score):
    for k, (train, test) in enumerate(splits, start=1):
        if stop.update(train, test, score(test)):
            return k
    return None


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=25, deadline=None)
def test_running_sums_give_the_gain_of_the_whole_table(seed, k_fold):
    rng = np.random.default_rng(seed)
    splits = k_fold_splits(rng, 40, 4, 3) if k_fold else random_splits(rng, 40, 10, 12)
    hard = rng.normal(size=40)
    scores = [hard[test] + rng.normal(size=10) + 1e3 for _, test in splits]
    stop = StopWhenFlat(min_gain=1e-9, min_splits=6)
    for split, values in zip(splits, scores, strict=True):
        stop.update(*split, values)
    table = SplitScores.from_arrays([test for _, test in splits], scores, [train for train, _ in splits])
    assert len(stop.gains) == 7
    assert stop.gains[-1] == pytest.approx(sample_gain(table).ahead[5], rel=1e-7)


def test_planned_index_sets_are_evaluated_exactly():
    rng = np.random.default_rng(0)
    plan = k_fold_splits(rng, 40, 4, 4)
    scores = [rng.normal(size=10) for _ in plan]
    stop = StopWhenFlat(min_gain=1e-9, min_splits=6, plan=plan)
    for split, values in zip(plan[:9], scores, strict=False):
        stop.update(*split, values)
    seen = SplitScores.from_arrays([t for _, t in plan[:9]], scores[:9], [t for t, _ in plan[:9]])
    c = variance_components(seen)
    assert stop.gains[-1] == pytest.approx(design_variance(plan[:9], c) / design_variance(plan[:14], c) - 1, rel=1e-9)


def test_it_stops_at_two_looks_in_a_row_below_the_least_gain():
    rng = np.random.default_rng(0)
    hard = rng.normal(size=50)
    stop = StopWhenFlat(min_gain=0.2)
    k = stop_after(stop, random_splits(rng, 50, 10, 100), lambda test: hard[test])
    assert k is not None
    assert max(stop.gains[-2:]) < 0.2
    assert all(max(pair) >= 0.2 for pair in zip(stop.gains[:-2], stop.gains[1:-1], strict=True))


def test_a_learner_with_its_own_noise_is_worth_more_splits():
    rng = np.random.default_rng(0)
    hard = rng.normal(size=50)
    splits = random_splits(rng, 50, 10, 100)
    steady = stop_after(StopWhenFlat(), splits, lambda test: hard[test])
    noisy = stop_after(StopWhenFlat(), splits, lambda test: hard[test] + 2 * rng.normal())
    assert noisy > steady


def test_it_ends_with_the_budget():
    rng = np.random.default_rng(0)
    stop = StopWhenFlat(min_gain=0.0, max_splits=8)
    assert stop_after(stop, random_splits(rng, 50, 10, 20), lambda test: rng.normal(size=len(test))) == 8


def test_no_look_before_a_sample_has_been_tested_twice():
    rng = np.random.default_rng(0)
    stop = StopWhenFlat(min_gain=10.0, min_splits=2)
    assert stop_after(stop, k_fold_splits(rng, 40, 10, 2), lambda test: rng.normal(size=len(test))) == 12


def test_scores_that_do_not_vary_leave_nothing_to_gain():
    assert stop_after(StopWhenFlat(), random_splits(np.random.default_rng(0), 50, 10, 20), np.ones_like) == 7


def test_sample_numbers_may_grow():
    rng = np.random.default_rng(0)
    splits = random_splits(rng, 40, 10, 8)
    scores = [rng.normal(size=10) for _ in splits]
    shifted = [(train[train < 20 + 3 * k], test) for k, (train, test) in enumerate(splits)]
    stop = StopWhenFlat(min_gain=1e-9)
    for split, values in zip(shifted, scores, strict=True):
        stop.update(*split, values)
    table = SplitScores.from_arrays([t for _, t in shifted], scores, [t for t, _ in shifted], n=40)
    assert stop.gains[-1] == pytest.approx(sample_gain(table).ahead[5], rel=1e-9)


@pytest.mark.parametrize("bad", [{"ahead": 0}, {"min_splits": 1}, {"min_splits": 9, "max_splits": 8}])
def test_a_rule_that_cannot_run_is_refused(bad):
    with pytest.raises(InputError, match="min_splits <= max_splits"):
        StopWhenFlat(**bad)


def test_scores_must_be_finite_and_fit_their_test_set():
    stop = StopWhenFlat()
    with pytest.raises(InputError, match="split 0: 1 scores for 2 test samples"):
        stop.update([0], [1, 2], [1.0])
    with pytest.raises(InputError, match="score nan at split 0, sample 2"):
        stop.update([0], [1, 2], [1.0, np.nan])


def test_seeds_of_a_split_never_make_its_gain_less_than_one():
    """Ten seeds of each of five folds tell more than one run, and what they leave to gain is not negative."""
    rng = np.random.default_rng(0)
    tests = [np.arange(12 * k, 12 * k + 12) for k in range(5)] * 10
    gains = []
    for _ in range(20):
        scores = SplitScores.from_arrays(tests, [rng.standard_normal(12) for _ in tests], n=60, seeds=list(range(50)))
        gain = sample_gain(scores)
        gains.append(gain.value)
        assert gain.ahead[np.inf] >= 0
    assert np.mean(gains) > 3


@pytest.mark.parametrize("kappa", [-1.0, np.nan, np.inf])
def test_a_kappa_that_cannot_be_is_refused(kappa):
    scores = SplitScores.from_arrays([[0, 1], [2, 3]], [[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(InputError, match="kappa"):
        sample_gain(scores, kappa=kappa)


def test_scores_that_do_not_vary_have_no_gain_and_say_so():
    scores = SplitScores.from_arrays([[0, 1], [2, 3]], [[1.0, 1.0], [1.0, 1.0]])
    assert "no variance seen" in str(sample_gain(scores))
