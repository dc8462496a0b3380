import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from fairtrial.errors import FairtrialError, InputError
from fairtrial.training.curvature import GaussNewton, flatten, top_eigenpairs, unflatten
from fairtrial.training.edge_of_stability import Sharpness, ntk
from fairtrial.training.edge_of_stability.kernel import kernel_distance
from fairtrial.training.edge_of_stability.trial import scale_invariant
from fairtrial.training.networks import mlp

F64 = torch.float64


def squared(model, batch):
    return 0.5 * (model(batch[0]) - batch[1]).square().sum(1).mean()


def problem(seed=0, sizes=(4, 6, 3), activation=nn.Tanh, bias=True, n=10):
    torch.manual_seed(seed)
    model = mlp(list(sizes), activation=activation, bias=bias, seed=seed).double()
    return model, (torch.randn(n, sizes[0], dtype=F64), torch.randn(n, sizes[-1], dtype=F64))


def exact(model, batches, **options):
    return Sharpness(model, squared, batches, tol=1e-11, max_products=2000, **options)


def test_the_product_of_two_numbers_has_its_known_sharpness():
    """L = (a b - 1)^2 / 2 at a b = 1: S = a^2 + b^2, u = (b, a) / |.|."""
    a, b = nn.Parameter(torch.tensor(2.0, dtype=F64)), nn.Parameter(torch.tensor(0.5, dtype=F64))
    found = Sharpness(
        nn.ParameterList([a, b]), lambda m, x: (0.5 * (m[0] * m[1] * x - 1) ** 2).mean(), [torch.ones(2, dtype=F64)],
        tol=1e-12,
    ).measure()  # fmt: skip
    assert found.value == pytest.approx(4.25, rel=1e-9)
    np.testing.assert_allclose(found.vector.abs(), np.array([0.5, 2.0]) / math.sqrt(4.25), rtol=1e-9)


def test_a_quadratic_loss_has_its_exact_sharpness_and_no_gradient_of_it():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, dtype=F64))
    x = torch.randn(20, 5, dtype=F64)
    probe = Sharpness(nn.ParameterList([w]), lambda m, x: (x @ m[0]).square().mean(), [x], tol=1e-12, max_products=500)
    found = probe.measure(gradient=True)
    assert found.value == pytest.approx(float(torch.linalg.eigvalsh(2 * x.T @ x / 20)[-1]), rel=1e-10)
    assert found.gradient.abs().max() == 0
    assert found.A == 0


@pytest.mark.parametrize("off", [-0.01, 0.01])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_gradient_descent_on_a_quadratic_diverges_just_above_the_edge(off, decay):
    sharpness = 3.0
    eta = 2 / (sharpness + decay) * (1 + off)
    w = nn.Parameter(torch.ones(1, dtype=F64))
    optimizer = torch.optim.SGD([w], lr=eta, weight_decay=decay)
    for _ in range(500):
        optimizer.zero_grad()
        (0.5 * sharpness * w**2).sum().backward()
        optimizer.step()
    assert (abs(w.item()) > 1) == (off > 0)


def test_the_gradient_of_the_sharpness_equals_central_differences():
    model, batch = problem(1)
    found = exact(model, [batch]).measure(gradient=True)
    theta = flatten([p.detach() for p in model.parameters()])
    assert not found.degenerate

    def at(vector):
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for p, value in zip(moved.parameters(), unflatten(vector, list(moved.parameters())), strict=True):
                p.copy_(value)
        return exact(moved, [batch]).measure().value

    for i in torch.randperm(len(theta))[:5]:
        step = torch.zeros_like(theta)
        step[i] = 1e-4
        difference = (at(theta + step) - at(theta - step)) / 2e-4
        assert float(found.gradient[i]) == pytest.approx(difference, rel=1e-4, abs=1e-6)
    assert pytest.approx(float(theta @ found.gradient)) == found.A
    assert found.cos == pytest.approx(found.A / float(theta.norm() * found.gradient.norm()))
    assert found.layers["share_of_A"].sum() == pytest.approx(1)
    assert found.layers["kappa"].sum() == pytest.approx(found.kappa)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_bias_free_relu_network_is_homogeneous(depth):
    """theta . grad S_GN = 2 (depth - 1) S_GN by Euler, as f(c theta) = c^depth f(theta)."""
    model, batch = problem(2, (4, *[5] * (depth - 1), 2), nn.ReLU, bias=False)

    def gauss_newton(scale):
        scaled = copy.deepcopy(model)
        with torch.no_grad():
            for p in scaled.parameters():
                p.mul_(scale)
        matrix = GaussNewton(
            lambda b: scaled(b[0]), lambda z, b: 0.5 * (z - b[1]).square().sum(1).mean(), scaled.parameters(), [batch]
        )
        return top_eigenpairs(matrix.product, matrix.size, tol=1e-12, max_products=2000, dtype=F64).values[0]

    along = (gauss_newton(1 + 1e-5) - gauss_newton(1 - 1e-5)) / 2e-5
    assert along == pytest.approx(2 * (depth - 1) * gauss_newton(1.0), rel=1e-6)


def test_a_scale_invariant_network_loses_sharpness_as_its_weights_grow():
    _, batch = problem(3, (4, 6, 6, 3))
    model = scale_invariant([4, 6, 3], nn.Tanh, seed=1).double()
    assert exact(model, [batch]).measure(gradient=True).kappa == pytest.approx(-2, abs=1e-6)


def test_parts_of_the_probe_change_nothing():
    model, (x, y) = problem(4)
    whole = exact(model, [(x, y)]).measure(gradient=True)
    parted = exact(model, [(x[:3], y[:3]), (x[3:], y[3:])]).measure(gradient=True)
    assert parted.value == pytest.approx(whole.value, rel=1e-9)
    assert pytest.approx(whole.A, rel=1e-6) == parted.A
    assert parted.loss == pytest.approx(whole.loss)


def test_permuted_hidden_units_change_nothing():
    model, batch = problem(5)
    found = exact(model, [batch]).measure(gradient=True)
    order = torch.randperm(6)
    with torch.no_grad():
        model[1].weight.copy_(model[1].weight[order])
        model[1].bias.copy_(model[1].bias[order])
        model[3].weight.copy_(model[3].weight[:, order])
    again = exact(model, [batch]).measure(gradient=True)
    for name in ("value", "kappa", "cos"):
        assert getattr(again, name) == pytest.approx(getattr(found, name), rel=1e-6)


def test_a_scaled_loss_scales_the_sharpness():
    model, batch = problem(6)
    once = exact(model, [batch]).measure().value
    thrice = Sharpness(model, lambda m, b: 3 * squared(m, b), [batch], tol=1e-11, max_products=2000).measure().value
    assert thrice == pytest.approx(3 * once, rel=1e-8)


def test_a_subset_of_parameters_has_its_own_block():
    model, batch = problem(7)
    last = list(model[3].parameters())
    probe = exact(model, [batch], params=last)
    hidden = torch.cat([model[2](model[1](batch[0])), torch.ones(10, 1, dtype=F64)], 1).detach()
    assert probe.measure().value == pytest.approx(float(torch.linalg.eigvalsh(hidden.T @ hidden / 10)[-1]), rel=1e-8)
    assert probe.names == ["3.weight", "3.bias"]


def test_a_twofold_top_eigenvalue_is_flagged_and_its_cluster_averaged():
    w = nn.Parameter(torch.tensor([0.3, -0.2, 0.1], dtype=F64))
    scale = torch.tensor([2.0, 2.0, 1.0], dtype=F64)
    probe = Sharpness(
        nn.ParameterList([w]), lambda m, x: (x * (scale * m[0].square() / 2).sum()).mean(), [torch.ones(2, dtype=F64)]
    )
    found = probe.measure(gradient=True)
    assert found.degenerate
    assert found.value == pytest.approx(2)


def test_the_spectrum_holds_the_sharpness():
    model, batch = problem(8)
    probe = exact(model, [batch])
    nodes, weights = probe.spectrum_density(draws=3, steps=200)
    assert nodes.max() == pytest.approx(probe.measure().value, rel=1e-6)
    assert weights.sum() == pytest.approx(1)
    v = torch.randn(probe.hessian.size, dtype=F64)
    np.testing.assert_allclose(probe.hvp(v), probe.hessian.product(v[None])[0])


def test_preconditioning_gives_the_largest_eigenvalue_of_the_scaled_hessian():
    model, batch = problem(9)
    probe = exact(model, [batch])
    d = torch.rand(probe.hessian.size, dtype=F64) + 0.5
    dense = probe.hessian.product(torch.eye(len(d), dtype=F64))
    scaled = d.rsqrt()[:, None] * dense * d.rsqrt()
    assert probe.measure(precondition=d).value == pytest.approx(float(torch.linalg.eigvalsh(scaled)[-1]), rel=1e-8)
    with pytest.raises(InputError, match="preconditioned"):
        probe.measure(gradient=True, precondition=d)


def test_a_measurement_leaves_no_trace():
    model, (x, y) = problem(10)
    model = nn.Sequential(model, nn.BatchNorm1d(3).double().eval()).train()
    model[1].eval()
    squared(model, (x, y)).backward()
    torch.manual_seed(3)
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    Sharpness(model, squared, [(x, y)]).measure(gradient=True)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), model.state_dict().values(), strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(before[1], model.parameters(), strict=True))
    assert torch.equal(before[2], torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]


# ----------------------------------------------------------------------------------------------------------- bad input


def test_active_dropout_is_refused_or_frozen():
    model, batch = problem(11)
    model = nn.Sequential(model, nn.Dropout(0.5)).train()
    with pytest.raises(InputError, match=r"1: dropout is active"):
        Sharpness(model, squared, [batch])
    probe = Sharpness(model, squared, [batch], freeze_rng=True)
    state = torch.get_rng_state()
    first = probe.measure()
    assert probe.measure().value == pytest.approx(first.value, rel=1e-3)
    assert torch.equal(state, torch.get_rng_state())


def test_batch_norm_in_training_mode_is_refused():
    model, batch = problem(12)
    with pytest.raises(InputError, match="BatchNorm"):
        Sharpness(nn.Sequential(model, nn.BatchNorm1d(3).double()), squared, [batch])


def test_a_sum_of_losses_is_warned_about():
    model, batch = problem(13)
    with pytest.warns(UserWarning, match="no mean over examples"):
        Sharpness(model, lambda m, b: (m(b[0]) - b[1]).square().sum(), [batch])


def test_a_missing_second_derivative_says_which_switch():
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("derivative for aten::_flash_attention_backward is not implemented")

    model, batch = problem(14)
    with pytest.raises(InputError, match="eager"):
        Sharpness(model, lambda m, b: Fused.apply(m(b[0])).mean(), [batch]).measure()


def test_parameters_that_are_not_the_losss_are_refused():
    model, batch = problem(17)
    other, _ = problem(18)
    probe = Sharpness(model, squared, [batch], params=list(other.parameters()))
    for measure in (probe.measure, lambda: probe.top_eigenpairs(2), lambda: probe.hvp(torch.ones(probe.hessian.size))):
        with pytest.raises(InputError, match="depends on none of the parameters"):
            measure()
    both = Sharpness(model, squared, [batch], params=[*model.parameters(), other[1].bias])  # one more does no harm
    assert both.measure().value == pytest.approx(Sharpness(model, squared, [batch]).measure().value, rel=1e-2)
    with pytest.raises(InputError, match="depends on none"):
        Sharpness(model, lambda m, b: squared(m, b).detach(), [batch]).measure()
    matrix = GaussNewton(lambda b: model(b[0]), lambda z, b: z.square().mean(), list(other.parameters()), [batch])
    with pytest.raises(InputError, match="depends on none"):
        matrix.product(torch.ones(1, matrix.size, dtype=F64))


def test_what_cannot_be_measured_is_refused():
    model, batch = problem(19)
    with pytest.raises(InputError, match="the loss is float"):
        Sharpness(model, lambda m, b: 1.0, [batch]).measure()
    with pytest.raises(InputError, match="of shape"):
        Sharpness(model, lambda m, b: m(b[0]), [batch])
    for batches, word in (
        ([{"x": batch[0]}], "give tensors"),
        ([(batch[0][:0], batch[1][:0])], "no examples"),
        ([], "no batches"),
    ):
        with pytest.raises(InputError, match=word):
            Sharpness(model, squared, batches)
    with pytest.raises(InputError, match="curvature needs float32"):
        Sharpness(copy.deepcopy(model).bfloat16(), squared, [batch])
    for options in ({"tol": math.nan}, {"max_products": 0}):
        with pytest.raises(InputError, match="at least 0 and 1"):
            Sharpness(model, squared, [batch], **options).measure()
    with pytest.raises(InputError, match="no probe examples"):
        ntk(model, batch[0][:0])
    probe = Sharpness(model, squared, [batch])
    with pytest.raises(InputError, match="draws=0"):
        probe.spectrum_density(draws=0)
    with pytest.raises(InputError, match="the vector has shape"):
        probe.hvp(torch.ones(3))
    for scale in (torch.ones(3, dtype=F64), -torch.ones(probe.hessian.size, dtype=F64)):
        with pytest.raises(InputError, match="positive numbers are needed"):
            probe.measure(precondition=scale)
    steep = Sharpness(model, lambda m, b: (m(b[0]) * 0).sqrt().mean(), [batch])  # finite, with slopes that are not
    with pytest.raises(FairtrialError, match="not finite"):
        steep.measure()


def test_a_loss_that_is_no_number_ends_the_measurement():
    model, (x, y) = problem(15)
    with pytest.raises(FairtrialError, match="nan"):
        Sharpness(model, squared, [(x * math.nan, y)]).measure()


# -------------------------------------------------------------------------------------------------------------- kernel


def test_the_kernel_is_exact_where_small_and_projected_where_asked():
    model, (x, _) = problem(16)
    full = ntk(model, x)
    assert full.shape == (30, 30)
    projected = ntk(model, x, exact=False, seed=1)
    from fairtrial.training.edge_of_stability.kernel import direction

    d = direction(3, 1).double()
    np.testing.assert_allclose(projected, torch.einsum("icjk,c,k->ij", full.reshape(10, 3, 10, 3), d, d), rtol=1e-6)
    assert kernel_distance(full, 2 * full) == pytest.approx(0, abs=1e-12)
    assert ntk(model, x.repeat(70, 1)).shape == (700, 700)
