"""What a controller would have got from answers that were logged at every level, and what others would have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fairtrial.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

    from fairtrial.lm.difficulty.switch import AdaSwitch


@dataclass(frozen=True)
class Replay:
    """What a policy got on a log.

    Attributes
    ----------
    accuracy, tokens
        Means over prompts.
    frontier
        DataFrame with columns ``policy``, ``accuracy`` and ``tokens``: always each level, the best random mix of levels
        at this cost, this policy, and an oracle that knows which level is right, at this cost.
    """

    accuracy: float
    tokens: float
    frontier: pd.DataFrame

    def __str__(self) -> str:
        return self.frontier.to_string(index=False, float_format=lambda x: f"{x:.3g}")


def replay(switch: AdaSwitch, log: pd.DataFrame) -> Replay:
    """Run a controller over logged answers, of prompts it was not fitted on.

    Parameters
    ----------
    switch
        The controller.
    log
        As :meth:`AdaSwitch.fit <fairtrial.lm.difficulty.switch.AdaSwitch.fit>` takes it.

    Raises
    ------
    InputError
        As ``fit`` does.
    """
    import pandas as pd

    correct, tokens, scores = switch.read_log(log)
    level = switch.choose_index(scores)
    rows = np.arange(len(scores))
    accuracy, spent = float(correct[rows, level].mean()), float(tokens[rows, level].mean())
    mix = mixed(tokens.mean(0).tolist(), correct.mean(0).tolist(), spent)
    always = [
        {"policy": f"always {one.name}", "accuracy": float(correct[:, k].mean()), "tokens": float(tokens[:, k].mean())}
        for k, one in enumerate(switch.levels)
    ]
    best, cost = oracle(correct, tokens, spent)
    frontier = [
        *always,
        {"policy": "random mix", "accuracy": mix, "tokens": spent},
        {"policy": "adaswitch", "accuracy": accuracy, "tokens": spent},
        {"policy": "oracle", "accuracy": best, "tokens": cost},
    ]
    return Replay(accuracy, spent, pd.DataFrame(frontier))


def check_log(log: pd.DataFrame, name: str = "log") -> pd.DataFrame:
    """Return a log of answers with correct and tokens as float64.

    Raises
    ------
    InputError
        A column that is missing; correct outside [0, 1] or tokens not positive, the message names the row.
    """
    import pandas as pd

    if not isinstance(log, pd.DataFrame):
        raise InputError(f"{name}: give a DataFrame, not {type(log).__name__}")
    for column in ("prompt", "level", "correct", "tokens"):
        if column not in log:
            raise InputError(f"{name}: no column {column!r}; it has {', '.join(map(str, log.columns))}")
    numbers = {column: pd.to_numeric(log[column], errors="coerce").astype(float) for column in ("correct", "tokens")}
    for column, good, what in (
        ("correct", numbers["correct"].between(0, 1), "between 0 and 1"),
        ("tokens", (numbers["tokens"] > 0) & np.isfinite(numbers["tokens"]), "positive"),
    ):
        if not good.all():
            row = int(np.flatnonzero(~good)[0])
            raise InputError(f"{name}: {column} of row {row} is {log[column].iloc[row]!r}: it must be {what}")
    if (empty := log["prompt"].isna()).any():
        raise InputError(f"{name}: row {int(np.flatnonzero(empty)[0])} has no prompt")
    return log.assign(**numbers)


def mixed(costs: Sequence[float], accuracies: Sequence[float], budget: float) -> float:
    """Return the best accuracy that drawing levels at random reaches at a mean cost: the upper hull of the levels.

    >>> mixed([1, 3], [0.2, 0.6], 2)
    0.4
    """
    best = max((a for c, a in zip(costs, accuracies, strict=True) if c <= budget), default=min(accuracies))
    for c0, a0 in zip(costs, accuracies, strict=True):
        for c1, a1 in zip(costs, accuracies, strict=True):
            if c0 <= budget < c1:
                best = max(best, a0 + (a1 - a0) * (budget - c0) / (c1 - c0))
    return float(best)


def oracle(correct: np.ndarray, tokens: np.ndarray, budget: float) -> tuple[float, float]:
    """Return accuracy and cost of knowing which level is right: each prompt's cheapest such while the budget lasts.

    ``correct`` and ``tokens`` are (n, K), cheapest level first.
    """
    gain, price = [], []
    for right, cost in zip(correct, tokens, strict=True):
        better = [k for k in range(1, len(cost)) if right[k] > right[0]]
        if better:
            k = min(better, key=lambda k: (cost[k] - cost[0]) / (right[k] - right[0]))
            gain.append(right[k] - right[0])
            price.append(cost[k] - cost[0])
    spare = budget * len(tokens) - tokens[:, 0].sum()
    total, spent = correct[:, 0].sum(), tokens[:, 0].sum()
    for i in np.argsort(np.array(price) / np.array(gain)) if gain else []:
        if price[i] <= spare:
            spare, total, spent = spare - price[i], total + gain[i], spent + price[i]
    return float(total / len(tokens)), float(spent / len(tokens))


def cost_at(costs: Any, accuracies: Any, accuracy: float) -> float:
    """Return what a frontier of (cost, accuracy) points pays for an accuracy, straight lines between; inf if it cannot.

    >>> cost_at([1, 3], [0.2, 0.6], 0.4)
    2.0
    """
    order = np.argsort(costs, kind="stable")
    c, a = np.asarray(costs, float)[order], np.maximum.accumulate(np.asarray(accuracies, float)[order])
    if accuracy > a[-1]:
        return float("inf")
    if accuracy <= a[0]:
        return float(c[0])
    i = int(np.searchsorted(a, accuracy))
    return float(c[i - 1] + (c[i] - c[i - 1]) * (accuracy - a[i - 1]) / (a[i] - a[i - 1]))


def read_samples(path: str | Path, *, level: str, tokens: float) -> pd.DataFrame:
    """Return a log from a file of lm-evaluation-harness's ``--log_samples``: one level's answers.

    Parameters
    ----------
    path
        ``samples_*.jsonl``.
    level
        The name of the effort it was run with.
    tokens
        What an answer cost, where the file does not say by a field "tokens".

    Raises
    ------
    InputError
        A line that is no such sample; the message names file and line.
    """
    import pandas as pd

    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
            arguments = sample["arguments"]
            first = arguments["gen_args_0"]["arg_0"] if isinstance(arguments, dict) else arguments[0][0]
            right = next(float(sample[key]) for key in ("exact_match", "acc_norm", "acc", "pass@1") if key in sample)
        except (json.JSONDecodeError, KeyError, TypeError, IndexError, StopIteration, ValueError) as error:
            raise InputError(f"{path}, line {number}: not a logged sample with arguments and a metric") from error
        rows.append({"prompt": first, "level": level, "correct": right, "tokens": sample.get("tokens", tokens)})
    if not rows:
        raise InputError(f"{path}: no sample in it")
    return pd.DataFrame(rows)
