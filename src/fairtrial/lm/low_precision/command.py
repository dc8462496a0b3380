"""``fairtrial apply nvfp4-snr``: a model and texts go in, what 4 bits do to its dot products comes out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from fairtrial.outputs import check_new_file


def nvfp4_snr(
    model: Annotated[Path, typer.Argument(help="Causal model: a folder written by save_pretrained, or a .gguf file.")],
    *,
    text: Annotated[Path, typer.Option(help="Texts to read: a .txt or .jsonl file, or a folder of these.")],
    out: Annotated[Path, typer.Option(help="New .csv file: a row a layer.")],
    sequences: Annotated[int, typer.Option(min=1, help="Sequences read.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 256,
    device: Annotated[str, typer.Option(help="Where to compute, such as cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Measure the signal-to-noise ratio of a model's dot products in NVFP4, and where it comes from."""
    from fairtrial.causal_lm.loading import check_device, check_loadable, load
    from fairtrial.causal_lm.windows import read_texts, windows
    from fairtrial.lm.low_precision.snr import dot_product_snr

    check_new_file(out, ".csv")
    check_device(device)
    check_loadable(model)
    texts = read_texts(text)
    loaded, tokenizer = load(model, device=device)
    ids = windows(tokenizer, texts, length).ids[:sequences]
    table = dot_product_snr(loaded, ids)
    table.to_csv(out, index=False)
    worst = table.to_dict("records")[int(table["snr"].argmin())]
    told = {
        "out": str(out),
        "layers": len(table),
        "tokens": ids.numel(),
        "snr_db": float(table["snr"].map(math.log10).mean() * 10),
        "kappa_signal": float(table["kappa_signal"].median()),
        "kappa_noise": float(table["kappa_noise"].median()),
        "worst": worst["layer"],
        "worst_snr_db": 10 * math.log10(worst["snr"]),
    }
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(
        f"{told['layers']} layers on {told['tokens']} tokens: signal to noise {told['snr_db']:.1f} dB on average, "
        f"least {told['worst_snr_db']:.1f} dB in {told['worst']}; coherence (median) of signal "
        f"{told['kappa_signal']:.2f}, of noise {told['kappa_noise']:.2f}"
    )
    typer.echo(f"written to {out}")
