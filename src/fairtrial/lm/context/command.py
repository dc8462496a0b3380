"""``fairtrial apply proper-correction``: queries with candidate contexts go in, scores and selections come out."""

from __future__ import annotations

import json
import math
import os
import warnings
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
    selector = ProperCorrectionSelector(loaded, tokenizer, k=k)
    partial = out.with_name(f".{out.name}.partial")
    none = harmful = diagnosed = 0
    lost: list[str] = []
    try:
        with (
            partial.open("w", encoding="utf-8") as file,
            typer.progressbar(rows, label="queries", file=None, hidden=as_json) as bar,
        ):
            for number, row in enumerate(bar, start=1):
                try:
                    query, contexts, choices, start = row["query"], row["contexts"], row.get("choices"), row["start"]
                    answer = row.get("answer")
                    chosen = selector.select(query, contexts, choices=choices, start=start)
                    told: dict[str, Any] = {"selected": chosen.indices, "scores": chosen.scores.tolist()}
                    told["reason"] = chosen.reason
                    if answer:
                        meter = CorrectionMeter(loaded, tokenizer, space="choices" if choices else "generate")
                        found = meter.diagnose(
                            query, contexts, choices=choices, answer=answer, start=start, attention=False
                        )
                        told["verdicts"] = found["verdict"].tolist()
                        for name in ("rho", "cos"):  # JSON has no infinity and no nan
                            told[name] = [x if math.isfinite(x) else None for x in found[name].tolist()]
                        harmful += int(found["harmful"].sum())
                        diagnosed += len(found)
                    none += not chosen.indices
                except InputError as error:  # such as a passage beyond the window: the other queries count
                    told = {"selected": [], "error": str(error)}
                    lost.append(f"query {number}: {error}")
                file.write(json.dumps({**row, **told}, ensure_ascii=False) + "\n")
        if len(lost) == len(rows):
            raise InputError(f"{source}, {lost[0]}")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    summary = {"out": str(out), "queries": len(rows), "none": none, "diagnosed": diagnosed, "harmful": harmful}
    summary["lost"] = len(lost)
    if lost:
        warnings.warn(f"{source}: {len(lost)} of {len(rows)} queries are lost, the first at {lost[0]}", stacklevel=2)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    typer.echo(f"{len(rows) - len(lost)} queries, {none} of them better without any context")
    if diagnosed:
        typer.echo(f"{harmful} of {diagnosed} contexts with a known answer raise the error")
    typer.echo(f"written to {out}")


def read_queries(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of queries; the message of an error names the line."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text in UTF-8") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise InputError("not a JSON object")
            rows.append(checked_query({"start": "", **row}))
        except (json.JSONDecodeError, InputError) as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise InputError(f"{path}: no queries in it")
    return rows


def checked_query(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row; refuse one that no answer can be selected for or, if it has an answer, measured on."""
    from fairtrial.causal_lm.prompts import checked_texts
    from fairtrial.lm.context.answers import checked_choices, checked_start, choice_of
    from fairtrial.lm.context.selector import FEWEST

    if not isinstance(row.get("query"), str) or not isinstance(row.get("contexts"), list):
        raise InputError("give an object with a text 'query' and a list 'contexts'")
    checked_texts([row["query"]], "query")
    if len({*checked_texts(row["contexts"], "context")}) < FEWEST:
        raise InputError(f"give at least {FEWEST} different contexts, for a consensus")
    checked_start(row["start"])
    answer, choices = row.get("answer"), row.get("choices")
    if not isinstance(answer, str | None) or (answer and not answer.strip()):
        raise InputError(f"the answer {answer!r} is no text")
    if choices is not None:
        choices = checked_choices(choices)
        if answer:
            choice_of(answer, choices)
    return row
