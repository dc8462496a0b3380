from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.causal_lm.layout import block_layouts
from fairtrial.errors import InputError
from fairtrial.lm.pruning import OneShotPrune, quantize_weights
from fairtrial.lm.pruning.quantize import quantize_matrix


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from([4, 8]), n_in=st.integers(1, 300), group=st.sampled_from([1, 7, 128]), seed=st.integers(0, 9)
)
def test_zero_stays_zero_and_the_error_is_half_a_step(bits: int, n_in: int, group: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, n_in, generator=generator)
    weight[torch.rand(3, n_in, generator=generator) < 0.5] = 0
    matrix = quantize_matrix(weight, bits=bits, group_size=group)
    back = matrix.dequantize()
    assert matrix.codes.abs().max() <= 2 ** (bits - 1) - 1
    assert (back[weight == 0] == 0).all()
    step = matrix.scales.repeat_interleave(group, 1)[:, :n_in]
    assert ((back - weight).abs() <= step / 2 * (1 + 1e-5)).all()


def test_quantising_twice_changes_nothing() -> None:
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    once = quantize_matrix(weight).dequantize()
    assert torch.allclose(quantize_matrix(once).dequantize(), once)


def test_a_pruned_model_keeps_its_zeros(model: Any, ids: torch.Tensor) -> None:
    OneShotPrune("magnitude").prune(model, None, ids)
    views = [view for layout in block_layouts(model) for view in layout]
    before = [view.weight.clone() for view in views]
    n_bytes = quantize_weights(model, bits=8)
    for view, weight in zip(views, before, strict=True):
        assert (view.weight[weight == 0] == 0).all()
        assert not torch.equal(view.weight, weight)
        assert torch.allclose(view.weight, weight, atol=float(weight.abs().max()) / 127)
    assert n_bytes < sum(w.numel() * w.element_size() for w in before) / 3


@pytest.mark.parametrize("options", [{"bits": 3}, {"group_size": 0}])
def test_other_widths_are_refused(options: dict) -> None:
    with pytest.raises(InputError, match="must be"):
        quantize_matrix(torch.ones(2, 2), **options)
