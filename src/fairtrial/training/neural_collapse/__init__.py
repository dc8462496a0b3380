"""Exact dynamics of softmax training in a few numbers, and a meter of how far a real classifier is from collapse."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "CollapseReport": ".report",
        "CollapseTracker": ".tracker",
        "SpectralFlow": ".flow",
        "ce_mode_rates": ".modes",
        "collapse_report": ".report",
        "lyapunov": ".modes",
        "spectral_flow": ".flow",
        "spectral_network": ".network",
        "time_to_collapse": ".flow",
        "walsh_hadamard": ".modes",
    },
)
