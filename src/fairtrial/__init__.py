"""Give every method a fair trial.

``fairtrial.run("pruning")`` runs a trial of the catalogue, ``fairtrial.compare(...)`` one of the user's own candidates;
the methods live in the areas (``fairtrial.lm.pruning``, ...). Importing this loads none of numpy, pandas, scipy, torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairtrial.lazy import exports

if TYPE_CHECKING:
    from fairtrial.trial.adhoc import compare as compare
    from fairtrial.trial.declare import Curve as Curve
    from fairtrial.trial.declare import Items as Items
    from fairtrial.trial.declare import Metric as Metric
    from fairtrial.trial.result import Result as Result
    from fairtrial.trial.runner import run as run

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Curve": ".trial.declare",
        "Items": ".trial.declare",
        "Metric": ".trial.declare",
        "Result": ".trial.result",
        "compare": ".trial.adhoc",
        "run": ".trial.runner",
    },
)
