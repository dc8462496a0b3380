from __future__ import annotations

from typing import Any

import pytest
import torch

from fairtrial.causal_lm.layout import block_layouts
from fairtrial.errors import InputError
from fairtrial.lm.pruning import OneShotPrune, add_masked_lora, freeze_masks, merge_masked_lora


def zeros(model: Any) -> list[torch.Tensor]:
    return [view.weight == 0 for layout in block_layouts(model) for view in layout]


def train(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, steps: int = 5) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def pruned(model: Any, ids: torch.Tensor) -> Any:
    OneShotPrune("magnitude").prune(model, None, ids)
    return model


def test_zeros_are_exactly_zero_after_adamw_steps_with_weight_decay(pruned: Any, ids: torch.Tensor) -> None:
    before = zeros(pruned)
    optimizer = torch.optim.AdamW(pruned.parameters(), lr=0.02, weight_decay=0.1)
    freeze_masks(pruned, optimizer)
    losses = train(pruned, optimizer, ids)
    assert losses[-1] < losses[0]
    assert all(torch.equal(now, then) for now, then in zip(zeros(pruned), before, strict=True))


def test_moments_from_before_are_masked_too(llama: Any, ids: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(llama.parameters(), lr=0.01)
    train(llama, optimizer, ids, steps=2)
    OneShotPrune("magnitude").prune(llama, None, ids)
    before = zeros(llama)
    freeze_masks(llama, optimizer)
    for layout in block_layouts(llama):
        for view in layout:
            state = optimizer.state[view.parameter]
            assert (state["exp_avg"][view.weight == 0] == 0).all()
            assert (state["exp_avg_sq"][view.weight == 0] == 0).all()
    train(llama, optimizer, ids)
    assert all(torch.equal(now, then) for now, then in zip(zeros(llama), before, strict=True))


def test_removing_the_handles_lifts_the_masks(llama: Any, ids: torch.Tensor) -> None:
    OneShotPrune("magnitude").prune(llama, None, ids)
    optimizer = torch.optim.SGD(llama.parameters(), lr=0.1)
    for handle in freeze_masks(llama, optimizer):
        handle.remove()
    train(llama, optimizer, ids, steps=1)
    assert sum(int(z.sum()) for z in zeros(llama)) < 100


def test_a_dense_model_has_no_mask_to_freeze(llama: Any) -> None:
    with pytest.raises(InputError, match="prune it first"):
        freeze_masks(llama, torch.optim.SGD(llama.parameters(), lr=0.1))


def test_masked_lora_trains_and_merges_without_losing_zeros(pruned: Any, ids: torch.Tensor) -> None:
    before, keys = zeros(pruned), set(pruned.state_dict())
    with torch.no_grad():
        logits = pruned(ids).logits
    trainable = add_masked_lora(pruned, rank=4, seed=1)
    assert all(p.requires_grad == any(p is t for t in trainable) for p in pruned.parameters())
    with torch.no_grad():
        assert torch.allclose(pruned(ids).logits, logits, atol=1e-6)  # B starts at zero
    losses = train(pruned, torch.optim.AdamW(trainable, lr=0.02), ids)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        adapted = pruned(ids).logits
    merge_masked_lora(pruned)
    assert set(pruned.state_dict()) == keys
    assert all((now | ~then).all() for now, then in zip(zeros(pruned), before, strict=True))
    with torch.no_grad():
        assert torch.allclose(pruned(ids).logits, adapted, atol=1e-5)


def test_a_rank_below_one_is_refused(llama: Any) -> None:
    with pytest.raises(InputError, match="rank"):
        add_masked_lora(llama, rank=0)
