"""Language models: methods that change them, steer them and measure them."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "FiedlerPrune": ".pruning",
        "OneShotPrune": ".pruning",
    },
)
