"""Throughput of scoring minimal pairs, of generating a bench and of recording a stream.

Pairs are scored three ways: each string alone, in batches of similar length, and with what a pair shares read once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from fairtrial.causal_lm.likelihood import token_log_likelihoods
from fairtrial.evaluation.language_development import (
    CausalScorer,
    Corpus,
    EgoStream,
    build_devbench,
    child_directed_speech,
    train_small_lm,
)
from fairtrial.seeds import generator

TEXTS = 1200
TOKENS = 10_000_000


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def zipf_corpus(tokens: int) -> Corpus:
    """Return generated speech, a tenth of its words made up by a Zipf law, so that there are words in all bins."""
    speech = " ".join(child_directed_speech(20_000)).lower().replace(".", " .").replace("?", " .").split()
    rng = generator(0, "benchmark")
    syllables = ["ba", "do", "mi", "ter", "lo", "sen", "ka", "rig", "pul", "ne"]
    words = np.array(speech * (tokens // len(speech) + 1))[:tokens]
    strange = np.array(["".join(rng.choice(syllables, 4)) for _ in range(20_000)])
    swap = (rng.random(tokens) < 0.1) & (words != ".")
    words[swap] = strange[(20_000 ** rng.random(int(swap.sum()))).astype(int) - 1]
    return Corpus.from_documents(["\n".join(" ".join(words).split(" . "))])


def scoring(table: Table, title: str, model: Any, tokenizer: Any, texts: list[str], count: int) -> None:
    """Add the rows of a model to the table."""
    scorer, some = CausalScorer(model, tokenizer), texts[:count]
    ids = [[scorer.start, *row] for row in tokenizer(some, add_special_tokens=False)["input_ids"]]
    scorer(some[:4])  # warm up
    alone, one_by_one = timed(lambda: [float(token_log_likelihoods(model, [row])[0].sum()) for row in ids])
    batched, in_batches = timed(lambda: [float(row.sum()) for row in token_log_likelihoods(model, ids)])
    shared, sharing = timed(lambda: scorer(some))
    assert np.allclose(alone, shared, atol=1e-2)
    assert np.allclose(batched, shared, atol=1e-2)
    for name, seconds in (("each alone", one_by_one), ("batched", in_batches), ("batched, prefixes shared", sharing)):
        table.add_row(
            title, name, f"{count / seconds:.0f}", f"{one_by_one / seconds:.2f}", f"{in_batches / seconds:.2f}"
        )


def main() -> None:
    torch.set_num_threads(1)
    console = Console()
    speech = Corpus.from_documents(["\n".join(child_directed_speech(3000))])
    bench = build_devbench(speech, per_cell=194)
    texts = [text for item in bench.items.itertuples() for text in (item.good, *item.bad)][: 2 * TEXTS]
    small, tokenizer = train_small_lm(speech.utterances, epochs=0)
    larger = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    table = Table("model", "scoring", "texts/s", "x alone", "x batched", title="Log-likelihoods of minimal pairs")
    scoring(table, "1 M parameters", small, tokenizer, texts, TEXTS)
    scoring(table, "shape of SmolLM2-135M", larger, tokenizer, texts, 120)
    console.print(table)

    corpus, reading = timed(lambda: zipf_corpus(TOKENS))
    made, seconds = timed(lambda: build_devbench(corpus, per_cell=400))
    console.print(
        f"{len(made.items)} items from {len(corpus.tokens) / 1e6:.1f} M tokens, {len(corpus.words)} types: "
        f"{seconds:.1f} s (limit 60 s; making and reading the text {reading:.1f} s)"
    )
    _, recording = timed(lambda: EgoStream(seed=0).record(9000))
    console.print(f"9000 symbolic frames with speech: {recording:.1f} s")


if __name__ == "__main__":
    main()
