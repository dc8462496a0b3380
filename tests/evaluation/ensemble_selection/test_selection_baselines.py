import itertools

import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection import baselines, mutual_information
from fairtrial.evaluation.ensemble_selection.answers import Answers
from fairtrial.evaluation.ensemble_selection.information import start
from fairtrial.evaluation.ensemble_selection.simulation import simulate

WAYS = (
    baselines.top_accuracy,
    baselines.forward_selection,
    baselines.mrmr,
    baselines.double_fault,
    baselines.cluster_medoids,
    baselines.random_models,
)


@pytest.fixture(scope="module")
def pool():
    return simulate(np.random.default_rng(0), 300, 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("k", [1, 3, 12])
def test_every_way_chooses_k_different_models(pool, way, k):
    chosen = way(*pool, k)
    assert len(set(chosen)) == len(chosen) == k
    assert set(chosen) <= set(range(12))


@pytest.mark.parametrize("way", [w for w in WAYS if w is not baselines.cluster_medoids])
def test_a_smaller_choice_is_the_beginning_of_a_larger(pool, way):
    assert way(*pool, 3) == way(*pool, 5)[:3]


def majority(codes, y, chosen):
    votes = np.stack([(codes[:, chosen] == k).sum(1) for k in range(3)], 1)
    best = votes == votes.max(1, keepdims=True)
    return (best[np.arange(len(y)), y] / best.sum(1)).mean()


def test_forward_selection_adds_what_makes_the_majority_most_accurate(pool):
    chosen = baselines.forward_selection(*pool, 3)
    left = [j for j in range(12) if j not in chosen[:2]]
    best = max(majority(*pool, [*chosen[:2], j]) for j in left)
    assert majority(*pool, chosen) == pytest.approx(best)


def test_mrmr_trades_relevance_for_redundancy(pool):
    codes, y = pool
    first, second = baselines.mrmr(codes, y, 2)
    value = [
        mutual_information(codes[:, [j]], y, "counts") - mutual_information(codes[:, [j]], codes[:, first], "counts")
        for j in range(12)
    ]
    assert second == max((j for j in range(12) if j != first), key=lambda j: value[j])


def test_double_fault_avoids_models_that_err_together():
    y = np.zeros(100, dtype=int)
    codes = np.zeros((100, 3), dtype=int)
    codes[:20, 0] = codes[:21, 1] = codes[60:90, 2] = 1
    assert baselines.double_fault(codes, y, 2) == [0, 2]


def test_medoids_take_one_of_each_family_and_the_most_accurate_of_it():
    rng = np.random.default_rng(1)
    y = np.zeros(400, dtype=int)
    families = rng.random((400, 2)) < 0.3
    codes = np.column_stack([families[:, [0, 0, 1, 1]] ^ (rng.random((400, 4)) < [0.02, 0.08, 0.02, 0.08])]).astype(int)
    assert sorted(baselines.cluster_medoids(codes, y, 2)) == [0, 2]


def test_the_best_subset_is_the_best_of_all(pool):
    codes, y = pool
    empty = start("counts", Answers(list(range(12)), np.arange(3), codes), y, 3, 0)
    value = {s: mutual_information(codes[:, s], y, "counts") for s in itertools.combinations(range(6), 3)}
    assert tuple(baselines.best_subset(empty, 6, 3)) == max(value, key=value.__getitem__)
    with pytest.raises(InputError, match="at most 12"):
        baselines.best_subset(empty, 13, 3)
