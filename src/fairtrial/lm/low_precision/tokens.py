"""Tokens to train on: a file of ids, texts, or a stream, cut into batches.

>>> import numpy as np
>>> batches = token_batches(np.arange(100, dtype=np.uint16), batch=2, length=8, steps=3, seed=0)
>>> [tuple(ids.shape) for ids in batches]
[(2, 8), (2, 8), (2, 8)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairtrial.causal_lm.windows import read_texts
from fairtrial.errors import InputError
from fairtrial.seeds import generator

DTYPES = ("uint16", "uint32")


def read_tokens(source: str | Path | Sequence[str], tokenizer: Any = None, *, dtype: str = "uint16") -> np.ndarray:
    """Return the ids (n,) of a ``.bin`` file, mapped and not read, or of texts.

    Parameters
    ----------
    source
        A ``.bin`` file of ids and nothing else; or texts: a list of them, a ``.txt`` or ``.jsonl`` file, or a folder of
        these.
    tokenizer
        Of transformers, for texts; without one the ids are their UTF-8 bytes. Texts follow each other after a blank
        line.
    dtype
        Of the ``.bin`` file: ``"uint16"`` or ``"uint32"``.

    Raises
    ------
    InputError
        Nothing there, a file that is not made of such ids, another dtype.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype={dtype!r}: give {' or '.join(map(repr, DTYPES))}")
    if isinstance(source, (str, Path)) and Path(source).suffix == ".bin":
        path = Path(source)
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        size = np.dtype(dtype).itemsize
        if path.stat().st_size % size or not path.stat().st_size:
            raise InputError(f"{path}: {path.stat().st_size} bytes are no ids of {size} bytes: is it another dtype?")
        return np.memmap(path, dtype=f"<u{size}", mode="r")
    text = "\n\n".join(read_texts(source))
    if tokenizer is None:
        return np.frombuffer(text.encode(), dtype=np.uint8)
    ids = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.uint32)


def token_batches(
    source: np.ndarray | Iterable[Any], *, batch: int, length: int, steps: int, seed: int = 0
) -> Iterator[torch.Tensor]:
    """Yield ``steps`` batches of ids (batch, length), int64.

    Parameters
    ----------
    source
        An array (n,) of ids, from which windows are drawn at random, the same for the same seed; or any iterable of
        ids, or of sequences of ids (an ``IterableDataset``), which are packed one after the other in their order.
    batch, length
        Sequences a batch, and tokens a sequence.
    steps
        Number of batches.
    seed
        Of the windows.

    Raises
    ------
    InputError
        Fewer tokens than one batch, a number below 1, or a stream that ends early.
    """
    for name, value in (("batch", batch), ("length", length), ("steps", steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r}: give a whole number of at least 1")
    if isinstance(source, np.ndarray):
        if source.ndim != 1 or source.dtype.kind not in "ui":
            raise InputError(f"ids of shape {source.shape} and {source.dtype}: give whole numbers of shape (n,)")
        if len(source) < batch * length:
            raise InputError(
                f"{len(source)} tokens are less than one batch of {batch} x {length}: give more text or a smaller batch"
            )
        return _windows(source, batch, length, steps, seed)
    return _packed(source, batch, length, steps)


def _windows(ids: np.ndarray, batch: int, length: int, steps: int, seed: int) -> Iterator[torch.Tensor]:
    rng = generator(seed, "windows")
    for _ in range(steps):
        starts = rng.integers(0, len(ids) - length + 1, batch)
        yield torch.from_numpy(ids[starts[:, None] + np.arange(length)].astype(np.int64))


def _packed(stream: Iterable[Any], batch: int, length: int, steps: int) -> Iterator[torch.Tensor]:
    need, kept, made = batch * length, [], 0
    items = iter(stream)
    have = 0
    while made < steps:
        while have < need:
            item = next(items, None)
            if item is None:
                raise InputError(f"the stream ended after {made} of {steps} batches: give more or fewer steps")
            piece = np.atleast_1d(np.asarray(item))
            if piece.dtype.kind not in "ui":
                raise InputError(f"the stream gave {type(item).__name__} of {piece.dtype}: give ids, whole numbers")
            kept.append(piece.astype(np.int64).ravel())
            have += len(kept[-1])
        joined = np.concatenate(kept)
        yield torch.from_numpy(joined[:need].copy()).view(batch, length)
        kept, have, made = [joined[need:]], have - need, made + 1
