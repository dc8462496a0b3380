"""Lexical items: word or pseudo-word (L1), which word fits its context (L2), which word is of the list's kind (L3)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.evaluation.language_development.corpus import BOUNDARY, Corpus, Ints, tokenise
from fairtrial.evaluation.language_development.dealing import Deck, deal
from fairtrial.evaluation.language_development.english import CATEGORIES, OPEN_TAGS
from fairtrial.evaluation.language_development.lexicon import UNKNOWN, Vocabulary
from fairtrial.evaluation.language_development.pseudowords import PseudoWords
from fairtrial.seeds import generator

Item = dict[str, Any]
SHORTEST, LONGEST = 3, 16  # words of a context
BLANK = "___"


class Contexts:
    """Places of open-class words in utterances of known words and moderate length, by word and by kind.

    A word's kind is its tag and whether it begins with a vowel: what takes its place then takes the same article.
    """

    def __init__(self, vocabulary: Vocabulary, contexts: Corpus) -> None:
        self.vocabulary, self.corpus = vocabulary, contexts
        known = np.array([word == "" or word in vocabulary.counts for word in contexts.words])
        tokens = contexts.tokens
        self.utterance = np.cumsum(tokens == BOUNDARY) - 1  # (N,) of each token
        length = np.bincount(self.utterance, minlength=len(contexts.utterances) + 1) - 1
        strange = np.bincount(self.utterance, weights=~known[tokens], minlength=len(length))
        usable = (length >= SHORTEST) & (length <= LONGEST) & (strange == 0)
        kinds = {word: i for i, word in enumerate(sorted({self.kind(word) for word in vocabulary.counts}))}
        kind_of = np.array([kinds.get(self.kind(w), -1) if w in vocabulary.counts else -1 for w in contexts.words])
        places = np.flatnonzero(usable[self.utterance] & (tokens != BOUNDARY))
        self._word = _grouped(places, tokens[places])
        self._kind = _grouped(places, kind_of[tokens[places]])
        self._kinds = kinds

    def kind(self, word: str) -> str:
        """Return what a word shares with those that may take its place."""
        return f"{self.vocabulary.pos.get(word, UNKNOWN)} {word[:1] in 'aeiou'}"

    def of_word(self, word: str) -> Ints:
        """Return the places of a word."""
        return self._word.get(self.corpus.ids.get(word, -1), np.zeros(0, dtype=np.int64))

    def of_kind(self, word: str) -> Ints:
        """Return the places of words of the same kind."""
        return self._kind.get(self._kinds.get(self.kind(word), -2), np.zeros(0, dtype=np.int64))

    def replaced(self, place: int, *words: str) -> list[str] | None:
        """Return the utterance around a place with each of ``words`` in it, its spelling and marks kept.

        ``None`` where the word comes twice in the utterance, so that replacing one would be ambiguous.
        """
        text = self.corpus.utterances[self.utterance[place]]
        here = re.escape(self.corpus.words[self.corpus.tokens[place]])
        found = list(re.finditer(rf"(?<![^\W\d_]){here}(?![^\W\d_])", text, re.IGNORECASE))
        if len(found) != 1:
            return None
        start, end = found[0].span()
        upper = text[start].isupper()
        return [text[:start] + (word[:1].upper() + word[1:] if upper else word) + text[end:] for word in words]

    def is_old(self, place: int, word: str) -> bool:
        """Whether the training corpus has the utterance around a place with ``word`` in it."""
        words = [self.corpus.words[self.corpus.tokens[i]] if i != place else word for i in self._span(place)]
        return self.vocabulary.corpus.contains(words)

    def _span(self, place: int) -> range:
        tokens = self.corpus.tokens
        start = end = place
        while tokens[start - 1] != BOUNDARY:
            start -= 1
        while tokens[end + 1] != BOUNDARY:
            end += 1
        return range(start, end + 1)


def word_or_pseudoword(contexts: Contexts, bin: int, per_cell: int, seed: int) -> list[Item]:
    """L1: an attested utterance with a word of the bin, or with a pseudo-word of its length, in the same place.

    The utterance is one of another word of the same kind, so that neither sentence is in the corpus.
    """
    vocabulary, rng = contexts.vocabulary, generator(seed, "L1", bin)
    words = _open_words(vocabulary, bin)
    makes = PseudoWords(words, vocabulary.counts, rng)
    options = {word: [places] for word in words if len(places := contexts.of_kind(word))}

    def draw(word: str, places: Ints) -> Item | None:
        place = int(rng.choice(places))
        if contexts.corpus.words[contexts.corpus.tokens[place]] == word or contexts.is_old(place, word):
            return None
        pseudo = makes.draw(len(word))
        pair = contexts.replaced(place, word, pseudo, BLANK) if pseudo else None
        return _item("L1", "pseudo_word", bin, word, pair, seen=False) if pair else None

    return [item for _, item in deal(options, per_cell, draw, rng)]


def word_in_context(contexts: Contexts, bin: int, per_cell: int, seed: int) -> list[Item]:
    """L2: an attested utterance of a word of the bin, or the same with another word of its bin and kind.

    Words of a kind stand in a ring, each the foil of the one before it: every word is right as often as wrong.
    Contexts from the training corpus itself are marked seen.
    """
    vocabulary, rng = contexts.vocabulary, generator(seed, "L2", bin)
    rings: dict[str, list[str]] = defaultdict(list)
    for word in _open_words(vocabulary, bin):
        if len(contexts.of_word(word)):
            rings[contexts.kind(word)].append(word)
    pairs: dict[str, list[str]] = {}
    for kind in sorted(rings):
        ring = [rings[kind][i] for i in rng.permutation(len(rings[kind]))]
        if len(ring) > 1:
            pairs |= {word: [foil] for word, foil in zip(ring, ring[1:] + ring[:1], strict=True)}
    seen = contexts.corpus is vocabulary.corpus
    used: set[int] = set()

    def draw(word: str, foil: str) -> Item | None:
        place = int(rng.choice(contexts.of_word(word)))
        pair = None
        if place not in used and not contexts.is_old(place, foil) and (seen or not contexts.is_old(place, word)):
            pair = contexts.replaced(place, word, foil, BLANK)
        used.add(place)
        return _item("L2", "word_in_context", bin, word, pair, seen=seen) if pair else None

    return [item for _, item in deal(pairs, per_cell, draw, rng)]


def odd_one_out(vocabulary: Vocabulary, bin: int, per_cell: int, seed: int) -> list[Item]:
    """L3: two words of a category and a third of it, or of another; both ways, so that each is as often right.

    The third words are of the bin; the categories are :data:`.english.CATEGORIES` as far as the corpus has their words.
    """
    rng = generator(seed, "L3", bin)
    if not vocabulary.english or not {"the", "and"} <= vocabulary.counts.keys():
        return []
    found = {name: [w for w in words if w in vocabulary.counts] for name, words in CATEGORIES.items()}
    found = {name: words for name, words in found.items() if len(words) >= 3}
    category = {word: name for name, words in found.items() for word in words}
    here = sorted(word for word in category if vocabulary.bins[word] == bin)
    if len({category[word] for word in here}) < 2:
        return []
    mates = Deck(here, rng)
    made: set[str] = set()

    def draw(word: str, _: None) -> list[Item] | None:
        mate = mates.draw()
        if mate in found[category[word]] or word in found[category[mate]]:
            return None
        items = []
        for right, wrong in ((word, mate), (mate, word)):
            others = [w for w in found[category[right]] if w not in (word, mate)]
            first, second = (others[i] for i in rng.permutation(len(others))[:2])
            texts = [_listed(vocabulary.corpus, first, second, third) for third in (right, wrong, BLANK)]
            items.append(_item("L3", "odd_one_out", bin, right, texts, seen=False))
        lists = [text for item in items for text in (item["good"], *item["bad"])]
        if made & {*lists} or any(vocabulary.corpus.contains(tokenise(text)) for text in lists):
            return None
        made.update(lists)
        return items

    units = deal({word: [None] for word in here}, per_cell // 2, draw, rng)
    return [item for _, items in units for item in items]


def _listed(corpus: Corpus, first: str, second: str, third: str) -> str:
    """Write "The dog, the cat and the cow." as the corpus writes."""
    return corpus.write(["the", f"{first},", "the", second, "and", "the", third])


def _item(task: str, phenomenon: str, bin: int, word: str, texts: Sequence[str], *, seen: bool) -> Item:
    good, bad, context = texts
    return {
        "task": task,
        "phenomenon": phenomenon,
        "bin": bin,
        "word": word,
        "good": good,
        "bad": [bad],
        "context": context,
        "images": [],
        "frame": context,
        "seen": seen,
    }


def _open_words(vocabulary: Vocabulary, bin: int) -> list[str]:
    """Return the words of a bin that items may be about: open-class, no names, of two letters or more."""
    return [word for word in vocabulary.words_in(bin, OPEN_TAGS) if len(word) > 1]


def _grouped(places: Ints, keys: NDArray[Any]) -> dict[int, Ints]:
    """Return the places of each key."""
    order = np.argsort(keys, kind="stable")
    found, starts = np.unique(keys[order], return_index=True)
    return dict(zip(found.tolist(), np.split(places[order], starts[1:]), strict=True))
