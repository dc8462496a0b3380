"""Log-likelihoods of texts and of continuations under a causal language model, batched.

Texts are batched by length and padded at the right, where padding changes nothing; logits exist for one batch at a
time, and the log-softmax is taken in float32 whatever the model computes in.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fairtrial.causal_lm.batching import Ids, as_rows, default_batch_tokens, length_batches, pad_right
from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.errors import InputError


def token_log_likelihoods(model: Any, ids: Ids, *, batch_tokens: int | None = None) -> list[torch.Tensor]:
    """Return log p(token t | tokens before t) of every token but the first of each text, in nats.

    Parameters
    ----------
    model
        A causal language model of transformers.
    ids
        Token ids of N texts, (N, T) or N sequences.
    batch_tokens
        Tokens a batch, padding included; ``None`` = 1024 on a CPU, 8192 elsewhere, fewer where the vocabulary is large.

    Returns
    -------
    list of torch.Tensor
        N tensors (T_i - 1,), float32, on the CPU, in the order of ``ids``.

    Raises
    ------
    InputError
        A text of fewer than two tokens, beyond the model's window or of another vocabulary, or one whose likelihood is
        not finite; the message names it.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> [tuple(row.shape) for row in token_log_likelihoods(model, [[3, 1, 4, 1, 5], [9, 2]])]
    [(4,), (1,)]
    """
    rows = as_rows(model, ids, least=2)
    results: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    with torch.inference_mode(), evaluation_mode(model):
        for batch in length_batches(
            [len(row) for row in rows], batch_tokens or default_batch_tokens(model, logits=True)
        ):
            logits = _forward(model, pad_right([rows[i] for i in batch])).logits  # (B, T, V)
            for i, row_logits in zip(batch, logits, strict=True):
                results[i] = _log_likelihood(row_logits, rows[i][1:])
    # A copy outside inference mode is an ordinary tensor, which may be used with autograd.
    return [_finite(i, row).clone() for i, row in enumerate(results)]


def mean_nll(model: Any, ids: Ids, *, batch_tokens: int | None = None) -> float:
    """Return the mean negative log-likelihood a token, in nats, over all tokens but the first of each text.

    See :func:`token_log_likelihoods` for the arguments and errors.
    """
    return -torch.cat(token_log_likelihoods(model, ids, batch_tokens=batch_tokens)).double().mean().item()


def perplexity(model: Any, ids: Ids, *, batch_tokens: int | None = None) -> float:
    """Return exp of :func:`mean_nll`."""
    return math.exp(mean_nll(model, ids, batch_tokens=batch_tokens))


def next_token_log_probs(model: Any, ids: Ids, *, batch_tokens: int | None = None) -> torch.Tensor:
    """Return the log-probabilities of what follows each of N texts, (N, vocabulary), float32, on the CPU.

    See :func:`token_log_likelihoods` for the arguments and errors; texts of one token will do.
    """
    rows = as_rows(model, ids)
    results: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    with torch.inference_mode(), evaluation_mode(model):
        for batch in length_batches(
            [len(row) for row in rows], batch_tokens or default_batch_tokens(model, logits=True)
        ):
            padded = pad_right([rows[i] for i in batch])
            shortest = min(len(rows[i]) for i in batch)
            logits = _forward(model, padded, keep=padded.shape[1] - shortest + 1).logits  # (B, T - shortest + 1, V)
            for i, row_logits in zip(batch, logits, strict=True):
                results[i] = F.log_softmax(row_logits[len(rows[i]) - shortest].float(), dim=-1).cpu()
    return torch.stack([_finite(i, row) for i, row in enumerate(results)])


@dataclass(frozen=True, eq=False)
class ChoiceScores:
    """Log-likelihoods of the C choices of one context.

    Attributes
    ----------
    total
        (C,) float32: log p(choice | context), nats.
    n_tokens
        (C,) int64: how many tokens each choice was scored on.
    """

    total: torch.Tensor
    n_tokens: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """Log-likelihood a token, (C,): the length-normalised score."""
        return self.total / self.n_tokens


def choice_scores(
    model: Any,
    tokenizer: Any,
    contexts: Sequence[str],
    choices: Sequence[Sequence[str]],
    *,
    add_special_tokens: bool = True,
    batch_tokens: int | None = None,
) -> list[ChoiceScores]:
    """Score the possible continuations of each context.

    A context is read once and its keys and values shared by all its choices. All choices of a context are scored on
    what follows the tokens they share with the context alone, so that where a choice merges with the context's last
    characters into other tokens the scores still compare.

    Parameters
    ----------
    model, tokenizer
        A causal language model of transformers and its tokenizer.
    contexts
        N texts.
    choices
        For each context its continuations, as they follow it to the letter (usually beginning with a space).
    add_special_tokens
        ``False`` for contexts that hold them already, as a chat template writes them.
    batch_tokens
        See :func:`token_log_likelihoods`.

    Returns
    -------
    list of ChoiceScores
        One a context.

    Raises
    ------
    InputError
        Not as many lists of choices as contexts; a context without choices; an empty choice, or an empty context where
        the tokenizer puts no token before it; context and choice together beyond the model's window.
    """
    if len(contexts) != len(choices):
        raise InputError(
            f"there are {len(contexts)} contexts and {len(choices)} lists of choices: give one list a context"
        )
    prefixes: list[torch.Tensor] = []
    tails: list[list[torch.Tensor]] = []
    for i, (context, options) in enumerate(zip(contexts, choices, strict=True)):
        if not options or not all(options):
            raise InputError(f"context {i} has {'an empty choice' if options else 'no choices'}: give non-empty texts")
        texts = [context, *(context + option for option in options)]
        alone, *whole = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        shared = min(_common_prefix([alone, *whole]), min(map(len, whole)) - 1)
        if shared < 1:
            raise InputError(f"context {i} has no token before its choices: begin it with a word")
        rows = as_rows(model, whole)
        prefixes.append(rows[0][:shared])
        tails.append([row[shared:] for row in rows])
    scores: list[list[torch.Tensor]] = [[torch.empty(0)] * len(options) for options in choices]
    budget = batch_tokens or default_batch_tokens(model, logits=True)
    with torch.inference_mode(), evaluation_mode(model):
        for group in _equal_lengths(prefixes, budget):
            cache = _prefix_cache(model, torch.stack([prefixes[i][:-1] for i in group]))
            pairs = [(g, i, c) for g, i in enumerate(group) for c in range(len(tails[i]))]
            # The last shared token goes with each choice: its output is what predicts the choice's first token.
            inputs = [torch.cat([prefixes[i][-1:], tails[i][c]]) for _, i, c in pairs]
            # A token in the cache costs a fraction of one that is computed, but it is copied for every choice.
            cached = len(prefixes[group[0]]) // 16
            for batch in length_batches([len(row) + cached for row in inputs], budget):
                logits = _forward(
                    model,
                    pad_right([inputs[j] for j in batch]),
                    cache=_select(cache, torch.tensor([pairs[j][0] for j in batch])),
                ).logits  # (B, T, V)
                for j, row_logits in zip(batch, logits, strict=True):
                    _, i, c = pairs[j]
                    scores[i][c] = _log_likelihood(row_logits, tails[i][c])
    return [
        ChoiceScores(
            torch.stack([_finite(i, tail).sum() for tail in row]),
            torch.tensor([len(tail) for tail in row]),
        )
        for i, row in enumerate(scores)
    ]


def _common_prefix(rows: list[list[int]]) -> int:
    """Return how many tokens all rows begin with."""
    return next((k for k, tokens in enumerate(zip(*rows, strict=False)) if len(set(tokens)) > 1), min(map(len, rows)))


def _equal_lengths(rows: list[torch.Tensor], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of rows of one length batch by batch: what a cache can hold without padding."""
    by_length: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(i)
    for length, indices in by_length.items():
        size = max(1, batch_tokens // length)
        yield from (indices[k : k + size] for k in range(0, len(indices), size))


def _prefix_cache(model: Any, prefix: torch.Tensor) -> Any:
    """Return the keys and values of prefixes (G, L), or ``None`` for L = 0."""
    if prefix.shape[1] == 0:
        return None
    output = _forward(model, prefix, keep=1, use_cache=True)
    return getattr(output, cache_name(model))


def _select(cache: Any, rows: torch.Tensor) -> Any:
    """Return a copy of the cache with the given ``rows`` (B,) of it."""
    if cache is None:
        return None
    cache = copy.deepcopy(cache)
    cache.batch_select_indices(rows)
    return cache


def _forward(model: Any, ids: torch.Tensor, *, keep: int = 0, cache: Any = None, use_cache: bool = False) -> Any:
    """Run the model on (B, T) ids; logits of the last ``keep`` positions, 0 = all."""
    extra = {} if cache is None else {cache_name(model): cache}
    ids = ids.to(model.get_input_embeddings().weight.device)
    return model(ids, use_cache=use_cache or cache is not None, logits_to_keep=keep, **extra)


def cache_name(model: Any) -> str:
    """Return what this version of transformers calls the cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return log p (n,) on the CPU of ``targets`` (n,) under the first n rows of ``logits`` (T, V)."""
    targets = targets.to(logits.device)
    pieces = zip(logits[: len(targets)].split(256), targets.split(256), strict=True)  # bounds the float32 copy
    return -torch.cat([F.cross_entropy(rows.float(), wanted, reduction="none") for rows, wanted in pieces]).cpu()


def _finite(i: int, values: torch.Tensor) -> torch.Tensor:
    if not bool(torch.isfinite(values).all()):
        raise InputError(f"the likelihood of text {i} is not finite: the model overflows its dtype or is damaged")
    return values
