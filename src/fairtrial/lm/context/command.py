"""``fairtrial apply proper-correction``: queries with candidate contexts go in, scores and selections come out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial.errors import InputError
from fairtrial.outputs import check_new_file


def proper_correction(
    model: Annotated[Path, typer.Argument(help="Causal model: a folder written by save_pretrained, or a .gguf file.")],
    *,
    source: Annotated[
        Path,
        typer.Option("--in", help=".jsonl file; a row has query, contexts, and perhaps choices, answer and start."),
    ],
    out: Annotated[Path, typer.Option(help="New .jsonl file: the rows with scores and what was selected.")],
    k: Annotated[int, typer.Option(help="Contexts to select at most.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, nothing else.")] = False,
) -> None:
    """Select, for each query, the contexts that should correct the model properly, or none."""
    from fairtrial.causal_lm.loading import check_device, check_loadable, load
    from fairtrial.lm.context.meter import CorrectionMeter
    from fairtrial.lm.context.selector import ProperCorrectionSelector

    check_new_file(out)
    rows = read_queries(source)
    check_device(device)
    check_loadable(model)
    loaded, tokenizer = load(model, device=device)
    selector, meter = ProperCorrectionSelector(loaded, tokenizer, k=k), CorrectionMeter(loaded, tokenizer)
    partial = out.with_name(f".{out.name}.partial")
    none = harmful = diagnosed = 0
    try:
        with (
            partial.open("w", encoding="utf-8") as file,
            typer.progressbar(rows, label="queries", file=None, hidden=as_json) as bar,
        ):
            for number, row in enumerate(bar, start=1):
                try:
                    query, contexts, choices, start = row["query"], row["contexts"], row.get("choices"), row["start"]
                    chosen = selector.select(query, contexts, choices=choices, start=start)
                    told: dict[str, Any] = {"selected": chosen.indices, "scores": chosen.scores.tolist()}
                    told["reason"] = chosen.reason
                    if row.get("answer") and choices:
                        found = meter.diagnose(
                            query, contexts, choices=choices, answer=row["answer"], start=start, attention=False
                        )
                        told["verdicts"] = found["verdict"].tolist()
                        told["rho"] = found["rho"].tolist()
                        told["cos"] = [None if c != c else c for c in found["cos"].tolist()]
                        harmful += int(found["harmful"].sum())
                        diagnosed += len(found)
                except InputError as error:
                    raise InputError(f"{source}, query {number}: {error}") from None
                none += not chosen.indices
                file.write(json.dumps({**row, **told}, ensure_ascii=False) + "\n")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    summary = {"out": str(out), "queries": len(rows), "none": none, "diagnosed": diagnosed, "harmful": harmful}
    if as_json:
        typer.echo(json.dumps(summary))
        return
    typer.echo(f"{len(rows)} queries, {none} of them better without any context")
    if diagnosed:
        typer.echo(f"{harmful} of {diagnosed} contexts with a known answer raise the error")
    typer.echo(f"written to {out}")


def read_queries(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of queries; the message of an error names the line."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = {"start": "", **json.loads(line)}
            good = (
                isinstance(row["query"], str)
                and isinstance(row["contexts"], list)
                and all(isinstance(context, str) for context in row["contexts"])
                and isinstance(row["start"], str)
            )
        except (json.JSONDecodeError, KeyError, TypeError):
            good = False
        if not good:
            raise InputError(
                f"{path}, line {number}: not a JSON object with 'query', a list of 'contexts' and perhaps 'start'"
            )
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: no queries in it")
    return rows
