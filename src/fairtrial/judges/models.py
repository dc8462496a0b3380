"""Judges that are language models, and a cache for any judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairtrial.chat.base import Chat
from fairtrial.chat.cache import ReplyCache
from fairtrial.chat.endpoint import OpenAIChat
from fairtrial.chat.replies import Answer, ChatError, Usage
from fairtrial.judges.asking import Judge, ask_each


class ChatJudge:
    """A judge that is a chat.

    Attributes
    ----------
    chat : fairtrial.chat.Chat
        What is asked; ``chat.usage`` is the bill.
    """

    def __init__(self, chat: Chat, *, temperature: float = 0.0, max_tokens: int = 512, seed: int | None = None) -> None:
        self.chat = chat
        self._sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}

    def __call__(self, prompt: str) -> str:
        """Return the reply to one prompt."""
        return self.chat.complete(prompt, **self._sampling).text

    def many(self, prompts: Sequence[str]) -> list[str | ChatError]:
        """Return the reply to each prompt, in order, or why there is none."""
        replies = self.chat.complete_many(prompts, **self._sampling)
        return [reply if isinstance(reply, ChatError) else reply.text for reply in replies]

    @property
    def usage(self) -> Usage:
        """What has been asked so far, and what it cost."""
        return self.chat.usage


class OpenAIJudge(ChatJudge):
    """A model behind an endpoint that speaks OpenAI's protocol; see :class:`fairtrial.chat.OpenAIChat`.

    Parameters
    ----------
    base_url, model
        Such as ``"http://localhost:8000/v1", "qwen"``; ``base_url=None`` = the variable OPENAI_BASE_URL.
    api_key_env
        The variable that holds the key; a server without keys needs none.
    temperature
        0 for one vote; about .7 for several.
    cache, concurrency, retries, timeout
        As in ``OpenAIChat``.

    Examples
    --------
    >>> judge = OpenAIJudge("http://localhost:8000/v1", "qwen", cache="replies")          # doctest: +SKIP
    >>> judge.chat.probe()  # one clear line where the server is not there                # doctest: +SKIP
    """

    def __init__(
        self,
        base_url: str | None,
        model: str,
        api_key_env: str = "OPENAI_API_KEY",
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
        cache: str | Path | None = None,
        concurrency: int = 8,
        retries: int = 5,
        timeout: float = 60.0,
    ) -> None:
        chat = OpenAIChat(
            model,
            base_url=base_url,
            api_key_env=api_key_env,
            cache=cache,
            concurrency=concurrency,
            retries=retries,
            timeout=timeout,
        )
        super().__init__(chat, temperature=temperature, max_tokens=max_tokens, seed=seed)


class LocalJudge(ChatJudge):
    """A causal language model on this machine; see :class:`fairtrial.chat.LocalChat`.

    Parameters
    ----------
    model
        A folder, a GGUF file, or (model, tokenizer): of a pipeline, ``(pipe.model, pipe.tokenizer)``.
    device, dtype, cache, batch_size
        As in ``LocalChat``.
    temperature
        0 for one vote; about .7 for several.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> judge = LocalJudge(tiny_causal_lm(), max_tokens=4)
    >>> len(judge("w3 w5").split())
    4
    """

    def __init__(
        self,
        model: str | Path | tuple[Any, Any],
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        seed: int | None = None,
        device: Any = None,
        dtype: Any = None,
        cache: str | Path | None = None,
        batch_size: int = 8,
    ) -> None:
        from fairtrial.chat.local import LocalChat  # torch and transformers, which an endpoint does not need

        chat = LocalChat(model, device=device, dtype=dtype, cache=cache, batch_size=batch_size)
        super().__init__(chat, temperature=temperature, max_tokens=max_tokens, seed=seed)


class CachedJudge:
    """Any judge with a memory on disk, for callables that have none of their own.

    The judge is not part of the key: give each its own folder. Equal prompts of one call of ``many`` are votes of
    their own, each with its own reply, which a later run finds again in the same order.

    Parameters
    ----------
    judge
        Any callable from prompt to reply.
    path
        A folder, made if it is not there.

    Examples
    --------
    >>> import tempfile
    >>> calls = []
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     judge = CachedJudge(lambda prompt: calls.append(prompt) or "yes", folder)
    ...     judge("Is it?"), judge("Is it?"), len(calls)
    ('yes', 'yes', 1)
    """

    def __init__(self, judge: Judge, path: str | Path) -> None:
        self.judge = judge
        self._cache = ReplyCache(path)

    def __call__(self, prompt: str) -> str:
        """Return the reply to one prompt, asked once ever."""
        [reply] = self.many([prompt])
        if isinstance(reply, ChatError):
            raise reply
        return reply

    def many(self, prompts: Sequence[str]) -> list[str | ChatError]:
        """Return the reply to each prompt, in order; only those not known are asked."""
        drawn: Counter[str] = Counter()
        requests = []
        for prompt in prompts:
            requests.append({"prompt": prompt, "draw": drawn[prompt]})
            drawn[prompt] += 1
        known = [self._cache.get(request) for request in requests]
        replies: list[str | ChatError] = [answer.text if answer else "" for answer in known]
        missing = [i for i, answer in enumerate(known) if answer is None]
        for i, reply in zip(missing, ask_each(self.judge, [prompts[i] for i in missing]), strict=True):
            if not isinstance(reply, ChatError):
                self._cache.put(requests[i], Answer(reply))
            replies[i] = reply
        return replies
