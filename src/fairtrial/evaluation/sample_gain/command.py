"""``fairtrial apply sample-gain``: a table of scores goes in; intervals, sample gains and verdicts come out."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.outputs import check_file

if TYPE_CHECKING:
    from fairtrial.evaluation.sample_gain.comparison import Comparison
    from fairtrial.stats import Interval, SampleGain


def sample_gain(
    scores: Annotated[
        Path,
        typer.Argument(
            help="CSV or Parquet with columns candidate, split, sample, score; or candidate, split, score, n_test, "
            "n_train where only fold means are known."
        ),
    ],
    *,
    baseline: Annotated[str | None, typer.Option(help="Compare all others with this candidate.")] = None,
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="For errors and losses.")] = False,
    margin: Annotated[float, typer.Option(help="What a difference must exceed.")] = 0.0,
    variance: Annotated[
        str | None,
        typer.Option(
            help="How two splits relate: design, nadeau_bengio, crossed (every run answers the same items) or "
            "independent. Left out: design where samples are known, else nadeau_bengio."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Say how far cross-validation scores can be trusted, what more splits would bring, and whether A beats B.

    SCORES has the columns candidate, split, sample, score; or candidate, split, score, n_test, n_train.
    """
    from fairtrial.evaluation.sample_gain.comparison import compare_scores, gain_of
    from fairtrial.evaluation.sample_gain.score_table import read_scores
    from fairtrial.stats import VARIANCE_MODES, interval

    if variance is not None and variance not in VARIANCE_MODES:
        raise UnknownNameError("variance", variance, VARIANCE_MODES)
    if not math.isfinite(margin):
        raise InputError(f"--margin {margin}: a number")
    check_file(out, inputs=[scores])
    tables = read_scores(scores)
    compared = None
    if baseline is not None:
        compared = compare_scores(
            tables, baseline=baseline, higher_is_better=not lower_is_better, margin=margin,
            variance=variance,  # type: ignore[arg-type]
        )  # fmt: skip
        own = {label: (compared.scores[label], compared.gains[label]) for label in tables}
    else:
        mode: Any = variance
        own = {label: (interval(table, variance=mode), gain_of(table, mode)) for label, table in tables.items()}
    report = {
        "scores": str(scores),
        "candidates": [_candidate(label, *both) for label, both in own.items()],
        "baseline": baseline,
        "verdicts": [] if compared is None else _verdicts(compared),
    }
    text = json.dumps(_finite(report), indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
        return
    for label, (one, gain) in own.items():
        typer.echo(f"{label}: {one}" + (f"\n  {gain}" if gain else ""))
    for label, verdict in {} if compared is None else compared.verdicts.items():  # type: ignore[attr-defined]
        typer.echo(f"{label} against {baseline}: {verdict}")
    if out is not None:
        typer.echo(f"written to {out}")


def _candidate(label: str, one: Interval, gain: SampleGain | None) -> dict[str, Any]:
    return {
        "candidate": label,
        "mean": one.mean,
        "low": one.low,
        "high": one.high,
        "level": one.level,
        "variance": one.variance,
        "df": one.df,
        "splits": one.n_cells,
        "notes": list(one.notes),
        "sample_gain": gain and gain.value,
        "correlation": gain and gain.correlation,
        "ahead": gain and {f"{b:g}": more for b, more in gain.ahead.items()},
    }


def _verdicts(compared: Comparison) -> list[dict[str, Any]]:
    return [
        {"candidate": label, **asdict(verdict), **dict(zip(("low95", "high95"), compared.plain[label], strict=True))}
        for label, verdict in compared.verdicts.items()
    ]


def _finite(value: Any) -> Any:
    """Replace what JSON has no number for by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
