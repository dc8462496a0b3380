"""What is asked and what comes back: requests, replies, what they cost, and how they fail."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from fairtrial.errors import FairtrialError, InputError
from fairtrial.seeds import derive

Message: TypeAlias = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant", "content": ...}``."""

Prompt: TypeAlias = str | Sequence[Message]
"""What the user says, or a conversation so far."""


class ChatError(FairtrialError):
    """No usable reply to one prompt.

    Attributes
    ----------
    raw : str or None
        What the model said, where it said something: a reply that does not match its schema.
    """

    def __init__(self, message: str, raw: str | None = None) -> None:
        super().__init__(message)
        self.raw = raw

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.raw)


class EndpointError(ChatError):
    """The endpoint cannot be asked at all: not reached, gone, or it does not know the key or the model."""

    ends_run = True  # no cell of a trial can do without it


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply.

    Attributes
    ----------
    text : str
        As the model wrote it; after a repair, the repaired reply.
    parsed : BaseModel or None
        The object in it, of the schema asked for.
    prompt_tokens, completion_tokens : int
        As the server counts them, a repair included; 0 where it does not say.
    cached : bool
        Whether nothing had to be asked for it.
    finish : str
        "stop", or "length" where ``max_tokens`` cut it; other words are the server's.
    """

    text: str
    parsed: Any = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: bool = False
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a chat has cost so far.

    Attributes
    ----------
    requests : int
        Replies that were paid for; ``cached`` ones were not.
    prompt_tokens, completion_tokens : int
        Of the replies paid for.
    repaired : int
        Replies that matched their schema at the second attempt only.
    failed : int
        Prompts left without a usable reply.
    """

    requests: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    repaired: int = 0
    failed: int = 0

    def __add__(self, other: Usage) -> Usage:
        mine, theirs = asdict(self), asdict(other)
        return Usage(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said to one request; see :class:`Reply`."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = "stop"


@dataclass(frozen=True, slots=True)
class Request:
    """One question to a model with all that decides its answer.

    ``draw`` counts equal questions of one call that samples: the second of two is a sample of its own.
    """

    conversation: str  # the messages as JSON, so that requests can be compared and hashed
    temperature: float
    max_tokens: int
    seed: int | None
    draw: int = 0

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        return json.loads(self.conversation)

    @property
    def sampling_seed(self) -> int | None:
        """The seed to sample with: the caller's, and one derived from it for every further draw."""
        if self.seed is None or self.draw == 0:
            return self.seed
        return derive(self.seed, "draw", self.draw) >> 32  # 31 bits: what every server takes


def as_messages(prompt: Prompt, index: int = 0) -> list[dict[str, Any]]:
    """Return the prompt as a conversation.

    Raises
    ------
    InputError
        It is neither text nor messages with a role and a content; the message names the prompt, counted from 0.

    Examples
    --------
    >>> as_messages("Is 7 prime?")
    [{'role': 'user', 'content': 'Is 7 prime?'}]
    """
    told: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if (
        not isinstance(told, Sequence)
        or not told
        or any(not isinstance(one, Mapping) or not {"role", "content"} <= one.keys() for one in told)
    ):
        raise InputError(f"prompt {index}: give text, or messages that each have a role and a content")
    messages = [dict(message) for message in told]
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InputError(f"prompt {index} cannot be sent: {error}") from None
    return messages
