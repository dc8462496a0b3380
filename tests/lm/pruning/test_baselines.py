from __future__ import annotations

import pytest
import torch

from fairtrial.causal_lm.statistics import LinearStatistics
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.pruning.baselines import (
    METRICS,
    RIA,
    Magnitude,
    Random,
    RowScaled,
    SparseGPT,
    Wanda,
    intra_metric,
)
from fairtrial.lm.pruning.masks import keep_masks, lowest

N = 64


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(N, N, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def x() -> torch.Tensor:
    """256 tokens of correlated inputs of very different size, (256, 64)."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(N, N, generator=generator) / N**0.5 + torch.eye(N)
    return torch.randn(256, N, generator=generator) * torch.rand(N, generator=generator) @ mix


def moments(x: torch.Tensor) -> LinearStatistics:
    return LinearStatistics(x.square().sum(0), x.T @ x, len(x))


def halves(saliency: torch.Tensor, columns: slice) -> torch.Tensor:
    return ~lowest(saliency, saliency.shape[1] // 2)


def test_wanda_with_unit_norms_is_magnitude(weight: torch.Tensor) -> None:
    unit = LinearStatistics(torch.ones(N), None, 1)
    assert torch.equal(Wanda().scores(weight, unit), Magnitude().scores(weight, unit))


def test_ria_is_its_formula(weight: torch.Tensor, x: torch.Tensor) -> None:
    stats, magnitude = moments(x), weight.abs()
    for exponent in (0.5, 1.0):
        expected = (magnitude / magnitude.sum(1, keepdim=True) + magnitude / magnitude.sum(0)) * stats.x_norm**exponent
        assert torch.allclose(RIA(exponent).scores(weight, stats), expected)


def test_row_scaled_scores_have_nearly_equal_rows(weight: torch.Tensor, x: torch.Tensor) -> None:
    big = weight * torch.logspace(0, 3, N)[:, None]
    scores = RowScaled(Magnitude(), power=1.0).scores(big, moments(x))
    assert torch.allclose(scores.mean(1), torch.ones(N))
    assert torch.allclose(RowScaled(Magnitude(), power=0.0).scores(big, moments(x)), big.abs())


def test_random_scores_differ_between_matrices_and_repeat_by_seed(weight: torch.Tensor, x: torch.Tensor) -> None:
    stats = moments(x)
    assert torch.equal(Random(1).scores(weight, stats), Random(1).scores(weight, stats))
    assert not torch.equal(Random(1).scores(weight, stats), Random(2).scores(weight, stats))
    assert not torch.equal(Random(1).scores(weight, stats), Random(1).scores(weight.T.contiguous() * 2, stats))


def test_sparsegpt_with_identity_hessian_is_magnitude_without_update(weight: torch.Tensor) -> None:
    stats = LinearStatistics(torch.ones(N), torch.eye(N), 1)
    pruned, keep = SparseGPT(width=16).reconstruct(weight, stats, halves)
    assert torch.allclose(pruned, weight * keep, atol=1e-6)
    for start in range(0, N, 16):
        columns = slice(start, start + 16)
        assert torch.equal(keep[:, columns], halves(weight[:, columns].abs(), columns))
    order = SparseGPT().scores(weight, stats).argsort(1)
    assert torch.equal(order, weight.abs().argsort(1))


def test_sparsegpt_reconstructs_better_than_wanda_at_the_same_count(weight: torch.Tensor, x: torch.Tensor) -> None:
    stats = moments(x)
    pruned, keep = SparseGPT(width=N).reconstruct(weight, stats, halves)
    wanda = weight * keep_masks({"w": Wanda().scores(weight, stats)}, 0.5)["w"]
    assert int((wanda == 0).sum()) == int((~keep).sum())
    assert ((weight - pruned) @ x.T).norm() < ((weight - wanda) @ x.T).norm()


@pytest.mark.parametrize("width", [16, 48, 128])
def test_zeros_survive_the_update(weight: torch.Tensor, x: torch.Tensor, width: int) -> None:
    pruned, keep = SparseGPT(width=width).reconstruct(weight, moments(x), halves)
    assert torch.equal(pruned != 0, keep)


def test_sparsegpt_update_is_optimal_brain_surgeon_one_column_at_a_time(weight: torch.Tensor, x: torch.Tensor) -> None:
    """The twin inverts the Hessian of the columns still free anew for every column, in float64."""
    gpt, rows = SparseGPT(damping=0.01), weight[:3]
    hessian = (x.T @ x).double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(N)
    zeros = torch.rand(3, N, generator=torch.Generator().manual_seed(2)) < 0.5
    expected = rows.double().clone()
    for j in range(N):
        inverse = torch.linalg.inv(hessian[j:, j:])
        step = expected[:, j] * zeros[:, j] / inverse[0, 0]
        expected[:, j:] -= step[:, None] * inverse[0]
    pruned, _ = gpt.reconstruct(rows, moments(x), lambda saliency, columns: ~zeros[:, columns])
    assert torch.allclose(pruned.double(), expected * ~zeros, atol=1e-3)


def test_sparsegpt_pattern_is_chosen_group_by_group(weight: torch.Tensor, x: torch.Tensor) -> None:
    pruned, keep = SparseGPT(width=32).reconstruct(weight, moments(x), halves, step=4)
    assert (keep.unflatten(1, (-1, 4)).sum(2) == 2).all()
    assert torch.equal(pruned != 0, keep)


def test_sparsegpt_survives_inputs_that_are_never_active(weight: torch.Tensor, x: torch.Tensor) -> None:
    x = x.clone()
    x[:, ::3] = 0
    pruned, _ = SparseGPT().reconstruct(weight, moments(x), halves)
    assert torch.isfinite(pruned).all()
    assert torch.isfinite(SparseGPT().scores(weight, moments(torch.zeros_like(x)))).all()


def test_a_hessian_that_cannot_be_inverted_asks_for_text_or_damping(weight: torch.Tensor) -> None:
    stats = LinearStatistics(torch.ones(N), torch.ones(N, N), 1)
    with pytest.raises(InputError, match="more calibration text"):
        SparseGPT(damping=0.0).scores(weight, stats)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_scores_are_non_negative_and_of_the_shape_of_the_weight(
    name: str, weight: torch.Tensor, x: torch.Tensor
) -> None:
    scores = intra_metric(name).scores(weight[:10], moments(x))
    assert scores.shape == (10, N)
    assert (scores >= 0).all()


def test_an_unknown_metric_lists_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'wanda'"):
        intra_metric("wnda")
