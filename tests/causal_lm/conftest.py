from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from fairtrial.causal_lm.layout import SPECS
from fairtrial.data.samples import sample_path
from fairtrial.errors import MissingSampleError

VOCAB = 300
KINDS = sorted(SPECS)


def build(kind: str, **changes: Any) -> torch.nn.Module:
    """A random model of two small blocks, with grouped-query heads and head widths of its own where the kind allows."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    if kind == "gpt2":
        sizes |= {"n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
    elif kind == "opt":
        sizes |= {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
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
        torch.manual_seed(sum(map(ord, kind)))
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():  # larger than the initial .02, so that every part matters
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
    return torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def padded() -> dict[str, torch.Tensor]:
    """Two texts of 5 and 9 tokens, padded at the right."""
    ids = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level BPE of 300 tokens; <s> is token 0, </s> token 1."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 6))) for _ in range(40)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([" ".join(draw.choices(words, k=50)) for _ in range(20)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    try:
        return sample_path("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf")
    except MissingSampleError as error:
        pytest.skip(str(error))
