"""What every chat does alike: the cache, objects with one repair, and the bill."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import BaseModel

from fairtrial.chat.cache import ReplyCache
from fairtrial.chat.replies import Answer, ChatError, Prompt, Reply, Request, Usage, as_messages
from fairtrial.chat.structured import instructed, parse, repair_instruction, repaired
from fairtrial.errors import InputError
from fairtrial.options import checked_count, checked_number

Progress = Callable[[int, int], None]
"""Told how many prompts of how many are done."""


class Chat(ABC):
    """A language model that is asked; see :class:`~fairtrial.chat.OpenAIChat` and :class:`~fairtrial.chat.LocalChat`.

    A reply goes to the cache when it comes, so that a run that dies has paid for nothing twice. The key is the full
    request: the model, all messages (a schema asked for is part of them), and every sampling parameter.
    """

    def __init__(self, cache: str | Path | None) -> None:
        self._cache = ReplyCache(cache) if cache is not None else None
        self._usage = Usage()
        self._lock = Lock()

    @property
    def usage(self) -> Usage:
        """What has been asked so far, and what it cost."""
        return self._usage

    def complete(
        self,
        prompt: Prompt,
        *,
        schema: type[BaseModel] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
    ) -> Reply:
        """Return the reply to one prompt.

        Parameters and errors are those of :meth:`complete_many`.

        Raises
        ------
        ChatError
            No usable reply.
        """
        [reply] = self.complete_many([prompt], schema=schema, temperature=temperature, max_tokens=max_tokens, seed=seed)
        if isinstance(reply, ChatError):
            raise reply
        return reply

    def complete_many(
        self,
        prompts: Sequence[Prompt],
        *,
        schema: type[BaseModel] | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> list[Reply | ChatError]:
        """Return the reply to each prompt, in order, or why there is none.

        Parameters
        ----------
        prompts
            Each a text, or a conversation of messages ``{"role": ..., "content": ...}``.
        schema
            The pydantic model of the object wanted in each reply, found in fences and prose too. A reply without one
            is asked for again once, told its error.
        temperature
            0 = the likeliest reply, and equal prompts are asked once. Above 0 equal prompts of one call are samples
            of their own, each with its place in the cache.
        max_tokens
            Where a reply is cut.
        seed
            Of the sampling; ``None`` = as the server likes (0 for a local model). A further sample of an equal prompt
            has a seed derived from it.
        progress
            Called with (done, all) when a reply comes.

        Returns
        -------
        list of Reply or ChatError
            A prompt that fails costs the others nothing.

        Raises
        ------
        InputError
            A prompt or a number that cannot be.
        EndpointError
            The endpoint could not be reached when the first prompt had to be asked.
        """
        if isinstance(prompts, str):
            raise InputError("prompts is one text: give a list, or use complete")
        temperature, max_tokens = (
            checked_number(temperature, "temperature", least=0),
            checked_count(max_tokens, "max_tokens"),
        )
        if schema is not None and not (isinstance(schema, type) and issubclass(schema, BaseModel)):
            raise InputError(f"schema {schema!r} is no class of pydantic's BaseModel")
        conversations = [as_messages(prompt, i) for i, prompt in enumerate(prompts)]
        if schema is not None:
            conversations = [instructed(messages, schema) for messages in conversations]

        def ask(conversations: list[list[dict[str, Any]]], progress: Progress | None) -> list[Reply | ChatError]:
            return self._answers(_requests(conversations, temperature, max_tokens, seed), progress)

        replies = ask(conversations, progress)
        if schema is not None:
            replies = self._structured(replies, conversations, schema, lambda again: ask(again, None))
        self._count(Usage(failed=sum(isinstance(reply, ChatError) for reply in replies)))
        return replies

    @abstractmethod
    def probe(self) -> None:
        """Return at once if the model can be asked; costs no tokens.

        Raises
        ------
        EndpointError
            It cannot, in one line.
        """

    @abstractmethod
    def _identity(self) -> Mapping[str, Any]:
        """Return what of this chat decides a reply, as JSON."""

    @abstractmethod
    def _ask(self, requests: Sequence[Request]) -> Generator[tuple[Request, Answer | ChatError]]:
        """Ask different requests; :meth:`_keep` each answer when it comes, and yield it with its request."""

    def _keep(self, request: Request, answer: Answer) -> None:
        """Keep and count an answer: called the moment it comes, so that no interruption can lose it."""
        if self._cache:
            self._cache.put({**self._identity(), **_as_json(request)}, answer)
        self._count(Usage(1, 0, answer.prompt_tokens, answer.completion_tokens))

    def _answers(self, requests: list[Request], progress: Progress | None) -> list[Reply | ChatError]:
        """Return the reply to each request, of the cache or asked now."""
        times = Counter(requests)
        identity = self._identity() if self._cache else {}
        replies: dict[Request, Reply | ChatError] = {}
        done = 0

        def settle(request: Request, reply: Reply | ChatError) -> None:
            nonlocal done
            replies[request] = reply
            done += times[request]
            if progress is not None:
                progress(done, len(requests))

        for request in times:
            if self._cache and (answer := self._cache.get({**identity, **_as_json(request)})):
                self._count(Usage(cached=1))
                settle(request, _reply(answer, cached=True))
        missing = [request for request in times if request not in replies]
        with closing(self._ask(missing)) as outcomes:  # an interrupted call asks nothing more
            for request, outcome in outcomes:
                settle(request, outcome if isinstance(outcome, ChatError) else _reply(outcome, cached=False))
        return [replies[request] for request in requests]

    def _structured(
        self,
        replies: list[Reply | ChatError],
        conversations: list[list[dict[str, Any]]],
        schema: type[BaseModel],
        ask: Callable[[list[list[dict[str, Any]]]], list[Reply | ChatError]],
    ) -> list[Reply | ChatError]:
        """Parse the replies; ask once more for those that cannot be."""

        def again(broken: Mapping[int, ChatError]) -> list[Reply | ChatError]:
            questions = [
                [
                    *conversations[i],
                    {"role": "assistant", "content": error.raw},
                    {"role": "user", "content": repair_instruction(str(error))},
                ]
                for i, error in broken.items()
            ]
            seconds = [_parsed(reply, schema) for reply in ask(questions)]
            self._count(Usage(repaired=sum(isinstance(second, Reply) for second in seconds)))
            return [_joined(replies[i], second) for i, second in zip(broken, seconds, strict=True)]

        return repaired([_parsed(reply, schema) for reply in replies], schema, again)

    def _count(self, more: Usage) -> None:
        with self._lock:
            self._usage += more


def _requests(
    conversations: list[list[dict[str, Any]]], temperature: float, max_tokens: int, seed: int | None
) -> list[Request]:
    """Return one request a conversation; equal ones are draws of their own where replies are sampled."""
    drawn: Counter[str] = Counter()
    requests = []
    for messages in conversations:
        conversation = json.dumps(messages, sort_keys=True, ensure_ascii=False)
        requests.append(Request(conversation, temperature, max_tokens, seed, drawn[conversation]))
        drawn[conversation] += temperature > 0
    return requests


def _as_json(request: Request) -> dict[str, Any]:
    return {
        "messages": request.messages,
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "draw": request.draw,
    }


def _reply(answer: Answer, *, cached: bool) -> Reply:
    return Reply(answer.text, None, answer.prompt_tokens, answer.completion_tokens, cached, answer.finish)


def _parsed(reply: Reply | ChatError, schema: type[BaseModel]) -> Reply | ChatError:
    if isinstance(reply, ChatError):
        return reply
    try:
        return replace(reply, parsed=parse(reply.text, schema))
    except InputError as error:
        cut = "; it was cut at max_tokens" if reply.finish == "length" else ""
        return ChatError(f"{error}{cut}", reply.text)


def _joined(first: Reply | ChatError, second: Reply | ChatError) -> Reply | ChatError:
    """Return the second reply with the cost of both."""
    if not isinstance(first, Reply) or not isinstance(second, Reply):
        return second
    return replace(
        second,
        prompt_tokens=first.prompt_tokens + second.prompt_tokens,
        completion_tokens=first.completion_tokens + second.completion_tokens,
        cached=first.cached and second.cached,
    )
