"""What words outside the training corpus cost: the same grammatical items, with words the model never read."""

from __future__ import annotations

from typing import Any

from fairtrial.errors import InputError
from fairtrial.evaluation.language_development.dealing import Deck
from fairtrial.evaluation.language_development.devbench import COLUMNS, DevBench
from fairtrial.evaluation.language_development.grammar import Grammar
from fairtrial.evaluation.language_development.lexicon import Vocabulary
from fairtrial.evaluation.language_development.templates import PHENOMENA, TEMPLATES
from fairtrial.seeds import generator

_LEFT_OUT = "preposition"  # what goes with a verb cannot be read off another corpus


def matched_benches(
    vocabulary: Vocabulary, foreign: Vocabulary, *, per_cell: int = 194, chance_margin: float = 0.1, seed: int = 0
) -> tuple[DevBench, DevBench]:
    """Return grammatical items of a corpus's words, and the same items with the target replaced by a foreign word.

    Item by item the two have the same id, template and other words; the foreign word is of the same kind, in the
    vocabulary ``foreign``, and no form of it in the corpus. Its item keeps the bin, and has count 0.

    Parameters
    ----------
    vocabulary : of the training corpus.
    foreign : of another corpus of the language, such as an encyclopedia.
    per_cell, chance_margin, seed : as for :func:`~.devbench.build_devbench`.

    Raises
    ------
    InputError
        The other corpus has no such words.
    """
    import pandas as pd

    own, other = Grammar(vocabulary), Grammar(foreign)
    rng = generator(seed, "foreign words")
    decks: dict[str, Deck[Any]] = {}
    for kind in ("noun", "verb", "third", "transitive", "regular", "irregular"):
        strange = [lexeme for lexeme in other.kinds[kind] if not any(form in vocabulary.counts for form in lexeme[:3])]
        if strange:
            decks[kind] = Deck(strange, rng)
    rows: dict[str, list[dict[str, Any]]] = {"grounded": [], "foreign": []}
    for phenomenon in PHENOMENA:
        if phenomenon == _LEFT_OUT:
            continue
        halves = max(len(t.halves) for t in TEMPLATES if t.phenomenon == phenomenon)
        for bin in own.targets(phenomenon):
            k = 0
            for word, unit in own.cell(phenomenon, bin, per_cell // halves, seed):
                if unit.template.kind not in decks:
                    continue
                lexeme = decks[unit.template.kind].draw()
                strange_word = other.word(unit.template, lexeme)
                pairs = zip(
                    own.items_of(word, unit, bin),
                    own.items_of(strange_word, unit.with_target(lexeme), bin),
                    strict=True,
                )
                for grounded, alien in pairs:
                    name = {"id": f"{phenomenon}-{bin}-{k}"}
                    rows["grounded"].append({**grounded, **name, "count": vocabulary.counts[word]})
                    rows["foreign"].append({**alien, **name, "count": 0})
                    k += 1
    if not rows["foreign"]:
        raise InputError("the foreign corpus has no word of the needed kinds that the corpus lacks: give a larger one")
    tables = (pd.DataFrame(rows[name], columns=list(COLUMNS)) for name in ("grounded", "foreign"))
    one, two = (DevBench(table, per_cell, chance_margin, seed) for table in tables)
    return one, two
