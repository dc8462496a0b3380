"""Declare a trial, run it, read its verdicts.

``fairtrial.trial.declare`` has the words a trial is written in; :func:`run` runs one by name; :func:`compare` runs the
user's own candidates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.lazy import exports

if TYPE_CHECKING:
    from fairtrial.trial.adhoc import compare as compare
    from fairtrial.trial.result import Result as Result
    from fairtrial.trial.runner import run as run

__getattr__, __dir__, __all__ = exports(__name__, {"Result": ".result", "compare": ".adhoc", "run": ".runner"})
