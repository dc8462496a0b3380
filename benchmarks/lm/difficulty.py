"""Speed of the difficulty probe: scoring states, its share of an answer, and what rollouts cost instead.

Run:  python benchmarks/lm/difficulty.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fairtrial.causal_lm.named import load_named
from fairtrial.causal_lm.prompts import prompt_texts
from fairtrial.lm.difficulty import AdaSwitch, DifficultyProbe, Effort
from fairtrial.lm.difficulty.problems import arithmetic

NEW = 16  # tokens of a direct answer
PROMPTS = 6


def seconds(run: Callable[[], Any], repeats: int = 1) -> float:
    """Median of CPU seconds: other work on the machine does not count."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    rng = np.random.default_rng(0)
    table = Table("what", "peer (CPU s)", "here (CPU s)", "ratio")

    states = rng.standard_normal((10_000, 12, 576)).astype(np.float32)
    small = DifficultyProbe.from_states(states[:16], np.arange(16) % 2, unlabelled=states[16:216])
    table.add_row("10,000 states of 12 layers, 576 wide", "", f"{seconds(lambda: small.predict(states), 5):.3f}", "")

    model, tokenizer = load_named("smollm2-135m")
    problems = [problem.question for problem in arithmetic(48)]
    asked = problems[16 : 16 + PROMPTS]
    probe = DifficultyProbe(model, tokenizer).fit(problems[:16], np.arange(16) % 2)
    switch = AdaSwitch(
        probe, [Effort("direct", max_new_tokens=NEW), Effort("think", max_new_tokens=64)], budget_tokens=NEW
    )
    texts = prompt_texts(tokenizer, asked)

    def plain(samples: int = 1, tokens: int = NEW) -> None:
        for text in texts:
            row = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            model.generate(
                **row, max_new_tokens=tokens, do_sample=samples > 1, num_return_sequences=samples, pad_token_id=0
            )

    plain()
    direct = seconds(plain, 3)
    ours = seconds(lambda: [switch.generate(problem) for problem in asked], 3)
    table.add_row(
        f"{PROMPTS} direct answers: generate | with the probe", f"{direct:.2f}", f"{ours:.2f}", f"{ours / direct:.3f}"
    )

    rollouts = seconds(lambda: plain(8, 32))
    scored = seconds(lambda: probe.predict(asked), 3)
    table.add_row(
        f"difficulty of {PROMPTS} prompts: 8 rollouts of 32 | probe", f"{rollouts:.2f}", f"{scored:.2f}",
        f"{rollouts / scored:.1f}",
    )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
