"""From recorded results to the page: what each section shows, and how much of it fits."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.report import figures, forest, words
from fairtrial.report.read import Candidate, Cost, Document, Lost, Metric, Part, Recorded, Summary, read

if TYPE_CHECKING:
    import pandas as pd

    from fairtrial.cards import Card

LIMIT = 500_000  # bytes of a page
VARIANCES = {
    "independent": "replicates are taken to share no data, items or seeds",
    "crossed": "all replicates answer the same items",
    "design": "replicates are folds of one data set, whose overlap the intervals allow for",
    "nadeau_bengio": "replicates are folds of one data set, whose overlap the intervals allow for",
}
ROLES = {
    "method": "the method on trial",
    "baseline": "a baseline, to be beaten",
    "control": "a control: must lose",
    "reference": "a reference: shown, not compared",
}


@dataclass(frozen=True)
class Detail:
    """How much a page shows of each trial: the first of :data:`DETAILS` that fits is taken."""

    cells: int  # rows of the table of cells
    figures: int  # of each kind
    tables: bool = True  # full table, cells, paper and provenance; without, verdicts and cost only
    rows: int = 400  # of any other table


DETAILS = (
    Detail(cells=200, figures=6),
    Detail(cells=60, figures=3),
    Detail(cells=20, figures=1, rows=60),
    Detail(cells=5, figures=0, rows=30),
    Detail(cells=0, figures=0, tables=False, rows=12),
    Detail(cells=0, figures=0, tables=False, rows=0),
)


def write(folders: Sequence[Path], out: Path, card_lookup: Callable[[str], Card] | None) -> Path:
    """Write the page; see :func:`fairtrial.report.write_report`."""
    if not folders:
        raise InputError("a report needs at least one folder with results: name one")
    recorded = [read(Path(folder)) for folder in folders]
    cards = [_card(card_lookup, one.document.trial) for one in recorded]
    raw = fitting(recorded, cards)
    part = out.with_suffix(f".{os.getpid()}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(raw)
        os.replace(part, out)
    except OSError as error:
        raise InputError(f"{out} cannot be written ({error.strerror}): choose another file with --out") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return out


def fitting(recorded: Sequence[Recorded], cards: Sequence[Card | None]) -> bytes:
    """Return the most detailed page that is smaller than :data:`LIMIT`."""
    names = _names(recorded)
    trials = [
        TrialPage(f"t{i}", one, card, name)
        for i, (one, card, name) in enumerate(zip(recorded, cards, names, strict=True), 1)
    ]
    # Many trials cannot all be shown in full: do not draw what will not fit.
    for detail in DETAILS[0 if len(trials) == 1 else 1 if len(trials) <= 4 else 2 if len(trials) <= 10 else 3 :]:
        raw = render(trials, detail)
        if len(raw) < LIMIT:
            return raw
    raise InputError(f"the page of {len(trials)} trials would be larger than {LIMIT // 1000} kB: give fewer folders")


def _names(recorded: Sequence[Recorded]) -> list[str]:
    """Return the trials' names; those that several share with as much of their folders as tells them apart."""
    trials = Counter(one.document.trial for one in recorded)
    folders = {one.folder.resolve() for one in recorded}
    names = []
    for one in recorded:
        here = one.folder.resolve().parts
        tails = ({folder.parts[-length:] for folder in folders} for length in range(1, len(here)))
        length = next((i for i, tail in enumerate(tails, 1) if len(tail) == len(folders)), len(here))
        several = trials[one.document.trial] > 1
        names.append(one.document.trial + (f" in {'/'.join(here[-length:])}" if several else ""))
    return names


def render(trials: Sequence[TrialPage], detail: Detail) -> bytes:
    """Return the page as UTF-8."""
    states = [claim.state for trial in trials for claim in trial.document.claims]
    html = _template().render(
        trials=trials,
        detail=detail,
        single=len(trials) == 1,
        headline=words.headline(states),
        css=Markup(Path(__file__).with_name("page.css").read_text(encoding="utf-8")),
        words=words,
        ROLES=ROLES,
    )
    return html.encode("utf-8", "replace")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
    )
    return environment.get_template("page.html.j2")


def _shown(value: Any) -> Any:
    """Return what the template prints: nothing for None, no text of any length, markup as it is."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        text = words.clip(value, 600) if len(value) > 600 else words.CONTROL.sub("", value)
        return re.sub(r"(?<=\d) %", words.PERCENT, text)  # never over a line's end
    return "" if value is None else value


def _card(lookup: Callable[[str], Card] | None, name: str) -> Card | None:
    try:
        return lookup(name) if lookup else None
    except UnknownNameError:  # the user's own comparison
        return None


# -------------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """A table of text; ``numeric`` says which columns are numbers, ``left_out`` how many rows are not shown."""

    title: str
    head: list[str]
    rows: list[list[str]]
    numeric: list[bool]
    left_out: int = 0


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval, as text."""

    mean: str = ""
    interval: str = ""
    lost: int = 0


@dataclass(frozen=True)
class FullTable:
    """All candidates and metrics of a part: ``blocks`` of (setting in words, [(candidate, estimates)])."""

    part: Part
    metrics: list[Metric]
    blocks: list[tuple[str, list[tuple[Candidate, list[Estimate]]]]]
    left_out: int


@dataclass(frozen=True)
class CostLine:
    """What a candidate took, in words, and the length of its bar in per cent."""

    cost: Cost
    share: float
    time: str
    peak: str
    where: str


@dataclass(frozen=True)
class LostReason:
    """Cells lost for one reason."""

    reason: str
    count: int
    candidates: str
    examples: str


class TrialPage:
    """What the template asks of one trial; ``slug`` makes its ids unique on the page."""

    def __init__(self, slug: str, recorded: Recorded, card: Card | None, name: str) -> None:
        self.slug = slug
        self.recorded = recorded
        self.document: Document = recorded.document
        self.card = card
        self.name = name
        self.headline = words.headline(claim.state for claim in self.document.claims)
        self.planned = sum(part.planned for part in self.document.parts)
        self.done = sum(part.done for part in self.document.parts)
        self.lost = sum(part.lost for part in self.document.parts)
        self.missing = self.planned - self.done - self.lost
        self._figures: dict[str, list[figures.Figure]] = {}
        self.timed = any(part.timed for part in self.document.parts)
        self.seconds = sum(cost.seconds for cost in self.document.costs)

    def groups(self, most_parts: int) -> list[forest.Group]:
        """Return the forest plot, with at most so many parts of each composite claim."""
        return forest.groups(self.document, most_parts)

    def scope(self, most: int = 24) -> list[str]:
        """Return what the results are about: the parameters that have a value, each with it."""
        given = {name: value for name, value in self.document.parameters.items() if value not in (None, "", [], {})}
        shown = [f"{words.spoken(name)} {words.clip(_parameter(value), 60)}" for name, value in given.items()]
        return shown[:most] + (["and more below"] if len(shown) > most else [])

    # what was compared ----------------------------------------------------------------------------------------------

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates of all parts, each once, in declared order."""
        return list({c.label: c for part in self.document.parts for c in part.candidates}.values())

    def design(self, part: Part) -> str:
        """Return which cells a part has, in a sentence."""
        factors = []
        for factor in part.factors:
            count, shown = len(factor.values), words.values(factor.values)
            if factor.kind == "replicate":
                factors.append(f"{words.count(count, 'replicate')} ({factor.name} {shown})")
            elif count == 1:
                factors.append(f"{factor.name} {shown}")
            else:
                within = ", within a replicate" if factor.kind == "within" else ""
                factors.append(f"{count} values of {factor.name} ({shown}{within})")
        crossed = " × ".join([*factors, words.count(len(part.candidates), "candidate")])
        variance = f"; {VARIANCES[part.variance]}" if part.variance in VARIANCES else ""
        return f"{crossed}: {words.count(part.planned, 'cell')}{variance}."

    # losses ---------------------------------------------------------------------------------------------------------

    def lost_reasons(self, most: int = 8) -> list[LostReason]:
        """Return the reasons for which cells were lost, the commonest first."""
        groups: dict[str, list[Lost]] = {}
        for loss in self.document.lost:
            groups.setdefault(words.clip(loss.reason or "no reason was given", 300), []).append(loss)
        ordered = sorted(groups.items(), key=lambda pair: -len(pair[1]))
        return [
            LostReason(
                reason,
                len(losses),
                words.values(list(dict.fromkeys(loss.candidate for loss in losses)), 6),
                "; ".join(words.clip(words.where(loss.factors), 80) for loss in losses[:3])
                + (" and others" if len(losses) > 3 else ""),
            )
            for reason, losses in ordered[:most]
        ]

    # figures --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def panels(self) -> list[figures.Panel]:
        """What the figures show, in the order of the claims."""
        return figures.panels(self.document)

    def cost_figures(self, most: int) -> list[figures.Figure]:
        """Return quality against cost for the first few metrics that are not times themselves."""
        return self._drawn("q", most, lambda: self._draw_costs(min(most, 3)))

    def cell_figures(self, most: int) -> list[figures.Figure]:
        """Return the cells of the first few panels, then the curves."""
        return self._drawn("d", 2 * most, lambda: self._draw_cells(most))

    def _drawn(self, kind: str, most: int, draw: Callable[[], list[figures.Figure]]) -> list[figures.Figure]:
        """Return the first ``most`` figures of a kind, drawn once: less detail only takes fewer of them."""
        if most and kind not in self._figures:
            self._figures[kind] = draw()
        return self._figures.get(kind, [])[:most]

    def _draw_costs(self, most: int) -> list[figures.Figure]:
        panels = [panel for panel in self.panels if not panel.part.timed][:most]
        drawn = [figures.cost_quality(self.document, p, f"{self.slug}q{i}") for i, p in enumerate(panels)]
        return [figure for figure in drawn if figure]

    def _draw_cells(self, most: int) -> list[figures.Figure]:
        dots = [figures.cell_dots(self.recorded, p, f"{self.slug}d{i}") for i, p in enumerate(self.panels[:most])]
        pairs = figures.curve_metrics(self.recorded)[:most]
        lines = [figures.curves(self.recorded, part, m, f"{self.slug}l{i}") for i, (part, m) in enumerate(pairs)]
        return [figure for figure in (*dots, *lines) if figure]

    # cost -----------------------------------------------------------------------------------------------------------

    def costs(self) -> list[CostLine]:
        """Return what each candidate took and what was shared."""
        most = max((cost.seconds for cost in self.document.costs), default=0.0)
        return [
            CostLine(
                cost,
                round(100 * cost.seconds / most, 1) if most else 0.0,
                words.duration(cost.seconds) if cost.seconds else words.MISSING,
                ("~" if cost.peak_sampled and cost.peak else "") + words.memory(cost.peak),
                _stages(cost),
            )
            for cost in self.document.costs
        ]

    # the full table -------------------------------------------------------------------------------------------------

    def full_tables(self, most: int) -> list[FullTable]:
        """Return for each part all means with their intervals, a block a setting."""
        tables = []
        for part in self.document.parts:
            entries = [s for s in self.document.summary if s.part == part.name]
            at = {(json.dumps(s.where, default=str), s.candidate, s.metric): s for s in entries}
            settings = {json.dumps(s.where, default=str): s.where for s in entries}
            places = {m.name: _column_places([s for s in entries if s.metric == m.name]) for m in part.metrics}
            blocks = []
            room = most
            for key, setting in settings.items():
                rows = [
                    (c, [_estimate(at.get((key, c.label, m.name)), places[m.name]) for m in part.metrics])
                    for c in part.candidates
                ]
                if room >= len(rows):
                    blocks.append((words.where(setting), rows))
                room -= len(rows)
            if entries:
                tables.append(FullTable(part, part.metrics, blocks, len(settings) - len(blocks)))
        return tables

    # the cells ------------------------------------------------------------------------------------------------------

    def spreads(self) -> list[Table]:
        """Return for each part and candidate how its cells spread: median, and from the 5th to the 95th percentile."""
        frame = self.recorded.cells
        if frame is None:
            return []
        tables = []
        for part in self.document.parts:
            metrics = [m for m in part.metrics if m.name in frame][:12]
            rows = []
            for candidate in part.candidates:
                mine = frame[(frame["part"] == part.name) & (frame["candidate"] == candidate.label)]
                lost = int((mine["status"] == "failed").sum())
                spread = [_spread(mine[m.name]) for m in metrics]
                rows.append([candidate.label, f"{len(mine):,}", f"{lost:,}", *spread])
            head = ["candidate", "cells", "lost", *(words.metric_name(m) for m in metrics)]
            tables.append(Table(part.name, head, rows, [False] + [True] * (len(head) - 1)))
        return tables

    def cell_tables(self, most: int) -> list[Table]:
        """Return the first cells of each part, ``most`` in all."""
        frame = self.recorded.cells
        if frame is None or not len(frame):
            return []
        parts = [part for part in self.document.parts if (frame["part"] == part.name).any()]
        return [_cell_table(frame[frame["part"] == part.name], part, most // len(parts)) for part in parts]

    # provenance -----------------------------------------------------------------------------------------------------

    @property
    def command(self) -> Markup:
        """The command that reproduces the trial, escaped, as long as it is within reason."""
        return Markup.escape(words.CONTROL.sub("", (self.document.command or "")[:4000]))

    def provenance(self, most: int) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return titled lists of (name, value): what one needs to get the same numbers."""
        document = self.document
        reasons = {"flat": "when further cells added little", "decided": "when the verdicts were reached"}
        run = {
            "Fairtrial": document.fairtrial,
            "finished": document.finished.replace("T", " ").replace("+00:00", " UTC"),
            "preset": document.preset or "none: the defaults",
            "level": f"{words.number(document.level * 100)}{words.PERCENT}",
            "stopped early": reasons.get(document.until or "", "no"),
        }
        machine = {
            name: words.memory(value) if name == "memory" else words.value(value)
            for name, value in document.machine.items()
            if value is not None
        }
        seeds = {part: words.values(values) for part, values in document.seeds.items()}
        code = {f"{part}: {name}": digest for part, names in document.code.items() for name, digest in names.items()}
        lists: list[tuple[str, Mapping[str, Any]]] = [
            ("Run", run),
            ("Machine", machine),
            ("Seeds and draws", seeds),
            ("Parameters", {name: _parameter(value) for name, value in document.parameters.items()}),
            ("Inputs", {name: _parameter(value) for name, value in document.inputs.items()}),
            ("Versions", document.versions),
            ("Code digests", code),
        ]
        return [(title, list(pairs.items())[:most]) for title, pairs in lists if pairs]


def _stages(cost: Cost) -> str:
    """Return where a candidate's time went, the longest first."""
    cells = cost.seconds - sum(cost.stages.values())
    spent = {**cost.stages, **({"cells": cells} if cells > 0.005 * cost.seconds else {})}
    longest = sorted(spent.items(), key=lambda pair: -pair[1])[:5]
    return ", ".join(f"{name.replace('_', ' ')} {words.duration(seconds)}" for name, seconds in longest)


def _column_places(entries: list[Summary]) -> int:
    """Return the decimals of a column: what its median interval deserves, so that all rows align."""
    widths = sorted(e.high - e.low for e in entries if math.isfinite(e.high - e.low) and e.high > e.low)
    return words.places(widths[len(widths) // 2] / 2) if widths else -1


def _estimate(entry: Summary | None, places: int) -> Estimate:
    if entry is None or math.isnan(entry.mean):
        return Estimate(words.MISSING, "", entry.lost if entry else 0)
    if places < 0 or math.isinf(entry.mean):
        mean, low, high = words.estimate(entry.mean, entry.low, entry.high)
    else:  # large numbers among small ones need no more than five digits
        whole = math.floor(math.log10(abs(entry.mean))) if entry.mean else 0
        mean, low, high = (words.fixed(v, min(places, max(0, 4 - whole))) for v in (entry.mean, entry.low, entry.high))
    return Estimate(mean, words.MISSING if math.isnan(entry.low) else f"{low} to {high}", entry.lost)


def _spread(column: pd.Series) -> str:
    values = column.to_numpy(float, na_value=np.nan)
    values = values[~np.isnan(values)]
    if not len(values):
        return words.MISSING
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], method="closest_observation")
    return f"{words.number(middle)} ({words.number(low)} to {words.number(high)})"


def _cell_table(frame: pd.DataFrame, part: Part, most: int) -> Table:
    """Return the first ``most`` cells of a part: candidate, factors, metrics, time, memory, and why one was lost."""
    metrics = {m.name: words.metric_name(m) for m in part.metrics if m.name in frame}
    factors = [f.name for f in part.factors if f.name in frame]
    lost = bool((frame["status"] == "failed").any())
    columns = ["candidate", *factors, *metrics, "seconds", "peak", *(["reason"] if lost else [])]
    columns = [name for name in columns if name in frame]
    shown = frame.head(most)
    rows = [
        [_cell(name, value) for name, value in zip(columns, row, strict=True)]
        for row in shown[columns].itertuples(index=False)
    ]
    head = [metrics.get(name, {"peak": "peak memory", "reason": "lost because"}.get(name, name)) for name in columns]
    numeric = [name in metrics or name in ("seconds", "peak") for name in columns]
    return Table(part.name, head, rows, numeric, len(frame) - len(shown))


def _cell(column: str, value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if column == "peak":
        return words.memory(float(value))
    if isinstance(value, float | np.floating):
        return words.number(float(value), 4)
    return words.value(value)


def _parameter(value: Any) -> str:
    if isinstance(value, list | dict):
        return words.clip(json.dumps(value, ensure_ascii=False, default=str), 200)
    return words.value(value)
