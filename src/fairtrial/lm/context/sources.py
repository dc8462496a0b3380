"""Queries on word pairs and what may come before them: examples, retrieved passages, memories, noise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairtrial.causal_lm.prompts import following
from fairtrial.lm.context.answers import normalised
from fairtrial.seeds import generator

RELATIONS = {
    "capital-world": ("What is the capital of {b}?", "The capital of {b} is"),
    "city-in-state": ("In which state is the city of {a}?", "The city of {a} is in the state of"),
    "gram6-nationality-adjective": (
        "What is the adjective of nationality for {a}?",
        "The adjective of nationality for {a} is",
    ),
}


@dataclass(frozen=True)
class Query:
    """A question, what its answer begins with, the answer, and candidate contexts with where each is from."""

    question: str
    start: str
    answer: str
    contexts: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Fact:
    """A question, what its answer begins with, and the answer."""

    question: str
    start: str
    answer: str

    @property
    def statement(self) -> str:
        """The whole answer."""
        return f"{self.start} {self.answer}."


def sentences(articles: Sequence[str]) -> list[str]:
    """Return the sentences of articles, of 6 to 40 words."""
    found = [part.strip() for article in articles for part in re.split(r"(?<=[.!?])\s+|\n+", article)]
    return [*dict.fromkeys(one for one in found if 6 <= len(one.split()) <= 40)]


def facts_of(relation: str) -> list[Fact]:
    """Return the facts of a relation's pairs."""
    from fairtrial.data.facts import word_relations

    question, start = RELATIONS[relation]
    return [
        Fact(question.format(a=a, b=b), start.format(a=a, b=b), a if "{b}" in question else b)
        for a, b in word_relations()[relation]
    ]


def distinct_first(tokenizer: Any, facts: Sequence[Fact]) -> list[str]:
    """Return the answers of facts that no other begins like, so that one pass scores them all."""
    answers = sorted({fact.answer for fact in facts})
    told = following(tokenizer, answers, start=facts[0].start)
    kept: dict[int, str] = {}
    for answer, ids in zip(answers, tokenizer(told, add_special_tokens=False)["input_ids"], strict=True):
        kept.setdefault(ids[0], answer)
    return [*kept.values()]


def queries_of(relation: str, tokenizer: Any, count: int, pool: Sequence[str]) -> tuple[list[Query], list[str]]:
    """Return queries of a relation with eight candidate contexts each, and the choices all of them share.

    Of no context does the answer's own name occur. Sources are "1 example", "3 examples", "8 examples", "other
    examples" (of another relation), "retrieved" (twice: the sentences nearest by words), "neighbour" (another pair's
    fact, as a memory of an earlier answer) and "competitor" (a wrong answer, loud).
    """
    told = facts_of(relation)
    choices = distinct_first(tokenizer, told)
    asked = [fact for fact in told if fact.answer in choices]
    rng = generator(0, "queries of", relation)
    asked = [asked[i] for i in rng.permutation(len(asked))[:count]]
    others = [fact for name in RELATIONS if name != relation for fact in facts_of(name)]
    near = _nearest([fact.question for fact in asked], pool)
    queries = []
    for fact, ranked in zip(asked, near, strict=True):
        rest = [one for one in told if one.answer != fact.answer and one.question != fact.question]
        picked = [rest[i] for i in rng.permutation(len(rest))]
        foreign = [others[i] for i in rng.permutation(len(others))]
        shots = [one.statement for one in picked if not _tells(one.statement, fact.answer)]
        far = [one.statement for one in foreign if not _tells(one.statement, fact.answer)]
        retrieved = [pool[i] for i in ranked if not _tells(pool[i], fact.answer)][:2]
        wrong, earlier = picked[0].answer, picked[20]
        contexts = (
            shots[0], "\n".join(shots[1:4]), "\n".join(shots[4:12]), "\n".join(far[:3]), *retrieved,
            f"Earlier I was asked: {earlier.question} I answered: {earlier.answer}.",
            f"{wrong}! {wrong}! It is {wrong}, surely {wrong}!",
        )  # fmt: skip
        sources = ("1 example", "3 examples", "8 examples", "other examples", "retrieved", "retrieved", "neighbour",
                   "competitor")  # fmt: skip
        queries.append(Query(fact.question, fact.start, fact.answer, contexts, sources))
    return queries, choices


def tiny_queries(count: int) -> tuple[list[Query], list[str]]:
    """Return queries of made-up words, for tests."""
    rng = generator(0, "tiny queries")
    choices = [f"w{i}" for i in range(40, 48)]
    found = []
    for _ in range(count):
        words = [f"w{i}" for i in rng.integers(2, 40, 14)]
        contexts = tuple(" ".join(words[i : i + 3]) for i in range(0, 8, 2))
        found.append(Query(" ".join(words[8:]), "", str(rng.choice(choices)), contexts, ("a", "a", "b", "b")))
    return found, choices


def _tells(text: str, answer: str) -> bool:
    return normalised(answer) in normalised(text)


def _nearest(questions: Sequence[str], pool: Sequence[str]) -> np.ndarray:
    """Return the sentences of a pool by likeness of words to each question, (n, 50) indices."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(stop_words="english", sublinear_tf=True).fit([*pool, *questions])
    likeness = (words.transform(questions) @ words.transform(pool).T).toarray()
    return np.argsort(-likeness, axis=1, kind="stable")[:, :50]
