import itertools

import numpy as np
import pytest
import torch

from fairtrial.errors import InputError
from fairtrial.evaluation.corrected_mmd import (
    CorrectedMMDLoss,
    EnergyKernel,
    GaussianKernel,
    kernels,
    mec_mmd2,
    plain_mmd2,
)

KERNEL = GaussianKernel(1.0)


def measured(n=7, m=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    z = 0.3 + 1.3 * x + 0.5 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, z, torch.randn(m, 2, generator=generator, dtype=torch.float64) + 0.4


def gradient(value, y):
    return torch.autograd.grad(value(y.requires_grad_()), y)[0]


@pytest.mark.parametrize("form", ["u", "v"])
@pytest.mark.parametrize("how", [{}, {"strength": 0.4}, {"proxy": "calibrated"}], ids=str)
def test_its_value_is_that_of_the_estimate(how, form):
    x, z, y = measured(n=40, m=9)
    a = torch.arange(20)
    loss = CorrectedMMDLoss(z, x[a], a, kernel=KERNEL, form=form, **how)
    assert float(loss(y)) == pytest.approx(float(mec_mmd2(z, x[a], a, y, kernel=KERNEL, form=form, **how).value))


@pytest.mark.parametrize("kernel", [KERNEL, EnergyKernel()], ids=["gaussian", "energy"])
def test_autograd_equals_central_differences(kernel):
    x, z, y = measured()
    loss = CorrectedMMDLoss(z, x[:4], torch.arange(4), kernel=kernel)
    assert torch.autograd.gradcheck(loss, (y.requires_grad_(),), eps=1e-6, atol=1e-6)


def test_the_mean_gradient_over_all_audits_is_the_oracles():
    x, z, y = measured()
    gradients = []
    for a in itertools.combinations(range(7), 4):
        loss = CorrectedMMDLoss(z, x[list(a)], torch.tensor(a), kernel=KERNEL)
        gradients.append(gradient(loss, y))
    oracle = gradient(lambda at: plain_mmd2(x, at, KERNEL), y)
    torch.testing.assert_close(torch.stack(gradients).mean(0), oracle, atol=1e-12, rtol=0)


def test_leaving_out_the_constant_changes_no_gradient():
    x, z, y = measured()
    a = torch.arange(4)
    whole, fit_only = (CorrectedMMDLoss(z, x[a], a, kernel=KERNEL, fit_only=only) for only in (False, True))
    torch.testing.assert_close(gradient(whole, y), gradient(fit_only, y))
    assert not torch.isclose(whole(y), fit_only(y))


def test_independent_minibatches_of_noisy_rows_and_audit_keep_loss_and_gradient_unbiased():
    x, z, y = measured()
    loss = CorrectedMMDLoss(z, x[:4], torch.arange(4), kernel=KERNEL)
    values, gradients = [], []
    for rows in itertools.combinations(range(7), 3):
        for audit in itertools.combinations(range(4), 2):
            batches = torch.tensor(rows), torch.tensor(audit)
            values.append(loss(y, *batches).detach())
            gradients.append(gradient(lambda at, b=batches: loss(at, *b), y))
    torch.testing.assert_close(torch.stack(values).mean(), loss(y))
    torch.testing.assert_close(torch.stack(gradients).mean(0), gradient(loss, y))


def test_chunks_change_neither_value_nor_gradient(monkeypatch):
    x, z, y = measured(n=20, m=8)
    loss = CorrectedMMDLoss(z, x[:6], torch.arange(6), kernel=KERNEL)
    whole = loss(y), gradient(loss, y)
    monkeypatch.setattr(kernels, "CHUNK", 40)
    torch.testing.assert_close((loss(y), gradient(loss, y)), whole)


def test_it_keeps_dtype_moves_with_its_module_and_learns_a_kernel():
    x, z, y = (t.float() for t in measured(n=20))
    width = torch.nn.Parameter(torch.tensor(1.0))
    loss = CorrectedMMDLoss(z, x[:8], torch.arange(8), kernel=lambda a, b: torch.exp(-torch.cdist(a, b) / width))
    value = loss(y)
    value.backward()
    assert value.dtype == torch.float32
    assert width.grad is not None
    assert {"noisy", "audited", "constant"} <= dict(loss.double().named_buffers()).keys()
    assert loss(y.double()).dtype == torch.float64


@pytest.mark.slow
def test_fitting_by_it_finds_what_the_plain_distance_misses():
    generator = torch.Generator().manual_seed(0)
    x = 1 + 0.8 * torch.randn(1000, 1, generator=generator)
    z = 0.3 + 1.2 * x.clamp(max=1.6) + 0.4 * torch.randn(1000, 1, generator=generator)
    loss = CorrectedMMDLoss(z, x[:200], torch.arange(200), fit_only=True)

    def fitted(objective):
        theta = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([theta], 0.12)
        for _ in range(60):
            optimizer.zero_grad()
            objective(theta[0] + theta[1].exp() * torch.randn(128, 1, generator=generator)).backward()
            optimizer.step()
        return theta[0].item()

    assert abs(fitted(loss) - 1) < 0.2
    assert fitted(lambda y: plain_mmd2(z[:300], y, loss.kernel)) > 1.3


def test_arrays_will_do():
    x, z, y = (t.numpy() for t in measured(n=30))
    loss = CorrectedMMDLoss(z, x[:12], np.arange(12), strength="auto")
    assert 0 <= loss.strength <= 1
    assert loss(torch.from_numpy(y)).dtype == torch.float64


def test_bad_input_is_refused():
    x, z, y = measured()
    loss = CorrectedMMDLoss(z, x[:4], torch.arange(4))
    with pytest.raises(InputError, match="y has 1 row"):
        loss(y[:1])
    with pytest.raises(InputError, match="y has 1 features"):
        loss(y[:, :1])
    for batch in (torch.arange(0), torch.tensor([0.5]), torch.tensor([True]), "a", [[0], [1, 2]]):
        with pytest.raises(InputError, match="one at least"):
            loss(y, z_batch=batch)
    for batch in ([4], [-1]):
        with pytest.raises(InputError, match=r"in 0\.\.3"):
            loss(y, audit_batch=torch.tensor(batch))
    with pytest.raises(InputError, match="form="):
        CorrectedMMDLoss(z, x[:4], torch.arange(4), form="w")
