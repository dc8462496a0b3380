"""Lossless speculative decoding: a drafted block is verified in one pass of the target.

Greedy decoding accepts the longest prefix that is what the target would have emitted. Sampling accepts token x with
probability min(1, p(x) / q(x)) and draws from the rest of p at the first rejection (Leviathan et al., 2023; Chen et
al., 2023), so that what comes out has the target's own law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.layout import find_blocks
from fairtrial.causal_lm.likelihood import cache_name
from fairtrial.errors import InputError
from fairtrial.lm.drafting.drafter import check_ids
from fairtrial.lm.drafting.written import end_tokens
from fairtrial.options import checked_count, checked_number


class Drafter(Protocol):
    """What :func:`speculative_generate` asks of a drafter; :class:`~fairtrial.lm.drafting.drafter.BlockDrafter` is one.

    ``config.layers`` are the target blocks whose outputs it wants, ``token_ids`` (V',) what it can draft.
    """

    config: Any
    token_ids: torch.Tensor

    def draft(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (B, V') after ``tokens`` (T,), given the target's features (T - 1, width) before the last."""
        ...


@dataclass(frozen=True, eq=False)
class Speculated:
    """What came out.

    Attributes
    ----------
    sequences : (1, T) int64, prompt and new tokens.
    accepted_lengths : list of int, how many drafted tokens each verification accepted.
    """

    sequences: torch.Tensor
    accepted_lengths: list[int]


def speculative_generate(
    target: Any,
    drafter: Drafter,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int = 128,
    do_sample: bool = False,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    token_type_ids: torch.Tensor | None = None,
) -> Speculated:
    """Generate from a prompt as ``target.generate`` would, in fewer passes.

    Parameters
    ----------
    target
        A causal language model of transformers.
    drafter
        Made for it.
    input_ids
        (1, T) int64, one prompt.
    attention_mask
        All ones, or ``None``.
    max_new_tokens
        At most so many; a token that ends texts ends this one.
    do_sample, temperature, generator
        Sampling from all tokens, at the temperature, from a random generator; ``top_k`` and ``top_p`` of the target's
        generation config are not applied.
    token_type_ids
        Not read: some tokenizers give them.

    Raises
    ------
    InputError
        More than one prompt, or padding; a target that keeps no cache, or whose generation config changes probabilities
        (repetition penalty, forbidden tokens); a temperature that is not positive; a prompt beyond the window.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> from fairtrial.lm.drafting import BlockDrafter
    >>> target, tokenizer = tiny_causal_lm(layers=4)
    >>> out = speculative_generate(target, BlockDrafter.for_target(target, block_size=4),
    ...                            **tokenizer("w3 w5 w9", return_tensors="pt"), max_new_tokens=6)
    >>> out.sequences.shape
    torch.Size([1, 9])
    """
    _check(target, drafter, input_ids, attention_mask, max_new_tokens, do_sample, temperature)
    state = _Target(target, drafter.config.layers)
    with torch.inference_mode(), evaluation_mode(target), state:
        tokens = input_ids[0].to(state.device)
        end = end_tokens(target)
        first = state.read(tokens, keep=1)[-1]
        tokens = torch.cat([tokens, _chosen(first, do_sample, temperature, generator)[None]])
        limit = input_ids.shape[1] + max_new_tokens
        accepted: list[int] = []
        while len(tokens) < limit and int(tokens[-1]) not in end:
            q_logits = drafter.draft(state.features, tokens)[: limit - len(tokens)]
            ids = drafter.token_ids.to(state.device)
            if do_sample:
                q = (q_logits.float() / temperature).softmax(-1)
                picked = torch.multinomial(q, 1, generator=generator)[:, 0]
            else:
                q, picked = q_logits, q_logits.argmax(-1)
            block = ids[picked]  # (B,)
            logits = state.read(torch.cat([tokens[-1:], block]), keep=len(block) + 1)
            if do_sample:
                p = (logits.float() / temperature).softmax(-1)
                n, extra = _accept(p, q, picked, ids, generator)
            else:
                emitted = logits.argmax(-1)
                n = int((block == emitted[:-1]).long().cumprod(0).sum())
                extra = emitted[n]
            state.forget(len(block) - n)
            new = torch.cat([block[:n], extra[None]])
            ends = [i for i, token in enumerate(new.tolist()) if token in end]
            if ends:
                new = new[: ends[0] + 1]
            tokens = torch.cat([tokens, new])[:limit]
            accepted.append(min(n, len(new)))
    return Speculated(tokens[None].to(input_ids.device), accepted)


def _accept(
    p: torch.Tensor, q: torch.Tensor, picked: torch.Tensor, ids: torch.Tensor, generator: torch.Generator | None
) -> tuple[int, torch.Tensor]:
    """Return how many of a block are accepted, and the token after them.

    ``p`` is (B + 1, V), ``q`` (B, V') over ``ids`` (V',), ``picked`` (B,) indices into those.
    """
    B = len(picked)
    at = torch.arange(B, device=p.device)
    ratio = p[at, ids[picked]] / q[at, picked]
    kept = torch.rand(B, generator=generator, device=p.device) < ratio
    n = int(kept.long().cumprod(0).sum())
    rest = p[n].clone()
    if n < B:
        rest[ids] -= q[n]
        rest.clamp_(min=0)
        if not bool(rest.sum() > 0):  # p and q are equal: nothing is left by rounding only
            rest = p[n]
    return n, torch.multinomial(rest, 1, generator=generator)[0]


def _chosen(
    logits: torch.Tensor, do_sample: bool, temperature: float, generator: torch.Generator | None
) -> torch.Tensor:
    if not do_sample:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)[0]


class _Target:
    """A target that reads tokens on from where it is, and can forget the last ones."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        from transformers import DynamicCache

        self.model, self.layers = model, list(layers)
        self.device = model.get_input_embeddings().weight.device
        self.cache = DynamicCache(config=model.config)
        self._new: dict[int, torch.Tensor] = {}
        self._features: list[torch.Tensor] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> _Target:
        blocks = find_blocks(self.model)[1]

        def keep(layer: int) -> Any:
            def hook(block: Any, args: tuple, output: Any) -> None:
                self._new[layer] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        self._hooks = [blocks[layer].register_forward_hook(keep(layer)) for layer in self.layers]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def features(self) -> torch.Tensor:
        """Hidden states of all tokens read, (T, 3 d)."""
        if len(self._features) > 1:
            self._features = [torch.cat(self._features)]
        return self._features[0] if self._features else torch.empty(0, 0, device=self.device)

    def read(self, tokens: torch.Tensor, *, keep: int) -> torch.Tensor:
        """Read tokens (n,) and return the logits (keep, V) of the last."""
        out = self.model(tokens[None], **{cache_name(self.model): self.cache}, use_cache=True, logits_to_keep=keep)
        if self.layers:
            self._features.append(torch.cat([self._new[layer] for layer in self.layers], -1))
        return out.logits[0]

    def forget(self, n: int) -> None:
        """Forget the last n tokens."""
        if n:
            self.cache.crop(-n)
            if self.layers:
                self._features = [self.features[:-n]]


def _check(
    target: Any, drafter: Any, ids: torch.Tensor, mask: Any, new: int, do_sample: bool, temperature: float
) -> None:
    if ids.ndim != 2 or len(ids) != 1 or ids.shape[1] < 1:
        raise InputError(f"input_ids has shape {tuple(ids.shape)}: give one prompt, (1, T)")
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise InputError("attention_mask has zeros: give a prompt without padding")
    check_ids("input_ids", ids, target.get_input_embeddings().weight.shape[0])
    checked_count(new, "max_new_tokens")
    if do_sample:
        checked_number(temperature, "temperature", above=0)
    window = getattr(target.config, "max_position_embeddings", None)
    block = getattr(drafter.config, "block_size", 0)
    if window is not None and ids.shape[1] + new + block > window:
        raise InputError(
            f"a prompt of {ids.shape[1]} tokens, {new} new ones and a block do not fit the target's window of {window}"
        )
    told = target.generation_config
    for name, plain in (("repetition_penalty", 1.0), ("no_repeat_ngram_size", 0), ("suppress_tokens", None)):
        value = getattr(told, name, None)
        if value not in (None, plain):
            raise InputError(f"the target's generation config has {name}={value}, which is not verified: unset it")
    if getattr(target.config, "is_encoder_decoder", False) or getattr(target, "_is_stateful", False):
        raise InputError(f"{type(target).__name__} keeps no cache of keys and values that could be cut back")
    vocabulary = getattr(drafter.config, "vocab_size", None)
    if vocabulary is not None and vocabulary != target.get_output_embeddings().weight.shape[0]:
        raise InputError(
            f"the drafter is for {vocabulary} tokens, the target has {target.get_output_embeddings().weight.shape[0]}"
        )
