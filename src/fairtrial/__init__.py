"""Give every method a fair trial.

``fairtrial.run("pruning")`` runs a trial of the catalogue, ``fairtrial.compare(...)`` one of the user's own candidates;
the methods live in the areas (``fairtrial.lm.pruning``, ...). Importing this loads none of numpy, pandas, scipy, torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairtrial.trial.adhoc import compare as compare
    from fairtrial.trial.declare import Curve as Curve
    from fairtrial.trial.declare import Items as Items
    from fairtrial.trial.declare import Metric as Metric
    from fairtrial.trial.result import Result as Result
    from fairtrial.trial.runner import run as run

__version__ = "0.1.0"

_HOMES = {
    "Curve": "fairtrial.trial.declare",
    "Items": "fairtrial.trial.declare",
    "Metric": "fairtrial.trial.declare",
    "Result": "fairtrial.trial.result",
    "compare": "fairtrial.trial.adhoc",
    "run": "fairtrial.trial.runner",
}
__all__ = ["Curve", "Items", "Metric", "Result", "__version__", "compare", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
