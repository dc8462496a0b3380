"""Batches of token sequences of similar length, so that little is spent on padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from fairtrial.errors import InputError

Ids: TypeAlias = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]]
"""Token ids of N texts: (N, T), or N sequences of any lengths."""


def as_rows(model: Any, ids: Ids, *, least: int = 1) -> list[torch.Tensor]:
    """Return one int64 tensor (T_i,) a text, checked against the model's vocabulary and window.

    Raises
    ------
    InputError
        No text; a text shorter than ``least`` or longer than the model's window; an id outside its vocabulary. The
        message names the text, counted from 0.
    """
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise InputError(f"token ids={ids!r}: give one sequence of token ids a text")
    rows = [_row(row, i) for i, row in enumerate(ids)]
    if not rows:
        raise InputError("there is no text: give at least one sequence of token ids")
    window = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    vocabulary = model.get_input_embeddings().num_embeddings
    for i, row in enumerate(rows):
        if row.ndim != 1 or len(row) < least:
            raise InputError(f"text {i} has shape {tuple(row.shape)}: give a sequence of at least {least} token ids")
        if window is not None and len(row) > window:
            raise InputError(f"text {i} has {len(row)} tokens, the model's window is {window}: shorten it")
        if int(row.min()) < 0 or int(row.max()) >= vocabulary:
            raise InputError(f"text {i} has token ids outside 0..{vocabulary - 1}: it is of another tokenizer")
    return rows


def _row(row: Any, i: int) -> torch.Tensor:
    try:
        found = torch.as_tensor(row, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"text {i} is {row!r:.60}: give its token ids, whole numbers") from None
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool):
        raise InputError(f"text {i} has {found.dtype} for token ids: give whole numbers")
    return found.long()


def default_batch_tokens(model: Any, *, logits: bool) -> int:
    """Return how many tokens a batch may have: few enough for the caches of a CPU and for 256 MiB of logits."""
    table = model.get_input_embeddings().weight  # (V, d)
    tokens = 1024 if table.device.type == "cpu" else 8192
    return max(1, min(tokens, 2**26 // len(table))) if logits else tokens


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of texts batch by batch, longest first, each batch at most ``batch_tokens`` with its padding.

    >>> list(length_batches([3, 9, 4, 2], batch_tokens=9))
    [[1], [2, 0], [3]]
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def pad_right(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack rows (T_i,) into (B, max T_i), zeros at the right.

    Under causal attention no real position sees what is to its right, so a causal model needs no mask for these.
    """
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
