"""Write a mixture of whole feed-forward layers (F = 1) in Mixtral's format, for software that knows no DivMoE."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from fairtrial.errors import InputError
from fairtrial.lm.upcycling.modeling import DivMoEForCausalLM


def save_as_mixtral(moe: DivMoEForCausalLM, folder: str | Path, tokenizer: Any = None) -> None:
    """Save a mixture with granularity 1 as a Mixtral model.

    Parameters
    ----------
    moe
        With F = 1, on a Llama or Mistral without attention biases.
    folder
        New or empty.
    tokenizer
        Saved beside it where given.

    Raises
    ------
    InputError
        F > 1, whose constraint Mixtral's routing cannot express; another architecture; a folder that holds files.

    Warns
    -----
    UserWarning
        Always: Mixtral routes by plain top-K. With one expert a group that chooses the same experts, but no group will
        hold the constraint if experts are added.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config, text = moe.config, moe.config.text_config
    if config.granularity != 1:
        raise InputError(
            f"granularity={config.granularity}: Mixtral's routing cannot hold a token to one expert a group, and the "
            "constraint would be lost silently; save_pretrained keeps it, or upcycle with granularity=1"
        )
    if text.model_type not in ("llama", "mistral") or getattr(text, "attention_bias", False):
        raise InputError(f"{text.model_type}: Mixtral's format holds Llama and Mistral without attention biases only")
    if text.hidden_act != "silu":
        raise InputError(f"hidden_act={text.hidden_act!r}: give a model of 'silu', as Mixtral is")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} holds files: give a new folder")
    warnings.warn(
        "Mixtral's format routes by plain top-K: the group constraint is not part of what is saved", stacklevel=2
    )
    shared = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
        "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window",
    )  # fmt: skip
    values = {name: getattr(text, name) for name in shared if hasattr(text, name)}
    mixtral = MixtralForCausalLM(
        MixtralConfig(**values, num_local_experts=len(config.domains), num_experts_per_tok=config.active)
    ).to(moe.dtype)
    names = {"router.weight": "gate.weight", "up_proj": "experts.gate_up_proj", "down_proj": "experts.down_proj"}
    weights: dict[str, torch.Tensor] = {}
    for key, value in moe.language_model.state_dict().items():
        before, mlp, after = key.partition(".mlp.")
        if after in ("router.coverage_bias", "router.progress"):
            continue  # the same for all experts where F = 1: it changes no softmax
        weights[f"{before}{mlp}{names[after]}" if mlp else key] = value
    mixtral.load_state_dict(weights)
    mixtral.generation_config = moe.generation_config
    mixtral.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
