"""Objects out of replies: how they are asked for, found in prose, checked, and asked for once more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fairtrial.chat.replies import ChatError
from fairtrial.errors import InputError

Schema = TypeVar("Schema", bound=BaseModel)
Found = TypeVar("Found")


def instruction(schema: type[BaseModel]) -> str:
    """Return the sentence that asks for an object of ``schema``."""
    return (
        "Reply with one JSON value that matches this JSON schema, and with nothing else:\n"
        f"{json.dumps(schema.model_json_schema(), ensure_ascii=False)}"
    )


def repair_instruction(error: str) -> str:
    """Return the sentence that asks for a reply again and says what was wrong with it."""
    return f"That reply cannot be used: {error}. Reply with the corrected JSON value, and with nothing else."


def instructed(messages: Sequence[dict[str, Any]], schema: type[BaseModel]) -> list[dict[str, Any]]:
    """Return a conversation that ends with the request for an object of ``schema``, in the last message."""
    *before, last = messages
    if not isinstance(last["content"], str):  # parts of text and images
        return [*before, {**last, "content": [*last["content"], {"type": "text", "text": instruction(schema)}]}]
    return [*before, {**last, "content": f"{last['content']}\n\n{instruction(schema)}"}]


def parse(text: str, schema: type[Schema]) -> Schema:
    r"""Return the object of ``schema`` in a reply: alone, in a fence, or amid prose.

    Of several the last counts that matches: models think before they answer.

    Raises
    ------
    InputError
        There is none; the message says in one line what is wrong with the last.

    Examples
    --------
    >>> class Grade(BaseModel):
    ...     score: int
    >>> parse('Sure! The grade is:\n```json\n{"score": 4}\n```', Grade)
    Grade(score=4)
    >>> parse('{"score": "high"}', Grade)
    Traceback (most recent call last):
    fairtrial.errors.InputError: score: Input should be a valid integer, unable to parse string as an integer
    """
    problem = ""
    for value in reversed(list(_json_values(text))):
        if isinstance(value, str):
            try:
                return schema.model_validate_json(value)
            except ValidationError as error:
                reason = _one_line(error)
        else:
            reason = f"it is not JSON: {value.msg} at character {value.pos}"
        problem = problem or reason
    raise InputError(problem or "there is no JSON value in it")


def repaired(
    firsts: Sequence[Found | ChatError],
    schema: type[BaseModel],
    ask: Callable[[Mapping[int, ChatError]], Sequence[Found | ChatError]],
) -> list[Found | ChatError]:
    """Return what replies held, after one more question for each that held something else.

    Parameters
    ----------
    firsts
        What each reply held, or its error; an error with a ``raw`` text is one to ask about again.
    schema
        What was asked for.
    ask
        Asks about the places and errors given, all at once, and returns what the new replies held, in that order.
    """
    broken = {i: one for i, one in enumerate(firsts) if isinstance(one, ChatError) and one.raw is not None}
    settled = list(firsts)
    for (i, first), second in zip(broken.items(), ask(broken) if broken else (), strict=True):
        if not isinstance(second, ChatError):
            settled[i] = second
        elif second.raw is None:  # the second question got no answer
            settled[i] = type(second)(str(second), first.raw)
        else:
            settled[i] = ChatError(f"the reply matches {schema.__name__} at neither attempt: {second}", second.raw)
    return settled


def _json_values(text: str) -> Iterator[str | json.JSONDecodeError]:
    """Yield the outermost JSON objects and arrays of a text, and the error of each that begins and does not end well.

    What an unreadable value held before its error is not taken for a value.
    """
    end, decoder = 0, json.JSONDecoder()
    while start := re.compile(r"[{\[]").search(text, end):
        try:
            _, end = decoder.raw_decode(text, start.start())
            yield text[start.start() : end]
        except json.JSONDecodeError as error:
            yield error
            end = max(error.pos, start.end())
        except RecursionError:  # thousands of brackets in a row: a model that repeats itself
            return


def _one_line(error: ValidationError, most: int = 3) -> str:
    """Return the first problems of a validation, each with its place."""
    problems = [
        f"{'.'.join(map(str, problem['loc'])) or 'the value'}: {problem['msg']}"
        for problem in error.errors(include_url=False, include_input=False)
    ]
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return "; ".join(problems[:most]) + more
