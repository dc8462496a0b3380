"""Speed of answer vectors on SmolLM2-135M: one pass a prompt where choices begin differently, against one a choice.

Run:  python benchmarks/lm/context.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fairtrial.causal_lm.named import load_named
from fairtrial.causal_lm.prompts import prompt_texts
from fairtrial.lm.context.answers import answer_vectors, softmax
from fairtrial.lm.context.sources import distinct_first, facts_of

CHOICES = 24


def seconds(run: Callable[[], Any]) -> float:
    """CPU seconds: other work on the machine does not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


@torch.inference_mode()
def naive(model: Any, tokenizer: Any, prompts: list[str], choices: list[str]) -> np.ndarray:
    """Score every choice by a pass of its own over prompt and choice, as written down first."""
    scores = np.zeros((len(prompts), len(choices)))
    for i, text in enumerate(prompt_texts(tokenizer, prompts)):
        before = tokenizer(text, add_special_tokens=False)["input_ids"]
        for j, choice in enumerate(choices):
            answer = tokenizer(choice, add_special_tokens=False)["input_ids"]
            logits = model(torch.tensor([before + answer])).logits[0].log_softmax(-1)
            scores[i, j] = np.mean([float(logits[len(before) - 1 + t, token]) for t, token in enumerate(answer)])
    return softmax(scores)


def main() -> None:
    model, tokenizer = load_named("smollm2-135m")
    told = facts_of("capital-world")
    distinct = distinct_first(tokenizer, told)[:CHOICES]
    alike = [*distinct[: CHOICES - 1], f"{distinct[0]} city"]  # two begin with one token
    prompts = [fact.question for fact in told[:3]]
    answer_vectors(model, tokenizer, prompts[:1], distinct)
    shown = Table("3 prompts, 24 choices", "one pass a choice (CPU s)", "here (CPU s)", "ratio", "largest difference")
    for name, choices in (("first tokens differ", distinct), ("two begin alike", alike)):
        found: list[np.ndarray] = []
        slow = seconds(lambda choices=choices, found=found: found.append(naive(model, tokenizer, prompts, choices)))
        fast = seconds(
            lambda choices=choices, found=found: found.append(answer_vectors(model, tokenizer, prompts, choices))
        )
        same = "" if choices is distinct else f"{np.abs(found[0] - found[1]).max():.1e}"
        shown.add_row(name, f"{slow:.2f}", f"{fast:.2f}", f"{slow / fast:.1f}", same)
    Console(width=120).print(shown)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
