"""Computational ease: how little a reader has to calculate.

    load(formula)   operators, products written by juxtaposition included, + digits beyond two of each number + depth of
                    nested brackets and groups
    load(p)         the sum over its formulas
    ease            1 / (1 + load / (l0 L*)), l0 the load per token of usual proofs, L* the shortest known proof

so that a proof with the load that is usual for a proof of length L* has 1/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.dependencies import GREEK
from fairtrial.evaluation.proof_quality.latex import words
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.options import checked_count, checked_number

LOAD_PER_TOKEN = 0.17  # median of the library's bank of proofs

_BINARY = words(r"+ - * / \cdot \times \div \pm \mp \ast \circ \oplus \cap \cup \setminus \wedge \vee \bmod")
_RELATIONS = words(r"= < > \le \ge \ne \equiv \approx \sim \cong \ll \gg")
_BIG = words(r"\sum \prod \int \iint \oint \lim \max \min \sup \inf \bigcup \bigcap")
_FUNCTIONS = words(
    r"\log \ln \lg \exp \sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan \sinh \cosh \tanh \gcd \lcm \det \deg "
    r"\dim \ker \arg \Pr \pmod"
)
_TAKES = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1}
_OPEN, _CLOSE = words(r"( [ \{ \lfloor \lceil \langle"), words(r") ] \} \rfloor \rceil \rangle")


@dataclass(frozen=True)
class Ease:
    """How little calculation a proof asks for.

    Attributes
    ----------
    score : in (0, 1]; 1 = no calculation, 1/2 = the usual load.
    load : operators, long numbers and nesting, summed over formulas.
    longest_chain : relations in one formula, a = b < c having 2.
    largest : the load of the heaviest formula.
    cases : cases that are treated under a heading of their own.
    """

    score: float
    load: int
    longest_chain: int
    largest: int
    cases: int


def computational_ease(
    proof: Proof, *, reference_length: int | None = None, load_per_token: float = LOAD_PER_TOKEN
) -> Ease:
    r"""Return how little calculation a proof asks for.

    Parameters
    ----------
    reference_length : L*, tokens of the shortest correct proof of the problem; left out, this proof's own.
    load_per_token : l0, the median load per token of a reference set; the default is that of the library's bank.

    Raises
    ------
    InputError
        A formal proof, which has no formulas to compute, or a parameter that is not positive.

    Notes
    -----
    ProofRank names computational ease, "little tedious calculation", as one of its five axes; the formula is this
    library's.

    Examples
    --------
    >>> computational_ease(Proof(r"Then $x = 2a + 1234 < 3$.", "x"), reference_length=8)
    Ease(score=0.253..., load=4, longest_chain=2, largest=4, cases=0)
    """
    if proof.formal:
        raise InputError(f"problem {proof.problem!r}: a formal proof has no formulas to compute: leave this score out")
    length = proof.length if reference_length is None else checked_count(reference_length, "reference_length")
    load_per_token = checked_number(load_per_token, "load_per_token", above=0)
    loads = [formula_load(formula) for formula in proof.formulas]
    return Ease(
        score=1 / (1 + sum(loads) / (load_per_token * length)),
        load=sum(loads),
        longest_chain=max((sum(token in _RELATIONS for token in formula) for formula in proof.formulas), default=0),
        largest=max(loads, default=0),
        cases=sum(step.heading.startswith("case") for step in proof.steps),
    )


def formula_load(formula: Sequence[str]) -> int:
    r"""Return operators + digits beyond two of each number + nesting depth of a formula's tokens.

    >>> from fairtrial.evaluation.proof_quality.latex import math_tokens
    >>> formula_load(math_tokens(r"\frac{a + b}{2} + 2ab"))  # /, +, +, two products; one group
    6
    """
    depth = deepest = 0
    for token in formula:
        depth += (token in _OPEN or token == "{") - (token in _CLOSE or token == "}")
        deepest = max(deepest, depth)
    digits = sum(max(0, len(token.replace(".", "")) - 2) for token in formula if token[0].isdigit())
    return operators(formula)[0] + digits + deepest


def operators(formula: Sequence[str], at: int = 0) -> tuple[int, int]:
    """Return the operators from ``at`` to the end of its group, and where that is.

    ``f(x)`` is an application, not a product; ``2(x)`` and ``(x)(y)`` are products.
    """
    count = 0
    before = ""  # the kind of value that stands before: "letter", "value" or none
    while at < len(formula):
        token = formula[at]
        at += 1
        if token == "}":
            break
        value = token[0].isdigit() or (len(token) == 1 and token.isalpha()) or token in GREEK
        if token == "{":
            inner, at = operators(formula, at)
            count, before = count + inner + bool(before), "value"
        elif token in _TAKES or token in _FUNCTIONS or token in _BIG:
            count += 1 + (bool(before) and token != r"\pmod")
            for _ in range(_TAKES.get(token, 0)):
                inner, at = _argument(formula, at)
                count += inner
            before = "value" if token in _TAKES else ""
        elif token in ("^", "_"):
            inner, at = _argument(formula, at)
            count += inner + (token == "^")
        elif token in _BINARY:
            count, before = count + 1, ""
        elif token == "!":
            count += 1
        elif token in _OPEN:
            count, before = count + (before == "value"), ""
        elif token in _CLOSE:
            before = "value"
        elif value:
            count, before = count + bool(before), "value" if token[0].isdigit() else "letter"
        elif token not in ("|", r"\|", "'"):
            before = ""
    return count, at


def _argument(formula: Sequence[str], at: int) -> tuple[int, int]:
    """Return the operators of the argument at ``at``, a group or a token, and where it ends."""
    if at < len(formula) and formula[at] == "{":
        return operators(formula, at + 1)
    return 0, at + 1
