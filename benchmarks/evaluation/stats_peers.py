"""Intervals and tests against the peers that have them: seconds a call, and how far the answers lie apart.

python benchmarks/evaluation/stats_peers.py
"""

import time
from collections.abc import Callable

import numpy as np
import scipy.stats
from baycomp.single import CorrelatedTTest
from statsmodels.stats.multitest import multipletests

from fairtrial.stats import bootstrap, holm, mean_interval, rope_probability, sign_flip_p


def timed(call: Callable[[], float], repeats: int = 5) -> tuple[float, float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        value = call()
        times.append(time.perf_counter() - start)
    return min(times), float(value)


def main() -> None:
    rng = np.random.default_rng(0)
    x, d = rng.exponential(size=100), rng.normal(0.4, 1, 16)
    folds = rng.normal(0.02, 0.03, 50)
    p = rng.random(40) ** 3
    pairs = {
        "BCa, median of 100, 2000 draws: scipy.stats.bootstrap": (
            lambda: bootstrap(x, lambda rows: np.median(rows, axis=-1), vectorized=True).low,
            lambda: scipy.stats.bootstrap((x,), np.median, n_resamples=2000, rng=0).confidence_interval.low,
        ),
        "sign flips of 16, exact: scipy.stats.permutation_test": (
            lambda: sign_flip_p(d),
            lambda: (
                scipy.stats.permutation_test(
                    (d,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
                ).pvalue
            ),
        ),
        "t interval: scipy.stats.ttest_1samp": (
            lambda: mean_interval(d).low,
            lambda: scipy.stats.ttest_1samp(d, 0.0).confidence_interval().low,
        ),
        "correlated t, rope: baycomp": (
            lambda: rope_probability(mean_interval(folds, variance="nadeau_bengio", n_test=1, n_train=9), 0.01),
            lambda: CorrelatedTTest.probs(np.zeros(50), folds, 0.01, 5)[1],
        ),
        "Holm, 40 claims: statsmodels multipletests": (
            lambda: holm(p)[0].sum(),
            lambda: multipletests(p, method="holm")[0].sum(),
        ),
    }
    print(f"{'what':<58}{'ours':>11}{'peer':>11}{'ratio':>8}{'apart':>10}")
    for name, (ours, peer) in pairs.items():
        (mine, a), (theirs, b) = timed(ours), timed(peer)
        print(f"{name:<58}{mine:>11.6f}{theirs:>11.6f}{mine / theirs:>8.3f}{abs(a - b):>10.1e}")


if __name__ == "__main__":
    main()
