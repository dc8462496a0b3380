"""Pseudo-words: strings that sound like a bin's words and are none, from a chain over triples of letters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_BATCH = 2048  # strings drawn at a time
_BATCHES = 4  # without a new pseudo-word before a length is given up


class PseudoWords:
    """A character trigram chain trained on some words, which avoids other words and what is one edit from them.

    Parameters
    ----------
    words : trained on, all with the same weight.
    avoid : a pseudo-word is none of these, nor one letter changed, added or left out away from one.
    rng : draws.

    Examples
    --------
    >>> words = "bandit bonnet basket banter bonder bolder basted canter casket candid".split()
    >>> made = PseudoWords(words, words, np.random.default_rng(0)).draw(6)
    >>> len(made), made in words
    (6, False)
    """

    def __init__(self, words: Sequence[str], avoid: Iterable[str], rng: np.random.Generator) -> None:
        self.rng = rng
        self.letters = ["", *sorted({letter for word in words for letter in word})]  # "" opens and closes a word
        index = {letter: i for i, letter in enumerate(self.letters)}
        size = len(self.letters)
        counts = np.zeros((size, size, size))  # of the third letter after the first and the second
        for word in words:
            codes = [0, 0, *(index[letter] for letter in word), 0]
            for triple in zip(codes, codes[1:], codes[2:], strict=False):
                counts[triple] += 1
        self.closes = counts[..., 0] > 0  # (size, size) which two letters a word may end in
        counts[..., 0] = 0
        self.cumulative: NDArray[np.float64] = counts.cumsum(axis=-1)
        self.near = {variant for word in avoid for variant in _shortened(word)}
        self._ready: dict[int, list[str]] = {}
        self._dry: set[int] = set()  # lengths that gave no new one
        self._seen: set[str] = set()

    def draw(self, length: int) -> str | None:
        """Return a new pseudo-word of ``length`` letters, or ``None`` where the chain makes no further one."""
        ready = self._ready.setdefault(length, [])
        for _ in range(0 if ready or length in self._dry else _BATCHES):
            fresh = [text for text in dict.fromkeys(self._batch(length)) if self._is_new(text)]
            self._seen.update(fresh)
            ready += fresh
            if ready:
                break
        if not ready:
            self._dry.add(length)
            return None
        return ready.pop()

    def _batch(self, length: int) -> list[str]:
        """Return strings drawn from the chain given their length."""
        before = last = np.zeros(_BATCH, dtype=np.int64)
        codes = np.empty((_BATCH, length), dtype=np.int64)
        alive = np.ones(_BATCH, dtype=bool)
        for k in range(length):
            table = self.cumulative[before, last]  # (B, size)
            alive &= table[:, -1] > 0
            codes[:, k] = (table <= self.rng.random((_BATCH, 1)) * table[:, -1:]).sum(axis=1)
            codes[~alive, k] = 0
            before, last = last, codes[:, k]
        alive &= self.closes[before, last]
        return ["".join(self.letters[c] for c in row) for row in codes[alive]]

    def _is_new(self, text: str) -> bool:
        return text not in self._seen and not any(variant in self.near for variant in _shortened(text))


def _shortened(word: str) -> Iterator[str]:
    """Yield a word and what is left of it without each of its letters.

    Two words at most one edit apart share one of these; so do some two edits apart, which are avoided as well.
    """
    yield word
    yield from (word[:i] + word[i + 1 :] for i in range(len(word)))
