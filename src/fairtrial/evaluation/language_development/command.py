"""``fairtrial apply language-development``: a corpus, and perhaps a model, go in; a bench and a report come out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.errors import InputError
from fairtrial.outputs import check_new_folder

if TYPE_CHECKING:
    from rich.table import Table

    from fairtrial.evaluation.language_development.devbench import DevBench
    from fairtrial.evaluation.language_development.evaluation import DevReport


def language_development(
    corpus: Annotated[str, typer.Argument(help="The training corpus: a .txt or .cha file, a folder or a pattern.")],
    *,
    model: Annotated[
        Path | None,
        typer.Option(help="The model: a folder written by save_pretrained (causal or masked), or a .gguf file."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for items.jsonl, bench.json, report.json and curve.svg.")],
    unit: Annotated[str, typer.Option(help="What an utterance is: line, or sentence of running prose.")] = "line",
    per_cell: Annotated[int, typer.Option(help="Items wanted in each cell of phenomenon and frequency bin.")] = 194,
    held_out: Annotated[
        Path | None, typer.Option(help="Utterances the model was not trained on, as contexts of lexical items.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same items.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    items_only: Annotated[bool, typer.Option("--items-only", help="Generate the items and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, nothing else.")] = False,
) -> None:
    """Generate a benchmark from a training corpus in its own words, and score a model on it."""
    from rich.console import Console

    from fairtrial.evaluation.language_development.corpus import Corpus
    from fairtrial.evaluation.language_development.devbench import build_devbench
    from fairtrial.evaluation.language_development.evaluation import evaluate

    if model is None and not items_only:
        raise InputError("no model to score: give --model, or --items-only to generate the items")
    if unit not in ("line", "sentence"):
        raise InputError(f"--unit is line or sentence, not {unit!r}")
    check_new_folder(out)
    scorer = None if model is None or items_only else _scorer(model, device)
    training = Corpus.from_text(corpus, unit=unit)  # type: ignore[arg-type]
    contexts = None if held_out is None else Corpus.from_text(held_out, unit=unit)  # type: ignore[arg-type]
    bench = build_devbench(training, per_cell=per_cell, contexts=contexts, seed=seed)
    bench.save(out)
    if scorer is None:
        power = bench.power()
        if as_json:
            summary = {"out": str(out), "items": len(bench.items), "notes": list(bench.notes)}
            typer.echo(json.dumps({**summary, "cells": json.loads(power.to_json(orient="records"))}))
            return
        _say(Console(), _power_table(bench), f"{len(bench.items)} items written to {out}", *bench.notes)
        return
    report = evaluate(bench, scorer, seed=seed)
    (out / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
    report.plot_curve().savefig(out / "curve.svg")
    if as_json:
        typer.echo(json.dumps({"out": str(out), **json.loads(report.to_json())}))
        return
    lines = [f"written to {out}", *report.notes]
    if not math.isnan(report.macro):
        lines.insert(0, f"macro score {report.macro:.3f}: mean above guessing over the cells with enough items")
    _say(Console(), _accuracy_table(report), *lines)


def _scorer(model: Path, device: str) -> Any:
    """Return the scorer that a model's own config asks for."""
    from fairtrial.causal_lm.loading import check_device, check_loadable
    from fairtrial.evaluation.language_development.scorers import CausalScorer, MaskedScorer

    check_device(device)
    check_loadable(model)
    config = model / "config.json"
    kinds = json.loads(config.read_text(encoding="utf-8")).get("architectures") if config.is_file() else None
    masked = any(kind.endswith("ForMaskedLM") for kind in kinds or ())
    return (MaskedScorer if masked else CausalScorer).from_pretrained(model, device=device)


def _say(console: Any, table: Table, *lines: str) -> None:
    console.print(table)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)  # a path may hold brackets


def _power_table(bench: DevBench) -> Table:
    from rich.table import Table

    table = Table("phenomenon", "bin", "items", "words", "enough", title="Items by phenomenon and frequency bin")
    for row in bench.power().itertuples():
        table.add_row(str(row.phenomenon), str(row.bin), str(row.items), str(row.words), "yes" if row.enough else "no")
    return table


def _accuracy_table(report: DevReport) -> Table:
    """Lay out the accuracy of each phenomenon by bin; cells without enough items in brackets."""
    from rich.table import Table

    bins = sorted(report.cells.bin.unique())
    heads = [f"{4**b}-{4 ** (b + 1) - 1}" for b in bins]
    table = Table("phenomenon", *heads, title="Accuracy by occurrences of the word in the corpus")
    for phenomenon, cells in report.cells.groupby("phenomenon", sort=False):
        found = {
            row.bin: f"{row.accuracy:.2f}" if row.enough else f"({row.accuracy:.2f})" for row in cells.itertuples()
        }
        table.add_row(str(phenomenon), *(found.get(b, "") for b in bins))
    return table
