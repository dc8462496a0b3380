"""The regressor against closed forms, dense refits and scikit-learn."""

import copy

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.utils.estimator_checks import check_estimator

from fairtrial.errors import InputError
from fairtrial.training.incontext_regression import ManifoldMixture, TangentLocalPolynomial
from fairtrial.training.incontext_regression.polynomial import exponents, fit_local, kernel_weights, monomials
from fairtrial.training.incontext_regression.regressor import LADDER


def turned(rng, rows, columns):
    return np.linalg.qr(rng.standard_normal((max(rows, columns), columns)))[0][:rows]


@pytest.fixture(scope="module")
def flat():
    """Return points of a plane in R^6, their coordinates in it, and queries of both kinds."""
    rng = np.random.default_rng(0)
    basis = turned(rng, 6, 2)
    s, asked = rng.uniform(-1, 1, (400, 2)), rng.uniform(-0.8, 0.8, (20, 2))
    return s @ basis.T + 1, s, asked @ basis.T + 1, asked


@pytest.fixture(scope="module")
def sheets():
    """Return X, y and queries near two curved sheets, of dimension 1 and 2, in R^20."""
    prompt = ManifoldMixture(ambient=20, dims=(1, 2), charts=2, seed=1).ask(12, 150, seed=2)
    return prompt.x[0].numpy(), prompt.y[0].numpy(), prompt.query.numpy()


@pytest.fixture(scope="module")
def fitted(sheets):
    return TangentLocalPolynomial().fit(*sheets[:2])


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_polynomials_of_the_degree_are_reproduced_on_flat_charts(flat, degree):
    X, s, queries, asked = flat
    coefficients = np.random.default_rng(degree).standard_normal(len(exponents(2, degree)) + 1)
    model = TangentLocalPolynomial(degree, dim=2, bandwidth=0.9, ridge=0).fit(X, monomials(s, degree) @ coefficients)
    assert_allclose(model.predict(queries), monomials(asked, degree) @ coefficients, atol=1e-8)


def test_rigid_motions_of_the_rows_change_nothing(sheets, fitted):
    X, y, queries = sheets
    turn = turned(np.random.default_rng(3), 20, 20)
    there = TangentLocalPolynomial().fit(X @ turn + 5, y).predict(queries @ turn + 5)
    assert_allclose(there, fitted.predict(queries), atol=1e-8)


@pytest.mark.parametrize("bandwidth", ["loo", 1.0])
def test_predictions_move_with_an_affine_map_of_the_targets(sheets, bandwidth):
    X, y, queries = sheets
    plain = TangentLocalPolynomial(bandwidth=bandwidth).fit(X, y).predict(queries)
    assert_allclose(TangentLocalPolynomial(bandwidth=bandwidth).fit(X, 3 - 2 * y).predict(queries), 3 - 2 * plain,
                    atol=1e-8)  # fmt: skip


def test_with_all_dimensions_it_is_ambient_local_linear_regression():
    rng = np.random.default_rng(4)
    X, y, queries, h = rng.uniform(size=(120, 3)), rng.standard_normal(120), rng.uniform(0.2, 0.8, (8, 3)), 0.6
    got = TangentLocalPolynomial(dim=3, bandwidth=h, ridge=0).fit(X, y).predict(queries)
    for query, value in zip(queries, got, strict=True):
        root = np.sqrt(np.maximum(1 - ((X - query) ** 2).sum(1) / h**2, 0))
        design = np.c_[np.ones(120), X - query]
        assert_allclose(np.linalg.lstsq(root[:, None] * design, root * y, rcond=None)[0][0], value, atol=1e-8)


def test_degree_zero_is_nadaraya_watson(sheets):
    X, y, queries = sheets
    model = TangentLocalPolynomial(degree=0, bandwidth=2.0).fit(X, y)
    w = np.maximum(1 - ((queries[:, None] - X) ** 2).sum(2) / 4, 0)
    assert_allclose(model.predict(queries), w @ y / w.sum(1), atol=1e-10)


def test_the_leave_one_out_shortcut_equals_refitting():
    rng = np.random.default_rng(5)
    X, y, h = rng.uniform(size=(20, 2)), rng.standard_normal(20), 0.7
    model = TangentLocalPolynomial(dim=2, bandwidth=h).fit(X, y)
    residuals = [
        y[i] - TangentLocalPolynomial(dim=2, bandwidth=h).fit(np.delete(X, i, 0), np.delete(y, i)).predict(X[i : i + 1])
        for i in range(20)
    ]
    assert_allclose(model.noise_, np.sqrt(np.mean(np.square(residuals))), rtol=1e-6)
    # Without ridge, row by row, to rounding.
    for i in range(20):
        delta = X - X[i]
        w = kernel_weights(np.linalg.norm(delta, axis=1), h)
        whole = fit_local(delta[None] / h, w[None], 1, ridge=0)
        rest = fit_local(np.delete(delta, i, 0)[None] / h, np.delete(w, i)[None], 1, ridge=0)
        shortcut = (y[i] - whole.weights[0] @ y) / (1 - whole.own[0])
        assert_allclose(y[i] - rest.weights[0] @ np.delete(y, i), shortcut, atol=1e-8)


def test_any_frame_near_the_tangent_space_gives_the_same_prediction():
    rng = np.random.default_rng(6)
    for _ in range(10):
        tangent, delta = turned(rng, 8, 3), rng.standard_normal((60, 8))
        u = delta @ tangent  # coordinates of the tangential part
        w = kernel_weights(np.linalg.norm(u, axis=1), 3.0)
        angles = rng.uniform(0, np.pi / 4, 3)
        rest = turned(rng, 8, 8) @ np.eye(8, 3)
        rest = np.linalg.qr(rest - tangent @ (tangent.T @ rest))[0]
        frame = (tangent * np.cos(angles) + rest * np.sin(angles)) @ turned(rng, 3, 3)
        tilted = (u @ tangent.T) @ frame
        for degree in (1, 2):
            assert_allclose(fit_local(tilted[None], w[None], degree, ridge=0).weights,
                            fit_local(u[None], w[None], degree, ridge=0).weights, atol=1e-8)  # fmt: skip


def test_predictions_agree_with_a_loop_over_queries(sheets):
    X, y, queries = sheets
    model = TangentLocalPolynomial().fit(X, np.c_[y, -y])
    one_by_one = np.concatenate([model.predict(query[None]) for query in queries])
    assert_allclose(model.predict(queries), one_by_one, atol=1e-10)
    assert_allclose(one_by_one[:, 0], -one_by_one[:, 1], atol=1e-10)


def test_lepskis_rule_chooses_among_multiples_of_the_left_one_out_bandwidth(sheets):
    X, y, queries = sheets
    noise = np.random.default_rng(9).standard_normal(len(y))
    ratios = []
    for targets in (y, noise):
        base, chosen = (
            TangentLocalPolynomial(bandwidth=rule).fit(X, targets).local_report(queries)["bandwidth"].to_numpy()
            for rule in ("loo", "lepski")
        )
        ratios.append(chosen / base)
    assert np.abs(np.array(ratios)[..., None] - LADDER).min(2).max() < 1e-9
    assert (ratios[1] >= 1).mean() > 0.5  # without a function nothing speaks against wide ones


def test_two_crossing_lines_are_kept_apart():
    rng = np.random.default_rng(7)
    t = rng.uniform(-1, 1, 300)
    first = np.arange(300) % 2 == 0
    bend = 0.2 * t**2  # a line without any bend has no scale to judge by
    X, y = np.where(first[:, None], np.c_[t, bend, 0 * t], np.c_[0 * t, t, bend]), np.where(first, 1.0, -1.0)
    at = np.array([[s, 0.2 * s**2, 0] for s in (0.35, 0.5, 0.7)])
    model = TangentLocalPolynomial(dim=1, bandwidth=0.3).fit(X, y)
    assert_allclose(model.predict(at), 1.0, atol=1e-6)


def test_the_report_says_what_a_prediction_rests_on(sheets, fitted):
    X, _, queries = sheets
    told = fitted.local_report(queries)
    assert told["dimension"].between(1, 4).all()
    assert (told["condition"] >= 1).all()
    assert (told["leverage"] <= 1 + 1e-9).all()
    assert (told["neighbours"] <= len(X)).all()
    assert not told["outside"].any()


# ----------------------------------------------------------------------------------------------------------- bad input


def test_too_few_neighbours_lower_the_degree():
    X, y = np.arange(12.0)[:, None] * [1.0, 2.0, 0.0], np.arange(12.0)
    told = TangentLocalPolynomial(degree=2, dim=1, bandwidth=2.3).fit(X, y).local_report(X)
    assert (told["degree"] < 2).all()


def test_duplicates_do_not_break_the_fit():
    X = np.repeat(np.random.default_rng(8).standard_normal((6, 3)), 10, axis=0)
    y = np.repeat(np.arange(6.0), 10)
    assert_allclose(TangentLocalPolynomial(bandwidth=1e-3).fit(X, y).predict(X), y, atol=1e-6)
    assert np.isfinite(TangentLocalPolynomial().fit(X, y).predict(X)).all()


def test_queries_far_from_all_rows_are_told(sheets, fitted):
    far = np.r_[sheets[2][:2], sheets[2][:1] + 1e4]
    with pytest.warns(UserWarning, match="1 of 3 queries, row 2"):
        told = fitted.predict(far)
    assert_allclose(told, copy.copy(fitted).set_params(outside="nearest").predict(far))
    marked = copy.copy(fitted).set_params(outside="nan").predict(far)
    assert np.isnan(marked).tolist() == [False, False, True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"degree": -1}, {"degree": 1.5}, {"dim": 0}, {"dim": 21}, {"dim": "many"}, {"bandwidth": 0.0},
        {"bandwidth": "cv"}, {"bandwidth": np.nan}, {"bandwidth": None}, {"ridge": -1.0}, {"outside": "ignore"},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(sheets, wrong):
    X, y, _ = sheets
    with pytest.raises(InputError):
        TangentLocalPolynomial(**wrong).fit(X, y)


def test_fewer_than_five_rows_and_missing_values_are_refused(sheets, fitted):
    X, y, queries = sheets
    with pytest.raises(ValueError, match="minimum of 5"):
        TangentLocalPolynomial().fit(X[:4], y[:4])
    with pytest.raises(ValueError, match="NaN"):
        TangentLocalPolynomial().fit(np.where(X[0, 0] == X, np.nan, X), y)
    with pytest.raises(ValueError, match="NaN"):
        fitted.predict(np.full_like(queries, np.nan))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping check")
@pytest.mark.parametrize("model", [TangentLocalPolynomial(), TangentLocalPolynomial(bandwidth="lepski")])
def test_it_keeps_scikit_learns_protocol(model):
    check_estimator(model)
