"""ProofRank's speed: a Metamath database opened, proofs scored, and the Vendi score beside the package of that name.

python benchmarks/evaluation/proof_quality.py

The database needs ``fairtrial samples get set-mm``, the last line ``pip install vendi-score`` in an environment of its
own. Peers that grade proofs by a judge have nothing to time without one.
"""

import importlib.util
import itertools
import time
from collections.abc import Callable

import numpy as np

from fairtrial.data.samples import sample_path
from fairtrial.errors import MissingSampleError
from fairtrial.evaluation.proof_quality import (
    Metamath,
    Proof,
    bank,
    cognitive_simplicity,
    computational_ease,
    conciseness,
)
from fairtrial.evaluation.proof_quality.diverse import rarefied_vendi


def timed(work: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def score_bank() -> None:
    for entry in bank():
        proof = Proof(entry.proof.source, entry.proof.problem)
        conciseness(proof)
        computational_ease(proof)
        cognitive_simplicity(proof)


def main() -> None:
    rows: list[tuple[str, float, float, str]] = []
    try:
        path = sample_path("set-mm", "set.mm")
    except MissingSampleError as missing:
        print(missing)
    else:
        rows.append(("index set.mm (41 MB); limit 10 s", timed(lambda: Metamath(path)), 10.0, "s"))
        database = Metamath(path)
        labels = list(database.theorems())
        chosen = [labels[i] for i in np.random.default_rng(0).choice(len(labels), 1000, replace=False)]

        def open_all() -> None:
            for label in chosen:
                Proof.from_metamath(database, label)

        rows.append(("open a proof, mean of 1000; limit 1 ms", timed(open_all), 1.0, "ms"))
    rows.append(("read and score a LaTeX proof; limit 5 ms", timed(score_bank) / len(bank()) * 1e3, 5.0, "ms"))
    if importlib.util.find_spec("vendi_score"):
        from vendi_score.vendi import score_K

        vectors = np.abs(np.random.default_rng(0).normal(size=(12, 4)))
        kernel = vectors @ vectors.T / np.outer(*[np.linalg.norm(vectors, axis=1)] * 2)
        subsets = [np.ix_(c, c) for c in itertools.combinations(range(12), 6)]

        def peer() -> float:
            return float(np.mean([score_K(kernel[subset]) for subset in subsets]))

        assert abs(peer() - rarefied_vendi(kernel, 6)) < 1e-9
        rows.append(
            ("12 proofs rarefied to 6; vendi-score in a loop", timed(lambda: rarefied_vendi(kernel, 6)) * 1e3,
             timed(peer) * 1e3, "ms")
        )  # fmt: skip
    print(f"{'what':<50}{'ours':>9}{'limit or peer':>16}{'ratio':>8}")
    for name, ours, other, unit in rows:
        print(f"{name:<50}{ours:>6.2f} {unit:<2}{other:>13.2f} {unit:<2}{ours / other:>8.3f}")


if __name__ == "__main__":
    main()
