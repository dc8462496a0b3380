"""``fairtrial apply fgn-head``: features and labels go in, a fitted softmax head comes out."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial.errors import InputError
from fairtrial.outputs import check_new_file


def fgn_head(
    features: Annotated[Path, typer.Argument(help=".npy file (n, D) of features, an example a row.")],
    labels: Annotated[Path, typer.Argument(help=".npy file (n,) of labels.")],
    *,
    out: Annotated[Path, typer.Option(help="New .safetensors file: weight (K, D), bias (K,), as of nn.Linear.")],
    c: Annotated[float, typer.Option("--C", help="Inverse strength of the penalty, as in LogisticRegression.")] = 1.0,
    batch_size: Annotated[int, typer.Option(help="Examples a step; 0 = all.")] = 0,
    max_iter: Annotated[int, typer.Option(help="Steps, or passes with --batch-size.")] = 50,
    tol: Annotated[float, typer.Option(help="Stop at smaller relative decreases.")] = 1e-6,
    test: Annotated[float, typer.Option(help="Share of the examples, the last ones, to measure on.")] = 0.2,
    seed: Annotated[int, typer.Option(help="Orders the batches.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Fit a linear softmax head on fixed features by Fast Gauss-Newton."""
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from sklearn.exceptions import ConvergenceWarning

    from fairtrial.training.gauss_newton.classifier import FGNClassifier

    check_new_file(out)
    if not 0 <= test < 1 or batch_size < 0:
        raise InputError(f"--test {test}, --batch-size {batch_size}: a share in [0, 1), and a number of at least 0")
    x, y = _array(features), _array(labels)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise InputError(f"features {x.shape} and labels {y.shape}: give (n, D) and (n,)")
    cut = round(len(x) * (1 - test))
    model = FGNClassifier(C=c, batch_size=batch_size or None, max_iter=max_iter, tol=tol, random_state=seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        try:
            model.fit(x[:cut], y[:cut])
        except ValueError as error:  # scikit-learn's checks of the arrays and the options
            raise InputError(f"{features}, {labels}: {str(error).splitlines()[0]}") from error
    save_file({"weight": torch.from_numpy(model.coef_), "bias": torch.from_numpy(model.intercept_)}, out)
    report: dict[str, Any] = {
        "out": str(out),
        "classes": np.asarray(model.classes_).tolist(),
        "iterations": model.n_iter_,
        "settled": not any(issubclass(w.category, ConvergenceWarning) for w in caught),
    }
    for name, part in (("train", slice(None, cut)), ("test", slice(cut, None))):
        known = np.isin(y[part], model.classes_)
        if known.any():
            log_p = model.predict_log_proba(x[part][known])
            truth = np.searchsorted(model.classes_, y[part][known])
            report[f"{name}_loss"] = float(-log_p[np.arange(len(truth)), truth].mean())
            report[f"{name}_accuracy"] = float((log_p.argmax(1) == truth).mean())
    if as_json:
        typer.echo(json.dumps(report))
        return
    typer.echo(f"{len(model.classes_)} classes, {cut} examples, {model.n_iter_} iterations"
               + ("" if report["settled"] else "; not settled: raise --max-iter, or scale the features"))  # fmt: skip
    for name in ("train", "test"):
        if f"{name}_loss" in report:
            loss, accuracy = report[f"{name}_loss"], report[f"{name}_accuracy"]
            typer.echo(f"{name}: cross-entropy {loss:.4f} nats, accuracy {accuracy:.1%}")
    typer.echo(f"written to {out}")


def _array(path: Path) -> Any:
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a .npy file of numbers or words ({error})") from None
