"""What a run leaves: verdicts, cells, costs; ``result.json``, ``cells.parquet`` and the way to the report.

``result.json`` has one versioned schema, the same that ``fairtrial run NAME --json`` prints::

    schema, fairtrial, trial, method, line, finished (ISO time), preset, command, parameters, seeds, inputs, level,
    until, peeked, machine, versions, notes, code {part: {candidate: digest}}
    parts      [{name, variance, timed, factors [{name, kind, values}], metrics [{name, unit, higher_is_better, per}],
                 candidates [{label, role, tuned}], planned, done, lost}]
    claims     [{id, part, text, verdict, quantity, over, difference, low, high, level, low95, high95, bound, p_value,
                 cells, lost, units, sample_gain, paired_gain, cost_ratio, reason, claims (of a composite)}]
    summary    [{part, candidate, role, metric, where, mean, low, high, cells, lost}]     95% intervals, uncorrected
    costs      [{candidate (null: shared), role, seconds, peak, peak_sampled, stages {name: seconds}}]  of untimed parts
    lost       [{part, candidate, factors, reason}]
    paper      what the paper states, from the card: never measured here

``verdict`` is HOLDS, FAILS, UNDECIDED, or REPORTED for a quantity that is only shown. ``quantity`` has ``kind``
(difference, level, contrast, statistic, exact, all_of, for_each) and its arguments. ``bound`` is ``{"above": x}`` or
``{"below": x}``. Numbers that are not finite are the strings "inf", "-inf" or null.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import fairtrial
from fairtrial import cards
from fairtrial.errors import InputError
from fairtrial.trial.code import digest
from fairtrial.trial.declare import Curve, Items, Part
from fairtrial.trial.engine import Run
from fairtrial.trial.evidence import summary
from fairtrial.trial.machine import machine
from fairtrial.trial.stages import Codes, codes_of_parts
from fairtrial.trial.store import Row, explain
from fairtrial.trial.table import Table, scalar
from fairtrial.trial.verdict import ClaimResult, judge
from fairtrial.trial.worker import load_trial, package_of

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1


@dataclass(repr=False)
class Result:
    """The outcome of a run.

    ``verdicts`` are the claims' :class:`~fairtrial.trial.verdict.ClaimResult` s in declared order; ``document`` is what
    ``result.json`` holds.
    """

    verdicts: list[ClaimResult]
    document: dict[str, Any]
    parts: tuple[Part, ...]
    rows: list[Row]
    folder: Path

    def __repr__(self) -> str:
        lost = sum(row.status == "failed" for row in self.rows)
        cells = f"{len(self.rows)} cells" + (f", {lost} lost" if lost else "")
        return "\n".join([f"Result of {self.document['trial']} ({cells}) in {self.folder}", *map(str, self.verdicts)])

    def to_frame(self, part: str | None = None) -> pd.DataFrame:
        """Return one row a candidate and cell: part, candidate, role, factors, metrics, seconds, peak, status, reason.

        A metric of Items is given by its mean, a Curve by its last value.
        """
        return cells_frame(self.parts, self.rows, part)

    def items(self) -> pd.DataFrame:
        """Return one row an item's score or curve's point: part, candidate, cell, metric, item or x, value."""
        return items_frame(self.rows)

    def verdict(self, claim: str) -> ClaimResult:
        """Return the verdict of the claim with this id."""
        return next(v for v in self.verdicts if v.id == claim)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the self-contained HTML page and return its path."""
        from fairtrial.report import write_report

        try:
            return write_report([self.folder], Path(path), card_lookup=cards.find)
        except OSError as error:
            raise InputError(explain(error, Path(path).parent)) from error

    def save(self) -> None:
        """Write ``result.json``, ``cells.parquet`` and (where there are item scores or curves) ``items.parquet``."""
        items = self.items()
        try:
            _write_parquet(self.to_frame(), self.folder / "cells.parquet")
            if len(items):
                _write_parquet(items, self.folder / "items.parquet")
            else:
                (self.folder / "items.parquet").unlink(missing_ok=True)
            _replace(self.folder / "result.json", json.dumps(self.document, indent=1).encode())
        except OSError as error:
            raise InputError(explain(error, self.folder)) from error


def collect(
    run: Run,
    *,
    replicates: int | None = None,
    level: float = 0.95,
    until: str | None = None,
    preset: str | None = None,
    card: Any = None,
    command: str | None = None,
) -> Result:
    """Judge what a run's store holds and return it as a result."""
    rows = run.known(run.rows(replicates))
    costs = run.store.stage_costs(key for row in rows for key in row.stages)
    by_part = {part.name: [row for row in rows if row.part == part.name] for part in run.parts}
    tables = {part.name: Table(part, by_part[part.name]) for part in run.parts}
    peeked = run.store.marked("peeked")
    timed = {part.name for part in run.parts if part.timed}  # whose cells measure cost, and are none
    spent = [row for row in rows if row.part not in timed]
    expenses = _costs(run.parts, spent, run.store.stage_costs(key for row in spent for key in row.stages))
    one_machine = len({row.machine for row in spent if row.status == "done"}) == 1
    seconds = {e["candidate"]: e["seconds"] for e in expenses} if one_machine else {}
    verdicts = judge(
        tables, level=level, peeked=peeked, seconds={part.name: seconds for part in run.parts if not part.timed}
    )
    document = {
        "schema": SCHEMA,
        "fairtrial": fairtrial.__version__,
        "trial": run.declaration.name,
        "method": card.method if card else None,
        "line": card.line if card else None,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "preset": preset,
        "command": command or _command(run, preset),
        "parameters": run.params.model_dump(mode="json"),
        "seeds": {part.name: list(f.values) for part in run.parts if (f := part.replicate)},
        "inputs": run.inputs,
        "level": level,
        "until": until,
        "peeked": peeked,
        "machine": machine(),
        "versions": _versions(run),
        "notes": [*run.notes, *sorted({cost.note for cost in costs if cost.note})],
        "code": _digests(run.codes),
        "parts": [_describe(part, by_part[part.name]) for part in run.parts],
        "claims": [verdict.to_dict() for verdict in verdicts],
        "summary": [entry for table in tables.values() for entry in summary(table)],
        "costs": expenses,
        "lost": [
            {"part": row.part, "candidate": row.candidate, "factors": row.factors, "reason": row.reason}
            for row in rows
            if row.status == "failed"
        ],
        "paper": list(card.paper) if card else [],
    }
    return Result(verdicts, plain(document), run.parts, rows, run.folder)


def is_current(document: Mapping[str, Any]) -> bool:
    """Whether a committed ``result.json`` of the catalogue was measured with the code and versions of today."""
    card = cards.find(document["trial"])
    declaration = load_trial(card.trial)
    params = declaration.params.model_validate(document["parameters"])
    codes, _ = codes_of_parts(declaration.parts(params), package_of(declaration))
    return plain(_digests(codes)) == document["code"]


def _digests(codes: Codes) -> dict[str, dict[str, str]]:
    return {part: {c: digest(json.dumps(code)) for c, code in of_part.items()} for part, of_part in codes.items()}


def plain(value: Any) -> Any:
    """Return ``value`` as JSON can say it: infinities as strings, NaN as null, numpy as Python."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(v) for v in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _describe(part: Part, rows: list[Row]) -> dict[str, Any]:
    replicate = part.replicate
    seen = {repr(row.factors[replicate.name]) for row in rows} if replicate else set()
    return {
        "name": part.name,
        "variance": part.variance,
        "timed": part.timed,
        "factors": [
            {"name": f.name, "kind": f.kind, "values": f.first(len(seen)) if f is replicate else list(f.values)}
            for f in part.factors
        ],
        "metrics": [
            {"name": m.name, "unit": m.unit, "higher_is_better": m.higher_is_better, "per": m.per} for m in part.metrics
        ],
        "candidates": [
            {"label": c.label, "role": c.role, "tuned": len(c.grid) if c.grid else 0} for c in part.candidates
        ],
        "planned": len(rows),
        "done": sum(row.status == "done" for row in rows),
        "lost": sum(row.status == "failed" for row in rows),
    }


def _costs(parts: tuple[Part, ...], rows: list[Row], stages: list) -> list[dict[str, Any]]:
    """Return what each candidate took in ``rows``, its stages included, and last what all shared."""
    roles = {c.label: c.role for part in parts for c in part.candidates}
    costs: list[dict[str, Any]] = []
    for label in (*roles, None):
        mine = [row for row in rows if row.candidate == label and row.status == "done"]
        by_stage: dict[str, float] = {}
        for stage in stages:
            if stage.candidate == label or (label is None and stage.candidate not in roles):
                by_stage[stage.name] = by_stage.get(stage.name, 0.0) + stage.seconds
        if mine or by_stage:
            costs.append(
                {
                    "candidate": label,
                    "role": roles.get(label) if label else None,
                    "seconds": sum(row.seconds for row in mine) + sum(by_stage.values()),
                    "peak": max((row.peak for row in mine if row.peak), default=None),
                    "peak_sampled": any(row.peak_sampled for row in mine),
                    "stages": by_stage,
                }
            )
    return costs


def _versions(run: Run) -> dict[str, str]:
    """Return the versions of the distributions that the candidates' code imports."""
    ours = {"fairtrial": fairtrial.__version__}
    for codes in run.codes.values():
        for code in codes.values():
            ours |= {n: v for n, v in code.items() if not n.endswith(".py") and ":" not in n and " " not in n}
    return ours


def _command(run: Run, preset: str | None) -> str:
    start = type(run.params).model_construct(**(run.declaration.presets[preset] if preset else {}))
    given = start.model_dump(mode="json", warnings=False)
    changed = {
        name: value
        for name, value in run.params.model_dump(mode="json").items()
        if name not in given or value != given[name]
    }
    words = ["fairtrial", "run", run.declaration.name, *(["--preset", preset] if preset else [])]
    for name, value in changed.items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


# -------------------------------------------------------------------------------------------------------------- frames


def cells_frame(parts: tuple[Part, ...], rows: list[Row], part: str | None = None) -> pd.DataFrame:
    """Return the cells of one part or of all as a frame; see :meth:`Result.to_frame`."""
    import pandas as pd

    if part is not None and part not in {p.name for p in parts}:
        raise InputError(f"there is no part {part!r}: {', '.join(p.name for p in parts)}")
    roles = {(p.name, c.label): c.role for p in parts for c in p.candidates}
    records = [
        {
            "part": row.part,
            "candidate": row.candidate,
            "role": roles[row.part, row.candidate],
            **row.factors,
            **{name: scalar(value) for name, value in row.metrics.items()},
            "seconds": row.seconds,
            "peak": row.peak,
            "status": row.status,
            "reason": row.reason,
        }
        for row in rows
        if part in (None, row.part)
    ]
    return pd.DataFrame.from_records(records)


def items_frame(rows: list[Row]) -> pd.DataFrame:
    """Return the item scores and curves of all cells in long form."""
    import pandas as pd

    frames = []
    for row in rows:
        for name, value in row.metrics.items():
            if isinstance(value, Items | Curve):
                keys, values = value[0], value[1]
                frames.append(
                    pd.DataFrame(
                        {
                            "part": row.part,
                            "candidate": row.candidate,
                            "cell": json.dumps(row.factors),
                            "metric": name,
                            "kind": type(value).__name__.lower(),
                            "item": [str(key) for key in keys] if isinstance(value, Items) else None,
                            "x": np.nan if isinstance(value, Items) else np.asarray(keys, dtype=float),
                            "value": np.asarray(values, dtype=float),
                        }
                    )
                )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _write_parquet(frame: pd.DataFrame, file: Path) -> None:
    frame = frame.copy()
    for name in frame.columns:
        if frame[name].map(type).nunique() > 1 and frame[name].dtype == object and name != "reason":
            frame[name] = frame[name].map(
                lambda v: v if v is None or isinstance(v, str) else json.dumps(v, default=str)
            )
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        frame.to_parquet(part, index=False)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _replace(file: Path, raw: bytes) -> None:
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_bytes(raw)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
