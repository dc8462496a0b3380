"""Adaptivity: whether a model can prove a problem by the technique it is asked for.

A success is a correct proof that uses the technique u on the way to its conclusion: a step tagged u from which the
conclusion is reached, not one that mentions it in passing. For every problem and every u that is feasible, being used
by some known correct proof of the problem,

    rate = P(success | asked for u)            lift = rate - P(correct and uses u | not asked for anything)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fairtrial import stats
from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.dependencies import reached
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.evaluation.proof_quality.simplicity import Encoder, Taxonomy, default_taxonomy


@dataclass(frozen=True)
class Adaptivity:
    """How well a model follows a requested technique.

    Attributes
    ----------
    rate : mean over problems of the mean success rate over feasible techniques asked for.
    lift : the same of the rates above those without a request.
    interval : of the lift, problems being the units; ``None`` for a single problem.
    table : one row a problem and technique: problem, technique, asked, rate, base, lift.
    """

    rate: float
    lift: float
    interval: stats.Interval | None
    table: pd.DataFrame


def adaptivity(
    proofs_by_technique: Mapping[str | None, Sequence[Proof]],
    *,
    known: Sequence[Proof] = (),
    taxonomy: Taxonomy | None = None,
    encoder: Encoder | None = None,
) -> Adaptivity:
    """Return how well proofs follow the technique they were asked for.

    Parameters
    ----------
    proofs_by_technique : technique id to the proofs it was requested for; under ``None`` those without a request.
    known : further correct proofs, such as other models' or a reference's, that show which techniques are feasible.

    Raises
    ------
    UnknownNameError
        A technique that the taxonomy does not have.
    InputError
        Correctness is not known, no proof was written without a request, or no request was feasible.

    Examples
    --------
    >>> asked = {u: [Proof(text, "sum", correct=True) for text in texts] for u, texts in {
    ...     None: ["By induction, all is well."] * 3, "telescoping": ["The sum telescopes to one."] * 2}.items()}
    >>> adaptivity(asked).lift
    1.0
    """
    names = taxonomy or default_taxonomy()
    for technique in proofs_by_technique:
        if technique is not None:
            names[technique]
    everything = [proof for proofs in proofs_by_technique.values() for proof in proofs]
    if any(proof.correct is None for proof in everything):
        raise InputError("correct is not known of some proofs: judge them first, a wrong proof follows no technique")
    used = {id(proof): techniques_used(proof, names, encoder) for proof in (*everything, *known)}
    feasible: dict[str, set[str]] = {}
    for proof in (*everything, *known):
        if proof.correct:
            feasible.setdefault(proof.problem, set()).update(used[id(proof)])

    def rate(proofs: Sequence[Proof], technique: str) -> float:
        return sum(bool(proof.correct) and technique in used[id(proof)] for proof in proofs) / len(proofs)

    rows = []
    for technique, proofs in proofs_by_technique.items():
        if technique is None:
            continue
        for problem in dict.fromkeys(proof.problem for proof in proofs):
            asked = [proof for proof in proofs if proof.problem == problem]
            free = [proof for proof in proofs_by_technique.get(None, ()) if proof.problem == problem]
            if technique in feasible.get(problem, ()) and free:
                success, base = rate(asked, technique), rate(free, technique)
                rows.append((problem, technique, len(asked), success, base, success - base))
    if not rows:
        raise InputError(
            "no request can be judged: give proofs without a request under None, of the problems that were asked "
            "for, and in known= a correct proof that uses the technique"
        )
    table = pd.DataFrame(rows, columns=["problem", "technique", "asked", "rate", "base", "lift"])
    by_problem = table.groupby("problem")[["rate", "lift"]].mean()
    interval = stats.mean_interval(by_problem["lift"].to_numpy()) if len(by_problem) > 1 else None
    return Adaptivity(float(by_problem["rate"].mean()), float(by_problem["lift"].mean()), interval, table)


def techniques_used(proof: Proof, taxonomy: Taxonomy | None = None, encoder: Encoder | None = None) -> set[str]:
    """Return the techniques of the steps from which a proof's conclusion is reached.

    >>> techniques_used(Proof("Note that induction is fun. We count $x$ in two ways. Hence $x = 2$.", "x"))
    {'double-counting'}
    """
    tags = (taxonomy or default_taxonomy()).tag(proof, encoder=encoder)
    return set().union(*(found for found, there in zip(tags, reached(proof.steps), strict=True) if there))
