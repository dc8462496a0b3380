"""``fairtrial apply acs``: a model, anchors and a canonical direction go in, the model's own direction comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fairtrial.outputs import check_new_file


def acs(
    model: Annotated[Path, typer.Argument(help="Causal model: a folder written by save_pretrained, or a .gguf file.")],
    *,
    canonical: Annotated[Path, typer.Option(help="What CanonicalDirection.save wrote.")],
    anchors: Annotated[
        Path, typer.Option(help="The anchors: a .jsonl file of 'text' fields, or a .txt of one a line.")
    ],
    out: Annotated[Path, typer.Option(help="New file: .gguf for llama.cpp, .safetensors for this library.")],
    depth: Annotated[float, typer.Option(help="Share of the model's blocks after which states are taken.")] = 0.6,
    ridge: Annotated[float, typer.Option(help="Ridge of the reconstruction.")] = 0.1,
    pooling: Annotated[str, typer.Option(help="last, mean or auto; left out, that of the sources.")] = "",
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Rebuild a behavioural direction in a new model from unlabelled anchors."""
    from fairtrial.causal_lm.loading import check_device, check_loadable, load
    from fairtrial.lm.steering.space import CanonicalDirection

    check_new_file(out, ".gguf", ".safetensors")
    check_device(device)
    check_loadable(model)
    direction = CanonicalDirection.load(canonical, read_anchors(anchors))
    loaded, tokenizer = load(model, device=device)
    space = direction.space
    space.add("target", loaded, tokenizer, depth=depth, pooling=pooling or direction.pooling)  # type: ignore[arg-type]
    rebuilt = direction.reconstruct("target", ridge=ridge)
    rebuilt.save(out)
    told = {
        "out": str(out),
        "axis": direction.axis,
        "sources": direction.sources,
        "layer": rebuilt.layer,
        "pooling": rebuilt.pooling,
        "fit_residual": rebuilt.fit_residual,
        "scale": rebuilt.scale,
    }
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(
        f"{direction.axis!r} of {', '.join(direction.sources)} rebuilt after block {rebuilt.layer} ({rebuilt.pooling} "
        f"token states), fit residual {rebuilt.fit_residual:.3f} (0 fits, 1 = the model cannot express it)"
    )
    typer.echo(f"written to {out}")


def read_anchors(path: Path) -> list[str]:
    """Return the anchor texts of a file: lines of a .txt, 'text' fields of a .jsonl."""
    from fairtrial.causal_lm.windows import read_texts

    texts = read_texts(path)
    if path.suffix == ".txt":
        texts = [line.strip() for line in texts[0].splitlines() if line.strip()]
    return texts
