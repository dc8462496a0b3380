"""Regression on mixtures of manifolds: an estimator that finds its own geometry, and a transformer that computes it."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "AggregateRate": ".mixture",
        "Chart": ".mixture",
        "ConstructedRegressor": ".constructed",
        "LinearAttentionTransformer": ".transformer",
        "ManifoldMixture": ".mixture",
        "Prompt": ".mixture",
        "TangentLocalPolynomial": ".regressor",
        "aggregate_rate": ".mixture",
        "frame_estimate": ".constructed",
        "oracle_estimate": ".mixture",
        "risk": ".twin",
        "train_twin": ".twin",
    },
)
