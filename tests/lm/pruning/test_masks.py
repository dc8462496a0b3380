from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.pruning.masks import keep_masks, lowest, pack_bits, parse_pattern, unpack_bits, zeros_among


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.integers(0, 3), min_size=1, max_size=24), data=st.data())
def test_lowest_is_what_a_stable_sort_gives(values: list[int], data: st.DataObject) -> None:
    scores, count = torch.tensor(values, dtype=torch.float32), data.draw(st.integers(0, len(values)))
    expected = torch.zeros(len(values), dtype=torch.bool)
    expected[torch.argsort(scores, stable=True)[:count]] = True
    assert torch.equal(lowest(scores, count), expected)
    assert torch.equal(lowest(torch.stack([scores, scores]), count)[1], expected)


@settings(max_examples=200, deadline=None)
@given(n=st.one_of(st.integers(1, 5000), st.integers(1, 2**31)), thousandths=st.integers(0, 999))
def test_counts_are_those_of_the_decimal_as_it_is_written(n: int, thousandths: int) -> None:
    assert zeros_among(n, thousandths / 1000) == math.floor(Fraction(thousandths, 1000) * n)


@pytest.mark.parametrize("group", ["row", "layer", "block"])
def test_57_percent_of_100_are_57(group: str) -> None:
    keep = keep_masks({"w": torch.rand(1, 100)}, 0.57, group=group)["w"]  # type: ignore[arg-type]
    assert int((~keep).sum()) == 57


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 6), columns=st.integers(1, 30), sparsity=st.floats(0, 0.999), seed=st.integers(0, 99))
def test_every_row_has_exactly_the_floor_of_s_n_zeros(rows: int, columns: int, sparsity: float, seed: int) -> None:
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    keep = keep_masks({"w": scores}, sparsity, group="row")["w"]
    assert ((~keep).sum(1) == zeros_among(columns, sparsity)).all()


def test_layer_and_block_groups_have_exact_counts_and_one_threshold() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = {"a": torch.rand(5, 7, generator=generator), "b": 3 * torch.rand(4, 9, generator=generator)}
    layer = keep_masks(scores, 0.6, group="layer")
    assert [int((~layer[name]).sum()) for name in "ab"] == [math.floor(0.6 * 35), math.floor(0.6 * 36)]
    block = keep_masks(scores, 0.6, group="block")
    assert sum(int((~keep).sum()) for keep in block.values()) == math.floor(0.6 * 71)
    pruned = torch.cat([scores[name][~block[name]] for name in "ab"])
    kept = torch.cat([scores[name][block[name]] for name in "ab"])
    assert pruned.max() <= kept.min()


@pytest.mark.parametrize(("pattern", "zeros", "of"), [("2:4", 2, 4), ("4:8", 4, 8), ("1:4", 3, 4)])
def test_every_m_consecutive_inputs_hold_exactly_m_minus_n_zeros(pattern: str, zeros: int, of: int) -> None:
    scores = torch.rand(6, 16, generator=torch.Generator().manual_seed(0))
    keep = keep_masks({"w": scores}, 0.5, pattern=pattern)["w"]
    assert ((~keep).unflatten(1, (-1, of)).sum(2) == zeros).all()


def test_a_pattern_that_does_not_fit_names_the_layer() -> None:
    with pytest.raises(InputError, match=r"mlp\.up_proj has 10 inputs"):
        keep_masks({"mlp.up_proj": torch.ones(3, 10)}, 0.5, pattern="2:4")


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, float("nan")])
def test_sparsity_outside_zero_to_one_is_refused(sparsity: float) -> None:
    with pytest.raises(InputError, match=r"\[0, 1\)"):
        keep_masks({"w": torch.ones(2, 2)}, sparsity)


@pytest.mark.parametrize("pattern", ["2-4", "4:4", "0:4", "two:four", "2:4:8"])
def test_an_unknown_pattern_lists_valid_ones(pattern: str) -> None:
    with pytest.raises(UnknownNameError, match="2:4"):
        parse_pattern(pattern)


def test_an_unknown_group_lists_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match="block, layer, row"):
        keep_masks({"w": torch.ones(2, 2)}, 0.5, group="column")  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_packed_bits_come_back(bits: list[bool]) -> None:
    mask = torch.tensor(bits).view(1, -1)
    packed = pack_bits(mask)
    assert len(packed) == -(-len(bits) // 8)
    assert torch.equal(unpack_bits(packed, mask.shape), mask)
