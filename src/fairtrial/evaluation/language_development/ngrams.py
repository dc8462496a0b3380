"""Scorers that count: a unigram model and an interpolated Kneser-Ney model of n words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import InputError
from fairtrial.evaluation.language_development.corpus import BOUNDARY, Corpus, tokenise

Floats = NDArray[np.float64]


class Unigram:
    """log p(text) as the sum over its words of log (f(w) + 1/2) / (N + V / 2): what frequency alone knows.

    >>> one = Unigram(Corpus.from_documents(["a a a b"]))
    >>> bool(one(["a"])[0] > one(["b"])[0])
    True
    """

    convention = "sum of log relative frequencies"

    def __init__(self, corpus: Corpus) -> None:
        self.counts = corpus.counts
        self.total = sum(self.counts.values()) + (len(self.counts) + 1) / 2

    def __call__(self, texts: Sequence[str]) -> Floats:
        """Return log p of each text."""
        counts = [np.sort([self.counts.get(word, 0) + 0.5 for word in tokenise(text)]) for text in texts]
        # Sorted, so that texts of the same words have the same sum to the last bit.
        return np.array([np.log(c / self.total).sum() for c in counts])


class KneserNey:
    r"""Interpolated Kneser-Ney n-grams over words (Kneser and Ney 1995; Chen and Goodman 1999, one discount an order).

    p_k(w | h) = (max(c(h w) - D_k, 0) + D_k N1+(h .) p_{k-1}(w | h')) / c(h .), where h' drops the first word of h, the
    highest order counts occurrences and each lower one the different words seen before; D_k = n1 / (n1 + 2 n2); the
    lowest order backs off to 1 / (V + 1), which covers unknown words.

    Parameters
    ----------
    corpus : counted as one stream of words, the boundary of utterances being one.
    order : n.

    Examples
    --------
    >>> model = KneserNey(Corpus.from_documents(["the dog runs\nthe cat runs"]), order=2)
    >>> good, bad = model(["the dog runs", "dog the runs"])
    >>> bool(good > bad)
    True
    """

    convention = "sum of log-probabilities of all words and of the end"

    def __init__(self, corpus: Corpus, *, order: int = 5) -> None:
        if order < 1:
            raise InputError(f"order={order}: an n-gram has one word at least")
        self.order, self.ids = order, corpus.ids
        self.size = len(corpus.words) + 1  # with the boundary, and one for what is unknown
        stream = corpus.tokens[1:]  # in a ring: what stands before the first utterance is the end of the last
        self.keys: list[NDArray[np.int64]] = []  # by order: the sorted k-grams, as (number of the history, word)
        self.counts: list[Floats] = []
        gram = np.zeros(len(stream), dtype=np.int64)  # the number of the k-gram that ends at each place
        for k in range(order):
            before = gram
            keys, first, gram = np.unique(
                np.roll(before, 1) * self.size + stream, return_index=True, return_inverse=True
            )
            self.keys.append(keys)
            if k:  # each different (k + 1)-gram counts once for the k-gram it ends with
                self.counts.append(np.bincount(before[first]).astype(float))
        self.counts.append(np.bincount(gram).astype(float))
        self._sums = [self._sum(k) for k in range(order)]

    def __call__(self, texts: Sequence[str]) -> Floats:
        """Return log p of each text, its end included."""
        unknown = self.size - 1
        words = [[self.ids.get(word, unknown) for word in tokenise(text)] for text in texts]
        before = [unknown] * max(0, self.order - 2) + [BOUNDARY] * (self.order > 1)
        grams = [np.lib.stride_tricks.sliding_window_view([*before, *ids, BOUNDARY], self.order) for ids in words]
        log_p = np.log(self.probabilities(np.concatenate(grams)))
        return np.array([part.sum() for part in np.split(log_p, np.cumsum([len(g) for g in grams])[:-1])])

    def probabilities(self, grams: NDArray[np.int64]) -> Floats:
        """Return p(last word | the words before) of word ids (N, order)."""
        p = np.full(len(grams), 1 / self.size)
        for k in range(self.order):
            history, known = np.zeros(len(grams), dtype=np.int64), np.ones(len(grams), dtype=bool)
            for j in range(k):
                history, found = _find(self.keys[j], history * self.size + grams[:, self.order - 1 - k + j])
                known &= found
            total, kinds, discount = self._sums[k]
            gram, found = _find(self.keys[k], history * self.size + grams[:, -1])
            count = np.where(found, self.counts[k][gram], 0.0)
            interpolated = np.maximum(count - discount, 0) + discount * kinds[history] * p
            p = np.where(known, interpolated / total[history], p)
        return p

    def _sum(self, k: int) -> tuple[Floats, Floats, float]:
        """Return by history the sum of its counts and how many words follow it, and the discount of an order."""
        history = self.keys[k] // self.size
        once, twice = (float(np.sum(self.counts[k] == n)) for n in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.5
        totals = np.bincount(history, weights=self.counts[k]).astype(float)
        return totals, np.bincount(history).astype(float), discount


def _find(keys: NDArray[np.int64], wanted: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where ``wanted`` are in sorted ``keys``, and whether they are."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return places, keys[places] == wanted
