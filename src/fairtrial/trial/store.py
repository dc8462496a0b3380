"""Where cells are kept: one SQLite file in the output folder, one transaction a cell.

Only the parent process of a run opens it. Two parents on one folder share the work by leases: a row that says which
process computes a cell, taken over when that process is gone.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from filelock import FileLock

from fairtrial.errors import FairtrialError, InputError
from fairtrial.trial.declare import Curve, Items

SCHEMA = 1
STALE_SECONDS = 60.0  # a lease whose process cannot be asked (another host) and whose heart has not beaten so long

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS cells (
    key TEXT PRIMARY KEY, part TEXT NOT NULL, candidate TEXT NOT NULL, factors TEXT NOT NULL, params TEXT NOT NULL,
    inputs TEXT NOT NULL, code TEXT NOT NULL, machine TEXT NOT NULL,
    status TEXT NOT NULL, reason TEXT, metrics TEXT, arrays BLOB, stages TEXT NOT NULL,
    seconds REAL, peak INTEGER, peak_sampled INTEGER, finished REAL NOT NULL);
CREATE INDEX IF NOT EXISTS by_cell ON cells (part, candidate, factors);
CREATE TABLE IF NOT EXISTS stages (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, candidate TEXT, seconds REAL NOT NULL, asks TEXT NOT NULL,
    note TEXT NOT NULL, finished REAL NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
    key TEXT PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, started REAL NOT NULL, heartbeat REAL NOT NULL);
"""


@dataclass
class Row:
    """A cell of one candidate: what it is, and what came of it."""

    key: str
    part: str
    candidate: str
    factors: dict[str, Any]
    params: dict[str, Any]
    inputs: dict[str, str]
    code: dict[str, str]
    machine: str = ""
    status: str = "planned"  # then "done" or "failed"
    reason: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)  # float | Items | Curve | None
    stages: list[str] = field(default_factory=list)  # keys of the stages it asked for
    seconds: float = 0.0  # its own, without its stages'
    peak: int | None = None  # bytes
    peak_sampled: bool = False
    finished: float = 0.0


@dataclass(frozen=True)
class StageCost:
    """What one stage took: seconds of its own, for a candidate or (None) shared, and the keys of those it asked for.

    ``note`` is what the stage wants the result's reader to know.
    """

    key: str
    name: str
    candidate: str | None
    seconds: float
    asks: list[str]
    note: str = ""


class Store:
    """The cells of one trial in ``folder/cells.sqlite``.

    Raises
    ------
    InputError : the folder cannot be written, belongs to another trial, or was written by a newer version.
    """

    def __init__(self, folder: Path, trial: str) -> None:
        self.folder = folder
        self.file = folder / "cells.sqlite"
        self.host = socket.gethostname()
        self.pid = os.getpid()
        self.started = psutil.Process().create_time()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise InputError(f"{folder} is a file: name an output folder with --out") from None
        except OSError as error:
            raise InputError(
                f"cannot make the output folder {folder}: {error.strerror}; choose another --out"
            ) from None
        if not os.access(folder, os.W_OK):
            raise InputError(f"no permission to write in {folder}: choose another output folder with --out")
        # Two processes that turn a new file to WAL at one moment lock each other out, whatever the timeout.
        with self._explained(), FileLock(folder / "cells.lock"):
            # autocommit: transactions are begun and ended in sight (see `_transaction`)
            self.db = sqlite3.connect(self.file, timeout=60, isolation_level=None)
            try:
                mode = self.db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
                if mode == "wal" and _on_network(folder):
                    self.db.execute("PRAGMA journal_mode=DELETE")
                self.db.execute("PRAGMA synchronous=NORMAL")
                self._own(trial)
            except BaseException:
                self.db.close()
                raise

    def _own(self, trial: str) -> None:
        with self._transaction():
            known = self.db.execute("SELECT name FROM sqlite_master WHERE name='meta'").fetchone()
            meta = dict(self.db.execute("SELECT name, value FROM meta")) if known else {}
            if int(meta.get("schema", SCHEMA)) > SCHEMA:
                raise InputError(f"{self.folder} was written by a newer Fairtrial: upgrade, or choose another --out")
            if meta.get("trial", trial) != trial:
                raise InputError(f"{self.folder} holds the trial {meta['trial']!r}: choose another --out for {trial!r}")
            for statement in filter(str.strip, _TABLES.split(";")):
                self.db.execute(statement)
            self.db.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", [("schema", SCHEMA), ("trial", trial)])

    def close(self) -> None:
        """Give up this process's leases and close the file."""
        with contextlib.suppress(sqlite3.Error, FairtrialError):
            self.release()
        self.db.close()

    # marks ----------------------------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        """Set a mark on the folder that nothing takes back."""
        with self._transaction():
            self.db.execute("INSERT OR IGNORE INTO meta VALUES (?, '1')", (name,))

    def marked(self, name: str) -> bool:
        """Return whether the mark was ever set."""
        return self.db.execute("SELECT 1 FROM meta WHERE name=?", (name,)).fetchone() is not None

    # cells ----------------------------------------------------------------------------------------------------------

    def save(self, row: Row) -> None:
        """Write one finished cell, its lease returned, in one transaction."""
        scalars, arrays = _pack(row.metrics)
        with self._transaction():
            self.db.execute(
                "INSERT OR REPLACE INTO cells VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    row.key, row.part, row.candidate, as_json(row.factors), as_json(row.params), as_json(row.inputs),
                    as_json(row.code), row.machine, row.status, row.reason, scalars, arrays, as_json(row.stages),
                    row.seconds, row.peak, row.peak_sampled, time.time(),
                ),
            )  # fmt: skip
            self.db.execute("DELETE FROM leases WHERE key=?", (row.key,))

    def save_stages(self, stages: Iterable[StageCost]) -> None:
        """Record what stages cost."""
        with self._transaction():
            self.db.executemany(
                "INSERT OR REPLACE INTO stages VALUES (?,?,?,?,?,?,?)",
                [(s.key, s.name, s.candidate, s.seconds, as_json(s.asks), s.note, time.time()) for s in stages],
            )

    def load(self, keys: Iterable[str]) -> dict[str, Row]:
        """Return the stored rows among ``keys``."""
        rows: dict[str, Row] = {}
        for found in self._select("SELECT * FROM cells WHERE key IN ({})", keys):
            key, part, candidate, factors, params, inputs, code, machine, status, reason = found[:10]
            metrics, arrays, stages, seconds, peak, sampled, finished = found[10:]
            rows[key] = Row(
                key, part, candidate, json.loads(factors), json.loads(params), json.loads(inputs), json.loads(code),
                machine, status, reason, _unpack(metrics, arrays), json.loads(stages), seconds, peak, bool(sampled),
                finished,
            )  # fmt: skip
        return rows

    def states(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the status of the stored rows among ``keys``, without their values."""
        return dict(self._select("SELECT key, status FROM cells WHERE key IN ({})", keys))

    def stage_costs(self, keys: Iterable[str]) -> list[StageCost]:
        """Return the costs of the stages among ``keys`` and of those they asked for, each once."""
        found: dict[str, StageCost] = {}
        wanted = set(keys)
        while wanted:
            query = "SELECT key, name, candidate, seconds, asks, note FROM stages WHERE key IN ({})"
            for key, name, candidate, seconds, asks, note in self._select(query, wanted):
                found[key] = StageCost(key, name, candidate, seconds, json.loads(asks), note)
            wanted = {key for cost in found.values() for key in cost.asks} - found.keys() - wanted
        return list(found.values())

    def changes(self, row: Row) -> list[str]:
        """Return in words what differs from the last stored row of the same cell, or nothing if there is none."""
        found = self.db.execute(
            "SELECT params, inputs, code FROM cells WHERE part=? AND candidate=? AND factors=? "
            "ORDER BY finished DESC LIMIT 1",
            (row.part, row.candidate, as_json(row.factors)),
        ).fetchone()
        if found is None:
            return []
        params, inputs, code = map(json.loads, found)
        return [
            *(f"{name} changed" for name in _different(params, json.loads(as_json(row.params)))),
            *(f"the content of {name} changed" for name in _different(inputs, row.inputs)),
            *(f"{name} changed" for name in _different(code, row.code)),
        ]

    def forget_lost(self, keys: Iterable[str]) -> None:
        """Forget the failed rows among ``keys``, so that they are measured again."""
        with self._transaction():
            self.db.executemany("DELETE FROM cells WHERE key=? AND status='failed'", [(key,) for key in keys])

    # leases ---------------------------------------------------------------------------------------------------------

    def claim(self, keys: list[str]) -> list[str]:
        """Take the cells among ``keys`` that are neither finished nor another living process's; return those taken."""
        now = time.time()
        with self._transaction():
            finished = self.states(keys)
            held = {
                key: (host, pid, started, beat)
                for key, host, pid, started, beat in self._select("SELECT * FROM leases WHERE key IN ({})", keys)
            }
            taken = [
                key for key in keys if key not in finished and (key not in held or not self._alive(*held[key], now))
            ]
            self.db.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?,?,?,?,?)",
                [(key, self.host, self.pid, self.started, now) for key in taken],
            )
        return taken

    def beat(self) -> None:
        """Show that this process lives."""
        with self._transaction():
            self.db.execute("UPDATE leases SET heartbeat=? WHERE host=? AND pid=?", (time.time(), self.host, self.pid))

    def release(self, keys: Iterable[str] | None = None) -> None:
        """Give leases back: those of ``keys``, or all of this process."""
        with self._transaction():
            if keys is None:
                self.db.execute("DELETE FROM leases WHERE host=? AND pid=?", (self.host, self.pid))
            else:
                self.db.executemany("DELETE FROM leases WHERE key=?", [(key,) for key in keys])

    def _alive(self, host: str, pid: int, started: float, beat: float, now: float) -> bool:
        if host != self.host:
            return now - beat < STALE_SECONDS
        if pid == self.pid and abs(started - self.started) < 1:
            return False  # ours from an earlier run in this process
        try:
            return abs(psutil.Process(pid).create_time() - started) < 1
        except psutil.Error:
            return False

    # SQL ------------------------------------------------------------------------------------------------------------

    def _select(self, query: str, keys: Iterable[str]) -> Iterator[tuple]:
        keys = list(keys)
        for start in range(0, len(keys), 500):
            chunk = keys[start : start + 500]
            yield from self.db.execute(query.format(",".join("?" * len(chunk))), chunk)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explained():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise InputError(explain(error, self.folder)) from error


def explain(error: Exception, folder: Path) -> str:
    """Return in one line what an error of the disk or of SQLite means for the user."""
    text = str(error).lower()
    again = "finished cells are kept: run the same command again"
    if "full" in text or "no space left" in text or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk that holds {folder} is full: free some space; {again}"
    if "readonly" in text or "read-only" in text or "unable to open" in text:
        return f"no permission to write in {folder}: choose another output folder with --out"
    if "not a database" in text or "malformed" in text:
        return f"{folder / 'cells.sqlite'} is not a Fairtrial store, or is damaged: choose another output folder"
    return f"cannot write to {folder}: {error}; {again}"


def _on_network(folder: Path) -> bool:
    """Whether ``folder`` lies on a network file system, where SQLite's WAL does not work."""
    mounts = [p for p in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(p.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda p: len(p.mountpoint)).fstype.lower() in {
        "nfs", "nfs4", "cifs", "smbfs", "smb3", "afs", "lustre", "glusterfs", "fuse.sshfs", "9p", "afpfs",
    }  # fmt: skip


def as_json(value: Any) -> str:
    """Return the one spelling of a value that keys and columns are made of."""
    return json.dumps(value, sort_keys=True, default=str)


def _different(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def _pack(metrics: Mapping[str, Any]) -> tuple[str, bytes | None]:
    """Return the scalars as JSON, and Items and Curves as one npz (no pickle) whose numbered arrays the JSON names."""
    scalars: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}
    for name, value in metrics.items():
        if isinstance(value, Items | Curve):
            scalars[name] = {"kind": type(value).__name__}
            for column, data in value._asdict().items():
                if data is not None:
                    scalars[name][column] = str(len(arrays))
                    arrays[scalars[name][column]] = np.asarray(data)
        else:
            scalars[name] = value
    if not arrays:
        return json.dumps(scalars), None
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    return json.dumps(scalars), buffer.getvalue()


def _unpack(scalars: str | None, blob: bytes | None) -> dict[str, Any]:
    metrics = json.loads(scalars) if scalars else {}
    if blob is None:
        return metrics
    with np.load(io.BytesIO(blob), allow_pickle=False) as arrays:
        for name, value in metrics.items():
            if isinstance(value, dict):
                kind: Any = {"Items": Items, "Curve": Curve}[value["kind"]]
                metrics[name] = kind(**{column: arrays[value[column]] for column in kind._fields if column in value})
    return metrics
