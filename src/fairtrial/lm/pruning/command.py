"""``fairtrial apply fiedler-prune``: a model folder or GGUF file and a text go in, a pruned model folder comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.errors import InputError
from fairtrial.outputs import check_new_folder

if TYPE_CHECKING:
    from rich.table import Table

    from fairtrial.lm.pruning.oneshot import PruneReport

_ARTICLES = 60  # as many as calibrate in the trial: two thirds of the sample


def fiedler_prune(
    model: Annotated[Path, typer.Argument(help="Folder written by save_pretrained, or a .gguf file.")],
    *,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Representative text: a .txt or .jsonl file, or a folder of them; 30-100 kB do. "
            "Left out: the first 60 articles of the sample wikipedia-articles."
        ),
    ] = None,
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

    from fairtrial.causal_lm.loading import check_device, check_loadable, context_length, load
    from fairtrial.causal_lm.windows import read_texts, windows
    from fairtrial.data.text import wikipedia_articles
    from fairtrial.lm.pruning.fiedler import FiedlerPrune
    from fairtrial.lm.pruning.packing import measure_sparse

    check_new_folder(out)
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
    check_device(device)
    check_loadable(model)
    _check_window(window, context_length(model))
    texts = wikipedia_articles()[:_ARTICLES] if calibration is None else read_texts(calibration)
    loaded, tokenizer = load(model, device=device)
    _check_window(window, getattr(loaded.config, "max_position_embeddings", None))  # a GGUF file has no config.json
    ids = windows(tokenizer, texts, window).ids
    wanted = min(len(ids), max(1, tokens // window)) if tokens else len(ids)
    ids = ids[[i * len(ids) // wanted for i in range(wanted)]]
    report = pruner.prune(loaded, tokenizer, ids, progress=not as_json)
    loaded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    measured = measure_sparse(loaded) if measure else None

    quantised = model.suffix == ".gguf" or (model.is_dir() and not (model / "config.json").is_file())
    notes = ["the weights came from a GGUF file: they are dequantised, not the original ones"] if quantised else []
    if calibration is None:
        notes.append(f"calibrated on the first {_ARTICLES} articles of the sample wikipedia-articles")
    if alpha == "auto":
        chosen = report.frame.alpha.iloc[0]
        notes.append(f"alpha {chosen:g} had the lowest loss" + (": the metric alone, in rows" if chosen == 0 else ""))
    if as_json:
        buys = measured and {
            "bytes": measured.bytes_ratio,
            "speed": measured.speedup,
            "speed_of_pairs": measured.ratios,
            "backend": measured.backend,
        }
        note = "; ".join(notes) or None
        typer.echo(json.dumps({"out": str(out), "note": note, **report.to_dict(), "measured": buys}))
        return
    console = Console()
    console.print(_table(report))
    zeros = f"{report.sparsity:.2%} of the block weights are zero; pruned in {report.seconds['total']:.1f} s"
    for line in (zeros, f"written to {out}", *notes, *([measured] if measured else [])):
        console.print(str(line), markup=False, soft_wrap=True)  # a path may hold brackets


def _check_window(window: int, context: int | None) -> None:
    if context is not None and window > context:
        raise InputError(f"--window {window} exceeds the model's context: give --window {context} or less")


def _number(text: str, option: str, words: dict[str, str | None]) -> float | int | str | None:
    if text in words:
        return words[text]
    try:
        return int(text) if option == "modes" else float(text)
    except ValueError:
        raise InputError(f"--{option} must be a number or {' or '.join(words)}, got {text!r}") from None


def _table(report: PruneReport) -> Table:
    """Lay out the share of weights each matrix keeps, mean and range over layers, for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("matrix", "kept", "least", "most", title="Weights kept over layers")
    for name, column in report.densities.items():
        table.add_row(escape(str(name)), *(f"{share:.1%}" for share in (column.mean(), column.min(), column.max())))
    return table
