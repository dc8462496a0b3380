import math
import warnings

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.stats import (
    SplitScores,
    anytime_half_width,
    anytime_p_value,
    bootstrap,
    combine,
    interval,
    mean_interval,
    sample_gain,
    variance_components,
)

VALUES = np.array([0.3, -0.1, 0.5, 0.2, 0.4, 0.1, 0.25, 0.0, 0.35, 0.15])


def k_fold(rng, n, folds, passes):
    return [fold for _ in range(passes) for fold in np.array_split(rng.permutation(n), folds)]


def design_table(seed=0, n=60, folds=5, passes=4):
    rng = np.random.default_rng(seed)
    tests = k_fold(rng, n, folds, passes)
    hard = rng.normal(size=n)
    return SplitScores.from_arrays(tests, [hard[t] + rng.normal(size=len(t)) + 0.3 * rng.normal() for t in tests])


def crossed_table(rng, k, n, components=(0.2, 1.0, 1.0), mean=0.0):
    v_t, v_s, v_q = np.sqrt(components)
    score = mean + v_t * rng.normal(size=(k, 1)) + v_s * rng.normal(size=n) + v_q * rng.normal(size=(k, n))
    return SplitScores.from_arrays([np.arange(n)] * k, score)


# --- the fixed interval --------------------------------------------------------------------------------------------


def test_independent_cells_get_students_interval():
    one = mean_interval(VALUES, level=0.9)
    low, high = scipy.stats.t.interval(0.9, len(VALUES) - 1, VALUES.mean(), scipy.stats.sem(VALUES))
    assert (one.low, one.high) == pytest.approx((low, high), rel=1e-12)
    for side in ("two-sided", "greater", "less"):
        expected = scipy.stats.ttest_1samp(VALUES, 0.1, alternative=side).pvalue
        assert one.p_value(0.1, side) == pytest.approx(expected, rel=1e-10)


def test_nadeau_bengio_identity():
    x = VALUES / VALUES.std(ddof=1)  # S^2 = 1
    one = mean_interval(x, variance="nadeau_bengio", n_test=20, n_train=80)
    assert one.variance == pytest.approx(0.1 + 0.25)
    assert one.df == 9
    assert interval(SplitScores.from_folds(x, 20, 80)).variance == pytest.approx(0.35)


def test_nadeau_bengio_from_rows_derives_the_sizes_from_the_index_sets():
    table = design_table()
    s2 = table.means.var(ddof=1)
    assert interval(table, variance="nadeau_bengio").variance == pytest.approx(s2 * (1 / 20 + 12 / 48))


def test_degrees_of_freedom_follow_the_split_and_the_sample_parts():
    table = design_table()
    c = variance_components(table)
    one, tests = interval(table), [table.test(k) for k in range(20)]
    w, u = np.zeros(60), np.zeros(60)
    for test in tests:
        w[test] += 1 / len(test) / 20
        u[np.setdiff1d(np.arange(60), test)] += 1 / (60 - len(test)) / 20
    by_split = c.split / 20 + c.interaction * 20 / 12 / 400
    by_sample = c.sample * w @ w + c.interaction * (u @ u - 20 / 48 / 400)
    assert one.variance == pytest.approx(by_split + by_sample)
    assert one.df == pytest.approx(one.variance**2 / (by_split**2 / 19 + by_sample**2 / 59))


def test_crossed_runs_have_no_training_term():
    table = crossed_table(np.random.default_rng(0), 6, 40)
    c = variance_components(table)
    one = interval(table, variance="crossed")
    assert one.variance == pytest.approx(c.split / 6 + c.sample / 40 + c.interaction / 240)


def test_kappa_scales_the_training_term_and_is_printed():
    table = design_table()
    assert "kappa = 1 assumed, measured .4-2.2" in str(interval(table))
    v0, v1, v2 = (interval(table, kappa=kappa).variance for kappa in (0.0, 1.0, 2.0))
    assert v1 > v0
    assert v2 - v1 == pytest.approx(v1 - v0)


def test_groups_widen_the_interval_when_samples_of_a_group_agree():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(30), 5)
    tests = [np.flatnonzero(np.isin(group, fold)) for fold in k_fold(rng, 30, 5, 4)]
    hard = np.repeat(rng.normal(size=30), 5)
    table = SplitScores.from_arrays(tests, [hard[t] + 0.1 * rng.normal(size=len(t)) for t in tests])
    assert interval(table.by_group(group)).variance > 2 * interval(table).variance


def test_duplicating_every_split_leaves_the_interval_unchanged_and_raises_a_warning():
    table = design_table()
    tests = [table.test(k) for k in range(20)]
    scores = np.split(table.score, table.starts[1:-1])
    twice = SplitScores.from_arrays(tests * 2, list(scores) * 2)
    with pytest.warns(UserWarning, match="20 splits repeat others"):
        doubled = interval(twice)
    once = interval(table)
    assert (doubled.low, doubled.high) == pytest.approx((once.low, once.high), abs=1e-9)
    assert doubled.n_cells == 20


def test_the_default_variance_follows_what_is_known():
    table = design_table()
    assert interval(table).variance == interval(table, variance="design").variance
    folds = SplitScores.from_folds(VALUES, 20, 80)
    assert interval(folds).variance == interval(folds, variance="nadeau_bengio").variance
    assert interval(VALUES).variance == mean_interval(VALUES).variance


def test_runs_answering_the_same_items_declared_independent_are_noted():
    table = crossed_table(np.random.default_rng(0), 6, 40)
    assert "on these items" in interval(table, variance="independent").notes
    assert "on these items" not in interval(table, variance="crossed").notes


# --- the anytime interval ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.95, 0.99, 0.999])
def test_anytime_interval_contains_the_fixed_one_at_every_k(rho, level):
    k = np.arange(2, 500)
    ratio = (rho + (1 - rho) / 10) / (rho + (1 - rho) / k)
    assert (anytime_half_width(1.0, k - 1, ratio, level) > scipy.stats.t.ppf((1 + level) / 2, k - 1)).all()


@pytest.mark.parametrize("variance", ["design", "nadeau_bengio", "independent", "crossed"])
def test_anytime_interval_contains_the_fixed_one_in_every_variance_mode(variance):
    table = crossed_table(np.random.default_rng(1), 8, 30) if variance == "crossed" else design_table()
    fixed, anytime = (interval(table, variance=variance, anytime=flag) for flag in (False, True))
    assert anytime.low < fixed.low < fixed.high < anytime.high
    assert anytime.variance == fixed.variance


def test_anytime_formula_of_the_specification():
    k, level = 20, 0.95
    one = mean_interval(np.random.default_rng(0).normal(size=k), level=level, anytime=True)
    g = 1 + 10 * (k / 10)
    r = (g / (1 - level) ** 2) ** (1 / k)
    half = math.sqrt(one.variance * (k - 1) * (r - 1) / (1 - r / g))
    assert (one.low, one.high) == pytest.approx((one.mean - half, one.mean + half), rel=1e-10)
    x = (one.mean - 1.0) ** 2 / (one.variance * (k - 1))
    assert one.p_value(1.0) == pytest.approx(min(1, math.sqrt(g) * ((1 + x / g) / (1 + x)) ** (k / 2)), rel=1e-10)


def test_design_ratio_is_the_variance_at_ten_cells_over_the_present_one():
    assert mean_interval(VALUES[:5]).design_ratio == pytest.approx(0.5)
    one = mean_interval(VALUES[:5], variance="nadeau_bengio", n_test=20, n_train=80)
    assert one.design_ratio == pytest.approx((0.2 + 0.8 / 10) / (0.2 + 0.8 / 5))
    assert interval(design_table(passes=2), variance="design").design_ratio == pytest.approx(1.0)


def ever_rejected(x, variance, df, ratio, bound=0.0):
    """x (runs, looks): share of runs in which some look's anytime p-value is at most .05."""
    return np.mean((anytime_p_value(x - bound, variance, df, ratio) <= 0.05).any(axis=1))


@pytest.mark.parametrize("rho", [0.0, 0.2, 0.5])
def test_peeking_after_every_cell_rejects_a_true_null_at_most_at_the_level(rho):
    rng, runs, most = np.random.default_rng(0), 4000, 60
    cells = math.sqrt(rho) * rng.normal(size=(runs, 1)) + math.sqrt(1 - rho) * rng.normal(size=(runs, most))
    k = np.arange(1, most + 1)
    mean = np.cumsum(cells, axis=1) / k
    s2 = (np.cumsum(cells**2, axis=1) - k * mean**2)[:, 4:] / (k[4:] - 1)
    k, mean = k[4:], mean[:, 4:]  # looks start at 5 cells
    v = 1 / k + rho / (1 - rho)
    ratio = (rho + (1 - rho) / 10) / (rho + (1 - rho) / k)
    anytime = ever_rejected(mean, s2 * v, k - 1, ratio)
    assert anytime <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    fixed = np.mean((np.abs(mean) / np.sqrt(s2 * v) > scipy.stats.t.ppf(0.975, k - 1)).any(axis=1))
    assert fixed > 0.1  # what peeking with the fixed interval does


@pytest.mark.slow
def test_peeking_at_cross_validated_pairs_rejects_equal_algorithms_at_most_at_the_level():
    """Two nearest-mean classifiers on different, equally informative features: equal by symmetry."""
    rng, runs, n, rejected = np.random.default_rng(0), 400, 80, {"anytime": 0, "fixed": 0}
    for _ in range(runs):
        y = rng.integers(0, 2, n) * 2.0 - 1
        x = rng.normal(size=(n, 12)) + 0.3 * y[:, None]
        tests = [rng.permutation(n)[:16] for _ in range(30)]
        scores = []
        for test in tests:
            train = np.setdiff1d(np.arange(n), test)
            direction = x[train].T @ y[train]
            right = [(x[test][:, half] @ direction[half] * y[test] > 0) for half in (slice(6), slice(6, 12))]
            scores.append(right[0].astype(float) - right[1])
        table = SplitScores.from_arrays(tests, scores, n=n)
        looks = [table.take(range(k)) for k in range(5, 31)]
        for name, count in rejected.items():
            peeks = (interval(t, variance="design", anytime=name == "anytime").p_value(0.0) <= 0.05 for t in looks)
            rejected[name] = count + any(peeks)
    assert rejected["anytime"] / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert rejected["fixed"] > rejected["anytime"]


@pytest.mark.slow
@pytest.mark.parametrize("components", [(0.5, 0.0, 1.0), (0.1, 1.0, 1.0), (0.0, 1.0, 0.2)])
def test_peeking_at_crossed_runs_rejects_a_true_null_at_most_at_the_level(components):
    rng, runs, rejected = np.random.default_rng(0), 1000, 0
    for _ in range(runs):
        table = crossed_table(rng, 30, 25, components)
        looks = (interval(table.take(range(k)), variance="crossed", anytime=True) for k in range(5, 31))
        rejected += any(one.p_value(0.0) <= 0.05 for one in looks)
    assert rejected / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


# --- any level, any bound: the interval and the p-value agree ---------------------------------------------------------


def assert_agree(one, bound, level):
    low, high = one.at(level)
    p, alpha = one.p_value(bound), 1 - level
    if abs(p - alpha) > 1e-9:
        assert (not low <= bound <= high) == (p < alpha)
        assert (low > bound) == (2 * one.p_value(bound, "greater") < alpha)
        assert (high < bound) == (2 * one.p_value(bound, "less") < alpha)


def every_law():
    rng = np.random.default_rng(0)
    crossed = crossed_table(rng, 7, 30)
    binary = SplitScores.from_arrays([[0, 1, 2, 3]], [[1.0, 1.0, 0.0, 1.0]])
    ones = SplitScores.from_arrays([range(10), range(10, 20)], np.ones((2, 10)))
    for anytime in (False, True):
        yield mean_interval(VALUES, anytime=anytime)
        yield mean_interval(VALUES[:3], anytime=anytime)
        yield mean_interval(VALUES, variance="nadeau_bengio", n_test=20, n_train=80, anytime=anytime)
        yield interval(design_table(), variance="design", anytime=anytime)
        yield interval(crossed, variance="crossed", anytime=anytime)
        yield mean_interval([0.2] * 5, anytime=anytime)
        yield mean_interval([0.2] * 7, anytime=anytime)
        yield mean_interval([0.2] * 5, anytime=anytime, exact=True)
        yield interval(ones, variance="design", anytime=anytime)
        yield interval(ones.minus(ones), variance="design", anytime=anytime)
    yield interval(binary)
    yield bootstrap(rng.exponential(size=30))


LAWS = list(every_law())


@given(st.integers(0, len(LAWS) - 1), st.floats(-2, 2), st.floats(0.01, 0.9999))
@settings(max_examples=500, deadline=None)
def test_interval_and_p_value_agree_at_every_level_and_bound(which, bound, level):
    one = LAWS[which]
    assert_agree(one, bound, level)
    assert_agree(one, one.mean, level)
    assert_agree(one, one.mean + bound * math.sqrt(one.variance), level)


def test_state_follows_the_interval():
    one = mean_interval(VALUES)
    assert one.state(0.0) == "HOLDS"
    assert one.state(1.0) == "FAILS"
    assert one.state(one.mean) == "UNDECIDED"
    assert one.state(0.0, level=0.99999) == "UNDECIDED"


def test_two_cells_give_an_interval_but_no_verdict():
    one = mean_interval([1.0, 1.001])
    assert one.low > 0
    assert one.state(0.0) == "UNDECIDED"
    assert "two cells: an interval but no verdict" in one.notes


# --- zero variance -------------------------------------------------------------------------------------------------


def test_no_variance_seen_is_undecided():
    one = mean_interval([0.3] * 5)
    assert (one.low, one.high) == (-np.inf, np.inf)
    assert one.state(0.0) == "UNDECIDED"
    assert one.notes == ("no variance seen",)
    assert mean_interval([0.3] * 30, variance="nadeau_bengio", n_test=1, n_train=9).state(0.0) == "UNDECIDED"


def test_an_exact_metric_needs_no_variance():
    one = mean_interval([0.3] * 3, exact=True)
    assert one.state(0.0) == "HOLDS"
    assert one.p_value(0.0) == 0.0
    assert one.state(0.3) == "UNDECIDED"


@pytest.mark.parametrize("k", range(2, 12))
@pytest.mark.parametrize("level", [0.95, 0.99])
def test_equal_independent_cells_are_decided_by_the_sign_rule_from_six(k, level):
    one = mean_interval([0.3] * k, level=level)
    assert one.state(0.0) == ("HOLDS" if k >= 6 and 2.0 ** (1 - k) <= 1 - level else "UNDECIDED")
    assert one.state(0.3) == "UNDECIDED"


def test_a_spread_or_difference_below_a_billionth_of_the_scores_is_none():
    tiny = 1e-12 * np.arange(8)
    assert mean_interval(tiny, scale=1.0).mean == 0.0
    assert mean_interval(tiny, scale=1.0).state(0.0) == "UNDECIDED"
    assert mean_interval(tiny).state(0.0) == "HOLDS"  # on their own scale they are differences


@pytest.mark.parametrize("variance", ["design", "crossed", "independent", "nadeau_bengio"])
def test_identical_zero_one_scores_get_the_rule_of_three_never_a_point(variance):
    tests = [range(10), range(10, 20), range(5, 15)]
    one = interval(SplitScores.from_arrays(tests, np.ones((3, 10))), variance=variance)
    assert one.high == 1.0
    assert one.low == pytest.approx(1 - math.log(2 / 0.05) / 20)  # 20 distinct samples, not 30 rows


def test_all_zero_differences_of_zero_one_rows_get_the_rule_of_three_on_both_sides():
    tests, rng = [range(10), range(10, 20)], np.random.default_rng(0)
    scores = (rng.random((2, 10)) < 0.5).astype(float)
    a, b = (SplitScores.from_arrays(tests, scores) for _ in range(2))
    one = interval(a.minus(b))
    assert (one.low, one.high) == pytest.approx((-math.log(40) / 20, math.log(40) / 20))


# --- bad input, notes ------------------------------------------------------------------------------------------------


def test_one_split_of_zero_one_scores_gets_the_binomial_interval():
    table = SplitScores.from_arrays([range(20)], [[1.0] * 17 + [0.0] * 3])
    one = interval(table)
    exact = scipy.stats.binomtest(17, 20).proportion_ci(0.95, "exact")
    assert (one.low, one.high) == pytest.approx((exact.low, exact.high), rel=1e-9)
    assert one.p_value(0.5, "greater") == pytest.approx(scipy.stats.binomtest(17, 20, 0.5, "greater").pvalue)
    assert "not for the algorithm" in one.notes[0]


def test_fewer_than_two_splits_are_refused():
    with pytest.raises(InputError, match="at least two"):
        interval(SplitScores.from_arrays([[0, 1]], [[0.5, 0.7]]))
    with pytest.raises(InputError, match="at least two"):
        mean_interval([1.0])


def test_runs_of_one_split_are_not_a_design():
    table = SplitScores.from_arrays([[0, 1]] * 3, [[0.5, 0.7], [0.1, 0.2], [0.3, 0.1]], train=[[2, 3]] * 3)
    with pytest.raises(InputError, match="variance='crossed'"):
        interval(table)
    with pytest.raises(InputError, match="trains on no sample"):
        interval(crossed_table(np.random.default_rng(0), 3, 5))


def test_an_anytime_interval_needs_a_declared_variance():
    with pytest.raises(InputError, match="explicit variance"):
        interval(VALUES, anytime=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mean_interval(VALUES, variance="nadeau_bengio"), InputError, "add n_test= and n_train="),
        (lambda: mean_interval(VALUES, variance="nadeau_bengio", n_test=0, n_train=1), InputError, "positive"),
        (lambda: mean_interval(VALUES, variance="design"), InputError, "needs per-sample scores"),
        (lambda: mean_interval(VALUES, variance="naive"), UnknownNameError, "no variance 'naive'"),
        (lambda: mean_interval([1.0, np.nan]), InputError, "cell 1 has the value nan"),
        (lambda: mean_interval(np.ones((2, 2))), InputError, "plain vector"),
        (lambda: mean_interval(VALUES, level=95), InputError, "give 0.95"),
        (lambda: mean_interval(VALUES).p_value(0.0, "both"), UnknownNameError, "no side 'both'"),
        (lambda: combine([]), InputError, "no settings"),
        (lambda: combine([mean_interval(VALUES, anytime=True)]), InputError, "block"),
        (lambda: combine([mean_interval([1.0, 1.0])], inverse_variance=True), InputError, "plain mean"),
    ],
)
def test_what_makes_no_interval_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_skewed_cells_are_noted():
    assert "skewed" in mean_interval([1.0, 1.1, 1.2, 1.0, 1.1, 9.0]).notes[0]
    assert mean_interval(VALUES).notes == ()


# --- several settings ------------------------------------------------------------------------------------------------


def test_settings_are_combined_by_the_plain_mean_unless_asked():
    settings_ = [mean_interval(VALUES), mean_interval(3 * VALUES - 1)]
    mean, won = combine(settings_)
    assert mean.mean == pytest.approx(np.mean([one.mean for one in settings_]))
    assert mean.variance == pytest.approx(sum(one.variance for one in settings_) / 4)
    assert won == 0.5
    weighted, _ = combine(settings_, inverse_variance=True)
    assert weighted.variance == pytest.approx(1 / sum(1 / one.variance for one in settings_))


def test_two_equal_settings_are_welchs_test():
    x, y = VALUES, 2 * VALUES[:6] - 0.5
    mean, _ = combine([mean_interval(x), mean_interval(-y)])
    welch = scipy.stats.ttest_ind(x, y, equal_var=False)
    assert mean.df == pytest.approx(welch.df)
    assert mean.p_value(0.0) == pytest.approx(welch.pvalue)


def test_a_setting_without_variance_leaves_the_mean_undecided_unless_exact():
    unknown, _ = combine([mean_interval(VALUES), mean_interval([1.0] * 3)])
    assert unknown.state(0.0) == "UNDECIDED"
    exact, _ = combine([mean_interval([1.0] * 3, exact=True)] * 2)
    assert exact.state(0.0) == "HOLDS"


# --- coverage --------------------------------------------------------------------------------------------------------


def test_crossed_intervals_cover_at_few_runs():
    rng, runs = np.random.default_rng(0), 400
    for k in (3, 5):
        inside = 0
        for _ in range(runs):
            one = interval(crossed_table(rng, k, 30), variance="crossed")
            inside += one.low <= 0 <= one.high
        assert 0.9 < inside / runs <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("passes", "noise"), [(1, 0.0), (6, 0.0), (6, 0.5), (None, 0.0)])
def test_design_intervals_cover_the_algorithms_score_where_naive_ones_do_not(passes, noise):
    """The specification's prototype: a ridge classifier on fresh data sets, truth from a large pool."""
    rng, n, sets = np.random.default_rng(1), 150, 300

    def draw(size):
        y = rng.integers(0, 2, size) * 2.0 - 1
        x = rng.normal(size=(size, 20))
        x[:, :5] += 0.45 * y[:, None]
        return np.c_[x, np.ones(size)], y

    pool_x, pool_y = draw(4000)
    bounds, truth = {"design": [], "independent": []}, []
    for _ in range(sets):
        x, y = draw(n)
        tests = k_fold(rng, n, 5, passes) if passes else [rng.permutation(n)[:30] for _ in range(30)]
        scores = []
        for test in tests:
            train = np.setdiff1d(np.arange(n), test)
            w = np.linalg.solve(x[train].T @ x[train] + np.eye(21), x[train].T @ y[train])
            w[-1] += noise * rng.normal()
            scores.append((x[test] @ w * y[test] > 0).astype(float))
            truth.append(np.mean(pool_x @ w * pool_y > 0))
        table = SplitScores.from_arrays(tests, scores)
        for mode, of_mode in bounds.items():
            one = interval(table, variance=mode)
            of_mode.append((one.low, one.high))
    mu = np.mean(truth)
    cover = {mode: np.mean([low <= mu <= high for low, high in of_mode]) for mode, of_mode in bounds.items()}
    assert cover["design"] >= 0.92
    if passes != 1:
        assert cover["independent"] < 0.87


def test_printing_says_level_cells_and_notes():
    assert str(mean_interval([0.3] * 5)) == "0.3 [-inf, inf] (95%, 5 cells; no variance seen)"
    assert "95%, anytime, 10 cells" in str(mean_interval(VALUES, anytime=True))


def test_intervals_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in LAWS:
            str(one)
    assert sample_gain(VALUES).value == pytest.approx(10)


def test_a_bound_that_is_no_number_decides_nothing():
    assert interval(SplitScores.from_folds([0.9, 0.95, 0.93], 20, 80)).state(np.nan) == "UNDECIDED"
    with pytest.raises(InputError, match="positive"):
        SplitScores.from_folds([0.9, 0.95, 0.93], [20, np.nan, 20], 80)
