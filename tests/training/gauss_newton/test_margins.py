import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError
from fairtrial.training.gauss_newton import split_softmax_hessian
from fairtrial.training.gauss_newton.margins import margins

F64 = torch.float64


def draw(seed: int, n: int, classes: int, scale: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, classes, generator=generator, dtype=F64)
    return logits, torch.randint(classes, (n,), generator=generator)


cases = given(seed=st.integers(0, 10**6), classes=st.integers(2, 30), scale=st.sampled_from([0.1, 3.0, 30.0]))


@settings(max_examples=30, deadline=None)
@cases
def test_the_split_sums_to_the_softmax_covariance_and_both_parts_are_semidefinite(seed, classes, scale):
    logits, labels = draw(seed, 4, classes, scale)
    kept, dropped = split_softmax_hessian(logits, labels)
    p = logits.softmax(1)
    whole = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    torch.testing.assert_close(kept + dropped, whole, rtol=0, atol=1e-12)
    assert min(torch.linalg.eigvalsh(part).min() for part in (kept, dropped)) > -1e-12


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_the_kept_part_has_rank_one_and_the_dropped_rank_k_minus_2(classes):
    kept, dropped = split_softmax_hessian(*draw(0, 5, classes, 1.0))
    assert torch.linalg.matrix_rank(kept, hermitian=True, atol=1e-12).tolist() == [1] * 5
    assert torch.linalg.matrix_rank(dropped, hermitian=True, atol=1e-12).tolist() == [classes - 2] * 5


def test_the_worked_numbers():
    logits, labels = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=F64), torch.tensor([0])
    found = margins(logits, labels)
    kept, dropped = split_softmax_hessian(logits, labels)
    known = [0.592394, 0.229289, -(1 - 0.643914), 0.346350, 0.174288]
    mine = [found.margin[0], found.weight[0], found.residual[0], kept[0].trace(), dropped[0].trace()]
    torch.testing.assert_close(torch.stack(mine), torch.tensor(known, dtype=F64), rtol=0, atol=1e-6)
    q = torch.tensor([1, -0.665241, -0.244728, -0.090031], dtype=F64)
    torch.testing.assert_close(found.slope[0], q, rtol=0, atol=1e-6)


@settings(max_examples=30, deadline=None)
@cases
def test_softplus_of_minus_the_margin_is_the_cross_entropy_and_its_gradient_is_the_slope(seed, classes, scale):
    logits, labels = draw(seed, 4, classes, scale)
    logits.requires_grad_()
    found = margins(logits, labels)
    torch.testing.assert_close(
        torch.nn.functional.softplus(-found.margin, threshold=800),
        torch.nn.functional.cross_entropy(logits, labels, reduction="none"), rtol=1e-10, atol=1e-12,
    )  # fmt: skip
    (slope,) = torch.autograd.grad(found.margin.sum(), logits)
    torch.testing.assert_close(slope, found.slope.detach(), rtol=0, atol=1e-12)
    residual = logits.softmax(1) - torch.nn.functional.one_hot(labels, classes)
    torch.testing.assert_close(found.slope * found.residual[:, None], residual, rtol=0, atol=1e-12)


def test_the_traces_are_those_of_the_formulas():
    logits, labels = draw(1, 6, 9)
    kept, dropped = split_softmax_hessian(logits, labels)
    found = margins(logits, labels)
    q2 = found.slope.square().sum(1) - 1
    torch.testing.assert_close(kept.diagonal(dim1=1, dim2=2).sum(1), found.weight * (1 + q2))
    torch.testing.assert_close(dropped.diagonal(dim1=1, dim2=2).sum(1), -found.residual * (1 - q2))


def test_the_split_is_differentiable():
    logits, labels = draw(2, 2, 4, 1.0)
    assert torch.autograd.gradcheck(lambda z: split_softmax_hessian(z, labels), logits.requires_grad_())


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), "at least two"),
        (torch.zeros(3, 4), torch.full((3,), 4), "label 4 is none of the classes"),
        (torch.zeros(3, 4), torch.zeros(3, 4), "soft targets"),
        (torch.zeros(3, 4), torch.zeros(3), "single true class"),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), "give labels of shape"),
        (torch.zeros(4), torch.zeros(3, dtype=torch.int64), r"give \(N, K\)"),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.bool), "single true class"),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.complex64), "single true class"),
        (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "give floating-point numbers"),
        (torch.full((3, 4), torch.nan), torch.zeros(3, dtype=torch.int64), "example 0 are not finite"),
        (torch.zeros(3, 4).numpy(), [0, 1, 2], "torch.as_tensor"),
    ],
)
def test_labels_without_a_single_true_class_are_refused(logits, labels, message):
    with pytest.raises(InputError, match=message):
        split_softmax_hessian(logits, labels)
