from __future__ import annotations

import numpy as np
import pytest
from pydantic import BaseModel
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from fairtrial.chat import ChatError
from fairtrial.data.samples import sample_path
from fairtrial.errors import InputError, MissingSampleError
from fairtrial.judges import Control, LocalJudge, reliability

SUMS = [Control(f"Is {n} + {m} = {n + m}?", f"Is {n} + {m} = {n + m + 1}?") for n in range(4) for m in (3, 5, 7)]


def knows(prompt):
    left, right = prompt.split("\n")[0].removeprefix("Is ").removesuffix("?").split(" = ")
    return sum(map(int, left.split(" + "))) == int(right)


def verdict(correct, confidence=0.8):
    return f'{{"correct": {str(correct).lower()}, "confidence": {confidence}}}'


def test_a_judge_that_knows_is_usable():
    one = reliability(lambda prompt: verdict(knows(prompt)), SUMS)
    assert (one.accuracy, one.kappa, one.auc, one.lost) == (1, 1, 1, 0)
    assert one.usable
    assert 0.5 < one.interval.low < 0.8  # 12 pairs prove no more
    assert "usable" in str(one)


@pytest.mark.parametrize("always", [True, False])
def test_a_judge_that_always_says_the_same_is_not(always):
    one = reliability(lambda prompt: verdict(always), SUMS)
    assert (one.accuracy, one.kappa, one.auc) == (0.5, 0, 0.5)
    assert not one.usable
    assert "not usable: the interval of its accuracy does not lie above chance" in str(one)


def test_a_judge_that_guesses_is_seldom_usable():
    usable = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        usable += reliability(lambda prompt, rng=rng: verdict(rng.random() < 0.5), SUMS).usable
    assert usable <= 100 * 0.08


def test_a_judge_that_is_always_wrong_is_not_usable():
    one = reliability(lambda prompt: verdict(not knows(prompt)), SUMS)
    assert one.accuracy == 0
    assert not one.usable


def test_numbers_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    said = []

    def judge(prompt):
        correct = knows(prompt)
        said.append((correct, bool(rng.random() < (0.8 if correct else 0.3)), float(rng.integers(0, 5) / 4)))
        return verdict(*said[-1][1:])

    one = reliability(judge, SUMS)
    truth, called, confidence = map(np.array, zip(*said, strict=True))
    assert one.accuracy == pytest.approx((truth == called).mean())
    assert one.kappa == pytest.approx(cohen_kappa_score(truth, called))
    score = np.where(called, 1 + confidence, 1 - confidence)
    assert one.auc == pytest.approx(roc_auc_score(truth, score))


def test_lost_replies_are_wrong_and_counted():
    def judge(prompt):
        if prompt.startswith("Is 0"):
            raise ChatError("gone")
        return verdict(knows(prompt))

    one = reliability(judge, SUMS)
    assert one.lost == 6
    assert one.accuracy == 0.75
    silent = reliability(lambda prompt: "I would rather not say.", SUMS)
    assert (silent.lost, silent.accuracy, silent.auc, silent.usable) == (24, 0, 0, False)


def test_a_rating_is_measured_as_it_is_asked():
    class Grade(BaseModel):
        score: int

    grades = {True: 4, False: 2}
    how = {"schema": Grade, "correct": lambda grade: grade.score > 3, "score": lambda grade: grade.score}
    assert reliability(lambda prompt: f'{{"score": {grades[knows(prompt)]}}}', SUMS, **how).usable
    undecided = reliability(lambda prompt: '{"score": 3}', SUMS, **how)
    assert (undecided.accuracy, undecided.usable) == (0.5, False)


def test_five_pairs_cannot_exclude_chance():
    one = reliability(lambda prompt: verdict(knows(prompt)), SUMS[:5])
    assert not one.usable
    assert "5 pairs of controls cannot exclude chance, give 6 or more" in one.reason
    assert reliability(lambda prompt: verdict(knows(prompt)), SUMS[:6]).usable
    with pytest.raises(InputError, match="controls"):
        reliability(lambda prompt: verdict(True), [])


@pytest.mark.slow
def test_smollm2_is_known_to_be_too_weak():
    try:
        folder = sample_path("smollm2-135m")
    except MissingSampleError:
        pytest.skip("sample smollm2-135m")
    one = reliability(LocalJudge(folder, max_tokens=32), SUMS[:6])
    assert not one.usable
    assert one.reason in str(one)
