from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fairtrial.causal_lm.layout import SPECS
from fairtrial.data.samples import sample_path
from fairtrial.errors import MissingSampleError

KINDS = sorted(SPECS)


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
