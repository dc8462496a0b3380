"""Where a command may write: checked before any work, so that nothing computed is lost and nothing there is.

>>> check_file(Path("no/such/folder/report.json"))
Traceback (most recent call last):
    ...
fairtrial.errors.InputError: --out no/such/folder/report.json: there is no folder no/such/folder: make it, or give ...
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fairtrial.errors import InputError


def check_file(out: Path | None, *endings: str, inputs: Iterable[Path | None] = ()) -> None:
    """Refuse a file that cannot be written, or that is one of the ``inputs``.

    Parameters
    ----------
    out : None is nothing to check.
    endings : what its name may end in, each with its dot; anything if left out.
    inputs : files that the command reads.

    Raises
    ------
    InputError
        Naming the file and what to give.
    """
    if out is None:
        return
    if endings and out.suffix not in endings:
        raise InputError(f"--out {out}: give a name that ends in {' or '.join(endings)}")
    if not out.resolve().parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}: make it, or give another file")
    if out.is_dir():
        raise InputError(f"--out {out}: it is a folder: give another file")
    if out.resolve() in {path.resolve() for path in inputs if path is not None}:
        raise InputError(f"--out {out}: it is read here: give another file")
    if not os.access(out if out.exists() else out.resolve().parent, os.W_OK):
        raise InputError(f"--out {out}: it cannot be written: give another file")


def check_new_file(out: Path, *endings: str) -> None:
    """Refuse a file that is there already, besides what :func:`check_file` refuses.

    For what took a model to compute: a second run must not write over the first.
    """
    if out.exists():
        raise InputError(f"{out} exists: give another --out")
    check_file(out, *endings)


def check_new_folder(out: Path) -> None:
    """Refuse a folder that is neither new nor empty, or cannot be made and written.

    Raises
    ------
    InputError
        Naming the folder and what to give.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder: give another --out")
    there = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: nothing can be written in {there}: give another folder")
