"""``fairtrial apply fiedler-prune``: a model folder or GGUF file and a text go in, a pruned model folder comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from fairtrial.lm.pruning.oneshot import PruneReport


def fiedler_prune(
    model: Annotated[Path, typer.Argument(help="Folder written by save_pretrained, or a .gguf file.")],
    *,
    calibration: Annotated[
        Path, typer.Option(help="Representative text: a .txt or .jsonl file, or a folder of them; 30-100 kB do.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the pruned model, new or empty.")],
    sparsity: Annotated[float, typer.Option(help="Share of zeros in [0, 1).")] = 0.5,
    intra: Annotated[str, typer.Option(help="Local metric: wanda, magnitude, ria, sparsegpt or random.")] = "wanda",
    pattern: Annotated[str | None, typer.Option(help="N:M, of every M inputs keep N; overrides sparsity.")] = None,
    group: Annotated[
        str, typer.Option(help="What competes: block; layer (equal sparsity in all matrices); row (modes all).")
    ] = "block",
    alpha: Annotated[str, typer.Option(help="Weight of the graph: a number, auto (measured), or default.")] = "default",
    modes: Annotated[str, typer.Option(help="Eigenvectors: a number, or all (with --group row or a pattern).")] = "1",
    combine: Annotated[str, typer.Option(help="linear, saturating, or power (with --modes all).")] = "linear",
    laplacian: Annotated[str, typer.Option(help="normalised or combinatorial.")] = "normalised",
    edge: Annotated[str, typer.Option(help="Strength of edges: activation or magnitude.")] = "activation",
    sequential: Annotated[bool, typer.Option(help="Calibrate each block on the blocks already pruned.")] = False,
    rounds: Annotated[int, typer.Option(help="Raise the sparsity in this many steps.")] = 1,
    window: Annotated[int, typer.Option(help="Tokens of a calibration window.")] = 384,
    tokens: Annotated[int, typer.Option(help="Calibration tokens to use, spread over the text; 0 = all.")] = 4096,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    measure: Annotated[bool, typer.Option(help="Also measure bytes and tokens per second, dense and sparse.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Prune a language model in one shot so that each of its blocks stays well connected."""
    from rich.console import Console

    from fairtrial.causal_lm.loading import load
    from fairtrial.causal_lm.windows import windows
    from fairtrial.lm.pruning.fiedler import FiedlerPrune
    from fairtrial.lm.pruning.packing import measure_sparse

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty folder: give another --out")
    if tokens < 0:
        raise InputError(f"--tokens must be positive, or 0 for all the text; got {tokens}")
    pruner = FiedlerPrune(
        intra,
        sparsity=sparsity,
        pattern=pattern,
        group=group,  # type: ignore[arg-type]
        alpha=_number(alpha, "alpha", {"default": None, "auto": "auto"}),  # type: ignore[arg-type]
        modes=_number(modes, "modes", {"all": "all"}),  # type: ignore[arg-type]
        combine=combine,  # type: ignore[arg-type]
        laplacian=laplacian,  # type: ignore[arg-type]
        edge=edge,  # type: ignore[arg-type]
        sequential=sequential,
        rounds=rounds,
        window=window,
    )
    loaded, tokenizer = load(model, device=device)
    ids = windows(tokenizer, calibration, window).ids
    wanted = min(len(ids), max(1, tokens // window)) if tokens else len(ids)
    ids = ids[[i * len(ids) // wanted for i in range(wanted)]]
    report = pruner.prune(loaded, tokenizer, ids, progress=not as_json)
    loaded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    measured = measure_sparse(loaded) if measure else None

    quantised = model.suffix == ".gguf" or (model.is_dir() and not (model / "config.json").is_file())
    note = "the weights came from a GGUF file: they are dequantised, not the original ones" if quantised else None
    if as_json:
        buys = measured and {"bytes": measured.bytes_ratio, "speed": measured.speedup, "backend": measured.backend}
        typer.echo(json.dumps({"out": str(out), "note": note, **report.to_dict(), "measured": buys}))
        return
    console = Console()
    console.print(_table(report))
    console.print(f"{report.sparsity:.2%} of the block weights are zero; pruned in {report.seconds['total']:.1f} s")
    for line in (f"written to {out}", note, measured):
        if line is not None:
            console.print(str(line))


def _number(text: str, option: str, words: dict[str, str | None]) -> float | int | str | None:
    if text in words:
        return words[text]
    try:
        return int(text) if option == "modes" else float(text)
    except ValueError:
        raise InputError(f"--{option} must be a number or {' or '.join(words)}, got {text!r}") from None


def _table(report: PruneReport) -> Table:
    """Lay out the share of weights each matrix keeps, mean and range over layers, for the terminal."""
    from rich.table import Table

    table = Table("matrix", "kept", "least", "most", title="Weights kept over layers")
    for name, column in report.densities.items():
        table.add_row(str(name), *(f"{share:.1%}" for share in (column.mean(), column.min(), column.max())))
    return table
