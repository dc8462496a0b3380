import json

import numpy as np
import pandas as pd
import pytest

from fairtrial.data.samples import find_sample
from fairtrial.errors import InputError
from fairtrial.lm.difficulty.problems import arithmetic, problems_of, read_problems
from fairtrial.lm.difficulty.trial import (
    BUDGETS,
    DifficultyParams,
    block_of,
    check,
    efficiency,
    pair_order,
    parts,
    references,
    trial,
)
from fairtrial.testing import check_trial


def test_the_trial_is_sound():
    check_trial(trial)


def test_arithmetic_is_right_and_its_choices_differ():
    found = arithmetic(200)
    assert len({problem.question for problem in found}) == 200
    for problem in found:
        assert str(eval(problem.question[8:-1])) == problem.choices[0]  # "What is 3 * 4?"
        assert len(set(problem.choices)) == 4
    sums = [problem.question[8:-1].split(" + ") for problem in found if "+" in problem.question]
    carries = [all(int(x) + int(y) > 9 for x, y in zip(a, b, strict=True)) for a, b in sums]
    assert 0.3 < np.mean(carries) < 0.7
    assert all(len(a) == len(b) for a, b in sums)


@pytest.mark.skipif(not find_sample("analogies").folder.is_dir(), reason="needs  fairtrial samples get analogies")
def test_facts_and_words_have_four_choices():
    for family, found in problems_of("families", 240).items():
        assert len(found) == 240, family
        assert len({problem.question for problem in found}) == 240
        assert all(len(set(problem.choices)) == 4 for problem in found)


def test_references_are_of_both_kinds_and_of_no_test():
    params = DifficultyParams(n_ref=16)
    wrong = (np.arange(240) % 12 == 0).astype(float)  # 20 of 240
    for block in range(3):
        chosen, others = references(wrong, block, params)
        test = block_of(block, 240, params)
        assert len(chosen) == 16
        assert wrong[chosen].sum() == 8
        assert not {*chosen} & {*test, *others}
        assert len(chosen) + len(others) + len(test) == 240
    with pytest.raises(InputError, match="mixed difficulty"):
        references(np.zeros(240), 0, params)


def test_pairs_of_equal_length_only_are_ordered():
    wrong, score, lengths = np.array([0, 1, 0, 1]), np.array([1.0, 2, 9, 3]), np.array([5, 5, 7, 7])
    assert pair_order(wrong, score) == 0.5
    assert pair_order(wrong, score, lengths) == 0.5
    assert pair_order(wrong, score, np.array([5, 5, 7, 8])) == 1
    assert pair_order(wrong, score, np.arange(4)) is None


def test_efficiency_is_what_rollouts_pay_for_the_same_accuracy():
    row = dict(zip([f"accuracy_{share:g}" for share in BUDGETS], (0.2, 0.3, 0.4, 0.5, 0.6), strict=True))
    row |= dict(zip([f"tokens_{share:g}" for share in BUDGETS], (20, 40, 60, 80, 100), strict=True))
    ours = {**row, "candidate": "adaswitch", "accuracy_0.5": 0.5, "tokens_0.5": 40}
    assert efficiency(pd.DataFrame([ours, {**row, "candidate": "rollout-switch"}])) == pytest.approx(2)
    ours["accuracy_0.5"] = 0.9  # never reached: at most what they ever spend
    assert efficiency(pd.DataFrame([ours, {**row, "candidate": "rollout-switch"}])) == pytest.approx(2.5)


def test_problems_of_the_users_are_read(tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "q", "choices": ["a", "b"], "answer": 1},
        {"prompt": "r", "choices": ["a", "b"], "answer": "a", "family": "f"},
        {"prompt": "s", "correct": 1},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    one, two, three = read_problems(file)
    assert (one.choices, two.family, three.correct) == (("b", "a"), "f", True)
    for row, word in (
        ({"prompt": "q", "choices": ["a"], "answer": "a"}, "line 1"),
        ({"prompt": "q", "choices": ["a", "b"], "answer": "c"}, "line 1"),
        ({"prompt": "q"}, "line 1"),
        ({"prompt": " ", "correct": 1}, "empty"),
    ):
        file.write_text(json.dumps(row))
        with pytest.raises(InputError, match=word):
            read_problems(file)


def test_known_outcomes_and_logs_of_the_users_run(tmp_path):
    file = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"w{i % 60} w{i // 60 + 2}", "correct": int(i % 3 > 0)} for i in range(80)]
    file.write_text("\n".join(map(json.dumps, rows)))
    tiny = {"model": "tiny", "blocks": 3, "n_ref": 8}
    known = DifficultyParams(problems=str(file), per_family=60, **tiny)
    check(known)
    assert [part.name for part in parts(known)] == ["probing"]
    log = pd.DataFrame(
        [{"prompt": row["prompt"], "level": level, "correct": 1 if level == "think" else row["correct"], "tokens": cost}
         for row in rows for level, cost in (("think", 50), ("direct", 5))]
    )  # fmt: skip
    log.to_csv(tmp_path / "log.csv", index=False)
    logged = DifficultyParams(log=str(tmp_path / "log.csv"), **tiny)
    check(logged)
    _, control = parts(logged)
    assert "rollout-switch" not in [candidate.label for candidate in control.candidates]
    assert "C5" not in [claim.id for claim in control.claims]
    for frame, word in (
        (log.drop(columns="tokens"), "no column"),
        (log[1:], "every level"),
        (log[::2], "only level"),
        (log.assign(tokens="?"), "row 0"),
    ):
        frame.to_csv(tmp_path / "bad.csv", index=False)
        with pytest.raises(InputError, match=word):
            check(DifficultyParams(log=str(tmp_path / "bad.csv"), **tiny))


def test_what_cannot_be_read_is_refused_before_any_work():
    for given, word in (
        ({"model": "./none"}, "no such file"),
        ({"problems": "none.jsonl", "model": "tiny"}, "no such file"),
        ({"log": "none.csv", "model": "tiny"}, "no such file"),
        ({"problems": "tiny", "model": "tiny", "per_family": 24}, "are needed"),
    ):
        with pytest.raises(InputError, match=word):
            check(DifficultyParams(**given))


@pytest.mark.slow
def test_a_log_of_the_users_has_a_verdict(tmp_path):
    from fairtrial.trial.runner import run

    rng = np.random.default_rng(0)
    rows = [
        {"prompt": f"w{i} w{j}", "level": level, "correct": int(rng.uniform() < p), "tokens": cost}
        for i in range(2, 40) for j in (2, 9)
        for level, cost, p in (("direct", 5, 0.9 if j == 2 else 0.2), ("think", 50, 0.9))
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "log.csv", index=False)
    result = run(
        "difficulty", model="tiny", log=str(tmp_path / "log.csv"), blocks=5, n_ref=8, out=tmp_path / "run", jobs=1
    )
    assert {one.id: one.outcome for one in result.verdicts}["C4"] in ("HOLDS", "UNDECIDED")
