"""What the commands print."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial import cards
from fairtrial.cards import AREAS, Card
from fairtrial.cli import CELLS_LOST, DONE
from fairtrial.errors import UnknownNameError

if TYPE_CHECKING:
    from fairtrial.trial.result import Result
    from fairtrial.trial.verdict import ClaimResult

STYLES = {"HOLDS": "bold green", "FAILS": "bold red", "UNDECIDED": "bold yellow", "REPORTED": "cyan"}


def catalogue(area: str | None, working: bool, *, as_json: bool) -> None:
    """Print the catalogue, plainly: it must start at once."""
    if area is not None and area not in AREAS:
        raise UnknownNameError("area", area, AREAS)
    chosen = [
        card
        for card in cards.cards().values()
        if area in (None, card.area) and (card.state == "working" or not working)
    ]
    if as_json:
        print(json.dumps([asdict(card) | {"name": card.shown} for card in chosen]))
        return
    width = max((len(card.shown) for card in chosen), default=0)
    for key, title in AREAS.items():
        here = [card for card in chosen if card.area == key]
        if here:
            print(f"{title} ({key})")
            for card in here:
                mark = "working" if card.state == "working" else "planned"
                print(f"  {card.shown:<{width}}  {mark}  {card.method}: {card.line}")
    systems = [card for card in cards.cards().values() if card.is_system]
    print(f"{sum(card.state == 'working' for card in systems)} of {len(systems)} methods work today.")


def system(card: Card, *, as_json: bool) -> None:
    """Print a card."""
    if as_json:
        print(json.dumps(asdict(card) | {"name": card.shown}))
        return
    from rich.console import Console
    from rich.padding import Padding

    console = Console(highlight=False)

    def section(title: str, lines: list[str]) -> None:
        if lines:
            console.print(f"\n[bold]{title}[/]")
            for line in lines:
                console.print(Padding(line, (0, 0, 0, 2)), markup=False)

    console.print(f"[bold]{card.shown}[/]  {card.method}  [dim]{AREAS[card.area]}, {card.state}[/]")
    console.print(card.line, markup=False)
    section("Use it when", [card.use_when])
    section("Not when", [card.not_when])
    section("The paper states (the paper's word, not measured here)", list(card.paper))
    section("The trial's claims", [f"{claim.id}  {claim.text}" for claim in card.claims])
    if card.state == "working":
        extras = f"pip install 'fairtrial[{','.join(card.extras)}]'" if card.extras else ""
        samples_ = f"fairtrial samples get {card.shown}" if card.samples else ""
        section("Run it", [line for line in (extras, samples_, f"fairtrial run {card.shown}") if line])
        section("Apply it", [f"fairtrial apply {command} --help" for command in card.commands])


def result(outcome: Result, *, as_json: bool) -> int:
    """Print a result and where its report is; return the exit code."""
    report = outcome.report(outcome.folder / "report.html")
    lost = sum(row.status == "failed" for row in outcome.rows)
    if as_json:
        print(json.dumps(outcome.document))
        return CELLS_LOST if lost else DONE
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False, markup=False)  # brackets are intervals and ids
    table = RichTable(box=None, pad_edge=False, header_style="dim")
    for column in ("", "claim", "", "difference", "interval", "units"):
        table.add_column(column, overflow="fold", justify="right" if column in ("difference", "units") else "left")
    for verdict in outcome.verdicts:
        for claim, depth in _with_children(verdict):
            text = claim.text if depth == 0 else ""
            difference, interval = _estimate(claim)
            state = Text(claim.state, style=STYLES[claim.state])
            units = str(claim.units) if claim.units else ""
            table.add_row(" " * depth + claim.id, Text(text), state, difference, interval, units)
    console.print(table)
    for verdict in outcome.verdicts:
        if verdict.reason:
            console.print(Text(f"{verdict.id}: {verdict.reason}", style="dim"))
    if lost:
        console.print(Text(f"{lost} cell{'s were' if lost > 1 else ' was'} lost: --retry measures again", style="red"))
    console.print(Text(f"report: {_short(report)}"), soft_wrap=True)
    return CELLS_LOST if lost else DONE


def _with_children(claim: ClaimResult, depth: int = 0) -> list[tuple[ClaimResult, int]]:
    return [(claim, depth), *(pair for child in claim.claims for pair in _with_children(child, depth + 1))]


def _estimate(claim: ClaimResult) -> tuple[str, str]:
    if math.isnan(claim.difference):
        return "", ""
    sign = "" if claim.quantity["kind"] in ("level", "statistic") else "+"
    bound = "".join(f" {side} {value:g}" for side, value in claim.bound.items())
    interval = "" if math.isnan(claim.low) else f"[{claim.low:{sign}.3g}, {claim.high:{sign}.3g}]{bound}"
    return f"{claim.difference:{sign}.3g}", interval


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def samples(*, as_json: bool) -> None:
    """Print the samples."""
    from fairtrial.data.samples import list_samples

    entries: list[dict[str, Any]] = [
        {
            "name": sample.name,
            "here": sample.folder.is_dir(),
            "megabytes": round(sample.size / 1e6, 1),
            "licence": sample.licence,
            "what": sample.what,
        }
        for sample in list_samples().values()
    ]
    if as_json:
        print(json.dumps(entries))
        return
    for entry in entries:
        here = "here" if entry["here"] else "    "
        print(f"{entry['name']:<22} {here}  {entry['megabytes']:>7} MB  {entry['licence']:<24}  {entry['what']}")
