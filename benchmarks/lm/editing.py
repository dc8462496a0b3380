"""Speed of editing on SmolLM2-135M: solving values together, writing, and what anchoring adds.

Run:  python benchmarks/lm/editing.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fairtrial.causal_lm.named import load_named
from fairtrial.data.facts import countries
from fairtrial.data.text import wikipedia_articles
from fairtrial.lm.editing import MEMIT, Edit, NormAnchor, Solver
from fairtrial.lm.editing.editors import EditContext


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds: other work on the machine does not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    model, tokenizer = load_named("smollm2-135m")
    table = countries().iloc[:8]
    edits = [Edit("The city of {} is the capital of", capital, "Norway") for capital in table["capital"]]
    solver = Solver(steps=5, prefixes=("",))
    editor = MEMIT(model, tokenizer, layers=[5], text=wikipedia_articles()[:2], solver=solver)
    shown = Table("what", "CPU s", "per edit", "ratio")

    editor.solve(edits[:1])
    together = seconds(lambda: editor.solve(edits))
    alone = seconds(lambda: [editor.solve([edit]) for edit in edits])
    shown.add_row("values of 8 edits, one at a time", f"{alone:.2f}", f"{alone / 8:.2f}", "")
    shown.add_row("values of 8 edits together", f"{together:.2f}", f"{together / 8:.2f}", f"{alone / together:.2f}")

    layer = 5
    whole = MEMIT(model, tokenizer, layers=[0], text=wikipedia_articles()[:1], solver=solver)
    every = seconds(lambda: whole.solve(edits))
    shown.add_row(f"blocks from {layer} on only, against all", f"{together:.2f}", "", f"{every / together:.2f}")

    h, v = editor.solve(edits)
    keys, _ = editor.keys(edits, layer)
    residual = (v - h).T
    editor._factors(layer, keys.T, residual)
    write = seconds(lambda: [editor._factors(layer, keys.T, residual) for _ in range(10)]) / 10
    shown.add_row(f"write of 8 edits, m = {keys.shape[1]}", f"{write:.4f}", "", "")
    anchor = NormAnchor(rho=70.0)
    context = EditContext(editor, edits, h)
    anchoring = seconds(lambda: [anchor(v, context) for _ in range(100)]) / 100
    shown.add_row("anchoring 8 values", f"{anchoring:.6f}", "", f"{anchoring / together:.6f} of the solve")
    Console(width=110).print(shown)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
