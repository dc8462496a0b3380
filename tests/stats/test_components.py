import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError
from fairtrial.stats import Components, SplitScores, design_variance, interval, variance_components


def random_table(seed, offset=0.0):
    """An unbalanced table: every split tests its own random subset."""
    rng = np.random.default_rng(seed)
    k, n = int(rng.integers(2, 7)), int(rng.integers(4, 15))
    tests = [rng.choice(n, size=rng.integers(2, n), replace=False) for _ in range(k)]
    split = np.repeat(np.arange(k), [len(t) for t in tests])
    sample = np.concatenate(tests)
    score = rng.normal(size=k)[split] + rng.normal(size=n)[sample] + rng.normal(size=len(split)) + offset
    return split, sample, score


def pair_averages(split, sample, score):
    kinds = {"A": [], "B": [], "C": []}
    for i, j in itertools.combinations(range(len(split)), 2):
        half = (score[i] - score[j]) ** 2 / 2
        if sample[i] == sample[j]:
            kinds["A"].append(half)
        else:
            kinds["B" if split[i] == split[j] else "C"].append(half)
    return {kind: np.mean(values) if values else np.nan for kind, values in kinds.items()}


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_b_c_equal_brute_force_pair_averages(seed):
    split, sample, score = random_table(seed)
    p = pair_averages(split, sample, score)
    c = variance_components(SplitScores.from_rows(split, sample, score))
    expected = (p["C"] - p["B"], p["C"] - p["A"], p["A"] + p["B"] - p["C"])
    np.testing.assert_allclose(c.raw, expected, rtol=0, atol=1e-12 * max(1, p["B"]))


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_components_are_invariant_to_row_order_split_relabelling_and_a_constant_and_scale_by_its_square(seed):
    split, sample, score = random_table(seed)
    rng = np.random.default_rng(seed)
    c = variance_components(SplitScores.from_rows(split, sample, score))
    order, relabel = rng.permutation(len(split)), rng.permutation(100)
    same = variance_components(SplitScores.from_rows(relabel[split[order]], sample[order], score[order] + 1e6))
    scaled = variance_components(SplitScores.from_rows(split, sample, -3 * score))
    for name in ("split", "sample", "interaction"):
        # An offset of 1e6 leaves the scores themselves 10 digits; centring must cost no more.
        assert getattr(same, name) == pytest.approx(getattr(c, name), rel=1e-7, abs=1e-8)
        assert getattr(scaled, name) == pytest.approx(9 * getattr(c, name), rel=1e-10, abs=1e-12)


def test_components_are_unbiased():
    rng = np.random.default_rng(0)
    k, n, runs = 8, 30, 2000
    split, sample = np.repeat(np.arange(k), n), np.tile(np.arange(n), k)
    raw = np.empty((runs, 3))
    for run in range(runs):
        score = rng.normal(size=(k, 1)) + np.sqrt(2) * rng.normal(size=n) + np.sqrt(3) * rng.normal(size=(k, n))
        raw[run] = variance_components(SplitScores.from_rows(split, sample, score.ravel())).raw
    error = raw.std(axis=0, ddof=1) / np.sqrt(runs)
    assert (np.abs(raw.mean(axis=0) - [1, 2, 3]) < 3 * error).all()


def test_on_a_full_table_they_are_the_analysis_of_variance_estimates():
    from statsmodels.formula.api import ols
    from statsmodels.stats.anova import anova_lm

    rng = np.random.default_rng(1)
    k, n = 5, 12
    split, sample = np.repeat(np.arange(k), n), np.tile(np.arange(n), k)
    score = 2 * rng.normal(size=k)[split] + 2 * rng.normal(size=n)[sample] + rng.normal(size=k * n)
    frame = pd.DataFrame({"score": score, "split": split, "sample": sample})
    fit = ols("score ~ C(split) + C(sample)", frame).fit()
    mean_square = anova_lm(fit)["mean_sq"]
    c = variance_components(SplitScores.from_rows(split, sample, score))
    error = mean_square["Residual"]
    assert c.interaction == pytest.approx(error)
    assert c.split == pytest.approx((mean_square["C(split)"] - error) / n)
    assert c.sample == pytest.approx((mean_square["C(sample)"] - error) / k)
    assert c.residual_df == fit.df_resid


def test_negative_components_are_clipped_and_reported_raw():
    # Two splits of opposite scores: no sample is hard, and the split means agree.
    c = variance_components(SplitScores.from_arrays([[0, 1, 2, 3]] * 2, [[1, -1, 1, -1], [-1, 1, -1, 1]]))
    assert c.raw[0] < 0
    assert c.raw[1] < 0
    assert (c.split, c.sample) == (0.0, 0.0)
    assert c.interaction == pytest.approx(4 / 3)


def test_one_k_fold_pass_puts_all_within_variance_into_the_interaction():
    score = np.random.default_rng(0).normal(size=(5, 4))
    c = variance_components(SplitScores.from_arrays(np.arange(20).reshape(5, 4), score))
    assert c.sample == 0
    assert np.isnan(c.raw[1])
    assert c.interaction == pytest.approx(score.var(axis=1, ddof=1).mean())


def test_leave_one_out_has_nearly_twice_the_variance_of_a_mean():
    x = np.random.default_rng(0).normal(size=12)
    table = SplitScores.from_arrays(np.arange(12)[:, None], x[:, None])
    assert interval(table).variance == pytest.approx(x.var(ddof=1) * (2 / 12 - 1 / (12 * 11)))
    assert interval(table, variance="nadeau_bengio").variance == pytest.approx(x.var(ddof=1) * (1 / 12 + 1 / 11))


def explicit_variance(splits, c, kappa):
    """The formula of the docstring, with dense matrices."""
    n, k = 1 + max(int(max(train.max(), test.max())) for train, test in splits), len(splits)
    in_train, in_test = np.zeros((k, n)), np.zeros((k, n))
    for row, (train, test) in enumerate(splits):
        in_train[row, train], in_test[row, test] = 1 / len(train), 1 / len(test)
    w, u = in_test.mean(axis=0), in_train.mean(axis=0)
    return (
        c.split / k
        + c.sample * w @ w
        + c.interaction * sum(1 / len(test) for _, test in splits) / k**2
        + kappa * c.training * (u @ u - sum(1 / len(train) for train, _ in splits) / k**2)
    )


@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 2.0]))
@settings(max_examples=30, deadline=None)
def test_design_variance_equals_the_formula_on_dense_matrices(seed, kappa):
    rng = np.random.default_rng(seed)
    splits = []
    for _ in range(int(rng.integers(1, 8))):
        order = rng.permutation(20)
        splits.append((order[: rng.integers(3, 12)], order[12 : 12 + rng.integers(1, 8)]))
    c = Components(*rng.exponential(size=3), single_run=4.0 if seed % 2 else None)
    assert design_variance(splits, c, kappa) == pytest.approx(explicit_variance(splits, c, kappa), rel=1e-12)


@pytest.mark.parametrize("shape", [(5, 30), (30, 10)])
def test_random_splits_have_nadeau_and_bengios_correlation_in_expectation(shape):
    k, m = shape
    rng, n = np.random.default_rng(0), 100
    c, p = Components(0.0, 2.0, 3.0), m / 100
    values = []
    for _ in range(400):
        orders = [rng.permutation(n) for _ in range(k)]
        values.append(design_variance([(order[m:], order[:m]) for order in orders], c))
    assert np.mean(values) == pytest.approx((2 + 3) / m * (p + (1 - p) / k), rel=0.01)


def test_one_k_fold_pass_without_training_term_has_the_variance_of_a_mean_exactly():
    folds = np.random.default_rng(0).permutation(60).reshape(6, 10)
    splits = [(np.setdiff1d(np.arange(60), fold), fold) for fold in folds]
    assert design_variance(splits, Components(0.0, 2.0, 3.0), kappa=0.0) == pytest.approx(5 / 60, rel=1e-14)


def test_runs_on_one_split_are_averaged_first_and_the_training_term_keeps_the_single_run_interaction():
    rng = np.random.default_rng(0)
    folds = [fold for _ in range(2) for fold in rng.permutation(40).reshape(4, 10)]
    seeds = [rng.normal(size=(8, 10)) + np.arange(10) / 5 for _ in range(3)]  # three runs of every split
    runs = SplitScores.from_arrays(folds * 3, np.concatenate(seeds))
    averaged = SplitScores.from_arrays(folds, np.mean(seeds, axis=0))
    c = variance_components(averaged)
    single = np.mean([variance_components(SplitScores.from_arrays(folds, s)).interaction for s in seeds])
    splits = [(np.setdiff1d(np.arange(40), fold), fold) for fold in folds]
    expected = design_variance(splits, Components(c.split, c.sample, c.interaction, single_run=single))
    one = interval(runs)
    assert one.n_cells == 8
    assert one.mean == pytest.approx(runs.means.mean())
    assert one.variance == pytest.approx(expected, rel=1e-10)


def test_components_need_rows_and_two_samples():
    with pytest.raises(InputError, match="only fold means"):
        variance_components(SplitScores.from_folds([1, 2], 1, 1))
    with pytest.raises(InputError, match="one sample"):
        variance_components(SplitScores.from_arrays([[0], [0]], [[1.0], [2.0]]))
    with pytest.raises(InputError, match="no splits"):
        design_variance([], Components(1.0, 1.0, 1.0))
