"""Declare a trial, run it, read its verdicts.

``fairtrial.trial.declare`` has the words a trial is written in; :func:`run` runs one by name; :func:`compare` runs the
user's own candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairtrial.trial.adhoc import compare as compare
    from fairtrial.trial.result import Result as Result
    from fairtrial.trial.runner import run as run

_HOMES = {
    "compare": "fairtrial.trial.adhoc",
    "run": "fairtrial.trial.runner",
    "Result": "fairtrial.trial.result",
}
__all__ = ["Result", "compare", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
