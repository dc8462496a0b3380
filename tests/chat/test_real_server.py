"""A real server of the protocol, started as its users start it, killed in the middle of a run and started again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel

import fairtrial.chat.endpoint
from fairtrial.causal_lm.loading import load
from fairtrial.chat import ChatError, EndpointError, LocalChat, OpenAIChat
from fairtrial.data.samples import sample_path
from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import MissingSampleError

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def transformers_serve(folder: Path, port: int) -> Iterator[tuple[subprocess.Popen, str]]:
    """The server of transformers on a folder, and its URL."""
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(600):
            try:
                OpenAIChat(str(folder), base_url=url).probe()
                break
            except EndpointError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.2)
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    model, tokenizer = tiny_causal_lm()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def smollm2_folder(tmp_path_factory):
    try:
        gguf = sample_path("smollm2-135m")
    except MissingSampleError:
        pytest.skip("sample smollm2-135m")
    folder = tmp_path_factory.mktemp("served") / "smollm2"
    for part in load(gguf):
        part.save_pretrained(folder)
    return folder


def test_a_served_model_says_what_it_says_here(tiny_folder):
    prompts = [f"w{i} w{i + 5}" for i in range(2, 8)]
    here = LocalChat(tiny_folder).complete_many(prompts, max_tokens=8)
    with transformers_serve(tiny_folder, free_port()) as (_, url):
        there = OpenAIChat(str(tiny_folder), base_url=url, concurrency=2).complete_many(prompts, max_tokens=8)
    assert [reply.text for reply in there] == [reply.text for reply in here]
    assert [(reply.prompt_tokens, reply.completion_tokens) for reply in there] == [
        (reply.prompt_tokens, reply.completion_tokens) for reply in here
    ]


class City(BaseModel):
    name: str


def test_a_server_killed_in_the_middle_loses_nothing(smollm2_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(fairtrial.chat.endpoint, "FIRST_WAIT", 0.1)
    prompts = [f"Name a city in {country}." for country in ("France", "Spain", "Italy", "Norway", "Peru", "Japan")]
    port, model = free_port(), str(smollm2_folder)
    with transformers_serve(smollm2_folder, port) as (process, url):
        first = OpenAIChat(model, base_url=url, cache=tmp_path, concurrency=1, retries=2)

        def kill(done: int, _: int) -> None:
            if done == 3:
                process.kill()

        replies = first.complete_many(prompts, max_tokens=12, progress=kill)
    assert [isinstance(reply, ChatError) for reply in replies] == [False] * 3 + [True] * 3
    assert replies[0].text == LocalChat(smollm2_folder).complete(prompts[0], max_tokens=12).text
    with transformers_serve(smollm2_folder, port) as (_, url):
        second = OpenAIChat(model, base_url=url, cache=tmp_path)
        again = second.complete_many(prompts, max_tokens=12)
        assert [reply.cached for reply in again] == [True] * 3 + [False] * 3
        assert second.usage.requests == 3
        # A small model seldom writes the object asked for: whatever it does, no reply is lost or raised.
        cities = second.complete_many(prompts, schema=City, max_tokens=24)
        assert all(isinstance(reply, ChatError) or isinstance(reply.parsed, City) for reply in cities)
    third = OpenAIChat(model, base_url=url, cache=tmp_path)
    assert [reply.text for reply in third.complete_many(prompts, max_tokens=12)] == [reply.text for reply in again]
