"""``fairtrial apply ensemble-selection``: a table of answers goes in, the models to query and the floor come out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.errors import InputError
from fairtrial.options import checked_count
from fairtrial.outputs import check_file
from fairtrial.tables import read_table

if TYPE_CHECKING:
    from fairtrial.evaluation.ensemble_selection.selector import MutualInformationSelector


def ensemble_selection(
    answers: Annotated[Path, typer.Argument(help="Table of answers, .csv, .parquet or .jsonl: items x models.")],
    *,
    label: Annotated[str, typer.Option(help="Column that holds the labels.")] = "label",
    budget: Annotated[float, typer.Option(help="Cost of the queries for one item; without --costs, models.")] = 5,
    costs: Annotated[Path | None, typer.Option(help="A .csv of two columns: model, cost.")] = None,
    estimator: Annotated[str, typer.Option(help="variational, counts or shrunk.")] = "variational",
    min_gain: Annotated[float, typer.Option(help="Bits a model must surely add; -inf spends the budget.")] = 0.0,
    pairs: Annotated[bool, typer.Option("--pairs", help="Begin with the best pair, not the best model.")] = False,
    abstain: Annotated[bool, typer.Option("--abstain", help="An answer that is no class is no answer.")] = False,
    factors: Annotated[int, typer.Option(help="Factors of the copula, 1 or 2.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the folds.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Choose which models to query under a budget, and say how good any ensemble of them can get."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from fairtrial.evaluation.ensemble_selection.answers import read_answers
    from fairtrial.evaluation.ensemble_selection.selector import MutualInformationSelector

    check_file(out, inputs=[answers, costs])
    checked_count(factors, "--factors", most=2)
    frame, labels = read_answers(answers, label)
    selector = MutualInformationSelector(
        budget,
        None if costs is None else _costs(costs),
        estimator,  # type: ignore[arg-type]
        min_gain,
        2 if pairs else 1,
        abstain=abstain,
        random_state=seed,
    ).fit(frame, labels)
    prefixes = selector.gains_.to_dict("records")
    report = {
        "selected": selector.selected_,
        "stopped": selector.stopped_,
        "prefixes": prefixes,
        "fano_floor": selector.floor_,
        "copula": _copula(frame, labels, selector, factors),
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(report))
        return
    console = Console()
    table = Table(
        "model", "bits added", "bits", "cost", "accuracy", title="In the order of choice, with 95 % intervals"
    )
    for row in prefixes:
        table.add_row(
            escape(str(row["model"])),
            f"{row['gain']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
            f"{row['information']:.3f}",
            f"{row['cost']:g}",
            f"{row['accuracy']:.3f} [{row['accuracy_low']:.3f}, {row['accuracy_high']:.3f}]",
        )
    console.print(table)
    lines = [selector.stopped_, *_sentences(report, frame.shape[1]), *([f"written to {out}"] if out else [])]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)  # names and paths may hold brackets


def _copula(frame: Any, labels: Any, selector: MutualInformationSelector, factors: int) -> dict[str, Any] | None:
    """Return what the fitted copula says; None of a single model."""
    from fairtrial.evaluation.ensemble_selection.answers import encode
    from fairtrial.evaluation.ensemble_selection.copula import ErrorCopula

    if frame.shape[1] < 2:
        return None
    codes = encode(frame, selector.classes_, abstain=True).codes
    right = selector.classes_.searchsorted(labels.to_numpy())
    copula = ErrorCopula().fit(codes != right[:, None], factors, answers=frame, y=labels)
    floor, fit = copula.floor_interval(), copula.goodness_of_fit()
    two = len(selector.classes_) == 2 and (codes < 2).all()
    return {
        "floor": copula.floor(),
        "floor_low": max(0.0, floor.low),
        "floor_high": floor.high,
        "majority_error": copula.majority_error(),
        "majority_limit": copula.majority_error(math.inf) if two else None,
        "fit_p_value": fit.p_value,
        "trusted": fit.trusted,
        "bounded_pairs": [[str(copula.names_[i]), str(copula.names_[j])] for i, j in copula.bounded_],
    }


def _sentences(report: dict[str, Any], models: int) -> list[str]:
    lines = [f"Fano: no rule on the answers of all {models} models errs on less than {report['fano_floor']:.1%}"]
    if (copula := report["copula"]) is None:
        return lines
    interval = f"{copula['floor_low']:.1%} to {copula['floor_high']:.1%}"
    lines.append(f"the best rule on the answers of all {models} errs on {copula['floor']:.1%} ({interval})")
    if copula["majority_limit"] is not None:
        lines.append(
            f"a majority of all {models} errs on {copula['majority_error']:.1%}; "
            f"of more such models, however many, on {copula['majority_limit']:.1%}"
        )
    else:
        lines.append(f"a majority of all {models} errs on {copula['majority_error']:.1%}")
    if not copula["trusted"]:
        lines.append(f"the copula does not fit (p = {copula['fit_p_value']:.1g}): these two are not to be trusted")
    return lines


def _costs(path: Path) -> dict[str, float]:
    """Read model and cost from the first two columns of a CSV file."""
    try:
        table = read_table(path, text=True)
        names, costs = table.iloc[:, 0], table.iloc[:, 1].astype(float)
    except (ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: no table of costs ({reason}): write lines of model,cost under a header") from None
    if names.duplicated().any():
        raise InputError(f"{path}: {names[names.duplicated()].iloc[0]!r} has two costs: give each model one")
    return dict(zip(names, costs, strict=True))
