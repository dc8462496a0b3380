"""The state by which a text is known in a model: which layer, which token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from fairtrial.causal_lm.hidden import cached_hidden_states, hidden_states
from fairtrial.causal_lm.layout import ChainSpec, find_blocks
from fairtrial.causal_lm.prompts import checked_texts, prompt_texts
from fairtrial.errors import InputError, UnknownNameError

Pooling: TypeAlias = Literal["auto", "last", "mean"]


def layer_at(model: Any, depth: float, spec: ChainSpec | None = None) -> int:
    """Return the layer after which the share ``depth``, in (0, 1], of a model's blocks has run.

    The same depth means the same place in models of different size.
    """
    if not 0 < depth <= 1:
        raise InputError(f"depth={depth}: give a share of the blocks in (0, 1]")
    return max(1, round(depth * len(find_blocks(model, spec)[1]))) - 1


def generates(model: Any) -> bool:
    """Return whether the model is a causal one, whose text can be steered."""
    return bool(model.can_generate())


def pooling_of(model: Any, pooling: Pooling) -> Literal["last", "mean"]:
    """Return the pooling that "auto" stands for: the last token of causal models, the mean of encoders."""
    if pooling not in ("auto", "last", "mean"):
        raise UnknownNameError("pooling", pooling, ["auto", "last", "mean"])
    if pooling == "auto":
        return "last" if generates(model) else "mean"
    return pooling


def text_states(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    layers: Sequence[int],
    *,
    pooling: Pooling = "auto",
    spec: ChainSpec | None = None,
    cache: str | Path | None = None,
) -> torch.Tensor:
    """Return one state a text and layer, (n, L, d) float32 on the CPU.

    Parameters
    ----------
    model, tokenizer
        Of transformers; an encoder needs a ``spec`` that names its blocks.
    texts
        n of them.
    layers
        L layers, see :func:`~fairtrial.causal_lm.hidden.hidden_states`; the model runs no further than the deepest.
    pooling
        "last": the last token of the text as a user's turn, after the header of the assistant's turn; of the text
        itself where the tokenizer has no chat template. "mean": over the text's own tokens but the first, which in
        causal models is an attention sink. "auto": "last" for causal models, "mean" for encoders.
    cache
        A folder in which states are kept.
    """
    texts = checked_texts(texts)
    how = pooling_of(model, pooling)
    if how == "last":
        ids = tokenizer(prompt_texts(tokenizer, texts), add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(texts)["input_ids"]
    ignored = tokenizer.all_special_ids if how == "mean" else ()
    if cache is None:
        states = hidden_states(model, ids, layers, pooling=how, ignore_ids=ignored, spec=spec)
    else:
        states = cached_hidden_states(cache, model, ids, layers, pooling=how, ignore_ids=ignored, spec=spec)
    return states.float().cpu()
