"""Speed of anchor spaces on SmolLM2-135M: reading anchors in batches of like length, and rebuilding a direction.

Run:  python benchmarks/lm/steering.py
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fairtrial.causal_lm.loading import load
from fairtrial.data.samples import cache_folder, sample_path
from fairtrial.data.text import news_articles
from fairtrial.lm.steering import AnchorFrame, text_states


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds: other work on the machine does not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


@torch.inference_mode()
def in_order(model: Any, tokenizer: Any, texts: list[str], layer: int, size: int = 32) -> None:
    """States as usually had: batches in the order given, padded, every layer kept."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    for i in range(0, len(texts), size):
        batch = tokenizer(texts[i : i + size], padding=True, return_tensors="pt")
        states = model(**batch, output_hidden_states=True, use_cache=False).hidden_states[layer + 1]
        mask = batch["attention_mask"][..., None]
        (states * mask).sum(1) / mask.sum(1)


def main() -> None:
    model, tokenizer = load(sample_path("smollm2-135m"), cache=cache_folder() / "models")
    articles = news_articles()
    texts = [" ".join(article.split()[: 6 + 11 * i % 70]) for i, article in enumerate(articles[:96])]
    layer = 17
    table = Table("what", "by hand (CPU s)", "here (CPU s)", "ratio")
    text_states(model, tokenizer, texts[:8], [layer], pooling="mean")  # warm
    by_hand = seconds(lambda: in_order(model, tokenizer, texts, layer))
    ours = seconds(lambda: text_states(model, tokenizer, texts, [layer], pooling="mean"))
    table.add_row(
        "96 anchors of 6-75 words: in order, all layers | text_states",
        f"{by_hand:.2f}",
        f"{ours:.2f}",
        f"{by_hand / ours:.2f}",
    )

    X = torch.randn(1000, 8192, generator=torch.Generator().manual_seed(0))

    def svd() -> None:
        rows = X.double() - X.double().mean(0)
        rows = rows / rows.norm(dim=1, keepdim=True)
        torch.linalg.lstsq(rows, rows @ rows[0])

    frame = AnchorFrame(X)
    c = frame.of_direction(X[0] - X[1])
    rebuilt = seconds(lambda: frame.reconstruct(c))
    table.add_row(
        "a direction of 1000 anchors, 8192 wide: least squares | dual ridge",
        f"{seconds(svd):.2f}",
        f"{rebuilt:.2f}",
        f"{seconds(svd) / rebuilt:.1f}",
    )
    Console(width=130).print(table)
    print(f"a frame of 1000 anchors, 8192 wide: {seconds(lambda: AnchorFrame(X)):.2f} CPU s")
    print(f"peak memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
