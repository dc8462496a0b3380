"""A server that speaks OpenAI's chat protocol and does what a test tells it to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import fairtrial.chat.endpoint


@dataclass
class Send:
    """What the server does with one request."""

    text: str = "fine"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None  # instead of a completion
    delay: float = 0.0
    reset: bool = False  # hang up without a word


Script = Callable[[dict[str, Any], int], Send]
"""From the request's body and its number, counted from 0, to what is done."""


class Server(ThreadingHTTPServer):
    """Counts what it is asked."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.script: Script = lambda body, number: Send()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @property
    def prompts(self) -> list[str]:
        """The last message of every request, as they came."""
        return [body["messages"][-1]["content"] for body in self.bodies]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that hang up."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.answer(200, json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}), {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
        try:
            send = self.server.script(body, number)
            time.sleep(send.delay)
        finally:
            with self.server.lock:
                self.server.busy -= 1
        if send.reset:
            self.close_connection = True
            self.connection.close()
            return
        if send.body is not None:
            self.answer(send.status, send.body, send.headers)
        elif send.status != 200:
            self.answer(send.status, json.dumps({"error": {"message": send.text}}), send.headers)
        else:
            completion = {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": send.text}}
                ],
                "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
            }
            self.answer(200, json.dumps(completion), send.headers)

    def answer(self, status: int, text: str, headers: dict[str, str]) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(port: int = 0) -> Iterator[Server]:
    server = Server(port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        for connection in server.connections:  # as when its process dies
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one


@pytest.fixture
def start_server() -> Callable:
    return serving


@pytest.fixture
def send() -> type[Send]:
    return Send


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait little between attempts; no variable of the shell decides a test."""
    monkeypatch.setattr(fairtrial.chat.endpoint, "FIRST_WAIT", 0.01)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
