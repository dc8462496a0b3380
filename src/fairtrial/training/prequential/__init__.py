"""Prequential coding: generalization read off a training run, by predicting each example before learning from it."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Bound": ".bounds",
        "IndexedDataset": ".sampler",
        "PrequentialMeter": ".meter",
        "PrequentialReport": ".report",
        "PrequentialSampler": ".sampler",
        "average_orders": ".report",
        "block_code": ".blocks",
        "kl_inverse": ".bounds",
        "prequential_bound": ".bounds",
        "prequential_report": ".report",
        "prequential_score": ".blocks",
        "prequential_trainer": ".trainer",
        "rank_runs": ".runs",
    },
)
