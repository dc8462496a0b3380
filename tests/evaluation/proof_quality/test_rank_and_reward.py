import inspect
import json
import re

import numpy as np
import pytest

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.proof_quality import CachedJudge, LocalJudge, OpenAIJudge, proof_reward, rank_proofs
from fairtrial.evaluation.proof_quality.judging import (
    agreement,
    controls,
    grades,
    judge_reliability,
    judged_correct,
    judged_techniques,
    pairwise_ranks,
)
from fairtrial.evaluation.proof_quality.operators import corrupt, pad
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.evaluation.proof_quality.theorems import bank

SHORT = "Let $a = 1$. Hence $a > 0$."
LONG = "Let $a = 1$. Recall that $7$ is prime. Hence $a > 0$."


def proofs(problems=8):
    """Two models: 'short' solves every problem, 'long' all but the last and pads; it also errs once."""
    found = []
    for i in range(problems):
        found.append(Proof(SHORT, f"p{i}", model="short", correct=True))
        text = LONG if i % 2 else LONG.replace("prime", "an odd prime")
        found.append(Proof(text, f"p{i}", model="long", correct=i < problems - 1))
    return found


def knowing_judge(prompt):
    """Say what is asked for in JSON, knowing the bank by heart."""
    if "techniques" in prompt and "Steps of a proof" in prompt:
        return json.dumps({"techniques": [["parity"]] * len(re.findall(r"^\d+\. ", prompt, re.MULTILINE))})
    if "Rate the proof" in prompt:
        return '{"ease": 4, "quality": 3}'
    correct = any(entry.proof.text in prompt for entry in bank()) or "a > 0" in prompt
    return json.dumps({"correct": correct, "confidence": 0.9})


def test_every_axis_has_its_column_and_correctness_its_own():
    table = rank_proofs(proofs())
    assert set(table.frame) == {
        "problem", "model", "requested", "correct", "tokens", "brevity", "used_share", "ease", "simplicity",
    }  # fmt: skip
    assert (
        table.frame.loc[~table.frame["correct"], ["brevity", "used_share", "ease", "simplicity"]].isna().all(axis=None)
    )
    summary = table.summary().set_index(["model", "metric"])["mean"]
    assert summary["short", "correct"] == 1
    assert summary["long", "correct"] == pytest.approx(7 / 8)
    assert summary["short", "used_share"] == 1 > summary["long", "used_share"]
    assert table.pareto("used_share") == ["short"]
    assert "best of correctness and used_share: short" in str(table)


def test_models_are_compared_on_the_problems_that_both_have_solved():
    table = rank_proofs(proofs())
    found = table.compare("short", "long").set_index("metric")
    assert found.loc["used_share", "problems"] == 7
    values = table.by_problem("used_share").dropna()
    assert found.loc["used_share", "difference"] == pytest.approx((values["short"] - values["long"]).mean())
    assert found.loc["brevity", "state"] == "higher"
    with pytest.raises(InputError, match="both solved 4 problems: 5 are needed"):
        rank_proofs(proofs(5)).compare("short", "long")
    with pytest.raises(UnknownNameError, match="model"):
        table.compare("short", "shrt")


def test_weights_are_the_inverse_of_the_others_solve_rates_clipped_at_ten():
    given = []
    for i in range(6):
        given.append(Proof(SHORT if i else LONG, f"p{i}", model="a", correct=True))
        given += [Proof(SHORT, f"p{i}", model="b", correct=bool(i)) for _ in range(2)]
        given += [Proof(SHORT, f"p{i}", model="c", correct=i > 1)]
    table = rank_proofs(given)
    row = table.summary().set_index(["model", "metric"]).loc[("a", "used_share")]
    scores = table.frame[table.frame["model"] == "a"]["used_share"].to_numpy()
    weights = np.array([10.0, 2.0, 1, 1, 1, 1])  # nobody else solved the first
    assert row["weighted"] == pytest.approx(weights @ scores / weights.sum())
    assert row["mean"] == pytest.approx(scores.mean())
    assert row["weighted_low"] < row["weighted"] < row["weighted_high"]


def test_removing_an_incorrect_proof_changes_no_other_score():
    given = [*proofs(), Proof("$1$.", "p0", model="short", correct=False)]
    frame = rank_proofs(given).frame
    right = frame[frame["correct"]].reset_index(drop=True)
    again = rank_proofs([p for p in given if p.correct]).frame
    for name in ("brevity", "used_share", "ease", "simplicity"):
        np.testing.assert_array_equal(right[name].to_numpy(float), again[name].to_numpy(float))


def test_removing_the_shortest_proof_changes_only_what_is_relative_to_it():
    full = rank_proofs(proofs()).frame
    rest = rank_proofs([p for p in proofs() if p.model == "long"]).frame
    long = full[full["model"] == "long"].reset_index(drop=True)
    np.testing.assert_array_equal(long["used_share"], rest["used_share"])
    np.testing.assert_array_equal(long["simplicity"], rest["simplicity"])
    assert (rest["brevity"].dropna() == 0).all()
    assert (long["brevity"].dropna() < 0).all()


def test_diversity_is_rarefied_to_what_all_models_have():
    texts = ["By induction, fine.", "We count the pairs in two ways.", "Work modulo $7$."]
    given = [Proof(t, "p", model="many", correct=True) for t in texts]
    given += [Proof(t, "p", model="few", correct=True) for t in texts[:2]]
    sets = rank_proofs(given).sets.set_index("model")
    assert sets["proofs"].tolist() == [2, 2]
    assert sets.loc["many", "vendi"] == pytest.approx(sets.loc["few", "vendi"], rel=0.1)
    assert (sets.loc["many", "distinct"], sets.loc["few", "distinct"]) == (3, 2)


def test_requests_give_adaptivity():
    given = [Proof("By induction, fine.", f"p{i}", model="m", correct=True) for i in range(3)]
    given += [Proof("The number is even.", f"p{i}", model="m", correct=True, requested="parity") for i in range(3)]
    assert rank_proofs(given).adaptivity["m"].lift == 1
    given[-1].requested = "parrity"
    with pytest.raises(UnknownNameError, match="did you mean 'parity'"):
        rank_proofs(given)


def test_only_wanted_metrics_are_measured_and_unknown_ones_refused():
    assert rank_proofs(proofs(), metrics=["ease"]).metrics == ["ease"]
    with pytest.raises(UnknownNameError, match="metric"):
        rank_proofs(proofs(), metrics=["eas"])
    with pytest.raises(InputError, match="no proofs"):
        rank_proofs([])


def test_a_composite_is_made_on_request():
    table = rank_proofs(proofs())
    found = table.composite({"correct": 3, "used_share": 1})
    assert found["short"] == 1
    assert found["long"] < 1
    with pytest.raises(UnknownNameError, match="metric"):
        table.composite({"beauty": 1})


def test_unknown_correctness_needs_a_verifier_a_judge_or_force():
    given = [Proof(SHORT, "p", model="m"), Proof("Nonsense.", "p", model="m")]
    with pytest.raises(InputError, match="correct is not known of 2 of 2"):
        rank_proofs(given)
    assert rank_proofs(given, force=True).frame["correct"].tolist() == [True, True]
    verified = rank_proofs(given, verifier=lambda proof: "a > 0" in proof.text)
    assert verified.frame["correct"].tolist() == [True, False]
    assert verified.frame["necessary_share"][0] < 1
    judged = rank_proofs(given, judge=knowing_judge)
    assert judged.frame["correct"].tolist() == [True, False]


# ------------------------------------------------------------------------------------------------------------- judges


def test_a_judge_that_knows_its_controls_is_asked():
    table = rank_proofs(proofs(3), judge=knowing_judge)
    assert table.reliability.usable
    assert table.frame["ease_judged"].dropna().eq(4).all()
    assert table.frame["simplicity_judged"].dropna().eq(1).all()
    assert "necessary_share" in table.metrics
    assert table.lost == 0


@pytest.mark.parametrize("reply", ['{"correct": true, "confidence": 1}', "I cannot say."])
def test_a_judge_that_cannot_tell_proofs_from_corrupted_ones_is_refused_and_told(reply):
    asked = []

    def judge(prompt):
        asked.append(prompt)
        return reply

    table = rank_proofs(proofs(2), judge=judge)
    assert not table.reliability.usable
    assert not {"ease_judged", "necessary_share"} & set(table.frame)
    assert "not usable" in str(table)
    assert "not to be relied on" in str(table)
    with pytest.raises(InputError, match="judge not usable"):
        rank_proofs([Proof(SHORT, "p")], judge=judge)


def test_replies_that_are_not_json_are_missing_and_counted():
    def judge(prompt):
        return "no" if "Rate the proof" in prompt else knowing_judge(prompt)

    table = rank_proofs(proofs(3), judge=judge)
    assert table.lost == int(table.frame["correct"].sum())
    assert table.frame["ease_judged"].isna().all()


def test_the_middle_of_several_votes_counts():
    replies = iter([2, 5, 4, 1, 1, 3])
    assert grades(lambda prompt: f'{{"ease": {next(replies)}, "quality": 1}}', [Proof("A.", "p")] * 2, votes=3) == [
        4,
        1,
    ]
    said = iter(["true", "false", "true", "false", "false", "no"])
    verdicts = judged_correct(
        lambda prompt: f'{{"correct": {next(said)}, "confidence": 1}}' if "You replied" not in prompt else "no",
        [Proof("A.", "p")] * 2,
        votes=3,
    )
    assert verdicts == [True, False]


def test_techniques_that_do_not_exist_make_a_reply_unusable():
    proof = Proof("Fine.", "p")
    assert judged_techniques(lambda prompt: '{"techniques": [["magic"]]}', [proof]) == [None]
    assert judged_techniques(lambda prompt: '{"techniques": [["parity"], []]}', [proof]) == [None]
    assert judged_techniques(lambda prompt: '{"techniques": [["parity"]]}', [proof]) == [[{"parity"}]]


def test_controls_are_proofs_and_their_corrupted_twins():
    pairs = controls(30)
    assert len({pair.correct for pair in pairs}) == 30
    assert all(pair.correct != pair.corrupted for pair in pairs)
    assert abs(np.mean([len(p.correct) - len(p.corrupted) for p in pairs])) < 3
    assert judge_reliability(knowing_judge, count=10).accuracy == 1
    with pytest.raises(InputError, match="1 to 55"):
        controls(56)
    with pytest.raises(InputError, match="falsify"):
        corrupt(Proof("Clear.", "p"))


def test_pairwise_ranks_recover_known_strengths_and_do_not_depend_on_the_order():
    """Bradley-Terry on a judge that always prefers the shorter text, and on one that prefers what is on top."""
    given = [
        Proof(
            "Let $a = 1$. " + "Recall that $7$ is prime. " * i + "Hence $a > 0$.", f"p{k}", model=f"m{i}", correct=True
        )
        for k in range(6)
        for i in range(3)
    ]

    def shorter(prompt):
        first, second = re.search(r"Text A:\n(.*?)\n\nText B:\n(.*?)\n\n", prompt, re.DOTALL).groups()
        return json.dumps({"better": "A" if len(first) < len(second) else "B"})

    ranks = pairwise_ranks(given, shorter, axis="conciseness")
    swapped = pairwise_ranks(given[::-1], shorter, axis="conciseness")
    assert ranks.to_frame()["name"].tolist() == ["m0", "m1", "m2"]
    np.testing.assert_allclose(ranks.strength, swapped.strength, atol=1e-9)
    top = pairwise_ranks(given, lambda prompt: '{"better": "A"}')
    np.testing.assert_allclose(top.strength, 0, atol=1e-9)
    with pytest.raises(InputError, match="usable preference"):
        pairwise_ranks(given, lambda prompt: "neither")


def test_agreement_below_point_four_is_greyed_out():
    assert agreement([1, 0, 1, 0], [1, 0, 1, 0]) == (1.0, True)
    assert agreement([1, 0, 1, 0], [1, 1, 0, 0]) == (0.0, False)


def test_the_judges_of_the_library_are_at_hand(tmp_path):
    assert OpenAIJudge.__module__ == LocalJudge.__module__ == "fairtrial.judges.models"
    assert CachedJudge(knowing_judge, tmp_path)("Rate the proof") == '{"ease": 4, "quality": 3}'


# ------------------------------------------------------------------------------------------------------------- reward


def test_the_reward_has_the_form_that_trl_calls():
    reward = proof_reward("used_share", weight=0.5)
    assert reward.__name__ == "proof_used_share"
    names = list(inspect.signature(reward).parameters.values())
    assert [p.name for p in names[:2]] == ["prompts", "completions"]
    assert names[-1].kind is inspect.Parameter.VAR_KEYWORD
    chats = [[{"role": "assistant", "content": text}] for text in (SHORT, LONG)]
    given = reward(prompts=["p", "p"], completions=chats, completion_ids=[[1], [2]], trainer_state=None)
    assert given == reward(["p", "p"], [SHORT, LONG])
    assert given[0] == 0.5 > given[1] > 0
    assert all(type(value) is float for value in given)


def test_a_wrong_or_unreadable_completion_earns_nothing():
    def correct(prompts, completions, **columns):
        return [1.0, 0.0, None]

    assert proof_reward(require_correct=correct)(["p"] * 3, [SHORT] * 3) == [0.2, 0.0, 0.0]
    assert proof_reward()(["p"] * 2, ["", "Let $x"]) == [0.0, 0.0]


def test_the_reward_of_a_padded_proof_is_lower_on_the_axis_that_was_asked_for():
    proof = bank()[0].proof
    longer = pad(proof)
    for metric in ("used_share", "ease", "simplicity"):
        one, other = proof_reward(metric, weight=1)(["p"] * 2, [proof.text, longer.text])
        assert (one > other) == (metric == "used_share")
        assert 0 <= other <= 1
    with pytest.raises(UnknownNameError, match="reward metric"):
        proof_reward("beauty")
