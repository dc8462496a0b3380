"""``fairtrial apply divmoe``: a base model's folder and those of its fine-tunes go in, a mixture's folder comes out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fairtrial.errors import InputError
from fairtrial.outputs import check_new_folder


def divmoe(
    base: Annotated[Path, typer.Argument(help="The dense base: a folder written by save_pretrained, or a .gguf file.")],
    *,
    domain: Annotated[
        list[str], typer.Option(help="NAME=FOLDER of a fine-tune or of its LoRA adapters; give two or more.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the mixture, new or empty.")],
    granularity: Annotated[int, typer.Option(help="Slices F a feed-forward layer is cut into.")] = 4,
    active: Annotated[int, typer.Option(help="Experts K a token takes; 0 = one of every domain.")] = 0,
    partition: Annotated[str, typer.Option(help="contiguous or balanced-kmeans.")] = "contiguous",
    rest: Annotated[str, typer.Option(help="Of attention and embeddings: average or base.")] = "average",
    texts: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FILE of a domain's texts (.txt, .jsonl or a folder): measures the start on them."),
    ] = None,
    router_init: Annotated[str, typer.Option(help="random, or hidden (needs --texts).")] = "random",
    seed: Annotated[int, typer.Option(help="Of the router and the partition.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Turn a dense model and its domain fine-tunes into a mixture of experts."""
    from fairtrial.causal_lm.loading import check_loadable, load
    from fairtrial.causal_lm.windows import read_texts
    from fairtrial.lm.upcycling.converting import upcycle

    check_new_folder(out)
    check_loadable(base)
    domains = {name: Path(path) for name, path in pairs("--domain", domain).items()}
    read = {name: read_texts(path) for name, path in pairs("--texts", texts or []).items()}
    model, tokenizer = load(base)
    moe = upcycle(
        model,
        domains,
        granularity=granularity,
        active=active or None,
        partition=partition,
        rest=rest,
        router_init=router_init,
        texts=read or None,
        tokenizer=tokenizer,
        seed=seed,
    )
    moe.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if as_json:
        typer.echo(json.dumps({"out": str(out), **asdict(moe.upcycle_report)}))
        return
    typer.echo(str(moe.upcycle_report))
    typer.echo(f"written to {out}; it loads after  import fairtrial.lm.upcycling")


def pairs(option: str, given: list[str]) -> dict[str, str]:
    """Return NAME=PATH arguments as a dict."""
    found: dict[str, str] = {}
    for text in given:
        name, sign, path = text.partition("=")
        if not sign or not name or not path:
            raise InputError(f"{option} {text}: give NAME=PATH, such as math=./math")
        if name in found:
            raise InputError(f"{option}: {name} is given twice")
        found[name] = path
    return found
