"""What the commands print."""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial import cards
from fairtrial.cards import AREAS, Card
from fairtrial.cli import CELLS_LOST, DONE
from fairtrial.errors import UnknownNameError

if TYPE_CHECKING:
    from rich.console import Console

    from fairtrial.report.read import Claim, Document, Part
    from fairtrial.trial.result import Result

STYLES = {
    "HOLDS": "bold green",
    "FAILS": "bold red",
    "UNDECIDED": "bold yellow",
    "REPORTED": "cyan",
    "UNMEASURED": "dim",
}
WIDE = 100  # columns from which on there is room for the units


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
    from rich.text import Text

    from fairtrial.report.read import Document

    console = Console(highlight=False, markup=False)  # brackets are intervals and ids
    _verdicts(console, Document.model_validate(outcome.document))
    if lost:
        console.print(Text(f"{lost} cell{'s were' if lost > 1 else ' was'} lost: --retry measures again", style="red"))
    console.print(Text(f"report: {_short(report)}"), soft_wrap=True)
    return CELLS_LOST if lost else DONE


def _verdicts(console: Console, document: Document) -> None:
    """Print every claim's sentence and, below it, its verdict and numbers, in columns."""
    from rich.text import Text

    from fairtrial.report import words

    entries = [entry for claim in document.claims for entry in _with_children(claim)]
    numbers = [_numbers(claim, document.part(claim.part)) for claim, _, _ in entries]
    widths = [max(len(row[column]) for row in numbers) for column in range(3)] if numbers else []
    units = console.width >= WIDE
    for (claim, parent, depth), (found, interval, bound) in zip(entries, numbers, strict=True):
        left, inner = "  " * depth, "  " * depth + "    "
        text = claim.text if parent is None or claim.text != parent.text else ""  # the id says at which value
        head = Text(textwrap.fill(f"{claim.id}  {text}", console.width, initial_indent=left, subsequent_indent=inner))
        head.stylize("bold", len(left), len(left) + len(claim.id))
        console.print(head)
        state = (f"{words.state(claim.state):<12}", STYLES[claim.state])
        columns = f"  {found:>{widths[0]}}  {interval:<{widths[1]}}  {bound:<{widths[2]}}"
        if units and claim.units:
            columns += f"  {claim.units} {claim.over}{'s' * (claim.units > 1)}"
        line = Text.assemble(inner, state, columns)
        line.rstrip()
        console.print(line)
        if claim.reason and not claim.claims:  # a composite one's reason is that of one of its parts
            reason = textwrap.fill(claim.reason, console.width, initial_indent=inner, subsequent_indent=inner)
            console.print(Text(reason, style="dim"))
    if any(claim.state != "REPORTED" and not math.isnan(claim.low) for claim, _, _ in entries):
        level = f"together they keep {document.level * 100:g} %"
        console.print(Text(f"intervals at the level of each claim's rank (Holm); {level}", style="dim"))


def _with_children(claim: Claim, parent: Claim | None = None, depth: int = 0) -> list[tuple[Claim, Claim | None, int]]:
    below = [entry for child in claim.claims for entry in _with_children(child, claim, depth + 1)]
    return [(claim, parent, depth), *below]


def _numbers(claim: Claim, part: Part) -> tuple[str, str, str]:
    """Return estimate, interval and what is claimed; of a difference of logarithms the ratios it means."""
    from fairtrial.report import words

    ratio = words.is_ratio(claim)
    seen = words.as_ratio(claim, part)
    if math.isnan(seen.difference):
        return "", "", ""
    unit = " x" if ratio else ""
    sign = "" if ratio or claim.quantity.kind in ("level", "statistic") else "+"
    interval = "" if math.isnan(seen.low) else f"[{seen.low:{sign}.3g}, {seen.high:{sign}.3g}]"
    bound = " ".join(f"{'>' if side == 'above' else '<'} {value:.3g}{unit}" for side, value in seen.bound.items())
    return f"{seen.difference:{sign}.3g}{unit}", interval, bound


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
