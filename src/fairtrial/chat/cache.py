"""Replies on disk, one file each."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fairtrial.chat.replies import Answer
from fairtrial.errors import InputError


class ReplyCache:
    """A folder of replies, keyed by everything that decides them.

    A reply is written beside its place and renamed, so that killed and concurrent processes leave whole files only; a
    file damaged by other means counts as absent. Every file also holds its request, for people.

    Parameters
    ----------
    folder
        Made if it is not there.

    Raises
    ------
    InputError
        The folder cannot be written.

    Examples
    --------
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = ReplyCache(folder)
    ...     cache.put({"model": "m", "prompt": "2 + 2?"}, Answer("4"))
    ...     cache.get({"prompt": "2 + 2?", "model": "m"}).text
    '4'
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: replies cannot be kept there: {error.strerror}") from None
        if not os.access(self.folder, os.W_OK):
            raise InputError(f"{self.folder}: replies cannot be kept there: it is not writable")

    def get(self, request: Mapping[str, Any]) -> Answer | None:
        """Return the answer to a request of JSON values, or ``None``."""
        try:
            return Answer(**json.loads(self._place(request).read_text(encoding="utf-8"))["answer"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def put(self, request: Mapping[str, Any], answer: Answer) -> None:
        """Keep an answer."""
        place = self._place(request)
        place.parent.mkdir(exist_ok=True)
        handle, work = tempfile.mkstemp(dir=place.parent, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"request": request, "answer": asdict(answer)}, file, ensure_ascii=False, indent=1)
        os.replace(work, place)

    def _place(self, request: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest}.json"  # 256 folders: large ones are slow
