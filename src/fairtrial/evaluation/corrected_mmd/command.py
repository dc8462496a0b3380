"""``fairtrial apply corrected-mmd``: measurements, part of them with truths, are compared with another table."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


def corrected_mmd(
    data: Annotated[Path, typer.Argument(help="CSV file of measurements; a blank truth is a row not audited.")],
    *,
    truth: Annotated[list[str], typer.Option(help="Column of the truth; repeat it for several features.")],
    noisy: Annotated[list[str], typer.Option(help="Column of the measurement, in the order of --truth.")],
    against: Annotated[Path, typer.Option(help="CSV file to compare with: columns named as --truth, or as many.")],
    estimator: Annotated[str, typer.Option(help="embedding or pairwise.")] = "embedding",
    form: Annotated[str, typer.Option(help="u (pairs of different rows) or v.")] = "u",
    strength: Annotated[str, typer.Option(help="How far to trust the measurements: a number, or auto.")] = "1",
    calibrated: Annotated[bool, typer.Option("--calibrated", help="Regress truth on measurement first.")] = False,
    kernel: Annotated[str, typer.Option(help="gaussian or energy.")] = "gaussian",
    strata: Annotated[str | None, typer.Option(help="Column of the strata inside which rows were audited.")] = None,
    target_se: Annotated[float | None, typer.Option(help="Also say how many rows to audit for this error.")] = None,
    level: Annotated[float, typer.Option(min=0.5, max=0.9999, help="Confidence of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds of --strength auto and --calibrated.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Estimate how far the truths behind noisy measurements are from another sample, and how sure that is."""
    import numpy as np

    from fairtrial.evaluation.corrected_mmd.designs import Stratified
    from fairtrial.evaluation.corrected_mmd.kernels import EnergyKernel
    from fairtrial.evaluation.corrected_mmd.mec_mmd import mec_mmd_test, plan_audit

    if len(truth) != len(noisy):
        raise InputError(f"--truth has {len(truth)} columns and --noisy {len(noisy)}: give as many")
    if kernel not in ("gaussian", "energy"):
        raise InputError(f"--kernel {kernel}: give gaussian or energy")
    table, other = _read(data), _read(against)
    x, z = _columns(table, data, truth, blank=True), _columns(table, data, noisy)
    y = _columns(other, against, truth if set(truth) <= set(other) else _all_of(other, against, len(truth)))
    filled = ~np.isnan(x)
    if (filled.any(1) != filled.all(1)).any():
        row = int((filled.any(1) != filled.all(1)).argmax())
        raise InputError(f"{data}: row {row + 1} has some of its truths: fill all of --truth, or leave all blank")
    audited = np.flatnonzero(filled.all(1))
    options: dict[str, Any] = {"estimator": estimator, "form": form}
    if kernel == "energy":
        options["kernel"] = EnergyKernel()
    fitted: dict[str, Any] = {
        "strength": _strength(strength),
        "proxy": "calibrated" if calibrated else None,
        "seed": seed,
    }
    if strata is not None:
        if strata not in table:
            raise InputError(f"{data} has no column {strata!r}; it has {', '.join(map(str, table))}")
        if table[strata].isna().any():
            row = int(table[strata].isna().to_numpy().argmax())
            raise InputError(f"{data}: column {strata!r} is blank in row {row + 1}: every row belongs to a stratum")
        fitted["inclusion"] = Stratified(table[strata].to_numpy())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        result = mec_mmd_test(z, x[audited], audited, y, level=1 - level, **options, **fitted)
        planned = None
        if target_se is not None:
            if strength == "auto" or calibrated or strata is not None:
                raise InputError("--target-se plans a simple random audit with a fixed --strength; leave the rest out")
            planned = plan_audit(z, x[audited], audited, y, target_se, strength=float(strength), **options)
    estimate = result.estimate
    low, high = estimate.interval(level, around="oracle")
    answer = {
        "mmd2": float(estimate.value),
        "standard_error": estimate.standard_error,
        "variance": estimate.variance,
        "interval": list(result.interval),
        "interval_of_full_audit": [low, high],
        "p_value": result.p_value,
        "bias_of_plain": estimate.bias_of_plain,
        "bias_standard_error": estimate.bias_standard_error,
        "strength": estimate.strength,
        "rows": len(z),
        "audited": len(audited),
        "against": len(y),
        "form": form,
        "audit_needed": planned,
        "warnings": sorted({str(warning.message) for warning in caught}),
    }
    if as_json:
        typer.echo(json.dumps(answer))
        return
    _print(answer, level)


def _print(answer: dict[str, Any], level: float) -> None:
    """Print what was found, and what it means for the reader."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=f"{answer['rows']} rows, {answer['audited']} audited")
    low, high = answer["interval"]
    table.add_row("MMD^2, corrected", f"{answer['mmd2']:.5g}")
    table.add_row("standard error", f"{answer['standard_error']:.2g}")
    for part, variance in answer["variance"].items():
        table.add_row(f"  of it {part.replace('_', ' ')}", f"{variance**0.5:.2g}")
    table.add_row(f"{level:.0%} interval", f"{low:.5g} to {high:.5g}")
    low, high = answer["interval_of_full_audit"]
    table.add_row("the same, had all these rows been audited", f"{low:.5g} to {high:.5g}")
    table.add_row("p-value of no difference", f"{answer['p_value']:.3g}")
    table.add_row("the plain MMD^2 is off by", f"{answer['bias_of_plain']:.5g} +- {answer['bias_standard_error']:.2g}")
    table.add_row("trust in the measurements (strength)", f"{answer['strength']:.2f}")
    if answer["audit_needed"] is not None:
        table.add_row("rows to audit for the error asked for", str(answer["audit_needed"]))
    console = Console()
    console.print(table)
    pays = abs(answer["bias_of_plain"]) > answer["bias_standard_error"]
    console.print(
        "correction pays: the plain distance is off by more than the audit's own error"
        if pays
        else "the plain distance is off by less than the audit's own error: correction may not pay for itself here"
    )
    for warning in answer["warnings"]:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)


def _read(file: Path) -> pd.DataFrame:
    from fairtrial.tables import read_table

    return read_table(file)


def _columns(table: pd.DataFrame, file: Path, names: list[str], *, blank: bool = False) -> np.ndarray:
    """Return columns as numbers (n, d), NaN where blank."""
    import numpy as np
    import pandas as pd

    for name in names:
        if name not in table:
            raise InputError(f"{file} has no column {name!r}; it has {', '.join(map(str, table))}")
        if not pd.api.types.is_numeric_dtype(table[name]):
            raise InputError(f"{file}: column {name!r} holds something that is not a number")
        if not blank and table[name].isna().any():
            row = int(table[name].isna().to_numpy().argmax())
            raise InputError(f"{file}: column {name!r} is blank in row {row + 1}; only truths may be")
    return np.ascontiguousarray(table[names].to_numpy(float))


def _all_of(table: pd.DataFrame, file: Path, count: int) -> list[str]:
    """Return all columns of a table that has as many as there are features."""
    if table.shape[1] != count:
        raise InputError(f"{file}: name its columns as --truth, or leave {count} in it; it has {table.shape[1]}")
    return list(map(str, table))


def _strength(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        if abs(value := float(text)) < 1e6:
            return value
    except ValueError:
        pass
    raise InputError(f"--strength must be a number or auto, got {text!r}")
