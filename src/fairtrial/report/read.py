"""What a trial left in its folder, as typed records: the only thing a page is made of.

The schema is that of ``result.json`` (see :mod:`fairtrial.trial.result`). Numbers that JSON cannot say come as the
strings ``"inf"`` and ``"-inf"`` and as null; here they are floats again, null being NaN.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ValidationError

from fairtrial.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1

Number: TypeAlias = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Role: TypeAlias = Literal["method", "baseline", "control", "reference"]
Verdict: TypeAlias = Literal["HOLDS", "FAILS", "UNDECIDED", "REPORTED"]
State: TypeAlias = Literal["HOLDS", "FAILS", "UNDECIDED", "REPORTED", "UNMEASURED"]


class Term(BaseModel):
    """One term of a contrast."""

    candidate: str
    metric: str
    weight: float
    where: dict[str, Any] = {}


class Quantity(BaseModel):
    """What a claim is about; which fields are filled depends on ``kind``."""

    kind: str
    a: str = ""
    b: str = ""
    metric: str = ""
    where: dict[str, Any] = {}
    scale: str = "raw"
    terms: list[Term] = []
    name: str = ""
    factor: str = ""


class Claim(BaseModel):
    """A claim and its verdict; a composite one has ``claims``."""

    id: str
    text: str
    verdict: Verdict
    part: str = ""
    quantity: Quantity
    over: str = "replicate"
    difference: Number = math.nan
    low: Number = math.nan
    high: Number = math.nan
    level: Number = math.nan
    bound: dict[str, float] = {}
    p_value: Number = math.nan
    cells: int = 0
    lost: int = 0
    units: int = 0
    sample_gain: Number = math.nan
    cost_ratio: Number = math.nan
    reason: str | None = None
    claims: list[Claim] = []

    @property
    def state(self) -> State:
        """The verdict, but UNMEASURED where it is undecided because these parameters measure nothing of it."""
        return "UNMEASURED" if all(leaf._unmeasured for leaf in self.leaves()) else self.verdict

    @property
    def _unmeasured(self) -> bool:
        empty = math.isnan(self.difference) and not self.units and not self.lost and self.quantity.kind != "exact"
        return self.verdict == "UNDECIDED" and empty and self.reason is not None

    def leaves(self) -> Iterator[Claim]:
        """Yield the claims that have a quantity of their own."""
        if not self.claims:
            yield self
        for child in self.claims:
            yield from child.leaves()


class Factor(BaseModel):
    """One dimension of a part's cells."""

    name: str
    kind: str
    values: list[Any]


class Metric(BaseModel):
    """One number measured in a cell."""

    name: str
    unit: str = ""
    higher_is_better: bool = True


class Candidate(BaseModel):
    """One contender."""

    label: str
    role: Role
    tuned: int = 0


class Part(BaseModel):
    """One comparison of a trial."""

    name: str
    variance: str = ""
    timed: bool = False
    factors: list[Factor]
    metrics: list[Metric]
    candidates: list[Candidate]
    planned: int
    done: int
    lost: int

    def metric(self, name: str) -> Metric:
        """Return the metric called ``name``, as plain as can be where the part does not declare it."""
        return next((metric for metric in self.metrics if metric.name == name), Metric(name=name))


class Summary(BaseModel):
    """Mean and uncorrected 95% interval of a candidate's metric at one setting."""

    part: str
    candidate: str
    role: Role
    metric: str
    where: dict[str, Any] = {}
    mean: Number
    low: Number
    high: Number
    cells: int
    lost: int = 0


class Cost(BaseModel):
    """What a candidate took; ``candidate`` is None for what all shared."""

    candidate: str | None
    role: Role | None = None
    seconds: float
    peak: float | None = None
    peak_sampled: bool = False
    stages: dict[str, float] = {}


class Lost(BaseModel):
    """A cell that could not be measured."""

    part: str
    candidate: str
    factors: dict[str, Any] = {}
    reason: str | None = None


class Document(BaseModel):
    """The content of ``result.json``."""

    fairtrial: str
    trial: str
    method: str | None = None
    line: str | None = None
    finished: str = ""
    preset: str | None = None
    command: str | None = None
    parameters: dict[str, Any] = {}
    seeds: dict[str, list[Any]] = {}
    inputs: dict[str, Any] = {}
    level: float = 0.95
    until: str | None = None
    peeked: bool = False
    machine: dict[str, Any] = {}
    versions: dict[str, str] = {}
    notes: list[str] = []
    code: dict[str, dict[str, str]] = {}
    parts: list[Part]
    claims: list[Claim]
    summary: list[Summary]
    costs: list[Cost]
    lost: list[Lost]
    paper: list[str] = []

    @property
    def title(self) -> str:
        """The method's name, or the trial's where no method is known."""
        return self.method or self.trial

    def part(self, name: str) -> Part:
        """Return the part called ``name``, or an empty one."""
        empty = Part(name=name, factors=[], metrics=[], candidates=[], planned=0, done=0, lost=0)
        return next((part for part in self.parts if part.name == name), empty)

    def leaves(self) -> Iterator[Claim]:
        """Yield all claims that have a quantity of their own."""
        for claim in self.claims:
            yield from claim.leaves()


@dataclass(frozen=True)
class Recorded:
    """One trial's results.

    ``cells`` has a row a candidate and cell; ``items`` a row an item's score or a curve's point. Either is None where
    its file is not there.
    """

    folder: Path
    document: Document
    cells: pd.DataFrame | None
    items: pd.DataFrame | None


def read(folder: Path) -> Recorded:
    """Read the results in ``folder``.

    Raises
    ------
    InputError
        If there is no ``result.json``, it or a table beside it is damaged, or a newer Fairtrial wrote it.
    """
    file = folder / "result.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: give a folder that  fairtrial run  has written results to") from error
    except ValueError as error:
        raise InputError(f"{file} is damaged ({error}): run the trial again, finished cells are kept") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if not isinstance(schema, int):
        raise InputError(f"{file} is not a trial's result (it has no schema number): choose another folder")
    if schema > SCHEMA:
        raise InputError(f"{file} has schema {schema}, this Fairtrial reads up to {SCHEMA}: upgrade fairtrial")
    try:
        document = Document.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{file} is damaged at {place} ({first['msg']}): run the trial again") from error
    return Recorded(folder, document, _table(folder / "cells.parquet"), _table(folder / "items.parquet"))


def _table(file: Path) -> pd.DataFrame | None:
    import pandas as pd

    if not file.is_file():
        return None
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise InputError(f"{file} is damaged: run the trial again, finished cells are kept") from error
