"""nGPT in NVFP4: train a language model with 4-bit products of matrices on the unit sphere."""

from __future__ import annotations

from fairtrial.lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "GPT": ".gpt",
        "HypersphereHook": ".sphere",
        "NGPT": ".ngpt",
        "NGPTConfig": ".ngpt",
        "NVFP4Linear": ".linear",
        "NVFP4Tensor": ".nvfp4",
        "Operand": ".recipe",
        "Recipe": ".recipe",
        "RoundingError": ".rounding",
        "TransformerConfig": ".transformer",
        "convert_linears": ".linear",
        "dot_product_snr": ".snr",
        "loss_rise": ".flatness",
        "make_recipe": ".recipe",
        "nonfinite_layers": ".snr",
        "quantize_nvfp4": ".nvfp4",
        "read_tokens": ".tokens",
        "token_batches": ".tokens",
    },
)
