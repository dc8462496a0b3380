import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf

from fairtrial.errors import InputError
from fairtrial.evaluation.encoder_ranking.baselines import (
    alpha_req,
    h_score,
    logme,
    nesum,
    rankme_per_width,
    stable_rank,
)
from fairtrial.evaluation.encoder_ranking.subspace import rankme


def labelled(n=40, d=6, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 3
    return rng.normal(size=(3, d))[y] + rng.normal(size=(n, d)), y


@pytest.mark.parametrize("d", [6, 70])
def test_spectral_scores_are_those_of_numpys_singular_values(d):
    z, _ = labelled(d=d)
    s = np.linalg.svd(z, compute_uv=False) ** 2
    assert stable_rank(z) == pytest.approx(s.sum() / s[0])
    s = np.linalg.svd(z - z.mean(axis=0), compute_uv=False) ** 2
    assert nesum(z) == pytest.approx(s.sum() / s[0])
    assert rankme_per_width(z) == pytest.approx(rankme(z) / d)


def test_alpha_req_finds_the_exponent_of_a_power_law():
    z = np.linalg.qr(np.random.default_rng(0).normal(size=(300, 100)))[0]
    z = np.linalg.qr(z - z.mean(axis=0))[0]  # centred, and orthonormal
    for alpha in (0.5, 1.0, 1.7):
        assert alpha_req(z * np.arange(1, 101) ** (-alpha / 2)) == pytest.approx(-abs(alpha - 1), abs=1e-6)


@pytest.mark.parametrize("d", [4, 12])
def test_logme_is_the_maximum_of_the_evidence(d):
    n = 24
    z, y = labelled(n, d)
    centred = z - z.mean(axis=0)
    target = (y[:, None] == np.arange(3)).astype(float)
    target -= target.mean(axis=0)

    def evidence(log, c):
        alpha, beta = np.exp(log)
        return -multivariate_normal.logpdf(target[:, c], cov=centred @ centred.T / alpha + np.eye(n) / beta)

    best = [-minimize(evidence, [0.0, 0.0], args=(c,), method="Nelder-Mead").fun for c in range(3)]
    assert logme(z, y) == pytest.approx(np.mean(best) / n, abs=2e-3)


@pytest.mark.parametrize("d", [6, 70])
def test_the_h_score_uses_ledoit_and_wolfs_covariance(d):
    z, y = labelled(d=d)
    covariance, _ = ledoit_wolf(z)
    means = np.stack([z[y == c].mean(axis=0) for c in range(3)])[y] - z.mean(axis=0)
    expected = np.trace(np.linalg.solve(covariance, means.T @ means / len(z)))
    assert h_score(z, y) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("score", [logme, h_score])
def test_scores_with_labels_want_labels_of_two_classes(score):
    z, y = labelled()
    with pytest.raises(InputError, match="one label an item"):
        score(z, y[:-1])
    with pytest.raises(InputError, match="all labels are the same"):
        score(z, 0 * y)
