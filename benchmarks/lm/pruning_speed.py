"""Seconds of FiedlerPrune and Wanda on SmolLM2-135M and of their parts; of llmcompressor's Wanda where installed.

Run ``fairtrial samples get pruning`` first; the peer needs an environment of its own (llmcompressor.txt).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fairtrial.causal_lm.layout import block_layouts
from fairtrial.causal_lm.loading import load
from fairtrial.causal_lm.windows import windows
from fairtrial.data.samples import sample_path
from fairtrial.data.text import wikipedia_articles
from fairtrial.lm.pruning import BlockGraph, FiedlerPrune, OneShotPrune
from fairtrial.lm.pruning.graph import fiedler

WINDOW, TOKENS = 384, 4224


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def llmcompressor_wanda(model: Any, ids: torch.Tensor) -> None:
    """Prune by llmcompressor on the same token ids, block by block on what the pruned blocks give."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import WandaPruningModifier

    rows = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    recipe = WandaPruningModifier(sparsity=0.5, mask_structure="0:0", targets=["Linear"], ignore=["re:.*lm_head"])
    oneshot(
        model=model, dataset=Dataset.from_dict(rows), recipe=recipe, num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1], shuffle_calibration_samples=False,
    )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    cache = Path(gettempdir()) / "fairtrial-benchmarks"
    model, tokenizer = load(sample_path("smollm2-135m"), cache=cache)
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = windows(tokenizer, wikipedia_articles()[:60], WINDOW).ids
    ids = ids[:: len(ids) // (TOKENS // WINDOW)][: TOKENS // WINDOW]

    table = Table(
        "method", "calibration", "graph", "scores", "total", "x Wanda", title=f"Seconds, {ids.numel()} tokens"
    )
    wanda = 0.0
    pruners = {
        "Wanda": OneShotPrune("wanda"),
        "FiedlerPrune": FiedlerPrune("wanda"),
        "FiedlerPrune, lambda_2 after not measured": FiedlerPrune("wanda", connectivity=False),
        "all modes in closed form": FiedlerPrune(
            "wanda", modes="all", combine="power", group="row", connectivity=False
        ),
        "Wanda, sequential": OneShotPrune("wanda", sequential=True),
        "SparseGPT": OneShotPrune("sparsegpt"),
    }
    masks = {}
    for name, pruner in pruners.items():
        model.load_state_dict(dense)
        report = pruner.prune(model, tokenizer, ids)
        masks[name] = report
        parts = [f"{report.seconds.get(part, 0):.1f}" for part in ("calibration", "graph", "scores", "total")]
        wanda = wanda or report.seconds["total"]
        table.add_row(name, *parts, f"{report.seconds['total'] / wanda:.2f}")
    if importlib.util.find_spec("llmcompressor"):
        model.load_state_dict(dense)
        total = seconds(lambda: llmcompressor_wanda(model, ids))
        table.add_row("llmcompressor Wanda (sequential)", "", "", "", f"{total:.1f}", f"{total / wanda:.2f}")
        ours = masks["Wanda, sequential"]
        same = [
            float(((view.weight != 0) == ours.mask(f"{layout.name}.{view.name}")).float().mean())
            for layout in block_layouts(model)
            for view in layout
        ]
        table.caption = f"llmcompressor's mask equals ours in {sum(same) / len(same):.2%} of the weights"
    Console().print(table)

    model.load_state_dict(dense)
    solvers = Table("graph", "Gram eigh", "block Lanczos", "ratio", title="Seconds of one Fiedler vector, float32")
    for name, graph in BlockGraph.from_block(block_layouts(model)[10]).graphs.items():
        matrix = graph.matrix()
        gram, krylov = (seconds(partial(fiedler, matrix, solver=solver)) for solver in ("gram", "krylov"))
        solvers.add_row(f"{name} {tuple(matrix.shape)}", f"{gram:.3f}", f"{krylov:.3f}", f"{gram / krylov:.1f}")
    Console().print(solvers)


if __name__ == "__main__":
    main()
