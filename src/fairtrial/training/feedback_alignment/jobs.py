"""The backward pass as independent jobs, one a block, how they are run, and what they took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fairtrial.errors import InputError

EXECUTORS = ("serial", "threads", "streams")


@dataclass(frozen=True)
class BlockTiming:
    """What one block's job took in the last backward pass.

    ``surrogate`` seconds of its surrogate's forward pass and feedback, ``block`` of the backward pass of the block,
    ``fit`` of the surrogate's own step; ``memory`` the bytes allocated on the device after the job (0 on a CPU).
    """

    surrogate: float
    block: float
    fit: float
    memory: int = 0

    @property
    def total(self) -> float:
        """Seconds of the whole job."""
        return self.surrogate + self.block + self.fit


@dataclass(frozen=True)
class BackwardTiming:
    """Seconds of the last backward pass.

    ``error`` of the output error, ``head`` of the head's own backward pass, ``per_block`` of each job; ``serial`` is
    their sum, ``critical_path`` the error and the longest job: what as many workers as jobs would take. On one device
    nothing of that is saved unless the jobs really run side by side. ``backpropagation`` is that of an ordinary
    backward pass when ``alignment`` last made one.
    """

    error: float
    head: float
    per_block: Mapping[str, BlockTiming]
    backpropagation: float | None = None

    @property
    def serial(self) -> float:
        """The sum of all jobs."""
        return self.error + self.head + sum(block.total for block in self.per_block.values())

    @property
    def critical_path(self) -> float:
        """The error and then the longest job."""
        return self.error + max([self.head, *(block.total for block in self.per_block.values())])


class Stopwatch:
    """Splits a stretch of work into laps; device work by events, without waiting for it until ``laps`` is read.

    >>> watch = Stopwatch(torch.device("cpu")); watch.lap(); watch.lap()
    >>> len(watch.laps())
    2
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[float | torch.cuda.Event] = []
        self.memory = 0
        self.lap()

    def lap(self) -> None:
        """End a lap, on the current stream."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
            self.memory = torch.cuda.memory_allocated(self.device)
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        """Return the seconds of each lap."""
        if self.device.type != "cuda":
            return [b - a for a, b in zip(self._marks, self._marks[1:], strict=False)]  # type: ignore[operator]
        self._marks[-1].synchronize()  # type: ignore[union-attr]
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) / 1000 for a, b in pairs]  # type: ignore[union-attr,arg-type]


class Serial:
    """Runs jobs one after another; each frees its graph before the next begins."""

    def run(self, jobs: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run all jobs."""
        for _, job in jobs:
            job()

    @contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Surround a block's forward pass."""
        yield

    def close(self) -> None:
        """Let workers go."""


class Threads(Serial):
    """Runs jobs in threads of this process: autograd releases the interpreter while it computes."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Run all jobs and wait for them; the first failure is raised."""
        self._pool = self._pool or ThreadPoolExecutor(max(1, len(jobs)), thread_name_prefix="feedback")
        for future in [self._pool.submit(job) for _, job in jobs]:
            future.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


class Streams(Serial):
    """Runs each block on a CUDA stream of its own, forward too: autograd repeats a forward's stream in its backward."""

    def __init__(self) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}

    def stream(self, name: str) -> torch.cuda.Stream:
        """Return the block's stream."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream()
        return self._streams[name]

    @contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Run a block's forward pass on its stream, after what the current one has queued."""
        current, stream = torch.cuda.current_stream(), self.stream(name)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            yield
        current.wait_stream(stream)

    def run(self, jobs: Sequence[tuple[str, Callable[[], None]]]) -> None:
        """Queue all jobs; the current stream goes on when they are done, the host at once."""
        current = torch.cuda.current_stream()
        for name, job in jobs:
            stream = self.stream(name)
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                job()
        for name, _ in jobs:
            current.wait_stream(self.stream(name))


def executor_of(name: str, device: torch.device) -> Serial:
    """Return what runs the jobs.

    Raises
    ------
    InputError
        If there is no such executor, or streams are asked for without a CUDA device.
    """
    if name not in EXECUTORS:
        raise InputError(f"executor={name!r}: one of {', '.join(map(repr, EXECUTORS))}")
    if name == "streams" and device.type != "cuda":
        raise InputError("executor='streams' needs a model on a CUDA device: move it there first, or use 'threads'")
    return {"serial": Serial, "threads": Threads, "streams": Streams}[name]()
