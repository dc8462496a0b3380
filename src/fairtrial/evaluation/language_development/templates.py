"""The grammatical phenomena as templates of minimal pairs.

A template is one or two halves; a half is a sentence that is right and one that is wrong. ``{n.s}`` is the singular of
the noun in slot n; the slots are

    n, o    nouns (singular s, plural p)        v, u    verbs (base, third, past; rest is "it" with an object)
    m, f    nouns for men and for women         i       a nominative pronoun

The halves of a template with two use the same words, each as often in a right as in a wrong sentence, so that
frequencies cannot tell right from wrong; where a template has one half, its two sentences hold the same words. The
first slot of a template is its target: its rarest form used is the item's word.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

_FIELD = re.compile(r"\{(\w)(?:\.(\w+))?\}")


class Half(NamedTuple):
    """A right and a wrong sentence with slots."""

    good: str
    bad: str


class _Template(NamedTuple):
    phenomenon: str
    halves: tuple[Half, ...]
    kind: str  # what the target is: noun, verb, third, transitive, regular, irregular, prepositional
    question: bool


class Template(_Template):
    """A minimal pair with slots, in one or two halves."""

    @cached_property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """The (slot, form) pairs used, in order of appearance; the form of a pronoun is ``""``."""
        text = " ".join(sentence for half in self.halves for sentence in half)
        return tuple(dict.fromkeys(_FIELD.findall(text)))

    @cached_property
    def target(self) -> str:
        """The slot whose words are binned."""
        return "n" if self.kind == "noun" else "v"

    @cached_property
    def literals(self) -> frozenset[str]:
        """The words that are no slots, which a corpus must have."""
        return frozenset(_FIELD.sub(" ", " ".join(sentence for half in self.halves for sentence in half)).split())


def _twins(phenomenon: str, kind: str, *pairs: str) -> list[Template]:
    """Read ``"x / y"``: ``<a|b>`` alternates; x is right with a, y with b."""
    templates = []
    for pair in pairs:
        first, second = (side.strip() for side in pair.split("/"))
        halves = Half(_take(first, 0), _take(first, 1)), Half(_take(second, 1), _take(second, 0))
        templates.append(Template(phenomenon, halves, kind, False))
    return templates


def _take(text: str, which: int) -> str:
    return re.sub(r"<([^|>]*)\|([^>]*)>", lambda match: match[1 + which], text)


def _orders(phenomenon: str, kind: str, *pairs: str, question: bool = False) -> list[Template]:
    """Read ``"right / wrong"`` of the same words."""
    return [Template(phenomenon, (Half(*(s.strip() for s in pair.split("/"))),), kind, question) for pair in pairs]


_NUMBER = "<{n.s}|{n.p}>"
_TENSE = "<{v.past}|{v.base}>"

TEMPLATES: tuple[Template, ...] = (
    *_twins(
        "determiner_noun_number", "noun",
        f"{{i}} saw this {_NUMBER} here / {{i}} saw these {_NUMBER} here",
        f"look at this {_NUMBER} / look at these {_NUMBER}",
        f"there is one {_NUMBER} here / there are two {_NUMBER} here",
        f"they want this {_NUMBER} too / they want these {_NUMBER} too",
        f"this {_NUMBER} will be good / these {_NUMBER} will be good",
    ),
    *_twins(
        "agreement_adjacent", "noun",
        f"the {_NUMBER} is here / the {_NUMBER} are here",
        f"the {_NUMBER} was very good / the {_NUMBER} were very good",
        f"the {_NUMBER} has been here / the {_NUMBER} have been here",
        f"your {_NUMBER} is not there / your {_NUMBER} are not there",
    ),
    *_twins(
        "agreement_adjacent", "third",
        "he <{v.third}|{v.base}> {v.rest} / they <{v.third}|{v.base}> {v.rest}",
        "she always <{v.third}|{v.base}> {v.rest} / we always <{v.third}|{v.base}> {v.rest}",
        "the {o.s} <{v.third}|{v.base}> {v.rest} / the {o.p} <{v.third}|{v.base}> {v.rest}",
    ),
    *_twins(
        "agreement_attractor", "noun",
        f"the {_NUMBER} near the {{o.p}} is here / the {_NUMBER} near the {{o.s}} are here",
        f"the {_NUMBER} of the {{o.p}} was good / the {_NUMBER} of the {{o.s}} were good",
        f"the {_NUMBER} with the {{o.p}} has been here / the {_NUMBER} with the {{o.s}} have been here",
    ),
    *(
        template
        for kind in ("regular", "irregular")
        for template in _twins(
            f"past_{kind}", kind,
            f"then she {_TENSE} {{v.rest}} / then she will {_TENSE} {{v.rest}}",
            f"he never {_TENSE} {{v.rest}} before / he did not {_TENSE} {{v.rest}} before",
            f"she {_TENSE} {{v.rest}} and went / she can {_TENSE} {{v.rest}} and go",
        )
    ),
    *_orders(
        "word_order_phrase", "noun",
        "{i} saw the {n.s} there / {i} saw {n.s} the there",
        "the {n.s} is very good / {n.s} the is very good",
        "{i} went with the {n.p} / {i} went the with {n.p}",
        "it is in the {n.s} / it is the in {n.s}",
    ),
    *_orders(
        "word_order_clause", "transitive",
        "the {m.s} {v.past} the {o.s} / {v.past} the {m.s} the {o.s}",
        "the {f.s} {v.past} the {o.s} / {v.past} the {f.s} the {o.s}",
        "{i} {v.past} the {o.p} / {v.past} {i} the {o.p}",
        "{i} {v.past} them / {v.past} {i} them",
    ),
    *_orders(
        "negation", "verb",
        "she did not {v.base} {v.rest} / she not did {v.base} {v.rest}",
        "they will not {v.base} {v.rest} / they not will {v.base} {v.rest}",
        "the {o.p} can not {v.base} {v.rest} / the {o.p} not can {v.base} {v.rest}",
        "you must not {v.base} {v.rest} here / you must {v.base} not {v.rest} here",
    ),
    *_orders(
        "auxiliary", "verb",
        "she will {v.base} {v.rest} / she {v.base} will {v.rest}",
        "the {m.s} can {v.base} {v.rest} / the {m.s} {v.base} can {v.rest}",
        "they would {v.base} {v.rest} / they {v.base} would {v.rest}",
        "you must {v.base} {v.rest} now / you {v.base} must {v.rest} now",
    ),
    *_orders(
        "wh_inversion", "transitive",
        "what did she {v.base} / what she did {v.base}",
        "what will the {m.s} {v.base} / what the {m.s} will {v.base}",
        "when did they {v.base} it / when they did {v.base} it",
        "where can {i} {v.base} it / where {i} can {v.base} it",
        question=True,
    ),
    *_orders(
        "wh_inversion", "noun",
        "where is the {n.s} / where the {n.s} is",
        "what are the {n.p} / what the {n.p} are",
        question=True,
    ),
    *_orders(
        "wh_movement", "transitive",
        "what did she {v.base} / did what she {v.base}",
        "who will the {f.s} {v.base} / will who the {f.s} {v.base}",
        "what can {i} {v.base} / can what {i} {v.base}",
        "what did the {o.p} {v.base} / did the what {o.p} {v.base}",
        question=True,
    ),
    *_orders(
        "pronoun_case", "transitive",
        "he {v.past} them / them {v.past} he",
        "she {v.past} him / him {v.past} she",
        "they {v.past} me / me {v.past} they",
        "we {v.past} her / her {v.past} we",
        "i {v.past} him there / him {v.past} i there",
    ),
    *_twins(
        "reflexive_number", "transitive",
        "the <{m.s}|{m.p}> {v.past} himself / the <{m.s}|{m.p}> {v.past} themselves",
        "the <{f.s}|{f.p}> {v.past} herself / the <{f.s}|{f.p}> {v.past} themselves",
        "the <{m.s}|{m.p}> will {v.base} himself / the <{m.s}|{m.p}> will {v.base} themselves",
    ),
    *_twins(
        "anaphor_gender", "transitive",
        "the <{m.s}|{f.s}> {v.past} himself / the <{m.s}|{f.s}> {v.past} herself",
        "the <{m.s}|{f.s}> will {v.base} himself / the <{m.s}|{f.s}> will {v.base} herself",
        "<he|she> {v.past} himself / <he|she> {v.past} herself",
    ),
    *_twins(
        "preposition", "prepositional",
        "{i} {v.past} <{v.prep}|{u.prep}> the {o.s} / {i} {u.past} <{v.prep}|{u.prep}> the {o.s}",
        "she will {v.base} <{v.prep}|{u.prep}> it / she will {u.base} <{v.prep}|{u.prep}> it",
        "they {v.past} <{v.prep}|{u.prep}> them / they {u.past} <{v.prep}|{u.prep}> them",
    ),
)  # fmt: skip
PHENOMENA = tuple(dict.fromkeys(template.phenomenon for template in TEMPLATES))
