"""Grammatical minimal pairs: templates filled with a corpus's own words, in cells of phenomenon and frequency bin.

The target's rarest form used is the item's word and gives its bin; all other open-class words are at least as frequent
where there are enough such, so that an item asks for what its bin says. No sentence occurs in the corpus.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairtrial.evaluation.language_development.dealing import Deck, deal
from fairtrial.evaluation.language_development.english import PEOPLE, Noun, Verb
from fairtrial.evaluation.language_development.lexicon import Vocabulary
from fairtrial.evaluation.language_development.templates import PHENOMENA, TEMPLATES, Template
from fairtrial.seeds import generator

Lexeme = Noun | Verb | str
Item = dict[str, Any]
_FEWEST_FILLERS = 20  # so that none need be in more than a twentieth of a cell
_PRONOUNS = ("i", "you", "we", "they", "he", "she")
_PREPOSITIONS = ("of", "in", "at", "on", "with", "for", "from", "by", "into", "about", "under", "over", "after", "upon")


@dataclass(frozen=True, eq=False)
class Unit:
    """A template with its slots filled: one item for each of its halves, of one word (of two with prepositions)."""

    template: Template
    slots: dict[str, Lexeme]

    def sentences(self) -> list[tuple[list[str], list[str]]]:
        """Return the right and the wrong sentence of each half, as words."""
        return [tuple(s.format_map(self.slots).split() for s in half) for half in self.template.halves]  # type: ignore[misc]

    def with_target(self, lexeme: Noun | Verb) -> Unit:
        """Return the same unit about another word."""
        return Unit(self.template, {**self.slots, self.template.target: lexeme})


class Grammar:
    """What a vocabulary can fill templates with."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        counts = vocabulary.counts
        self.templates = [t for t in TEMPLATES if all(word in counts for word in t.literals)]
        people = {noun.s: noun for noun in vocabulary.nouns}
        verbs = vocabulary.verbs
        self.preposition_of = _prepositions(vocabulary, verbs)
        self.kinds: dict[str, tuple[Lexeme, ...]] = {
            "noun": vocabulary.nouns,
            "verb": verbs,
            "third": tuple(verb for verb in verbs if verb.third),
            "transitive": tuple(verb for verb in verbs if verb.rest),
            "regular": tuple(verb for verb in verbs if verb.regular),
            "irregular": tuple(verb for verb in verbs if not verb.regular),
            "prepositional": tuple(
                verb._replace(prep=used.most_common(1)[0][0])
                for verb in verbs
                if (used := self.preposition_of[verb.base]) and used.most_common(1)[0][1] >= 2
            ),
            "o": vocabulary.nouns,
            "m": tuple(people[word] for word in sorted(PEOPLE["himself"] & people.keys())),
            "f": tuple(people[word] for word in sorted(PEOPLE["herself"] & people.keys())),
            "i": tuple(word for word in _PRONOUNS if word in counts),
        }

    def targets(self, phenomenon: str) -> dict[int, dict[str, list[tuple[Template, Lexeme]]]]:
        """Return by bin and word the ways a phenomenon's templates can be about that word."""
        found: dict[int, dict[str, list[tuple[Template, Lexeme]]]] = defaultdict(lambda: defaultdict(list))
        for template in self.templates:
            if template.phenomenon != phenomenon or not all(self.kinds[s] for s, _ in self.fillers(template)):
                continue
            for lexeme in self.kinds[template.kind]:
                if "it" not in self.vocabulary.counts and isinstance(lexeme, Verb) and lexeme.rest:
                    continue
                word = self.word(template, lexeme)
                found[self.vocabulary.bins[word]][word].append((template, lexeme))
        return {bin: dict(found[bin]) for bin in sorted(found)}

    def fillers(self, template: Template) -> Iterator[tuple[str, str]]:
        """Yield the slots of a template, each once, that are not about its target."""
        yield from ((slot, slot) for slot in dict.fromkeys(s for s, _ in template.fields) if slot in "omfi")

    def word(self, template: Template, lexeme: Lexeme, slot: str | None = None) -> str:
        """Return the rarest form of a lexeme that a template uses in its target slot."""
        slot = slot or template.target
        forms = {getattr(lexeme, form) for s, form in template.fields if s == slot and form not in ("rest", "prep")}
        return min(forms, key=lambda form: (self.vocabulary.counts[form], form))

    def cell(self, phenomenon: str, bin: int, wanted: int, seed: int) -> list[tuple[str, Unit]]:
        """Return up to ``wanted`` units of a phenomenon about the words of a bin, with their words."""
        options = self.targets(phenomenon).get(bin, {})
        rng = generator(seed, "grammar", phenomenon, bin)
        decks = {slot: Deck(self._pool(slot, bin), rng) for slot in "omfi" if self.kinds[slot]}
        mates = {lexeme for ways in options.values() for _, lexeme in ways}
        partners = Deck(sorted(mates), rng) if phenomenon == "preposition" and mates else None  # type: ignore[type-var]
        accepts = self._accepter()

        def draw(_: str, way: tuple[Template, Lexeme]) -> Unit | None:
            template, lexeme = way
            slots: dict[str, Lexeme] = {template.target: lexeme}
            for slot, _deck in self.fillers(template):
                slots[slot] = decks[slot].draw()
            if partners is not None:
                slots["u"] = mate = partners.draw()
                if not self._can_swap(lexeme, mate) or self.vocabulary.bins[self.word(template, mate, "u")] != bin:
                    return None
            unit = Unit(template, slots)
            return unit if accepts(unit) else None

        return deal(options, wanted, draw, rng)

    def items(self, phenomenon: str, bin: int, per_cell: int, seed: int) -> list[Item]:
        """Return up to ``per_cell`` items of a cell."""
        halves = max(len(t.halves) for t in TEMPLATES if t.phenomenon == phenomenon)
        units = self.cell(phenomenon, bin, per_cell // halves, seed)
        return [item for word, unit in units for item in self.items_of(word, unit, bin)]

    def items_of(self, word: str, unit: Unit, bin: int) -> list[Item]:
        """Return the items of a unit, written as the corpus writes."""
        template, write = unit.template, self.vocabulary.corpus.write
        words = [word, self.word(template, unit.slots["u"], "u") if "u" in unit.slots else word]
        return [
            {
                "task": "grammar",
                "phenomenon": template.phenomenon,
                "bin": bin,
                "word": about,
                "good": write(good, question=template.question),
                "bad": [write(bad, question=template.question)],
                "context": half.good,
                "images": [],
                "frame": f"{template.phenomenon}-{TEMPLATES.index(template)}",
                "seen": False,
            }
            for half, about, (good, bad) in zip(template.halves, words, unit.sentences(), strict=False)
        ]

    def _pool(self, slot: str, bin: int) -> Sequence[Lexeme]:
        """Return what may fill a slot beside a target of ``bin``: no rarer words, if there are enough such."""
        pool, counts, bins = self.kinds[slot], self.vocabulary.counts, self.vocabulary.bins
        if slot != "o":
            return pool
        frequent = [noun for noun in pool if min(bins[form] for form in noun) >= bin]
        if len(frequent) >= _FEWEST_FILLERS:
            return frequent
        return sorted(pool, key=lambda noun: (-min(counts[form] for form in noun), noun))[:_FEWEST_FILLERS]

    def _can_swap(self, verb: Any, mate: Any) -> bool:
        """Whether each verb never has the other's preposition."""
        used = self.preposition_of
        return mate.prep not in used[verb.base] and verb.prep not in used[mate.base]

    def _accepter(self) -> Callable[[Unit], bool]:
        """Return a filter of units: of known words, new to the corpus and to this cell, with distinct sentences."""
        seen: set[str] = set()
        corpus, counts = self.vocabulary.corpus, self.vocabulary.counts

        def accepts(unit: Unit) -> bool:
            sentences = [sentence for half in unit.sentences() for sentence in half]
            texts = {" ".join(words) for words in sentences}
            fresh = len(texts) == len(sentences) and not texts & seen
            fresh = fresh and all(word in counts for words in sentences for word in words)
            if not fresh or any(corpus.contains(words) for words in sentences):
                return False
            seen.update(texts)
            return True

        return accepts


def _prepositions(vocabulary: Vocabulary, verbs: Sequence[Verb]) -> dict[str, Counter[str]]:
    """Return how often each verb (by its base form) is followed by each preposition."""
    corpus = vocabulary.corpus
    ids = {corpus.ids[word]: word for word in _PREPOSITIONS if word in vocabulary.counts}
    used: dict[str, Counter[str]] = {}
    for verb in verbs:
        after = np.concatenate([corpus.tokens[corpus.positions(corpus.ids[f]) + 1] for f in (verb.base, verb.past)])
        found, n = np.unique(after, return_counts=True)
        used[verb.base] = Counter({ids[i]: k for i, k in zip(found.tolist(), n.tolist(), strict=True) if i in ids})
    return used


__all__ = ["PHENOMENA", "Grammar", "Unit"]
