"""RLDP and AdaSwitch: how hard a problem is for a model, from one forward pass, and what to spend on it."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "DifficultyProbe": ".probe",
        "NoSignal": ".probe",
        "AdaSwitch": ".switch",
        "Answer": ".switch",
        "Effort": ".switch",
        "Replay": ".replaying",
        "replay": ".replaying",
        "read_samples": ".replaying",
        "concordance": ".probe",
    },
)
