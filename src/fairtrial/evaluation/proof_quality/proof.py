"""A proof as steps: the units, tokens and formulas that every score of ProofRank reads.

A step is a sentence, with the displays that belong to it. Tokens are words, numbers, marks and single mathematical
symbols, counted alike for every author, never by a model's own tokenizer. Formal proofs are steps with exact
dependencies.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.latex import DISPLAYED, FORMULA, Piece, pieces

if TYPE_CHECKING:
    from fairtrial.evaluation.proof_quality.metamath import Metamath

_CLOSING = re.compile(r"(?<=[\w$]) ([.,;:?!)])(?=\s|$)")  # marks that follow a word without a space
_HEADING = re.compile(r"(?:step|case|lemma|claim|proposition|theorem|corollary) (?:\d+|[A-Z])\b", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """One step of a proof.

    Attributes
    ----------
    text : as it is printed: the source's own words, or a formal step's label.
    prose : words and marks, every formula replaced by one sign.
    formulas : the tokens of each formula.
    labels, refs : labels it defines, and those it refers to.
    tokens : its length.
    uses : of a formal proof, the indices of the steps it is made from; ``None`` where that is to be read off the text.
    """

    text: str
    prose: str
    formulas: tuple[tuple[str, ...], ...] = ()
    labels: tuple[str, ...] = ()
    refs: tuple[str, ...] = ()
    tokens: int = 1
    uses: tuple[int, ...] | None = None

    @property
    def heading(self) -> str:
        """``"case 2"`` of a step that begins with ``Case 2``, else empty."""
        match = _HEADING.match(self.prose)
        return match[0].lower() if match else ""


class Proof:
    r"""A proof of one problem.

    Parameters
    ----------
    proof : LaTeX text, or the steps: texts, or :class:`Step` of a formal proof.
    problem : which problem it proves.
    model : who wrote it.
    correct : whether it is correct; ``None`` if nobody has judged it.
    requested : the technique its author was asked to use.
    statement : what is proved, which a judge is shown; left out, ``problem``.
    library, label : of a formal proof, the database it comes from and its name there.

    Raises
    ------
    InputError
        The proof is empty, or its mathematics is not balanced; the message says where.

    Examples
    --------
    >>> proof = Proof(r"Let $n = 2k$. Then $n^2 = 4k^2$, so $4 \mid n^2$.", "even-square", correct=True)
    >>> [step.tokens for step in proof.steps], proof.length
    ([6, 17], 23)
    """

    def __init__(
        self,
        proof: str | Sequence[str | Step],
        problem: str,
        *,
        model: str | None = None,
        correct: bool | None = None,
        requested: str | None = None,
        statement: str | None = None,
        library: Metamath | None = None,
        label: str | None = None,
    ) -> None:
        self.problem, self.model, self.correct, self.requested = problem, model, correct, requested
        self.statement, self.library, self.label = statement or problem, library, label
        where = f"problem {problem!r}: "
        if isinstance(proof, str):
            self.steps = _steps(pieces(proof, where))
        else:
            parts = [
                [step] if isinstance(step, Step) else _steps(pieces(step, f"{where}step {number}: "), whole=True)
                for number, step in enumerate(proof, start=1)
            ]
            self.steps = tuple(step for part in parts for step in part)
        self.source = proof if isinstance(proof, str) else " ".join(step.text for step in self.steps)
        if not self.steps:
            raise InputError(f"{where}the proof is empty: leave the row out, or give its text")

    @classmethod
    def from_latex(cls, text: str, problem: str, **about: Any) -> Proof:
        """Return the proof that a LaTeX text gives; ``about`` as for the class."""
        return cls(text, problem, **about)

    @classmethod
    def from_metamath(cls, database: Metamath | str | Path, label: str, **about: Any) -> Proof:
        """Return the proof of a theorem of a Metamath database, one step for each different expression it derives.

        Raises
        ------
        UnknownNameError
            There is no theorem of that name, or its proof uses a label that is not there.
        InputError
            The proof is incomplete (``?``) or does not end with one expression.
        """
        from fairtrial.evaluation.proof_quality.metamath import Metamath

        library = database if isinstance(database, Metamath) else Metamath(database)
        about.setdefault("correct", True)  # a database's proofs were checked by its verifiers
        return cls(library.steps(label), about.pop("problem", label), library=library, label=label, **about)

    @property
    def formal(self) -> bool:
        """Whether its dependencies are exact."""
        return self.steps[0].uses is not None

    @cached_property
    def length(self) -> int:
        """Tokens of the whole proof."""
        return sum(step.tokens for step in self.steps)

    @cached_property
    def formulas(self) -> tuple[tuple[str, ...], ...]:
        """The formulas of all steps, as tokens."""
        return tuple(formula for step in self.steps for formula in step.formulas)

    @property
    def text(self) -> str:
        """The steps as one text."""
        return " ".join(step.text for step in self.steps)

    def with_steps(self, steps: Sequence[str | Step]) -> Proof:
        """Return a proof of the same problem by the same author with other steps."""
        return Proof(steps, self.problem, **self.about)

    def marked(self, correct: bool) -> Proof:
        """Return the same proof as one that is correct, or not."""
        same = copy.copy(self)
        same.correct = correct
        return same

    @property
    def about(self) -> dict[str, Any]:
        """What is known of the proof beside its text, as keywords of the class."""
        return {name: getattr(self, name) for name in ("model", "correct", "requested", "statement")}

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        who = f", model={self.model!r}" if self.model else ""
        return f"Proof({self.problem!r}{who}, {len(self.steps)} steps, {self.length} tokens)"


def read_jsonl(path: str | Path) -> list[Proof]:
    """Return the proofs of a file with a JSON object a line.

    Its keys are problem_id, proof (LaTeX text or a list of steps) and, if known, model, correct, technique_requested
    and statement.

    Raises
    ------
    InputError
        The file cannot be read, or a row is malformed, empty or has unbalanced mathematics; the message names the row.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file: give a .jsonl file with one proof a line")
    proofs = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # and at no other mark: JSON may hold those
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, row {number}: "
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where}not JSON: {error}") from None
        if not isinstance(row, dict) or not {"problem_id", "proof"} <= row.keys():
            raise InputError(f"{where}needs the keys problem_id and proof")
        for key in ("model", "technique_requested", "statement"):
            if not isinstance(row.get(key), str | None):
                raise InputError(f"{where}{key} must be text or left out")
        if not isinstance(row["problem_id"], str | int):
            raise InputError(f"{where}problem_id must be text or a number")
        text, correct = row["proof"], row.get("correct")
        steps = isinstance(text, list) and all(isinstance(step, str) for step in text)
        if not (isinstance(text, str) or steps) or correct not in (None, True, False):
            raise InputError(f"{where}proof must be text or a list of texts, and correct true, false or left out")
        try:
            proof = Proof(
                text,
                str(row["problem_id"]),
                model=row.get("model"),
                correct=None if correct is None else bool(correct),
                requested=row.get("technique_requested"),
                statement=row.get("statement"),
            )
        except InputError as error:
            raise InputError(f"{where}{error}") from None
        proofs.append(proof)
    if not proofs:
        raise InputError(f"{path}: holds no proof")
    return proofs


def _steps(parts: Iterable[Piece], whole: bool = False) -> tuple[Step, ...]:
    """Group pieces into sentences; ``whole`` keeps them one step."""
    units: list[list[Piece]] = [[]]
    ended = displayed = False
    for part in parts:
        begins = part.word == "\n" or (ended and _begins(part)) or (displayed and part.word[:1].isupper())
        if begins and not whole and _stands_alone(units[-1]):
            units.append([])
        if part.word not in ("\n", DISPLAYED):
            units[-1].append(part)
        displayed = part.word == DISPLAYED
        ended = part.word in (".", "!", "?") or (ended and part.word in (")", "]", "'", "’"))
    return tuple(_step(unit) for unit in units if any(part.word or part.math for part in unit))


def _begins(part: Piece) -> bool:
    """Whether a sentence can begin here."""
    return bool(
        part.math or part.label or part.ref or part.word[:1].isupper() or part.word[:1].isdigit() or part.word == "("
    )


def _stands_alone(unit: Sequence[Piece]) -> bool:
    """Whether a unit says something by itself, and is not only ``Case 1.`` or a number in a list."""
    words = [part.word for part in unit if part.word.isalpha()]
    return any(part.math for part in unit) or len(words) > 1 or (len(words) == 1 and not _HEADING.match(_prose(unit)))


def _prose(unit: Sequence[Piece]) -> str:
    return " ".join(part.word or FORMULA for part in unit if part.word or part.math)


def _written(part: Piece) -> str:
    if part.math:
        tokens = (rf"\text{{{token[1:]}}}" if token[0] == '"' else token for token in part.math)
        return f"${' '.join(tokens)}$"
    return part.word or (rf"\label{{{part.label}}}" if part.label else rf"\ref{{{part.ref}}}")


def _step(unit: Sequence[Piece]) -> Step:
    formulas = tuple(part.math for part in unit if part.math)
    return Step(
        text=_CLOSING.sub(r"\1", " ".join(map(_written, unit))),
        prose=_prose(unit),
        formulas=formulas,
        labels=tuple(part.label for part in unit if part.label),
        refs=tuple(part.ref for part in unit if part.ref),
        tokens=sum(bool(part.word or part.ref) for part in unit)
        + sum(token not in "{}" for formula in formulas for token in formula),
    )
