"""Proper correction: whether contexts correct a model too little, properly or too much, and which to use."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "CorrectionMeter": ".meter",
        "ProperCorrectionSelector": ".selector",
        "Selection": ".selector",
        "consensus": ".selector",
        "Corrections": ".geometry",
        "corrections": ".geometry",
        "answer_vectors": ".answers",
        "attention_to": ".attention",
        "tempered_logits": ".attention",
    },
)
