"""Random models of many architectures, small enough to build and run in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 300


def build(kind: str, *, seed: int | None = None, layers: int = 2, **changes: Any) -> Any:
    """A random model of ``layers`` small blocks, with grouped-query heads and widths of its own where it can."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "gpt2":
        sizes |= {"n_embd": 16, "n_inner": 24, "n_layer": layers, "n_head": 4, "n_positions": 64}
    elif kind == "opt":
        sizes |= {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    if kind in ("mixtral", "qwen2_moe", "qwen3_moe"):
        experts = {"qwen2_moe": "num_experts", "qwen3_moe": "num_experts", "mixtral": "num_local_experts"}[kind]
        sizes |= {experts: 3, "num_experts_per_tok": 2}
        if kind != "mixtral":
            sizes |= {"moe_intermediate_size": 12}
        if kind == "qwen2_moe":
            sizes |= {"shared_expert_intermediate_size": 20, "mlp_only_layers": [1]}  # the second block is dense
    if kind in ("gemma", "gemma2", "gemma3_text", "qwen3", "qwen3_moe"):
        sizes |= {"head_dim": 8}
    if kind in ("gemma2", "gemma3_text"):  # blocks with masks of their own
        sizes |= {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    config = AutoConfig.for_model(kind, **sizes | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, kind)) if seed is None else seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():  # larger than the initial .02, so that every part matters
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model
