"""Bilevel optimization over a gossip network under heavy-tailed gradient noise, in one process or in many."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "Complete": ".network",
        "DecentralizedBilevel": ".optimizer",
        "Erdos": ".network",
        "Exponential": ".network",
        "GossipError": ".processes",
        "Isolated": ".network",
        "Network": ".network",
        "Problem": ".problem",
        "ProcessGroup": ".processes",
        "QuadraticOracle": ".oracle",
        "Ring": ".network",
        "Star": ".network",
        "StepInfo": ".optimizer",
        "TailIndex": ".tails",
        "Torus": ".network",
        "batches_of": ".problem",
        "metropolis": ".network",
        "tail_index": ".tails",
    },
)
