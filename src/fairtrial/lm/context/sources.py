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
    "capital-world": ("What is the capital of {b}? Answer by its name only.", "The capital of {b} is {a}."),
    "city-in-state": ("In which state is the city of {a}? Answer by its name only.", "The city of {a} is in {b}."),
    "gram6-nationality-adjective": (
        "What is the adjective of nationality for {a}? Answer by one word only.",
        "The adjective of nationality for {a} is {b}.",
    ),
}


@dataclass(frozen=True)
class Query:
    """A question, its answer, and candidate contexts with where each is from."""

    question: str
    answer: str
    contexts: tuple[str, ...]
    sources: tuple[str, ...]


def sentences(articles: Sequence[str]) -> list[str]:
    """Return the sentences of articles, of 6 to 40 words."""
    found = [part.strip() for article in articles for part in re.split(r"(?<=[.!?])\s+|\n+", article)]
    return [*dict.fromkeys(one for one in found if 6 <= len(one.split()) <= 40)]


def facts_of(relation: str) -> list[tuple[str, str, str]]:
    """Return (question, statement, answer) of a relation's pairs."""
    from fairtrial.data.facts import word_relations

    question, statement = RELATIONS[relation]
    told = []
    for a, b in word_relations()[relation]:
        answer = a if "{b}" in question else b
        told.append((question.format(a=a, b=b), statement.format(a=a, b=b), answer))
    return told


def distinct_first(tokenizer: Any, answers: Sequence[str]) -> list[str]:
    """Return the answers no other begins like, so that one pass scores them all."""
    kept: dict[int, str] = {}
    for answer, ids in zip(
        answers, tokenizer(following(tokenizer, answers), add_special_tokens=False)["input_ids"], strict=True
    ):
        kept.setdefault(ids[0], answer)
    return [*kept.values()]


def queries_of(relation: str, tokenizer: Any, count: int, pool: Sequence[str]) -> tuple[list[Query], list[str]]:
    """Return queries of a relation with eight candidate contexts each, and the choices all of them share.

    Of no context does the answer's own name occur. Sources are "1 example", "3 examples", "8 examples", "other
    examples" (of another relation), "retrieved" (twice: the sentences nearest by words), "neighbour" (another pair's
    fact, as a memory of an earlier answer) and "competitor" (a wrong answer, loud).
    """
    told = facts_of(relation)
    choices = distinct_first(tokenizer, sorted({answer for _, _, answer in told}))
    asked = [fact for fact in told if fact[2] in choices]
    rng = generator(0, "queries of", relation)
    asked = [asked[i] for i in rng.permutation(len(asked))[:count]]
    others = [fact for name in RELATIONS if name != relation for fact in facts_of(name)]
    near = _nearest([question for question, _, _ in asked], pool)
    queries = []
    for (question, _, answer), ranked in zip(asked, near, strict=True):
        rest = [fact for fact in told if fact[2] != answer and fact[0] != question]
        picked = [rest[i] for i in rng.permutation(len(rest))]
        foreign = [others[i] for i in rng.permutation(len(others))]
        shots = [statement for _, statement, other in picked if not _tells(statement, answer)]
        far = [statement for _, statement, _ in foreign if not _tells(statement, answer)]
        retrieved = [pool[i] for i in ranked if not _tells(pool[i], answer)][:2]
        wrong = picked[0][2]
        contexts = (
            shots[0], "\n".join(shots[1:4]), "\n".join(shots[4:12]), "\n".join(far[:3]), *retrieved,
            f"Earlier I was asked: {picked[20][0]} I answered: {picked[20][2]}.",
            f"{wrong}! {wrong}! It is {wrong}, surely {wrong}!",
        )  # fmt: skip
        queries.append(
            Query(
                question, answer, contexts,
                ("1 example", "3 examples", "8 examples", "other examples", "retrieved", "retrieved", "neighbour",
                 "competitor"),
            )
        )  # fmt: skip
    return queries, choices


def tiny_queries(count: int) -> tuple[list[Query], list[str]]:
    """Return queries of made-up words, for tests."""
    rng = generator(0, "tiny queries")
    choices = [f"w{i}" for i in range(40, 48)]
    found = []
    for _ in range(count):
        words = [f"w{i}" for i in rng.integers(2, 40, 14)]
        contexts = tuple(" ".join(words[i : i + 3]) for i in range(0, 8, 2))
        found.append(Query(" ".join(words[8:]), str(rng.choice(choices)), contexts, ("a", "a", "b", "b")))
    return found, choices


def _tells(text: str, answer: str) -> bool:
    return normalised(answer) in normalised(text)


def _nearest(questions: Sequence[str], pool: Sequence[str]) -> np.ndarray:
    """Return the sentences of a pool by likeness of words to each question, (n, 50) indices."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(stop_words="english", sublinear_tf=True).fit([*pool, *questions])
    likeness = (words.transform(questions) @ words.transform(pool).T).toarray()
    return np.argsort(-likeness, axis=1, kind="stable")[:, :50]
