"""Conciseness: how much of a proof is needed, and how long it is beside the shortest one known.

    length ratio      L(p) / L*, L* the tokens of the shortest correct proof known; the score is -log2 of it
    used share        tokens of the steps that the conclusion can be traced back to, over L(p); needs no judge
    necessary share   tokens of a remainder from which no single step can be taken, over L(p); asks a verifier

The verifier decides whether what is left still proves the claim *to the same standard*. Without one, brevity rewards
leaving out the hard step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fairtrial.evaluation.proof_quality.dependencies import reached
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.options import checked_count

Verifier = Callable[[Proof], bool]
Part = TypeVar("Part")

MOST_CALLS = 40  # of a verifier that costs: a judge


@dataclass(frozen=True)
class Conciseness:
    """How concise a proof is.

    Attributes
    ----------
    length_ratio : its length over the shortest known, at least 1 for correct proofs; ``None`` without a reference.
    used_share : in (0, 1]; 1 = every step leads to the conclusion.
    necessary_share : in (0, 1]; ``None`` without a verifier, or where it rejects the whole proof.
    minimal : whether the calls sufficed to show that no further single step can go.
    """

    length_ratio: float | None
    used_share: float
    necessary_share: float | None = None
    minimal: bool = False

    @property
    def brevity(self) -> float | None:
        """-log2 of the length ratio: 0 for the shortest proof, -1 for twice its length."""
        return None if self.length_ratio is None else -math.log2(self.length_ratio)


def conciseness(
    proof: Proof,
    *,
    reference_length: int | None = None,
    verifier: Verifier | None = None,
    max_calls: int | None = MOST_CALLS,
) -> Conciseness:
    r"""Return the conciseness of a proof.

    Parameters
    ----------
    reference_length : L*, tokens of the shortest correct proof of the problem.
    verifier : says of a shortened proof whether it still proves the claim to the same standard.
    max_calls : of the verifier; ``None`` = as many as it takes, at most s^2 + 3s for s steps.

    Raises
    ------
    InputError
        ``reference_length`` is not positive.

    Notes
    -----
    ProofRank names conciseness, "no unneeded steps", as one of its five axes; the formulas are this library's.

    Examples
    --------
    >>> proof = Proof(r"Let $a = 1$. Then $b = a + 1$. Note that $7 > 5$. Hence $b = 2$.", "two")
    >>> conciseness(proof, verifier=lambda rest: "a + 1" in rest.text and "b = 2" in rest.text)
    Conciseness(length_ratio=None, used_share=0.739..., necessary_share=0.521..., minimal=True)
    """
    ratio = None if reference_length is None else proof.length / checked_count(reference_length, "reference_length")
    used = used_share(proof)
    if verifier is None:
        return Conciseness(ratio, used)
    kept, minimal = necessary_steps(proof, verifier, max_calls=max_calls)
    share = None if kept is None else sum(proof.steps[i].tokens for i in kept) / proof.length
    return Conciseness(ratio, used, share, minimal)


def used_share(proof: Proof) -> float:
    """Return the share of tokens in steps from which the conclusion is reached; see :mod:`.dependencies`."""
    return sum(step.tokens for step, used in zip(proof.steps, reached(proof.steps), strict=True) if used) / proof.length


def necessary_steps(
    proof: Proof, verifier: Verifier, *, max_calls: int | None = MOST_CALLS
) -> tuple[list[int] | None, bool]:
    """Return the indices of steps that are left when none of them can go, and whether that was shown.

    ``None`` where the verifier rejects the whole proof.
    """

    def holds(kept: Sequence[int]) -> bool:
        return bool(kept) and verifier(proof.with_steps([proof.steps[i] for i in kept]))

    if not holds(range(len(proof))):
        return None, False
    left = None if max_calls is None else max_calls - 1
    return minimise(range(len(proof)), holds, max_calls=left)


def minimise(
    parts: Sequence[Part], holds: Callable[[Sequence[Part]], bool], *, max_calls: int | None = None
) -> tuple[list[Part], bool]:
    """Delta debugging: return a part of ``parts`` that still ``holds`` and from which no single element can go.

    Tries ever finer groups: to keep one group alone, else to drop one (Zeller and Hildebrandt 2002, algorithm ddmin).
    Of s parts at most s^2 + 3s calls, about s log s where little is needed. The whole is taken to hold.

    Returns
    -------
    kept, minimal
        ``minimal`` is false where ``max_calls`` ended the search.

    Examples
    --------
    >>> minimise(range(8), lambda kept: {2, 5} <= set(kept))
    ([2, 5], True)
    """
    kept, groups = list(range(len(parts))), 2
    seen: dict[tuple[int, ...], bool] = {}
    while len(kept) >= 2:
        bounds = [len(kept) * i // groups for i in range(groups + 1)]
        chunks = [kept[a:b] for a, b in itertools.pairwise(bounds)]
        rests = [[i for i in kept if i not in chunk] for chunk in map(set, chunks)] if groups > 2 else []
        for trial, groups_then in [*((c, 2) for c in chunks), *((r, max(groups - 1, 2)) for r in rests)]:
            key = tuple(trial)
            if key not in seen:
                if max_calls is not None and len(seen) >= max_calls:
                    return [parts[i] for i in kept], False
                seen[key] = holds([parts[i] for i in trial])
            if seen[key]:
                kept, groups = trial, groups_then
                break
        else:
            if groups >= len(kept):
                break
            groups = min(2 * groups, len(kept))
    return [parts[i] for i in kept], True
