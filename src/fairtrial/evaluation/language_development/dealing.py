"""Sampling without favourites: words dealt like cards, none in more than a twentieth of a cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from fairtrial.errors import InputError

T = TypeVar("T")
U = TypeVar("U")
MOST = 20  # no word in more than 1 / MOST of a cell's units, one unit always allowed
TRIES = 8  # draws for a word before the cell goes on without it


class Deck(Generic[T]):
    """A pool dealt in random order, shuffled again when it is through."""

    def __init__(self, pool: Sequence[T], rng: np.random.Generator) -> None:
        if not pool:
            raise InputError("a deck needs cards: the pool is empty")
        self.pool, self.rng = pool, rng
        self.order: list[int] = []

    def draw(self) -> T:
        """Return the next card."""
        if not self.order:
            self.order = self.rng.permutation(len(self.pool)).tolist()
        return self.pool[self.order.pop()]


def attainable(words: int, wanted: int) -> int:
    """Return how many units ``words`` words can make, up to ``wanted``, without repeating any too often.

    >>> attainable(30, 97), attainable(24, 97), attainable(10, 97)
    (97, 96, 10)
    """
    while words * max(1, wanted // MOST) < wanted:
        wanted = words * max(1, wanted // MOST)
    return wanted


def deal(
    options: Mapping[str, Sequence[T]], wanted: int, draw: Callable[[str, T], U | None], rng: np.random.Generator
) -> list[tuple[str, U]]:
    """Deal up to ``wanted`` units over words in turn, each by one of its ``options``.

    Parameters
    ----------
    options : for each word the ways it can make a unit.
    draw : makes a unit of a word and a way, or ``None`` where that fails; it is tried again a few times.

    Returns
    -------
    list of (word, unit)
        Fewer than ``wanted`` where the words do not suffice; never padded.
    """
    wanted = attainable(len(options), wanted)
    left = dict.fromkeys(sorted(options), max(1, wanted // MOST))
    units: list[tuple[str, U]] = []
    while left and len(units) < wanted:
        words = list(left)
        for i in rng.permutation(len(words))[: wanted - len(units)]:
            word = words[i]
            unit = None
            for _ in range(TRIES):
                ways = options[word]
                unit = draw(word, ways[int(rng.integers(len(ways)))])
                if unit is not None:
                    break
            if unit is not None:
                units.append((word, unit))
                left[word] -= 1
            if unit is None or not left[word]:
                del left[word]
    return _without_favourites(units)


def _without_favourites(units: list[tuple[str, U]]) -> list[tuple[str, U]]:
    """Drop the last units of words that, where some words failed, have more than their share."""
    while True:
        most = max(1, len(units) // MOST)
        seen: Counter[str] = Counter()
        kept = []
        for word, unit in units:
            seen[word] += 1
            if seen[word] <= most:
                kept.append((word, unit))
        if len(kept) == len(units):
            return units
        units = kept
