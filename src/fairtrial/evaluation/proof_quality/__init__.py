"""ProofRank: how good correct proofs are, axis by axis, and whether a judge of proofs can be believed."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Adaptivity": ".adaptive",
        "CachedJudge": "fairtrial.judges",
        "Conciseness": ".concise",
        "Diversity": ".diverse",
        "Ease": ".ease",
        "LocalJudge": "fairtrial.judges",
        "Metamath": ".metamath",
        "OpenAIJudge": "fairtrial.judges",
        "Proof": ".proof",
        "QualityTable": ".rank",
        "Simplicity": ".simplicity",
        "Step": ".proof",
        "Taxonomy": ".simplicity",
        "adaptivity": ".adaptive",
        "bank": ".theorems",
        "cognitive_simplicity": ".simplicity",
        "computational_ease": ".ease",
        "conciseness": ".concise",
        "diversity": ".diverse",
        "fit_threshold": ".simplicity",
        "judge_reliability": ".judging",
        "judge_verifier": ".judging",
        "minimise": ".concise",
        "pairwise_ranks": ".judging",
        "prediction_powered_mean": "fairtrial.judges",
        "proof_reward": ".reward",
        "rank_proofs": ".rank",
        "read_jsonl": ".proof",
    },
)
