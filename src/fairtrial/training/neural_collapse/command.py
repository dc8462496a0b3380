"""``fairtrial apply neural-collapse``: features, last layer and labels go in, the collapse report comes out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial.errors import InputError, MissingExtraError
from fairtrial.outputs import check_file


def neural_collapse(
    file: Annotated[Path, typer.Argument(help=".npz or .safetensors with features, weight, labels, and bias or none.")],
    *,
    out: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    eps: Annotated[float, typer.Option(help="V that counts as collapsed, for the slowdown.")] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Measure how far a trained classifier is from neural collapse, and which class modes lag."""
    from rich.console import Console
    from rich.table import Table

    from fairtrial.training.neural_collapse.report import collapse_report

    check_file(out, inputs=[file])
    arrays = read(file)
    try:
        report = collapse_report(arrays["features"], arrays["weight"], arrays["labels"], arrays.get("bias"))
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    told = {name: _plain(value) for name, value in report.to_dict().items()}
    told["slowdown"] = _plain(report.slowdown(eps))
    text = json.dumps(told, indent=2)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
        return
    table = Table("", "value", "at collapse")
    for name, words in (
        ("nc1", "NC1 within over between classes"), ("nc2_norm", "NC2 spread of the means' norms"),
        ("nc2_angle", "NC2 largest deviation of an angle's cosine"), ("nc3", "NC3 last layer against class means"),
        ("nc4", "NC4 disagreement with the nearest mean"), ("v_logit", "V of the logits' modes"),
        ("v_weight", "V of the last layer's modes"), ("v_mean", "V of the class means' modes"),
    ):  # fmt: skip
        table.add_row(words, f"{getattr(report, name):.4g}", "0")
    console = Console()
    console.print(table)
    order = report.lagging.argsort()
    most = abs(report.lagging).max()
    sides = [[c for c in side if sign * report.lagging[c] > 0.1 * most][:2]
             for side, sign in ((order, -1), (order[::-1], 1))]  # fmt: skip
    ends = " against ".join(", ".join(map(str, side)) for side in sides)
    console.print(f"accuracy {report.accuracy:.3f}; the mode that lags most sets classes {ends}")
    if not report.simplex_possible:
        console.print("the features have fewer than K - 1 dimensions: no simplex fits into them")
    if report.missing:
        console.print(f"{report.missing} modes are missing altogether: V is infinite")
    else:
        console.print(f"mean mode must grow by {report.slowdown(eps):.3g} more for V to fall below {eps:g}")


def read(file: Path) -> dict[str, Any]:
    """Read the arrays of an .npz or .safetensors file.

    Raises
    ------
    InputError
        If it cannot be read, or lacks an array.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    try:
        if file.suffix == ".safetensors":
            try:
                from safetensors.numpy import load_file
            except ImportError as error:
                raise MissingExtraError("training", "safetensors") from error
            arrays = dict(load_file(file))
        else:
            import numpy as np

            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
    except MissingExtraError:
        raise
    except Exception as error:  # each format has errors of its own
        raise InputError(f"{file}: cannot be read as {file.suffix or 'npz'}: {error}") from error
    if lacking := {"features", "weight", "labels"} - set(arrays):
        raise InputError(
            f"{file} lacks {', '.join(sorted(lacking))}: it holds {', '.join(sorted(arrays)) or 'nothing'}"
        )
    return arrays


def _plain(value: Any) -> Any:
    """Return a JSON value; infinity as a word, since JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
