"""Texts that the target itself wrote, and its hidden states in them: what a drafter is trained on.

A drafter must foretell the target, so that other people's text is no test of it: the target would not have gone on so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.hidden import token_hidden_states
from fairtrial.causal_lm.prompts import checked_texts
from fairtrial.errors import InputError
from fairtrial.options import checked_count

LOOP = 3  # times a 4-gram may recur before a text counts as looping


@dataclass(frozen=True, eq=False)
class Written:
    """Texts of equal length: a prompt and what the target went on with.

    Attributes
    ----------
    tokens : (S, T) int64.
    prompt : how many of them are the prompt's.
    stop : (S,) int64, the end of each text.
    """

    tokens: torch.Tensor
    prompt: int
    stop: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Any) -> Written:
        return Written(self.tokens[rows], self.prompt, self.stop[rows])


def write(
    target: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    prompt_tokens: int = 32,
    new_tokens: int = 64,
    batch: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Let the target go on greedily after the first tokens of texts; texts that loop are dropped.

    Parameters
    ----------
    target, tokenizer
        Of transformers.
    texts
        At least one of ``prompt_tokens`` tokens; shorter ones are left out.
    prompt_tokens, new_tokens
        Lengths.
    batch
        Texts at a time.
    progress
        Called with the number done and in all.

    Raises
    ------
    InputError
        No text is long enough, or all loop.
    """
    texts = checked_texts(texts)
    for name, value, least in (("prompt_tokens", prompt_tokens, 2), ("new_tokens", new_tokens, 2), ("batch", batch, 1)):
        checked_count(value, name, least=least)
    ids = tokenizer(texts, verbose=False)["input_ids"]
    prompts = [row[:prompt_tokens] for row in ids if len(row) >= prompt_tokens]
    if not prompts:
        raise InputError(
            f"none of {len(texts)} texts has {prompt_tokens} tokens: give longer ones or a smaller prompt_tokens"
        )
    device = target.get_input_embeddings().weight.device
    tokens, stops = [], []
    end = end_tokens(target)
    with torch.inference_mode(), evaluation_mode(target):
        for start in range(0, len(prompts), batch):
            rows = torch.tensor(prompts[start : start + batch], device=device)
            out = target.generate(
                rows, attention_mask=torch.ones_like(rows), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
            out = torch.nn.functional.pad(out, (0, prompt_tokens + new_tokens - out.shape[1])).cpu()
            new = out[:, prompt_tokens:]
            ends = torch.isin(new, torch.tensor(end)) if end else torch.zeros_like(new, dtype=torch.bool)
            length = torch.where(ends.any(1), ends.long().argmax(1) + 1, new_tokens)
            if out.shape[1] > prompt_tokens:
                tokens.append(out)
                stops.append(prompt_tokens + length)
            if progress:
                progress(min(start + batch, len(prompts)), len(prompts))
    all_tokens, stop = torch.cat(tokens), torch.cat(stops)
    kept = [i for i in range(len(all_tokens)) if not loops(all_tokens[i, prompt_tokens : stop[i]].tolist())]
    kept = [i for i in kept if stop[i] >= prompt_tokens + 2]
    if not kept:
        raise InputError(f"all {len(all_tokens)} continuations loop or end at once: give other texts")
    return Written(all_tokens[kept].clone(), prompt_tokens, stop[kept].clone())


def loops(tokens: Sequence[int]) -> bool:
    """Return whether a 4-gram occurs more than three times.

    >>> loops([1, 2, 3, 4] * 4), loops([*range(16)])
    (True, False)
    """
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(tokens) - 3):
        gram = tuple(tokens[i : i + 4])
        seen[gram] = seen.get(gram, 0) + 1
    return max(seen.values(), default=0) > LOOP


def features_of(target: Any, written: Written, layers: Sequence[int]) -> torch.Tensor:
    """Return the target's hidden states in texts, (S, T, len(layers) d) in half precision on the CPU."""
    rows = [row[: int(stop)] for row, stop in zip(written.tokens, written.stop, strict=True)]
    found = token_hidden_states(target, rows, layers)
    out = torch.zeros(*written.tokens.shape, found[0][0].numel(), dtype=torch.float16)
    for row, states in zip(out, found, strict=True):  # (T_i, L, d)
        row[: len(states)] = states.flatten(1)
    return out


def blocks_of(
    written: Written, anchors: torch.Tensor, block_size: int, token_ids: torch.Tensor, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the target emits after anchors (S, A), and whether its text goes so far, each (S, A, B).

    Ids are those of the drafter's vocabulary, -1 outside it.
    """
    S, A = anchors.shape
    at = anchors[..., None] + 1 + torch.arange(block_size)  # (S, A, B)
    there = at < written.stop[:, None, None]
    tokens = written.tokens.gather(1, at.clamp_max(written.tokens.shape[1] - 1).view(S, -1)).view(S, A, -1)
    inverse = torch.full((vocabulary,), -1, dtype=torch.int64)
    inverse[token_ids.cpu()] = torch.arange(len(token_ids))
    return torch.where(there, inverse[tokens], 0), there


def end_tokens(target: Any) -> list[int]:
    """Return the ids that end a text of the target."""
    end = target.generation_config.eos_token_id if target.generation_config else target.config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else [*end]
