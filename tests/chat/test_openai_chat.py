from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
from email.utils import formatdate

import pytest
from pydantic import BaseModel, Field

from fairtrial.chat import ChatError, EndpointError, OpenAIChat, Reply, Usage
from fairtrial.errors import FairtrialError, InputError


class Grade(BaseModel):
    score: int = Field(ge=1, le=5)


@pytest.fixture
def chat(server, tmp_path):
    return OpenAIChat("m", base_url=server.url, cache=tmp_path / "replies")


def echo(send):
    return lambda body, number: send(body["messages"][-1]["content"].upper())


# Happy path


def test_a_reply_has_text_and_tokens(server, chat):
    reply = chat.complete("hello", temperature=0.5, max_tokens=9, seed=4)
    assert (reply.text, reply.parsed, reply.prompt_tokens, reply.completion_tokens, reply.cached) == (
        "fine",
        None,
        7,
        3,
        False,
    )
    [body] = server.bodies
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 4,
    }


def test_many_prompts_keep_their_order(server, chat, send):
    server.script = lambda body, number: send(body["messages"][-1]["content"].upper(), delay=0.02 * (number % 3))
    done = []
    replies = chat.complete_many([f"p{i}" for i in range(12)], progress=lambda *count: done.append(count))
    assert [reply.text for reply in replies] == [f"P{i}" for i in range(12)]
    assert done == [(i + 1, 12) for i in range(12)]
    assert chat.usage == Usage(requests=12, prompt_tokens=84, completion_tokens=36)


def test_a_conversation_is_sent_as_it_is(server, chat):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat.complete(messages)
    assert server.bodies[0]["messages"] == messages
    assert "seed" not in server.bodies[0]


def test_no_more_requests_at_a_time_than_asked(server, send):
    server.script = lambda body, number: send(delay=0.03)
    OpenAIChat("m", base_url=server.url, concurrency=3).complete_many([str(i) for i in range(12)])
    assert server.most_busy == 3


def test_models_that_want_another_name_for_max_tokens_get_it(server, chat, send):
    def script(body, number):
        if "max_tokens" in body:
            return send("Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", status=400)
        return send()

    server.script = script
    assert [chat.complete(prompt, max_tokens=9).text for prompt in "ab"] == ["fine", "fine"]
    assert ["max_tokens" in body for body in server.bodies] == [True, False, False]


# Keys and addresses


def test_key_and_address_come_from_the_usual_variables(server, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("OTHER_KEY", "other")
    OpenAIChat("m").complete("a")
    OpenAIChat("m", api_key="given").complete("a")
    OpenAIChat("m", api_key_env="OTHER_KEY").complete("a")
    assert server.keys == ["Bearer secret", "Bearer given", "Bearer other"]


def test_nothing_is_asked_without_an_address():
    with pytest.raises(InputError, match="OPENAI_BASE_URL"):
        OpenAIChat("m")
    with pytest.raises(InputError, match="http://"):
        OpenAIChat("m", base_url="localhost:8000")


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_an_unreachable_endpoint_is_one_line_before_any_work():
    url = f"http://127.0.0.1:{closed_port()}/v1"
    chat = OpenAIChat("m", base_url=url, api_key_env="MY_KEY")
    began = time.monotonic()
    for ask in (chat.probe, lambda: chat.complete("a"), lambda: chat.complete_many(["a"] * 100)):
        with pytest.raises(FairtrialError) as caught:
            ask()
        message = str(caught.value)
        assert url in message
        assert "MY_KEY" in message
        assert "refused" in message
        assert "\n" not in message
    assert time.monotonic() - began < 2


def test_a_refused_key_names_its_variable(server, chat, send):
    server.script = lambda body, number: send("no such key", status=401)
    replies = OpenAIChat("m", base_url=server.url, concurrency=2).complete_many([str(i) for i in range(50)])
    assert all(isinstance(reply, EndpointError) and "OPENAI_API_KEY" in str(reply) for reply in replies)
    assert len(server.bodies) <= 2  # the rest was not asked


def test_an_unknown_model_is_named(server, chat, send):
    server.script = lambda body, number: send("no model", status=404)
    with pytest.raises(EndpointError, match=r"no model 'm'.*404: no model"):
        chat.complete("a")


def test_a_probe_sends_no_prompt(server, chat):
    chat.probe()
    assert server.bodies == []


# Failures that pass


def test_retry_after_is_waited_for(server, chat, send):
    waits = {0: send(status=429, headers={"Retry-After": "0.3"})}
    server.script = lambda body, number: waits.get(number, send())
    began = time.monotonic()
    assert chat.complete("a").text == "fine"
    assert time.monotonic() - began >= 0.3
    assert len(server.bodies) == 2


def test_retry_after_may_be_a_date(server, chat, send):
    later = send(status=503, headers={"Retry-After": formatdate(time.time() + 1.5, usegmt=True)})
    server.script = lambda body, number: later if number == 0 else send()
    began = time.monotonic()
    assert chat.complete("a").text == "fine"
    assert time.monotonic() - began >= 0.4  # a date has whole seconds


def test_a_rate_limit_holds_all_threads_back(server, send):
    times = []

    def script(body, number):
        times.append(time.monotonic())
        return send(status=429, headers={"Retry-After": "0.3"}) if number == 0 else send(delay=0.05)

    server.script = script
    OpenAIChat("m", base_url=server.url, concurrency=2).complete_many([str(i) for i in range(6)])
    assert sum(0.1 < at - times[0] < 0.29 for at in times) == 0


def test_a_wait_beyond_patience_ends_the_call(server, chat, send):
    server.script = lambda body, number: send("quota", status=429, headers={"Retry-After": "86400"})
    with pytest.raises(EndpointError, match="asks to wait 86400 s"):
        chat.complete("a")
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "trouble",
    [
        {"status": 500},
        {"status": 503, "text": "loading"},
        {"reset": True},
        {"body": "{broken"},
        {"body": "{}"},
        {"body": '{"choices": []}'},
        {"body": "<html>", "headers": {"Content-Type": "text/html"}},
    ],
    ids=["500", "503", "reset", "broken", "empty", "no-choice", "html"],
)
def test_what_passes_is_tried_again(server, chat, send, trouble):
    server.script = lambda body, number: send(**trouble) if number < 2 else send()
    assert chat.complete("a").text == "fine"
    assert len(server.bodies) == 3
    assert chat.usage == Usage(requests=1, prompt_tokens=7, completion_tokens=3)


def test_a_slow_reply_is_a_timeout(server, send):
    server.script = lambda body, number: send(delay=0.3)
    with pytest.raises(ChatError, match=r"no reply within 0\.1 s"):
        OpenAIChat("m", base_url=server.url, timeout=0.1, retries=1).complete("a")
    assert len(server.bodies) == 2


def test_a_bad_prompt_costs_the_others_nothing(server, chat, send):
    def script(body, number):
        prompt = body["messages"][-1]["content"]
        return (
            send("too long", status=400) if prompt == "2" else send("always", status=500) if prompt == "3" else send()
        )

    server.script = script
    replies = chat.complete_many(list("012345"))
    assert [isinstance(reply, ChatError) for reply in replies] == [False, False, True, True, False, False]
    assert "400: too long" in str(replies[2])
    assert "6 attempts: 500: always" in str(replies[3])
    assert chat.usage == Usage(requests=4, prompt_tokens=28, completion_tokens=12, failed=2)
    assert server.prompts.count("2") == 1  # not tried again


# A server that dies


def test_a_second_run_asks_only_what_is_missing(start_server, send, tmp_path):
    prompts = [f"p{i}" for i in range(30)]
    with start_server() as server:
        url, port = server.url, server.server_port
        server.script = lambda body, number: send(reset=number >= 10)
        first = OpenAIChat("m", base_url=url, cache=tmp_path, concurrency=3, retries=2)
        replies = first.complete_many(prompts)
        came = {prompt for prompt, reply in zip(prompts, replies, strict=True) if not isinstance(reply, ChatError)}
        assert len(came) == 10
        assert len(server.bodies) <= 10 + 3 * 3 * 2  # the endpoint was given up, the other prompts not asked
    with start_server(port) as server:
        server.script = echo(send)
        again = OpenAIChat("m", base_url=url, cache=tmp_path).complete_many(prompts)
        assert all(not isinstance(reply, ChatError) for reply in again)
        assert sorted(server.prompts) == sorted(set(prompts) - came)
        assert [reply.cached for reply in again] == [prompt in came for prompt in prompts]
    # The server is gone again: nothing is missing, nothing is asked.
    third = OpenAIChat("m", base_url=url, cache=tmp_path)
    assert [reply.text for reply in third.complete_many(prompts)] == [reply.text for reply in again]
    assert third.usage == Usage(cached=30)


def test_a_server_that_is_gone_is_not_asked_a_thousand_times(start_server, send):
    with start_server() as server:
        chat = OpenAIChat("m", base_url=server.url, concurrency=4, retries=3)
        chat.complete("a")
    began = time.monotonic()
    replies = chat.complete_many([str(i) for i in range(1000)])
    assert all(isinstance(reply, EndpointError) for reply in replies)
    assert time.monotonic() - began < 3
    assert chat.usage.failed == 1000


def test_an_interrupted_call_asks_nothing_more_and_keeps_what_came(server, send, tmp_path):
    server.script = lambda body, number: send(delay=0.02)
    chat = OpenAIChat("m", base_url=server.url, cache=tmp_path, concurrency=2)

    def interrupt(done: int, _: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    prompts = [str(i) for i in range(40)]
    with pytest.raises(KeyboardInterrupt) as held:  # while its traceback holds every frame
        chat.complete_many(prompts, progress=interrupt)
    time.sleep(0.1)
    asked = len(server.bodies)
    assert asked < 12
    time.sleep(0.1)
    assert len(server.bodies) == asked
    assert held.tb is not None
    assert sum(reply.cached for reply in chat.complete_many(prompts)) == asked  # those under way were kept too


# The cache

OTHER_PROCESS = """
import sys
from fairtrial.chat import OpenAIChat
chat = OpenAIChat("m", base_url=sys.argv[1], cache=sys.argv[2])
print(chat.complete("hello").text, chat.usage.requests, chat.usage.cached)
"""


def test_another_process_finds_the_reply(server, chat, tmp_path):
    chat.complete("hello")
    script = [sys.executable, "-c", OTHER_PROCESS, server.url, str(tmp_path / "replies")]
    assert subprocess.run(script, capture_output=True, text=True, check=True).stdout.split() == ["fine", "0", "1"]
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.1}, {"max_tokens": 5}, {"seed": 1}, {"prompt": "other"}, {"model": "n"}, {"schema": Grade}],
)
def test_every_part_of_a_request_is_in_its_key(server, send, tmp_path, change):
    server.script = lambda body, number: send('{"score": 3}')
    OpenAIChat("m", base_url=server.url, cache=tmp_path).complete("hello")
    prompt, model = change.pop("prompt", "hello"), change.pop("model", "m")
    reply = OpenAIChat(model, base_url=server.url, cache=tmp_path).complete(prompt, **change)
    assert not reply.cached
    assert OpenAIChat(model, base_url=server.url, cache=tmp_path).complete(prompt, **change).cached


def test_the_address_is_in_the_key(start_server, tmp_path):
    with start_server() as one, start_server() as other:
        OpenAIChat("m", base_url=one.url, cache=tmp_path).complete("a")
        assert OpenAIChat("m", base_url=f"{one.url}/", cache=tmp_path).complete("a").cached
        assert not OpenAIChat("m", base_url=other.url, cache=tmp_path).complete("a").cached


def test_a_damaged_file_is_asked_again(server, chat, tmp_path):
    chat.complete("hello")
    [file] = (tmp_path / "replies").rglob("*.json")
    file.write_text(file.read_text()[:40])
    assert not chat.complete("hello").cached
    assert chat.complete("hello").cached
    assert json.loads(file.read_text())["request"]["messages"] == [{"role": "user", "content": "hello"}]


def test_a_cache_that_cannot_be_written_is_refused(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be kept"):
        OpenAIChat("m", base_url=server.url, cache=tmp_path / "file")


def test_equal_prompts_are_asked_once_at_temperature_zero_and_each_above(server, send, tmp_path):
    server.script = lambda body, number: send(str(number))
    chat = OpenAIChat("m", base_url=server.url, cache=tmp_path, concurrency=1)
    assert [reply.text for reply in chat.complete_many(["a", "a", "a"])] == ["0", "0", "0"]
    samples = [reply.text for reply in chat.complete_many(["a", "a", "a"], temperature=0.7, seed=5)]
    assert sorted(samples) == ["1", "2", "3"]
    assert len({body.get("seed") for body in server.bodies[1:]}) == 3
    assert [reply.text for reply in chat.complete_many(["a", "a", "a"], temperature=0.7, seed=5)] == samples
    assert len(server.bodies) == 4


# Objects


def test_an_object_is_found_in_prose_and_fences(server, chat, send):
    server.script = lambda body, number: send('Of course.\n```json\n{"score": 4}\n```\nAnything else?')
    reply = chat.complete("rate", schema=Grade)
    assert reply.parsed == Grade(score=4)
    assert "JSON schema" in server.prompts[0]
    assert '"score"' in server.prompts[0]


def test_a_reply_against_the_schema_is_repaired_once(server, chat, send):
    server.script = lambda body, number: send('{"score": 9}' if number == 0 else '{"score": 5}')
    reply = chat.complete("rate", schema=Grade)
    assert reply.parsed == Grade(score=5)
    assert (reply.prompt_tokens, reply.completion_tokens) == (14, 6)  # both attempts
    roles = [message["role"] for message in server.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert "score: Input should be less than or equal to 5" in server.prompts[1]
    assert chat.usage == Usage(requests=2, prompt_tokens=14, completion_tokens=6, repaired=1)
    again = chat.complete("rate", schema=Grade)
    assert again.parsed == Grade(score=5)
    assert again.cached
    assert len(server.bodies) == 2


def test_a_reply_never_repaired_is_an_error_with_the_reply(server, chat, send):
    def script(body, number):
        return send("I cannot." if "bad" in body["messages"][0]["content"] else '{"score": 1}')

    server.script = script
    good, bad, fine = chat.complete_many(["good", "bad", "fine"], schema=Grade)
    assert (good.parsed, fine.parsed) == (Grade(score=1), Grade(score=1))
    assert isinstance(bad, ChatError)
    assert bad.raw == "I cannot."
    assert "there is no JSON value in it" in str(bad)
    assert len(server.bodies) == 4  # one more for the bad one, exactly
    assert chat.usage.failed == 1
    with pytest.raises(ChatError, match="at neither attempt"):
        chat.complete("bad", schema=Grade)


def test_a_repair_without_an_answer_keeps_the_first_reply(server, chat, send):
    server.script = lambda body, number: send("no" if number == 0 else "gone", status=200 if number == 0 else 400)
    [reply] = chat.complete_many(["rate"], schema=Grade)
    assert isinstance(reply, ChatError)
    assert reply.raw == "no"
    assert "400" in str(reply)


# Bad input


@pytest.mark.parametrize(
    "bad",
    [[{"role": "user"}], [], ["text"], None, 3, b"text", "half \ud800", [{"role": "user", "content": {1, 2}}]],
)
def test_a_prompt_that_is_none_is_named(chat, bad):
    with pytest.raises(InputError, match="prompt 1"):
        chat.complete_many(["fine", bad])


def test_numbers_that_cannot_be_are_refused(server, chat):
    for settings in ({"temperature": -1}, {"temperature": math.inf}, {"max_tokens": 0}, {"schema": dict}):
        with pytest.raises(InputError):
            chat.complete("a", **settings)
    for settings in (
        {"concurrency": 0},
        {"retries": -1},
        {"timeout": 0},
        {"timeout": math.inf},
        {"api_key": "schlüssel"},
    ):
        with pytest.raises(InputError):
            OpenAIChat("m", base_url=server.url, **settings)
    with pytest.raises(InputError, match="one text"):
        chat.complete_many("text")


def test_what_goes_wrong_with_one_request_costs_the_others_nothing(chat, monkeypatch):
    once = OpenAIChat._once

    def sometimes(self, request):
        if "bad" in request.conversation:
            raise RuntimeError("no such luck")
        return once(self, request)

    monkeypatch.setattr(OpenAIChat, "_once", sometimes)
    good, bad = chat.complete_many(["fine", "bad"])
    assert isinstance(good, Reply)
    assert isinstance(bad, ChatError)
    assert "RuntimeError: no such luck" in str(bad)


def test_errors_cross_processes():
    import pickle

    error = pickle.loads(pickle.dumps(ChatError("bad reply", "raw")))
    assert (str(error), error.raw) == ("bad reply", "raw")
