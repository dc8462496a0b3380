"""Problems of three kinds with four choices each: arithmetic, world facts and word forms."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fairtrial.errors import InputError
from fairtrial.lm.difficulty.replaying import check_log
from fairtrial.seeds import generator
from fairtrial.tables import read_table

if TYPE_CHECKING:
    import pandas as pd

FAMILIES = ("arithmetic", "facts", "words")


@dataclass(frozen=True)
class Problem:
    """A question and its choices, the right one first, or an outcome that is known already."""

    question: str
    choices: tuple[str, ...] = ()
    family: str = "own"
    correct: bool | None = None


def arithmetic(count: int, seed: int = 0) -> list[Problem]:
    """Return sums, differences and products of one to three digits, half of the sums with a carry."""
    rng = generator(seed, "arithmetic")
    found: dict[str, Problem] = {}
    while len(found) < count:
        digits = int(rng.integers(1, 4))
        kind = rng.choice(["carry", "plain", "minus", "times"])
        if kind in ("carry", "plain"):
            low, high = (5, 10) if kind == "carry" else (0, 5)
            a, b = (int("".join(str(rng.integers(max(low, i == 0), high)) for i in range(digits))) for _ in range(2))
            question, answer = f"What is {a} + {b}?", a + b
        elif kind == "minus":
            a, b = sorted((int(rng.integers(10 ** (digits - 1), 10**digits)) for _ in range(2)), reverse=True)
            question, answer = f"What is {a} - {b}?", a - b
        else:
            a, b = int(rng.integers(2, 10 ** min(digits, 2))), int(rng.integers(2, 10))
            question, answer = f"What is {a} * {b}?", a * b
        near = [n for n in (answer + 1, answer - 1, answer + 10, answer - 10, answer + 2) if n >= 0]
        wrong = rng.permutation(near)[:3]
        found.setdefault(question, Problem(question, (str(answer), *map(str, wrong)), "arithmetic"))
    return [*found.values()]


_ABOUT = {
    "capital-world": "What is {a} the capital of?",
    "city-in-state": "In which state of the United States is {a}?",
    "currency": "What is the currency of {a}?",
    "gram6-nationality-adjective": "What is the adjective of nationality for {a}?",
    "gram1-adjective-to-adverb": "What is the adverb of the word '{a}'?",
    "gram2-opposite": "What is the opposite of the word '{a}'?",
    "gram3-comparative": "What is the comparative of the word '{a}'?",
    "gram4-superlative": "What is the superlative of the word '{a}'?",
    "gram5-present-participle": "What is the present participle of the word '{a}'?",
    "gram7-past-tense": "What is the past tense of the word '{a}'?",
    "gram8-plural": "What is the plural of the word '{a}'?",
    "gram9-plural-verbs": "What is the third person of the verb '{a}'?",
}
_FACTS = ("capital-world", "city-in-state", "currency", "gram6-nationality-adjective")


@cache
def relations(family: str, count: int, seed: int = 0) -> list[Problem]:
    """Return questions on word pairs: "facts" of the world, or forms of "words".

    Wrong choices of a fact are answers to others of its relation. Those of a word are alike to the eye: the word itself
    and the right forms of the words most like it.
    """
    from difflib import SequenceMatcher

    from fairtrial.data.facts import word_relations

    rng = generator(seed, "relations", family)
    asked: dict[str, tuple[str, str, str]] = {}  # Portland lies in two states: its first answer stands
    answers = {}
    for name, pairs in word_relations().items():
        if name in _ABOUT and (name in _FACTS) == (family == "facts"):
            answers[name] = sorted({b for _, b in pairs})
            for a, b in pairs:
                asked.setdefault(_ABOUT[name].format(a=a), (name, a, b))
    questions = [*asked]
    problems = []
    for i in rng.permutation(len(questions))[:count]:
        name, a, b = asked[questions[i]]
        others = [other for other in answers[name] if other not in (a, b)]
        if family == "facts":
            wrong = [str(one) for one in rng.permutation(others)[:3]]
        else:
            wrong = [a, *sorted(others, key=lambda other: -SequenceMatcher(None, b, other).ratio())[:2]]
        problems.append(Problem(questions[i], (b, *wrong), family))
    return problems


def problems_of(source: str, count: int) -> dict[str, list[Problem]]:
    """Return ``count`` problems of each family: of the built-in ones, of "tiny" (made-up words), or of a file."""
    if source == "families":
        return {
            "arithmetic": arithmetic(count),
            "facts": relations("facts", count),
            "words": relations("words", count),
        }
    if source == "tiny":
        rng = generator(0, "tiny problems")
        made = [[f"w{i}" for i in rng.permutation(60)[:8]] for _ in range(count)]
        return {"tiny": [Problem(" ".join(words[:4]), tuple(words[4:]), "tiny") for words in made]}
    families: dict[str, list[Problem]] = {}
    for problem in read_problems(Path(source)):
        families.setdefault(problem.family, []).append(problem)
    return {family: found[:count] for family, found in families.items()}


def problems_in_log(path: Path) -> tuple[list[Problem], pd.DataFrame]:
    """Return the problems of a log of answers, right where the cheapest level was, and correct and tokens by level.

    The table has a row a problem and columns ``("correct", level)`` and ``("tokens", level)``, the cheapest first.

    Raises
    ------
    InputError
        A column that is missing or has no numbers; fewer than two levels; a prompt that some level did not answer.
    """
    table = check_log(read_table(path), str(path))
    levels = [*table.groupby("level")["tokens"].mean().sort_values().index]
    if len(levels) < 2:
        raise InputError(f"{path}: the only level is {levels[0]!r}: log at least two efforts")
    wide = table.pivot_table(index="prompt", columns="level", values=["correct", "tokens"], sort=False)
    if wide.isna().any(axis=None):
        raise InputError(f"{path}: prompt {wide.index[wide.isna().any(axis=1)][0]!r} was not answered at every level")
    wide = wide[[(what, level) for what in ("correct", "tokens") for level in levels]]
    right = wide[("correct", levels[0])] >= 0.5
    return [Problem(str(q), (), "log", bool(c)) for q, c in zip(wide.index, right, strict=True)], wide


def read_problems(path: Path) -> list[Problem]:
    """Return the problems of a ``.jsonl`` file.

    A row has ``prompt`` and either ``choices`` with ``answer`` (the right choice's text or index) or ``correct``
    (whether the model got it right), and perhaps ``family``.

    Raises
    ------
    InputError
        A row that is none; the message names the line.
    """
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, family = row["prompt"], str(row.get("family", "own"))
            if "choices" in row:
                choices = [str(choice) for choice in row["choices"]]
                answer = row["answer"]
                right = choices[answer] if isinstance(answer, int) and not isinstance(answer, bool) else str(answer)
                rest = [choice for choice in choices if choice != right]
                if right not in choices or len(rest) + 1 != len(choices) or not rest:
                    raise InputError(f"{path}, line {number}: the answer must be one of at least two different choices")
                problems.append(Problem(prompt, (right, *rest), family))
            else:
                problems.append(Problem(prompt, (), family, bool(row["correct"])))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise InputError(
                f"{path}, line {number}: not a JSON object with 'prompt' and either 'choices' and 'answer' or 'correct'"
            ) from error
        if not isinstance(prompt, str) or not prompt.strip():
            raise InputError(f"{path}, line {number}: 'prompt' is empty or not a text")
    return problems
