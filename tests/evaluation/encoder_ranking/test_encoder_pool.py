import numpy as np
import pytest
from sklearn.decomposition import PCA

from fairtrial.data.samples import list_samples, sample_path
from fairtrial.evaluation.encoder_ranking.pool import (
    latent_semantics,
    oriented_gradients,
    pool_of_images,
    principal_components,
    random_bags,
    random_convolution,
    random_fourier,
)


def test_principal_components_are_scikit_learns():
    x = np.random.default_rng(0).normal(size=(60, 9)) * np.arange(1, 10)
    expected = PCA(4).fit_transform(x)
    assert np.abs(principal_components(x, 4)) == pytest.approx(np.abs(expected))
    assert principal_components(np.hstack([x, x]), 18).shape == (60, 9)  # what does not vary is no component


def test_random_fourier_features_are_a_gaussian_kernel():
    x = np.random.default_rng(0).normal(size=(30, 4))
    z = random_fourier(x, 40_000, bandwidth=0.7)
    squares = ((x[:, None] - x) ** 2).sum(axis=2)
    one, other = np.triu_indices(30, 1)
    scale = np.median(np.sqrt(squares[one, other]))
    expected = np.exp(-squares / (2 * (0.7 * scale) ** 2))
    assert abs(z @ z.T - expected).max() < 0.06  # the median is of a sample of pairs


def test_oriented_gradients_tell_edges_apart_and_do_not_see_contrast():
    ramp = np.broadcast_to(np.arange(8.0), (8, 8))
    images = np.stack([ramp, ramp.T, 5 * ramp])
    across, down, stronger = oriented_gradients(images, 2)
    assert across @ down == pytest.approx(0, abs=1e-6)
    assert across == pytest.approx(stronger, abs=1e-4)
    assert np.linalg.norm(across) == pytest.approx(1, abs=1e-4)


def test_seeds_decide_random_encoders_and_no_global_state_does():
    images, texts = np.random.default_rng(0).random((4, 8, 8)), ["a red fox", "a hen", "a fox", "the sea"]
    for make in (
        lambda seed: random_convolution(images, 16, seed=seed),
        lambda seed: random_bags(texts, 8, seed=seed),
        lambda seed: random_fourier(images.reshape(4, -1), 8, seed=seed),
    ):
        assert (make(0) == make(0)).all()
        assert not np.allclose(make(0), make(1))
    assert latent_semantics(texts, 2).shape == (4, 2)


def test_the_pool_without_networks_has_several_widths_and_families():
    pool = pool_of_images(np.random.default_rng(0).random((70, 8, 8)), None)
    assert len(pool) == 14
    assert len({encoder.family for encoder in pool.values()}) == 6
    assert all(len(encoder.features) == 70 for encoder in pool.values())
    colour = pool_of_images(np.random.default_rng(0).random((70, 8, 8, 3)), None)
    assert colour.keys() == pool.keys()


@pytest.mark.slow
def test_the_default_pool_has_33_encoders_in_ten_families():
    weights = {}
    for name in ("lite0", "lite1", "lite2"):
        if not list_samples()[f"efficientnet-{name}"].folder.is_dir():
            pytest.skip(f"sample efficientnet-{name} is not fetched")
        weights[name] = sample_path(f"efficientnet-{name}", f"efficientnet-{name}.pth")
    pool = pool_of_images(np.random.default_rng(0).random((80, 16, 16)), weights)
    assert len(pool) == 33
    assert len({encoder.family for encoder in pool.values()}) == 10
    assert pool["lite0/penultimate"].features.shape == (80, 1280)
    assert pool["lite2/depth1"].parameters < pool["lite2/depth3"].parameters < pool["lite2/penultimate"].parameters
