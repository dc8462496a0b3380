"""Operators that make a proof worse on one axis, make it wrong, or change nothing but its typography.

=========  ==================  =======================================================================================
operator   axis it damages     what it does
=========  ==================  =======================================================================================
pad        conciseness         inserts a true statement that nothing uses
detour     conciseness         inserts a lemma with its proof that nothing uses
brute      computational ease  puts an explicit calculation, case by case, before a step and lets the step rest on it
elevate    simplicity          lets a step rest on a theorem far above it
copy       diversity           says the same proof in other words and other letters
corrupt    correctness         turns one statement into a false one of the same length
retype     none                other white space, delimiters and macros
=========  ==================  =======================================================================================

Each takes a proof in text and a ``seed`` and returns a new one. They know nothing of the scores.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.dependencies import content
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.seeds import generator

_LETTERS = "uvwzxythgj"  # of inserted statements, the first that a proof does not use

# True statements; x, y stand for letters that are new to the proof, n for one that it already uses.
_PADS = (
    r"Recall that a prime is a natural number greater than $1$ whose only divisors are $1$ and itself.",
    r"Note that the product of two integers is again an integer.",
    r"We remark that ${x}^2 \ge 0$ for every real number ${x}$.",
    r"Observe that ${x} + {y} = {y} + {x}$ for all numbers ${x}$ and ${y}$.",
    r"Note that adding $0$ changes nothing, so that ${n} + 0 = {n}$.",
    r"It is well known that between two different rational numbers there is a third one.",
    r"The sum of the angles of a plane quadrilateral is $360$ degrees.",
    r"For every integer ${x}$ the number ${x}({x} + 1)$ is even.",
    r"Of course $7 \cdot 11 \cdot 13 = 1001$.",
    r"Let us also mention that every set is a subset of itself.",
    r"For all ${x}$ and ${y}$ one has $({x} + {y})({x} - {y}) = {x}^2 - {y}^2$.",
    r"Clearly ${n} = 1 \cdot {n}$.",
)
_DETOURS = (
    (
        r"Lemma 1. For all integers ${x}$ the number ${x}^2 - {x}$ is even.",
        r"Indeed ${x}^2 - {x} = {x}({x} - 1)$ is a product of two consecutive integers, and one of them is even.",
        r"This proves the lemma.",
    ),
    (
        r"Lemma 1. For real ${x}$ and ${y}$ one has $2{x}{y} \le {x}^2 + {y}^2$.",
        r"To see this, expand $({x} - {y})^2 = {x}^2 - 2{x}{y} + {y}^2$.",
        r"A square is at least $0$, and the lemma follows.",
    ),
    (
        r"Lemma 1. If $3$ divides ${x}^2$ for an integer ${x}$, then $3$ divides ${x}$.",
        r"For otherwise ${x} = 3{y} + 1$ or ${x} = 3{y} + 2$ for some ${y}$.",
        r"Then ${x}^2$ leaves the remainder $1$, and the lemma is proved.",
    ),
    (
        r"Lemma 1. For ${x} > 0$ one has ${x} + \frac{{1}}{{{x}}} \ge 2$.",
        r"Put ${y} = {x} - 1$ and multiply by ${x}$, which turns the lemma into ${y}^2 \ge 0$.",
        r"So the lemma holds.",
    ),
)
_HEAVY = (
    "the prime number theorem",
    "Dirichlet's theorem on primes in arithmetic progressions",
    "the fundamental theorem of Galois theory",
    "the quadratic reciprocity law",
    "Parseval's identity in Fourier analysis",
    "the Borsuk-Ulam theorem",
    "the Riemann-Roch theorem",
    "Brouwer's fixed point theorem",
    "the Lebesgue dominated convergence theorem",
    "the Heine-Borel theorem on compactness",
)
_WORDS = {
    "hence": "consequently",
    "therefore": "it follows that",
    "thus": "so",
    "suppose": "assume",
    "assume": "suppose",
    "let": "take",
    "put": "set",
    "write": "put",
    "gives": "yields",
    "yields": "gives",
    "since": "because",
    "because": "since",
    "equals": "is",
    "every": "each",
    "contradiction": "absurdity",
    "impossible": "absurd",
    "show": "prove",
    "prove": "show",
    "obtain": "get",
    "holds": "is true",
    "moreover": "also",
    "again": "once more",
    "positive": "strictly positive",
    "claim": "assertion",
    "exactly": "precisely",
    "smallest": "least",
}
_ONE, _OTHER = "abmnpxzkutABCDFGKNSTX", "cdrsqywivhUVWPHJLMRQY"
_RENAMED = str.maketrans(_ONE + _OTHER, _OTHER + _ONE)  # letters in pairs, exchanged
_REVERSED = (
    (r"\bodd\b", "even"),
    (r"\beven\b", "odd"),
    (r"\\le(?![a-z])", ">"),
    (r"\\ge(?![a-z])", "<"),
    (r"\bis not\b", "is"),
    (r"\bhas no\b", "has a"),
    (r"\bare coprime\b", "are equal"),
)

_OTHER_NAMES = {
    r"\\le\b": r"\\leqslant",
    r"\\ge\b": r"\\geqslant",
    r"\\ne\b": r"\\neq",
    r"\\frac\b": r"\\dfrac",
    r"\\dots\b": r"\\ldots",
    r"\(": r"\\left(",
    r"\)": r"\\right)",
    r"\\sqrt\b": r"\\wurzel",
}


def pad(proof: Proof, *, seed: int = 0) -> Proof:
    """Insert a true statement that no other step uses, anywhere but at the end."""
    rng = generator(seed, "pad", proof.text)
    return _inserted(proof, [_filled(_PADS[rng.integers(len(_PADS))], proof)], rng)


def detour(proof: Proof, *, seed: int = 0) -> Proof:
    """Insert a lemma with its proof that no other step uses, anywhere but at the end."""
    rng = generator(seed, "detour", proof.text)
    return _inserted(proof, [_filled(line, proof) for line in _DETOURS[rng.integers(len(_DETOURS))]], rng)


def brute(proof: Proof, *, seed: int = 0) -> Proof:
    """Replace the argument for one step by a calculation over all residues of a small modulus."""
    rng = generator(seed, "brute", proof.text)
    modulus, factor = (int(rng.choice(choices)) for choices in ((5, 7, 8, 9), (13, 17, 23, 37)))
    steps = [step.text for step in proof.steps]
    at = _inner(proof, rng)
    cases = [
        rf"Case {i + 1}: ${i} \cdot {factor} + {i}^2 \cdot {factor**2} = {i * factor + i * i * factor**2}$."
        for i in range(modulus)
    ]
    steps[at] = f"In each of these cases, {_lowered(steps[at])}"
    return proof.with_steps([*steps[:at], "We calculate explicitly.", *cases, *steps[at:]])


def elevate(proof: Proof, *, seed: int = 0) -> Proof:
    """Let one step rest on a theorem of graduate level."""
    rng = generator(seed, "elevate", proof.text)
    steps = [step.text for step in proof.steps]
    at = _inner(proof, rng)
    steps[at] = f"By {_HEAVY[rng.integers(len(_HEAVY))]}, of which a trivial case suffices, {_lowered(steps[at])}"
    return proof.with_steps(steps)


def copy(proof: Proof, *, seed: int = 0) -> Proof:
    """Say the same in other words, with letters renamed: a paraphrase without a new idea."""
    rng = generator(seed, "copy", proof.text)
    rename = bool(rng.integers(2))
    steps = []
    for step in proof.steps:
        parts = step.text.split("$")
        for i, part in enumerate(parts):
            if i % 2 == 0:
                parts[i] = re.sub(r"[A-Za-z]+", lambda word: _reworded(word[0]), part)
            elif rename:
                parts[i] = re.sub(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])", lambda x: x[0].translate(_RENAMED), part)
        steps.append("$".join(parts))
    return proof.with_steps(steps)


def corrupt(proof: Proof, *, seed: int = 0) -> Proof:
    """Make one step false, by a changed relation, number or word, and mark the proof as incorrect.

    Raises
    ------
    InputError
        No step holds anything that could be turned round.
    """
    rng = generator(seed, "corrupt", proof.text)
    steps = [step.text for step in proof.steps]
    choices = [(i, change) for i in range(len(steps)) for change in _falsehoods(steps[i])]
    if not choices:
        raise InputError(f"problem {proof.problem!r}: no relation, number or parity to falsify: leave this proof out")
    at, changed = choices[rng.integers(len(choices))]
    return proof.with_steps([*steps[:at], changed, *steps[at + 1 :]]).marked(correct=False)


def retype(proof: Proof, *, seed: int = 0) -> Proof:
    """Change typography only: white space, delimiters of formulas, names of commands, macros of the document's own."""
    rng = generator(seed, "retype", proof.text)
    parts = proof.text.split("$")  # formulas at the odd places
    for i in range(1, len(parts), 2):
        for one, other in _OTHER_NAMES.items():
            parts[i] = re.sub(one, other, parts[i])
        parts[i] = rf"\(\,{parts[i]}\)"
    text = re.sub(" ", lambda _: " " * int(rng.integers(1, 4)), "".join(parts))
    return Proof(rf"\newcommand{{\wurzel}}{{\sqrt}} {text}", proof.problem, **proof.about)


DAMAGE: dict[str, Callable[..., Proof]] = {
    "pad": pad, "detour": detour, "brute": brute, "elevate": elevate, "copy": copy,
}  # fmt: skip


def _inserted(proof: Proof, lines: list[str], rng: np.random.Generator) -> Proof:
    at = int(rng.integers(1, max(2, len(proof))))
    steps = [step.text for step in proof.steps]
    return proof.with_steps([*steps[:at], *lines, *steps[at:]])


def _inner(proof: Proof, rng: np.random.Generator) -> int:
    """Return a step that is neither the first nor the last, where there is one."""
    return int(rng.integers(1, len(proof) - 1)) if len(proof) > 2 else len(proof) - 1


def _filled(line: str, proof: Proof) -> str:
    """Fill in letters that are new to the proof for x and y, and its first letter for n."""
    taken = [symbol.rstrip("_") for step in proof.steps for symbol in sorted(content(step).symbols)]
    x, y = [*(letter for letter in _LETTERS if letter not in taken), "u", "v"][:2]
    old = next((symbol for symbol in taken if len(symbol) == 1), "n")
    return line.format(x=x, y=y, n=old)


def _lowered(sentence: str) -> str:
    """Let a sentence go on after a clause."""
    return sentence if sentence[:1] in "$\\(" or sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]


def _reworded(word: str) -> str:
    other = _WORDS.get(word.lower())
    if other is None:
        return word
    return other.capitalize() if word[0].isupper() else other


def _falsehoods(step: str) -> list[str]:
    """Return false versions of a step, each with one thing changed."""
    found = []
    for pattern, wrong in _REVERSED:
        found += [step[: m.start()] + wrong + step[m.end() :] for m in re.finditer(pattern, step)]
    for match in re.finditer(r"(?<== )\d+(?![\d.])", step):
        found.append(step[: match.start()] + str(int(match[0]) + 1) + step[match.end() :])
    for match in re.finditer(r"(?<=\S )\+(?= )", step):
        found.append(step[: match.start()] + "-" + step[match.end() :])
    return found
