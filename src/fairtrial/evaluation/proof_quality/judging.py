"""What a judge is asked about proofs, and whether it can be believed.

A judge is any callable from prompt to reply (:mod:`fairtrial.judges`). Before it decides anything it is shown correct
proofs and their corrupted twins; one that cannot tell them apart is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field

from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.concise import Verifier
from fairtrial.evaluation.proof_quality.operators import corrupt
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.evaluation.proof_quality.simplicity import Taxonomy, default_taxonomy
from fairtrial.evaluation.proof_quality.theorems import bank
from fairtrial.judges import (
    Control,
    Judge,
    Reliability,
    Strengths,
    Verdict,
    bradley_terry,
    cohen_kappa,
    prefer_many,
    rate_many,
    reliability,
    votes_many,
)
from fairtrial.seeds import generator

AGREES = 0.4  # kappa with known labels below which a judge's score is printed greyed out

Axis = Literal["conciseness", "ease", "simplicity"]
_QUESTIONS: dict[str, str] = {
    "conciseness": "Both proofs below are correct. Which one has fewer steps that are not needed?",
    "ease": "Both proofs below are correct. Which one asks its reader for less tedious calculation?",
    "simplicity": "Both proofs below are correct. Which one uses more elementary techniques?",
}


class Grades(BaseModel):
    """A judge's ratings of a correct proof."""

    ease: int = Field(ge=1, le=5, description="1 = long tedious calculations, 5 = hardly anything to calculate")
    quality: int = Field(ge=1, le=5, description="how good the proof is as a whole, from 1 to 5")


class StepTechniques(BaseModel):
    """The techniques of each step."""

    techniques: list[list[str]] = Field(description="for each step in order, the ids of the techniques that it uses")


def correctness_prompt(proof: Proof) -> str:
    """Return the question whether a proof is complete and correct."""
    return (
        f"Statement to prove:\n{proof.statement}\n\nProof:\n{proof.text}\n\n"
        "Is this a complete and correct proof of the statement, with every step justified as well as in a textbook?"
    )


def known_pairs(count: int = 20, *, seed: int = 0) -> list[tuple[Proof, Proof]]:
    """Return ``count`` pairs of a bank proof, drawn without replacement, and its corrupted twin."""
    proofs = [entry.proof for entry in bank()]
    if not 1 <= count <= len(proofs):
        raise InputError(f"the bank has {len(proofs)} proofs: ask for 1 to {len(proofs)} controls, not {count}")
    pairs = []
    for i in generator(seed, "controls").permutation(len(proofs)):
        try:
            pairs.append((proofs[i], corrupt(proofs[i], seed=seed)))
        except InputError:  # nothing in it to falsify
            continue
    return pairs[:count]


def controls(count: int = 20, *, seed: int = 0) -> list[Control]:
    """Return the pairs of :func:`known_pairs` as questions.

    >>> pair = controls(1)[0]
    >>> pair.correct != pair.corrupted
    True
    """
    return [Control(*map(correctness_prompt, pair)) for pair in known_pairs(count, seed=seed)]


def judge_reliability(judge: Judge, *, count: int = 20, seed: int = 0) -> Reliability:
    """Return how well a judge tells the bank's proofs from their corrupted twins.

    >>> print(judge_reliability(lambda prompt: '{"correct": true, "confidence": 1}', count=8))
    judge right on 0.50 ... not usable: ...
    """
    return reliability(judge, controls(count, seed=seed))


def judge_verifier(judge: Judge, *, votes: int = 1) -> Verifier:
    """Return a verifier of proofs that asks a judge; a lost reply or a tie of votes counts as rejected.

    >>> judge_verifier(lambda prompt: '{"correct": true, "confidence": 0.9}')(Proof("Clear.", "x"))
    True
    """
    return lambda proof: judged_correct(judge, [proof], votes=votes)[0] is True


def judged_correct(judge: Judge, proofs: Sequence[Proof], *, votes: int = 1) -> list[bool | None]:
    """Return a judge's verdict on each proof, asked in one batch; ``None`` where no reply could be used or votes tie.

    Parameters
    ----------
    votes : 1 for a judge at temperature 0, 3 for one that samples at 0.7.
    """
    prompts = [correctness_prompt(proof) for proof in proofs]
    return [cast.value for cast in votes_many(judge, prompts, Verdict, "correct", n=votes)]


def grades(
    judge: Judge, proofs: Sequence[Proof], field: Literal["ease", "quality"] = "ease", *, votes: int = 1
) -> list[float | None]:
    """Return a judge's rating of each proof from 1 to 5, the median of its votes, asked in one batch.

    ``ease`` is computational ease, ``quality`` one grade for the whole. ``None`` where no reply could be used. Judges
    like long proofs: print their length beside the ratings.
    """
    prompts = [
        f"Statement:\n{proof.statement}\n\nA correct proof:\n{proof.text}\n\nRate the proof. Its length is no merit."
        for proof in proofs
    ]
    return [cast.value for cast in votes_many(judge, prompts, Grades, field, n=votes)]


def judged_techniques(
    judge: Judge, proofs: Sequence[Proof], taxonomy: Taxonomy | None = None
) -> list[list[set[str]] | None]:
    """Return the techniques of each step of each proof by a judge, as ``tags`` of :func:`.cognitive_simplicity`.

    ``None`` where the reply could not be used, has another number of steps or names a technique that does not exist.
    """
    known = taxonomy or default_taxonomy()
    ids = {technique.id for technique in known}
    listed = "\n".join(f"{technique.id}: {technique.description}" for technique in known)
    prompts = [
        "Techniques:\n"
        + listed
        + "\n\nSteps of a proof:\n"
        + "\n".join(f"{i}. {step.text}" for i, step in enumerate(proof.steps, start=1))
        + "\n\nWhich techniques does each step use? A technique that is only mentioned is not used."
        for proof in proofs
    ]
    found: list[list[set[str]] | None] = []
    for proof, reply in zip(proofs, rate_many(judge, prompts, StepTechniques), strict=True):
        tags = [set(step) for step in reply.techniques] if isinstance(reply, StepTechniques) else []
        found.append(tags if len(tags) == len(proof) and set().union(*tags) <= ids else None)
    return found


def pairwise_ranks(proofs: Sequence[Proof], judge: Judge, *, axis: Axis = "ease", seed: int = 0) -> Strengths:
    """Return the models ranked by a judge's preferences between their correct proofs of the same problems.

    Every two models are compared once a problem, in both orders; an answer that depends on the order is a tie
    (Bradley-Terry with ties).

    Raises
    ------
    InputError
        No two models have correct proofs of one problem, or no reply could be used.
    """
    rng = generator(seed, "pairs")
    by_problem: dict[str, dict[str, list[Proof]]] = {}
    for proof in proofs:
        if proof.correct and proof.model is not None:
            by_problem.setdefault(proof.problem, {}).setdefault(proof.model, []).append(proof)
    pairs = []
    for models in by_problem.values():
        names = sorted(models)
        chosen = {name: models[name][rng.integers(len(models[name]))] for name in names}
        pairs += [(chosen[a], chosen[b]) for i, a in enumerate(names) for b in names[i + 1 :]]
    outcomes = prefer_many(judge, _QUESTIONS[axis], [(a.text, b.text) for a, b in pairs])
    games = [
        (str(a.model), str(b.model), outcome.winner)
        for (a, b), outcome in zip(pairs, outcomes, strict=True)
        if not isinstance(outcome, Exception)
    ]
    if not games:
        raise InputError(
            f"{len(pairs)} pairs of correct proofs by two models, none with a usable preference: give proofs of common "
            "problems and a judge that answers in JSON"
        )
    return bradley_terry(games)


def agreement(judged: Sequence[object], known: Sequence[object]) -> tuple[float, bool]:
    """Return Cohen's kappa of a judge with known labels, and whether it is high enough to be printed in full.

    >>> agreement([1, 1, 0, 0], [1, 1, 0, 0])
    (1.0, True)
    """
    kappa = float(cohen_kappa(np.asarray(judged), np.asarray(known)).mean)
    return kappa, kappa >= AGREES
