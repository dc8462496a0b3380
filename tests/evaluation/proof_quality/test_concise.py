import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.concise import conciseness, minimise, necessary_steps, used_share
from fairtrial.evaluation.proof_quality.dependencies import reached, uses
from fairtrial.evaluation.proof_quality.proof import Proof, Step

CHAIN = [f"Put $a_{{{i + 1}}} = a_{{{i}}} + 1$." for i in range(5)]
PAD = "Recall that every set is a subset of itself."


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.data())
def test_the_used_share_of_a_chain_is_one_and_an_unused_step_of_t_tokens_gives_l_over_l_plus_t(length, data):
    steps = [
        Step(f"s{i}", f"s{i}", tokens=data.draw(st.integers(1, 9)), uses=(i - 1,) if i else ()) for i in range(length)
    ]
    assert used_share(Proof(steps, "p")) == 1
    at, t = data.draw(st.integers(0, length - 1)), data.draw(st.integers(1, 9))
    moved = [Step(s.text, s.prose, tokens=s.tokens, uses=tuple(u + (u >= at) for u in s.uses)) for s in steps]
    padded = [*moved[:at], Step("pad", "pad", tokens=t, uses=()), *moved[at:]]
    total = sum(step.tokens for step in steps)
    assert used_share(Proof(padded, "p")) == total / (total + t)


@pytest.mark.parametrize("at", range(1, 5))
def test_the_same_holds_for_a_text(at):
    chain = Proof(CHAIN, "p")
    assert used_share(chain) == 1
    pad = Proof(PAD, "p").length
    assert used_share(Proof([*CHAIN[:at], PAD, *CHAIN[at:]], "p")) == chain.length / (chain.length + pad)


def test_an_aside_is_used_where_what_it_introduces_comes_back():
    back = ["Let $n = 3$.", "Note that $n^2 = 9$.", "Hence $m = n^2 + 1$ is even."]
    gone = [back[0], "Note that $n^3 = 27$.", back[2]]
    assert reached(Proof(back, "p").steps) == [True, True, True]
    assert reached(Proof(gone, "p").steps) == [True, False, True]


def test_references_headings_and_labels_are_edges():
    proof = Proof(
        [
            r"Lemma 1. The moon is round \label{moon}.",
            "Note that $u = 1$ (2).",
            r"Observe that cheese is yellow \tag{7}.",
            r"Let $x = 1$.",
            r"By Lemma 1 and (7), $x + 1 = 2$.",
        ],
        "p",
    )
    edges = uses(proof.steps)
    assert edges[4] >= {0, 2, 3}
    assert 1 not in edges[4]


def test_the_step_that_closes_the_cases_uses_the_last_step_of_each():
    proof = Proof(
        "Let $n$ be an integer. Case 1: $n = 2k$. Then $n^2 = 4k^2$. Case 2: $n = 2k + 1$. Recall that $7$ is prime. "
        "In both cases $n^2 - n$ is even.",
        "p",
    )
    assert uses(proof.steps)[5] >= {2, 3}
    assert reached(proof.steps) == [True, True, True, True, False, True]


def test_indeed_lets_the_step_before_use_it():
    assert uses(Proof("Let $x = 1$. So $x > 0$. Indeed $x = 1 > 0$.", "p").steps)[1] >= {2}


def test_the_length_ratio_of_the_shortest_proof_is_one():
    proof = Proof(CHAIN, "p")
    assert conciseness(proof, reference_length=proof.length).length_ratio == 1
    assert conciseness(proof, reference_length=proof.length).brevity == 0
    assert conciseness(Proof(CHAIN * 2, "p"), reference_length=proof.length).brevity == -1
    assert conciseness(proof).brevity is None
    with pytest.raises(InputError, match="at least 1"):
        conciseness(proof, reference_length=0)


# ---------------------------------------------------------------------------------------------------- delta debugging


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14).flatmap(lambda s: st.tuples(st.just(s), st.sets(st.integers(0, s - 1)))))
def test_delta_debugging_of_a_monotone_verifier_is_minimal_within_s_squared_plus_3s_calls(case):
    size, needed = case
    calls = []
    kept, minimal = minimise(range(size), lambda part: calls.append(1) or needed <= set(part))
    assert minimal
    assert set(kept) == needed or (not needed and len(kept) == 1)
    assert len(calls) <= size**2 + 3 * size


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_of_any_verifier_no_single_step_can_go(seed):
    rng = random.Random(seed)
    good = {frozenset(rng.sample(range(7), rng.randint(1, 7))) for _ in range(60)} | {frozenset(range(7))}
    calls = []
    kept, minimal = minimise(range(7), lambda part: calls.append(1) or frozenset(part) in good)
    assert minimal
    assert frozenset(kept) in good
    assert all(len(kept) == 1 or frozenset(kept) - {one} not in good for one in kept)
    assert len(calls) <= 7**2 + 3 * 7


def test_a_limit_on_calls_is_kept_and_told():
    calls = []

    def verify(proof):
        calls.append(1)
        return "a _ 1" in proof.text and "a _ 5" in proof.text

    proof = Proof(CHAIN, "p")
    found = conciseness(proof, verifier=verify, max_calls=3)
    assert len(calls) <= 3
    assert not found.minimal
    assert conciseness(proof, verifier=verify).minimal
    assert conciseness(proof, verifier=verify).necessary_share == pytest.approx(2 / 5, abs=0.01)
    assert necessary_steps(proof, lambda rest: False) == (None, False)
