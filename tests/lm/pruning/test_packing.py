from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from fairtrial.causal_lm.layout import block_layouts
from fairtrial.errors import InputError
from fairtrial.lm.pruning import OneShotPrune, load_packed, measure_sparse, remove_dead_channels, save_packed
from fairtrial.lm.pruning.packing import SparseMeasurement, _is_two_of_four, _to_compressed_rows, packed_bytes


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_model_is_smaller_and_comes_back_bit_for_bit(
    model: Any, ids: torch.Tensor, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = model.to(dtype)
    OneShotPrune("magnitude", sparsity=0.75).prune(model, None, ids)
    model.save_pretrained(tmp_path / "dense")
    size = save_packed(model, tmp_path / "packed")
    assert size < (tmp_path / "dense" / "model.safetensors").stat().st_size
    again = load_packed(tmp_path / "packed")
    if dtype == torch.float32:  # .to(bfloat16) also rounded buffers no file holds
        assert torch.equal(logits(again, ids), logits(model, ids))
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.dtype == dtype for p in again.parameters())


def test_half_the_zeros_in_half_precision_take_nine_sixteenths() -> None:
    weight = torch.ones(64, 64, dtype=torch.float16)
    assert packed_bytes(weight) == weight.numel() * 2  # never larger than dense
    weight[:, ::2] = 0
    assert packed_bytes(weight) / (weight.numel() * 2) == 9 / 16


def test_a_folder_without_a_packed_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no packed model"):
        load_packed(tmp_path)


def kill_channels(model: Any) -> None:
    """Make hidden channels 1 and 2 of every MLP unread, and channel 5 unfed where there is a gate."""
    for layout in block_layouts(model):
        for mlp in layout.mlps:
            mlp.down.weight[:, 1:3] = 0
            mlp.up.weight[5] = 0


def test_removing_dead_channels_shrinks_the_matrices_and_changes_no_logit(model: Any, ids: torch.Tensor) -> None:
    kill_channels(model)
    before, stacked = logits(model, ids), block_layouts(model)[0].mlps[0].up.expert is not None
    gated = block_layouts(model)[0].mlps[0].gate is not None
    removed = remove_dead_channels(model)
    assert removed == (0 if stacked else 6 if gated else 4)
    assert torch.allclose(logits(model, ids), before, atol=1e-5)
    if not stacked:
        assert block_layouts(model)[0].mlps[0].down.in_features == (21 if gated else 22)


def test_compressed_rows_compute_the_same(model: Any, ids: torch.Tensor) -> None:
    OneShotPrune("magnitude", sparsity=0.5).prune(model, None, ids)
    before = logits(model, ids)
    _to_compressed_rows(model, None)
    assert torch.allclose(logits(model, ids), before, atol=1e-5)


def test_measuring_leaves_the_model_as_it_is_and_names_the_backend(llama: Any, ids: torch.Tensor) -> None:
    OneShotPrune("magnitude", sparsity=0.5).prune(llama, None, ids)
    kill_channels(llama)
    before = copy.deepcopy(llama.state_dict())
    result = measure_sparse(llama, batch=2, new_tokens=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in llama.state_dict().items())
    assert result.packed_bytes < result.dense_bytes
    assert result.dense_tokens_per_second > 0
    assert result.backend in ("dead channels removed", "compressed rows (CSR)")
    assert result.device == "cpu"
    assert len(result.ratios) == 3


def test_a_speed_up_is_claimed_only_if_every_pair_of_runs_shows_it() -> None:
    noisy = SparseMeasurement(100, 60, "compressed rows (CSR)", 100.0, 130.0, "cpu", (1.3, 1.04, 1.4))
    assert noisy.speedup == 1.3
    assert not noisy.faster
    assert "no speed-up on this device (best: compressed rows (CSR), 1.30x, 1.04 to 1.40" in str(noisy)
    faster = SparseMeasurement(100, 60, "2:4 tensor cores", 100.0, 130.0, "cuda:0", (1.3, 1.25, 1.4))
    assert faster.faster
    assert "1.30x with 2:4 tensor cores (1.25 to 1.40 in 3 pairs of runs)" in str(faster)
    assert "no speed-up" not in str(faster)
    none = SparseMeasurement(100, 60, "none", 100.0, 100.0, "cpu")
    assert (none.speedup, none.faster) == (1.0, False)
    assert "no speed-up on this device: 100.0 tokens/s" in str(none)


def test_the_backend_with_the_best_worst_pair_is_taken(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([[[1.0, 1.0, 1.0]], [[1.0, 2.0, 1.0], [3.0, 1.0, 3.0]], [[1.0, 1.0, 1.0], [1.2, 1.1, 1.3]]])
    monkeypatch.setattr("fairtrial.lm.pruning.packing._tokens_per_second", lambda models, batch, new: next(runs))
    kill_channels(llama)
    measured = measure_sparse(llama)
    assert measured.backend == "compressed rows (CSR)"
    assert measured.ratios == (1.2, 1.1, 1.3)
    assert measured.speedup == 1.2 == measured.sparse_tokens_per_second


def test_batch_and_new_tokens_must_be_positive(llama: Any) -> None:
    with pytest.raises(InputError, match="positive"):
        measure_sparse(llama, batch=0)


def test_two_of_four_is_recognised(llama: Any, ids: torch.Tensor) -> None:
    assert not _is_two_of_four(llama.model.layers[0].mlp.up_proj.weight)
    OneShotPrune("magnitude", pattern="2:4").prune(llama, None, ids)
    assert all(_is_two_of_four(view.weight) for layout in block_layouts(llama) for view in layout)


@pytest.mark.gpu
def test_semi_structured_tensors_compute_the_same(tiny: Any) -> None:
    from fairtrial.lm.pruning.packing import to_semi_structured

    ids = torch.randint(2, 48, (8, 16), device="cuda")
    model = tiny("llama", hidden_size=128, intermediate_size=256).to("cuda", torch.float16)
    OneShotPrune("magnitude", pattern="2:4").prune(model, None, ids)
    before = logits(model, ids)
    assert to_semi_structured(model) == 14
    assert torch.allclose(logits(model, ids), before, atol=1e-2)
