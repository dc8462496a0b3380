"""Speed of D-PACE: its loss beside cross-entropy, and decoding with drafts beside plain decoding.

Run:  python benchmarks/lm/drafting.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from fairtrial.causal_lm.named import load_named
from fairtrial.lm.drafting import BlockDrafter, DPACELoss, speculative_generate
from fairtrial.lm.drafting.trial import Known

PROMPT = "The history of astronomy begins with"


def seconds(run: Callable[[], Any], repeats: int = 1) -> float:
    """Median of CPU seconds: other work on the machine does not count."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 16, 4096, generator=rng).requires_grad_()
    ids = torch.randint(4096, (512, 16), generator=rng)
    loss = DPACELoss()

    def plain_step() -> None:
        torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), ids.flatten()), [logits])

    def our_step() -> None:
        torch.autograd.grad(loss(logits, ids), [logits])

    plain_step()
    pairs = [(seconds(plain_step), seconds(our_step)) for _ in range(7)]
    plain, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    shown = Table("what", "peer (CPU s)", "here (CPU s)", "ratio")
    shown.add_row(
        "512 blocks of 16, 4096 tokens: cross-entropy | D-PACE", f"{plain:.3f}", f"{ours:.3f}", f"{ours / plain:.3f}"
    )

    model, tokenizer = load_named("smollm2-135m")
    prompt = tokenizer(PROMPT, return_tensors="pt")

    def decode() -> torch.Tensor:
        return model.generate(**prompt, max_new_tokens=48, do_sample=False, pad_token_id=0)

    whole = decode()
    usual = seconds(decode, 3)
    untrained = BlockDrafter.for_target(model, block_size=8, draft_vocab=4096)
    for name, drafter in (
        ("a drafter that knows the text", Known(whole[0], 8, model.config.vocab_size)),
        ("an untrained drafter", untrained),
    ):

        def speculate(drafter: Any = drafter) -> torch.Tensor:
            return speculative_generate(model, drafter, **prompt, max_new_tokens=48).sequences

        assert torch.equal(speculate(), whole)
        taken = seconds(speculate, 3)
        shown.add_row(f"48 tokens: generate | {name}", f"{usual:.2f}", f"{taken:.2f}", f"{usual / taken:.2f}x as fast")
    Console(width=120).print(shown)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
