import numpy as np
import pytest
import scipy.stats

from fairtrial.errors import InputError
from fairtrial.stats import SplitScores, bootstrap, bootstrap_interval, interval


def slope(rows):
    x, y = rows[..., 0], rows[..., 1]
    x = x - x.mean(axis=-1, keepdims=True)
    return (x * y).sum(axis=-1) / (x * x).sum(axis=-1)


def expanded(level, n):
    """The level at which percentiles cover what Student's quantiles of a variance over n - 1 do."""
    tail = scipy.stats.norm.cdf(scipy.stats.t.ppf((1 - level) / 2, n - 1) * np.sqrt(n / (n - 1)))
    return 1 - 2 * tail


def test_bca_agrees_with_scipys_at_the_expanded_level():
    x = np.random.default_rng(0).exponential(size=30)
    ours = bootstrap(x, draws=100_000)
    level = expanded(0.95, len(x))
    scipys = scipy.stats.bootstrap(
        (x,), np.mean, n_resamples=100_000, method="BCa", rng=0, confidence_level=level
    ).confidence_interval
    width = scipys.high - scipys.low
    assert ours.low == pytest.approx(scipys.low, abs=0.02 * width)
    assert ours.high == pytest.approx(scipys.high, abs=0.02 * width)


@pytest.mark.parametrize("n", [8, 12, 20])
def test_few_units_are_covered_as_the_level_says(n):
    rng = np.random.default_rng(n)
    missed = np.zeros(2)
    for seed in range(800):
        one = bootstrap(rng.normal(size=n), draws=500, seed=seed)
        missed += one.low > 0, one.high < 0
    assert (missed / 800 <= 0.025 + 3 * np.sqrt(0.025 * 0.975 / 800)).all()


def test_a_statistic_may_be_vectorised_or_take_indices():
    rows = np.random.default_rng(0).normal(size=(20, 2))
    one = bootstrap(rows, slope)
    fast = bootstrap(rows, slope, vectorized=True)
    by_index = bootstrap(np.arange(20), lambda index: slope(rows[index]))
    for other in (fast, by_index):
        assert (one.low, one.mean, one.high) == pytest.approx((other.low, other.mean, other.high), rel=1e-10)


def test_the_seed_decides_the_draws():
    x = np.random.default_rng(0).normal(size=20)
    assert bootstrap(x).low == bootstrap(x).low
    assert bootstrap(x).low != bootstrap(x, seed=1).low


def test_negating_the_units_mirrors_the_interval():
    x = np.random.default_rng(0).exponential(size=25)
    one, mirrored = bootstrap(x), bootstrap(-x)
    assert (one.low, one.high) == pytest.approx((-mirrored.high, -mirrored.low))


def test_fewer_than_eight_units_decide_nothing():
    one = bootstrap(np.arange(7.0) + 10)
    assert one.mean == 13
    assert one.p_value(0.0) == 1.0
    assert one.state(0.0) == "UNDECIDED"
    assert "fewer than 8 units" in one.notes[0]
    assert bootstrap(np.arange(8.0) + 10).state(0.0) == "HOLDS"


def test_units_that_do_not_vary_decide_nothing():
    assert bootstrap(np.full(20, 0.3)).notes == ("no variance seen",)


def test_too_few_draws_for_the_level_leave_it_open():
    x = np.random.default_rng(0).normal(5, 1, size=20)
    assert bootstrap(x, draws=100).at(0.9999) == (-np.inf, np.inf)


def test_a_statistic_that_is_not_finite_is_refused():
    with pytest.raises(InputError, match="must be finite"):
        bootstrap(np.arange(10.0), lambda x: np.nan)
    with pytest.raises(InputError, match="resamples"):
        bootstrap(np.arange(10.0), lambda x: 1.0 if len(np.unique(x)) == 10 else np.nan)
    with pytest.raises(InputError, match="non-empty"):
        bootstrap([])


def test_bca_covers_a_skewed_mean():
    rng, inside = np.random.default_rng(0), 0
    for run in range(200):
        one = bootstrap(rng.exponential(size=40), draws=500, seed=run)
        inside += one.low <= 1.0 <= one.high
    assert 0.88 <= inside / 200 <= 0.98


def tables(seed=0):
    rng = np.random.default_rng(seed)
    tests = [rng.permutation(60)[:12] for _ in range(10)]
    hard = rng.normal(size=60)
    return SplitScores.from_arrays(tests, [hard[t] + 0.5 * rng.normal(size=12) for t in tests])


def test_samples_are_resampled_with_all_their_rows():
    score = np.random.default_rng(0).normal(size=40)
    table = SplitScores.from_arrays([np.arange(40)] * 3, [score] * 3)
    one = bootstrap_interval(table)
    assert one.mean == pytest.approx(score.mean())
    assert one.variance == pytest.approx(score.var() / 40, rel=0.1)  # three copies tell no more than one


def test_jackknife_of_samples_is_brute_force(monkeypatch):
    table, seen = tables(), {}
    monkeypatch.setattr(
        "fairtrial.stats.resampling._bca",
        lambda estimate, drawn, jackknife, units, n_cells, level: seen.update(estimate=estimate, jackknife=jackknife),
    )
    bootstrap_interval(table, draws=10)
    for i, gone in enumerate(np.unique(table.sample)):
        means = [
            np.delete(table.score[table.split == k], np.flatnonzero(table.test(k) == gone)).mean() for k in range(10)
        ]
        assert seen["estimate"] + seen["jackknife"][i] == pytest.approx(np.mean(means))


def test_two_way_resampling_is_wider_where_splits_have_their_own_luck():
    rng = np.random.default_rng(0)
    table = SplitScores.from_arrays([np.arange(40)] * 6, rng.normal(size=(6, 1)) + 0.1 * rng.normal(size=(6, 40)))
    one_way, two_way = bootstrap_interval(table), bootstrap_interval(table, two_way=True)
    assert two_way.variance > 20 * one_way.variance
    crossed = interval(table, variance="crossed").variance
    assert two_way.variance == pytest.approx(crossed * 5 / 6, rel=0.15)


def test_bootstrapping_samples_needs_rows_and_eight_of_them():
    with pytest.raises(InputError, match="per-sample"):
        bootstrap_interval(SplitScores.from_folds([1.0, 2.0], 1, 1))
    small = SplitScores.from_arrays([[0, 1], [2, 3]], [[1.0, 2.0], [3.0, 4.0]])
    assert bootstrap_interval(small).state(0.0) == "UNDECIDED"
