from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import build

KINDS = ["gpt2", "opt", "llama", "qwen2", "phi3", "mixtral"]


def small(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model of two blocks: d 16, m 24, 48 tokens, 4 query and 2 key-value heads where the kind groups them."""
    return build(kind, seed=seed, vocab_size=48, **changes)


@pytest.fixture
def tiny() -> Callable[..., Any]:
    return small


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


@pytest.fixture
def llama() -> Any:
    return small("llama")


@pytest.fixture
def ids() -> torch.Tensor:
    """Four windows of twelve tokens."""
    return torch.randint(2, 48, (4, 12), generator=torch.Generator().manual_seed(0))
