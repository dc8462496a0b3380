"""Sharpness, its edge and the tangent kernel of a training run, and what weight decay does to them."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Edge": ".monitor",
        "Prediction": ".reduced",
        "Sharpness": ".sharpness",
        "SharpnessMeasurement": ".sharpness",
        "StabilityMonitor": ".monitor",
        "StabilityReport": ".monitor",
        "edge_of": ".monitor",
        "figure": ".drawing",
        "huggingface_callback": ".callbacks",
        "lightning_callback": ".callbacks",
        "ntk": ".kernel",
        "predict_regime": ".reduced",
        "simulate_reduced": ".reduced",
    },
)
