import copy

import numpy as np
import pytest
import torch
from torch import nn

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import InputError
from fairtrial.lm.low_precision import (
    NGPT,
    NGPTConfig,
    convert_linears,
    dot_product_snr,
    loss_rise,
    nonfinite_layers,
    quantize_nvfp4,
)
from fairtrial.lm.low_precision.snr import decompose
from fairtrial.seeds import torch_generator


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch_generator(seed, "test"))


def decomposed(x, w):
    return decompose(x, w, *(quantize_nvfp4(v).dequantize() for v in (x, w)))


@pytest.mark.parametrize("d", [128, 512, 2048])
def test_snr_is_elementwise_snr_times_the_coherences(d):
    x, w = normal(256, d), normal(64, d, seed=1)
    found = decomposed(x, w)
    assert found.snr == pytest.approx(found.snr_elem * found.kappa_signal / found.kappa_noise, rel=1e-5)
    assert found.kappa_signal == pytest.approx(1, abs=0.04)
    assert found.kappa_noise == pytest.approx(1, abs=0.04)
    assert found.snr_elem == pytest.approx(55.5, rel=0.03)


def test_every_term_is_that_of_the_products_formed_one_by_one():
    x, w = normal(9, 32) + 0.3, normal(5, 32, seed=1) - 0.2
    qx, qw = (quantize_nvfp4(v).dequantize() for v in (x, w))
    found = decompose(x, w, qx, qw)
    z = (x[:, None] * w[None]).double().numpy()  # (n, m, d)
    n = (qx[:, None] * qw[None]).double().numpy() - z
    signal, noise = (z**2).mean((0, 1)).sum(), (n**2).mean((0, 1)).sum()
    assert found.snr_elem == pytest.approx(signal / noise, rel=1e-5)
    assert found.snr == pytest.approx((z.sum(2) ** 2).mean() / (n.sum(2) ** 2).mean(), rel=1e-4)
    products = np.einsum("abi,abj->ij", z, z) / 45
    rho = (products.sum() - np.trace(products)) / 31 / np.trace(products)
    assert found.rho == pytest.approx(rho, rel=1e-4)
    assert found.kappa_signal == pytest.approx(1 + 31 * rho, rel=1e-4)


@pytest.mark.parametrize(("c", "s"), [(0.2, 1.0), (1.0, 0.5)])
def test_coherence_of_a_constant_with_noise_is_its_closed_form(c, s):
    d = 256
    x = c + s * normal(4000, d)
    w = torch.ones(1, d)
    found = decompose(x, w, x, w)
    assert found.kappa_signal == pytest.approx(1 + (d - 1) * c**2 / (c**2 + s**2), rel=0.03)
    assert found.snr == float("inf")


@pytest.fixture(scope="module")
def model():
    return NGPT(NGPTConfig(vocab_size=64, width=32, layers=2, heads=2))


IDS = torch.arange(96).view(4, 24) * 7 % 64


def test_every_linear_layer_of_any_model_is_read_and_its_outputs_are_left(model):
    wanted = model(IDS).logits
    table = dot_product_snr(model, IDS, tensor_scale=2**-4)
    assert len(table) == 7 * 2
    assert table.layer[0] == "blocks.0.attention.q"
    assert [*table] == ["layer", "snr", "snr_elem", "kappa_signal", "kappa_noise", "rho", "rho_noise", "d"]
    assert torch.equal(model(IDS).logits, wanted)
    assert model.training
    llama, _ = tiny_causal_lm()
    assert len(dot_product_snr(llama, IDS)) == 7 * 2
    mask = torch.ones_like(IDS)
    mask[:, 16:] = 0
    padded = dot_product_snr(llama, {"input_ids": IDS, "attention_mask": mask})
    short = dot_product_snr(llama, IDS[:, :16])
    np.testing.assert_allclose(padded.snr, short.snr, rtol=1e-3)


def test_the_noise_is_that_of_the_layer_once_converted(model):
    table = dot_product_snr(model, IDS, tensor_scale=2**-4).set_index("layer")
    seen = {}
    hook = model.blocks[0].attention.q.register_forward_hook(lambda m, args, y: seen.update(x=args[0], y=y))
    model(IDS)
    hook.remove()
    other = copy.deepcopy(model)
    convert_linears(other)
    with torch.no_grad():
        noisy = other.blocks[0].attention.q(seen["x"])
    seen["y"] = seen["y"].detach()
    snr = float(seen["y"].square().mean() / (noisy - seen["y"]).square().mean())
    assert table.snr["blocks.0.attention.q"] == pytest.approx(snr, rel=1e-3)


def test_shuffling_the_dimensions_destroys_coherence():
    d = 128
    direction = nn.functional.normalize(normal(d), dim=0)
    layer = nn.Sequential(nn.Linear(d, 32, bias=False))
    with torch.no_grad():
        layer[0].weight.copy_(normal(32, d, seed=1) / d**0.5 + normal(32, 1, seed=2) * direction)
    x = normal(500, d, seed=3) / d**0.5 + normal(500, 1, seed=4) * direction
    straight = dot_product_snr(layer, x)
    shuffled = dot_product_snr(layer, x, shuffle_seed=0)
    assert straight.kappa_signal[0] > 10
    assert shuffled.kappa_signal[0] == pytest.approx(1, abs=0.1)
    assert shuffled.snr[0] == pytest.approx(shuffled.snr_elem[0], rel=0.15)


def test_what_is_not_finite_is_reported_by_layer_name(model):
    broken = copy.deepcopy(model).eval()
    with torch.no_grad():
        broken.blocks[1].mlp.up.weight[0, 0] = torch.nan
    assert nonfinite_layers(broken, IDS) == ["blocks.1.mlp.up", "blocks.1.mlp.down", "lm_head"]
    with pytest.raises(InputError, match=r"blocks\.1\.mlp\.up: .* not finite"):
        dot_product_snr(broken, IDS)
    assert nonfinite_layers(model, IDS) == []


def test_weight_noise_raises_the_loss_by_its_size_and_leaves_the_weights(model):
    before = [p.clone() for p in model.parameters()]
    table = loss_rise(model, IDS, sigmas=(0.0, 0.1, 1.0), draws=3)
    assert table["rise"][0] == 0
    assert (table["rise"][1:] != 0).all()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_weight_noise_of_a_quadratic_is_its_closed_form():
    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(256, 8, bias=False)

        def forward(self, ids, labels=None):
            return type("Output", (), {"loss": self.layer.weight.square().sum()})

    model = Quadratic()
    norm = float(model.layer.weight.detach().square().sum())
    table = loss_rise(model, IDS, sigmas=(0.5,), draws=40)
    assert abs(table["rise"][0] - 0.25 * norm) < 5 * table["error"][0]


class _Flat(nn.Module):
    """A layer that is given all tokens in a row, and one that is given none."""

    def __init__(self):
        super().__init__()
        self.all, self.none = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x, attention_mask=None):
        return self.all(x.flatten(0, 1)), self.none(x[:0])


def test_masked_tokens_do_not_count_in_a_row_and_layers_without_tokens_have_no_row():
    x, mask = torch.randn(2, 8, 32, generator=torch_generator(3)), torch.ones(2, 8)
    mask[:, 5:] = 0
    model = _Flat()
    table = dot_product_snr(model, {"x": x, "attention_mask": mask}, tensor_scale=2**-4)
    assert table["layer"].tolist() == ["all"]
    assert table["snr"][0] == pytest.approx(dot_product_snr(model, {"x": x[:, :5]}, tensor_scale=2**-4)["snr"][0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: dot_product_snr(m, [1, 2]), "a tensor or a mapping"),
        (lambda m: dot_product_snr(m, IDS[:0]), "empty"),
        (lambda m: dot_product_snr(nn.ReLU(), torch.ones(2)), "no linear layer"),
        (lambda m: dot_product_snr(m, IDS, tensor_scale=0), "positive number"),
        (lambda m: dot_product_snr(m, IDS, tensor_scale=1e-60), "tensor_scale=1e-60"),
        (lambda m: dot_product_snr(m, IDS, skip=("lm_head", "hed")), "skip='hed': no linear layer is called so"),
        (lambda m: dot_product_snr(m, IDS, tensor_scale="pow2-delayed"), "for gradients"),
        (lambda m: loss_rise(m, IDS, draws=1), "draws=1"),
        (lambda m: loss_rise(m, IDS, sigmas=(float("nan"),)), "sigmas=nan"),
        (lambda m: loss_rise(m, IDS, sigmas=()), "at least one share"),
        (lambda m: loss_rise(m, IDS, sigmas=(-1,)), "at least 0"),
        (lambda m: loss_rise(nn.ReLU(), IDS), "no linear layer"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, call, message):
    with pytest.raises(InputError, match=message):
        call(model)
