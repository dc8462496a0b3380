import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fairtrial.errors import InputError
from fairtrial.training.sparse_connectivity import generalization_bound, stability_certificate
from fairtrial.training.sparse_connectivity.certificate import neuron_statistics
from fairtrial.training.sparse_connectivity.patches import (
    LocallyConnected,
    PatchNetwork,
    as_patches,
    extract,
    uncovered,
)

F64 = torch.float64
KINDS = ("dense", "local", "conv", "conv2d")


def network(kind, seed, k=6, bias=True):
    torch.manual_seed(seed)
    if kind == "dense":
        module = nn.Sequential(nn.Linear(8, k), nn.ReLU(), nn.Linear(k, 1, bias=bias))
    elif kind == "local":
        first = LocallyConnected(torch.arange(8).reshape(2, 4)[torch.arange(k) % 2])
        nn.init.normal_(first.weight)
        nn.init.normal_(first.bias)
        module = nn.Sequential(first, nn.ReLU(), nn.Linear(k, 1, bias=bias))
    elif kind == "conv":
        module = nn.Sequential(
            nn.Unflatten(1, (1, 8)), nn.Conv1d(1, k, 4, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
            nn.Linear(k, 1, bias=bias),
        )  # fmt: skip
    else:
        module = nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv2d(1, k, 2), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(),
            nn.Linear(k, 1, bias=bias),
        )  # fmt: skip
    x = torch.randn(12, 4, 4, dtype=F64) if kind == "conv2d" else torch.randn(12, 8, dtype=F64)
    return module.double(), x, torch.randn(12, dtype=F64)


@settings(max_examples=32, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.booleans())
def test_the_inequality_holds_on_random_networks(kind, seed, bias):
    module, x, y = network(kind, seed, bias=bias)
    certificate = stability_certificate(module, x, y, tol=1e-9)
    assert certificate.slack >= -1e-9
    assert certificate.slack_hessian >= certificate.slack - 1e-6
    assert certificate.weighted_path_norm == pytest.approx(certificate.per_neuron["spent"].sum())


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_eigenvalues_are_those_of_the_dense_matrices(kind):
    module, x, y = network(kind, 3)
    certificate = stability_certificate(module, x, y, tol=1e-10)
    parameters = list(module.parameters())
    rows = [torch.cat([g.reshape(-1) for g in torch.autograd.grad(z, parameters, retain_graph=True)])
            for z in module(x).reshape(-1)]  # fmt: skip
    jacobian = torch.stack(rows)
    dense = float(torch.linalg.eigvalsh(jacobian.T @ jacobian / 12)[-1])
    assert certificate.gauss_newton == pytest.approx(dense, rel=1e-7)
    assert certificate.sharpness <= certificate.gauss_newton + certificate.residual_term + 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_gradient_is_made_of_the_neurons_statistics(kind):
    """The proof's step: d f / d v_k averages to |w_k| P E[u.p - t | .], d f / d b_k to -v_k P."""
    module, x, _ = network(kind, 4)
    table, _ = neuron_statistics(read := as_patches(module, x))
    gradient = torch.autograd.grad(module(x).mean(), list(module.parameters()))
    g = table["g"].to_numpy()
    share = table["activation"].to_numpy()
    norms = read.w.norm(dim=1).numpy()
    excess = gradient[2][0].numpy() / np.maximum(share * norms, 1e-300)  # E[u.p - t | .]
    np.testing.assert_allclose(gradient[1].numpy(), read.v.numpy() * share, atol=1e-10)
    mean_patch = gradient[0].flatten(1).numpy() / np.where(share > 0, read.v.numpy() * share, 1.0)[:, None]
    expected = share**2 * excess * np.sqrt(1 + (mean_patch**2).sum(1))
    np.testing.assert_allclose(g, np.where(share > 0, expected, 0.0), atol=1e-10)


def test_channels_are_read_as_the_module_orders_them():
    module = nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 5, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(5, 1)
    ).double()
    _, x, y = network("dense", 5)
    read = as_patches(module, x)
    torch.testing.assert_close(read.outputs(), module(x).detach()[:, 0])
    assert stability_certificate(module, x, y).slack >= 0


def test_a_convolution_of_one_place_is_dense():
    dense, x, y = network("dense", 5)
    conv = nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 6, 8), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 1)
    ).double()
    with torch.no_grad():
        for mine, theirs in zip(conv.parameters(), dense.parameters(), strict=True):
            mine.copy_(theirs.reshape(mine.shape))
    a, b = (stability_certificate(module, x, y) for module in (dense, conv))
    assert a.weighted_path_norm == pytest.approx(b.weighted_path_norm)
    assert a.budget == pytest.approx(b.budget)


def test_rescaling_a_neuron_leaves_the_sum_and_changes_the_sharpness():
    module, x, y = network("conv", 6)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[1].weight.mul_(3)
        other[1].bias.mul_(3)
        other[5].weight.div_(3)
    a, b = (stability_certificate(m, x, y, tol=1e-8) for m in (module, other))
    assert b.weighted_path_norm == pytest.approx(a.weighted_path_norm)
    assert abs(a.sharpness - b.sharpness) > 1e-3


def test_rotated_patches_leave_g_unchanged():
    module, x, _ = network("dense", 7)
    q, _ = torch.linalg.qr(torch.randn(8, 8, dtype=F64))
    turned = copy.deepcopy(module)
    with torch.no_grad():
        turned[0].weight.copy_(module[0].weight @ q)
    a, _ = neuron_statistics(as_patches(module, x))
    b, _ = neuron_statistics(as_patches(turned, x @ q))
    np.testing.assert_allclose(a["g"], b["g"], atol=1e-12)


def test_duplicated_inputs_change_no_probability():
    module, x, y = network("local", 8)
    once, twice = stability_certificate(module, x, y), stability_certificate(module, x.repeat(2, 1), y.repeat(2))
    np.testing.assert_allclose(once.per_neuron, twice.per_neuron, atol=1e-12)
    assert twice.gauss_newton == pytest.approx(once.gauss_newton, rel=1e-4)


def test_g_of_a_uniform_line():
    """P = E = mu = .5: g = .25 * .5 * sqrt(1.25) = .139754."""
    n = 100_000
    points = torch.linspace(-1, 1, n, dtype=F64)[:, None, None]
    one = torch.ones(1, 1, dtype=F64)
    line = PatchNetwork(one, torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64), None, points, shared=True)
    table, _ = neuron_statistics(line)
    assert table["g"][0] == pytest.approx(0.139754, abs=1e-5)


def test_neurons_are_read_in_chunks(monkeypatch):
    module, x, _ = network("conv", 9, k=7)
    whole, _ = neuron_statistics(as_patches(module, x))
    monkeypatch.setattr("fairtrial.training.sparse_connectivity.certificate.CHUNK", 80)
    parts, _ = neuron_statistics(as_patches(module, x))
    np.testing.assert_allclose(whole, parts)


def test_a_kink_is_reported_and_dead_and_shattering_neurons_are_counted():
    module, x, y = network("dense", 10)
    with torch.no_grad():
        module[0].weight.zero_()
        module[0].bias.fill_(-1.0)  # all dead
        module[0].weight[0, 0], module[0].bias[0] = 1.0, -float(x[0, 0])  # at the threshold of example 0
        module[0].weight[1, 1], module[0].bias[1] = 1.0, -float(x[:, 1].sort().values[-2:].mean())
    certificate = stability_certificate(module, x, y)
    assert certificate.kinks == 1
    assert certificate.dead_share == pytest.approx(4 / 6)
    shattering = abs(float(module[2].weight[0, 1].detach()))
    assert certificate.shattering_share >= shattering / certificate.path_norm - 1e-9


# -------------------------------------------------------------------------------------------------------------- patches


def test_patches_are_windows_and_squares():
    x = torch.arange(12.0).reshape(1, 12)
    assert extract(x, 4, 4)[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    image = torch.arange(16.0).reshape(1, 4, 4)
    assert extract(image, 2, 2)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert uncovered(12, 5, 5) == 2
    with pytest.raises(InputError, match="from 1 to 12"):
        extract(x, 13, 1)
    with pytest.raises(InputError, match="vectors"):
        extract(torch.zeros(2, 2, 2, 2), 1, 1)


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (nn.Linear(8, 1), "none of the forms"),
        (nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1)), "none of the forms"),
        (nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), "none of the forms"),
        (nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), "with one output"),
        (
            nn.Sequential(
                nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.MaxPool1d(6), nn.Flatten(), nn.Linear(4, 1)
            ),
            "only mean pooling",
        ),
        (
            nn.Sequential(
                nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
                nn.Flatten(), nn.Linear(4, 1),
            ),
            "padded",
        ),
        (
            nn.Sequential(
                nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.AvgPool1d(4), nn.Flatten(), nn.Linear(4, 1)
            ),
            "pooling over some alone",
        ),
        (nn.Sequential(nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 1)), "does not take inputs"),
        (nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1)).half(), "float32 or float64"),
        (nn.ReLU(), "no module in float32"),
        (
            nn.Sequential(
                nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(12, 1)
            ),
            "pool to one place",
        ),
    ],
)  # fmt: skip
def test_a_network_the_theorem_does_not_hold_for_is_refused(module, word):
    with pytest.raises(InputError, match=word):
        stability_certificate(module, torch.randn(5, 8), torch.randn(5))


def test_data_that_do_not_match_are_refused():
    module, x, y = network("dense", 11)
    with pytest.raises(InputError, match="do not match"):
        stability_certificate(module, x, y[:3])
    for broken in (x * math.nan, x[:0], np.full((12, 8), "a"), x + 0j, 3.0):
        with pytest.raises(InputError, match=r"inputs(: some values|\ is no array)"):
            stability_certificate(module, broken, y)
        with pytest.raises(InputError, match="x_unlabeled"):
            generalization_bound(module, x, y, broken)
    with pytest.raises(InputError, match="do not match"):
        generalization_bound(module, x, y[:, None], x)
    with torch.no_grad():
        module[0].weight[0, 0] = math.nan
    with pytest.raises(InputError, match="parameters that are not finite"):
        stability_certificate(module, x, y)


# ---------------------------------------------------------------------------------------------------------------- bound


def test_every_term_of_the_bound_is_shown_and_adds_up():
    module, x, y = network("conv", 12)
    bound = generalization_bound(module, x, y, torch.randn(50, 8, dtype=F64))
    assert bound.total == pytest.approx(bound.interior + bound.boundary + bound.deviation)
    assert len(bound.terms) == 20
    assert bound.total == bound.terms["total"].min()
    assert bound.vacuous  # twelve examples
    assert (bound.terms["interior"].diff().dropna() <= 1e-9).all()  # a higher level binds the interior more
    with pytest.raises(InputError, match="delta"):
        generalization_bound(module, x, y, x, delta=1.0)


def test_the_bound_falls_with_n_at_fixed_statistics():
    module, x, y = network("dense", 13)
    totals = [
        generalization_bound(module, x.repeat(times, 1), y.repeat(times), x.repeat(50, 1)).terms for times in (1, 10)
    ]
    for name in ("interior", "deviation"):
        np.testing.assert_allclose(totals[1][name], totals[0][name] / math.sqrt(10), rtol=1e-6)
