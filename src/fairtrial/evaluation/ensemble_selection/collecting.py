"""Ask every model every item once, and keep what was answered.

A cache holds one JSON line an answer, by model and item, written batch by batch: a run that was stopped goes on where
it was, and a new model costs its own answers only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fairtrial.errors import InputError
from fairtrial.options import checked_count

Model = Callable[[list[str]], Sequence[Any]]
Parse = Callable[[str], str | None]


def collect(
    models: Mapping[str, Model | Any],
    items: Sequence[str] | pd.Series,
    *,
    parse: Parse = str.strip,
    cache: str | Path | None = None,
    batch_size: int = 64,
) -> pd.DataFrame:
    """Return the table of answers of models to items.

    Parameters
    ----------
    models
        By name, a function from a list of prompts to as many answers, or a chat model of :mod:`fairtrial.chat` (any
        object with ``complete_many``). An answer is text, None, or an object with ``text``; an exception among the
        answers is no answer and asked again next time. ``partial(chat.complete_many, max_tokens=8)`` sets options.
    items
        n prompts. The index of a Series becomes that of the table.
    parse
        From a model's text to an answer, or ``None`` for no answer; see :func:`label_parser`. It is applied after the
        cache, so that another one costs no query.
    cache
        A folder; made if needed. ``None`` = nothing is kept.
    batch_size
        Prompts a call, after each of which the cache is written.

    Returns
    -------
    pandas.DataFrame
        (n, M), one column a model; None = no answer.

    Raises
    ------
    InputError
        A model that gave another number of answers than it was given prompts, or to a whole batch only exceptions; a
        damaged cache. What was answered before is kept.

    Examples
    --------
    >>> shout = lambda prompts: [prompt.upper() for prompt in prompts]
    >>> collect({"shout": shout, "silent": lambda prompts: [None] * len(prompts)}, ["yes", "no "])
      shout silent
    0   YES   None
    1    NO   None
    """
    batch_size = checked_count(batch_size, "batch_size")
    if cache is not None and Path(cache).expanduser().is_file():
        raise InputError(f"cache={cache}: it is a file: give a folder")
    series = items if isinstance(items, pd.Series) else pd.Series(list(items), dtype=object)
    prompts = [str(prompt) for prompt in series]
    columns = {
        name: [None if text is None else parse(text) for text in _texts(name, model, prompts, cache, batch_size)]
        for name, model in models.items()
    }
    return pd.DataFrame(columns, index=series.index, dtype=object)


def label_parser(labels: Iterable[str]) -> Parse:
    """Return the function that finds the first of some labels in a text, as a word, whatever its case.

    >>> parse = label_parser(["positive", "negative"])
    >>> parse("I'd say Negative, not positive."), parse("Hard to tell.")
    ('negative', None)
    """
    given = [labels] if isinstance(labels, str) else list(labels)
    if not given or not all(isinstance(label, str) and label.strip() for label in given):
        raise InputError(f"labels={given}: give one label or more, texts, none of them empty")
    known = {label.lower(): label for label in given}
    if len(known) < len({*given}):
        raise InputError(f"labels={given}: two differ in case alone, which a reply does not tell apart")
    longest_first = sorted(known, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)

    def parse(text: str) -> str | None:
        found = pattern.search(text)
        return known[found[1].lower()] if found else None

    return parse


def _texts(
    name: str, model: Model | Any, prompts: list[str], cache: str | Path | None, batch_size: int
) -> list[str | None]:
    """Return a model's text for each prompt, those in the cache without asking."""
    file = None if cache is None else Path(cache).expanduser() / f"{_slug(name)}.jsonl"
    known = _read(file) if file else {}
    wanted = [prompt for prompt in dict.fromkeys(prompts) if _key(prompt) not in known]
    for i in range(0, len(wanted), batch_size):
        batch = wanted[i : i + batch_size]
        answered = {_key(prompt): text for prompt, text in zip(batch, _ask(name, model, batch), strict=True)}
        known.update({key: text for key, (text, _) in answered.items()})
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as stream:
                for key, (text, keep) in answered.items():
                    if keep:
                        stream.write(json.dumps({"item": key, "text": text}, ensure_ascii=False) + "\n")
    return [known[_key(prompt)] for prompt in prompts]


def _ask(name: str, model: Model | Any, prompts: list[str]) -> list[tuple[str | None, bool]]:
    """Return (text, whether to keep it) for each prompt."""
    replies = list(getattr(model, "complete_many", model)(prompts))
    if len(replies) != len(prompts):
        given = f"{len(replies)} answers to {len(prompts)} prompts"
        raise InputError(f"model {name!r} gave {given}: give one each, in order")
    if all(isinstance(reply, Exception) for reply in replies):
        raise InputError(f"model {name!r} answered none of {len(prompts)} prompts: {replies[0]}")
    texts = [None if isinstance(reply, Exception) else getattr(reply, "text", reply) for reply in replies]
    return [
        (None if text is None else str(text), not isinstance(reply, Exception))
        for text, reply in zip(texts, replies, strict=True)
    ]


def _read(file: Path) -> dict[str, str | None]:
    """Return the cached texts; a last line that a stopped run left unfinished is cut off."""
    if not file.exists():
        return {}
    content = file.read_bytes()
    if not content.endswith(b"\n"):
        content = content[: content.rfind(b"\n") + 1]
        file.write_bytes(content)
    known = {}
    for number, line in enumerate(content.decode("utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            known[entry["item"]] = entry["text"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{file}, line {number}: no answer of this cache: remove the line or the file") from None
    return known


def _key(prompt: str) -> str:
    return hashlib.blake2b(prompt.encode(), digest_size=16).hexdigest()


def _slug(name: str) -> str:
    """Return a file name that no other model's name shares."""
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)[:40]}-{_key(name)[:8]}"
