"""Metamath databases, indexed lazily: one scan finds every statement, and a proof is decoded when it is asked for.

A compressed proof is a list of labels and a row of letters. A letter word is a number, its last digit A-T to the base
20, those before U-Y to the base 5:

    A = 1 .. T = 20, UA = 21 .. UT = 40, .. YT = 120, UUA = 121 ..

Numbers up to m name the theorem's own m hypotheses, the next ones the listed labels, and those above the steps that a Z
has tagged. (Metamath, a computer language for mathematical proofs, appendix B.)
"""

from __future__ import annotations

import difflib
import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.proof_quality.proof import Step

_SCAN = re.compile(
    r"\$\(.*?\$\)|\$[{}]|\$v\s(?P<v>.*?)\$\.|\$[cd]\s.*?\$\.|(?P<label>\S+)\s+\$(?P<kind>[apef])\s(?P<body>.*?)\$\.",
    re.DOTALL,
)
_COMMENT = re.compile(r"\$\(.*?\$\)", re.DOTALL)
_BACK_REFERENCES = str.maketrans("", "", "UVWXYZ")


class Scope(NamedTuple):
    """What is active where a statement stands: labels of its essential hypotheses and of variables typed locally."""

    essential: tuple[str, ...] = ()
    floating: tuple[str, ...] = ()


class Entry(NamedTuple):
    """Where a statement is: its kind ``a``, ``p``, ``e`` or ``f``, the span of its body, and its scope."""

    kind: str
    start: int
    end: int
    scope: Scope


class Metamath:
    """A Metamath database.

    Parameters
    ----------
    path : a ``.mm`` file; ``$[ include $]`` is not followed.

    Attributes
    ----------
    entries : dict
        Label to :class:`Entry`, in the order of the file.

    Raises
    ------
    InputError
        The file cannot be read or holds no statement.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".mm") as file:
    ...     _ = file.write("$c |- wff -> $. $v p q $. wp $f wff p $. wq $f wff q $. wi $a wff -> p q $. "
    ...                    "${ a $e |- p $. b $e |- -> p q $. mp $a |- q $. $} "
    ...                    "${ a2 $e |- p $. b2 $e |- -> p p $. twice $p |- p $= ( mp ) AABCD $. $}")
    ...     file.flush()
    ...     database = Metamath(file.name)
    >>> [(step.text, step.uses) for step in database.steps("twice")]
    [('wp', ()), ('wp', ()), ('a2', ()), ('b2', ()), ('mp', (0, 1, 2, 3))]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise InputError(f"{self.path}: no such file: give a Metamath database (.mm)")
        self._text = self.path.read_text(encoding="latin-1")  # one byte a character: spans are those of the file
        self.entries: dict[str, Entry] = {}
        self._variables: set[str] = set()
        scopes = [Scope()]
        self._globals: dict[str, str] = {}  # variable -> the label that types it everywhere
        for match in _SCAN.finditer(self._text):
            kind = match["kind"]
            if kind is None:
                if match[0] == "${":
                    scopes.append(scopes[-1])
                elif match[0] == "$}" and len(scopes) > 1:
                    scopes.pop()
                elif match["v"]:
                    self._variables.update(match["v"].split())
                continue
            label = match["label"]
            if kind == "e":
                scopes[-1] = scopes[-1]._replace(essential=(*scopes[-1].essential, label))
            elif kind == "f" and len(scopes) == 1:
                self._globals[match["body"].split()[1]] = label
            elif kind == "f":
                scopes[-1] = scopes[-1]._replace(floating=(*scopes[-1].floating, label))
            self.entries[label] = Entry(kind, *match.span("body"), scopes[-1])
        if not self.entries:
            raise InputError(f"{self.path}: holds no Metamath statement: give a .mm file")
        self._arities: dict[str, int] = {}

    def __contains__(self, label: str) -> bool:
        return label in self.entries

    def entry(self, label: str) -> Entry:
        """Return where a statement is.

        Raises
        ------
        UnknownNameError
            If there is none of that label.
        """
        try:
            return self.entries[label]
        except KeyError:
            near = difflib.get_close_matches(label, [known for known in self.entries if known[:1] == label[:1]], n=3)
            raise UnknownNameError("Metamath label", label, near) from None

    def theorems(self) -> Iterator[str]:
        """Yield the labels of all theorems."""
        return (label for label, entry in self.entries.items() if entry.kind == "p")

    def statement(self, label: str) -> tuple[str, ...]:
        """Return the symbols of a statement, its typecode first, comments and proof left out."""
        entry = self.entry(label)
        return tuple(_COMMENT.sub(" ", self._text[entry.start : entry.end].partition("$=")[0]).split())

    def hypotheses(self, label: str) -> list[tuple[str, ...]]:
        """Return the statements of a theorem's essential hypotheses, in order."""
        return [self.statement(name) for name in self.entry(label).scope.essential]

    def mandatory(self, label: str) -> list[str]:
        """Return the labels of a statement's mandatory hypotheses, in the order of the file.

        They are its essential hypotheses and the typings of all variables in these and in itself.
        """
        scope = self.entry(label).scope
        typed = {**self._globals, **{self.statement(name)[1]: name for name in scope.floating}}
        labels = [*scope.essential, *(typed[variable] for variable in self._variables_of(label))]
        return sorted(labels, key=lambda name: self.entries[name].start)

    def arity(self, label: str) -> int:
        """Return how many steps a label takes from the stack."""
        if label not in self._arities:
            entry = self.entry(label)
            simple = entry.kind in "ef"
            self._arities[label] = 0 if simple else len(entry.scope.essential) + len(self._variables_of(label))
        return self._arities[label]

    def _variables_of(self, label: str) -> set[str]:
        spoken = set(self.statement(label)).union(*self.hypotheses(label))
        return spoken & self._variables

    # ----------------------------------------------------------------------------------------------------- proofs

    def proof_words(self, label: str) -> list[str]:
        """Return the words of a theorem's proof as they are written.

        Raises
        ------
        InputError
            The statement has no proof, or an incomplete one (``?``).
        """
        entry = self.entry(label)
        words = _COMMENT.sub(" ", self._text[entry.start : entry.end].partition("$=")[2]).split()
        if entry.kind != "p" or not words:
            raise InputError(f"{self.path}: {label} has no proof: give the label of a theorem ($p)")
        if any("?" in word for word in words):
            raise InputError(f"{self.path}: the proof of {label} is incomplete (it holds '?'): finish or leave it out")
        return words

    def size(self, label: str) -> int:
        """Return the number of steps of a proof as compressed, those that refer back included."""
        words = self.proof_words(label)
        if words[0] != "(":
            return len(words)
        return len("".join(words[words.index(")") + 1 :]).translate(_BACK_REFERENCES))

    def steps(self, label: str) -> tuple[Step, ...]:
        """Return the steps of a proof, each with the steps it is made from; the last is the theorem.

        A step's ``tokens`` are its letter and those of the earlier steps it refers back to, so that they add up to
        :meth:`size`.

        Raises
        ------
        InputError
            The proof is incomplete, cites a label that is not in the database, or does not end with one expression.
        """
        words = self.proof_words(label)
        if words[0] != "(":
            return self._run(label, [(word, -1, False) for word in words])
        close = words.index(")")
        names = [*self.mandatory(label), *words[1:close]]
        references, tagged = [], 0
        for number, tag in letter_numbers("".join(words[close + 1 :])):
            if number <= len(names):
                references.append((names[number - 1], -1, tag))
            elif number - len(names) <= tagged:
                references.append(("", number - len(names) - 1, tag))
            else:
                raise InputError(f"{self.path}: the proof of {label} refers to step {number}, which it does not have")
            tagged += tag
        return self._run(label, references)

    def _run(self, label: str, references: list[tuple[str, int, bool]]) -> tuple[Step, ...]:
        """Run (label, tagged step or -1, whether it is tagged) on a stack of step numbers."""
        steps: list[Step] = []
        stack: list[tuple[int, bool]] = []  # step, and whether it was referred back to
        tagged: list[int] = []
        for name, back, tag in references:
            if not name:
                stack.append((tagged[back], True))
            else:
                if name not in self.entries:
                    raise InputError(f"{self.path}: the proof of {label} cites {name!r}, which is not in the database")
                arity = self.arity(name)
                if arity > len(stack):
                    raise InputError(f"{self.path}: the proof of {label} has too few steps before {name!r}")
                taken = stack[len(stack) - arity :]
                del stack[len(stack) - arity :]
                uses = tuple(step for step, _ in taken)
                steps.append(Step(name, name, tokens=1 + sum(back for _, back in taken), uses=uses))
                stack.append((len(steps) - 1, False))
            if tag:
                tagged.append(stack[-1][0])
        if len(stack) != 1:
            raise InputError(f"{self.path}: the proof of {label} leaves {len(stack)} expressions, not one")
        return tuple(steps)

    # ---------------------------------------------------------------------------------------------------- library

    def cites(self, label: str) -> list[str]:
        """Return the theorems, axioms and definitions that a proof cites, those of its own typecode only.

        Syntax is left out: in set.mm what remains are the statements that begin with ``|-``.
        """
        words = self.proof_words(label)
        listed = words[1 : words.index(")")] if words[0] == "(" else list(dict.fromkeys(words))
        kind = self._typecode(label)
        return [name for name in listed if name in self.entries and self._asserts(name, kind)]

    def _asserts(self, label: str, typecode: str) -> bool:
        return self.entries[label].kind in "ap" and self._typecode(label) == typecode

    def _typecode(self, label: str) -> str:
        start = self.entry(label).start
        return self._text[start : start + 40].split(None, 1)[0]

    @cached_property
    def _library(self) -> tuple[dict[str, int], dict[str, int], list[int]]:
        """Depth of every statement, how many proofs cite it, and the sorted depths of the theorems."""
        depth: dict[str, int] = {}
        cited_by: dict[str, int] = {}
        for label, entry in self.entries.items():
            depth[label] = 0
            if entry.kind == "p":
                try:
                    names = self.cites(label)
                except InputError:  # incomplete: it stands like an axiom
                    continue
                depth[label] = 1 + max((depth[name] for name in names if name in depth), default=0)
                for name in names:
                    cited_by[name] = cited_by.get(name, 0) + 1
        return depth, cited_by, sorted(depth[label] for label in self.theorems())

    def depth(self, label: str) -> int:
        """Return the length of the longest chain of citations from a theorem down to an axiom, which has 0."""
        self.entry(label)
        return self._library[0][label]

    def cited_by(self, label: str) -> int:
        """Return how many proofs of the database cite a statement."""
        self.entry(label)
        return self._library[1].get(label, 0)

    def simplicity(self, label: str) -> float:
        """Return how familiar a proof's citations are, less how deep in the library its theorem lies; in [-1, 1].

        mean over citations of log(1 + cited by) / log(1 + most cited), minus the share of theorems of less depth.
        """
        depth, cited_by, depths = self._library
        names = self.cites(label)
        most = math.log1p(max(cited_by.values(), default=1))
        familiar = sum(math.log1p(cited_by.get(name, 0)) for name in names) / most / max(1, len(names))
        return familiar - bisect_left(depths, depth[label]) / len(depths)


def letter_numbers(letters: str) -> Iterator[tuple[int, bool]]:
    """Yield (number, whether a Z follows) for the letters of a compressed proof.

    >>> list(letter_numbers("AUTZYTUUA"))
    [(1, False), (40, True), (120, False), (121, False)]
    """
    for match in re.finditer(r"([U-Y]*)([A-T])(Z?)", letters):
        number = 0
        for letter in match[1]:
            number = number * 5 + ord(letter) - 84  # U = 1
        yield number * 20 + ord(match[2]) - 64, bool(match[3])  # A = 1
