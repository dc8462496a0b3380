"""D-PACE: a loss that trains a drafter for the length of the block its target will accept, and all around it."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "DPACELoss": ".loss",
        "position_weights": ".loss",
        "expected_length": ".loss",
        "BlockDrafter": ".drafter",
        "DrafterConfig": ".drafter",
        "DrafterTrainer": ".training",
        "accepted_lengths": ".training",
        "Drafter": ".speculation",
        "Speculated": ".speculation",
        "speculative_generate": ".speculation",
        "Written": ".written",
        "write": ".written",
        "features_of": ".written",
    },
)
