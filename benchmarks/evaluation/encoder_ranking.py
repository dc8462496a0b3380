"""Seconds of the scores beside numpy's SVD, as RankMe is usually computed, and of the bootstrap, by encoder width.

SSR-dagger needs singular vectors: its measure is the economy SVD. RankMe alone needs the values only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from fairtrial.evaluation.encoder_ranking import SCORES, Features, rank_encoders, ssr_dagger

ITEMS = 1000


def seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """Return the least of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def rankme_by_svd(values: np.ndarray) -> float:
    """RankMe as it is usually written."""
    s = np.linalg.svd(values, compute_uv=False)
    p = s / s.sum() + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))


def main() -> None:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(ITEMS, 64))
    reference = Features(truth @ rng.normal(size=(64, 768)) + rng.normal(size=(ITEMS, 768)))
    reference.leading(32)
    table = Table(
        "width", "values only", "economy svd", "SSR-dagger", "x values", "x svd", "all six", "x values", "x svd",
        "200 resamples",
        title=f"Seconds an encoder, {ITEMS} items, reference of width 768",
    )  # fmt: skip
    for width in (64, 256, 768, 1280, 2048, 4096):
        values = truth @ rng.normal(size=(64, width)) + rng.normal(size=(ITEMS, width))
        svd = seconds(lambda values=values: rankme_by_svd(values))
        economy = seconds(lambda values=values: np.linalg.svd(values, full_matrices=False))
        dagger = seconds(lambda values=values: ssr_dagger(Features(values), reference))

        def every(values: np.ndarray = values) -> None:
            prepared = Features(values)
            for score in SCORES.values():
                score(prepared, reference)

        total = seconds(every)
        pool = {"one": values, "two": values[:, : width // 2]}
        plain, resampled = (
            seconds(lambda draws=draws, pool=pool: rank_encoders(pool, reference=reference, bootstrap=draws))
            for draws in (0, 200)
        )
        table.add_row(
            str(width), f"{svd:.3f}", f"{economy:.3f}",
            f"{dagger:.3f}", f"{dagger / svd:.2f}", f"{dagger / economy:.2f}",
            f"{total:.3f}", f"{total / svd:.2f}", f"{total / economy:.2f}",
            f"{max(0.0, resampled - plain) / len(pool):.3f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
