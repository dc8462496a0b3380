"""The catalogue as Markdown, from the cards and the committed results, so that neither README nor pages can disagree.

As a script it writes the README's table: ``python scripts/catalogue.py README.md``. As a hook of mkdocs it makes a page
of every system: what the card says, around what ``docs/systems/<name>.md`` adds by hand where there is such a file.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fairtrial.cards import AREAS, Card, cards
from fairtrial.errors import FairtrialError
from fairtrial.report import words
from fairtrial.report.read import Claim, Document

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- methods: written by scripts/catalogue.py -->", "<!-- end of methods -->"


def systems() -> list[Card]:
    """Return the cards of the 56 systems."""
    return [card for card in cards().values() if card.is_system]


def result(card: Card) -> dict[str, Any] | None:
    """Return the committed result of a system's default run, if there is one."""
    file = ROOT / "results" / card.shown / "result.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


# ----------------------------------------------------------------------------------------------------------- the table


def methods_table(link: Callable[[Card], str]) -> str:
    """Return the table of all methods, each linked to ``link(card)``."""
    works = sum(card.state == "working" for card in systems())
    lines = [
        f"{works} of {len(systems())} methods {'works' if works == 1 else 'work'} today; the others have their card.",
        "",
        "| Area | Method | What it is | State |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {AREAS[card.area]} | [{card.method}]({link(card)}) | {card.line} | {_state(card)} |" for card in systems()
    ]
    return "\n".join(lines)


def _state(card: Card) -> str:
    """Return a card's state and, once measured, how many claims of its default run hold, fail and are undecided."""
    document = result(card)
    if document is None:
        return card.state
    counts = Counter(claim.state for claim in Document.model_validate(document).claims)
    said = [f"{counts[state]} {words.state(state)}" for state in words.COUNTED if counts[state]]
    return f"{card.state}: {', '.join(said)}"


def with_table(text: str, link: Callable[[Card], str]) -> str:
    """Return ``text`` with the table between its markers written anew."""
    before, marker, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise SystemExit(f"the text lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{methods_table(link)}\n\n{END}{after}"


def readme(text: str) -> str:
    """Return the README with its table written anew."""
    return with_table(text, lambda card: f"src/fairtrial/{card.area}/{card.name}")


# ----------------------------------------------------------------------------------------------------------- the pages


def system_page(card: Card, by_hand: str) -> str:
    """Return a system's page: the card's head, what was written by hand, claims with verdicts, the paper's word."""
    document = result(card)
    head = [f"# {card.method}", "", card.line, "", _facts(card), ""]
    head += ["**Use it when** " + _lower(card.use_when), "", "**Not when** " + _lower(card.not_when), ""]
    if card.state == "working":
        head += [
            "```bash",
            f"fairtrial run {card.shown}",
            *(f"fairtrial apply {c} --help" for c in card.commands),
            "```",
        ]
    else:
        head += [f"!!! note\n    This system is planned: {card.method} has a card and no code yet."]
    tail = ["## What its trial asks", "", *(_verdicts(card, document) if document else _claims(card)), ""]
    tail += ["## What the paper states", "", "The paper's word, never measured here:", ""]
    tail += [f"- {statement}" for statement in card.paper]
    return "\n".join([*head, "", by_hand.strip(), "", *tail, ""])


def _facts(card: Card) -> str:
    names = ", ".join(f"`{name}`" for name in (card.shown, *card.aliases))
    extras = f"fairtrial[{','.join(card.extras)}]" if card.extras else "fairtrial"
    samples = ", ".join(f"`{sample}`" for sample in card.samples) or "none"
    return f"{AREAS[card.area]} · {card.state} · also found as {names} · `pip install '{extras}'` · samples: {samples}"


def _claims(card: Card) -> list[str]:
    return [f"- **{claim.id}** {claim.text}" for claim in card.claims]


def _verdicts(card: Card, document: dict[str, Any]) -> list[str]:
    """Return the claims of a measured trial as a table with their verdicts and intervals."""
    lines = [
        "| Claim | Verdict | Estimate | Interval | Cells |",
        "| --- | --- | --- | --- | --- |",
    ]
    read = Document.model_validate(document)
    for claim, depth in _with_parts(read.claims):
        seen = words.as_ratio(claim, read.part(claim.part))
        unit = " ×" if words.is_ratio(claim) else ""
        interval = "" if math.isnan(seen.low) else f"{seen.low:.3g} to {seen.high:.3g}{unit}"
        estimate = "" if math.isnan(seen.difference) else f"{seen.difference:.3g}{unit}"
        text = f"**{claim.id}** {claim.text}" + (f" ({claim.reason})" if claim.reason else "")
        cells = (f"{claim.cells}" if claim.cells else "") + (f", {claim.lost} lost" if claim.lost else "")
        row = (depth * "↳ " + text, words.state(claim.state), estimate, interval, cells)
        lines.append(f"| {' | '.join(row)} |")
    when = f"Measured on {document['finished'][:10]} by `{document['command']}`"
    return [
        *lines,
        "",
        when + (", with other code or library versions than today's." if _is_older(document) else "."),
        *_figure(document),
    ]


def _with_parts(claims: list[Claim], depth: int = 0) -> Iterator[tuple[Claim, int]]:
    """Yield the claims, each followed by those it is made of."""
    for claim in claims:
        yield claim, depth
        yield from _with_parts(claim.claims, depth + 1)


def _is_older(document: dict[str, Any]) -> bool:
    """Return whether what the candidates' code and libraries are is no longer what was measured."""
    from fairtrial.trial.result import is_current

    try:
        return not is_current(document)
    except (FairtrialError, ImportError):  # the pages are built without this system's libraries
        return False


def _figure(document: dict[str, Any]) -> list[str]:
    """Return the figure of quality against cost that the trial's report shows first."""
    from fairtrial.report.figures import cost_quality, panels

    read = Document.model_validate(document)
    figures = [cost_quality(read, panel, f"figure{i}") for i, panel in enumerate(panels(read))]
    first = next((figure for figure in figures if figure), None)
    return ["", f"<figure class='trial'>{first.svg}<figcaption>{first.caption}</figcaption></figure>"] if first else []


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


# ------------------------------------------------------------------------------------------------------ hooks of mkdocs

_NO_RUN = re.compile(r"^```(\w+) no-run (.+)$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Give every system its place in the navigation, under its area."""
    methods = next(entry["Methods"] for entry in config["nav"] if "Methods" in entry)
    for area, title in AREAS.items():
        pages = [{card.method: f"systems/{card.shown}.md"} for card in cards().values() if card.area == area]
        if pages:
            methods.append({title: pages})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for every system that has none written by hand."""
    from mkdocs.structure.files import File

    written = {file.src_uri for file in files}
    for card in cards().values():
        if (path := f"systems/{card.shown}.md") not in written:
            files.append(File.generated(config, path, content=""))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Compose the systems' pages, fill in the table, and turn a block's reason not to run into its title."""
    uri = page.file.src_uri
    for card in cards().values():
        if uri == f"systems/{card.shown}.md":
            markdown = system_page(card, markdown)
    if BEGIN in markdown:
        markdown = with_table(markdown, lambda card: f"{card.shown}.md")
    return _NO_RUN.sub(r'```\1 title="\2"', markdown)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(readme(file.read_text(encoding="utf-8")), encoding="utf-8")
