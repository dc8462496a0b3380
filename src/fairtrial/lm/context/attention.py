"""Attention at the answer's position, split into what comes from the context and what from the query.

For one head the output is (1 - pi) o_Q + pi o_Z, with pi the attention mass on context tokens and o_S the average of
values within S. So a head's correction is pi (o_Z - o_Q): mass times what the context adds to the query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.layout import block_layouts
from fairtrial.errors import InputError

DEPTHS = (0.4, 0.9)  # of the layers whose heads are averaged


def split_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: torch.Tensor, *, scale: float, temper: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mass on the context (H,), and the averages of values in context and in the rest, (H, e).

    Parameters
    ----------
    q
        (H, e), of the position that attends.
    k, v
        (H, T, e), of all positions it sees.
    context
        (T,) bool.
    scale
        Of the scores.
    temper
        g multiplies the odds of the mass: pi(g) = g pi / (1 - pi + g pi), by log g on the context's scores.
    """
    scores = torch.einsum("he,hte->ht", q, k) * scale
    if temper != 1:
        scores = scores + torch.log(torch.as_tensor(temper, dtype=scores.dtype)) * context
    p = scores.softmax(1)
    mass = (p * context).sum(1)
    inside, outside = (
        torch.einsum("ht,hte->he", scores.masked_fill(~where, float("-inf")).softmax(1), v)
        for where in (context, ~context)
    )
    return mass, inside, outside


@dataclass(eq=False)
class _Watch:
    """What the attention function is to do and has seen."""

    context: tuple[int, int] = (0, 0)
    temper: float = 1.0
    layers: frozenset[int] = frozenset()
    seen: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)


_NAME = "fairtrial_context"
_watch: list[_Watch] = []


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **how: Any
) -> tuple[torch.Tensor, None]:
    """Attend as "sdpa" does, watched: query (1, H, T, e), key and value (1, H_kv, T, e)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    watch = _watch[-1]
    start, stop = watch.context
    groups = query.shape[1] // key.shape[1]
    T = key.shape[2]
    scale = how.get("scaling") or query.shape[-1] ** -0.5
    if module.layer_idx in watch.layers:
        at = torch.arange(T, device=key.device)
        k, v = (x[0].repeat_interleave(groups, 0).float() for x in (key, value))
        watch.seen[module.layer_idx] = split_attention(
            query[0, :, -1].float(), k, v, (at >= start) & (at < stop), scale=scale, temper=watch.temper
        )
    if watch.temper != 1 and stop > start:
        causal = torch.full((T, T), float("-inf"), device=key.device).triu(1)
        causal[stop:, start:stop] += torch.log(torch.tensor(watch.temper))
        mask = causal[None, None].to(query.dtype)
        how["is_causal"] = False
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **how)


@contextmanager
def _watched(model: Any, watch: _Watch) -> Iterator[_Watch]:
    """Let the model's attention be watched."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    if before not in ("sdpa", "eager"):
        raise InputError(
            f"the model attends by {before!r}, which cannot be watched: load it with attn_implementation='sdpa'"
        )
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(_NAME)
    _watch.append(watch)
    try:
        yield watch
    finally:
        _watch.pop()
        model.set_attn_implementation(before)


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
    start, stop = context
    if not 0 <= start < stop <= len(ids) or stop - start == len(ids) or not temper > 0:
        raise InputError(f"context={context} of {len(ids)} tokens, temper={temper}: give a part of the prompt")
    layouts = block_layouts(model)
    n = len(layouts)
    layers = [i for i in range(n) if DEPTHS[0] <= (i + 1) / n <= DEPTHS[1]] or [n // 2]
    device = model.get_input_embeddings().weight.device
    watch = _Watch(context, temper, frozenset(layers))
    with torch.inference_mode(), evaluation_mode(model), _watched(model, watch):
        logits = model(torch.tensor([list(ids)], device=device), use_cache=False, logits_to_keep=1).logits[0, -1]
    masses, sizes = [], []
    for layer in layers:
        mass, inside, outside = watch.seen[layer]
        attention = layouts[layer].attention
        assert attention is not None
        W = attention.o.weight.float().view(-1, *inside.shape)  # (d, H, e)
        masses.append(mass.mean())
        sizes.append(torch.einsum("dhe,he->hd", W, inside - outside).norm(dim=1).mean())
    return Attention(float(torch.stack(masses).mean()), float(torch.stack(sizes).mean())), logits.float()


def tempered_logits(model: Any, ids: Sequence[int], context: tuple[int, int], temper: float) -> torch.Tensor:
    """Return the logits (V,) after a prompt whose context's attention odds are multiplied by ``temper``.

    1 leaves every logit as it is; less turns a context down that corrects too much.
    """
    return attention_to(model, ids, context, temper=temper)[1]
