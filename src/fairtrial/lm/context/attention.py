"""Attention at the answer's position, split into what comes from the context and what from the query.

For one head the output is (1 - pi) o_Q + pi o_Z, with pi the attention mass on context tokens and o_S the average of
values within S. So a head's correction is pi (o_Z - o_Q): mass times what the context adds to the query.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fairtrial.causal_lm.batching import as_rows
from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.layout import block_layouts
from fairtrial.errors import InputError
from fairtrial.options import checked_count, checked_number

DEPTHS = (0.4, 0.9)  # of the layers whose heads are averaged


def split_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    temper: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mass on the context (H,), and the averages of values in context and in the rest, (H, e).

    Parameters
    ----------
    q
        (H, e), of the position that attends.
    k, v
        (H, T, e), of all positions it sees.
    context
        (T,) bool; some of both.
    scale
        Of the scores.
    softcap
        Bound of the scores, which some architectures have.
    temper
        g multiplies the odds of the mass: pi(g) = g pi / (1 - pi + g pi), by log g on the context's scores.
    """
    scores = torch.einsum("he,hte->ht", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if temper != 1:
        scores = scores + math.log(temper) * context.to(scores.dtype)
    p = scores.softmax(1)
    mass = (p * context).sum(1)
    inside, outside = (
        torch.einsum("ht,hte->he", scores.masked_fill(~where, float("-inf")).softmax(1), v)
        for where in (context, ~context)
    )
    return mass, inside, outside


@dataclass(eq=False)
class _Watch:
    """What the attention function is to do and has seen: of each layer the mass (H,) and what context adds (H, e)."""

    attends: str
    context: tuple[int, int]
    temper: float
    layers: frozenset[int]
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


_NAME = "fairtrial_context"
_watch: list[_Watch] = []


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **how: Any
) -> tuple[torch.Tensor, Any]:
    """Attend as the model does, watched: query (1, H, T, e), key and value (1, H_kv, T, e), mask (1, 1, T, T)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    watch = _watch[-1]
    start, stop = watch.context
    T = key.shape[2]
    at = torch.arange(T, device=key.device)
    context = (at >= start) & (at < stop)
    if module.layer_idx in watch.layers:
        visible = _additive(mask, query)[0, 0, -1] > torch.finfo(query.dtype).min  # a layer may see the last few only
        groups = query.shape[1] // key.shape[1]
        q = query[0, :, -1].float()
        k, v = (x[0, :, visible].repeat_interleave(groups, 0).float() for x in (key, value))
        inside = context[visible]
        if inside.any() and not inside.all():
            scale, softcap = how.get("scaling") or query.shape[-1] ** -0.5, how.get("softcap")
            mass, *parts = split_attention(q, k, v, inside, scale=scale, softcap=softcap, temper=watch.temper)
            watch.seen[module.layer_idx] = mass, parts[0] - parts[1]
        else:
            watch.seen[module.layer_idx] = inside.any().expand(len(q)).float(), torch.zeros_like(v[:, 0])
    if watch.temper != 1:
        mask = _additive(mask, query) + math.log(watch.temper) * (context & (at >= stop)[:, None])
        mask = mask.to(query.dtype)
    if watch.attends == "eager":
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[watch.attends]
    return attend(module, query, key, value, mask, **how)


def _additive(mask: Any, query: torch.Tensor) -> torch.Tensor:
    """Return what a mask adds to scores, (1, 1, T, T): a mask that is left out is causal."""
    if mask is not None and mask.dtype != torch.bool:
        return mask
    if mask is None:
        T = query.shape[2]
        mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=query.device).tril()
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))


@contextmanager
def _watched(model: Any, watch: _Watch) -> Iterator[None]:
    """Let the model's attention be watched."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    if watch.attends not in ("sdpa", "eager"):
        raise InputError(
            f"the model attends by {watch.attends!r}, which cannot be watched: load it with attn_implementation='sdpa'"
        )
    name = f"{_NAME}_{watch.attends}"
    AttentionInterface.register(name, _attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[watch.attends])
    model.set_attn_implementation(name)
    _watch.append(watch)
    try:
        yield
    finally:
        _watch.pop()
        model.set_attn_implementation(watch.attends)


@dataclass(frozen=True)
class Attention:
    """Attention to one context: means over the heads of the layers between .4 and .9 of the depth.

    Attributes
    ----------
    mass : share of attention at the answer's position that goes to the context, in [0, 1].
    complementarity : length of what the context's values add to the query's, after the output projection.
    """

    mass: float
    complementarity: float


def attention_to(
    model: Any, ids: Sequence[int], context: tuple[int, int], *, temper: float = 1.0
) -> tuple[Attention, torch.Tensor]:
    """Return attention to the tokens ``context`` (start, stop) of one prompt, and the logits (V,) that follow it.

    Raises
    ------
    InputError
        No context token, or no other; an attention that cannot be watched; a temper that is not positive.
    """
    (row,) = as_rows(model, [ids])
    temper = checked_number(temper, "temper", above=0)
    start = checked_count(context[0], "start of the context", least=0, most=len(row) - 1)
    stop = checked_count(context[1], "end of the context", least=start + 1, most=len(row))
    if stop - start == len(row):
        raise InputError(f"context={context} of {len(row)} tokens: give a part of the prompt")
    layouts = block_layouts(model)
    n = len(layouts)
    layers = [i for i in range(n) if DEPTHS[0] <= (i + 1) / n <= DEPTHS[1]] or [n // 2]
    device = model.get_input_embeddings().weight.device
    watch = _Watch(model.config._attn_implementation, (start, stop), temper, frozenset(layers))
    with torch.inference_mode(), evaluation_mode(model), _watched(model, watch):
        logits = model(row[None].to(device), use_cache=False, logits_to_keep=1).logits[0, -1]
    masses, sizes = [], []
    for layer in layers:
        mass, added = watch.seen[layer]
        attention = layouts[layer].attention
        assert attention is not None
        W = attention.o.weight.float().view(-1, *added.shape)  # (d, H, e)
        masses.append(mass.mean())
        sizes.append(torch.einsum("dhe,he->hd", W, added).norm(dim=1).mean())
    return Attention(float(torch.stack(masses).mean()), float(torch.stack(sizes).mean())), logits.float()


def tempered_logits(model: Any, ids: Sequence[int], context: tuple[int, int], temper: float) -> torch.Tensor:
    """Return the logits (V,) after a prompt whose context's attention odds are multiplied by ``temper``.

    1 leaves every logit as it is; less turns a context down that corrects too much.
    """
    return attention_to(model, ids, context, temper=temper)[1]
