"""What a model answers to a query with and without a context, as a probability vector over choices."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
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
    several = isinstance(choices, Collection) and not isinstance(choices, str) and len(choices) > 1
    if not several or not all(isinstance(c, str) and c.strip() for c in choices):
        raise InputError(f"choices: give at least two texts, not {choices!r}")
    first: dict[str, str] = {}
    for choice in choices:
        if (other := first.setdefault(normalised(choice), choice)) is not choice:
            raise InputError(f"choices {other!r} and {choice!r} are the same: give each once")
    return [choice.strip() for choice in choices]


def choice_of(answer: str, choices: Sequence[str]) -> int:
    """Return which of the choices an answer is; refuse one that is none of them."""
    names = [normalised(choice) for choice in choices]
    if not isinstance(answer, str) or normalised(answer) not in names:
        raise InputError(f"the answer {answer!r} is not among the {len(names)} choices")
    return names.index(normalised(answer))


def normalised(text: str) -> str:
    """Return a text as answers are compared: without case, quotes, the marks a sentence ends with and doubled spaces.

    Signs, decimal points and symbols tell answers apart.

    >>> normalised(" N'Djamena. "), normalised("-1.5"), normalised("C++")
    ('ndjamena', '-1.5', 'c++')
    """
    plain = " ".join(text.casefold().split())
    return re.sub(r"['’‘`\"“”«»]", "", plain).strip().rstrip(" .,;:!?…") or plain


def checked_start(start: str) -> str:
    """Return what answers begin with, without the space after it: choices bring their own."""
    if not isinstance(start, str):
        raise InputError(f"start={start!r}: give a text")
    return start.rstrip()


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
    choices, start = checked_choices(choices), checked_start(start)
    texts = prompt_texts(tokenizer, prompts, start=start)
    answers = following(tokenizer, choices, start=start)
    told: dict[tuple[int, ...], str] = {}
    for choice, row in zip(choices, tokenizer(answers, add_special_tokens=False)["input_ids"], strict=True):
        if (other := told.setdefault(tuple(row), choice)) is not choice:
            raise InputError(f"choices {other!r} and {choice!r} are the same to the tokenizer: leave one out")
    ids = prompt_ids(model, tokenizer, texts, max(map(len, told)), "the longest choice")
    first = first_tokens(tokenizer, answers)
    if first is not None:
        scores = next_token_log_probs(model, ids)[:, first].double().numpy()
    else:
        found = choice_scores(model, tokenizer, texts, [answers] * len(texts), add_special_tokens=False)
        scores = np.stack([score.mean.double().numpy() for score in found])
    return softmax(scores)


def prompt_ids(model: Any, tokenizer: Any, texts: Sequence[str], room: int, what: str) -> list[list[int]]:
    """Return the tokens of prompts; refuse one that does not leave room in the model's window for ``what`` follows."""
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    window = getattr(model.config, "max_position_embeddings", None)
    for i, row in enumerate(ids):
        if window and len(row) + room > window:
            raise InputError(
                f"prompt {i} has {len(row)} tokens and {what} {room}, more than the model's window of {window}: "
                "shorten the context"
            )
    return ids


def first_tokens(tokenizer: Any, answers: Sequence[str]) -> list[int] | None:
    """Return the first token of each answer, or ``None`` where two answers begin alike."""
    first = [row[0] for row in tokenizer(list(answers), add_special_tokens=False)["input_ids"]]
    return first if len(set(first)) == len(first) else None


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return probabilities (n, C) of log-likelihoods up to a constant a row."""
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def generated_choices(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    start: str = "",
    also: Sequence[str] = (),
    new_tokens: int = 12,
) -> list[str]:
    """Return ``also`` and the distinct first lines that the model answers to prompts, or goes on with after ``start``.

    Raises
    ------
    InputError
        If there are fewer than two: all prompts have one answer, and nothing can be corrected. A prompt beyond the
        model's window.
    """
    found = {normalised(text): text for text in also}
    texts = prompt_texts(tokenizer, prompts, start=checked_start(start))
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode(), evaluation_mode(model):
        for row in prompt_ids(model, tokenizer, texts, new_tokens, "an answer"):
            ids = torch.tensor([row], device=device)
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
            line = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip().split("\n")[0].strip()
            if line:
                found.setdefault(normalised(line), line)
    if len(found) < 2:
        raise InputError(f"the model answers {[*found.values()]} to every prompt: give choices=")
    return [*found.values()]
