"""The step against dense matrices: the Gauss-Newton one, per-sample gradients, and closed forms."""

import itertools
import math

import pytest
import torch
from torch import nn

from fairtrial.training.curvature import GaussNewton, flatten, unflatten
from fairtrial.training.gauss_newton import MarginMap, curvature_gap
from fairtrial.training.gauss_newton.linearised import LinearHead, Linearised, captured, explicit_rows
from fairtrial.training.gauss_newton.margins import margins
from fairtrial.training.gauss_newton.optimizer import FastGaussNewton
from fairtrial.training.gauss_newton.solving import (
    ExplicitRows,
    HeadRows,
    ProductRows,
    conjugate_gradients,
    row_space_direction,
)
from fairtrial.training.networks import mlp, seeded

F64 = torch.float64


class Problem:
    """A small network on random data with everything dense."""

    def __init__(self, classes=4, examples=7, seed=0, sizes=(5, 6), shift=None):
        self.model = mlp([*sizes, classes], seed=seed).double()
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(examples, sizes[0], generator=draw, dtype=F64)
        self.y = torch.randint(classes, (examples,), generator=draw)
        self.shift = torch.zeros(classes, dtype=F64) if shift is None else shift
        self.parameters = list(self.model.parameters())
        self.batch = Linearised([self.closure], self.parameters)
        self.found = margins(self.batch.logits, self.batch.labels)
        self.scaled = self.found.slope * (self.found.weight / examples).sqrt()[:, None]
        self.gradient = self.batch.pull(self.found.slope * (self.found.residual / examples)[:, None])
        self.rho = torch.exp(-self.found.margin / 2) / math.sqrt(examples)
        names = [name for name, _ in self.model.named_parameters()]

        def outputs(flat):
            named = dict(zip(names, unflatten(flat, self.parameters), strict=True))
            return torch.func.functional_call(self.model, named, (self.x,)) + self.shift

        self.jacobian = torch.func.jacrev(outputs)(flatten(self.parameters).detach())  # (B, K, P)
        self.w = torch.einsum("bk,bkp->bp", self.scaled, self.jacobian)
        p = self.batch.logits.softmax(1)
        h = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        self.ggn = torch.einsum("bkp,bkl,blq->pq", self.jacobian, h, self.jacobian) / examples
        self.fgn = self.w.T @ self.w

    def closure(self):
        return self.model(self.x) + self.shift, self.y

    def dense_step(self, matrix, damping):
        return torch.linalg.solve(matrix + damping * torch.eye(len(matrix), dtype=F64), -flatten(self.gradient))

    def step(self, damping, **how):
        how = {"tol": 1e-13, "max_iter": 200, **how}
        return flatten(row_space_direction(ProductRows(self.batch, self.scaled), self.gradient, damping, **how).vector)


def close(a, b, tol):
    assert float((a - b).norm()) <= tol * float(b.norm())


@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_for_two_classes_the_step_is_the_gauss_newton_step(damping):
    problem = Problem(classes=2)
    close(problem.step(damping, rho=problem.rho), problem.dense_step(problem.ggn, damping), 1e-8)


@pytest.mark.parametrize("classes", [3, 10])
def test_what_is_dropped_is_semidefinite(classes):
    problem = Problem(classes=classes)
    assert torch.linalg.eigvalsh(problem.ggn - problem.fgn).min() > -1e-12


def test_the_dense_full_matrix_is_that_of_the_shared_curvature_products():
    problem = Problem()
    newton = GaussNewton(
        lambda b: problem.model(b[0]), lambda z, b: nn.functional.cross_entropy(z, b[1]),
        problem.parameters, [(problem.x, problem.y)],
    )  # fmt: skip
    v = torch.randn(2, newton.size, dtype=F64)
    torch.testing.assert_close(newton.product(v), v @ problem.ggn, rtol=1e-10, atol=1e-12)


def test_the_matrix_is_the_mean_of_per_sample_gradients_weighed_by_the_odds():
    problem = Problem()
    p = problem.batch.logits.softmax(1)
    residual = p - nn.functional.one_hot(problem.y, p.shape[1])
    gradients = torch.einsum("bk,bkp->bp", residual, problem.jacobian)  # per-sample gradients of the loss
    p_y = p.gather(1, problem.y[:, None])[:, 0]
    odds = p_y / (1 - p_y)
    weighed = torch.einsum("b,bp,bq->pq", odds, gradients, gradients) / len(p)
    torch.testing.assert_close(problem.fgn, weighed, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
def test_row_space_woodbury_and_dense_solves_agree(damping):
    problem = Problem()
    dense = problem.dense_step(problem.fgn, damping)
    explicit = ExplicitRows([w.view(-1, *p.shape) for w, p in
                             zip(problem.w.split([p.numel() for p in problem.parameters], 1), problem.parameters,
                                 strict=True)])  # fmt: skip
    for rows, rho in itertools.product((ProductRows(problem.batch, problem.scaled), explicit), (problem.rho, None)):
        found = row_space_direction(rows, problem.gradient, damping, rho=rho, tol=1e-13, max_iter=200)
        d = flatten(found.vector)
        close(d, dense, 1e-6)
        assert found.curvature == pytest.approx(float(d @ problem.fgn @ d), rel=1e-6)


def test_woodbury_solves_for_right_hand_sides_outside_the_row_space():
    problem = Problem()
    h = torch.randn(problem.w.shape[1], dtype=F64)
    right = unflatten(h, problem.parameters)
    found = row_space_direction(ProductRows(problem.batch, problem.scaled), right, 0.1, tol=1e-13, max_iter=99)
    close(flatten(found.vector), torch.linalg.solve(problem.fgn + 0.1 * torch.eye(len(h), dtype=F64), -h), 1e-6)


@pytest.mark.parametrize("products", ["double-backward", "forward"])
@pytest.mark.parametrize("recompute", [False, True])
def test_products_are_adjoint_and_those_of_the_dense_jacobian(products, recompute):
    problem = Problem()
    batch = Linearised(
        [problem.closure], problem.parameters, products=products, model=problem.model, recompute=recompute
    )
    v, c = torch.randn(problem.w.shape[1], dtype=F64), torch.randn(batch.logits.shape, dtype=F64)
    pushed, pulled = batch.push(unflatten(v, problem.parameters)), flatten(batch.pull(c))
    torch.testing.assert_close(pushed, problem.jacobian @ v, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close((pushed * c).sum(), v @ pulled, rtol=1e-10, atol=1e-12)
    rows = ProductRows(batch, problem.scaled)
    u = torch.randn(len(problem.x), dtype=F64)
    torch.testing.assert_close(rows.apply(unflatten(v, problem.parameters)) @ u, v @ flatten(rows.adjoint(u)))


def test_at_infinite_damping_the_step_is_the_gradient_over_lambda():
    problem = Problem()
    damping = 1e4 * float(torch.linalg.matrix_norm(problem.w, 2)) ** 2
    close(damping * problem.step(damping, rho=problem.rho), -flatten(problem.gradient), 1e-3)


def test_the_order_of_examples_and_a_constant_added_to_all_logits_do_not_matter():
    problem = Problem()
    d = problem.step(0.1, rho=problem.rho)
    other = Problem(shift=torch.full((4,), 3.0, dtype=F64))
    close(other.step(0.1, rho=other.rho), d, 1e-9)
    order = torch.randperm(len(problem.x))
    other = Problem()
    other.x, other.y = problem.x[order], problem.y[order]
    batch = Linearised([other.closure], other.parameters)
    found = row_space_direction(
        ProductRows(batch, problem.scaled[order]), problem.gradient, 0.1, tol=1e-13, max_iter=99
    )
    close(flatten(found.vector), d, 1e-9)


def test_the_order_of_classes_does_not_matter():
    problem, other = Problem(), Problem()
    order = torch.randperm(4)
    with torch.no_grad():
        other.model[-1].weight.copy_(problem.model[-1].weight[order])
        other.model[-1].bias.copy_(problem.model[-1].bias[order])
    labels = torch.argsort(order)[problem.y]
    steps = []
    for p, y in ((problem, problem.y), (other, labels)):
        before = [q.clone() for q in p.parameters]
        FastGaussNewton(p.parameters, cg_tol=1e-12, cg_max_iter=99).step(lambda p=p, y=y: (p.model(p.x), y))
        steps.append([(q - b).detach() for q, b in zip(p.parameters, before, strict=True)])
    torch.testing.assert_close(steps[1][0], steps[0][0])
    torch.testing.assert_close(steps[1][-2], steps[0][-2][order])


@pytest.mark.parametrize("bias", [True, False])
def test_the_gram_matrix_of_a_head_is_that_of_explicit_rows(bias):
    model = seeded(0, lambda: nn.Linear(5, 6, bias=bias)).double()
    x, y = torch.randn(9, 5, dtype=F64), torch.randint(6, (9,))
    parameters = list(model.parameters())
    head = LinearHead([lambda: (model(x), y)], parameters, model=model)
    plain = Linearised([lambda: (model(x), y)], parameters)
    found = margins(head.logits, y)
    scaled = found.slope * (found.weight / 9).sqrt()[:, None]
    rows = HeadRows(head, scaled, head.kernel())
    each = [flatten(ProductRows(plain, scaled).adjoint(e)) for e in torch.eye(9, dtype=F64)]
    torch.testing.assert_close(rows.gram(), torch.stack(each) @ torch.stack(each).T, rtol=1e-10, atol=1e-13)
    v = [torch.randn_like(p) for p in parameters]
    torch.testing.assert_close(head.push(v), plain.push(v))
    for a, b in zip(head.pull(scaled), plain.pull(scaled), strict=True):
        torch.testing.assert_close(a, b)


def test_explicit_rows_are_the_gradients_of_each_example_also_of_sequences():
    embedding = seeded(0, lambda: nn.Sequential(nn.Embedding(11, 4), nn.Tanh(), nn.Linear(4, 5))).double()
    ids, labels = torch.randint(11, (3, 6)), torch.randint(5, (3, 6))
    parameters = list(embedding.parameters())
    with captured(embedding, 1) as calls:
        batch = Linearised([lambda: (embedding(ids), labels)], parameters, model=embedding)
    batch.calls = calls
    slope = margins(batch.logits, batch.labels).slope
    assert batch.logits.shape == (18, 5)
    rows = explicit_rows(batch, slope)
    v = [torch.randn_like(p) for p in parameters]
    torch.testing.assert_close(ExplicitRows(rows).apply(v), ProductRows(batch, slope).apply(v))


@pytest.mark.parametrize("seed", range(5))
def test_the_gap_bound_holds(seed):
    problem, damping = Problem(seed=seed), 0.05
    d_f, d_g = problem.step(damping, rho=problem.rho), problem.dense_step(problem.ggn, damping)
    top = torch.linalg.eigvalsh(problem.ggn - problem.fgn).max()
    assert (d_f - d_g).norm() <= top / damping * d_g.norm() * (1 + 1e-9)
    g = flatten(problem.gradient)
    assert -g @ d_f >= -g @ d_g * (1 - 1e-9)


@pytest.mark.parametrize("margin", [-60.0, 60.0])
def test_extreme_margins_give_a_finite_step_in_float32(margin):
    model = nn.Linear(3, 4, bias=False)
    x, y = torch.eye(3), torch.tensor([0, 1, 2])
    shift = torch.zeros(3, 4)
    shift[0, 0] = margin
    optimizer = FastGaussNewton(model.parameters())
    optimizer.step(lambda: (model(x) + shift, y))
    assert optimizer.last.accepted
    assert math.isfinite(optimizer.last.new_loss)
    assert bool(torch.isfinite(model.weight).all())


def test_a_batch_of_one_example_has_the_closed_form():
    problem = Problem(examples=1)
    a, s = problem.jacobian[0].T @ problem.found.slope[0], problem.found.weight[0]
    d = -problem.found.residual[0] * a / (0.3 + s * a @ a)
    close(problem.step(0.3, rho=problem.rho), d, 1e-10)


def test_with_one_class_in_the_batch_the_step_is_a_descent_direction_towards_the_gradient_limit():
    problem = Problem()
    problem.y = torch.zeros_like(problem.y)
    batch = Linearised([problem.closure], problem.parameters)
    found = margins(batch.logits, batch.labels)
    scaled = found.slope * (found.weight / 7).sqrt()[:, None]
    gradient = batch.pull(found.slope * (found.residual / 7)[:, None])
    for damping, tolerance in ((1e-2, None), (1e6, 1e-4)):
        d = flatten(row_space_direction(ProductRows(batch, scaled), gradient, damping, tol=1e-12, max_iter=99).vector)
        assert d @ flatten(gradient) < 0
        if tolerance:
            close(damping * d, -flatten(gradient), tolerance)


# ------------------------------------------------------------------------------------------------- conjugate gradients


def test_conjugate_gradients_solve_in_as_many_iterations_as_there_are_unknowns_and_report_the_residual():
    a = torch.randn(8, 8, dtype=F64)
    a = a @ a.T + torch.eye(8, dtype=F64)
    b = torch.randn(8, dtype=F64)
    found = conjugate_gradients(lambda v: a @ v, b, tol=1e-9, max_iter=9)
    torch.testing.assert_close(a @ found.x, b, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(found.residual, b - a @ found.x, rtol=0, atol=1e-9)
    assert found.relative <= 1e-9
    assert found.top <= float(torch.linalg.eigvalsh(a).max()) * (1 + 1e-9)


def test_conjugate_gradients_never_stop_before_two_iterations_and_take_a_zero_right_hand_side():
    product = lambda v: 2 * v  # noqa: E731
    assert conjugate_gradients(product, torch.ones(3, dtype=F64), tol=0.5, max_iter=9).iterations == 2
    zero = conjugate_gradients(product, torch.zeros(3, dtype=F64), tol=0.5, max_iter=9)
    assert zero.relative == 0
    assert not zero.x.any()


def test_conjugate_gradients_stop_when_progress_is_slow():
    spectrum = torch.logspace(0, -8, 200, dtype=F64)
    found = conjugate_gradients(lambda v: spectrum * v + 1e-9 * v, spectrum.clone(), tol=1e-14, max_iter=200)
    assert found.iterations < 200
    assert found.relative > 1e-14


# ------------------------------------------------------------------------------------------------ public operators


def test_the_margin_map_is_the_dense_jacobian_of_the_margins():
    problem = Problem()
    for how in ({}, {"products": "forward", "model": problem.model}):
        m = MarginMap(problem.closure, problem.parameters, **how)
        dense = torch.einsum("bk,bkp->bp", problem.found.slope, problem.jacobian)
        v, u = torch.randn(m.shape[1], dtype=F64), torch.randn(m.shape[0], dtype=F64)
        torch.testing.assert_close(m.jvp(v), dense @ v)
        torch.testing.assert_close(m.vjp(u), u @ dense)
        torch.testing.assert_close(m.fgn_matvec(v), problem.fgn @ v)
    operator = m.to_scipy()
    torch.testing.assert_close(torch.from_numpy(operator @ v.numpy()), dense @ v)
    torch.testing.assert_close(torch.from_numpy(operator.T @ u.numpy()), u @ dense)


def test_the_curvature_gap_is_that_of_dense_solves():
    problem = Problem(classes=5)
    gap = curvature_gap(problem.model, problem.x, problem.y, dampings=(0.05, 1.0))
    for i, damping in enumerate((0.05, 1.0)):
        d_f, d_g = problem.dense_step(problem.fgn, damping), problem.dense_step(problem.ggn, damping)
        assert gap.relative_error[i] == pytest.approx(float((d_f - d_g).norm() / d_g.norm()), rel=1e-3)
        assert gap.cosine[i] == pytest.approx(float(torch.cosine_similarity(d_f, d_g, dim=0)), rel=1e-4)
    assert (gap.effective_competitors >= 1).all()
    assert (gap.effective_competitors <= 4 + 1e-9).all()
    assert "of the trace is dropped" in str(gap)
