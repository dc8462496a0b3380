import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.lm.upcycling import DivMoEFeedForward, GroupTopRouter
from fairtrial.lm.upcycling.experts import check_granularity


def layer(g=3, f=2, k=2, d=8, m=12, gated=True, bias=False, dtype=torch.float32, seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = DivMoEFeedForward(
            d, m, GroupTopRouter(d, n_groups=g, n_slices=f, n_active=k, std=1.0, seed=seed), granularity=f,
            gated=gated, bias=bias, activation=torch.nn.GELU(), dtype=dtype,
        )  # fmt: skip
        if bias:
            torch.nn.init.normal_(made.up_bias)
            torch.nn.init.normal_(made.down_bias)
    return made


def one_by_one(moe, x):
    """The layer as it is defined: a loop over tokens and their experts."""
    routing = moe.router(x)
    rows = []
    for i, token in enumerate(x):
        y = torch.zeros_like(token) if moe.down_bias is None else moe.down_bias
        for e, share in zip(routing.experts[i].tolist(), routing.weights[i], strict=True):
            h = moe.up_proj[e] @ token + (0 if moe.up_bias is None else moe.up_bias[e])
            if moe.gated:
                gate, up = h.chunk(2)
                h = F.gelu(gate) * up
            else:
                h = F.gelu(h)
            y = y + moe.granularity * share * (moe.down_proj[e] @ h)
        rows.append(y)
    return torch.stack(rows)


def assert_same_with_gradients(moe, x, **tolerance):
    twin = copy.deepcopy(moe)
    given, twin_given = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = moe(given), one_by_one(twin, twin_given)
    torch.testing.assert_close(y, z, **tolerance)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype)
    (y * weight).sum().backward()
    (z * weight).sum().backward()
    torch.testing.assert_close(given.grad, twin_given.grad, **tolerance)
    for (name, ours), theirs in zip(moe.named_parameters(), twin.parameters(), strict=True):
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, expected, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("n", [1, 33])
def test_sorted_execution_equals_the_loop_over_experts_forward_and_backward(n, gated):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    assert_same_with_gradients(layer(gated=gated, bias=not gated), x, rtol=1e-5, atol=1e-5)


def test_experts_that_no_token_takes_and_tokens_that_are_none():
    moe = layer()
    moe.router.coverage_bias[0::2] = 100.0  # expert 1 of each group gets nothing
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    assert (moe.router(x).experts % 2 == 0).all()
    assert_same_with_gradients(moe, x, rtol=1e-5, atol=1e-5)
    assert moe.up_proj.grad[1::2].abs().max() == 0
    assert moe(torch.empty(0, 8)).shape == (0, 8)


def test_random_layers_equal_their_definition_in_double_precision():
    for g, f, k in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 3)):
        if k <= g:
            moe = layer(g, f, k, m=6 * f, dtype=torch.float64, seed=7 * g + f)
            x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
            torch.testing.assert_close(moe(x), one_by_one(moe, x), rtol=1e-6, atol=1e-6)  # shares are float32


def test_it_is_unbiased_for_identical_domains_and_uniform_slices():
    """F = 4, K = 2: the mean over all 4^2 choices of slices is the dense FFN."""
    d, m, f = 6, 16, 4
    g = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((m, d), (m, d), (d, m)))
    moe = layer(g=2, f=f, k=2, d=d, m=m, dtype=torch.float64)
    x = torch.randn(5, d, generator=g, dtype=torch.float64)
    with torch.no_grad():
        moe.router.weight.zero_()
        for e in range(8):
            rows = slice(e % f * 4, e % f * 4 + 4)
            moe.up_proj[e].copy_(torch.cat([gate[rows], up[rows]]))
            moe.down_proj[e].copy_(down[:, rows])
        outputs = []
        for one, two in itertools.product(range(f), range(f)):
            moe.router.coverage_bias.zero_()
            moe.router.coverage_bias[[one, f + two]] = 10.0
            outputs.append(moe(x))
    dense = (F.gelu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(torch.stack(outputs).mean(0), dense, rtol=0, atol=1e-12)


def test_renaming_experts_in_a_group_or_groups_changes_nothing():
    moe = layer(g=3, f=4, k=2)
    x = torch.randn(30, 8, generator=torch.Generator().manual_seed(3))
    inside = torch.cat([4 * g + torch.randperm(4, generator=torch.Generator().manual_seed(g)) for g in range(3)])
    across = torch.tensor([2, 0, 1]).repeat_interleave(4) * 4 + torch.arange(4).repeat(3)
    for order in (inside, across, across[inside]):
        renamed = copy.deepcopy(moe)
        with torch.no_grad():
            for name in ("up_proj", "down_proj"):
                getattr(renamed, name).copy_(getattr(moe, name)[order])
            renamed.router.weight.copy_(moe.router.weight[order])
        torch.testing.assert_close(renamed(x), moe(x), rtol=1e-5, atol=1e-6)


def test_all_outputs_weighted_are_the_layer():
    moe = layer(gated=False, bias=True)
    x = torch.randn(9, 8, generator=torch.Generator().manual_seed(4))
    y = moe(x)
    shares = torch.zeros(9, 6).scatter(1, moe.routing.experts, moe.routing.weights)
    torch.testing.assert_close(torch.einsum("ne,end->nd", 2 * shares, moe.expert_outputs(x)) + moe.down_bias, y)


def test_it_runs_in_bfloat16_under_autocast_and_keeps_shape_and_dtype():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(5))
    moe = layer()
    wanted = moe(x)
    low = copy.deepcopy(moe).to(torch.bfloat16)
    assert low(x.bfloat16()).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(x)
        y.sum().backward()
    assert (y.dtype, y.shape) == (torch.float32, x.shape)
    assert (y - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert moe.up_proj.grad.dtype == torch.float32


def test_a_granularity_that_does_not_divide_names_those_that_do():
    with pytest.raises(InputError, match="give one of 1, 2, 3, 4, 6, 12"):
        check_granularity(12, 5)
    with pytest.raises(InputError, match="granularity=0"):
        layer(f=1).__class__(8, 12, GroupTopRouter(8, n_groups=2, n_slices=1, n_active=1), granularity=0)
    with pytest.raises(InputError, match="no biases"):
        layer(bias=True)
