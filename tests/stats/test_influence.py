import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score

from fairtrial.errors import InputError
from fairtrial.stats import auc_influence, pseudo_values


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_values_of_the_auc_have_its_mean_and_delongs_variance(seed):
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.arange(25) < rng.integers(2, 23))
    score = np.round(truth + rng.normal(size=25), 1)  # with ties
    values = auc_influence(truth, score)
    wins = np.sign(score[truth][:, None] - score[~truth]) / 2 + 0.5  # (positives, negatives)
    assert values.mean() == pytest.approx(roc_auc_score(truth, score))
    delong = wins.mean(axis=1).var() / truth.sum() + wins.mean(axis=0).var() / (~truth).sum()
    assert np.sum((values - values.mean()) ** 2) / 25**2 == pytest.approx(delong)


def test_pseudo_values_of_a_mean_are_its_terms():
    x = np.random.default_rng(0).normal(size=15)
    np.testing.assert_allclose(pseudo_values(lambda v: float(np.mean(v)), x), x, atol=1e-12)


def test_pseudo_values_of_any_metric_have_it_as_their_mean():
    rng = np.random.default_rng(0)
    y, p = rng.integers(0, 2, 40), rng.integers(0, 2, 40)
    assert pseudo_values(f1_score, y, p).mean() == pytest.approx(f1_score(y, p))


def test_pseudo_values_of_the_auc_are_near_delongs():
    rng = np.random.default_rng(0)
    truth = np.arange(200) < 80
    score = truth + rng.normal(size=200)
    np.testing.assert_allclose(pseudo_values(roc_auc_score, truth, score), auc_influence(truth, score), atol=0.03)


def test_what_has_no_influence_values_is_refused_with_the_way_out():
    with pytest.raises(InputError, match=r"both classes.*nadeau_bengio"):
        auc_influence([1, 1], [0.2, 0.3])
    with pytest.raises(InputError, match="one length"):
        auc_influence([1, 0], [0.2])
    with pytest.raises(InputError, match=r"not finite.*nadeau_bengio"):
        pseudo_values(lambda y: float("nan"), [1, 2, 3])
    with pytest.raises(InputError, match="two samples or more"):
        pseudo_values(np.mean, [1])
