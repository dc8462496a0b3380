"""Which steps a proof needs: its dependency graph, and the steps from which the conclusion can be reached.

A formal proof has its graph. In a text, step j uses step i < j where

    reference    j names it: a label, an equation number, "Lemma 2", "Step 3";
    introduced   j contains a symbol or an expression that i was the first to mention;
    flow         i is the step before j, passing over asides ("note that", "recall") and over steps that are foreign:
                 that share no symbol, expression or word with the rest of the proof, directly or through others;
    frame        a case follows what precedes the first case, and the step that closes the cases uses the last step of
                 each; "indeed" makes the step before use j.

So a step is needless where it is an aside or foreign and nothing that it introduces comes back. What a text leaves to
its reader is not seen: the graph is evidence, not a verifier.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fairtrial.evaluation.proof_quality.latex import words
from fairtrial.evaluation.proof_quality.proof import Step

GREEK = words(
    r"\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu "
    r"\xi \pi \rho \sigma \tau \upsilon \phi \varphi \chi \psi \omega \ell \Gamma \Delta \Theta \Lambda \Xi \Pi "
    r"\Sigma \Phi \Psi \Omega"
)
_ALPHABETS = words(r"\mathbb \mathcal \mathbf \mathrm \mathfrak \mathscr \operatorname")
_RELATIONS = words(
    r"= < > \le \ge \ne \equiv \mid \nmid \in \notin \subset \subseteq \supset \to \mapsto \implies \iff \approx \sim "
    r"\cong \perp \parallel , ; : \dots \forall \exists"
)
_ASIDE = re.compile(
    r"(?:we )?(?:also )?(?:note|recall|remark|observe|notice|remember|mention|clearly|obviously|trivially|of course|"
    r"incidentally|as an aside|by the way|in passing|it is (?:well )?known|"
    r"it is (?:also )?(?:worth|interesting|clear))\b"
)
_ELABORATION = re.compile(r"(?:indeed|otherwise|namely|to see this|for otherwise|the reason)\b")
_WORD = re.compile(r"[a-z]{3,}")
_COMMON = words(
    "hence thus therefore then that this these those which with from have been such some every each both also only "
    "since because where when there their they what whose would could must shall will into than other another same "
    "more most gives give given yields obtain follows follow implies proves prove proof show shows holds hold write "
    "let denote equal equals number numbers positive integer integers real note recall observe indeed otherwise "
    "moreover again first second last next left right side sides exactly least many much very well over under between "
    "and the for are not has its one two three can any all but our was were put get take call out how now"
)


@dataclass(frozen=True)
class Content:
    """What a step speaks of: symbols, expressions of several tokens, and stems of words."""

    symbols: frozenset[str]
    terms: frozenset[str]
    words: frozenset[str]

    def shares(self, other: Content) -> bool:
        """Whether two steps have a symbol or an expression in common, or a word where one of them has no symbol."""
        if not self.symbols.isdisjoint(other.symbols) or not self.terms.isdisjoint(other.terms):
            return True
        return not (self.symbols and other.symbols) and not self.words.isdisjoint(other.words)


def content(step: Step) -> Content:
    """Return what a step speaks of.

    >>> from fairtrial.evaluation.proof_quality.proof import Proof
    >>> found = content(Proof(r"Then $a^2 = 2b_1$ holds.", "x").steps[0])
    >>> sorted(found.symbols), sorted(found.terms)
    (['a', 'b_'], ['2 b _ 1', 'a ^ 2'])
    """
    symbols: set[str] = set()
    terms: set[str] = set()
    for formula in step.formulas:
        side: list[str] = []  # what stands between two relations,
        summand: list[str] = []  # and its part since the last + or - outside brackets
        depth = 0
        for i, token in enumerate((*formula, ",")):
            depth += (token in "([{") - (token in ")]}")
            related = token in _RELATIONS
            if related or (depth == 0 and token in "+-"):
                terms.update(" ".join(part) for part in ((summand, side) if related else (summand,)) if _says(part))
                summand = []
                side = [] if related else [*side, token]
                depth = 0 if related else depth
                continue
            side.append(token)
            summand.append(token)
            if ((len(token) == 1 and token.isalpha()) or token in GREEK) and not (i and formula[i - 1] in _ALPHABETS):
                symbols.add(token + "_" if formula[i + 1 : i + 2] == ("_",) else token)
    stems = {_stem(word) for word in _WORD.findall(step.prose.lower()) if word not in _COMMON}
    return Content(frozenset(symbols), frozenset(terms), frozenset(stems))


def _says(part: Sequence[str]) -> bool:
    """Whether an expression is more than a number or a single symbol."""
    return len(part) > 1 and any(token.isalpha() or token[0] == "\\" for token in part)


def _stem(word: str) -> str:
    """Cut a plural or a verb's ending, crudely: both of ``counts`` and ``counting`` become ``count``."""
    for ending in ("ations", "ation", "ings", "ing", "ies", "ed", "es", "s", "e", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return word[: -len(ending)]
    return word


def uses(steps: Sequence[Step]) -> list[set[int]]:
    """Return for each step the indices of the steps it uses, exact for a formal proof.

    Source: ProofRank's conciseness asks for steps that are not needed; the graph is this library's. Quadratic in
    the number of steps at worst, milliseconds for a page.

    >>> from fairtrial.evaluation.proof_quality.proof import Proof
    >>> proof = Proof(r"Let $a = 1$. Note that $7 > 5$. Put $b = a + 1$. Hence $b = 2$.", "x")
    >>> uses(proof.steps)
    [set(), set(), {0}, {2}]
    """
    if steps and steps[0].uses is not None:
        return [set(step.uses or ()) for step in steps]
    told = [content(step) for step in steps]
    lower = [re.sub(r"^[^a-z∗]*(?:(?:step|case) \w+ [.:,] )?", "", step.prose.lower()) for step in steps]
    main = _connected_to_conclusion(told)
    flows = [main[j] and (bool(step.heading) or not _ASIDE.match(lower[j])) for j, step in enumerate(steps)]
    edges: list[set[int]] = [set() for _ in steps]
    first: dict[str, int] = {}  # symbol or expression -> the step that introduced it
    named: dict[str, int] = {}  # label or heading -> step
    before: dict[bool, int] = {}  # the last step in the flow of the proof, and the last of what is foreign to it
    for j, (step, here) in enumerate(zip(steps, told, strict=True)):
        edges[j] |= {first[item] for item in (*here.symbols, *here.terms) if item in first}
        edges[j] |= {named[name] for name in (*step.refs, *_references(step)) if name in named}
        if main[j] in before:
            edges[j].add(before[main[j]])
        if j and _ELABORATION.match(lower[j]):
            edges[j - 1].add(j)
        for item in (*here.symbols, *here.terms):
            first.setdefault(item, j)
        for name in (*step.labels, *([step.heading] if step.heading else [])):
            named[name] = j
        if flows[j] or not main[j]:
            before[main[j]] = j
    _close_cases(steps, lower, flows, edges)
    return edges


def _connected_to_conclusion(told: Sequence[Content]) -> list[bool]:
    """Return for each step whether a chain of shared content leads from it to the last step."""
    found = [False] * len(told)
    # A last step that only says "this completes the proof" speaks of the one before it.
    silent = len(told) > 1 and not any(told[-1].shares(other) for other in told[:-1])
    stack = [len(told) - 1, len(told) - 2] if silent else [len(told) - 1]
    while stack:
        i = stack.pop()
        if not found[i]:
            found[i] = True
            stack += [k for k, other in enumerate(told) if not found[k] and other.shares(told[i])]
    return found


def reached(steps: Sequence[Step], edges: Sequence[set[int]] | None = None) -> list[bool]:
    """Return for each step whether the conclusion, the last step, can be traced back to it."""
    edges = uses(steps) if edges is None else edges
    found = [False] * len(steps)
    stack = [len(steps) - 1]
    while stack:
        i = stack.pop()
        if not found[i]:
            found[i] = True
            stack += edges[i]
    return found


def _references(step: Step) -> list[str]:
    """Return what a step names in words: ``(3)``, ``Lemma 2``; not its own heading."""
    prose = step.prose.lower()
    found = re.findall(r"\( (\w+) \)", prose)
    found += re.findall(r"\b((?:step|case|lemma|claim|proposition) (?:\d+|[a-z]))\b", prose[len(step.heading) :])
    return found


def _close_cases(steps: Sequence[Step], lower: Sequence[str], flows: Sequence[bool], edges: list[set[int]]) -> None:
    """Let each case follow what precedes the first, and the step that closes them use the last step of each."""
    heads = [i for i, step in enumerate(steps) if step.heading.startswith("case")]
    if not heads:
        return
    last = len(steps) - 1
    closing = next((i for i in range(heads[-1] + 1, last) if re.search(r"\bcases?\b", lower[i])), last)
    premise = next((i for i in range(heads[0] - 1, -1, -1) if flows[i]), None)
    for head, end in zip(heads, [*heads[1:], closing], strict=True):
        edges[head] = {i for i in edges[head] if i < heads[0]} | ({premise} if premise is not None else set())
        edges[closing].add(next((i for i in range(end - 1, head, -1) if flows[i]), head))
