"""What the engine's tests share: small trials, and an engine without processes, so that tests are quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np
import pytest
from pydantic import BaseModel, Field

from fairtrial.testing import WorkerHere
from fairtrial.trial import pool
from fairtrial.trial.declare import Candidate, Claim, Factor, Metric, Part, Trial, difference
from fairtrial.trial.store import Row
from fairtrial.trial.table import Table

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # worker processes cannot import a conftest


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(pool.ENGINES, "inline", WorkerHere)
    return "inline"


class Params(BaseModel):
    seeds: int = Field(5, ge=1, json_schema_extra={"scope": "plan"})
    shift: float = Field(0.5, ge=0, le=1, description="how far apart the two are")


@pytest.fixture
def make_trial() -> Callable[..., Trial]:
    """Return a maker of a trial of two candidates over seeds; ``measure(candidate, cell, params, stages)``."""

    def make(measure: Callable | None = None, **changes: Any) -> Trial:
        def shifted(candidate: Candidate, cell: Mapping, params: Params, stages: Any) -> dict[str, float]:
            mine = candidate.label == "mine"
            common, own = (np.random.default_rng([cell["seed"], *which]).normal() for which in ((), (1, mine)))
            return {"score": float(common + 0.1 * own + params.shift * mine)}

        def parts(params: Params) -> tuple[Part, ...]:
            part: dict[str, Any] = {
                "name": "main",
                "candidates": (Candidate("mine", "method"), Candidate("base", "control")),
                "metrics": (Metric("score"),),
                "factors": (Factor("seed", range(params.seeds), kind="replicate", most=40),),
                "variance": "independent",
                "claims": (Claim("C1", "mine beats base", difference("mine", "base", "score"), above=0.1),),
                "measure": measure or shifted,
            }
            return (Part(**{**part, **changes}),)

        return Trial("little", Params, parts, presets={"smoke": {"seeds": 3}})

    return make


@pytest.fixture
def make_table() -> Callable[..., Table]:
    """Return a maker of a table from {candidate: {cell (replicate first): value of "score", or "lost"}}."""

    def make(
        values: Mapping[str, Mapping[tuple, Any] | Any],
        claims: tuple = (),
        factors: tuple[Factor, ...] | None = None,
        metrics: tuple[Metric, ...] = (Metric("score"),),
        variance: str = "independent",
    ) -> Table:
        named = {
            label: dict(of) if isinstance(of, Mapping) else {(i,): value for i, value in enumerate(of)}
            for label, of in values.items()
        }
        cells = next(iter(named.values()))
        factors = factors or (Factor("seed", sorted({cell[0] for cell in cells}), kind="replicate"),)
        part = Part(
            "main", tuple(Candidate(label, "method") for label in named), metrics, factors, variance,  # type: ignore
            claims, lambda *_: {},
        )  # fmt: skip
        rows = []
        for label, of in named.items():
            for cell, value in of.items():
                row = Row(
                    f"{label}{cell}", "main", label, dict(zip([f.name for f in factors], cell, strict=True)), {}, {}, {}
                )
                row.status = "planned" if value is PLANNED else "failed" if value is LOST else "done"
                row.metrics = value if isinstance(value, dict) else {metrics[0].name: value}
                rows.append(row)
        return Table(part, rows)

    return make


LOST, PLANNED = object(), object()


@pytest.fixture
def lost() -> object:
    return LOST


@pytest.fixture
def planned() -> object:
    return PLANNED
