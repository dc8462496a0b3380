"""FiedlerPrune and its baselines: make a language model sparse in one shot, and find out what it costs and buys."""

from __future__ import annotations

from importlib import import_module

_EXPORTS = {
    "BlockGraph": "graph",
    "Fiedler": "graph",
    "FiedlerPrune": "fiedler",
    "OneShotPrune": "oneshot",
    "PruneReport": "oneshot",
    "mask_overlap": "oneshot",
    "Magnitude": "baselines",
    "RIA": "baselines",
    "Random": "baselines",
    "RowScaled": "baselines",
    "SparseGPT": "baselines",
    "Wanda": "baselines",
    "FiedlerInverted": "controls",
    "FiedlerPermuted": "controls",
    "FiedlerShuffled": "controls",
    "add_masked_lora": "finetune",
    "freeze_masks": "finetune",
    "merge_masked_lora": "finetune",
    "quantize_weights": "quantize",
    "load_packed": "packing",
    "measure_sparse": "packing",
    "remove_dead_channels": "packing",
    "save_packed": "packing",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
