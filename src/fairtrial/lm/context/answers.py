"""What a model answers to a query with and without a context, as a probability vector over choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.likelihood import choice_scores, next_token_log_probs
from fairtrial.causal_lm.prompts import following, prompt_texts
from fairtrial.errors import InputError

JOIN = "\n\n"  # between a context and the query


def joined(query: str, context: str | None) -> str:
    """Return what is asked: the context, a blank line and the query, or the query alone."""
    return query if not context else f"{context}{JOIN}{query}"


def checked_choices(choices: Sequence[str]) -> list[str]:
    """Return choices; refuse fewer than two, empty ones, and two that are the same to a reader."""
    if isinstance(choices, str) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        raise InputError(f"choices: give at least two texts, not {choices!r}")
    first: dict[str, str] = {}
    for choice in choices:
        if (other := first.setdefault(normalised(choice), choice)) is not choice:
            raise InputError(f"choices {other!r} and {choice!r} are the same: give each once")
    return [choice.strip() for choice in choices]


def normalised(text: str) -> str:
    """Return a text as answers are compared: without case, marks and doubled spaces.

    >>> normalised(" N'Djamena. ")
    'ndjamena'
    """
    kept = "".join(c if c.isalnum() or c.isspace() else "" for c in text.casefold())
    return " ".join(kept.split())


def answer_vectors(
    model: Any, tokenizer: Any, prompts: Sequence[str], choices: Sequence[str], *, start: str = ""
) -> np.ndarray:
    """Return the model's probabilities of choices after each prompt, (n, C), rows sum to 1.

    By the first tokens of the choices where they differ, one pass a prompt; otherwise by the mean log-likelihood a
    token of each choice, over a shared prefix.

    Parameters
    ----------
    model, tokenizer
        Of transformers.
    prompts
        n questions, contexts included; the chat template is put around them where there is one.
    choices
        C answers.
    start
        What the answer begins with, before any choice, such as "The capital of Chad is".

    Raises
    ------
    InputError
        A prompt beyond the model's window; choices that are none.
    """
    choices = checked_choices(choices)
    texts = prompt_texts(tokenizer, prompts, start=start)
    answers = following(tokenizer, choices, start=start)
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    window = getattr(model.config, "max_position_embeddings", None)
    longest = max(len(row) for row in tokenizer(answers, add_special_tokens=False)["input_ids"])
    if window:
        for i, row in enumerate(ids):
            if len(row) + longest > window:
                raise InputError(
                    f"prompt {i} has {len(row)} tokens and the longest choice {longest}, more than the model's window "
                    f"of {window}: shorten the context"
                )
    first = first_tokens(tokenizer, answers)
    if first is not None:
        scores = next_token_log_probs(model, ids)[:, first].double().numpy()
    else:
        found = choice_scores(model, tokenizer, texts, [answers] * len(texts), add_special_tokens=False)
        scores = np.stack([score.mean.double().numpy() for score in found])
    return softmax(scores)


def first_tokens(tokenizer: Any, answers: Sequence[str]) -> list[int] | None:
    """Return the first token of each answer, or ``None`` where two answers begin alike."""
    first = [row[0] for row in tokenizer(list(answers), add_special_tokens=False)["input_ids"]]
    return first if len(set(first)) == len(first) else None


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return probabilities (n, C) of log-likelihoods up to a constant a row."""
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def generated_choices(
    model: Any, tokenizer: Any, prompts: Sequence[str], *, start: str = "", new_tokens: int = 12
) -> list[str]:
    """Return the distinct first lines that the model answers greedily to prompts, or goes on with after ``start``.

    Raises
    ------
    InputError
        If there are fewer than two: all prompts have one answer, and nothing can be corrected.
    """
    found: dict[str, str] = {}
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode(), evaluation_mode(model):
        for text in prompt_texts(tokenizer, prompts, start=start):
            ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
            line = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip().split("\n")[0].strip()
            if normalised(line):
                found.setdefault(normalised(line), line)
    if len(found) < 2:
        raise InputError(f"the model answers {[*found.values()]} to every prompt: give choices=")
    return [*found.values()]
