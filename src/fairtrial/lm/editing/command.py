"""``fairtrial apply norm-anchor``: a model and a stream of edits go in, the edited model comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.outputs import check_new_folder

EDITORS = {"memit": "MEMIT", "rome": "ROME", "alphaedit": "AlphaEdit"}


def norm_anchor(
    model: Annotated[Path, typer.Argument(help="Causal model: a folder written by save_pretrained, or a .gguf file.")],
    *,
    edits: Annotated[Path, typer.Option(help=".json or .jsonl file of edits, of CounterFact or of zsRE.")],
    text: Annotated[Path, typer.Option(help="File or folder of ordinary text, at least some ten thousand tokens.")],
    layers: Annotated[str, typer.Option(help="Blocks to write to, such as 5 or 4,5,6.")],
    out: Annotated[Path, typer.Option(help="New folder for the edited model.")],
    editor: Annotated[str, typer.Option(help="memit, rome or alphaedit.")] = "memit",
    batch_size: Annotated[int, typer.Option(help="Edits solved and written together.", min=1)] = 8,
    check_every: Annotated[int, typer.Option(help="Edits between checks of perplexity.", min=1)] = 64,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Edit facts one batch after the other, each value anchored to the original model's norm."""
    from fairtrial.causal_lm.loading import check_device, check_loadable, forget_quantization, load
    from fairtrial.lm import editing
    from fairtrial.lm.editing.edits import check_edits, read_edits
    from fairtrial.quiet import transformers_silent

    check_new_folder(out)
    if editor not in EDITORS:
        raise UnknownNameError("editor", editor, list(EDITORS))
    try:
        chosen = [int(layer) for layer in layers.split(",")]
    except ValueError:
        raise InputError(f"--layers {layers}: give numbers of blocks, such as 4,5,6") from None
    given = read_edits(edits)
    check_edits(given)
    if not text.exists():
        raise InputError(f"{text}: no such file or folder")
    check_device(device)
    check_loadable(model)
    loaded, tokenizer = load(model, device=device)
    made: Any = getattr(editing, EDITORS[editor])(
        loaded, tokenizer, layers=chosen, text=text, hooks=[editing.NormAnchor()]
    )
    stream = editing.EditStream(made, batch_size=batch_size, check_every=check_every)
    told: dict[str, Any] = {"out": str(out), "edits": len(given)}

    def progress(done: int, of: int) -> None:
        if not as_json:
            typer.echo(f"\r{done} of {of} edits", nl=done == of, err=True)

    try:
        stream.apply(given, progress=progress)
    except editing.EditCollapse as collapse:
        told["stopped"] = str(collapse)
    found = editing.score(loaded, tokenizer, stream.edits) if stream.edits else None
    forget_quantization(loaded)
    with transformers_silent():
        loaded.save_pretrained(out)
        tokenizer.save_pretrained(out)
    stream.history.to_csv(out / "edits.csv", index=False)
    told |= {"made": len(stream.edits), "weight_ratio": made.weight_ratio()}
    if found:
        told |= {name: _number(getattr(found, name)) for name in ("efficacy", "paraphrase", "specificity")}
    if as_json:
        typer.echo(json.dumps(told))
        return
    if "stopped" in told:
        typer.echo(f"stopped: {told['stopped']}")
    if found:
        typer.echo(
            f"{len(stream.edits)} edits made, {found.efficacy:.0%} of them hold; |W| / |W0| {told['weight_ratio']:.3f}"
        )
    typer.echo(f"written to {out}, with the history in edits.csv")


def _number(value: float) -> float | None:
    return None if value != value else value
