import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.evaluation.proof_quality import baselines
from fairtrial.evaluation.proof_quality.concise import used_share
from fairtrial.evaluation.proof_quality.diverse import distances
from fairtrial.evaluation.proof_quality.ease import computational_ease
from fairtrial.evaluation.proof_quality.operators import DAMAGE, brute, corrupt, retype
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.evaluation.proof_quality.simplicity import cognitive_simplicity
from fairtrial.evaluation.proof_quality.theorems import bank

PROOFS = [entry.proof.with_steps([step.text for step in entry.proof.steps]) for entry in bank()]


@pytest.mark.parametrize("seed", range(2))
def test_retyping_changes_the_source_and_no_score(seed):
    for proof in PROOFS[seed::2]:
        typed = retype(proof, seed=seed)
        assert typed.source != proof.source
        assert typed.length == proof.length
        assert used_share(typed) == used_share(proof)
        assert computational_ease(typed) == computational_ease(proof)
        assert cognitive_simplicity(typed) == cognitive_simplicity(proof)
        assert distances([proof, typed])[0, 1] < 1e-9


@pytest.mark.parametrize("name", DAMAGE)
def test_an_operator_is_repeatable_and_keeps_what_is_known_of_the_proof(name):
    for proof in PROOFS[::7]:
        one, two = DAMAGE[name](proof, seed=1), DAMAGE[name](proof, seed=1)
        assert one.text == two.text != proof.text
        assert (one.problem, one.correct, one.statement) == (proof.problem, True, proof.statement)
    assert any(DAMAGE[name](p, seed=1).text != DAMAGE[name](p, seed=2).text for p in PROOFS)


def test_padding_and_detours_leave_every_step_of_the_proof_in_place():
    for name in ("pad", "detour"):
        for proof in PROOFS:
            texts = [step.text for step in DAMAGE[name](proof).steps]
            assert [text for text in texts if text in {step.text for step in proof.steps}] == [
                step.text for step in proof.steps
            ]
            assert texts[-1] == proof.steps[-1].text


def test_the_calculations_that_brute_inserts_are_true():
    proof = brute(PROOFS[0])
    for step in proof.steps:
        if step.heading:
            left, right = "".join(step.formulas[0]).replace("\\cdot", "*").replace("^", "**").split("=")
            assert eval(left) == int(right)


def test_a_corrupted_proof_is_marked_and_differs_in_one_step():
    for proof in PROOFS:
        if not any(character in proof.text for character in "=<+"):
            continue
        try:
            wrong = corrupt(proof)
        except ValueError:
            continue
        assert wrong.correct is False
        assert sum(a.text != b.text for a, b in zip(proof.steps, wrong.steps, strict=True)) == 1


# ----------------------------------------------------------------------------------------------------------- baselines


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from("abcd"), min_size=4, max_size=12),
    st.lists(st.sampled_from("abcd"), min_size=4, max_size=12),
)
def test_bleu_is_symmetric_at_most_one_and_one_for_equals(one, other):
    assert baselines.self_bleu(one, other) == pytest.approx(baselines.self_bleu(other, one))
    assert 0 < baselines.self_bleu(one, other) <= 1 + 1e-12
    assert baselines.self_bleu(one, one) == pytest.approx(1)


@pytest.mark.slow
def test_bleu_is_that_of_torchmetrics_where_all_ngrams_match_somewhere():
    text = pytest.importorskip("torchmetrics.functional.text")
    one, other = (line.split() for line in ("the cat sat on the mat today", "the cat sat on the red mat"))
    both = [text.bleu_score([" ".join(a)], [[" ".join(b)]]).item() for a, b in ((one, other), (other, one))]
    assert baselines.self_bleu(one, other) == pytest.approx(sum(both) / 2, rel=1e-5)


def test_lengths_are_turned_so_that_more_is_better():
    short, long = Proof("Clear.", "p"), Proof("Clear, since all is clear to those who see.", "p")
    assert baselines.token_score(short) > baselines.token_score(long)
    assert baselines.gzip_score(short) > baselines.gzip_score(long)


def test_the_control_depends_on_the_source_and_the_seed_only():
    one = Proof("Clear.", "p")
    assert baselines.random_score(one) == baselines.random_score(Proof("Clear.", "q"))
    assert baselines.random_score(one) != baselines.random_score(one, seed=1)
    assert baselines.random_score(one) != baselines.random_score(Proof("Clear. ", "p"))


@pytest.mark.slow
def test_fluency_is_minus_the_loss_of_the_text():
    from fairtrial.causal_lm.likelihood import mean_nll
    from fairtrial.data.tiny import tiny_causal_lm

    model, tokenizer = tiny_causal_lm()
    proof = Proof("w3 w5 w7 w9", "p")
    found = baselines.fluency_scores([proof], model, tokenizer)[0]
    assert found == pytest.approx(-mean_nll(model, [tokenizer(proof.text)["input_ids"]]))
    assert math.isfinite(found)
