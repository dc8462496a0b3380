import math

import numpy as np
import pytest
import torch
from sklearn.utils.estimator_checks import parametrize_with_checks

from fairtrial.errors import FairtrialError, InputError
from fairtrial.testing import check_trial
from fairtrial.training.sparse_connectivity import (
    StableTwoLayerReLU,
    patch_geometry,
    plan_receptive_field,
    stability_certificate,
)
from fairtrial.training.sparse_connectivity.geometry import half_space_cost, isolation_margin, memorisation_cost
from fairtrial.training.sparse_connectivity.trial import SparseParams, certified, check, parts, trial


def isolated(points):
    return [i for i in range(len(points)) if isolation_margin(points, i) > 0]


def test_all_points_of_a_circle_the_ends_of_a_segment_and_the_corners_of_a_grid_are_extreme():
    angles = np.linspace(0, 2 * np.pi, 25, endpoint=False)
    assert len(isolated(np.stack([np.cos(angles), np.sin(angles)], axis=1))) == 25
    segment = np.stack([np.linspace(0, 1, 9), 2 * np.linspace(0, 1, 9)], axis=1)
    assert isolated(segment) == [0, 8]
    grid = np.stack(np.meshgrid(np.arange(5.0), np.arange(5.0)), axis=-1).reshape(-1, 2)
    assert isolated(grid) == [0, 4, 20, 24]


def test_extreme_points_are_the_vertices_of_the_convex_hull():
    from scipy.spatial import ConvexHull

    points = np.random.default_rng(0).standard_normal((40, 3))
    assert isolated(points) == sorted(ConvexHull(points).vertices.tolist())


def test_a_margin_is_that_of_a_separating_half_space():
    points = np.random.default_rng(1).standard_normal((12, 2))
    points[0] = [5, 0]
    angles = np.linspace(0, 2 * np.pi, 20_000)
    u = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    heights = u @ points.T
    best = (heights[:, 0] - heights[:, 1:].max(1)).max()
    assert 0 < isolation_margin(points, 0) <= best + 1e-9  # the program's norm is another, its margin is attained
    assert isolation_margin(points, 0) > 0.7 * best


@pytest.mark.slow
def test_on_a_sphere_every_point_can_be_isolated_and_few_small_patches_can():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((80, 32))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    dense = patch_geometry(x, size=32, samples=40)
    small = patch_geometry(x, size=2, stride=2, samples=60)
    assert dense.isolable_fraction(0.1) == 1
    assert small.isolable_fraction(0.1) < 0.15
    assert small.points == 80 * 16
    assert small.memorisation_cost > 5 * dense.memorisation_cost
    assert dense.memorisable_fraction == 1
    row = small.isolable.iloc[0]
    assert row["low"] <= row["share"] <= row["high"]
    assert any("fewer patches" in note for note in patch_geometry(x[:20], size=32, samples=5).notes)
    with pytest.raises(InputError, match="measured are"):
        dense.isolable_fraction(0.3)


@pytest.mark.slow
def test_permuted_pixels_raise_the_effective_dimension():
    rng = np.random.default_rng(3)
    smooth = rng.standard_normal((25, 8, 8)).cumsum(1).cumsum(2)
    permuted = smooth.reshape(25, -1)[:, rng.permutation(64)].reshape(smooth.shape)
    a, b = (patch_geometry(x, size=3, samples=30) for x in (smooth, permuted))
    assert b.effective_dimension > a.effective_dimension
    assert b.isolable_fraction(0.1) > a.isolable_fraction(0.1)


def test_duplicates_are_dropped_and_uncovered_entries_told():
    x = np.tile(np.arange(12.0).reshape(1, 12), (5, 1)) + np.arange(5)[:, None] % 2
    told = patch_geometry(x, size=5, stride=5, samples=10)
    assert told.distinct < told.points
    assert any("duplicates" in note for note in told.notes)
    assert any("2 entries" in note for note in told.notes)
    assert set(told.depth_quantiles) == {0.05, 0.25, 0.5}
    assert all(0 < depth <= 0.6 for depth in told.depth_quantiles.values())


def test_the_depth_of_a_symmetric_sets_centre_is_a_half():
    rng = np.random.default_rng(4)
    half = rng.standard_normal((100, 3))
    points = np.concatenate([half, -half, np.zeros((1, 3))])
    from fairtrial.training.sparse_connectivity.geometry import _depths

    deepest = _depths(points, np.zeros((1, 3)), np.random.default_rng(0))[0.5]
    assert deepest >= 0.5 - 1 / len(points)


def test_the_cost_of_an_isolated_point_has_its_closed_form():
    """A neuron active on one of N patches spends P^2 s sqrt(1 + |p|^2) for a response of s / J."""
    flat = np.array([[3.0, 4.0], [0.0, 0.0], [0.1, 0.0], [0.0, 0.1]])
    u = np.array([[0.6, 0.8]])
    heights = flat @ u.T
    t = np.array([4.0])
    g = half_space_cost(flat, heights, t, heights > t)
    assert g[0] == pytest.approx((1 / 4) ** 2 * 1.0 * math.sqrt(26))
    owner, per = np.array([0, 0, 1, 1]), 2
    cost = memorisation_cost(flat, owner, 0, per, np.random.default_rng(0))
    assert cost <= (1 / 4) ** 2 * math.sqrt(26) * per + 1e-9


def test_receptive_fields_are_ranked_by_how_they_restrain():
    images = np.random.default_rng(5).standard_normal((30, 8, 8)).cumsum(1).cumsum(2)
    plan = plan_receptive_field(images, [2, 4, 8], samples=10)
    assert set(plan["size"]) == {2, 4, 8}
    assert plan["memorisation_cost"].is_monotonic_decreasing
    assert plan["size"].iloc[-1] == 8
    with pytest.raises(InputError, match="samples=0"):
        patch_geometry(images, size=2, samples=0)
    with pytest.raises(InputError, match="no sizes"):
        plan_receptive_field(images, [])


@pytest.mark.parametrize(
    ("images", "size", "word"),
    [
        (np.zeros((3, 4)), 2, "all patches are the same"),
        (np.full((3, 4), np.nan), 2, "input 0 is not finite"),
        (np.ones((3, 4)), 9, "from 1 to 4"),
        (np.ones(4), 2, "vectors"),
        (np.full((3, 4), "a"), 2, "no array of real numbers"),
        (np.eye(4), 2.5, "from 1 to 4"),
    ],
)
def test_patches_without_geometry_are_refused(images, size, word):
    with pytest.raises(InputError, match=word):
        patch_geometry(images, size=size)


# ------------------------------------------------------------------------------------------------------------ estimator


@parametrize_with_checks([StableTwoLayerReLU(width=20, learning_rate="edge*0.1", steps=60, random_state=0)])
def test_the_dense_network_is_a_scikit_learn_regressor(estimator, check):
    check(estimator)


@pytest.mark.parametrize("kind", ["dense", "local", "conv", "random"])
def test_every_connectivity_learns_and_can_be_certified(kind):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 8))
    y = np.maximum(x[:, :4].sum(1), 0)
    net = StableTwoLayerReLU(kind, patch=4, width=20, learning_rate=0.05, steps=400, random_state=1).fit(x, y)
    assert net.loss_ < 0.4 * y.var()
    assert net.edge_ == 40
    assert net.score(x, y) > 0.2
    certificate = stability_certificate(net.module_, x, y)
    assert certificate.slack >= 0
    assert certificate.sharpness == pytest.approx(net.sharpness_, rel=2e-2)
    again = StableTwoLayerReLU(kind, patch=4, width=20, learning_rate=0.05, steps=400, random_state=1).fit(x, y)
    assert np.array_equal(net.predict(x), again.predict(x))


def test_images_are_seen_in_squares():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((30, 6, 6)), rng.standard_normal(30)
    net = StableTwoLayerReLU("conv", patch=3, stride=1, width=10, learning_rate=0.1, steps=50, random_state=0).fit(x, y)
    assert net.predict(x).shape == (30,)
    assert isinstance(net.module_[1], torch.nn.Conv2d)
    with pytest.raises(InputError, match="36 numbers each"):
        net.predict(x[:, :5])
    with pytest.raises(ValueError, match="NaN"):
        net.predict(x * np.nan)
    for targets in (y[:5], np.stack([y, y], 1)):
        with pytest.raises(ValueError, match=r"inconsistent|1d array"):
            net.fit(x, targets)
    with pytest.warns(UserWarning, match="1 entries of a side"):
        StableTwoLayerReLU("conv", patch=3, stride=2, width=4, learning_rate=0.1, steps=2).fit(x, y)


def test_weight_decay_shrinks_the_weights():
    x, y = np.random.default_rng(0).standard_normal((40, 5)), np.random.default_rng(1).standard_normal(40)
    norms = [
        sum(
            float(p.detach().square().sum())
            for p in StableTwoLayerReLU(width=20, learning_rate=0.1, steps=300, weight_decay=decay, random_state=0)
            .fit(x, y)
            .module_.parameters()
        )
        for decay in (0.0, 0.05)
    ]
    assert norms[1] < norms[0]


def test_a_step_too_large_names_the_edge():
    x, y = np.random.default_rng(0).standard_normal((40, 5)), np.random.default_rng(1).standard_normal(40)
    with pytest.raises(FairtrialError, match="diverged at step"):
        StableTwoLayerReLU(width=20, learning_rate=50.0, steps=200, random_state=0).fit(x, y)
    for options, word in (
        ({"learning_rate": "fast"}, "edge"),
        ({"learning_rate": -1.0}, "positive"),
        ({"learning_rate": math.inf}, "positive"),
        ({"learning_rate": None}, "positive"),
        ({"width": 2.5}, "whole numbers from 1"),
        ({"connectivity": "sparse"}, "'dense'"),
        ({"connectivity": "conv"}, "needs patch="),
        ({"width": 0}, "whole numbers from 1"),
        ({"weight_decay": math.nan}, "whole numbers from 1"),
        ({"connectivity": "conv", "patch": 2, "stride": 0}, "a stride from 1"),
        ({"connectivity": "local", "patch": 9}, "from 1 to 5"),
    ):
        with pytest.raises(InputError, match=word):
            StableTwoLayerReLU(**{"steps": 5, **options}).fit(x, y)


# ---------------------------------------------------------------------------------------------------------------- trial


def test_the_trial_is_sound():
    check_trial(trial)


def test_the_trials_parameters_are_checked(tmp_path):
    with pytest.raises(InputError, match="multiple of 4"):
        parts(SparseParams(dimension=30))
    with pytest.raises(InputError, match="must differ"):
        parts(SparseParams(rates=(0.1, 0.1)))
    with pytest.raises(InputError, match="no such file"):
        check(SparseParams(images=str(tmp_path / "none.npz")))
    np.savez(tmp_path / "bad.npz", x=np.zeros((3, 4)), y=np.zeros(3))
    with pytest.raises(InputError, match=r"finite images \(n, h, w\)"):
        check(SparseParams(images=str(tmp_path / "bad.npz")))


def test_a_broken_certificate_is_named():
    import pandas as pd

    frame = pd.DataFrame({"candidate": ["conv", "dense", "constant"], "seed": 0, "slack": [0.1, -0.2, None]})
    assert "dense" in certified(frame)
    assert certified(frame.iloc[[0, 2]]) is True
