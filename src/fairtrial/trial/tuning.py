"""Choosing a candidate's tuning point, inside a stage such as ``stages(tune, candidate, setting)``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fairtrial.errors import FairtrialError
from fairtrial.trial.declare import Candidate
from fairtrial.trial.stages import Stages


def best_point(stages: Stages, candidate: Candidate, losses: Sequence[float]) -> Mapping[str, Any]:
    """Return the point of the candidate's grid with the lowest loss; the first of several.

    ``losses`` (n,), one a point in order, are measured on seeds and data that no cell uses; ``inf`` is a point that
    diverged. Where a number of the point lies at the end of its values the result says so: a better one may lie beyond.
    """
    grid = candidate.grid or ()
    if len(losses) != len(grid) or not all(math.isfinite(loss) or loss == math.inf for loss in losses):
        raise FairtrialError(
            f"tuning {candidate.label}: {len(losses)} losses for {len(grid)} points, each a number or inf"
        )
    if min(losses) == math.inf:
        raise FairtrialError(f"tuning {candidate.label}: it diverged at every point of its grid")
    point = grid[min(range(len(grid)), key=losses.__getitem__)]
    for name, value in point.items():
        values = {other[name] for other in grid if isinstance(other.get(name), int | float)}
        if len(values) > 2 and value in (min(values), max(values)):
            stages.note(
                f"{candidate.label}: tuning chose {name}={value:g}, an end of its grid; a better one may lie beyond"
            )
    return point
