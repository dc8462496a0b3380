import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests

from fairtrial.errors import InputError
from fairtrial.stats import (
    SplitScores,
    compare,
    holm,
    interval,
    mean_interval,
    paired_gain,
    rope_probability,
    sign_flip_p,
)


def two_tables(seed=0, shift=0.0, difference=0.3):
    rng = np.random.default_rng(seed)
    tests = [fold for _ in range(4) for fold in np.array_split(rng.permutation(50), 5)]
    hard = 3 * rng.normal(size=50)
    a = [hard[t] + difference + 0.2 * rng.normal(size=10) for t in tests]
    b = [hard[t] + 0.2 * rng.normal(size=10) for t in tests]
    luck = shift * rng.normal(size=(20, 1))
    return SplitScores.from_arrays(tests, a + luck), SplitScores.from_arrays(tests, b + luck)


VECTORS = (np.array([0.9, 0.8, 0.85, 0.95, 0.7, 0.8]), np.array([0.7, 0.75, 0.7, 0.85, 0.72, 0.6]))


@pytest.mark.parametrize("pair", [two_tables(), VECTORS, (two_tables()[0], two_tables()[0])])
def test_comparing_a_candidate_with_itself_has_zero_difference_and_width_and_is_undecided(pair):
    verdict = compare(pair[0], pair[0], higher_is_better=True)
    assert (verdict.difference, verdict.low, verdict.high) == (0.0, 0.0, 0.0)
    assert verdict.state == "UNDECIDED"
    assert compare(pair[0], pair[0], higher_is_better=True, margin=0.1).state == "FAILS"


@pytest.mark.parametrize("variance", ["design", "nadeau_bengio", "independent"])
@pytest.mark.parametrize("anytime", [False, True])
def test_swapping_roles_negates(variance, anytime):
    a, b = two_tables()
    kwargs = {"higher_is_better": True, "variance": variance, "anytime": anytime}
    one, other = compare(a, b, **kwargs), compare(b, a, **kwargs)
    assert (one.difference, one.low, one.high) == pytest.approx((-other.difference, -other.high, -other.low), rel=1e-12)
    assert {one.state, other.state} == {"HOLDS", "FAILS"}
    lower = compare(b, a, **{**kwargs, "higher_is_better": False})
    assert lower.difference == one.difference


def test_the_same_shift_of_a_cell_for_both_changes_nothing():
    plain = compare(*two_tables(), higher_is_better=True)
    shifted = compare(*two_tables(shift=5.0), higher_is_better=True)
    assert plain.state == shifted.state
    for name in ("difference", "low", "high", "variance", "df", "p_value"):
        assert getattr(plain, name) == pytest.approx(getattr(shifted, name), rel=1e-9)


@pytest.mark.parametrize("margin", [-1.0, 0.0, 0.29, 0.3, 0.31, 1.0])
def test_state_p_value_and_interval_agree_at_every_margin(margin):
    verdict = compare(*two_tables(), higher_is_better=True, margin=margin)
    expected = "HOLDS" if verdict.low > margin else "FAILS" if verdict.high < margin else "UNDECIDED"
    assert verdict.state == expected
    assert (verdict.p_value <= 0.05) == (expected != "UNDECIDED")


def test_vectors_are_compared_by_the_paired_t_test():
    verdict = compare(*VECTORS, higher_is_better=True)
    assert verdict.p_value == pytest.approx(scipy.stats.ttest_rel(*VECTORS).pvalue)
    assert verdict.sample_gain == pytest.approx(6)
    assert verdict.cells == 6


def test_paired_gain_is_unpaired_over_paired_variance():
    a, b = VECTORS
    expected = (a.var(ddof=1) + b.var(ddof=1)) / (a - b).var(ddof=1)
    assert paired_gain(a, b) == pytest.approx(expected)
    assert compare(a, b, higher_is_better=False).paired_gain == pytest.approx(expected)
    a, b = two_tables()
    expected = (interval(a).variance + interval(b).variance) / interval(a.minus(b)).variance
    assert compare(a, b, higher_is_better=True).paired_gain == pytest.approx(expected)
    assert expected > 50  # the samples' difficulty cancels
    assert paired_gain([1.0, 2.0], [0.0, 1.0]) == np.inf
    assert np.isnan(paired_gain([1.0, 1.0], [0.0, 0.0]))


def test_an_anytime_verdict_needs_a_declared_variance():
    with pytest.raises(InputError, match="explicit variance"):
        compare(*VECTORS, higher_is_better=True, anytime=True)


def test_candidates_must_be_alike():
    with pytest.raises(InputError, match="give both alike"):
        compare(two_tables()[0], VECTORS[0], higher_is_better=True)
    with pytest.raises(InputError, match="6 and 5 cells"):
        compare(VECTORS[0], VECTORS[1][:5], higher_is_better=True)


def test_printing_a_verdict():
    assert str(compare(*VECTORS, higher_is_better=True)).startswith("HOLDS: +0.1133 [")
    assert str(compare([1.0, 1.0], [0.5, 0.5], higher_is_better=True)).endswith("(95%, 2 cells; no variance seen)")


# --- sign flips ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9), st.sampled_from([0.0, 1.0, 0.5]))
@settings(max_examples=60, deadline=None)
def test_sign_flip_p_enumerates_all_patterns(differences, margin):
    d = np.array(differences, dtype=float) - margin
    sums = [abs(np.dot(signs, d)) for signs in itertools.product([-1, 1], repeat=len(d))]
    assert sign_flip_p(differences, margin) == pytest.approx(np.mean(np.array(sums) >= abs(d.sum()) - 1e-9))


def test_sign_flip_p_is_scipys_permutation_test():
    d = np.random.default_rng(0).normal(0.4, 1, 12)
    scipys = scipy.stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    assert sign_flip_p(d) == pytest.approx(scipys.pvalue)


def test_many_cells_are_flipped_at_random_and_repeat_by_seed():
    d = np.random.default_rng(0).normal(0.3, 1, 40)
    assert sign_flip_p(d) == sign_flip_p(d)
    assert sign_flip_p(d) == pytest.approx(scipy.stats.ttest_1samp(d, 0).pvalue, abs=0.01)
    assert sign_flip_p(np.ones(40)) == 1 / 20_001


def test_sign_flip_p_of_dependent_cells_is_not_given():
    assert compare(*two_tables(), higher_is_better=True).sign_flip_p is None
    assert compare(*VECTORS, higher_is_better=True).sign_flip_p is not None
    with pytest.raises(InputError, match="finite differences"):
        sign_flip_p([])


# --- the correlated t posterior ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 3])
def test_baycomps_correlated_t_posterior_is_ours_for_nadeau_bengio(runs):
    from baycomp.single import CorrelatedTTest

    rng, folds = np.random.default_rng(0), 10
    x, y = rng.normal(0.8, 0.05, folds * runs), rng.normal(0.82, 0.05, folds * runs)
    mean, variance, df = CorrelatedTTest.compute_statistics(x, y, runs)
    one = mean_interval(y - x, variance="nadeau_bengio", n_test=1, n_train=folds - 1)
    assert (one.mean, one.variance, one.df) == pytest.approx((mean, variance, df))
    assert rope_probability(one, 0.03) == pytest.approx(CorrelatedTTest.probs(x, y, 0.03, runs)[1])


def test_rope_probability_without_variance():
    assert rope_probability(mean_interval([0.01] * 3, exact=True), 0.02) == 1.0
    assert rope_probability(mean_interval([0.01] * 3, exact=True), 0.001) == 0.0
    assert np.isnan(rope_probability(mean_interval([0.01] * 3), 0.02))
    assert compare(*VECTORS, higher_is_better=True, rope=0.2).rope_probability > 0.5
    with pytest.raises(InputError, match="negative"):
        rope_probability(mean_interval([0.01, 0.02]), -1)


# --- Holm ------------------------------------------------------------------------------------------------------------

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(P_VALUES, st.sampled_from([0.9, 0.95, 0.99]))
@settings(max_examples=15, deadline=None)
def test_holm_rejects_what_statsmodels_rejects(p, level):
    expected = multipletests(p, alpha=1 - level, method="holm")[0]
    np.testing.assert_array_equal(holm(p, level)[0], expected)


@given(P_VALUES)
@settings(max_examples=100, deadline=None)
def test_a_claim_is_rejected_exactly_if_its_p_value_passes_at_its_printed_level(p):
    rejected, levels = holm(p, 0.95)
    alpha = 1 - levels
    p = np.array(p)
    clear = np.abs(p - alpha) > 1e-12
    np.testing.assert_array_equal(rejected[clear], (p <= alpha)[clear])


def test_levels_of_the_ranks():
    rejected, levels = holm([0.9, 0.001, 0.02, 0.012], 0.95)
    np.testing.assert_array_equal(rejected, [False, True, True, True])
    np.testing.assert_allclose(levels, [0.95, 1 - 0.05 / 4, 1 - 0.05 / 2, 1 - 0.05 / 3])
    rejected, levels = holm([0.9, 0.001, 0.04, 0.02], 0.95)
    np.testing.assert_array_equal(rejected, [False, True, False, False])
    np.testing.assert_allclose(levels, [1 - 0.05 / 3, 1 - 0.05 / 4, 1 - 0.05 / 3, 1 - 0.05 / 3])


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_printed_interval_never_disagrees_with_the_state_of_its_claim(seed, anytime):
    rng = np.random.default_rng(seed)
    claims = [
        mean_interval(rng.normal(rng.normal(), 1, size=rng.integers(3, 15)), anytime=anytime)
        for _ in range(rng.integers(1, 8))
    ]
    rejected, levels = holm([one.p_value(0.0) for one in claims], 0.95)
    for one, holds, level in zip(claims, rejected, levels, strict=True):
        assert holds == (one.state(0.0, level) != "UNDECIDED")


def test_holm_of_nothing_and_of_nonsense():
    assert [len(x) for x in holm([])] == [0, 0]
    assert not holm([np.nan])[0].any()
    with pytest.raises(InputError, match="from 0 to 1"):
        holm([1.5])
    with pytest.raises(InputError, match="between 0 and 1"):
        holm([0.5], 95)
