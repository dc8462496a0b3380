"""The written-down network against matrix algebra, layer by layer."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fairtrial.errors import InputError
from fairtrial.training.incontext_regression import (
    Chart,
    ConstructedRegressor,
    LinearAttentionTransformer,
    ManifoldMixture,
    frame_estimate,
)
from fairtrial.training.incontext_regression.construction import (
    chart_solver,
    enough_weight,
    geometric_preconditioner,
    geometry_slots,
    local_weights,
    weight_slots,
)
from fairtrial.training.incontext_regression.polynomial import monomials
from fairtrial.training.incontext_regression.transformer import newton_schulz, tokens

H = 1.8  # bandwidth


@pytest.fixture(scope="module")
def tasks():
    return ManifoldMixture(ambient=5, dims=(1, 2), charts=2, noise=0.1, seed=1)


@pytest.fixture(scope="module")
def prompt(tasks):
    return tasks.sample(batch=4, n=80, seed=2)


@pytest.fixture(scope="module")
def atlas(tasks):
    return tasks.atlas(k=16, n=80)


@pytest.fixture(scope="module")
def model(atlas):
    return ConstructedRegressor(atlas, newton=12, outside="nearest")


@pytest.fixture(scope="module")
def plane(prompt):
    """Return prompts on the plane of the first two axes."""
    x = torch.zeros_like(prompt.x)
    x[..., :2] = 2 * torch.rand(4, 80, 2, dtype=x.dtype, generator=torch.Generator().manual_seed(0)) - 1
    return replace(prompt, x=x, query=torch.zeros_like(prompt.query))


def streams(prompt, layers=3, **kwargs):
    """Return stage 0's stream, and stage 1's after its opening, every layer and at its end, at bandwidth H."""
    dim = prompt.x.shape[2]
    parts, attended = tokens(prompt.x, prompt.y, prompt.query)
    told = torch.zeros(*parts.shape[:2], 2, dtype=parts.dtype)
    told[:, 0] = torch.tensor([H**-2, 1.0], dtype=torch.float64)
    first, second = local_weights(dim, 1e-3), geometric_preconditioner(dim, layers, by_trace=True)
    *_, (_, weighed) = first.states(torch.cat([parts, told], dim=2) @ first.read_in.T, attended)
    passed = [state for stage, state in second.states(weighed @ second.read_in.T, attended)]
    return weighed.detach(), [state.detach() for state in passed], attended


def test_weights_and_squared_distances_in_the_tokens_equal_direct_computation(prompt):
    weighed, _, _ = streams(prompt)
    at = weight_slots(5)
    delta = (prompt.x - prompt.query[:, None]).numpy()
    square = (delta**2).sum(2)
    context = weighed[:, 1:].numpy()
    assert_allclose(context[..., at["delta"]], delta, atol=1e-12)
    assert_allclose(context[..., at.at("r2")], square, rtol=1e-12)
    assert_allclose(context[..., at.at("w")], np.maximum(1 - square / H**2, 0), atol=1e-12)
    assert float(weighed[:, 0, at.at("w")].abs().max()) == 0


def test_layers_of_stage_1_equal_the_power_of_the_preconditioner(prompt):
    _, passed, _ = streams(prompt)
    at = geometry_slots(5)
    for b in range(len(prompt)):
        delta = (prompt.x[b] - prompt.query[b]).numpy()
        w = np.maximum(1 - (delta**2).sum(1) / H**2, 0)
        moments = delta.T @ (w[:, None] * delta)
        shrink = np.eye(5) - moments / np.trace(moments)
        for layer in range(4):  # passed[0] is the opening, before any layer
            z = passed[layer][b, 1:, at["z"]].numpy()
            assert_allclose(z, delta @ np.linalg.matrix_power(shrink, layer), atol=1e-12)


def test_points_far_off_the_tangent_space_lose_their_weight(prompt):
    _, passed, _ = streams(prompt)
    at, last = geometry_slots(5), passed[-1][:, 1:]
    off = last[..., at["z"]].square().sum(2) / (3 * H**2) ** 2
    assert_allclose(last[..., at.at("weight")], last[..., at.at("w")] * torch.relu(1 - off), atol=1e-12)


def solved(prompt, degree, layers, gamma=None):
    """Return each layer's prediction of stage 2 for a chart on the first axes, and the least squares it solves."""
    chart = Chart(np.zeros(5), np.eye(5)[:, :2], 2, degree + 0.5, H, 10.0)
    _, passed, attended = streams(prompt)
    solver = chart_solver(chart, layers, newton=30)
    if gamma is not None:  # a constant in place of the inverse that Newton-Schulz finds
        whitening = solver.blocks[-2].attention
        whitening.newton = 0
        whitening.state = lambda stream, mask: gamma * torch.eye(whitening.key.shape[2], dtype=torch.float64)
    predicted = [
        (state[:, 0] @ solver.read_out).detach().numpy()
        for stage, state in solver.states(passed[-1] @ solver.read_in.T, attended)
        if stage == len(solver.repeats) - 1
    ]
    at, last = geometry_slots(5), passed[-1][:, 1:].numpy()
    phi = monomials((last[..., at["delta"]] - last[..., at["z"]])[..., :2] / H, degree)
    w = last[..., at.at("weight")]
    normal = np.einsum("bt,btp,btq->bpq", w, phi, phi) / w.sum(1)[:, None, None]
    moment = np.einsum("bt,btp,bt->bp", w, phi, prompt.y.numpy()) / w.sum(1)[:, None]
    return np.array(predicted), normal, moment


@pytest.mark.parametrize("degree", [1, 2])
def test_with_the_inverse_one_layer_of_stage_2_is_weighted_least_squares(plane, degree):
    predicted, normal, moment = solved(plane, degree, layers=1)
    exact = np.linalg.solve(normal, moment[..., None])[:, 0, 0]
    assert_allclose(predicted[0], exact, rtol=1e-5)  # the ridge of 1e-8 in the inverse


def test_without_it_the_error_falls_as_gradient_descent(plane):
    layers, gamma = 12, 0.4
    predicted, normal, moment = solved(plane, 1, layers, gamma)
    theta = np.linalg.solve(normal, moment[..., None])  # (B, q, 1)
    values = np.linalg.eigvalsh(normal)
    slowest = np.abs(1 - gamma * values).max(1)
    error = -theta
    for layer in range(layers):
        error = error - gamma * normal @ error
        assert_allclose(predicted[layer] - theta[:, 0, 0], error[:, 0, 0], atol=1e-10)
        assert (np.linalg.norm(error[..., 0], axis=1) <= slowest ** (layer + 1) * np.linalg.norm(theta[..., 0], axis=1)
                + 1e-12).all()  # fmt: skip


def test_newton_schulz_squares_the_residual_and_inverts():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((4, 4)))[0]
    a = torch.from_numpy(basis @ np.diag([1.0, 0.3, 0.05, 2e-3]) @ basis.T)
    residuals = [torch.linalg.matrix_norm(torch.eye(4) - a @ x, 2) for x in newton_schulz(a, 14)]
    for before, after in itertools.pairwise(residuals[:9]):
        assert_allclose(after, before**2, rtol=1e-4)
    assert residuals[-1] < 1e-4


# ------------------------------------------------------------------------------------------------------------ the whole


def test_the_network_equals_the_estimator_it_computes(model, atlas, prompt):
    solved = [
        frame_estimate(atlas, x.numpy(), y.numpy(), query.numpy())
        for x, y, query in zip(prompt.x, prompt.y, prompt.query, strict=True)
    ]
    assert_allclose(model(prompt.x, prompt.y, prompt.query), solved, atol=1e-12)


def test_permuting_or_duplicating_the_context_changes_nothing(model, prompt):
    plain = model(prompt.x, prompt.y, prompt.query)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    assert_allclose(model(prompt.x[:, order], prompt.y[:, order], prompt.query), plain, atol=1e-10)
    # Sums are divided by the sum of weights: twice the tokens, half the constant.
    halved = copy.deepcopy(model)
    halved.enough *= 2
    halved.weights = local_weights(5, halved.enough)
    with torch.no_grad():
        twice = halved(prompt.x.repeat(1, 2, 1), prompt.y.repeat(1, 2), prompt.query)
    assert_allclose(twice, plain, atol=1e-10)


def test_frames_within_45_degrees_give_the_same_prediction_on_a_flat_chart():
    rng = np.random.default_rng(3)
    x, y = torch.zeros(1, 60, 4, dtype=torch.float64), torch.from_numpy(rng.standard_normal((1, 60)))
    x[..., 0] = torch.from_numpy(rng.uniform(-1, 1, (1, 60)))
    query = torch.zeros(1, 4, dtype=torch.float64)
    found = [
        ConstructedRegressor([Chart(np.zeros(4), frame[:, None], 1, 2.0, 0.8, 2.0)], newton=25)(x, y, query)
        for frame in (np.array([1.0, 0, 0, 0]), np.array([1.0, 0.9, 0, 0]), np.array([1.0, -0.5, 0.5, 0.5]))
    ]
    assert_allclose(found[1], found[0], atol=1e-7)
    assert_allclose(found[2], found[0], atol=1e-7)


def test_padding_is_not_seen(model, prompt):
    mask = torch.ones(4, 80, dtype=torch.bool)
    mask[1, 50:] = False
    x, y = prompt.x.clone(), prompt.y.clone()
    x[1, 50:], y[1, 50:] = torch.nan, 1e9
    padded = model(x, y, prompt.query, mask)
    assert_allclose(padded[1], model(prompt.x[1:2, :50], prompt.y[1:2, :50], prompt.query[1:2])[0], atol=1e-10)
    assert_allclose(padded[0], model(prompt.x[:1], prompt.y[:1], prompt.query[:1])[0], atol=1e-10)


def test_a_radius_without_points_is_doubled(prompt):
    y = torch.full((1, 6), 2.0, dtype=torch.float64)
    x = torch.zeros(1, 6, 3, dtype=torch.float64)
    x[0, :, 0] = torch.linspace(0.5, 0.7, 6)
    chart = Chart(np.zeros(3), np.eye(3)[:, :1], 1, 1.0, 0.1, 1.0)
    found = ConstructedRegressor([chart])(x, y, torch.zeros(1, 3, dtype=torch.float64))
    assert_allclose(found, 2.0, atol=1e-6)


def test_queries_in_no_chart_are_told(model, atlas, prompt):
    far = prompt.query + torch.tensor([0, 0, 0, 50.0])[:, None]
    with pytest.warns(UserWarning, match="1 of 4 queries, number 3"):
        ConstructedRegressor(atlas)(prompt.x, prompt.y, far)
    marked = ConstructedRegressor(atlas, outside="nan")(prompt.x, prompt.y, far)
    assert marked.isnan().tolist() == [False, False, False, True]


def test_a_gamma_that_makes_stage_1_diverge_is_refused_and_a_small_one_is_not(atlas, prompt):
    with pytest.raises(InputError, match="largest eigenvalue"):
        ConstructedRegressor(atlas, gamma=[50.0] * len(atlas), outside="nearest")(prompt.x, prompt.y, prompt.query)
    slow = ConstructedRegressor(atlas, gamma=[0.5] * len(atlas), outside="nearest")
    assert slow(prompt.x, prompt.y, prompt.query).isfinite().all()


def test_trace_and_explain_tell_the_layers(model, prompt):
    told = model.trace(prompt)
    assert told.preconditioner.shape == (9, 4)
    assert told.newton.shape == (13, 4)
    assert told.predictions.shape == (4, 4)
    assert (told.preconditioner.diff(dim=0) <= 1e-12).all()
    assert (told.preconditioner[0] - 1).abs().max() < 1e-9
    assert ((told.normal >= 0) & (told.normal < 1)).all()
    assert_allclose(told.predictions[-1], model(prompt.x, prompt.y, prompt.query), atol=1e-9)
    words = model.explain(prompt)
    assert "8 layers" in words
    assert "12 Newton-Schulz" in words
    assert "32 charts" in words


def test_the_parameters_can_be_trained(atlas, prompt):
    model = ConstructedRegressor(atlas, outside="nearest").requires_grad_(True)
    (model(prompt.x, prompt.y, prompt.query) - prompt.target).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.weights.blocks.parameters())
    assert isinstance(model.geometry, LinearAttentionTransformer)


@pytest.mark.parametrize(
    "wrong", [{"layers1": -1}, {"layers2": 0}, {"newton": 0}, {"gamma": "auto"}, {"gamma": [1.0]}, {"outside": "raise"}]
)
def test_parameters_of_the_network_out_of_range_are_refused(atlas, wrong):
    with pytest.raises(InputError):
        ConstructedRegressor(atlas, **wrong)


def test_charts_that_do_not_fit_are_refused(atlas):
    for wrong, word in (
        ({"frame": np.eye(4)[:, :1]}, "frame"), ({"bandwidth": 0.0}, "positive"),
        ({"frame": np.zeros((5, 1))}, "depend"),
        ({"center": np.full(5, np.nan)}, "finite"), ({"dim": 6}, "dim"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=word):
            ConstructedRegressor([replace(atlas[0], **wrong)])
    with pytest.raises(InputError, match="no chart"):
        ConstructedRegressor([])


def test_prompts_that_cannot_be_read_are_refused(model, prompt):
    x, y, query = prompt.x, prompt.y, prompt.query
    for arguments, word in (
        ((x[0], y, query), "x"), ((x, y[:, :5], query), "y"), ((x, y, query[:, :2]), "query"),
        ((x, torch.where(y == y[0, 0], torch.nan, y), query), "not finite"), ((x, y, query * torch.inf), "not finite"),
        ((x, y, query, torch.zeros_like(y)), "a point in every prompt"), ((x, y, query, torch.ones(2, 2)), "mask"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=word):
            model(*arguments)


def test_enough_weight_is_one_more_than_coefficients(atlas):
    assert enough_weight(atlas) == 4  # 1, u1, u2 on the charts of dimension 2
