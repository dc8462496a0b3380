"""Reader of the sample ``wordnet``: definitions with the class their lexicographers filed them under."""

from __future__ import annotations

from typing import Literal

import pandas as pd

from fairtrial.data.samples import sample_path

# lexnames(5WN): the number in a line's second field.
_CLASSES = (
    "adj.all", "adj.pert", "adv.all", "noun.Tops", "noun.act", "noun.animal", "noun.artifact", "noun.attribute",
    "noun.body", "noun.cognition", "noun.communication", "noun.event", "noun.feeling", "noun.food", "noun.group",
    "noun.location", "noun.motive", "noun.object", "noun.person", "noun.phenomenon", "noun.plant", "noun.possession",
    "noun.process", "noun.quantity", "noun.relation", "noun.shape", "noun.state", "noun.substance", "noun.time",
    "verb.body", "verb.change", "verb.cognition", "verb.communication", "verb.competition", "verb.consumption",
    "verb.contact", "verb.creation", "verb.emotion", "verb.motion", "verb.perception", "verb.possession",
    "verb.social", "verb.stative", "verb.weather", "adj.ppl",
)  # fmt: skip


def wordnet_glosses(part: Literal["noun", "verb", "adj", "adv"] = "noun") -> pd.DataFrame:
    """Return the senses of a part of speech, in the database's order.

    Returns
    -------
    DataFrame with columns ``lemma`` (the first word of the sense), ``gloss`` (its definition, without the examples) and
    ``category`` (the lexicographer class, "noun.animal"; 26 for nouns).

    Raises
    ------
    MissingSampleError
        If the sample ``wordnet`` has not been fetched.
    """
    rows = []
    for line in sample_path("wordnet", f"data.{part}").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):  # the licence
            continue
        fields, _, gloss = line.partition("|")
        _, category, _, _, lemma, *_ = fields.split(" ")
        lemma = lemma.partition("(")[0].replace("_", " ")  # adjectives carry their position: "elect(ip)"
        rows.append((lemma, gloss.partition('; "')[0].strip(), _CLASSES[int(category)]))
    return pd.DataFrame(rows, columns=["lemma", "gloss", "category"])
