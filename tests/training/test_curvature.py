import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairtrial.errors import InputError
from fairtrial.training.curvature import (
    GaussNewton,
    Hessian,
    flatten,
    spectral_density,
    tangent_kernel,
    top_eigenpairs,
    unflatten,
)

F64 = torch.float64


def problem(seed: int, batches: int = 1, outputs: int = 3):
    """A small tanh network on random data, and its loss as a function of the flat parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    x, y = torch.randn(12, 4, dtype=F64), torch.randint(outputs, (12,))
    data = list(zip(x.split([12] if batches == 1 else [5, 7]), y.split([12] if batches == 1 else [5, 7]), strict=True))
    parameters = list(model.parameters())

    def flat_outputs(vector):
        named = dict(zip(dict(model.named_parameters()), unflatten(vector, parameters), strict=True))
        return torch.func.functional_call(model, named, (x,))

    def flat_loss(vector):
        return nn.functional.cross_entropy(flat_outputs(vector), y)

    hessian = Hessian(lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), parameters, data)
    newton = GaussNewton(
        lambda batch: model(batch[0]), lambda z, batch: nn.functional.cross_entropy(z, batch[1]), parameters, data
    )
    return model, hessian, newton, flatten(parameters).detach(), flat_loss, flat_outputs, (x, y)


def dense_hessian(flat_loss, theta):
    return torch.autograd.functional.hessian(flat_loss, theta)


@pytest.mark.parametrize("batches", [1, 2])
def test_products_equal_the_dense_hessian_whole_or_in_parts(batches):
    _, hessian, _, theta, flat_loss, _, _ = problem(0, batches)
    v = torch.randn(3, hessian.size, dtype=F64)
    dense = dense_hessian(flat_loss, theta)
    torch.testing.assert_close(hessian.product(v), v @ dense, rtol=1e-10, atol=1e-12)
    with hessian.held() as product:
        torch.testing.assert_close(product(v), v @ dense, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(product(v), v @ dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batches", [1, 2])
def test_products_equal_the_dense_gauss_newton_matrix(batches):
    _, _, newton, theta, _, flat_outputs, _ = problem(1, batches)
    jacobian = torch.autograd.functional.jacobian(flat_outputs, theta)  # (n, C, P)
    p = flat_outputs(theta).softmax(1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    dense = torch.einsum("ncp,nck,nkq->pq", jacobian, curvature, jacobian) / len(p)
    v = torch.randn(2, newton.size, dtype=F64)
    torch.testing.assert_close(newton.product(v), v @ dense, rtol=1e-10, atol=1e-12)
    with newton.held() as product:
        torch.testing.assert_close(product(v), v @ dense, rtol=1e-10, atol=1e-12)


def test_value_and_gradient_are_those_of_the_mean_loss():
    _, hessian, _, theta, flat_loss, _, _ = problem(2, batches=2)
    value, gradient = hessian.value_and_gradient()
    assert value == pytest.approx(float(flat_loss(theta)), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.functional.jacobian(flat_loss, theta))


def test_the_gradient_of_a_quadratic_form_equals_central_differences():
    _, hessian, _, theta, flat_loss, _, _ = problem(3, batches=2)
    u = torch.randn(hessian.size, dtype=F64)
    value, gradient = hessian.form_and_gradient(u)
    assert value == pytest.approx(float(u @ dense_hessian(flat_loss, theta) @ u), rel=1e-10)
    for i in torch.randperm(len(theta))[:6]:
        step = torch.zeros_like(theta)
        step[i] = 1e-5
        ahead, behind = (u @ dense_hessian(flat_loss, theta + sign * step) @ u for sign in (1, -1))
        assert float(gradient[i]) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-4, abs=1e-7)


def test_a_quadratic_loss_has_no_gradient_of_its_curvature_and_a_linear_one_no_curvature():
    w = torch.randn(3, dtype=F64, requires_grad=True)
    x = torch.randn(5, 3, dtype=F64)
    u = torch.randn(3, dtype=F64)
    value, gradient = Hessian(lambda b: (b @ w).square().mean(), [w], [x]).form_and_gradient(u)
    assert value == pytest.approx(float(2 * (x @ u).square().mean()), rel=1e-12)
    assert not gradient.any()
    linear = Hessian(lambda b: (b @ w).mean(), [w], [x])
    assert linear.form_and_gradient(u)[0] == 0
    assert not linear.product(u[None]).any()


# --------------------------------------------------------------------------------------------------------- eigenvalues


def matrix(values, seed=0):
    torch.manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=F64))
    return q @ torch.diag(torch.as_tensor(values, dtype=F64)) @ q.T


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(5, 40), st.integers(0, 10**6))
def test_lanczos_equals_the_dense_eigenvalues(k, size, seed):
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=F64)
    a = matrix(values, seed)
    found = top_eigenpairs(lambda v: v @ a, size, k, tol=1e-9, max_products=4000, dtype=F64)
    assert found.converged
    np.testing.assert_allclose(found.values, values.sort(descending=True).values[:k], atol=1e-8)
    residual = (found.vectors @ a - torch.as_tensor(found.values)[:, None] * found.vectors).norm(dim=1)
    np.testing.assert_allclose(residual, found.residuals, atol=1e-9)
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(k, dtype=F64), atol=1e-9, rtol=0)


def test_a_dominant_negative_eigenvalue_is_not_the_top():
    a = matrix([-50.0, *np.linspace(-1, 1, 60), 2.0])
    assert top_eigenpairs(lambda v: v @ a, 62, tol=1e-10, max_products=500, dtype=F64).values == pytest.approx([2.0])


def test_a_twofold_top_eigenvalue_is_found_twice():
    a = matrix([*np.linspace(-1, 1, 200), 3.0, 3.0])
    found = top_eigenpairs(lambda v: v @ a, 202, 2, tol=1e-9, max_products=500, dtype=F64)
    np.testing.assert_allclose(found.values, [3.0, 3.0], atol=1e-8)


def test_an_eigenvalue_lies_within_the_residual_even_when_unconverged():
    values = np.linspace(0, 1, 300)
    a = matrix(values)
    for products in (2, 5, 9, 30):
        found = top_eigenpairs(lambda v: v @ a, 300, tol=1e-12, max_products=products, dtype=F64)
        assert found.products == products
        assert not found.converged
        assert np.abs(values - found.values[0]).min() <= found.residuals[0] + 1e-12


def test_a_restart_keeps_what_was_found():
    a = matrix([*np.linspace(0, 1, 400), 1.02])
    short = top_eigenpairs(lambda v: v @ a, 401, basis=6, tol=1e-8, max_products=3000, dtype=F64)
    assert short.converged
    assert short.values == pytest.approx([1.02], abs=1e-8)


def test_a_warm_start_saves_products():
    a = matrix([*np.linspace(-1, 1, 300), 1.5])
    cold = top_eigenpairs(lambda v: v @ a, 301, tol=1e-6, max_products=200, dtype=F64)
    warm = top_eigenpairs(lambda v: v @ a, 301, tol=1e-6, max_products=200, start=cold.vectors, dtype=F64)
    assert warm.products < cold.products


@pytest.mark.parametrize("a", [torch.zeros(4, 4), torch.eye(4)])
def test_zero_and_identity_end_at_once(a):
    found = top_eigenpairs(lambda v: v @ a, 4, 2)
    np.testing.assert_allclose(found.values, a.diagonal()[:2], atol=1e-6)


def test_more_pairs_than_parameters_are_refused():
    with pytest.raises(InputError, match="k=4"):
        top_eigenpairs(lambda v: v, 3, 4)


def test_the_spectrum_of_a_network_has_its_moments():
    _, hessian, _, theta, flat_loss, _, _ = problem(5)
    dense = dense_hessian(flat_loss, theta)
    nodes, weights = spectral_density(hessian.product, hessian.size, draws=300, steps=8, dtype=F64)
    assert weights.sum() == pytest.approx(1)
    scatter = float(dense.square().sum() * 2 / hessian.size**2 / 300) ** 0.5
    assert abs((weights * nodes).sum() - float(dense.trace()) / hessian.size) < 4 * scatter
    low, *_, high = torch.linalg.eigvalsh(dense).tolist()
    assert low - 1e-9 <= nodes.min() <= nodes.max() <= high + 1e-9


def test_an_invariant_subspace_ends_the_quadrature_early():
    a = matrix([1.0] * 10 + [4.0] * 5)
    nodes, weights = spectral_density(lambda v: v @ a, 15, draws=2, steps=10, dtype=F64)
    assert set(nodes.round(6)) == {1.0, 4.0}
    assert weights.sum() == pytest.approx(1)


# ---------------------------------------------------------------------------------------------- neural tangent kernel


@pytest.mark.parametrize("max_entries", [1, 1e9])
def test_the_tangent_kernel_is_that_of_the_jacobian_in_groups_or_whole(max_entries):
    model, _, _, theta, _, flat_outputs, (x, _) = problem(6)
    jacobian = torch.autograd.functional.jacobian(flat_outputs, theta)
    kernel = tangent_kernel(model, x, max_entries=max_entries)
    torch.testing.assert_close(kernel, torch.einsum("icp,jkp->icjk", jacobian, jacobian))
    direction = torch.randn(3, dtype=F64)
    projected = tangent_kernel(model, x, projection=direction, max_entries=max_entries)
    torch.testing.assert_close(projected, torch.einsum("icjk,c,k->ij", kernel, direction, direction))


def test_the_kernel_has_the_gauss_newton_matrixs_top_eigenvalue_for_squared_loss():
    model, _, _, _, _, _, (x, _) = problem(7)
    newton = GaussNewton(lambda b: model(b), lambda z, b: 0.5 * z.square().sum(1).mean(), model.parameters(), [x])
    top = top_eigenpairs(newton.product, newton.size, tol=1e-10, max_products=200, dtype=F64).values[0]
    kernel = tangent_kernel(model, x).reshape(36, 36)
    assert top == pytest.approx(float(torch.linalg.eigvalsh(kernel)[-1]) / len(x), rel=1e-8)


def test_a_frozen_parameter_has_no_share():
    model, *_, (x, _) = problem(8)
    whole = tangent_kernel(model, x)
    model[0].requires_grad_(False)
    hidden = torch.cat([model[1](model[0](x)), torch.ones(12, 1, dtype=F64)], 1)
    expected = torch.einsum("if,jf,ck->icjk", hidden, hidden, torch.eye(3, dtype=F64))
    torch.testing.assert_close(tangent_kernel(model, x), expected)
    assert not torch.allclose(whole, expected)


def test_what_cannot_be_measured_is_refused():
    model, *_, (x, _) = problem(9)
    with pytest.raises(InputError, match="mean loss"):
        Hessian(lambda b: model(b).sum(1), model.parameters(), [x]).value_and_gradient()
    with pytest.raises(InputError, match="no batches"):
        Hessian(lambda b: model(b).sum(), model.parameters(), [])
    with pytest.raises(InputError, match=r"\(12, 1, 3\)"):
        tangent_kernel(nn.Sequential(model, nn.Unflatten(1, (1, 3))), x)
    model.requires_grad_(False)
    for refused in (
        lambda: Hessian(lambda b: model(b).sum(), model.parameters(), [x]),
        lambda: tangent_kernel(model, x),
    ):
        with pytest.raises(InputError, match=r"gradient|trainable"):
            refused()
