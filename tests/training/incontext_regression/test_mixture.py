"""The prompt generator and its rates, the geometry found from points, the oracle, and the trained twin."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fairtrial.errors import InputError
from fairtrial.training.incontext_regression import (
    LinearAttentionTransformer,
    ManifoldMixture,
    TangentLocalPolynomial,
    aggregate_rate,
    oracle_estimate,
    risk,
    train_twin,
)
from fairtrial.training.incontext_regression.geometry import local_geometry

# --------------------------------------------------------------------------------------------------------------- rates


def test_the_rate_of_one_chart_has_the_minimax_exponent():
    assert_allclose(aggregate_rate([1.0], 1, 2.0, 1000).slope, -0.8)
    assert_allclose(aggregate_rate([1.0], 1, 2.0, 1000).rate, 1000**-0.8)


def test_the_smoother_charts_share_vanishes():
    shares = [aggregate_rate([0.5, 0.5], 1, [2.0, 1.0], n).shares[0] for n in (10**2, 10**4, 10**8, 10**16)]
    assert np.all(np.diff(shares) < 0)
    assert shares[-1] < 0.02


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.1, 1), min_size=1, max_size=4), st.integers(10, 10**6), st.integers(1, 4))
def test_the_slope_is_the_derivative_of_the_logarithm(raw, n, d):
    pi = np.array(raw) / np.sum(raw)
    beta = np.linspace(1, 3, len(pi))
    step = max(1, n // 1000)
    numeric = np.diff(np.log([aggregate_rate(pi, d, beta, m).rate for m in (n - step, n + step)])) / np.log(
        (n + step) / (n - step)
    )
    assert_allclose(aggregate_rate(pi, d, beta, n).slope, numeric[0], rtol=2e-2)


@pytest.mark.parametrize(
    "wrong", [([0.5, 0.4], 1, 2.0, 10), ([1.0], 0, 2.0, 10), ([1.0], 1, -1.0, 10), ([1.0], 1, 2.0, 0)]
)
def test_rates_of_what_is_no_mixture_are_refused(wrong):
    with pytest.raises(InputError):
        aggregate_rate(*wrong)


# ------------------------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize("shape", ["generic", "sphere"])
def test_tangents_are_the_derivative_of_the_points(shape):
    tasks = ManifoldMixture(ambient=16, dims=(2,), charts=1, shape=shape, seed=3)
    s = np.random.default_rng(0).uniform(0.2, 0.8, (6, 2 if shape == "generic" else 3))
    if shape == "sphere":
        s /= np.linalg.norm(s, axis=1, keepdims=True)
    frame = tasks.tangents(0, s)
    assert_allclose(frame.transpose(0, 2, 1) @ frame, np.broadcast_to(np.eye(2), (6, 2, 2)), atol=1e-12)
    for direction in np.eye(s.shape[1]):
        move = direction if shape == "generic" else direction - (s @ direction)[:, None] * s
        change = (tasks.points(0, s + 1e-5 * move) - tasks.points(0, s - 1e-5 * move)) / 2e-5
        along = (frame @ (frame.transpose(0, 2, 1) @ change[:, :, None]))[..., 0]
        assert_allclose(along, change, atol=1e-6)


def found(x, queries, h, dim=None):
    delta = x - queries[:, None]
    distance = np.linalg.norm(delta, axis=2)
    order = np.argsort(distance, axis=1)
    delta, distance = np.take_along_axis(delta, order[..., None], 1), np.take_along_axis(distance, order, 1)
    return local_geometry(delta, distance, np.full(len(queries), h), 4, dim)


def test_tangents_of_the_unit_circle_are_found():
    t = np.random.default_rng(1).uniform(0, 2 * np.pi, 500)
    asked = np.linspace(0, 6, 40)
    x, queries = np.c_[np.cos(t), np.sin(t)], np.c_[np.cos(asked), np.sin(asked)]
    frames = found(x, queries, 0.2, dim=1).frames[:, :, 0]
    angle = np.arccos(np.clip(np.abs((frames * np.c_[-np.sin(asked), np.cos(asked)]).sum(1)), 0, 1))
    assert angle.max() < 0.05


@pytest.mark.parametrize("blur", [0.0, 0.01])
@pytest.mark.parametrize(("shape", "dim"), [("sphere", 1), ("sphere", 2), ("generic", 1)])
def test_dimensions_of_noise_free_and_noisy_sheets_are_found(shape, dim, blur):
    tasks = ManifoldMixture(ambient=10, dims=(dim,), charts=1, shape=shape, blur=blur, seed=2)
    prompt = tasks.ask(60, 500, seed=3)
    model = TangentLocalPolynomial(bandwidth=0.45).fit(prompt.x[0].numpy(), prompt.y[0].numpy())
    assert (model.local_report(prompt.query.numpy())["dimension"] == dim).mean() > 0.95


def test_the_atlas_covers_the_sheets_with_tangent_frames():
    tasks = ManifoldMixture(ambient=9, dims=(1, 2), charts=3, seed=4)
    atlas = tasks.atlas(k=24, n=300, scale=0.5)
    assert [chart.dim for chart in atlas] == [1] * 24 + [2] * 24 + [1] * 24
    assert_allclose(atlas[24].bandwidth, 0.5 * 100 ** (-1 / 6))
    prompt = tasks.sample(300, 5, seed=5)
    distance = np.stack([np.linalg.norm(prompt.query.numpy() - c.center, axis=1) for c in atlas], axis=1)
    inside = distance < [c.radius for c in atlas]
    assert inside.any(1).mean() > 0.97
    leaning = [
        np.linalg.svd(atlas[c].frame.T @ prompt.frame[b].numpy()[:, : atlas[c].dim], compute_uv=False).min() < 0.5
        for b, c in np.argwhere(inside)
        if c // 24 == prompt.chart[b]
    ]
    assert np.mean(leaning) < 0.02  # 60 degrees, but for what lies between the points the atlas was laid over
    for chart in atlas:
        assert_allclose(chart.frame.T @ chart.frame, np.eye(chart.dim), atol=1e-12)


def test_a_prompt_holds_what_it_says():
    tasks = ManifoldMixture(ambient=8, dims=(1, 2), charts=4, noise=0.2, seed=6)
    prompt = tasks.sample(batch=50, n=40, seed=7)
    again = tasks.sample(batch=50, n=40, seed=7)
    assert torch.equal(prompt.x, again.x)
    assert torch.equal(prompt.target, again.target)
    assert prompt.frame.shape == (50, 8, 2)
    assert len(prompt[:3]) == 3
    assert 0.3 < float(prompt.y.var()) < 2.5
    alone = tasks.sample(batch=20, n=10, seed=1, among=1)
    assert int(alone.chart.max()) == int(alone.context_chart.max()) == 0
    shared = tasks.ask(7, 30, seed=2)
    assert torch.equal(shared.x[0], shared.x[6])
    assert len(shared.target) == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": "cube"},
        {"dims": ()},
        {"dims": (9,)},
        {"charts": 0},
        {"noise": -1.0},
        {"smoothness": 0.0},
        {"smoothness": np.nan},
        {"noise": np.nan},
        {"blur": np.nan},
    ],
)
def test_mixtures_that_do_not_fit_are_refused(wrong):
    with pytest.raises(InputError):
        ManifoldMixture(**{"ambient": 8, **wrong})


def test_impossible_prompts_are_refused():
    tasks = ManifoldMixture(ambient=8)
    for call in (
        lambda: tasks.sample(0, 5),
        lambda: tasks.sample(1, 0),
        lambda: tasks.sample(1, 5, among=9),
        lambda: tasks.atlas(0),
        lambda: tasks.atlas(2, scale=0.0),
        lambda: tasks.atlas(2, scale=np.nan),
        lambda: tasks.atlas(1.5),
        lambda: aggregate_rate([0.5, 0.5], [1, 2, 3], 2.0, 9),
        lambda: aggregate_rate([np.nan], 1, 2.0, 9),
    ):
        with pytest.raises(InputError):
            call()


# --------------------------------------------------------------------------------------------------------------- oracle


def test_the_oracle_is_exact_where_the_function_is_constant():
    tasks = ManifoldMixture(ambient=8, dims=(1, 2), charts=2, noise=0.0, seed=8)
    prompt = tasks.ask(20, 200, seed=9)
    flat = prompt.context_chart.double() * 3 - 1  # another constant on each sheet
    told = type(prompt)(prompt.x, flat, *(getattr(prompt, name) for name in
                                          ("query", "target", "chart", "context_chart", "frame")))  # fmt: skip
    assert_allclose(oracle_estimate(tasks, told), prompt.chart.double() * 3 - 1, atol=1e-6)


def test_the_oracles_error_falls_with_the_context():
    tasks = ManifoldMixture(ambient=8, dims=(1,), charts=1, seed=10)
    errors = []
    for n in (50, 800):
        prompt = tasks.ask(60, n, seed=11)
        errors.append(np.square(oracle_estimate(tasks, prompt) - prompt.target.numpy()).mean())
    assert errors[1] < errors[0] / 2


# ----------------------------------------------------------------------------------------------------------------- twin


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_transformer_permutes_with_its_context_and_ignores_padding(attention):
    model = LinearAttentionTransformer.untrained(3, width=8, heads=2, layers=(1, 2), attention=attention)
    rng = torch.Generator().manual_seed(0)
    x, y, query = (
        torch.randn(2, 9, 3, generator=rng),
        torch.randn(2, 9, generator=rng),
        torch.randn(2, 3, generator=rng),
    )
    with torch.no_grad():
        plain = model(x, y, query)
        order = torch.randperm(9, generator=rng)
        assert_allclose(model(x[:, order], y[:, order], query), plain, atol=1e-5)
        mask = torch.arange(9) < torch.tensor([[9], [5]])
        assert_allclose(model(x, y, query, mask)[1], model(x[1:, :5], y[1:, :5], query[1:])[0], atol=1e-5)


def test_a_twin_learns():
    tasks = ManifoldMixture(ambient=2, dims=(1,), charts=1, noise=0.1, seed=1)
    size = {"lengths": (4, 12), "width": 8, "heads": 2, "layers": (1, 1), "batch": 8, "learning_rate": 1e-2}
    models = [train_twin(tasks, steps=steps, **size) for steps in (1, 25)]
    test = tasks.sample(200, 12, seed=5)
    assert risk(models[1], test) < risk(models[0], test)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"batch": 0}, {"lengths": (9, 3)}, {"learning_rate": 0.0},
                                   {"heads": 3}, {"attention": "cosine"}])  # fmt: skip
def test_trainings_out_of_range_are_refused(wrong):
    with pytest.raises(InputError):
        train_twin(ManifoldMixture(ambient=4), **{"steps": 1, "width": 8, "heads": 2, **wrong})
