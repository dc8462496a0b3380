import itertools

import numpy as np
import pytest
import torch

from fairtrial.errors import InputError
from fairtrial.evaluation.corrected_mmd import Bernoulli, GaussianKernel, Stratified, mec_mmd2, plain_mmd2
from fairtrial.evaluation.corrected_mmd.designs import draw_of
from fairtrial.evaluation.corrected_mmd.quadratic import Side, uniform
from fairtrial.evaluation.corrected_mmd.samples import proxies, read_sample

KERNEL = GaussianKernel(1.0)


def measured(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 1))
    return x, 0.4 + 1.2 * x + 0.4 * rng.normal(size=(n, 1)), rng.normal(size=(4, 1)) + 0.3


def oracle(x, y, form):
    return float(plain_mmd2(torch.tensor(x), torch.tensor(y), KERNEL, form))


@pytest.mark.parametrize("form", ["u", "v"])
@pytest.mark.parametrize("estimator", ["embedding", "pairwise"])
def test_a_stratified_audit_is_unbiased_over_all_its_draws(estimator, form):
    x, z, y = measured(7)
    strata = ["a", "b", "a", "b", "b", "a", "b"]  # 2 of 3, and 3 of 4
    first, second = (np.flatnonzero(np.array(strata) == s) for s in "ab")
    values = [
        mec_mmd2(
            z, x[[*a, *b]], [*a, *b], y, kernel=KERNEL, estimator=estimator, form=form, inclusion=Stratified(strata)
        ).value
        for a in itertools.combinations(first, 2)
        for b in itertools.combinations(second, 3)
    ]
    assert abs(np.mean(values) - oracle(x, y, form)) < 1e-12


def bernoulli_draws(n, p):
    for size in range(n + 1):
        for a in itertools.combinations(range(n), size):
            inside = np.isin(np.arange(n), a)
            yield list(a), float(np.prod(np.where(inside, p, 1 - p)))


@pytest.mark.parametrize("form", ["u", "v"])
@pytest.mark.parametrize("estimator", ["embedding", "pairwise"])
def test_a_bernoulli_audit_is_unbiased_over_all_its_draws_and_so_are_its_variance_parts(estimator, form):
    x, z, y = measured(6)
    p = np.array([0.3, 0.9, 0.5, 0.7, 0.4, 0.8])
    whole = read_sample(z, x, range(6), Bernoulli(p))
    side = Side(whole, KERNEL, estimator == "embedding", form == "u")
    fold = proxies(whole, z, None, 1.0, 5, 0)[0]
    full = side.form(fold, side.toward(whole.noisy, uniform(torch.tensor(y))))
    mean = square = 0.0
    parts, known = np.zeros(2), 0.0
    for a, probability in bernoulli_draws(6, p):
        audit = draw_of(Bernoulli(p), torch.tensor(a, dtype=torch.int64), 6, torch.float64)
        value = float(full.constant + audit.total(full.linear[a], full.pairs[a][:, a]))
        mean += probability * value
        square += probability * value**2
        if len(a) >= 4:
            parts += probability * np.array(audit.variance(full.linear[a], full.pairs[a][:, a]))
            known += probability
    assert abs(mean + float(side_of_y(y, form)) - oracle(x, y, form)) < 1e-12
    total = square - mean**2
    exact = bernoulli_variance(full, p)
    assert sum(exact) == pytest.approx(total, rel=1e-10)
    assert known > 0.3


def side_of_y(y, form):
    from fairtrial.evaluation.corrected_mmd.kernels import mean_within

    return mean_within(KERNEL, torch.tensor(y), form == "u")


def bernoulli_variance(form, p):
    """The exact linear and pair part for independent draws, from all units."""
    c, g, n = form.linear.numpy(), form.pairs.numpy().copy(), len(p)
    np.fill_diagonal(g, 0)
    unit = c + 2 / (n - 1) * g.sum(1)
    odds = (1 - p) / p
    return (odds * unit**2).sum() / n**2, 2 * (np.outer(odds, odds) * g**2).sum() / (n * (n - 1)) ** 2


def test_the_estimated_variance_of_a_bernoulli_audit_holds_its_pair_part_twice_more():
    x, z, y = measured(8, seed=2)
    p = np.full(8, 0.95)  # nearly all draws have the 4 rows that are needed
    whole = read_sample(z, x, range(8), Bernoulli(p))
    side = Side(whole, KERNEL, True, True)
    full = side.form(proxies(whole, z, None, 1.0, 5, 0)[0], side.toward(whole.noisy, uniform(torch.tensor(y))))
    parts = np.zeros(2)
    for a, probability in bernoulli_draws(8, p):
        if len(a) >= 4:
            audit = draw_of(Bernoulli(p), torch.tensor(a), 8, torch.float64)
            parts += probability * np.array(audit.variance(full.linear[a], full.pairs[a][:, a]))
    linear, pairs = bernoulli_variance(full, p)
    np.testing.assert_allclose(parts, (linear + 2 * pairs, pairs), rtol=1e-3)


def test_the_estimated_variance_of_a_stratified_audit_is_near_that_over_its_draws_or_larger():
    x, z, y = measured(40, seed=1)
    rng = np.random.default_rng(0)
    strata = np.repeat([0, 1], [25, 15])
    values, variances = [], []
    for _ in range(100):
        a = np.r_[rng.choice(25, 8, replace=False), 25 + rng.choice(15, 6, replace=False)]
        estimate = mec_mmd2(z, x[a], a, y, kernel=KERNEL, inclusion=Stratified(strata))
        values.append(estimate.value)
        variances.append(estimate.audit_standard_error**2)
    assert 0.8 < np.mean(variances) / np.var(values) < 2


def test_a_stratum_audited_whole_adds_no_variance():
    x, z, y = measured(12)
    strata = np.repeat([0, 1], [11, 1])
    a = [0, 3, 5, 8, 11]
    estimate = mec_mmd2(z, x[a], a, y, kernel=KERNEL, inclusion=Stratified(strata))
    assert np.isfinite(estimate.standard_error)
    everything = mec_mmd2(z, x, range(12), y, kernel=KERNEL, inclusion=Stratified(np.repeat([0, 1], [7, 5])))
    assert everything.value == pytest.approx(oracle(x, y, "u"), abs=1e-12)
    assert everything.audit_standard_error == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("design", "message"),
    [
        (Bernoulli(np.r_[0.0, np.ones(11)]), r"not in \(0, 1\]"),
        (Bernoulli([0.5, [0.5, 1]]), "no list of numbers"),
        (Bernoulli("half"), "no list of numbers"),
        (Bernoulli(np.ones(5)), "5 probabilities for 12 noisy rows"),
        (Stratified(np.zeros(5)), "5 labels for 12 noisy rows"),
        (Stratified([0] * 6 + [1] * 6), "stratum 1 has 1 audited of 6 rows"),
    ],
)
def test_a_design_that_cannot_be_is_refused(design, message):
    x, z, y = measured(12)
    a = [0, 1, 2, 3, 6]
    with pytest.raises(InputError, match=message):
        mec_mmd2(z, x[a], a, y, inclusion=design)
