import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError
from fairtrial.evaluation.corrected_mmd import (
    EnergyKernel,
    GaussianKernel,
    Stratified,
    audit_parts,
    corrected_sample,
    kernels,
    mec_mmd2,
    mec_mmd_test,
    median_kernel,
    plain_mmd2,
    plan_audit,
)
from fairtrial.evaluation.corrected_mmd.quadratic import Side, uniform
from fairtrial.evaluation.corrected_mmd.samples import cross_fit, embed, proxies, read_sample

N, M, AUDIT = 7, 3, 4
AUDITS = [list(rows) for rows in itertools.combinations(range(N), AUDIT)]


def linear(a, b):
    return a @ b.T


def polynomial(a, b):
    return (1 + a @ b.T) ** 2


KERNELS = {"gaussian": GaussianKernel(0.7, 1.5), "polynomial": polynomial, "energy": EnergyKernel()}
FIRST_AND_SLOW = [
    pytest.param(kernel, id=name, marks=[] if name == "gaussian" else pytest.mark.slow)
    for name, kernel in KERNELS.items()
]


def measured(n=N, m=M, d=2, seed=0):
    """Truths, a sensor with bias, gain and noise of its own, and a sample to compare with."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    return x, 0.3 + 1.3 * x + 0.5 * rng.normal(size=(n, d)), rng.normal(size=(m, d)) + 0.4


def brute(x, y, kernel, form):
    """The MMD^2 of two clean samples, pair by pair."""

    def k(a, b):
        return float(kernel(torch.tensor(a[None]), torch.tensor(b[None])))

    def within(s):
        pairs = [k(s[i], s[j]) for i in range(len(s)) for j in range(len(s)) if form == "v" or i != j]
        return np.mean(pairs)

    return within(x) + within(y) - 2 * np.mean([k(a, b) for a in x for b in y])


def test_there_are_35_audits():
    assert len(AUDITS) == 35


@pytest.mark.parametrize("kernel", FIRST_AND_SLOW)
@pytest.mark.parametrize("form", ["u", "v"])
@pytest.mark.parametrize("estimator", ["embedding", "pairwise"])
def test_the_mean_over_all_audits_is_the_oracle_for_every_strength(estimator, form, kernel):
    x, z, y = measured()
    oracle = brute(x, y, kernel, form)
    for strength in (0.0, 0.5, 1.0):
        how = {"kernel": kernel, "estimator": estimator, "form": form, "strength": strength}
        values = [mec_mmd2(z, x[a], a, y, **how).value for a in AUDITS]
        assert abs(np.mean(values) - oracle) < 1e-12 * max(1, abs(oracle))


@pytest.mark.parametrize("kernel", FIRST_AND_SLOW)
@pytest.mark.parametrize("form", ["u", "v"])
@pytest.mark.parametrize("estimator", ["embedding", "pairwise"])
def test_the_variance_formula_is_the_variance_over_all_audits_of_2_to_all_but_one(estimator, form, kernel):
    x, z, y = measured(n=6)
    how = {"kernel": kernel, "estimator": estimator, "form": form, "strength": 0.8}
    exact = audit_parts(z, x, range(6), y, **how)
    for m in range(2, 6):
        values = [mec_mmd2(z, x[list(a)], a, y, **how).value for a in itertools.combinations(range(6), m)]
        assert np.var(values) == pytest.approx(sum(exact.at(m)), rel=1e-11, abs=1e-12)
    assert exact.at(6) == (0.0, 0.0)


@pytest.mark.parametrize("form", ["u", "v"])
@pytest.mark.parametrize("estimator", ["embedding", "pairwise"])
def test_the_estimated_parts_of_the_variance_are_unbiased(estimator, form):
    x, z, y = measured()
    how = {"kernel": GaussianKernel(1.0), "estimator": estimator, "form": form}
    exact = audit_parts(z, x, range(N), y, **how)
    estimated = np.mean([audit_parts(z, x[a], a, y, **how).at(AUDIT) for a in AUDITS], axis=0)
    np.testing.assert_allclose(estimated, exact.at(AUDIT), atol=1e-14)


def test_the_linear_part_is_the_delete_one_jackknife_with_the_finite_population_factor():
    x, z, y = measured(n=30)
    a, how = np.arange(9), {"kernel": GaussianKernel(1.0), "form": "u"}
    sample = read_sample(z, x[a], a)
    side = Side(sample, GaussianKernel(1.0), embedding=True, unbiased=True)
    fold = proxies(sample, z, None, 1.0, 5, 0)[0]
    form = side.form(fold, side.toward(sample.noisy, uniform(torch.from_numpy(y))))
    c, g = form.linear.numpy(), form.pairs.numpy()

    def total(keep):
        pairs = [g[i, j] for i in keep for j in keep if i != j]
        return c[keep].mean() + np.mean(pairs)

    left_out = [total(np.delete(a, i)) for i in range(9)]
    expected = (1 - 9 / 30) * 8 / 9 * ((np.array(left_out) - np.mean(left_out)) ** 2).sum()
    assert mec_mmd2(z, x[a], a, y, **how).variance["audit_linear"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("form", "d", "auto"),
    [
        pytest.param("u", 1, False, id="isotonic", marks=pytest.mark.slow),
        pytest.param("v", 1, True, id="strength of the fold's own"),
        pytest.param("u", 2, False, id="ridge", marks=pytest.mark.slow),
    ],
)
def test_a_proxy_fitted_in_folds_leaves_the_estimate_unbiased_over_35_audits_of_6_splits(form, d, auto):
    x, z, y = measured(d=d)
    kernel = GaussianKernel(1.0)
    values = []
    for a in AUDITS:
        sample = read_sample(z, x[a], a)
        side = Side(sample, kernel, embedding=True, unbiased=form == "u")
        other = uniform(torch.from_numpy(y))
        for first in itertools.combinations(range(AUDIT), 2):
            folds = cross_fit(sample, sample.noisy, not auto, 1.0, np.isin(np.arange(AUDIT), first).astype(int))
            if auto:  # any function of the known rows will do
                folds = [f._replace(strength=float(torch.sigmoid(sample.truth[f.known > 0].sum()))) for f in folds]
            values.append(float(side.correct(folds, other)[0]))
            mu = embed(sample, folds).sample()
            assert float(mu.weights.sum()) == pytest.approx(
                sum(f.strength + (1 - f.strength) for f in folds) / 2, abs=1e-12
            )
    oracle = brute(x, y, kernel, form) - float(kernels.mean_within(kernel, torch.from_numpy(y), form == "u"))
    assert len(values) == 35 * 6
    assert abs(np.mean(values) - oracle) < 1e-12


@pytest.mark.parametrize("form", ["u", "v"])
def test_two_noisy_samples_are_unbiased_over_all_pairs_of_audits(form):
    x, z, _ = measured(n=5)
    y, w, _ = measured(n=4, seed=1)
    kernel = GaussianKernel(1.0)
    values = [
        mec_mmd2(z, x[list(a)], a, w, y_truth=y[list(b)], y_audited=b, kernel=kernel, form=form).value
        for a in itertools.combinations(range(5), 3)
        for b in itertools.combinations(range(4), 2)
    ]
    assert abs(np.mean(values) - brute(x, y, kernel, form)) < 1e-12


@pytest.mark.parametrize("form", ["u", "v"])
@pytest.mark.parametrize("estimator", ["embedding", "pairwise"])
@pytest.mark.parametrize("how", [{}, {"strength": 0.3}, {"strength": "auto"}, {"proxy": "calibrated"}], ids=str)
def test_with_everything_audited_the_estimate_is_the_oracle(estimator, form, how):
    x, z, y = measured(n=12, m=5)
    kernel = GaussianKernel(1.0)
    estimate = mec_mmd2(z, x, np.arange(12), y, kernel=kernel, estimator=estimator, form=form, **how)
    assert estimate.value == pytest.approx(brute(x, y, kernel, form), abs=1e-12)
    assert estimate.audit_standard_error == 0


@pytest.mark.parametrize("form", ["u", "v"])
@pytest.mark.parametrize("estimator", ["embedding", "pairwise"])
def test_without_noise_the_estimate_is_the_plain_one_whatever_the_audit(estimator, form):
    x, _, y = measured()
    for a in AUDITS[::7]:
        estimate = mec_mmd2(x, x[a], a, y, kernel=polynomial, estimator=estimator, form=form)
        assert estimate.value == pytest.approx(brute(x, y, polynomial, form), rel=1e-12)
        assert estimate.bias_of_plain == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("form", ["u", "v"])
def test_strength_0_is_the_audit_alone_with_the_finite_population_factor(form):
    x, z, y = measured()
    a, f = AUDITS[11], AUDIT / N
    features = np.c_[np.ones(AUDIT), x[a]]  # of the kernel 1 + <a, b>
    mean, spread = features.mean(0), features.var(0, ddof=1).sum()
    v = ((mean - np.r_[1, y.mean(0)]) ** 2).sum() - (1 - f) * spread / AUDIT
    diagonal = (features**2).sum(1).mean()
    y_features = np.c_[np.ones(M), y]
    to_u = (N * (v + 2 * mean @ y_features.mean(0) - (y_features.mean(0) ** 2).sum()) - diagonal) / (N - 1)
    off = (M * (y_features.mean(0) ** 2).sum() - (y_features**2).sum(1).mean()) / (M - 1)
    expected = v if form == "v" else to_u - 2 * mean @ y_features.mean(0) + off
    estimate = mec_mmd2(z, x[a], a, y, strength=0.0, form=form, kernel=lambda p, q: 1 + p @ q.T)
    assert estimate.value == pytest.approx(expected, abs=1e-12)


def test_the_hand_check_with_the_linear_kernel():
    estimate = mec_mmd2([0.0] * 4, [1.0, 3.0], [0, 1], [0.0, 0.0], kernel=linear, form="v")
    assert estimate.value == pytest.approx(3.5)


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_with_a_linear_kernel_it_is_the_corrected_mean_less_its_variance(seed):
    x, z, y = measured(n=9, d=3, seed=seed)
    a = np.random.default_rng(seed).choice(9, 5, replace=False)
    d = x[a] - z[a]
    mean = z.mean(0) + d.mean(0) - y.mean(0)
    expected = mean @ mean - (1 - 5 / 9) * d.var(0, ddof=1).sum() / 5
    assert mec_mmd2(z, x[a], a, y, kernel=linear, form="v").value == pytest.approx(expected, abs=1e-10)


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_permuting_rows_changes_nothing_when_the_audit_is_relabelled(seed):
    rng = np.random.default_rng(seed)
    x, z, y = measured(n=12, seed=seed)
    a = rng.choice(12, 5, replace=False)
    order, shuffle, order_y = rng.permutation(12), rng.permutation(5), rng.permutation(M)
    moved = np.argsort(order)[a[shuffle]]
    one = mec_mmd2(z, x[a], a, y, kernel=GaussianKernel(1.0))
    two = mec_mmd2(z[order], x[a[shuffle]], moved, y[order_y], kernel=GaussianKernel(1.0))
    assert one.value == pytest.approx(two.value, abs=1e-12)
    assert one.variance == pytest.approx(two.variance, abs=1e-12)


def test_one_stratum_is_a_simple_random_audit():
    x, z, y = measured()
    a = AUDITS[3]
    one = mec_mmd2(z, x[a], a, y, kernel=GaussianKernel(1.0))
    assert mec_mmd2(z, x[a], a, y, kernel=GaussianKernel(1.0), inclusion=Stratified(["one"] * N)) == one


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_chunks_change_nothing(monkeypatch, kernel):
    x, z, y = measured(n=60, m=40)
    a = np.arange(15)
    whole = mec_mmd2(z, x[a], a, y, kernel=kernel)
    monkeypatch.setattr(kernels, "CHUNK", 200)
    assert mec_mmd2(z, x[a], a, y, kernel=kernel).value == pytest.approx(whole.value, abs=1e-10)


def test_single_precision_is_close_and_dtype_is_kept():
    x, z, y = measured(n=300, m=200)
    a = np.arange(40)
    exact = mec_mmd2(z, x[a], a, y, kernel=GaussianKernel(1.0)).value
    single = [torch.tensor(values, dtype=torch.float32) for values in (z + 100, x[a] + 100, y + 100)]
    value = mec_mmd2(single[0], single[1], torch.tensor(a), single[2], kernel=GaussianKernel(1.0)).value
    assert value.dtype == torch.float32
    assert abs(float(value) - exact) < 1e-5


def test_the_u_form_may_be_negative_and_is_not_clipped():
    values = []
    for seed in range(20):
        x, z, y = measured(n=30, m=30, seed=seed)
        values.append(mec_mmd2(z, x[:10], range(10), y - 0.4, kernel=GaussianKernel(1.0)).value)
    assert min(values) < 0


def test_the_u_form_ignores_the_diagonal_of_the_truths():
    x, z, y = measured()

    def spiked(a, b):
        return torch.exp(-torch.cdist(a, b)) + 5.0 * (torch.cdist(a, b) == 0)

    a = AUDITS[0]
    plain = mec_mmd2(z, x[a], a, y, kernel=lambda p, q: torch.exp(-torch.cdist(p, q)), form="u").value
    assert mec_mmd2(z, x[a], a, y, kernel=spiked, form="u").value == pytest.approx(plain, abs=1e-12)


def test_the_value_has_the_gradient_of_central_differences():
    x, z, y = (torch.tensor(values) for values in measured(m=5))
    a = torch.tensor([0, 2, 3, 5])
    kernel = GaussianKernel(1.0)

    def value(at):
        return mec_mmd2(z, x[a], a, at, kernel=kernel).value

    assert torch.autograd.gradcheck(value, (y.requires_grad_(),), eps=1e-6, atol=1e-6)


def test_plain_mmd_agrees_with_a_pair_by_pair_sum():
    x, _, y = measured()
    for form, kernel in itertools.product("uv", KERNELS.values()):
        ours = float(plain_mmd2(torch.tensor(x), torch.tensor(y), kernel, form))
        assert ours == pytest.approx(brute(x, y, kernel, form), abs=1e-12)


def test_the_bias_of_the_plain_distance_is_found():
    rng = np.random.default_rng(0)
    x = rng.normal(size=600)
    z, y = x + 1.0, rng.normal(size=600)
    a = rng.choice(600, 100, replace=False)
    estimate = mec_mmd2(z, x[a], a, y)
    plain = float(plain_mmd2(torch.tensor(z)[:, None], torch.tensor(y)[:, None], median_kernel(
        torch.tensor(x[a])[:, None], torch.tensor(y)[:, None])))  # fmt: skip
    assert estimate.bias_of_plain == pytest.approx(plain - estimate.value, abs=1e-12)
    assert estimate.bias_of_plain > 5 * estimate.bias_standard_error
    assert "the plain one is off by" in str(estimate)


@pytest.mark.parametrize(
    "how",
    [{}, pytest.param({"strength": "auto", "proxy": "calibrated"}, marks=pytest.mark.slow)],
    ids=["plain", "fitted"],
)
def test_errors_are_as_large_as_the_standard_error_says_and_their_mean_is_small(how):
    rng = np.random.default_rng(0)
    x, z, y = measured(n=150, m=80, d=1, seed=3)
    kernel = GaussianKernel(1.0)
    oracle = brute_fast(x, y, kernel)
    errors, squares, covered = [], [], []
    for _ in range(40):
        a = rng.choice(150, 30, replace=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimate = mec_mmd2(z, x[a], a, y, kernel=kernel, seed=rng, **how)
        errors.append(estimate.value - oracle)
        squares.append(estimate.audit_standard_error**2)
        low, high = estimate.interval(around="oracle")
        covered.append(low <= oracle <= high)
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(40)
    assert 0.5 < np.mean(squares) / np.var(errors) < 2.5
    assert np.mean(covered) > 0.75


def test_a_proxy_of_the_callers_own_stands_for_the_noisy_rows():
    x, z, y = measured(n=20)
    a, kernel = np.arange(8), GaussianKernel(1.0)
    mapped = mec_mmd2(z, x[a], a, y, kernel=kernel, proxy=lambda noisy: (noisy - 0.3) / 1.3)
    before = mec_mmd2((z - 0.3) / 1.3, x[a], a, y, kernel=kernel)
    assert mapped.value == pytest.approx(before.value)
    assert mapped.variance == pytest.approx(before.variance)
    plain = mec_mmd2(z, x[a], a, y, kernel=kernel)
    assert mapped.bias_of_plain + mapped.value == pytest.approx(plain.bias_of_plain + plain.value)  # of z itself


def brute_fast(x, y, kernel):
    return float(plain_mmd2(torch.tensor(x), torch.tensor(y), kernel))


def test_auto_strength_trusts_a_good_sensor_and_not_a_random_one():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=400), rng.normal(0.5, 1, size=300)
    a = rng.choice(400, 100, replace=False)
    good = mec_mmd2(x + 0.05 * rng.normal(size=400), x[a], a, y, strength="auto")
    bad = mec_mmd2(rng.normal(size=400), x[a], a, y, strength="auto")
    assert good.strength > 0.9
    assert bad.strength < 0.35


def test_the_default_bandwidth_comes_from_truths_and_never_from_noisy_rows():
    x, z, y = measured(n=30, m=20)
    a = np.arange(10)
    expected = median_kernel(torch.tensor(x[a]), torch.tensor(y))
    assert mec_mmd2(z, x[a], a, y) == mec_mmd2(z, x[a], a, y, kernel=expected)
    median = expected.bandwidths[1]
    distances = torch.pdist(torch.tensor(np.r_[x[a], y]))
    assert expected.bandwidths == pytest.approx((median / 2, median, 2 * median))
    assert median == pytest.approx(float(distances.median()))


def test_the_corrected_sample_has_the_corrected_mean():
    x, z, _ = measured(n=40)
    a = np.arange(20)
    for strength in (0.0, 0.6, 1.0):
        points, weights = corrected_sample(z, x[a], a, strength=strength)
        expected = strength * z.mean(0) + (x[a] - strength * z[a]).mean(0)
        np.testing.assert_allclose((weights @ points).numpy(), expected, atol=1e-12)
        assert float(weights.sum()) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------------ test and plan


def test_equal_distributions_are_seldom_told_apart_and_different_ones_often():
    rng = np.random.default_rng(0)
    rejected = {0.0: 0, 0.8: 0}
    for shift in rejected:
        for _ in range(40):
            x = rng.normal(size=120)
            a = rng.choice(120, 30, replace=False)
            result = mec_mmd_test(x + 0.4 + 0.3 * rng.normal(size=120), x[a], a, rng.normal(shift, 1, 120))
            rejected[shift] += result.reject
    assert rejected[0.0] <= 8
    assert rejected[0.8] >= 35


def test_two_noisy_samples_of_one_instrument_may_be_permuted():
    rng = np.random.default_rng(0)

    def noisy_sample(shift):
        x = rng.normal(shift, 1, 60)
        a = rng.choice(60, 20, replace=False)
        return x + 0.5 + 0.3 * rng.normal(size=60), x[a], a

    (z, x, a), (w, y, b), (v, u, c) = noisy_sample(0), noisy_sample(0), noisy_sample(1.5)
    same = mec_mmd_test(z, x, a, w, y_truth=y, y_audited=b, permutations=39)
    other = mec_mmd_test(z, x, a, v, y_truth=u, y_audited=c, permutations=39)
    assert same.p_value > 0.05
    assert other.p_value == 1 / 40
    assert not same.reject
    assert other.reject


def test_the_plan_is_the_least_audit_that_reaches_the_standard_error():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=200), rng.normal(1, 1, 200)
    z, everything, kernel = 0.5 + x + 0.6 * rng.normal(size=200), np.arange(200), GaussianKernel(1.0)
    sampling = mec_mmd2(z, x, everything, y, kernel=kernel).variance["sampling"]
    parts = audit_parts(z, x, everything, y, kernel=kernel)
    target = 1.2 * math.sqrt(sampling)
    m = plan_audit(z, x, everything, y, target, kernel=kernel)
    assert sampling + sum(parts.at(m)) <= target**2 < sampling + sum(parts.at(m - 1))
    with pytest.raises(InputError, match="collect more rows"):
        plan_audit(z, x[:60], everything[:60], y, 1e-4)


# ---------------------------------------------------------------------------------------------------------- bad input


def bad(**changes):
    x, z, y = measured(n=30, m=10)
    values = {"noisy": z, "truth": x[:12], "audited": np.arange(12), "y": y, **changes}
    return mec_mmd2(values.pop("noisy"), values.pop("truth"), values.pop("audited"), values.pop("y"), **values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audited": [0, 1, 30], "truth": np.zeros((3, 2))}, r"row numbers must lie in 0\.\.29"),
        ({"audited": [-1, 1, 3], "truth": np.zeros((3, 2))}, r"must lie in 0\.\.29"),
        ({"audited": [1, 1, 3], "truth": np.zeros((3, 2))}, "audited twice"),
        ({"audited": np.ones(30, bool)}, r"np\.flatnonzero"),
        ({"truth": np.zeros((11, 2))}, "truth has 11 rows for 12 audited"),
        ({"truth": np.zeros((1, 2)), "audited": [0]}, "need 2 at least"),
        ({"truth": np.zeros((12, 3))}, "truth has 3 features, the noisy sample 2"),
        ({"y": np.zeros((5, 1))}, "y has 1 features"),
        ({"y": np.zeros((1, 2))}, "y has 1 row"),
        ({"truth": np.full((12, 2), np.nan)}, "truth: row 0 is not finite"),
        ({"noisy": np.array([["a", "b"]] * 30)}, "expected real numbers"),
        ({"noisy": np.zeros((3, 3, 3))}, "expected rows of features"),
        ({"truth": np.zeros((9, 2)), "audited": range(9), "strength": "auto"}, "needs 10 audited rows, got 9"),
        ({"truth": np.zeros((9, 2)), "audited": range(9), "proxy": "calibrated"}, "needs 10 audited rows"),
        ({"strength": "auto", "folds": 1}, "folds=1: give a whole number of at least 2"),
        ({"strength": "most"}, "a number or 'auto'"),
        ({"proxy": "magic"}, "'calibrated' or a function"),
        ({"proxy": lambda z: z[:5]}, "5 rows for 30"),
        ({"inclusion": np.ones(30)}, "Stratified.labels. or Bernoulli"),
        ({"inclusion": Stratified([0] * 30), "strength": "auto"}, "simple random audit"),
        ({"audited": None}, "np.flatnonzero"),
        ({"audited": ["a"] * 5}, "np.flatnonzero"),
        ({"kernel": "gaussian"}, "kernel='gaussian': give a function"),
        ({"kernel": lambda a, b: 1.0}, "must make a tensor"),
        ({"kernel": lambda a, b: (a @ b.T).float()}, "of their dtype"),
        ({"strength": math.nan}, "finite number or 'auto'"),
        ({"strength": True}, "finite number or 'auto'"),
        ({"proxy": 3}, "'calibrated' or a function"),
        ({"form": "w"}, "give 'u' or 'v'"),
        ({"estimator": "both"}, "'embedding' or 'pairwise'"),
        ({"y_truth": np.zeros((3, 2))}, "go together"),
        ({"truth": np.zeros((0, 2)), "audited": []}, "audited: no row is"),
        ({"noisy": [[0.0, 1.0], [2.0]]}, "noisy: its rows differ in length"),
        ({"audited": [[0, 1], [2]]}, "audited: its rows differ in length"),
        ({"noisy": torch.zeros(30, 2, dtype=torch.complex64)}, "expected real numbers, got dtype torch.complex64"),
        ({"kernel": GaussianKernel}, "GaussianKernel.*give a function"),
        ({"inclusion": Stratified([*"ab" * 14, None, "a"])}, "no label for row 28"),
        ({"proxy": "calibrated", "folds": 2.5}, "folds=2.5: give a whole number"),
        ({"seed": "first"}, "seed='first': give a whole number"),
        ({"seed": -1}, "seed=-1: give a whole number"),
        ({"strength": "2"}, "strength='2': give a number or 'auto'"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        bad(**changes)


def test_an_audit_that_is_visibly_not_random_warns_naming_the_feature():
    x, z, y = measured(n=200, m=10)
    largest = np.argsort(-z[:, 1])[:40]
    with pytest.warns(UserWarning, match="differ from the others in feature 1"):
        mec_mmd2(z, x[largest], largest, y)


def test_fewer_than_4_audited_rows_have_a_value_and_no_standard_error():
    x, z, y = measured()
    estimate = mec_mmd2(z, x[:3], [0, 1, 2], y)
    assert math.isfinite(estimate.value)
    assert math.isnan(estimate.standard_error)
    with pytest.raises(InputError, match="4 audited rows"):
        mec_mmd_test(z, x[:3], [0, 1, 2], y)
    with pytest.raises(InputError, match="4 audited rows"):
        plan_audit(z, x[:3], [0, 1, 2], y, 0.1)


def test_permuting_noisy_against_clean_rows_is_refused():
    x, z, y = measured()
    with pytest.raises(InputError, match="cannot be exchanged"):
        mec_mmd_test(z, x[:5], range(5), y, permutations=9)
    with pytest.raises(InputError, match="level=2"):
        mec_mmd_test(z, x[:5], range(5), y, level=2)


@pytest.mark.parametrize("kernel", [EnergyKernel(), GaussianKernel(1.0)])
def test_constant_samples_are_alike_or_not_beyond_doubt(kernel):
    ones = np.ones((37, 1))
    same = mec_mmd_test(ones, ones[:7], range(7), ones, kernel=kernel)
    assert (same.statistic, same.p_value, same.reject) == (0.0, 0.5, False)
    apart = mec_mmd_test(ones, ones[:7], range(7), 0 * ones, kernel=kernel)
    assert apart.statistic > 1e6
    assert apart.reject


@pytest.mark.parametrize("scale", [1e-14, 1.0, 1e9])
def test_what_tells_samples_apart_does_not_depend_on_their_unit(scale):
    x, z, y = (scale * values for values in measured(n=60, m=40))
    shifted = mec_mmd_test(z, x[:20], range(20), y + 4 * scale, kernel=EnergyKernel())
    assert shifted.p_value < 1e-6


@pytest.mark.parametrize("permutations", [-1, 2.5, "9", True])
def test_permutations_are_counted(permutations):
    x, z, y = measured(n=30)
    with pytest.raises(InputError, match=r"permutations=.*a whole number of at least 0"):
        mec_mmd_test(z, x[:5], range(5), y, permutations=permutations)


@pytest.mark.parametrize("made", [plan_audit, audit_parts])
def test_a_plan_takes_nothing_that_it_would_not_use(made):
    x, z, y = measured(n=30)
    target = (0.1,) if made is plan_audit else ()
    with pytest.raises(InputError, match="form='x'"):
        made(z, x[:5], range(5), y, *target, form="x")
    for name in ("inclusion", "strenght"):
        with pytest.raises(TypeError, match=name):
            made(z, x[:5], range(5), y, *target, **{name: None})


def test_a_plain_mmd_needs_two_rows_of_each_and_a_known_form():
    one, two = torch.zeros(1, 2), torch.zeros(2, 2)
    with pytest.raises(InputError, match="1 and 2 rows"):
        plain_mmd2(one, two, EnergyKernel())
    with pytest.raises(InputError, match="form='w'"):
        plain_mmd2(two, two, EnergyKernel(), form="w")
    with pytest.raises(InputError, match="real numbers"):
        plain_mmd2(two * 1j, two, EnergyKernel())
    with pytest.raises(InputError, match="give a function"):
        plain_mmd2(two, two, GaussianKernel)


@pytest.mark.parametrize("level", [0, 1, 2, math.nan, "0.95"])
def test_an_interval_has_a_level_between_0_and_1(level):
    x, z, y = measured(n=30)
    with pytest.raises(InputError, match=r"level=.*above 0 and below 1"):
        mec_mmd2(z, x[:5], range(5), y).interval(level)


def test_an_interval_is_around_one_of_two_values():
    x, z, y = measured(n=30)
    with pytest.raises(InputError, match="around='truth'"):
        mec_mmd2(z, x[:5], range(5), y).interval(around="truth")


def test_a_kernel_needs_a_bandwidth():
    with pytest.raises(InputError, match="must be positive"):
        GaussianKernel(0.0)
    with pytest.raises(InputError, match="all rows are equal"):
        median_kernel(torch.zeros(5, 1))
