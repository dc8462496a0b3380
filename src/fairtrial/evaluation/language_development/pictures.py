"""L4: which of four pictures a word names, and which of four words names a picture."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from fairtrial.errors import InputError
from fairtrial.evaluation.language_development.dealing import deal
from fairtrial.evaluation.language_development.lexicon import Vocabulary
from fairtrial.seeds import generator

if TYPE_CHECKING:
    import pandas as pd

Item = dict[str, Any]
CHOICES = 4


class Pictures:
    """Pictures with the words they show.

    Parameters
    ----------
    table : pandas.DataFrame
        Columns ``image`` (a path, or any key that a scorer's ``image_fn`` knows), ``word`` and ``category``; one row a
        word that an image shows, so several where it shows several.
    vocabulary : Vocabulary
        Words it lacks are left out.

    Raises
    ------
    InputError
        A column is missing, a word is no text, or no word of the vocabulary is shown.
    """

    def __init__(self, table: pd.DataFrame, vocabulary: Vocabulary) -> None:
        for column in ("image", "word", "category"):
            if column not in table:
                raise InputError(f"the pictures have no column {column!r}: give image, word and category")
        unnamed = [not isinstance(word, str) for word in table.word]
        if any(unnamed):
            row = unnamed.index(True)
            raise InputError(f"row {row} of the pictures has the word {table.word.iloc[row]!r}: give text")
        self.vocabulary = vocabulary
        self.images: dict[str, list[Any]] = defaultdict(list)
        self.shown: dict[Any, set[str]] = defaultdict(set)
        self.category: dict[str, str] = {}
        for image, word, category in zip(table.image, table.word.str.lower(), table.category, strict=True):
            self.shown[image].add(word)
            if word in vocabulary.counts:
                self.images[word].append(image)
                self.category[word] = str(category)
        if not self.images:
            raise InputError("no picture shows a word of the corpus: give pictures of its words")

    def groups(self, bin: int) -> dict[str, list[str]]:
        """Return the words of a bin by category, of the categories that have four of them."""
        found: dict[str, list[str]] = defaultdict(list)
        for word in sorted(self.images):
            if self.vocabulary.bins[word] == bin:
                found[self.category[word]].append(word)
        return {name: words for name, words in found.items() if len(words) >= CHOICES}

    def items(self, phenomenon: str, bin: int, per_cell: int, seed: int) -> list[Item]:
        """Return items of ``picture_of_word`` or ``word_of_picture``; foils are of the same bin and category."""
        rng = generator(seed, "L4", phenomenon, bin)
        groups = self.groups(bin)
        options = {word: [group] for group in groups.values() for word in group}
        made: set[str] = set()

        def draw(word: str, group: list[str]) -> Item | None:
            image = self.images[word][int(rng.integers(len(self.images[word])))]
            foils = [(w, self._without(w, word, rng)) for w in group if w not in self.shown[image]]
            foils = [(foil, other) for foil, other in foils if other is not None]
            if len(foils) < CHOICES - 1:
                return None
            chosen = [foils[i] for i in rng.permutation(len(foils))[: CHOICES - 1]]
            by_picture = phenomenon == "picture_of_word"
            item = {
                "task": "L4",
                "phenomenon": phenomenon,
                "bin": bin,
                "word": word,
                "good": word,
                "bad": [] if by_picture else [foil for foil, _ in chosen],
                "context": self.category[word],
                "images": [image, *(other for _, other in chosen)] if by_picture else [image],
                "frame": self.category[word],
                "seen": False,
            }
            if (key := repr(item)) in made:
                return None
            made.add(key)
            return item

        return [item for _, item in deal(options, per_cell, draw, rng)]

    def _without(self, foil: str, word: str, rng: np.random.Generator) -> Any:
        """Return an image of ``foil`` that does not show ``word``, or ``None``."""
        images = [image for image in self.images[foil] if word not in self.shown[image]]
        return images[int(rng.integers(len(images)))] if images else None
