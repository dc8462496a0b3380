import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.low_precision import (
    GPT,
    NVFP4Linear,
    Operand,
    TransformerConfig,
    convert_linears,
    make_recipe,
    quantize_nvfp4,
)
from fairtrial.lm.low_precision.linear import log_padding
from fairtrial.lm.low_precision.products import HEADROOM, Noise, delayed_scale, fake_int4, quantized, quantized_matmul
from fairtrial.seeds import torch_generator


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch_generator(seed, "test"), dtype=dtype)


def nearest_recipe(**options):
    """All six operands to nearest, so that a dense twin can be written down."""
    recipe = make_recipe("nvfp4", **options)
    grad = Operand(tensor_scale=2**-6)
    return type(recipe)("nearest", recipe.y_x, recipe.y_w, grad, recipe.dx_w, grad, recipe.dw_x, recipe.hadamard)


def q(x, axis, scale=2**-4, block="1x16"):
    return quantize_nvfp4(x.detach().contiguous(), axis, tensor_scale=scale, block=block).dequantize()


@pytest.mark.parametrize("block", ["1x16", "16x16"])
def test_forward_and_both_gradients_are_products_of_operands_quantized_along_their_own_axis(block):
    x, w, g = normal(64, 48), normal(32, 48, seed=1), normal(64, 32, seed=2)
    layer = NVFP4Linear(48, 32, bias=False, recipe=nearest_recipe(weight_block=block))
    layer.weight.data.copy_(w)
    x.requires_grad_()
    y = layer(x)
    y.backward(g)
    torch.testing.assert_close(y, q(x, 1) @ q(w, 1, block=block).T)
    torch.testing.assert_close(x.grad, q(g, 1, 2**-6) @ q(w, 0, block=block))
    torch.testing.assert_close(layer.weight.grad, q(g, 0, 2**-6).T @ q(x, 0))


@pytest.mark.parametrize("shape", [(5, 20), (2, 7, 20)])
def test_with_quantizers_replaced_by_identity_gradients_are_those_of_autograd(shape):
    x, w, b = normal(*shape, dtype=torch.float64), normal(12, 20, seed=1, dtype=torch.float64), normal(12).double()
    plain = [v.clone().requires_grad_() for v in (x, w, b)]
    ours = [v.clone().requires_grad_() for v in (x, w, b)]
    one = F.linear(*plain)
    two = quantized_matmul(ours[0], ours[1], make_recipe("none"), Noise(), bias=ours[2])
    assert torch.equal(one, two)
    weight = normal(*one.shape, seed=3).double()
    (one * weight).sum().backward()
    (two * weight).sum().backward()
    for a, c in zip(plain, ours, strict=True):
        torch.testing.assert_close(a.grad, c.grad, rtol=1e-10, atol=1e-10)


def test_identity_and_rotation_leave_batched_products_what_they_are():
    a, b = (normal(2, 1, 4, 3, seed=i, dtype=torch.float64).requires_grad_() for i in (0, 1))
    assert torch.autograd.gradcheck(lambda a, b: quantized_matmul(a, b, make_recipe("none"), Noise()), (a, b))
    recipe = make_recipe("none", hadamard=True)
    assert torch.autograd.gradcheck(lambda a, b: quantized_matmul(a, b, recipe, Noise()), (a[0, 0], b[0, 0]))


def test_gradients_are_right_on_average():
    x, w, g = normal(32, 32), normal(16, 32, seed=1), normal(32, 16, seed=2)
    layer = NVFP4Linear(32, 16, bias=False)
    layer.weight.data.copy_(w)
    total = torch.zeros_like(x)
    for _ in range(100):
        leaf = x.clone().requires_grad_()
        layer(leaf).backward(g)
        total += leaf.grad / 100
    exact = g @ q(w, 0)
    assert float((total - exact).norm() / exact.norm()) < 0.03


def test_padding_changes_nothing_but_the_shape_of_blocks(caplog):
    log_padding.cache_clear()
    with caplog.at_level(logging.WARNING):
        layer = NVFP4Linear(20, 12)
        NVFP4Linear(20, 12)
    assert [record.message for record in caplog.records] == [
        f"a layer of width {width} is filled up with zeros to a multiple of 16" for width in (20, 12)
    ]
    x = normal(7, 20).requires_grad_()
    y = layer(x)
    wide_x, wide_w = F.pad(x, (0, 12)), F.pad(layer.weight, (0, 12))
    torch.testing.assert_close(y, q(wide_x, 1) @ q(wide_w, 1).T + layer.bias)
    y.sum().backward()
    assert x.grad.shape == (7, 20)
    assert layer.weight.grad.shape == (12, 20)
    square = NVFP4Linear(20, 12, recipe=make_recipe(weight_block="16x16"))
    square(x).sum().backward()
    assert square.weight.grad.isfinite().all()


def test_a_zero_block_gives_zero_and_nan_goes_through():
    layer = NVFP4Linear(32, 16, bias=False)
    assert torch.equal(layer(torch.zeros(3, 32)), torch.zeros(3, 16))
    x = torch.zeros(2, 32)
    x[1, 0] = torch.nan
    y = layer(x)
    assert (y[0] == 0).all()
    assert y[1].isnan().all()
    zero = torch.zeros(16, 32, requires_grad=True)
    layer(zero).backward(torch.zeros(16, 16))
    assert (zero.grad == 0).all()


def test_the_scale_of_gradients_is_a_power_of_two_from_the_step_before():
    history = torch.zeros(())
    first = delayed_scale(normal(8, 8), history)
    peak = float(normal(8, 8).abs().max())
    assert float(first) == 2.0 ** (torch.tensor(peak / 2688).log2().ceil() + HEADROOM)
    assert float(history) == pytest.approx(peak)
    assert float(delayed_scale(100 * normal(8, 8), history)) == float(first)
    assert float(history) == pytest.approx(100 * peak)
    for useless in (torch.zeros(2, 2), torch.full((2, 2), torch.nan)):
        delayed_scale(useless, history)
        assert float(history) == pytest.approx(100 * peak)


def test_a_gradient_that_grows_a_hundredfold_is_not_clipped():
    layer = NVFP4Linear(16, 16, bias=False)
    for size in (1.0, 8.0):
        x = normal(64, 16).requires_grad_()
        layer(x).backward(size * normal(64, 16, seed=1))
    exact = size * normal(64, 16, seed=1) @ layer.weight.detach()
    assert float((x.grad - exact).norm() / exact.norm()) < 0.25


def test_int4_has_fifteen_levels_and_one_scale():
    x = normal(64, 64)
    found = fake_int4(x)
    step = x.abs().max() / 7
    torch.testing.assert_close(found, (x / step).round() * step)
    assert len(found.unique()) <= 15
    noisy = fake_int4(x, torch_generator(0))
    assert float((noisy - x).abs().max()) <= float(step) * 1.0001
    assert torch.equal(quantized(x, -1, Operand("int4"), Noise()), found)


# ----------------------------------------------------------------------------------------------------------- conversion


def sequential():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32), nn.LayerNorm(32), nn.Linear(32, 4))


def test_conversion_keeps_names_positions_and_parameters():
    model = sequential()
    before = dict(model.named_parameters())
    keys = [*model.state_dict()]
    assert convert_linears(model, skip=("4",)) == ("0", "2")
    assert [type(m).__name__ for m in model] == ["NVFP4Linear", "ReLU", "NVFP4Linear", "LayerNorm", "Linear"]
    assert [*model.state_dict()] == keys
    assert all(p is before[name] for name, p in model.named_parameters())
    assert "recipe='nvfp4'" in repr(model[0])
    copy.deepcopy(model)(torch.ones(2, 32))


def test_recipe_none_is_bitwise_the_original():
    model, x = sequential(), normal(6, 32)
    wanted = model(x)
    wanted.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    convert_linears(model, recipe="none")
    assert torch.equal(model(x), wanted)
    model(x).sum().backward()
    for p, g in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-6, atol=1e-6)


def test_a_layer_used_twice_is_converted_once():
    layer = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": layer, "b": layer})
    assert convert_linears(model) == ("a", "b")
    assert model["a"] is model["b"]


def test_the_last_blocks_can_stay():
    model = GPT(TransformerConfig(vocab_size=8, width=32, layers=3, heads=2))
    names = convert_linears(model, skip_last=2)
    assert {name.split(".")[1] for name in names} == {"0"}
    assert type(model.blocks[2].mlp.up) is nn.Linear
    assert type(model.lm_head) is nn.Linear


def test_attention_products_are_quantized_on_request():
    ids = torch.arange(24).view(2, 12) % 8
    exact, same, quantized_ = (GPT(TransformerConfig(vocab_size=8, width=32, layers=1, heads=2)) for _ in range(3))
    convert_linears(same, "none", attention="nvfp4")
    convert_linears(quantized_, "nvfp4", attention="nvfp4")
    outputs = [model(ids, labels=ids) for model in (exact, same, quantized_)]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    assert not torch.equal(outputs[0].logits, outputs[2].logits)
    for output in outputs:
        output.loss.backward()
    torch.testing.assert_close(exact.blocks[0].attention.q.weight.grad, same.blocks[0].attention.q.weight.grad)
    assert quantized_.blocks[0].attention.q.weight.grad.isfinite().all()


def test_recipes_are_hashable_and_print_every_operand():
    one, two = make_recipe("nvfp4"), make_recipe("nvfp4")
    assert hash(one) == hash(two)
    assert one != make_recipe("nvfp4", hadamard=True)
    text = str(make_recipe("nvfp4", tensor_scale="tensor", weight_block="16x16", hadamard=True))
    assert text.count("\n") == 6
    assert "Hadamard" in text
    assert "16x16" in text
    assert str(make_recipe("none")).count("not quantized") == 6
    assert "int4, stochastic" in str(make_recipe("int4"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_recipe("fp8"), "no recipe 'fp8'"),
        (lambda: Operand("fp8"), "no number format"),
        (lambda: Operand(rounding="down"), "rounding="),
        (lambda: make_recipe(tensor_scale=0.0), "positive number"),
        (lambda: make_recipe(grad_scale=-1), "positive number"),
        (lambda: make_recipe(tensor_scale="pow2-delayed"), "for gradients"),
        (lambda: make_recipe(weight_block="4x4"), "block="),
        (lambda: convert_linears(nn.Linear(16, 16)), "one linear layer"),
        (lambda: convert_linears(nn.Sequential(nn.ReLU())), "no nn.Linear"),
        (lambda: convert_linears(sequential(), skip=("head",)), "skip='head'"),
        (lambda: convert_linears(sequential(), skip_last=9), "skip_last=9"),
        (lambda: convert_linears(sequential(), attention="fp8"), "attention='fp8'"),
        (lambda: convert_linears(sequential(), attention="nvfp4"), "of this package"),
        (lambda: NVFP4Linear(16, 16)(torch.ones(2, 16, dtype=torch.int64)), "float32"),
        (lambda: NVFP4Linear(30, 16)(torch.ones(2, 20)), "do not contract"),
    ],
)
def test_what_cannot_be_converted_is_refused(call, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        call()


@pytest.mark.parametrize("recipe", ["nvfp4", "int4", make_recipe(tensor_scale="tensor", grad_scale="tensor")])
def test_no_tokens_give_no_gradient(recipe):
    layer = NVFP4Linear(32, 16, recipe=recipe)
    layer(torch.ones(0, 32)).sum().backward()
    assert not layer.weight.grad.any()


def test_autocast_computes_in_its_dtype():
    layer = NVFP4Linear(32, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.ones(4, 32))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.gpu
def test_values_on_a_gpu_are_those_of_the_cpu():
    x, w = normal(64, 48), normal(32, 48, seed=1)
    recipe = nearest_recipe()
    here, there = (quantized_matmul(x.to(device), w.to(device), recipe, Noise()).cpu() for device in ("cpu", "cuda"))
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)
    layer = NVFP4Linear(48, 32, device="cuda")
    layer(x.cuda()).sum().backward()
    assert layer.weight.grad.isfinite().all()
