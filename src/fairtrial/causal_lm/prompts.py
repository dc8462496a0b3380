"""Questions as a chat model expects them, up to where its answer begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fairtrial.errors import InputError


def checked_texts(texts: Iterable[str], name: str = "text") -> list[str]:
    """Return texts as a list; refuse none at all, one text in place of a list, and empty ones.

    Raises
    ------
    InputError
        The message calls a text by ``name`` and its number, counted from 0.
    """
    found = [] if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
    if not found:
        raise InputError(f"{name}s: give a list of at least one text")
    for i, text in enumerate(found):
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{name} {i} is empty or not a text")
    return found


def prompt_texts(
    tokenizer: Any,
    questions: Sequence[str],
    *,
    system: str | None = None,
    shots: Sequence[tuple[str, str]] = (),
    start: str = "",
) -> list[str]:
    r"""Return the text before each answer, special tokens included.

    Parameters
    ----------
    tokenizer
        Of transformers. With a chat template each question is a user's turn, followed by the header of the
        assistant's; without one, questions and answers are separated by blank lines.
    questions
        n texts.
    system
        An instruction that comes first.
    shots
        Solved examples, (question, answer), that come before each question.
    start
        What every answer begins with, such as "The capital of Chad is".

    Returns
    -------
    list of str
        n texts, for ``tokenizer(..., add_special_tokens=False)``.

    Raises
    ------
    InputError
        No question, or one that is empty or no text.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> prompt_texts(tiny_causal_lm()[1], ["w5 w6"], shots=[("w1", "w2")])
    ['w1 w2\n\nw5 w6']
    """
    questions = checked_texts(questions, "prompt")
    if getattr(tokenizer, "chat_template", None):
        before = [{"role": "system", "content": system}] if system else []
        for question, answer in shots:
            before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        turns = [[*before, {"role": "user", "content": question}] for question in questions]
        texts = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return [text + start for text in texts]
    bos = tokenizer.bos_token if _adds_bos(tokenizer) else ""
    parts = [system] if system else []
    parts += [f"{question} {answer}" for question, answer in shots]
    return [bos + "\n\n".join([*parts, f"{question} {start}" if start else question]) for question in questions]


def following(tokenizer: Any, answers: Sequence[str], *, start: str = "") -> list[str]:
    """Return answers as they follow what :func:`prompt_texts` gives: after a space, but for one after a turn's header.

    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> following(tiny_causal_lm()[1], ["w2"])
    [' w2']
    """
    before = "" if getattr(tokenizer, "chat_template", None) and not start else " "
    return [before + answer for answer in answers]


def _adds_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts its start token before a text."""
    ids = tokenizer("a")["input_ids"]
    return bool(tokenizer.bos_token) and ids[:1] == [tokenizer.bos_token_id] and len(ids) > len(tokenizer.tokenize("a"))
