"""``fairtrial apply prequential``: logged losses of runs go in, their codes, bounds and a page come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fairtrial.errors import InputError
from fairtrial.outputs import check_file


def prequential(
    table: Annotated[
        Path,
        typer.Argument(help="CSV or Parquet with columns run, example, loss_first, loss_final; correct where known."),
    ],
    *,
    classes: Annotated[int | None, typer.Option(help="Number of classes; left out for real targets.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result here: .json, .csv or .html.")] = None,
    expensive: Annotated[int, typer.Option(help="Examples to list, the most expensive of each run.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, nothing else.")] = False,
) -> None:
    """Read code length, regret and bounds off logged training losses, and list the examples that cost most."""
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

    from fairtrial.tables import read_table
    from fairtrial.training.prequential.report import prequential_report

    check_file(out, ".json", ".csv", ".html", inputs=[table])
    logged = read_table(table)
    if "run" not in logged:
        logged["run"] = "run"
    runs = []
    for name, rows in logged.groupby("run", sort=False, dropna=False):
        try:
            report = prequential_report(rows.drop(columns="run"), num_classes=classes)
        except InputError as error:
            raise InputError(f"{table}, run {name}: {error}") from error
        costly = report.per_example.nlargest(expensive, "loss_first")["example"].tolist()
        runs.append({"run": name, **report.to_dict(), "expensive": costly})
    frame = pd.DataFrame(runs)
    text = json.dumps(json.loads(frame.to_json(orient="records")), indent=2)
    if out is not None:
        written = {".json": text, ".csv": frame.to_csv(index=False), ".html": frame.to_html(index=False)}[out.suffix]
        out.write_text(written, encoding="utf-8")
    if as_json:
        print(text)
        return
    shown = Table("run", "n", "code length", "regret", "final loss", "interpolating", "most expensive")
    for run in runs:
        shown.add_row(
            str(run["run"]), str(run["n"]), f"{run['code_length']:.1f}", f"{run['regret']:.1f}",
            f"{run['mean_final_loss']:.3f}", "yes" if run["interpolating"] else "no",
            ", ".join(map(str, run["expensive"])),
        )  # fmt: skip
    console = Console()
    console.print(shown)
    if not all(run["interpolating"] for run in runs):
        console.print("Among runs that fit differently choose none by regret: it prefers the under-trained one.")
    if out is not None:
        console.print(f"written to {out}")
