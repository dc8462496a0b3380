"""Chat with an endpoint that speaks OpenAI's protocol: hosted, or a local vLLM, llama.cpp, Ollama, transformers server.

The protocol is the ``openai`` client's. What is ours is patience: which failures pass, how long to wait, and when to
stop asking. The client retries each request by itself; a thousand prompts to a server that has gone need one decision.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.chat.base import Chat
from fairtrial.chat.replies import Answer, ChatError, EndpointError, Request
from fairtrial.errors import InputError, MissingExtraError
from fairtrial.options import checked_count, checked_number

if TYPE_CHECKING:
    import openai

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds between attempts: doubled from the first to the longest
LONGEST_REQUESTED_WAIT = 300.0  # seconds of Retry-After beyond which we rather stop and say so
CONNECT_SECONDS = 10.0


class OpenAIChat(Chat):
    """Chat with any endpoint that speaks OpenAI's chat protocol.

    Requests run in ``concurrency`` threads. Lost connections, timeouts, broken bodies and the statuses 408, 409, 429
    and 5xx are tried again, after the wait that Retry-After asks for (of all threads), or after .5, 1, 2, ... 30 s.
    When a request has used up its attempts on an endpoint that answered nothing meanwhile, the rest of the call is not
    asked. Replies that came are in the cache; the next call asks what is missing.

    Parameters
    ----------
    model
        As the server names it.
    base_url
        Such as ``http://localhost:8000/v1``; ``None`` = the variable OPENAI_BASE_URL. There is no default: nothing is
        sent anywhere unasked.
    api_key
        ``None`` = the variable named by ``api_key_env``; a server without keys needs none.
    api_key_env
        The variable that holds the key, named in messages.
    cache
        A folder for replies; ``None`` = none are kept.
    concurrency
        Requests at a time.
    retries
        Further attempts at a request.
    timeout
        Seconds for one reply.

    Raises
    ------
    InputError
        No URL, or a number that cannot be.
    MissingExtraError
        The ``openai`` package is not installed.

    Examples
    --------
    >>> chat = OpenAIChat("qwen", base_url="http://localhost:8000/v1", cache="replies")       # doctest: +SKIP
    >>> chat.complete("Name a prime above 100.").text                                         # doctest: +SKIP
    '101'
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        cache: str | Path | None = None,
        concurrency: int = 8,
        retries: int = 5,
        timeout: float = 60.0,
    ) -> None:
        if not (base_url := base_url or os.environ.get("OPENAI_BASE_URL")):
            raise InputError(
                "no endpoint: give base_url= or set OPENAI_BASE_URL, such as http://localhost:8000/v1 for a local "
                "server or https://api.openai.com/v1"
            )
        if not base_url.startswith(("http://", "https://")):
            raise InputError(f"base_url {base_url!r} is no URL: it begins with http:// or https://")
        key = api_key or os.environ.get(api_key_env) or "none"
        if not (key.isascii() and key.isprintable()):
            raise InputError(f"the key (api_key=, or the variable {api_key_env}) has characters no header can carry")
        super().__init__(cache)
        self.model = model
        self.base_url = base_url.rstrip("/")
        self.api_key_env = api_key_env
        self.concurrency = checked_count(concurrency, "concurrency")
        self.retries = checked_count(retries, "retries", least=0)
        self.timeout = checked_number(timeout, "timeout", above=0)
        self._client = _client(self.base_url, key, self.timeout)
        self._limit = "max_tokens"  # newer models of OpenAI want another name
        self._answered = False  # whether the endpoint has ever given a reply

    def probe(self) -> None:
        """Return at once if the endpoint can be reached and takes the key; costs no tokens.

        Raises
        ------
        EndpointError
            One line with the URL, and the variable for the key.
        """
        import openai

        try:
            self._client.models.list()
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise self._refused(error) from None
        except openai.APIStatusError:
            return  # it is there; some servers list no models
        except openai.APIConnectionError as error:
            raise self._unreachable(_cause(error)) from None
        except (openai.OpenAIError, ValueError):  # a body that is not what the client expects
            return

    def _identity(self) -> Mapping[str, Any]:
        return {"base_url": self.base_url, "model": self.model}

    def _ask(self, requests: Sequence[Request]) -> Generator[tuple[Request, Answer | ChatError]]:
        if not requests:
            return
        if not self._answered:
            self.probe()
        call = _Call(self)
        pool = ThreadPoolExecutor(min(self.concurrency, len(requests)))
        try:
            futures = {pool.submit(call.answer, request): request for request in requests}
            for future in as_completed(futures):
                try:
                    outcome = future.result()
                except Exception as error:  # whatever went wrong with one request costs the others nothing
                    outcome = ChatError(f"{type(error).__name__}: {error}")
                yield futures[future], outcome
        finally:  # also where the caller is interrupted
            call.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _once(self, request: Request) -> Answer:
        """Ask once; errors are the client's, ``ValueError`` for a body that is no completion."""
        import openai

        sampling: dict[str, Any] = {"temperature": request.temperature, self._limit: request.max_tokens}
        if request.sampling_seed is not None:
            sampling["seed"] = request.sampling_seed
        messages: Any = request.messages
        try:
            completion: Any = self._client.chat.completions.create(model=self.model, messages=messages, **sampling)
        except openai.BadRequestError as error:
            if self._limit == "max_tokens" and "max_completion_tokens" in str(error):
                self._limit = "max_completion_tokens"
                return self._once(request)
            raise
        try:
            choice, usage = completion.choices[0], completion.usage
            text = choice.message.content or ""
            if not isinstance(text, str):
                raise TypeError
            answer = Answer(
                text.encode("utf-8", "replace").decode(),  # half of a surrogate pair cannot be kept
                int(usage.prompt_tokens or 0) if usage else 0,
                int(usage.completion_tokens or 0) if usage else 0,
                str(choice.finish_reason or "stop"),
            )
        except (AttributeError, IndexError, TypeError, ValueError):
            raise ValueError(f"the body is no chat completion: {str(completion)[:80]!r}") from None
        self._answered = True
        return answer

    def _unreachable(self, why: str) -> EndpointError:
        return EndpointError(
            f"{self.base_url} cannot be reached ({why}): start the server or correct the URL; a key, where it needs "
            f"one, goes into {self.api_key_env}"
        )

    def _refused(self, error: openai.APIStatusError) -> EndpointError:
        return EndpointError(
            f"{self.base_url} refuses the key ({error.status_code}: {_words(error)}): put a valid one into "
            f"{self.api_key_env}"
        )


class _Call:
    """The patience of one call of ``complete_many``, shared by its threads."""

    def __init__(self, chat: OpenAIChat) -> None:
        self.chat = chat
        self.stopped = threading.Event()
        self.gone: EndpointError | None = None  # why nothing more is asked
        self.last_answer = -1.0  # when one came
        self.resume_at = 0.0  # until then the server asked to be left alone
        self.jitter = random.Random()

    def answer(self, request: Request) -> Answer | ChatError:
        """Ask until there is an answer, the attempts are used up, or the endpoint is given up."""
        failing_since = 0.0
        attempt = 0
        while True:
            while (wait := self.resume_at - time.monotonic()) > 0 and not self.stopped.wait(wait):
                pass
            if self.stopped.is_set():
                return self.gone or ChatError("stopped before it was asked")
            outcome = self._attempt(request)
            if isinstance(outcome, Answer):
                self.chat._keep(request, outcome)
            if not isinstance(outcome, _Passing):
                return outcome
            failing_since = failing_since or time.monotonic()
            if attempt == self.chat.retries:
                return self._exhausted(outcome, failing_since)
            pause = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * self.jitter.uniform(0.75, 1.0)
            self.stopped.wait(pause if outcome.retry_after is None else outcome.retry_after)
            attempt += 1

    def _attempt(self, request: Request) -> Answer | ChatError | _Passing:
        import openai

        chat = self.chat
        try:
            answer = chat._once(request)
        except openai.APIStatusError as error:
            return self._status(error)
        except openai.APITimeoutError:
            return _Passing(f"no reply within {chat.timeout:g} s, timeout= sets that", silent=True)
        except openai.APIConnectionError as error:
            return _Passing(_cause(error), silent=True)
        except (openai.OpenAIError, ValueError) as error:
            return _Passing(_first_line(error))
        self.last_answer = time.monotonic()
        return answer

    def _status(self, error: openai.APIStatusError) -> ChatError | _Passing:
        """Judge a reply that is an error."""
        chat, status, words = self.chat, error.status_code, _words(error)
        if not chat._answered and status in (401, 403):
            return self._give_up(chat._refused(error))
        if not chat._answered and status == 404:
            hint = "" if chat.base_url.endswith("/v1") else "; most URLs end in /v1"
            lacks = f"{chat.base_url} has no model {chat.model!r} or no chat completions"
            return self._give_up(EndpointError(f"{lacks} (404: {words}){hint}"))
        if error.code == "insufficient_quota":
            return self._give_up(EndpointError(f"{chat.base_url}: the quota of the key is used up: {words}"))
        if status not in (408, 409, 429) and status < 500:
            return ChatError(f"{chat.base_url} refuses the request ({status}: {words})")
        retry_after = _retry_after(error.response.headers)
        if retry_after is not None:
            if retry_after > LONGEST_REQUESTED_WAIT:
                reason = f"{chat.base_url} asks to wait {retry_after:.0f} s ({status}: {words})"
                return self._give_up(EndpointError(f"{reason}: run again then, what came is kept"))
            if status == 429:  # the limit is of the key, not of this request
                self.resume_at = max(self.resume_at, time.monotonic() + retry_after)
        return _Passing(f"{status}: {words}", silent=status in (502, 503, 504), retry_after=retry_after)

    def _exhausted(self, failure: _Passing, failing_since: float) -> ChatError:
        attempts = f"{self.chat.retries + 1} attempts" if self.chat.retries else "1 attempt"
        if failure.silent and self.last_answer < failing_since:  # nobody has got an answer since
            return self._give_up(self.chat._unreachable(f"{failure.why}, {attempts}"))
        return ChatError(f"{self.chat.base_url} gave no reply in {attempts}: {failure.why}")

    def _give_up(self, error: EndpointError) -> EndpointError:
        self.gone = self.gone or error
        self.stopped.set()
        return self.gone


@dataclass(frozen=True, slots=True)
class _Passing:
    """A failure that may pass; ``silent`` where the server behind the endpoint did not answer at all."""

    why: str
    silent: bool = False
    retry_after: float | None = None


def _client(base_url: str, api_key: str, timeout: float) -> openai.OpenAI:
    try:
        import openai
    except ImportError:
        raise MissingExtraError("evaluation", "openai") from None
    patience = openai.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS))
    return openai.OpenAI(base_url=base_url, api_key=api_key, timeout=patience, max_retries=0)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that Retry-After asks for, given as such or as a date."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None


def _words(error: openai.APIStatusError) -> str:
    """Return what the server said, in one line."""
    body = error.body
    said = body.get("message") or body.get("detail") or body.get("error") if isinstance(body, dict) else None
    return " ".join(str(said or error.message).split())[:200]


def _cause(error: Exception) -> str:
    """Return the reason at the bottom of a lost connection."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return _first_line(error)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
