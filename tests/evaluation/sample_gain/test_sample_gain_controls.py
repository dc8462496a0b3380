"""A single split, and a coin."""

import numpy as np
import pytest
from scipy.stats import binomtest

from fairtrial.errors import InputError
from fairtrial.evaluation.sample_gain.controls import RandomCoin, sign_test, single_split
from fairtrial.stats import SplitScores, mean_interval


def test_a_single_split_of_0_and_1_has_the_binomial_interval():
    scores = SplitScores.from_arrays([range(10), range(10, 20)], [[1] * 7 + [0] * 3, [1] * 10])
    expected = binomtest(7, 10).proportion_ci()
    assert single_split(scores).at(0.95) == pytest.approx((expected.low, expected.high))


def test_a_single_split_of_other_scores_has_students_over_its_samples():
    values = np.random.default_rng(0).normal(size=(2, 12))
    scores = SplitScores.from_arrays([range(12), range(12, 24)], list(values))
    assert single_split(scores).at(0.9) == pytest.approx(mean_interval(values[0]).at(0.9))
    with pytest.raises(InputError, match="only fold means are known"):
        single_split(SplitScores.from_folds([0.5, 0.6], 10, 40))


@pytest.mark.parametrize("mean", [6, 9.5, 20, 30])
def test_the_coins_mean_cost_is_as_asked_and_its_bounds_are_kept(mean):
    last = [RandomCoin(mean, 6, 30, seed=seed).last for seed in range(300)]
    assert np.mean(last) == pytest.approx(mean, abs=1.6)
    assert min(last) >= 6
    assert max(last) <= 30


def test_the_coin_looks_at_nothing():
    coin = RandomCoin(10, 6, 30, seed=3)
    said = [coin.update([0], [1], [score]) for score in np.random.default_rng(0).normal(size=coin.last)]
    assert said == [False] * (coin.last - 1) + [True]
    assert RandomCoin(10, 6, 30, seed=3).last == coin.last
    with pytest.raises(InputError, match="mean_splits=5 is not between 6 and 30"):
        RandomCoin(5, 6, 30)


def test_the_sign_test_is_the_binomial_test_of_discordant_pairs():
    rng = np.random.default_rng(0)
    for _ in range(30):
        d = rng.integers(-1, 2, size=rng.integers(1, 30))
        wins, count = int((d > 0).sum()), int((d != 0).sum())
        assert sign_test(d) == pytest.approx(binomtest(wins, count).pvalue if count else 1.0)
