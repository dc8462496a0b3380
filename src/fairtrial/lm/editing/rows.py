"""Edits as rows of tokens, with the places of the subject's last token and of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fairtrial.causal_lm.batching import as_rows, pad_right
from fairtrial.errors import InputError
from fairtrial.lm.editing.edits import Edit

PREFIXES = ("", "It is well known. ")
"""What comes before prompts while values are solved, so that they hold in other contexts too."""


@dataclass(frozen=True, eq=False)
class Rows:
    """R texts of n edits, padded at the right.

    Attributes
    ----------
    ids : (R, T) int64.
    edit : (R,) int64, which edit each is of.
    subject : (R,) int64, the place of the subject's last token.
    start, stop : (R,) int64, the places of the target's tokens; equal where a row has none.
    """

    ids: torch.Tensor
    edit: torch.Tensor
    subject: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)


def rows_of(
    model: Any, tokenizer: Any, edits: Sequence[Edit], *, prefixes: Sequence[str] = ("",), targets: bool = True
) -> Rows:
    """Return the prompts of edits after each prefix, an edit's rows next to each other, with or without targets.

    Raises
    ------
    InputError
        The subject's last token is merged with what follows it; a target without tokens; a text beyond the window. The
        message names the edit, counted from 0.
    """
    texts = []
    for i, edit in enumerate(edits):
        for prefix in prefixes:
            begin = len(prefix) + edit.prompt.index("{}")
            texts.append((i, prefix + edit.question, begin + len(edit.subject), edit.target_new if targets else ""))
    return _rows(model, tokenizer, texts, edits)


def essence_rows(model: Any, tokenizer: Any, edits: Sequence[Edit]) -> Rows:
    """Return one row an edit, "<subject> is a": what the subject is at all, which an edit should not change."""
    texts = [(i, f"{edit.subject} is a", len(edit.subject), "") for i, edit in enumerate(edits)]
    return _rows(model, tokenizer, texts, edits)


def _rows(model: Any, tokenizer: Any, texts: list[tuple[int, str, int, str]], edits: Sequence[Edit]) -> Rows:
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(f"{type(tokenizer).__name__} gives no offsets of tokens: load the fast tokenizer")
    whole = [question + (f" {target.strip()}" if target else "") for _, question, _, target in texts]
    found = tokenizer(whole, return_offsets_mapping=True)
    subjects, starts = [], []
    for (i, question, end, target), ids, offsets in zip(
        texts, found["input_ids"], found["offset_mapping"], strict=True
    ):
        at = next((t for t, (a, b) in enumerate(offsets) if a < end <= b), None)
        if at is None or offsets[at][1] > end:
            raise InputError(
                f"edit {i}: in {question!r} the last token of {edits[i].subject!r} is merged with what follows: change "
                "the prompt so that a space or a comma comes after the subject"
            )
        start = next((t for t, (a, b) in enumerate(offsets) if b > len(question)), len(ids))
        if target and start == len(ids):
            raise InputError(f"edit {i}: the target {target!r} has no tokens")
        if target and offsets[start][0] < len(question):
            raise InputError(f"edit {i}: the prompt {question!r} and its target are one token: end it with a word")
        subjects.append(at)
        starts.append(start if target else len(ids))
    rows = as_rows(model, found["input_ids"])
    return Rows(
        pad_right(rows),
        torch.tensor([i for i, *_ in texts]),
        torch.tensor(subjects),
        torch.tensor(starts),
        torch.tensor([len(row) for row in rows]),
    )
