import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
)

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=1),
    "qwen2": Qwen2Config(**SIZES, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=True),
    "phi3": Phi3Config(**SIZES, intermediate_size=24, num_key_value_heads=1, pad_token_id=0),
    "phi": PhiConfig(**SIZES, intermediate_size=24),
    "gpt2": GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=2, n_inner=24, bos_token_id=0, eos_token_id=1),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=24, bos_token_id=0, eos_token_id=1),
}


def random_model(kind, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
        with torch.no_grad():  # biases and norms too: zeros and ones would hide a mistake
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def moved(base, seed, size=0.2):
    """A fine-tune: the base with every weight moved a little."""
    model = copy.deepcopy(base)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * parameter.std() * torch.randn(parameter.shape, generator=g))
    return model


@pytest.fixture(scope="session")
def model_of():
    return random_model


@pytest.fixture(scope="session")
def tuned():
    return moved


@pytest.fixture(scope="session")
def llama():
    return random_model("llama")


@pytest.fixture(scope="session")
def four(llama):
    return {name: moved(llama, i) for i, name in enumerate(("math", "code", "science", "news"))}
