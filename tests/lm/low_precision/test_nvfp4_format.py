import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError
from fairtrial.lm.low_precision import RoundingError, quantize_nvfp4
from fairtrial.lm.low_precision.nvfp4 import decode, encode, fake_quantize, pack, unpack
from fairtrial.lm.low_precision.rotation import hadamard_16, rotate
from fairtrial.lm.low_precision.rounding import check_stochastic, round_e2m1, round_e4m3
from fairtrial.seeds import torch_generator

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by code: an even code has an even mantissa
E4M3 = sorted({m * 2.0**-9 for m in range(8)} | {(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)})[
    :-1
]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch_generator(seed, "test"))


def nearest(value, numbers):
    """The nearest of some numbers; of two, the one whose place among them is even."""
    best = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - abs(value)), i % 2))
    return numbers[best] if value >= 0 else -numbers[best]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=40))
@settings(max_examples=25, deadline=None)
def test_numbers_round_to_the_nearest_of_eight_ties_to_even(values):
    found = round_e2m1(torch.tensor(values)).tolist()
    assert found == [nearest(value, E2M1) for value in values]


def test_the_ties_of_the_format():
    wanted = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4, 7: 6, -0.3: -0.5}
    assert round_e2m1(torch.tensor([*wanted])).tolist() == [*wanted.values()]


@given(st.lists(st.floats(0, 600, width=32), min_size=1, max_size=40))
@settings(max_examples=25, deadline=None)
def test_block_scales_round_to_e4m3_or_up_to_it(values):
    assert E4M3[-1] == 448
    assert round_e4m3(torch.tensor(values)).float().tolist() == [nearest(value, E4M3) for value in values]
    up = round_e4m3(torch.tensor(values), up=True).float().tolist()
    assert up == [next((e for e in E4M3 if e >= value), 448) for value in values]


def test_pack_and_unpack_round_trip_all_sixteen_codes():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes)), codes)
    assert pack(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [1 + 16 * 2]
    assert decode(codes).tolist() == [*E2M1, *(-v for v in E2M1)]
    assert torch.equal(encode(decode(codes)), codes)


@pytest.mark.parametrize("block", ["1x16", "16x16"])
@pytest.mark.parametrize("axis", [0, 1])
def test_representable_blocks_are_fixed_points(axis, block):
    first = quantize_nvfp4(normal(32, 48), axis, tensor_scale=2**-4, block=block)
    again = quantize_nvfp4(first.dequantize(), axis, tensor_scale=2**-4, block=block)
    assert torch.equal(first.codes, again.codes)
    assert torch.equal(first.scales.view(torch.uint8), again.scales.view(torch.uint8))
    assert torch.equal(first.dequantize(), again.dequantize())


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("up", "block"), [(False, "1x16"), (True, "1x16"), (False, "16x16")])
@pytest.mark.parametrize("scale", [2**-4, "tensor"])
def test_the_hot_path_gives_what_packing_and_unpacking_gives(axis, up, block, scale):
    x = normal(64, 32)
    packed = quantize_nvfp4(x, axis, tensor_scale=scale, scale_rounding="up" if up else "nearest", block=block)
    fast = fake_quantize(x, axis, packed.tensor_scale, up=up, square=block == "16x16")
    assert torch.equal(packed.dequantize(), fast)


def test_quantization_commutes_with_powers_of_two_under_the_tensor_scale():
    x = normal(8, 64)
    small, large = quantize_nvfp4(x), quantize_nvfp4(x * 2**5)
    assert torch.equal(small.codes, large.codes)
    assert torch.equal(small.dequantize() * 2**5, large.dequantize())


def test_square_blocks_give_a_matrix_and_its_transpose_the_same_values():
    w = normal(32, 48)
    one = fake_quantize(w, -1, 2**-4, square=True)
    assert torch.equal(one, fake_quantize(w.T, -1, 2**-4, square=True).T)
    assert torch.equal(one, fake_quantize(w, 0, 2**-4, square=True))
    assert not torch.equal(fake_quantize(w, -1, 2**-4), fake_quantize(w, 0, 2**-4))


def test_relative_error_of_gaussian_data():
    x = normal(4096, 512)
    noise = torch_generator(1, "noise")

    def error(q):
        return float((q - x).square().sum() / x.square().sum())

    assert error(fake_quantize(x, -1, 2**-4)) == pytest.approx(0.0090, abs=0.0003)
    assert error(fake_quantize(x, -1, 2**-4, generator=noise)) == pytest.approx(0.0188, abs=0.0006)


def test_unit_rows_lose_nothing_by_a_constant_tensor_scale():
    x = torch.nn.functional.normalize(normal(1024, 512), dim=1)

    def error(scale):
        return float((quantize_nvfp4(x, tensor_scale=scale).dequantize() - x).square().sum() / len(x))

    usual = error("tensor")
    assert max(error(2.0**-k) for k in (4, 6, 9)) < 1.005 * usual
    assert error(1.0) > 1.01 * usual


def draws(x, up, count=4000):
    """Standard errors by which the mean of stochastic draws is off, the largest."""
    found = fake_quantize(x.repeat(count, 1), -1, 2**-4, up=up, generator=torch_generator(0, "draws"))
    error = (found.std(0) / count**0.5).clamp_min(1e-6)
    return float(((found.mean(0) - x[0]).abs() / error).max())


def test_stochastic_rounding_is_unbiased_with_scales_rounded_up_and_biased_with_nearest_scales():
    x = torch.linspace(-0.39, 0.39, 16)[None]  # the block scale 0.39 / (6 * 2**-4) = 1.04 becomes 1 or 1.125
    assert draws(x, up=True) < 4
    assert draws(x, up=False) > 100


def test_an_explicit_generator_decides_the_draws_and_no_global_state_is_touched():
    x, state = normal(4, 32), torch.get_rng_state()
    one, two, other = (
        quantize_nvfp4(x, rounding="stochastic", generator=torch_generator(seed)).codes for seed in (0, 0, 1)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


def test_zero_blocks_stay_zero_and_what_is_not_finite_makes_its_block_nan():
    x = normal(3, 32)
    x[0, :16] = 0
    x[1, 3] = torch.nan
    x[2, 20] = -torch.inf
    for back in (quantize_nvfp4(x, tensor_scale=2**-4).dequantize(), fake_quantize(x, -1, 2**-4)):
        assert (back[0, :16] == 0).all()
        assert back[1, :16].isnan().all()
        assert back[2, 16:].isnan().all()
        assert back[[0, 1, 2], 16 * torch.tensor([1, 1, 0])].isfinite().all()
    assert (quantize_nvfp4(torch.zeros(2, 16)).dequantize() == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_and_axis_are_given_back(dtype):
    x = normal(2, 32, 3).to(dtype)
    back = quantize_nvfp4(x, axis=1).dequantize()
    assert (back.dtype, back.shape) == (dtype, x.shape)
    assert float((back - x).square().mean() / x.square().mean()) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [1.0] * 16}, "torch.Tensor"),
        ({"x": torch.ones(2, 16, dtype=torch.int64)}, "convert it to float32"),
        ({"x": torch.tensor(1.0)}, "no axis"),
        ({"x": torch.ones(2, 20)}, "pad it with zeros"),
        ({"x": torch.ones(0, 16), "axis": 0}, "not made of blocks"),
        ({"axis": 2}, "axis=2"),
        ({"tensor_scale": 0}, "positive number"),
        ({"tensor_scale": float("nan")}, "positive number"),
        ({"tensor_scale": "rows"}, "positive number"),
        ({"rounding": "up"}, "rounding='up'"),
        ({"scale_rounding": "down"}, "scale_rounding"),
        ({"block": "8x8"}, "block='8x8'"),
        ({"rounding": "stochastic"}, "torch.Generator"),
        ({"block": "16x16"}, "both of whose sides"),
    ],
)
def test_what_cannot_be_quantized_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        quantize_nvfp4(**{"x": torch.ones(2, 16), **change})


def test_broken_stochastic_rounding_is_a_hard_error():
    check_stochastic(round_e2m1)
    for broken in (
        lambda x, generator: torch.zeros_like(x),
        lambda x, generator: round_e2m1(x),
        lambda x, generator: round_e2m1(x + 0.02, generator),
        lambda x, generator: x,
    ):
        with pytest.raises(RoundingError, match="do not train on it"):
            check_stochastic(broken)


def test_the_hadamard_rotation_is_orthogonal_and_leaves_a_product():
    h = hadamard_16(3)
    torch.testing.assert_close(h @ h.T, torch.eye(16))
    assert set(h.abs().flatten().tolist()) == {0.25}
    a, b = normal(32, 5), normal(32, 7)
    torch.testing.assert_close(rotate(a, 0).T @ rotate(b, 0), a.T @ b)
    with pytest.raises(InputError, match="blocks of 16"):
        rotate(torch.ones(20, 2), 0)


def test_codes_and_scales_are_those_of_torchao():
    tensors = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = normal(64, 128)
    peer = tensors.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tensors.per_tensor_amax_to_scale(x.abs().max()))
    ours = quantize_nvfp4(x)
    assert torch.equal(ours.codes, peer.qdata.view(torch.uint8))
    assert torch.equal(ours.scales.view(torch.uint8).flatten(), peer.scale.view(torch.uint8).flatten())
