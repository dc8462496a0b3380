"""Ask a judge: for an object with one repair, for a preference in both orders, for several votes.

A judge is any callable from a prompt to a reply. One that is also a :class:`BatchJudge` is asked many prompts at a
time: all functions here put everything they know to ask into one batch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from pydantic import BaseModel

from fairtrial.chat.replies import ChatError, EndpointError
from fairtrial.chat.structured import instruction, parse, repair_instruction, repaired
from fairtrial.errors import InputError
from fairtrial.options import checked_count

Judge: TypeAlias = Callable[[str], str]
"""Maps a prompt to a reply; a prompt without a usable reply raises :class:`~fairtrial.chat.ChatError`."""

Schema = TypeVar("Schema", bound=BaseModel)


@runtime_checkable
class BatchJudge(Protocol):
    """A judge that is asked many prompts at a time."""

    def __call__(self, prompt: str) -> str:
        """Return the reply to one prompt."""
        ...

    def many(self, prompts: Sequence[str]) -> list[str | ChatError]:
        """Return the reply to each prompt, in order; equal prompts are votes of their own where replies are sampled."""
        ...


def ask(judge: Judge, prompts: Sequence[str]) -> list[str | ChatError]:
    """Return a judge's reply to each prompt, in order, or why there is none.

    >>> ask(str.upper, ["a", "b"])
    ['A', 'B']
    """
    return list(ask_each(judge, prompts))


def ask_each(judge: Judge, prompts: Sequence[str]) -> Iterator[str | ChatError]:
    """Yield what :func:`ask` returns, each reply when it comes where the judge is asked one by one."""
    if isinstance(judge, BatchJudge):
        yield from judge.many(prompts)
        return
    gone: EndpointError | None = None
    for prompt in prompts:
        try:
            yield gone or judge(prompt)
        except ChatError as error:
            gone = error if isinstance(error, EndpointError) else None  # nothing that follows would be answered
            yield error


def rate(judge: Judge, prompt: str, schema: type[Schema]) -> Schema:
    """Return a judge's rating as an object, asked for again once where the first reply has none.

    Parameters
    ----------
    judge
        Any callable from prompt to reply.
    prompt
        The item and the rubric; the schema is added.
    schema
        The pydantic model of the rating; its fields' descriptions and bounds are shown to the judge and checked.

    Raises
    ------
    ChatError
        No such object at either attempt, with the last reply in it, or no reply at all.

    Examples
    --------
    >>> class Grade(BaseModel):
    ...     score: int
    >>> rate(lambda prompt: 'I would say {"score": 4}.', "How clear is this proof, from 1 to 5? ...", Grade)
    Grade(score=4)
    """
    return _raised(rate_many(judge, [prompt], schema)[0])


def rate_many(judge: Judge, prompts: Sequence[str], schema: type[Schema]) -> list[Schema | ChatError]:
    """Return a rating for each prompt, in order, or why there is none; see :func:`rate`."""
    asked = [f"{prompt}\n\n{instruction(schema)}" for prompt in prompts]

    def again(broken: Mapping[int, ChatError]) -> list[Schema | ChatError]:
        repairs = [
            f"{asked[i]}\n\nYou replied:\n{error.raw}\n\n{repair_instruction(str(error))}"
            for i, error in broken.items()
        ]
        return [_parsed(reply, schema) for reply in ask(judge, repairs)]

    return repaired([_parsed(reply, schema) for reply in ask(judge, asked)], schema, again)


@dataclass(frozen=True, slots=True)
class Votes:
    """What several ratings of one item say together.

    Attributes
    ----------
    value : float, str, bool or None
        The median of numbers, the most frequent of anything else; ``None`` without a vote or a most frequent one.
    cast : tuple
        The votes that came.
    lost : int
        Votes without a usable reply.
    """

    value: Any
    cast: tuple[Any, ...]
    lost: int

    @property
    def consistency(self) -> float | None:
        """Share of pairs of votes that agree; ``None`` for fewer than two."""
        n = len(self.cast)
        return None if n < 2 else sum(k * (k - 1) for k in Counter(self.cast).values()) / (n * (n - 1))


def votes(judge: Judge, prompt: str, schema: type[BaseModel], field: str, *, n: int = 3) -> Votes:
    """Rate one item ``n`` times and take the middle.

    More than one vote makes sense for a judge that samples (a temperature of .7, say); one is enough at 0.

    >>> class Grade(BaseModel):
    ...     score: int
    >>> replies = iter(['{"score": 4}', '{"score": 2}', '{"score": 4}'])
    >>> votes(lambda prompt: next(replies), "From 1 to 5?", Grade, "score").value
    4
    """
    return votes_many(judge, [prompt], schema, field, n=n)[0]


def votes_many(judge: Judge, prompts: Sequence[str], schema: type[BaseModel], field: str, *, n: int = 3) -> list[Votes]:
    """Return the votes on each prompt, in order; see :func:`votes`.

    Raises
    ------
    InputError
        ``schema`` has no such field, or no vote is asked for.
    """
    if field not in schema.model_fields:
        raise InputError(f"field {field!r} is none of {schema.__name__}, which has {', '.join(schema.model_fields)}")
    n = checked_count(n, "votes")
    ratings = rate_many(judge, [prompt for prompt in prompts for _ in range(n)], schema)
    together = []
    for at in range(0, len(ratings), n):
        cast = tuple(getattr(one, field) for one in ratings[at : at + n] if not isinstance(one, ChatError))
        together.append(Votes(_middle(cast), cast, n - len(cast)))
    return together


def _middle(cast: Sequence[Any]) -> Any:
    if not cast:
        return None
    if all(isinstance(vote, int | float) and not isinstance(vote, bool) for vote in cast):
        return statistics.median(cast)
    (first, most), *others = Counter(cast).most_common(2)
    return None if others and others[0][1] == most else first


Side: TypeAlias = Literal["first", "second", "tie"]


class Choice(BaseModel):
    """Which of two texts is better."""

    better: Literal["A", "B", "tie"]


@dataclass(frozen=True, slots=True)
class Preference:
    """Which of two texts a judge prefers.

    Attributes
    ----------
    shown_first, shown_second : {"first", "second", "tie"}
        What the judge said with the first text shown first, and shown second.
    """

    shown_first: Side
    shown_second: Side

    @property
    def winner(self) -> Side:
        """What both orders say, or "tie" where they do not say the same."""
        return self.shown_first if self.consistent else "tie"

    @property
    def consistent(self) -> bool:
        """Whether the order made no difference."""
        return self.shown_first == self.shown_second


def prefer(judge: Judge, question: str, first: str, second: str, *, n: int = 1) -> Preference:
    """Ask which of two texts is better, in both orders; an answer that depends on the order is a tie.

    Parameters
    ----------
    question
        What the texts are compared by, such as "Which proof is easier to follow?".
    n
        Votes in each order; the most frequent counts, "tie" where there is none.

    Raises
    ------
    ChatError
        An order without a usable reply.

    Examples
    --------
    >>> def finds_long(prompt):  # prefers the text that says so
    ...     return '{"better": "A"}' if prompt.index("long text") < prompt.index("Text B") else '{"better": "B"}'
    >>> prefer(finds_long, "Which is longer?", "a long text", "short").winner
    'first'
    >>> prefer(lambda prompt: '{"better": "A"}', "Which is longer?", "a long text", "short").winner  # the one on top
    'tie'
    """
    return _raised(prefer_many(judge, question, [(first, second)], n=n)[0])


def prefer_many(
    judge: Judge, question: str, pairs: Sequence[tuple[str, str]], *, n: int = 1
) -> list[Preference | ChatError]:
    """Return the preference of each pair, in order, or why there is none; see :func:`prefer`."""
    prompts = [
        f"{question}\n\nText A:\n{a}\n\nText B:\n{b}\n\nSay which is better, or that they are equal."
        for first, second in pairs
        for a, b in ((first, second), (second, first))
    ]
    polls = votes_many(judge, prompts, Choice, "better", n=n)
    preferences: list[Preference | ChatError] = []
    for forward, backward in zip(polls[::2], polls[1::2], strict=True):
        if not forward.cast or not backward.cast:
            preferences.append(ChatError("the judge gave no usable preference in one order or both"))
            continue
        shown_first: dict[str | None, Side] = {"A": "first", "B": "second"}
        shown_second: dict[str | None, Side] = {"A": "second", "B": "first"}
        preferences.append(Preference(shown_first.get(forward.value, "tie"), shown_second.get(backward.value, "tie")))
    return preferences


def _parsed(reply: str | ChatError, schema: type[Schema]) -> Schema | ChatError:
    if isinstance(reply, ChatError):
        return reply
    try:
        return parse(reply, schema)
    except InputError as error:
        return ChatError(str(error), reply)


Outcome = TypeVar("Outcome")


def _raised(outcome: Outcome | ChatError) -> Outcome:
    if isinstance(outcome, ChatError):
        raise outcome
    return outcome
