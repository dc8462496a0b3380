"""Stages: shared, cached steps of work that cells ask for, each computed once."""

from __future__ import annotations

import errno
import inspect
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from fairtrial.errors import FairtrialError, InputError
from fairtrial.trial.code import NoSourceError, code_of, digest
from fairtrial.trial.declare import Candidate, Part, Save
from fairtrial.trial.params import key_of
from fairtrial.trial.store import StageCost

if TYPE_CHECKING:
    from collections.abc import Iterator


Codes = dict[str, dict[str, dict[str, str]]]  # part -> candidate -> component -> digest or version


class Stages:
    """Called as ``stages(function, *arguments)`` from a measure or another stage; see :func:`declare.stage`.

    A stage's arguments are JSON values, candidates, cells or the parameters; together with the stage's code (and that
    of the modules its candidate uses) they are its key.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, str], package: str, boundary: frozenset[str]) -> None:
        self.folder = folder
        self.inputs = inputs
        self.package = package
        self.boundary = boundary
        self.costs: list[StageCost] = []  # of the stages computed since last taken
        self._memory: dict[str, Any] = {}
        self._kept: dict[str, Any] = {}
        self._codes: dict[tuple, str] = {}
        self._asks: list[list[str]] = [[]]  # keys asked for, by the cell and the stages being computed in it
        self._inner: list[float] = [0.0]  # seconds spent in stages, by the same
        self._notes: list[str] = []  # what the stage being computed wants its reader to know

    def __call__(self, function: Callable, *arguments: Any) -> Any:
        """Return ``function(*arguments)``, computed unless it was."""
        began = time.perf_counter()
        candidate = next((a for a in arguments if isinstance(a, Candidate)), None)
        key = self._key(function, candidate, arguments)
        self._asks[-1].append(key)
        try:
            for memory in (self._memory, self._kept):
                if key in memory:
                    return memory[key]
            save, keep = getattr(function, "__fairtrial_stage__", (None, False))
            compute = lambda: self._compute(key, function, candidate, arguments)  # noqa: E731
            value = self._saved(key, save, compute) if save else compute()
            (self._kept if keep else self._memory)[key] = value
            return value
        finally:
            self._inner[-1] += time.perf_counter() - began

    @contextmanager
    def cell(self) -> Iterator[Callable[[], tuple[float, list[str]]]]:
        """Measure one cell: yields a function that returns (its own seconds, the keys of its stages)."""
        self._asks, self._inner = [[]], [0.0]
        began = time.perf_counter()
        yield lambda: (time.perf_counter() - began - self._inner[0], sorted(set(self._asks[0])))

    def note(self, text: str) -> None:
        """Say something in the result's notes, from inside a stage; it is kept with what the stage cost."""
        self._notes.append(text)

    def take_costs(self) -> list[StageCost]:
        """Return the costs recorded since the last call."""
        costs, self.costs = self.costs, []
        return costs

    def end_group(self) -> None:
        """Free what lives only in memory, but for stages marked ``keep``."""
        self._memory.clear()

    def _key(self, function: Callable, candidate: Candidate | None, arguments: tuple) -> str:
        used = candidate.uses if candidate else ()
        which = (function, *(use if isinstance(use, str) else id(use) for use in used))
        if which not in self._codes:
            modules = modules_of(candidate, self.package) if candidate else ()
            callables = [use for use in used if callable(use)]
            self._codes[which] = json.dumps(code_of(function, *callables, uses=modules, boundary=self.boundary))
        name = f"{function.__module__}:{function.__qualname__}"
        try:
            encoded = json.dumps([self._encode(a) for a in arguments], sort_keys=True)
        except TypeError as error:
            raise InputError(
                f"stage {name}: its arguments must be JSON values, candidates or parameters: {error}"
            ) from None
        return digest(name, self._codes[which], encoded)

    def _encode(self, argument: Any) -> Any:
        if isinstance(argument, Candidate):
            return {"candidate": argument.label, "grid": argument.grid}
        if hasattr(argument, "model_dump"):
            return {"parameters": key_of(argument), "inputs": dict(self.inputs)}
        if isinstance(argument, np.generic):
            return argument.item()
        if isinstance(argument, Mapping):
            return {str(k): self._encode(v) for k, v in argument.items()}
        if isinstance(argument, list | tuple):
            return [self._encode(v) for v in argument]
        return argument

    def _compute(self, key: str, function: Callable, candidate: Candidate | None, arguments: tuple) -> Any:
        self._asks.append([])
        self._inner.append(0.0)
        outer_notes, self._notes = self._notes, []
        began = time.perf_counter()
        try:
            return function(self, *arguments) if _wants_stages(function) else function(*arguments)
        except FairtrialError as error:
            error.ends_run = error.ends_run or candidate is None
            raise
        finally:
            own = time.perf_counter() - began - self._inner.pop()
            label = candidate.label if candidate else None
            asks, note = sorted(set(self._asks.pop())), "; ".join(self._notes)
            self._notes = outer_notes
            self.costs.append(StageCost(key, function.__name__, label, own, asks, note))

    def _saved(self, key: str, save: Save, compute: Callable[[], Any]) -> Any:
        file = self.folder / f"{key}.{save}"
        if not file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / f"{key}.lock"):
                if not file.exists():
                    value = compute()
                    part = file.with_suffix(f".{os.getpid()}.part")
                    try:
                        _write(part, save, value)
                        os.replace(part, file)
                    finally:
                        part.unlink(missing_ok=True)
        return _read(file, save)


def modules_of(candidate: Candidate, package: str) -> tuple[str, ...]:
    """Return the modules that implement a candidate, absolute: a name without dots is a module of ``package``."""
    names = [name for name in candidate.uses if isinstance(name, str)]
    return tuple(name if name.startswith("fairtrial.") else f"{package}.{name}" for name in names)


def codes_of_parts(parts: tuple[Part, ...], package: str, version: str | None = None) -> tuple[Codes, list[str]]:
    """Return the code components of every part's candidates, and notes on what cannot be seen.

    ``package`` is where the modules that candidates use live; ``version`` is counted as a component, and stands for
    code that cannot be seen.
    """
    used = {name for part in parts for candidate in part.candidates for name in modules_of(candidate, package)}
    codes: Codes = {part.name: {} for part in parts}
    notes = []
    walked: dict[tuple, dict[str, str]] = {}  # candidates that share their modules share the walk
    for part, candidate in ((p, c) for p in parts for c in p.candidates):
        callables = [use for use in candidate.uses if callable(use)]
        modules = tuple(modules_of(candidate, package))
        key = (id(part.measure), *map(id, callables)), modules  # objects of the user need not be hashable
        try:
            if key not in walked:
                walked[key] = code_of(part.measure, *callables, uses=modules, boundary=used)
            code = walked[key]
        except NoSourceError as error:
            code = {} if version else {"unseen": uuid.uuid4().hex}
            if not version:
                notes.append(f"{error}; computed again at each run: give version= to keep results")
        codes[part.name][candidate.label] = code | ({"version": version} if version else {})
    return codes, notes


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that no room is left on the disk."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _wants_stages(function: Callable) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "stages"


def _write(file: Path, save: Save, value: Any) -> None:
    if save == "json":
        file.write_text(json.dumps(value))
    elif save == "npz":
        with file.open("wb") as stream:
            np.savez(stream, **value)
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in value.items()}, file)


def _read(file: Path, save: Save) -> Any:
    if save == "json":
        return json.loads(file.read_text())
    if save == "npz":
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    from safetensors.torch import load_file

    return load_file(file)
