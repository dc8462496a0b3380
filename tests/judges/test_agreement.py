from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from fairtrial.errors import InputError
from fairtrial.judges import cohen_kappa, prediction_powered_mean


def raters(table):
    """Two raters' labels with these counts."""
    pairs = [(i, j) for i, row in enumerate(table) for j, count in enumerate(row) for _ in range(count)]
    return np.array(pairs).T


def test_kappa_of_a_known_table():
    assert cohen_kappa(*raters([[40, 10], [5, 45]])).mean == pytest.approx(0.70)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=2, max_size=40))
@settings(max_examples=40)
def test_kappa_is_that_of_scikit_learn_and_symmetric(pairs):
    a, b = zip(*pairs, strict=True)
    if len({*a, *b}) == 1:
        return
    kappa = cohen_kappa(a, b)
    assert kappa.mean == pytest.approx(cohen_kappa_score(a, b), abs=1e-12)
    assert cohen_kappa(b, a) == kappa
    assert kappa.low <= kappa.mean + 1e-12
    assert kappa.mean <= kappa.high + 1e-12
    assert kappa.high <= 1 + 1e-12


def test_kappa_has_the_error_of_statsmodels_or_a_little_more():
    from statsmodels.stats.inter_rater import cohens_kappa

    for table in ([[40, 10], [5, 45]], [[20, 4, 1], [3, 30, 6], [2, 5, 29]], [[80, 6], [4, 10]]):
        kappa, peer = cohen_kappa(*raters(table)), cohens_kappa(np.array(table))
        assert kappa.mean == pytest.approx(peer.kappa)
        assert 0.95 < np.sqrt(kappa.variance) / peer.std_kappa < 1.15


@pytest.mark.parametrize("agreement", [0.6, 0.9, 0.98])
def test_the_interval_of_kappa_covers(agreement):
    rng = np.random.default_rng(0)
    truth = 2 * agreement - 1  # balanced labels
    covered = 0
    for _ in range(400):
        first = rng.random(50) < 0.5
        kappa = cohen_kappa(first, first ^ (rng.random(50) >= agreement))
        covered += kappa.low <= truth <= kappa.high
    assert covered >= 0.93 * 400


def test_perfect_agreement_of_few_is_not_certain():
    kappa = cohen_kappa([0, 1, 0, 1, 1, 0], [0, 1, 0, 1, 1, 0])
    assert kappa.mean == 1
    assert kappa.low < 0.2
    assert kappa.high == 1


def test_kappa_needs_two_labels_and_equal_lengths():
    with pytest.raises(InputError, match="one label"):
        cohen_kappa([1, 1], [1, 1])
    with pytest.raises(InputError, match="same items"):
        cohen_kappa([1, 0], [1])
    with pytest.raises(InputError, match="same items"):
        cohen_kappa([], [])


def audit(judged, human, items):
    shown = np.full(len(judged), np.nan)
    shown[list(items)] = human[list(items)]
    return prediction_powered_mean(judged, shown)


def test_over_all_audits_of_seven_items_the_mean_is_the_human_mean():
    rng = np.random.default_rng(0)
    judged, human = rng.integers(0, 2, 7).astype(float), rng.integers(0, 2, 7).astype(float)
    for m in (2, 3, 6, 7):
        means = [audit(judged, human, items).mean for items in itertools.combinations(range(7), m)]
        assert np.mean(means) == pytest.approx(human.mean(), abs=1e-12)


def test_the_variance_is_unbiased_over_samples_and_audits():
    rng = np.random.default_rng(1)
    means, variances = [], []
    for _ in range(4000):
        human = rng.normal(size=30)
        judged = 0.5 * human + rng.normal(size=30) + 2  # biased and noisy
        one = audit(judged, human, rng.permutation(30)[:12])
        means.append(one.mean)
        variances.append(one.variance)
    assert abs(np.mean(means)) < 4 * np.std(means) / np.sqrt(4000)
    assert np.mean(variances) == pytest.approx(np.var(means), rel=0.08)


def test_everything_audited_is_the_plain_mean():
    rng = np.random.default_rng(2)
    human, judged = rng.normal(size=20), rng.normal(size=20)
    one = prediction_powered_mean(judged, human)
    assert one.mean == pytest.approx(human.mean())
    assert one.variance == pytest.approx(human.var(ddof=1) / 20)


def test_the_corrected_rate_covers_where_the_judges_own_does_not():
    rng = np.random.default_rng(3)
    covered = raw = 0
    for _ in range(300):  # sensitivity .9, specificity .8, 60 audited of 400
        human = rng.random(400) < 0.4
        judged = np.where(human, rng.random(400) < 0.9, rng.random(400) < 0.2).astype(float)
        one = audit(judged, human.astype(float), rng.permutation(400)[:60])
        covered += one.low <= 0.4 <= one.high
        half = 1.96 * np.sqrt(judged.mean() * (1 - judged.mean()) / 400)
        raw += abs(judged.mean() - 0.4) <= half
    assert covered >= 0.92 * 300
    assert raw < 0.5 * 300


def test_an_audit_without_differences_is_not_proof():
    judged = np.tile([0.0, 1.0], 20)
    human = np.where(np.arange(40) < 10, judged, np.nan)
    one = prediction_powered_mean(judged, human)
    assert one.mean == 0.5
    assert one.high - one.low > 2 * 2 / 10  # as the rule of three has it, about
    assert "differ nowhere" in one.notes[0]


def test_audits_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="1 items are audited"):
        prediction_powered_mean([1, 0, 1], [1, np.nan, np.nan])
    with pytest.raises(InputError, match="finite score"):
        prediction_powered_mean([1, np.nan], [1, 1])
    with pytest.raises(InputError, match="finite score"):
        prediction_powered_mean([1, 0], [1])
