"""Where workers live: processes of this machine, or actors of a Ray cluster, behind one small protocol."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fairtrial.errors import MissingExtraError
from fairtrial.trial.store import Row
from fairtrial.trial.worker import Answer, Opening, Session, Task, receive, send

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


class WorkerDiedError(Exception):
    """A worker is gone; its message says why."""


class Worker(Protocol):
    """A process that answers."""

    def ask(self, request: Opening | Task, limit: float | None) -> Answer:
        """Send a request and wait for its answer, at most ``limit`` seconds."""

    def stop(self) -> None:
        """End the process."""


class LocalWorker:
    """A worker process of this machine, with ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fairtrial.trial.worker"],  # -P: the opening brings the parent's path
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("FAIRTRIAL_DEBUG") else subprocess.DEVNULL,
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))},
            start_new_session=True,  # Ctrl-C is the parent's to hear
        )

    def ask(self, request: Opening | Task, limit: float | None) -> Answer:
        """Send a request and wait for its answer; raise WorkerDiedError if the process ends or takes too long."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._kill()

        timer = threading.Timer(limit, expire) if limit else None
        if timer:
            timer.daemon = True
            timer.start()
        try:
            send(self.process.stdin, request)  # type: ignore[arg-type]
            return receive(self.process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError):
            code = self.process.wait()
            if expired.is_set():
                return Answer("expired", f"took longer than the time limit of {limit:g} s")
            raise WorkerDiedError(death(code)) from None
        finally:
            if timer:
                timer.cancel()

    def stop(self) -> None:
        """End the process at once."""
        self._kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _kill(self) -> None:
        """Kill the worker with the processes that its measures started (data loaders)."""
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg") and self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()


def death(code: int) -> str:
    """Return in words how a process ended."""
    if code == -signal.SIGKILL:
        return "its worker was killed (signal 9), most often for lack of memory"
    if code < 0:
        return f"its worker died of signal {-code} ({signal.Signals(-code).name})"
    return f"its worker exited with status {code}"


class RayWorker:
    """The same session in an actor of a Ray cluster."""

    def __init__(self, threads: int) -> None:
        ray = _ray()

        @ray.remote(num_cpus=threads, max_restarts=0, runtime_env={
            "env_vars": dict.fromkeys(THREAD_VARIABLES, str(threads)),
        })  # fmt: skip
        class Actor:
            def open(self, opening: Opening) -> Answer:
                self.session = Session(opening)
                return Answer("done")

            def run(self, task: Task) -> Answer:
                return self.session.run(task)

        self.ray = ray
        self.actor: Any = Actor.remote()  # type: ignore[attr-defined]

    def ask(self, request: Opening | Task, limit: float | None) -> Answer:
        """Send a request and wait for its answer; raise WorkerDiedError if the actor ends."""
        method = self.actor.open if isinstance(request, Opening) else self.actor.run
        try:
            return self.ray.get(method.remote(request), timeout=limit)
        except self.ray.exceptions.GetTimeoutError:
            self.stop()
            return Answer("expired", f"took longer than the time limit of {limit:g} s")
        except self.ray.exceptions.RayActorError:
            raise WorkerDiedError("its Ray worker died, most often for lack of memory") from None
        except self.ray.exceptions.RayTaskError as error:
            return Answer("fatal", f"a worker could not start: {error.cause}")

    def stop(self) -> None:
        """End the actor."""
        self.ray.kill(self.actor)


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
    return ray


ENGINES: dict[str, Callable[[int], Worker]] = {"local": LocalWorker, "ray": RayWorker}


@dataclass(frozen=True)
class Finished:
    """What a pool reports: a row with its answer, or (no row) that a worker wants its next group."""

    worker: int
    row: Row | None = None
    answer: Answer | None = None


class Pool:
    """``jobs`` threads, each driving a worker through groups of cells.

    A worker is started when its first group comes and again whenever it died; a cell whose worker died is tried once
    more, then it is lost.
    """

    def __init__(self, engine: str, jobs: int, threads: int, opening: Opening, limit: float | None) -> None:
        self.start = ENGINES[engine]
        self.threads = threads
        self.opening = opening
        self.limit = limit
        self.reports: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self.inboxes: list[queue.SimpleQueue[list[Row] | None]] = [queue.SimpleQueue() for _ in range(jobs)]
        self.workers: list[Worker | None] = [None] * jobs
        self.closed = False
        for index in range(jobs):
            threading.Thread(target=self._serve, args=(index,), daemon=True).start()

    def give(self, worker: int, group: list[Row]) -> None:
        """Hand a worker its next group."""
        self.inboxes[worker].put(group)

    def close(self) -> None:
        """End all workers at once."""
        self.closed = True
        for inbox in self.inboxes:
            inbox.put(None)
        for worker in self.workers:
            if worker is not None:
                worker.stop()

    def _serve(self, index: int) -> None:
        try:
            while (group := self.inboxes[index].get()) is not None:
                for row in group:
                    answer = self._measure(index, Task(row.part, row.candidate, row.factors, row is group[-1]))
                    if self.closed:
                        return
                    self.reports.put(Finished(index, row, answer))
                    if answer.status == "fatal":
                        return
                self.reports.put(Finished(index))
        finally:
            self._drop(index)  # also a worker that was just starting when the pool was closed

    def _measure(self, index: int, task: Task) -> Answer:
        reason = ""
        for _attempt in range(2):
            try:
                worker = self.workers[index]
                if worker is None:
                    worker = self.workers[index] = self.start(self.threads)
                    opened = worker.ask(self.opening, None)
                    if opened.status != "done":
                        return opened
                answer = worker.ask(task, self.limit)
                if answer.status == "expired":  # the worker was ended to stop the cell
                    self._drop(index)
                    return replace(answer, status="failed")
                return answer
            except WorkerDiedError as error:
                self._drop(index)
                if self.closed:
                    break
                reason = str(error)
            except Exception as error:  # a worker that cannot be started must not leave the run waiting
                return Answer("fatal", f"a worker could not start: {type(error).__name__}: {error}")
        return Answer("failed", f"{reason} (twice)")

    def _drop(self, index: int) -> None:
        worker, self.workers[index] = self.workers[index], None
        if worker is not None:
            worker.stop()
