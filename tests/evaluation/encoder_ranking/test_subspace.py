"""The scores against closed forms, brute force and numpy's own decompositions."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group

from fairtrial.errors import InputError
from fairtrial.evaluation.encoder_ranking.subspace import (
    SCORES,
    Features,
    cka,
    projected_rankme,
    rankme,
    ssr,
    ssr_dagger,
    ssr_z,
)


def drawn(seed, n, d, r=12):
    """Features and a reference that share three directions, with means and columns of unequal scale."""
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(n, 3))
    z = shared @ rng.normal(size=(3, d)) + rng.normal(size=(n, d)) * rng.uniform(0.3, 2, d) + rng.normal(size=d)
    return z, shared @ rng.normal(size=(3, r)) + rng.normal(size=(n, r)) + 2


def rotation(seed, d):
    return ortho_group.rvs(d, random_state=seed)


ALIGNED = {
    "ssr": partial(ssr, rank=5),
    "ssr_z": partial(ssr_z, rank=5),
    "cka": cka,
    "ssr_dagger": partial(ssr_dagger, rank=5),
    "ssr_dagger, one scale": partial(ssr_dagger, rank=5, standardize=False),
    "projected_rankme": partial(projected_rankme, rank=5),
}
SMALL = st.tuples(st.integers(0, 10**6), st.sampled_from([3, 8, 40, 90]))


# ------------------------------------------------------------------------------------------------------------ the null


def test_mean_and_variance_under_random_rotations_of_the_items_are_those_of_the_haar_measure():
    n, k, draws = 6, 2, 20_000
    n1 = n - 1
    rng = np.random.default_rng(0)
    squares = np.array([5.0, 3.0, 1.0])
    w = squares / squares.sum()
    # A random 3-frame in the n1 centred dimensions; its energy in the first k of them.
    frames = np.linalg.qr(rng.normal(size=(draws, n1, 3)))[0]
    values = np.einsum("bkj,j->b", frames[:, :k] ** 2, w)
    mean = k / n1
    variance = 2 * ((w**2).sum() - 1 / n1) * (k - k**2 / n1) / ((n1 - 1) * (n1 + 2))
    assert values.mean() == pytest.approx(mean, rel=0.03)
    assert values.var() == pytest.approx(variance, rel=0.03)
    # and ssr_z uses just these: rotated features give scores of mean 0 and deviation 1
    n, k = 24, 3
    z, r = drawn(0, n, 4)
    basis = np.linalg.qr(np.hstack([np.ones((n, 1)), rng.normal(size=(n, n - 1))]))[0][:, 1:]  # of what is centred
    z = z - z.mean(0)
    scores = [
        ssr_z(basis @ np.linalg.qr(rng.normal(size=(n - 1, n - 1)))[0] @ (basis.T @ z), r, k) for _ in range(1500)
    ]
    assert np.mean(scores) == pytest.approx(0, abs=0.1)
    assert np.std(scores) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("d", [16, 256, 4096])
def test_a_candidate_independent_of_the_reference_scores_nothing_whatever_its_width(d):
    rng = np.random.default_rng(d)
    z, r = rng.normal(size=(500, d)), rng.normal(size=(500, 40)) * np.linspace(3, 0.3, 40)
    assert ssr_dagger(z, r) <= 0.01
    assert abs(ssr_z(z, r)) < 4
    assert abs(cka(z, r)) < 0.03


def test_rankme_grows_with_the_width_of_noise():
    noise = np.random.default_rng(0).normal(size=(500, 4096))
    values = [rankme(noise[:, :d]) for d in (16, 256, 4096)]
    assert values == sorted(values)
    assert values[0] < 17
    assert values[2] > 400


# ---------------------------------------------------------------------------------------------------------- invariance


@settings(max_examples=12, deadline=None)
@given(SMALL)
def test_scores_do_not_see_rotations_of_features(drawing):
    seed, d = drawing
    z, r = drawn(seed, 60, d)
    turned, reference = z @ rotation(seed, d), r @ rotation(seed + 1, 12)
    for name, score in ALIGNED.items():
        assert score(z, reference) == pytest.approx(score(z, r), rel=1e-7, abs=1e-9)
        if name != "ssr_dagger":
            assert score(turned, r) == pytest.approx(score(z, r), rel=1e-7, abs=1e-9)
    assert rankme(turned) == pytest.approx(rankme(z), rel=1e-6)


@settings(max_examples=12, deadline=None)
@given(SMALL, st.floats(1e-3, 1e3))
def test_scores_do_not_see_the_scale_of_all_or_a_constant_added_to_a_column(drawing, scale):
    seed, d = drawing
    z, r = drawn(seed, 60, d)
    moved = scale * z + np.random.default_rng(seed).normal(size=d)
    for score in ALIGNED.values():
        assert score(moved, 7 * r - 3) == pytest.approx(score(z, r), rel=1e-6, abs=1e-8)
    assert rankme(scale * z) == pytest.approx(rankme(z), rel=1e-6)


@settings(max_examples=12, deadline=None)
@given(SMALL)
def test_ssr_dagger_does_not_see_the_scale_of_a_column(drawing):
    seed, d = drawing
    z, r = drawn(seed, 60, d)
    scales = np.random.default_rng(seed).uniform(0.01, 100, d)
    assert ssr_dagger(z * scales, r, 5) == pytest.approx(ssr_dagger(z, r, 5), rel=1e-7, abs=1e-9)
    assert ssr_dagger(z * scales, r, 5, standardize=False) != pytest.approx(ssr_dagger(z, r, 5, standardize=False))


def test_only_rankme_is_blind_to_which_items_are_told_apart():
    z, r = drawn(0, 500, 30)
    turned = rotation(0, 500) @ z
    assert rankme(turned) == pytest.approx(rankme(z), rel=1e-6)
    rows = np.random.default_rng(0).permutation(500)
    for score in (ssr, ssr_z, cka, ssr_dagger):
        assert score(z[rows], r) < score(z, r) - 0.05
    assert ssr_dagger(z, r, 5) > 0.3
    assert ssr_dagger(z[rows], r, 5) <= 0.05


@pytest.mark.parametrize("d", [10, 35, 70])
def test_columns_given_twice_change_nothing(d):
    z, r = drawn(d, 60, d)
    twice = np.hstack([z, z])
    for score in ALIGNED.values():
        assert score(twice, r) == pytest.approx(score(z, r), abs=1e-8, rel=1e-8)
    assert rankme(twice) == pytest.approx(rankme(z), rel=1e-3)  # each zero singular value adds 1e-7 to its sum


def test_noise_columns_hardly_move_ssr_dagger_and_inflate_rankme():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(1000, 20))
    z = truth @ rng.normal(size=(20, 64)) + 0.3 * rng.normal(size=(1000, 64))
    r = truth @ rng.normal(size=(20, 40))
    wider = np.hstack([z, rng.normal(size=z.shape) * z.std(axis=0)])
    assert abs(ssr_dagger(wider, r) - ssr_dagger(z, r)) < 0.05
    assert rankme(wider) > 1.3 * rankme(z)


# ------------------------------------------------------------------------------------------------------- known answers


def test_a_candidate_that_is_the_reference_reads_it():
    rng = np.random.default_rng(0)
    r = rng.normal(size=(700, 200)) * np.arange(1, 201) ** -0.7
    values = np.linalg.svd(r - r.mean(axis=0), compute_uv=False) ** 2
    assert ssr(r, r, 32) == pytest.approx(values[:32].sum() / values.sum(), rel=1e-9)
    assert ssr_dagger(r, r) > 0.95
    assert cka(r, r) == pytest.approx(1)


@pytest.mark.parametrize("d", [5, 30])
def test_leave_one_out_is_exact(d):
    n, k, penalty = 20, 2, 0.05
    z, r = drawn(1, n, d)
    a = (z - z.mean(axis=0)) / z.std(axis=0) / np.sqrt(d)
    centred = r - r.mean(axis=0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    p, w = u[:, :k], s[:k] / s[:k].sum()
    errors = np.empty_like(p)
    for i in range(n):  # refit without the item: intercept not penalised
        rest = np.delete(np.arange(n), i)
        design = np.hstack([np.ones((n - 1, 1)), a[rest]])
        ridge = penalty * np.diag([0.0, *np.ones(d)])
        weights = np.linalg.solve(design.T @ design + ridge, design.T @ p[rest])
        errors[i] = p[i] - np.r_[1.0, a[i]] @ weights
    expected = 1 - w @ (errors**2).sum(axis=0)
    assert ssr_dagger(z, r, k, penalties=(penalty,)) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("standardize", [True, False])
def test_the_dual_path_equals_the_primal(standardize):
    z, r = drawn(2, 60, 20)
    padded = np.hstack([z, np.full((60, 100), 3.0)])  # wider than the items are many, and nothing new
    dagger = partial(ssr_dagger, rank=5, standardize=standardize)
    assert Features(z).narrow
    assert not Features(padded).narrow
    assert dagger(padded, r) == pytest.approx(dagger(z, r), abs=1e-8)
    for score in (partial(ssr, rank=5), partial(ssr_z, rank=5), cka):
        assert score(padded, r) == pytest.approx(score(z, r), abs=1e-8)
        assert score(z, np.hstack([r, np.ones((60, 100))])) == pytest.approx(score(z, r), abs=1e-8)


@pytest.mark.parametrize("d", [7, 60, 200])
def test_rankme_is_that_of_numpys_singular_values(d):
    z, _ = drawn(3, 60, d)
    s = np.linalg.svd(z, compute_uv=False)
    p = s / s.sum() + 1e-7
    assert rankme(z) == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-6)


@pytest.mark.parametrize("d", [7, 60, 200])
def test_ssr_is_the_weighted_alignment_of_singular_vectors(d):
    z, r = drawn(4, 80, d)
    u, s, _ = np.linalg.svd(z - z.mean(axis=0), full_matrices=False)
    p = np.linalg.svd(r - r.mean(axis=0), full_matrices=False)[0][:, :5]
    w = s**2 / (s**2).sum()
    assert ssr(z, r, 5) == pytest.approx((w * ((p.T @ u) ** 2).sum(axis=0)).sum(), rel=1e-9)
    squeezed = np.linalg.svd(p.T @ (z - z.mean(axis=0)), compute_uv=False)
    assert 1 <= projected_rankme(z, r, 5) <= len(squeezed)


def test_cka_is_the_unbiased_estimate_over_pairs_of_items():
    z, r = drawn(5, 12, 20, 4)

    def hsic(k, m):
        n = len(k)
        k, m = (x - np.diag(np.diag(x)) for x in (k, m))
        one = np.ones(n)
        total = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
        return (np.trace(k @ m) + total - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))

    a, b = z @ z.T, r @ r.T
    assert cka(z, r) == pytest.approx(hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)), rel=1e-8)


def test_a_share_of_variance_gives_the_fewest_components_that_reach_it():
    z, r = drawn(6, 200, 10)
    values = np.linalg.svd(r - r.mean(axis=0), compute_uv=False) ** 2
    fewest = int((np.cumsum(values) / values.sum() < 0.6).sum()) + 1
    assert ssr(z, r, 0.6) == ssr(z, r, fewest)
    assert ssr(z, r, 40) == ssr(z, r, 12)  # the reference has no more


def test_components_are_an_eighth_of_the_items_at_most():
    z, r = drawn(7, 80, 10, 60)
    assert ssr(z, r, 20) == ssr(z, r, 10)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z, r: ssr(z, r[:-1]), r"features has 140 items and reference has 139"),
        (lambda z, r: ssr(z, r, 36), r"140 items are too few for 36 components .* 144 items or more, or rank=17"),
        (lambda z, r: ssr(z, r, 0), "rank=0"),
        (lambda z, r: ssr_dagger(z, r, 5, penalties=(0.0,)), "positive numbers"),
        (lambda z, r: ssr_dagger(z, None), "needs a reference"),
        (lambda z, r: Features(np.ones((9, 3)), "mine"), "mine: the features are the same for every item"),
        (lambda z, r: ssr_dagger(z, r, 5, penalties=(1.0, np.nan)), "positive numbers"),
        (lambda z, r: Features(z + 1j, "mine"), "mine holds complex128: give real numbers"),
        (lambda z, r: Features(z.astype(str), "mine"), "mine holds <U.*: give real numbers"),
        (lambda z, r: Features(z.astype(object), "mine"), "mine holds object: give real numbers"),
        (lambda z, r: Features([[1.0], [1.0, 2.0]], "mine"), "mine cannot be read as an array"),
        (lambda z, r: Features(z * 1e200, "mine"), "scale the features down"),
        (lambda z, r: Features(np.arange(9.0), "mine"), r"mine: give an array \(items, features\)"),
        (lambda z, r: Features(np.where(np.arange(140)[:, None] == 7, np.nan, z), "mine"), "mine: row 7 is not finite"),
        (lambda z, r: Features(np.where(z == z.max(), np.inf, z), "mine"), "not finite"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call(*drawn(0, 140, 8))


def test_constant_columns_carry_nothing():
    z, r = drawn(8, 60, 8)
    with_constant = np.hstack([z, np.full((60, 1), 0.1)])
    for score in ALIGNED.values():
        assert score(with_constant, r) == pytest.approx(score(z, r), rel=1e-9)


def test_prepared_features_give_what_arrays_give():
    z, r = drawn(9, 140, 8)
    one, other = Features(z), Features(r)
    for score in SCORES.values():
        assert score(one, other) == score(z, r)
