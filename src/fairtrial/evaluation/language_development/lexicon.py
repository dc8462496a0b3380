"""The words of a corpus with their counts, logarithmic frequency bins and parts of speech.

Bin b = floor(log_4 f): words said 1-3 times, 4-15, 16-63, ... The bins are of frequency, not of rank, so that they mean
the same in every corpus. A word that may be several parts of speech gets the one its neighbours vote for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairtrial.evaluation.language_development.corpus import BOUNDARY, Corpus
from fairtrial.evaluation.language_development.english import (
    CLOSED,
    OPEN_TAGS,
    Noun,
    Verb,
    closed_class,
    inflect,
    possible_tags,
)

NAME = "NAME"  # the tag of what is capitalised inside utterances
UNKNOWN = "X"  # the tag of every word of a language without a tagger
_NAME_SHARE = 0.5  # of its occurrences inside utterances
_ENGLISH_SHARE = 0.2  # of the tokens are closed-class words in any English text
_CLASSES = ("", "CONTENT", *CLOSED)  # "" is the boundary

# The left neighbours that speak for a tag.
_LEFT_VOTES = {
    "NN": ("ARTICLE", "DETERMINER"),
    "NNS": ("PLURAL", "DETERMINER"),
    "VB": ("MODAL", "NEGATION", "SUBJECT"),
    "VBZ": ("SUBJECT",),
    "VBD": ("SUBJECT", "HAVE"),
    "VBN": ("HAVE", "BE"),
    "VBG": ("BE", "PREPOSITION"),
    "JJ": ("DEGREE", "BE"),
    "JJR": ("BE",),
    "JJS": ("DETERMINER",),
    "RB": ("OBJECT",),
}


def frequency_bin(count: int) -> int:
    """Return floor(log_4 count) of a positive count, exactly.

    >>> [frequency_bin(n) for n in (1, 3, 4, 15, 16, 63, 64)]
    [0, 0, 1, 1, 2, 2, 3]
    """
    return (count.bit_length() - 1) // 2


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The words that items may use.

    Attributes
    ----------
    corpus : Corpus
        Where they were counted.
    counts, bins : dict
        Of each word its count and its frequency bin.
    pos : dict
        Of each word its tag: a Penn tag, a closed class (see :data:`.english.CLOSED`), NAME, or X where no tagger is.
    english : bool
        Whether the grammar's templates apply.
    """

    corpus: Corpus
    counts: dict[str, int]
    bins: dict[str, int]
    pos: dict[str, str]
    english: bool

    @cached_property
    def evidence(self) -> Neighbours:
        """What stands next to each word."""
        return Neighbours(self.corpus)

    @cached_property
    def nouns(self) -> tuple[Noun, ...]:
        """Countable nouns, both of whose forms are attested: the singular after an article at least once."""
        found = []
        for word, tag in self.pos.items():
            if tag == "NN" and len(word) > 1 and self.evidence.left(word, "ARTICLE"):
                plural = inflect(word, "NNS")
                if plural and plural != word and self.pos.get(plural) == "NNS":
                    found.append(Noun(word, plural))
        return tuple(found)

    @cached_property
    def verbs(self) -> tuple[Verb, ...]:
        """Verbs whose base form and distinct past are attested, and that take an object usually or hardly ever."""
        found = []
        for word, tag in self.pos.items():
            past = inflect(word, "VBD") if tag == "VB" else None
            if not past or past == word or self.pos.get(past) not in ("VBD", "VBN"):
                continue
            third = inflect(word, "VBZ") or ""
            third = third if self.pos.get(third) == "VBZ" else ""
            forms = [form for form in (word, third, past) if form]
            total = sum(self.counts[form] for form in forms)
            objects = sum(self.evidence.right(form, "OBJECT", "DETERMINER", "ARTICLE") for form in forms)
            alone = sum(self.evidence.right(form, "", "PREPOSITION") for form in forms)
            if objects >= 0.25 * total:
                found.append(Verb(word, third, past, "it"))
            elif objects < 0.1 * total and alone >= 0.3 * total:
                found.append(Verb(word, third, past, ""))
        return tuple(found)

    def words_in(self, bin: int, tags: Sequence[str] = OPEN_TAGS) -> list[str]:
        """Return the words of a bin that have one of ``tags``, in order of the alphabet."""
        wanted = {*tags} if self.english else {UNKNOWN}
        return sorted(word for word, b in self.bins.items() if b == bin and self.pos[word] in wanted)


def vocabulary(
    corpus: Corpus, *, min_documents: int = 1, tagger: Callable[[list[str]], Sequence[str]] | None = None
) -> Vocabulary:
    r"""Count, bin and tag the words of a corpus.

    Parameters
    ----------
    corpus : what a model was trained on.
    min_documents : leave out words of fewer documents: 2 drops what is peculiar to one.
    tagger : maps the words to a tag each, instead of the English rules; grammatical items need Penn tags.

    Returns
    -------
    Vocabulary
        Words in order of appearance.

    Examples
    --------
    >>> v = vocabulary(Corpus.from_documents(["the dog sees a dog\nthe dogs see it\nyou see the dog"]))
    >>> v.counts["dog"], v.bins["dog"], v.pos["dog"], v.pos["the"]
    (3, 0, 'NN', 'DETERMINER')
    """
    kept = corpus.documents_with >= min_documents
    counts = {word: n for (word, n), keep in zip(corpus.counts.items(), kept[1:], strict=True) if keep}
    closed = sum(n for word, n in corpus.counts.items() if closed_class(word))
    english = closed >= _ENGLISH_SHARE * sum(corpus.counts.values())
    words = list(counts)
    if tagger is not None:
        tags: Sequence[str] = list(tagger(words))
    elif english:
        tags = _tags(corpus, words)
    else:
        tags = [UNKNOWN] * len(words)
    bins = {word: frequency_bin(n) for word, n in counts.items()}
    return Vocabulary(corpus, counts, bins, dict(zip(words, tags, strict=True)), english)


class Neighbours:
    """How often each word has a neighbour of each class to its left and right."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        size, n = len(corpus.words), len(_CLASSES)
        index = {name: i for i, name in enumerate(_CLASSES)}
        class_of = np.array([index[closed_class(word) or "CONTENT"] for word in corpus.words])  # (V,)
        class_of[BOUNDARY] = 0
        tokens = corpus.tokens
        before, after = class_of[tokens[:-2]], class_of[tokens[2:]]  # neighbours of tokens[1:-1]
        middle = tokens[1:-1]
        content = after == index["CONTENT"]
        left = np.bincount((middle * n + before) * 2 + content, minlength=size * n * 2)
        self.left_table: NDArray[Any] = left.reshape(size, n, 2)  # by class, and whether content follows
        self.right_table: NDArray[Any] = np.bincount(middle * n + after, minlength=size * n).reshape(size, n)
        self.index = index

    def left(self, word: str, *classes: str) -> int:
        """Return how often ``word`` follows one of ``classes``."""
        return int(self.left_table[self.corpus.ids[word], [self.index[c] for c in classes]].sum())

    def right(self, word: str, *classes: str) -> int:
        """Return how often ``word`` precedes one of ``classes`` ("" is the end of the utterance)."""
        return int(self.right_table[self.corpus.ids[word], [self.index[c] for c in classes]].sum())

    def votes(self) -> dict[str, NDArray[Any]]:
        """Return (V,) votes for each tag; between a determiner and content stands an adjective, not a noun."""
        table = self.left_table
        votes = {
            tag: table[:, [self.index[c] for c in classes]].sum(axis=(1, 2)) for tag, classes in _LEFT_VOTES.items()
        }
        nominal = table[:, [self.index["ARTICLE"], self.index["DETERMINER"], self.index["PLURAL"]], 1].sum(axis=1)
        for tag in ("NN", "NNS"):
            votes[tag] = votes[tag] - np.minimum(nominal, votes[tag])
        votes["JJ"] = votes["JJ"] + nominal
        return votes


def _tags(corpus: Corpus, words: Iterable[str]) -> list[str]:
    votes = Neighbours(corpus).votes()
    capitalised = corpus.capitalised
    tags = []
    for word in words:
        i = corpus.ids[word]
        if kind := closed_class(word):
            tags.append(kind)
        elif capitalised[i] >= _NAME_SHARE:
            tags.append(NAME)
        else:
            tags.append(max(possible_tags(word), key=lambda tag: votes[tag][i] if tag in votes else 0))
    return tags
