"""English for item generation: closed classes, possible parts of speech, inflections. Only look-ups, no model.

Open-class words are looked up in lemminflect's tables; a word they do not have is read off its suffix. Which of its
possible parts a word has in a corpus is decided by :mod:`.lexicon` from the words around it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from fairtrial.errors import MissingExtraError

# Classes that a neighbour is read by. A word is in one class: the first that lists it.
CLOSED: dict[str, frozenset[str]] = {
    name: frozenset(words.split())
    for name, words in {
        "ARTICLE": "a an every each another",
        "PLURAL": "these those two three four five many few several both",
        "DETERMINER": "the this that my your his her our their its some any no",
        "SUBJECT": "i we they you he she it who",
        "OBJECT": "me him us them",
        "MODAL": "to will would can could shall should may might must do does did 'll wo ca cannot let",
        "NEGATION": "not n't never",
        "BE": "be am is are was were been being 's 're 'm",
        "HAVE": "have has had having 've 'd",
        "DEGREE": "very so too more most quite as rather",
        "PREPOSITION": "of in at on with for from by into about under over near after before through upon towards "
        "against between without behind beside around off up down out back away",
        "OTHER": "and or but if when while because than then there here what where why how which whom whose all "
        "himself herself itself themselves myself yourself ourselves yes oh well just only now such much other own "
        "ai nor yet though although until till since unless mr mrs miss dr one nothing something anything everything "
        "nobody somebody none half hundred thousand dozen",
    }.items()
}
# Nouns for people that are spoken of as him or as her.
PEOPLE = {
    gender: frozenset(words.split())
    for gender, words in {
        "himself": "man boy father brother son uncle husband gentleman king lord prince nephew grandfather "
        "daddy farmer policeman fireman grandson waiter postman",
        "herself": "woman girl mother sister daughter aunt wife lady queen princess niece grandmother mommy "
        "mummy widow housekeeper waitress granddaughter actress heiress",
    }.items()
}
CATEGORIES = {
    name: words.split()
    for name, words in {
        "animal": "dog cat horse cow pig sheep bird duck fish bear rabbit mouse lion tiger monkey elephant frog bee "
        "fox chicken hen goat puppy kitten pony deer wolf snake turtle butterfly",
        "food": "bread milk cookie apple cake egg cheese meat banana soup butter tea coffee juice potato carrot rice "
        "pie fruit strawberry wine dinner breakfast supper ham beef mutton sugar",
        "clothing": "hat coat shoe dress shirt sock glove boot gown bonnet shawl jacket cap ribbon veil muslin lace "
        "handkerchief cloak apron",
        "body": "hand head eye foot nose mouth ear arm leg hair finger face knee tooth heart tongue cheek lip shoulder",
        "house": "door window room bed table chair kitchen wall floor roof stairs garden fire sofa lamp shelf parlour "
        "staircase chimney library hall curtain carpet",
        "vehicle": "car boat carriage train truck bus coach bike ship wagon plane cart chaise barouche tractor",
        "kin": "father mother brother sister uncle aunt daughter son cousin wife husband nephew niece baby grandmother",
        "time": "day night morning evening week month year hour summer winter spring autumn afternoon minute",
        "place": "street town city village park church school shop farm river hill sea beach lake london bath",
        "feeling": "joy love anger fear grief sorrow pain pleasure delight happiness shame pride hope jealousy envy",
    }.items()
}
OPEN_TAGS = ("NN", "NNS", "VB", "VBZ", "VBD", "VBN", "VBG", "JJ", "JJR", "JJS", "RB")
_CLASS_OF = {word: name for name in reversed(CLOSED) for word in CLOSED[name]}
_SUFFIXES = (
    (("ly",), "RB"),
    (("ing",), "VBG"),
    (("ed",), "VBD"),
    (("ness", "tion", "sion", "ment", "ity", "ance", "ence", "ship", "ism", "er", "or"), "NN"),
    (("ous", "ful", "less", "able", "ible", "ive", "ish", "ic", "al"), "JJ"),
    (("ss", "us", "is"), "NN"),
    (("s",), "NNS"),
)
_LEMMA_TAGS = {
    "NOUN": ("NN", "NNS"),
    "VERB": ("VB", "VBZ", "VBD", "VBN", "VBG"),
    "ADJ": ("JJ", "JJR", "JJS"),
    "ADV": ("RB",),
}


class Noun(NamedTuple):
    """A countable noun of which both forms are attested."""

    s: str
    p: str


class Verb(NamedTuple):
    """A verb, base form and past attested; ``third`` is "" where it is not; ``rest`` is "it" if it takes an object."""

    base: str
    third: str
    past: str
    rest: str
    prep: str = ""

    @property
    def regular(self) -> bool:
        """Whether the past tense is formed by -ed.

        >>> Verb("cry", "cries", "cried", "").regular, Verb("see", "sees", "saw", "it").regular
        (True, False)
        """
        base = self.base
        return self.past in {f"{base}ed", f"{base}d", f"{base[:-1]}ied", f"{base}{base[-1]}ed"}


def closed_class(word: str) -> str | None:
    """Return the closed class of a word, or ``None``.

    >>> closed_class("the"), closed_class("dog")
    ('DETERMINER', None)
    """
    return _CLASS_OF.get(word)


def inflect(lemma: str, tag: str) -> str | None:
    """Return the first listed form of a lemma under a Penn tag, or ``None`` where the tables have none.

    >>> inflect("go", "VBD"), inflect("dog", "NNS"), inflect("xyzzy", "NNS")
    ('went', 'dogs', None)
    """
    forms = _lemminflect().getInflection(lemma, tag, inflect_oov=False)
    return forms[0] if forms else None


def possible_tags(word: str) -> tuple[str, ...]:
    """Return the open-class Penn tags a word may have, most usual first; unlisted words by their suffix.

    >>> possible_tags("dogs")[0], "VBD" in possible_tags("walked"), possible_tags("blickness")
    ('NNS', True, ('NN',))
    """
    tags: dict[str, None] = {}
    library = _lemminflect()
    for kind, lemmas in library.getAllLemmas(word).items():
        wanted = _LEMMA_TAGS.get(kind, ())
        for lemma in lemmas:
            forms = library.getAllInflections(lemma, upos=kind)
            tags |= dict.fromkeys(tag for tag in wanted if word in forms.get(tag, ()))
    if tags:
        return tuple(tags)
    return (next((tag for endings, tag in _SUFFIXES if word.endswith(endings)), "NN"),)


@cache
def _lemminflect():  # type: ignore[no-untyped-def]  # a module
    try:
        import lemminflect
    except ImportError as error:
        raise MissingExtraError("evaluation", "lemminflect") from error
    return lemminflect
