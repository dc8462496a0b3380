"""Variance components: ours against statsmodels' MixedLM, and the scale the specification asks for.

python benchmarks/evaluation/stats_components.py
"""

import time
from collections.abc import Callable

import numpy as np
import pandas as pd
from statsmodels.regression.mixed_linear_model import MixedLM

from fairtrial.stats import SplitScores, StopWhenFlat, interval, variance_components


def seconds(call: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def table(rows: int, splits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random splits of a fifth of the samples, rows shuffled."""
    rng, m = np.random.default_rng(0), rows // splits
    n = 5 * m
    split = np.repeat(np.arange(splits), m)
    sample = np.concatenate([rng.choice(n, m, replace=False) for _ in range(splits)])
    score = rng.normal(size=splits)[split] + rng.normal(size=n)[sample] + rng.normal(size=rows)
    order = rng.permutation(rows)
    return split[order], sample[order], score[order]


def main() -> None:
    print(f"{'what':<58}{'seconds':>10}{'target':>10}")
    for rows, splits, target in ((20_000, 50, ""), (1_000_000, 100, "0.15")):
        split, sample, score = table(rows, splits)
        scores = SplitScores.from_rows(split, sample, score)
        ours = seconds(lambda scores=scores: variance_components(scores))
        build = seconds(lambda s=split, i=sample, e=score: SplitScores.from_rows(s, i, e))
        whole = seconds(lambda scores=scores: interval(scores))
        print(f"{f'variance_components, {rows} rows':<58}{ours:>10.4f}{target:>10}")
        print(f"{'  SplitScores.from_rows, shuffled':<58}{build:>10.4f}")
        print(f"{'  interval (design), components included':<58}{whole:>10.4f}")

    # The crossed model with both components needs one group of 20 000 rows, which MixedLM cannot hold densely; the
    # simpler model with the sample component only (and the splits as fixed effects left out) is its lower bound.
    split, sample, score = table(20_000, 50)
    scores = SplitScores.from_rows(split, sample, score)
    frame = pd.DataFrame({"score": score, "sample": sample})
    peer = seconds(lambda: MixedLM(frame["score"], np.ones(len(frame)), groups=frame["sample"]).fit(), repeats=2)
    ours = seconds(lambda: variance_components(scores))
    print(f"{'MixedLM, 20000 rows, sample component only':<58}{peer:>10.4f}")
    print(f"{'  ours / MixedLM (both components)':<58}{ours / peer:>10.5f}{'1/20':>10}")

    # A stopping rule's look must be small beside a fit of 1 ms.
    rng, n = np.random.default_rng(0), 150
    orders = [rng.permutation(n) for _ in range(100)]
    values = [rng.normal(size=30) for _ in orders]

    def looks() -> None:
        stop = StopWhenFlat(min_gain=1e-9)
        for order, scores_of_split in zip(orders, values, strict=True):
            stop.update(order[30:], order[:30], scores_of_split)

    print(f"{'StopWhenFlat.update, n = 150, a split':<58}{seconds(looks) / 100:>10.6f}{'0.00003':>10}")


if __name__ == "__main__":
    main()
