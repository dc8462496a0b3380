"""Speed of the shared language-model module against the loops one would write by hand, on SmolLM2-135M.

Run:  python benchmarks/causal_lm/batching.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fairtrial.causal_lm.capture import propagate
from fairtrial.causal_lm.hidden import hidden_states
from fairtrial.causal_lm.likelihood import choice_scores, token_log_likelihoods
from fairtrial.causal_lm.loading import load
from fairtrial.causal_lm.statistics import second_moments
from fairtrial.causal_lm.windows import windows
from fairtrial.data.samples import sample_path
from fairtrial.data.text import wikipedia_articles

TOWNS = ["Paris", "London", "Rome", "Berlin", "Madrid", "Lisbon", "Vienna", "Ottawa", "Tokyo", "Cairo", "Lima", "Oslo"]


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds: other work on the machine does not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


@torch.inference_mode()
def padded_states(model: Any, rows: list[list[int]], layer: int, size: int) -> None:
    """Hidden states as usually had: in the order given, padded, all layers recorded."""
    for i in range(0, len(rows), size):
        batch = rows[i : i + size]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in batch], batch_first=True).long()
        states = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states[layer + 1]
        torch.stack([states[b, len(row) - 1] for b, row in enumerate(batch)])


@torch.inference_mode()
def whole_passes(model: Any, ids: torch.Tensor) -> None:
    for batch in ids.split(4):
        model.model(batch, use_cache=False)


def moments(model: Any, ids: torch.Tensor, hessian: bool) -> None:
    for layout, inputs in propagate(model, ids.split(4)):
        second_moments(layout, inputs, hessian=hessian, keep=True)


def main() -> None:
    gguf = sample_path("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf")
    table = Table("what", "by hand (CPU s)", "here (CPU s)", "ratio")

    def add(what: str, peer: Callable[[], Any], ours: Callable[[], Any]) -> None:
        a, b = seconds(peer), seconds(ours)
        table.add_row(what, f"{a:.2f}", f"{b:.2f}", f"{a / b:.2f}")

    with tempfile.TemporaryDirectory() as cache:
        model, tokenizer = load(gguf, cache=cache)
        add("load the GGUF file: transformers | kept copy", lambda: load(gguf), lambda: load(gguf, cache=cache))
        articles = wikipedia_articles()
        sentences = [s for article in articles for s in article.split(". ") if 20 < len(s) < 400][:150]
        rows = tokenizer(sentences)["input_ids"]
        add(
            "150 sentences, layer 18: batches of 32 in order | hidden_states",
            lambda: padded_states(model, rows, 18, 32),
            lambda: hidden_states(model, rows, [18]),
        )
        add(
            "150 sentences, last layer: batches of 32 in order | hidden_states",
            lambda: padded_states(model, rows, 28, 32),
            lambda: hidden_states(model, rows, [29]),
        )
        contexts = [f"{articles[0][:400]}\n\nThe capital of {land} is" for land in ("Chad", "France")]
        choices = [[f" {town}" for town in TOWNS] for _ in contexts]
        whole = tokenizer([c + t for c, towns in zip(contexts, choices, strict=True) for t in towns])["input_ids"]
        add(
            "2 contexts x 12 choices: whole texts | choice_scores",
            lambda: token_log_likelihoods(model, whole),
            lambda: choice_scores(model, tokenizer, contexts, choices),
        )
        ids = windows(tokenizer, articles, 384).ids[:6]
        for hessian in (False, True):
            add(
                f"6 x 384 tokens: plain passes | second_moments{' with hessian' if hessian else ''}",
                lambda: whole_passes(model, ids),
                lambda hessian=hessian: moments(model, ids, hessian),
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
