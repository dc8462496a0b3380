"""Four corpora far apart: Python sources, science articles, news, and worked arithmetic and algebra made here."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fairtrial.seeds import generator

# How the science articles of the sample begin.
SCIENCE = (
    "Albedo", "International Atomic Time", "Agricultural science", "An astronomer", "Amphibians", "Agriculture",
    "Algae", "Analysis of variance", "In mathematics", "In organic chemistry", "An acid", "Asphalt", "In chemistry",
    "The alkali metals", "Anatomy", "The aardvark", "The aardwolf", "Actinopterygii", "Amateur astronomy", "Agnostida",
    "The ampere",
)  # fmt: skip


def sample_corpora(characters: int) -> dict[str, list[str]]:
    """Return domain -> documents of at most 20000 characters, of some ``characters`` each where there are as many.

    Raises
    ------
    MissingSampleError
        If a sample has not been fetched.
    """
    from fairtrial.data.text import news_articles, wikipedia_articles

    science = [text for text in wikipedia_articles() if text.startswith(SCIENCE)]
    problems = worked_problems(characters // 500, seed=0)
    found = {"math": problems, "code": python_sources(), "science": science, "news": news_articles()}
    return {name: up_to(texts, characters) for name, texts in found.items()}


def up_to(texts: list[str], characters: int) -> list[str]:
    """Return the first documents, of at most 20000 characters each, that together have ``characters``."""
    cut = [text[:20_000] for text in texts]
    ends = np.cumsum([len(text) for text in cut])
    return cut[: int(np.searchsorted(ends, characters)) + 1]


def divide(texts: list[str]) -> dict[str, list[str]]:
    """Return documents to train on (four of six), to tune on and to validate on.

    Fewer than twelve documents are cut into pieces of 2000 characters first.

    >>> {part: len(texts) for part, texts in divide([str(i) for i in range(30)]).items()}
    {'train': 20, 'tune': 5, 'valid': 5}
    """
    if len(texts) < 12:
        texts = [text[i : i + 2000] for text in texts for i in range(0, len(text), 2000)]
    return {
        "train": [text for i, text in enumerate(texts) if i % 6 < 4],
        "tune": texts[4::6],
        "valid": texts[5::6],
    }


def python_sources() -> list[str]:
    """Return the modules of this Python's standard library, by name, those of some length."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths]
    return [text for text in texts if len(text) > 2000]


def worked_problems(documents: int, *, seed: int) -> list[str]:
    """Return documents of eight short worked problems each: sums, products, linear equations, shopping and series.

    >>> print(worked_problems(1, seed=3)[0].splitlines()[0])  # doctest: +ELLIPSIS
    Problem: ...
    """
    rng = generator(seed, "worked problems")
    return ["\n".join(_KINDS[rng.integers(len(_KINDS))](rng) for _ in range(8)) for _ in range(documents)]


def _sum(rng: np.random.Generator) -> str:
    a, b = rng.integers(10, 1000, 2)
    units = a % 10 + b % 10
    return (
        f"Problem: {a} + {b} = ?\nUnits: {a % 10} + {b % 10} = {units}, carry {units // 10}.\n"
        f"Tens and more: {a // 10} + {b // 10} + {units // 10} = {a // 10 + b // 10 + units // 10}.\nAnswer: {a + b}\n"
    )


def _product(rng: np.random.Generator) -> str:
    a, b = rng.integers(11, 100, 2)
    tens, units = b // 10 * 10, b % 10
    return (
        f"Problem: {a} * {b} = ?\n{a} * {tens} = {a * tens} and {a} * {units} = {a * units}.\n"
        f"{a * tens} + {a * units} = {a * b}.\nAnswer: {a * b}\n"
    )


def _equation(rng: np.random.Generator) -> str:
    a, x, b = (int(v) for v in rng.integers(2, 20, 3))
    c = a * x + b
    return (
        f"Problem: solve {a}x + {b} = {c}.\nSubtract {b}: {a}x = {c - b}.\nDivide by {a}: x = {c - b} / {a} = {x}.\n"
        f"Answer: x = {x}\n"
    )


def _shopping(rng: np.random.Generator) -> str:
    names, goods = ("Anna", "Ben", "Carla", "David", "Eva", "Frank"), ("apples", "books", "pens", "tickets", "cakes")
    name, what = names[rng.integers(len(names))], goods[rng.integers(len(goods))]
    n, price, has = (int(v) for v in (rng.integers(2, 12), rng.integers(2, 15), rng.integers(180, 300)))
    return (
        f"Problem: {name} has {has} dollars and buys {n} {what} at {price} dollars each. How much is left?\n"
        f"The {what} cost {n} * {price} = {n * price} dollars.\n"
        f"Left are {has} - {n * price} = {has - n * price} dollars.\n"
        f"Answer: {has - n * price}\n"
    )


def _series(rng: np.random.Generator) -> str:
    start, step, n = (int(v) for v in (rng.integers(1, 30), rng.integers(2, 12), 5))
    terms = [start + i * step for i in range(n)]
    return (
        f"Problem: continue {', '.join(map(str, terms))}.\nEach term is the last plus {step}: "
        f"{terms[-1]} + {step} = {terms[-1] + step}.\nAnswer: {terms[-1] + step}\n"
    )


_KINDS: tuple[Callable[[np.random.Generator], str], ...] = (_sum, _product, _equation, _shopping, _series)
