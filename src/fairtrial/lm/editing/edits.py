"""Edits of facts: what is asked, of which subject, and what is to be answered from now on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairtrial.errors import InputError


@dataclass(frozen=True)
class Edit:
    """One fact to change.

    Parameters
    ----------
    prompt
        A template in which ``{}`` stands for the subject, such as "The capital of {} is".
    subject
        What the fact is about.
    target_new
        What the model is to go on with.
    paraphrases
        Other templates of the same question, for scoring.
    neighbours
        Complete prompts about other subjects and their answers, which must not change.
    """

    prompt: str
    subject: str
    target_new: str
    paraphrases: tuple[str, ...] = ()
    neighbours: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt", "subject", "target_new"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise InputError(f"an edit's {name} is {value!r}: give a text")
        for name in ("paraphrases", "neighbours"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise InputError(f"paraphrases and neighbours of {self.subject!r}: give lists")
            object.__setattr__(self, name, tuple(value))
        for template in (self.prompt, *self.paraphrases):
            if not isinstance(template, str) or template.count("{}") != 1:
                raise InputError(f"prompt {template!r}: write {{}} once, where the subject {self.subject!r} goes")

        for pair in self.neighbours:
            if (
                isinstance(pair, str)
                or not isinstance(pair, Sequence)
                or len(pair) != 2
                or not all(isinstance(text, str) for text in pair)
            ):
                raise InputError(f"neighbour {pair!r} of {self.subject!r}: give a pair of texts, prompt and answer")

    @property
    def question(self) -> str:
        """The prompt with the subject in it."""
        return self.prompt.replace("{}", self.subject)


def check_edits(edits: Sequence[Edit]) -> None:
    """Refuse an empty list, and two edits of one question with different targets."""
    if not isinstance(edits, Sequence) or not len(edits):
        raise InputError("edits: give a list of at least one Edit")
    first: dict[tuple[str, str], int] = {}
    for i, edit in enumerate(edits):
        if not isinstance(edit, Edit):
            raise InputError(f"edit {i} is {type(edit).__name__}: give fairtrial.lm.editing.Edit, or read_edits(file)")
        j = first.setdefault((edit.prompt, edit.subject), i)
        if edits[j].target_new != edit.target_new:
            raise InputError(
                f"edits {j} and {i} ask {edit.question!r} and want {edits[j].target_new!r} and {edit.target_new!r}: "
                "keep one"
            )


def read_edits(path: str | Path) -> list[Edit]:
    """Return the edits of a file.

    Parameters
    ----------
    path
        ``.jsonl`` or ``.json`` (a list). A row has the fields of :class:`Edit`; rows of CounterFact
        (``requested_rewrite``) and of zsRE (``src``, ``rephrase``, ``alt``, ``loc``) are taken as they are.

    Raises
    ------
    InputError
        The file or a row cannot be read; the message names the row, counted from 1.
    """
    file = Path(path)
    if file.suffix not in (".json", ".jsonl"):
        raise InputError(f"{file}: give a .json or .jsonl file")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    try:
        if file.suffix == ".json":
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}") from None
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{file}: no edits in it")
    edits = []
    for number, row in enumerate(rows, start=1):
        try:
            edits.append(_edit(row))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(
                f"{file}, row {number}: not an edit with prompt, subject and target_new, nor a row of CounterFact or "
                f"zsRE ({error!r})"
            ) from None
        except InputError as error:
            raise InputError(f"{file}, row {number}: {error}") from None
    return edits


def _edit(row: Mapping[str, Any]) -> Edit:
    if "requested_rewrite" in row:  # CounterFact
        asked = row["requested_rewrite"]
        true = asked["target_true"]["str"]
        paraphrases = [_template(text, asked["subject"]) for text in row.get("paraphrase_prompts", ())]
        return Edit(
            asked["prompt"],
            asked["subject"],
            asked["target_new"]["str"],
            tuple(template for template in paraphrases if template),
            tuple((prompt, true) for prompt in row.get("neighborhood_prompts", ())),
        )
    if "src" in row:  # zsRE
        prompt = _template(row["src"], row["subject"])
        if prompt is None:
            raise InputError(f"the subject {row['subject']!r} is not in the prompt {row['src']!r}")
        rephrased = _template(row["rephrase"], row["subject"]) if "rephrase" in row else None
        kept = [(row["loc"].removeprefix("nq question: "), row["loc_ans"])] if "loc" in row else []
        return Edit(prompt, row["subject"], row["alt"], (rephrased,) if rephrased else (), tuple(kept))
    prompt, subject = row["prompt"], row["subject"]
    if "{}" not in prompt:
        found = _template(prompt, subject)
        if found is None:
            raise InputError(f"the subject {subject!r} is not in the prompt {prompt!r}")
        prompt = found
    neighbours = tuple((str(asked), str(answer)) for asked, answer in row.get("neighbours", ()))
    return Edit(prompt, subject, row["target_new"], tuple(row.get("paraphrases", ())), neighbours)


def _template(text: str, subject: str) -> str | None:
    """Return a text with its last mention of the subject replaced by ``{}``, or ``None`` without one."""
    start = text.rfind(subject)
    return None if start < 0 else f"{text[:start]}{{}}{text[start + len(subject) :]}"
