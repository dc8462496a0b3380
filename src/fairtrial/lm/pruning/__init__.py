"""FiedlerPrune and its baselines: make a language model sparse in one shot, and find out what it costs and buys."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "BlockGraph": ".graph",
        "Fiedler": ".graph",
        "FiedlerPrune": ".fiedler",
        "OneShotPrune": ".oneshot",
        "PruneReport": ".oneshot",
        "mask_overlap": ".oneshot",
        "Magnitude": ".baselines",
        "RIA": ".baselines",
        "Random": ".baselines",
        "RowScaled": ".baselines",
        "SparseGPT": ".baselines",
        "Wanda": ".baselines",
        "FiedlerInverted": ".controls",
        "FiedlerPermuted": ".controls",
        "FiedlerShuffled": ".controls",
        "add_masked_lora": ".finetune",
        "freeze_masks": ".finetune",
        "merge_masked_lora": ".finetune",
        "quantize_weights": ".quantize",
        "load_packed": ".packing",
        "measure_sparse": ".packing",
        "remove_dead_channels": ".packing",
        "save_packed": ".packing",
    },
)
