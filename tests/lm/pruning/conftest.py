from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

KINDS = ["gpt2", "opt", "llama", "qwen2", "phi3", "mixtral"]


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of two blocks: d 16, m 24, 4 query and 2 key-value heads where the kind groups them."""
    sizes: dict[str, Any] = {"vocab_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "gpt2":
        sizes |= {"n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
    else:
        sizes |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
        sizes |= {"word_embed_proj_dim": 16, "ffn_dim": 24} if kind == "opt" else {"intermediate_size": 24}
        sizes |= {"num_key_value_heads": 2} if kind != "opt" else {}
        sizes |= {"num_local_experts": 3, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | changes)).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture
def tiny() -> Callable[..., Any]:
    return build


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@pytest.fixture
def llama() -> Any:
    return build("llama")


@pytest.fixture
def ids() -> torch.Tensor:
    """Four windows of twelve tokens."""
    return torch.randint(2, 48, (4, 12), generator=torch.Generator().manual_seed(0))
