import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard
from scipy.special import expi

from fairtrial.errors import InputError
from fairtrial.training.neural_collapse import (
    ce_mode_rates,
    lyapunov,
    spectral_flow,
    spectral_network,
    time_to_collapse,
    walsh_hadamard,
)
from fairtrial.training.neural_collapse.modes import cross_entropy, logit_vector, softmax
from fairtrial.training.neural_collapse.network import class_basis


def positive(k, seed, scale=0.7):
    return np.exp(scale * np.random.default_rng(seed).standard_normal(k - 1))


def conjugate(k, seed):
    s = positive(k, seed)
    return np.array([s[min(m, k - m) - 1] for m in range(1, k)])


# ---------------------------------------------------------------------------------------------------- diagonalization


@pytest.mark.parametrize("k", [2, 4, 8, 16, 64])
def test_softmax_is_diagonal_in_the_hadamard_basis(k):
    u = hadamard(k) / math.sqrt(k)
    p = softmax((u * np.concatenate([[0.3], positive(k, k)])) @ u.T)  # rows sum to 1, and columns by symmetry
    inside = u.T @ p @ u
    assert np.abs(inside - np.diag(np.diag(inside))).max() < 1e-12


def test_the_worked_example_of_four_classes():
    u = hadamard(4) / 2
    pi = np.diag(u @ softmax((u * np.array([0.0, 1.0, 2.0, -0.5])) @ u) @ u)
    np.testing.assert_allclose(pi, [1, 0.190129, 0.437823, -0.011331], atol=1e-6)


@pytest.mark.parametrize("k", [3, 5, 6, 7])
def test_softmax_is_diagonal_in_the_fourier_basis_for_equal_pairs(k):
    u = class_basis(k, "fourier").numpy()
    np.testing.assert_allclose(u.T @ u, np.eye(k), atol=1e-12)
    p = softmax((u * np.concatenate([[0.0], conjugate(k, 1)])) @ u.T)
    inside = u.T @ p @ u
    assert np.abs(inside - np.diag(np.diag(inside))).max() < 1e-12


def test_a_random_basis_does_not_diagonalize():
    q, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))
    inside = q.T @ softmax((q * np.append(positive(8, 0), 1.0)) @ q.T) @ q
    assert np.abs(inside - np.diag(np.diag(inside))).max() > 1e-2


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 6), st.integers(0, 10**6))
def test_the_fast_transform_is_the_matrix_and_its_own_inverse(power, seed):
    k = 2**power
    x = np.random.default_rng(seed).standard_normal((3, k, 2))
    expected = np.einsum("de,aeb->adb", hadamard(k) / math.sqrt(k), x)
    np.testing.assert_allclose(walsh_hadamard(x, 1), expected, atol=1e-12)
    np.testing.assert_allclose(walsh_hadamard(walsh_hadamard(x, 1), 1), x, atol=1e-12)
    in_torch = walsh_hadamard(torch.from_numpy(x), 1)
    np.testing.assert_allclose(in_torch, expected, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- reduced flow


@pytest.mark.parametrize(("k", "basis"), [(4, "hadamard"), (8, "hadamard"), (5, "fourier"), (6, "fourier")])
def test_the_rates_are_the_networks_gradient_projected_on_the_modes(k, basis):
    s = positive(k, 3) if basis == "hadamard" else conjugate(k, 3)
    net = spectral_network(k, k + 1, s, basis=basis)
    z = net(torch.eye(k, dtype=torch.float64))
    torch.nn.functional.cross_entropy(z, torch.arange(k)).backward()
    u = class_basis(k, basis)
    w1, w2 = net[0].weight, net[1].weight
    moved = -(u.T @ (w2.grad @ w1.detach() + w2.detach() @ w1.grad) @ u).diagonal()[1:]
    np.testing.assert_allclose(moved, ce_mode_rates(s, basis), atol=1e-10)
    np.testing.assert_allclose(cross_entropy(s, basis), torch.nn.functional.cross_entropy(z, torch.arange(k)).detach())


def test_rates_are_differentiable_in_torch():
    s = torch.tensor(positive(8, 1), requires_grad=True)
    ce_mode_rates(s).sum().backward()
    step = np.zeros(7)
    step[2] = 1e-6
    difference = (ce_mode_rates(s.detach().numpy() + step) - ce_mode_rates(s.detach().numpy() - step)).sum() / 2e-6
    assert float(s.grad[2]) == pytest.approx(difference, rel=1e-6)
    assert lyapunov(s).requires_grad


@pytest.mark.parametrize(("k", "n"), [(8, 1), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_the_flow_is_that_of_gradient_descent(k, n):
    s0 = 0.2 * positive(k, 5, 0.5)
    net = spectral_network(k, k + 2, s0, n_per_class=n)
    dt, end = 0.01, 20.0
    inputs, labels = torch.eye(k * n, dtype=torch.float64), torch.arange(k).repeat_interleave(n)
    optimizer = torch.optim.SGD(net.parameters(), lr=dt)
    for _ in range(round(end / dt)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    reached = torch.linalg.svdvals((net[1].weight @ net[0].weight).detach())[: k - 1]
    followed = np.sort(spectral_flow(s0, t_max=end, n_per_class=n).at(math.log(end)))[::-1]
    np.testing.assert_allclose(followed, reached, rtol=4e-3)


def test_unbalanced_layers_conserve_their_difference():
    a0, b0 = np.array([0.3, 0.1, 0.5]), np.array([0.1, 0.4, 0.2])
    net = spectral_network(4, 3, (a0, b0))
    dt, end = 0.01, 20.0
    optimizer = torch.optim.SGD(net.parameters(), lr=dt)
    for _ in range(round(end / dt)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(torch.eye(4, dtype=torch.float64)), torch.arange(4)).backward()
        optimizer.step()
    u = class_basis(4)
    reached = (u.T @ (net[1].weight @ net[0].weight).detach() @ u).diagonal()[1:]
    np.testing.assert_allclose(spectral_flow((a0, b0), t_max=end).at(math.log(end)), reached, rtol=4e-3)
    sunk = spectral_flow((np.array([0.3, 0.2, 0.3]), np.array([0.3, -0.2, 0.3])), t_max=1e6)
    assert abs(sunk.s[-1, 1]) < 1e-3  # a0 = -b0 sinks to the saddle
    assert np.isinf(sunk.lyapunov[-1])


def test_two_classes_have_their_closed_form():
    """t = [Ei(s) + log s] / 2, since dt = (1 + e^s) / (2 s) ds."""
    flow = spectral_flow(np.array([0.1]), t_max=1e9)
    s = flow.s[1:, 0]
    times = (expi(s) + np.log(s) - expi(0.1) - math.log(0.1)) / 2
    np.testing.assert_allclose(flow.log_time[1:], np.log(times), atol=1e-7)


def test_from_a_uniform_start_all_modes_follow_one_equation():
    """ds/dt = 2 s / (K - 1 + e^s)."""
    for k in (4, 8):
        s = np.full(k - 1, 1.7)
        np.testing.assert_allclose(ce_mode_rates(s), 2 * 1.7 / (k - 1 + math.exp(1.7)))
        flow = spectral_flow(s, t_max=1e5)
        assert np.ptp(flow.s, axis=1).max() < 1e-9
        assert (flow.lyapunov < 1e-12).all()


def test_the_constant_mode_does_not_matter():
    s = positive(8, 2)
    z = logit_vector(s)
    np.testing.assert_allclose(softmax(z + 3.0), softmax(z))


# ------------------------------------------------------------------------------------------------------ Lyapunov value


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([4, 8, 16]), st.integers(0, 10**9), st.floats(0.1, 1.5))
def test_the_lyapunov_inequality_holds(k, seed, scale):
    s = 3 * positive(k, seed, scale)
    rates = ce_mode_rates(s)
    mean = s.mean()
    falls = rates.mean() / mean - (rates / s).mean()
    bound = -2 / ((k - 1) * mean) * (cross_entropy(s) - cross_entropy(np.full(k - 1, mean)))
    assert falls <= bound + 1e-12
    assert bound <= 1e-12


def test_the_recorded_rate_is_the_slope_of_v_and_v_never_rises():
    flow = spectral_flow(positive(8, 4), t_max=1e8)
    assert (np.diff(flow.lyapunov) <= 1e-12).all()
    assert (flow.lyapunov_rate <= flow.lyapunov_bound + 1e-12).all()
    assert (flow.loss <= flow.loss_bound + 1e-9).all()
    t = np.exp(flow.log_time[1:12])
    between = np.diff(flow.lyapunov[1:12]) / np.diff(t)
    middle = (flow.lyapunov_rate[1:11] + flow.lyapunov_rate[2:12]) / 2
    np.testing.assert_allclose(between, middle, rtol=2e-2)
    s = positive(8, 4)
    ahead = lyapunov(s + 1e-6 * ce_mode_rates(s)) - lyapunov(s - 1e-6 * ce_mode_rates(s))
    assert ahead / 2e-6 == pytest.approx(flow.lyapunov_rate[0], rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_an_invertible_map_of_modes_commutes_with_the_flow(seed):
    rng = np.random.default_rng(seed)
    while True:
        a = rng.integers(2, size=(3, 3))
        if round(np.linalg.det(a)) % 2:
            break
    bits = (np.arange(8)[:, None] >> np.arange(3)) & 1
    moved = ((bits @ a.T) % 2) @ (1 << np.arange(3))
    s = np.concatenate([[0.0], positive(8, seed)])
    permuted = np.empty(8)
    permuted[moved] = s
    rates = np.concatenate([[0.0], ce_mode_rates(s[1:])])
    expected = np.empty(8)
    expected[moved] = rates
    np.testing.assert_allclose(ce_mode_rates(permuted[1:]), expected[1:], rtol=1e-10)


@pytest.mark.parametrize("k", [4, 8, 16])
def test_near_collapse_v_falls_by_two_over_k_a_unit_of_the_mean_mode(k):
    s = 5 * (1 + 1e-3 * np.random.default_rng(0).standard_normal(k - 1))
    flow = spectral_flow(s, t_max=1e8)
    slope = np.polyfit(flow.s.mean(1), np.log(flow.lyapunov), 1)[0]
    assert slope == pytest.approx(-2 / k, abs=1e-3)


def test_with_four_classes_modes_keep_their_order_and_close_up():
    for seed in range(8):
        flow = spectral_flow(positive(4, seed), t_max=1e6)
        order = np.argsort(flow.s[0])
        assert (np.diff(flow.s[:, order], axis=1) >= -1e-9).all()
        ratios = np.abs(np.log(flow.s[:, order[-1]] / flow.s[:, order[0]]))
        assert (np.diff(ratios) <= 1e-9).all()


def test_with_eight_classes_a_pair_may_diverge_while_v_falls():
    def diverges(s):
        growth = ce_mode_rates(s) / s
        i, j = np.triu_indices(7, 1)
        return bool(((growth[i] - growth[j]) * np.sign(np.log(s[i] / s[j])) > 1e-9).any())

    states = [positive(8, seed) for seed in range(200)]
    share = np.mean([diverges(s) for s in states])
    assert 0.4 < share < 0.95
    s = next(s for s in states if diverges(s))
    assert spectral_flow(s, t_max=1e-3).lyapunov[-1] < lyapunov(s)
    assert not any(diverges_in_four(positive(4, seed)) for seed in range(200))


def diverges_in_four(s):
    growth = ce_mode_rates(s) / s
    i, j = np.triu_indices(3, 1)
    return bool(((growth[i] - growth[j]) * np.sign(np.log(s[i] / s[j])) > 1e-9).any())


def test_the_slowdown_table():
    expected = {1.5: 0.75, 2: 1.18, 4: 2.64, 8: 5.07, 16: 11.05, 32: 31.76}
    for ratio, log10 in expected.items():
        found = time_to_collapse(0.1 * np.array([ratio, ratio, 1.0]), 0.01) / math.log(10)
        assert found == pytest.approx(log10, rel=0.02)


def test_v_does_not_see_scale_and_is_infinite_without_a_mode():
    s = positive(8, 0)
    assert lyapunov(3 * s) == pytest.approx(lyapunov(s))
    assert lyapunov(s) > 0
    assert lyapunov(np.array([1.0, 0.0, 2.0])) == math.inf
    flow = spectral_flow(np.array([0.1, 0.0, 0.2]), t_max=1e6)
    assert np.isinf(flow.lyapunov).all()
    assert np.isfinite(flow.s).all()
    assert (flow.s[:, 1] == 0).all()


@pytest.mark.parametrize(("k", "modes"), [(8, 1), pytest.param(8, 2, marks=pytest.mark.slow), (16, 2)])
def test_fewer_modes_than_bits_leave_classes_confounded(k, modes):
    s0 = np.zeros(k - 1)
    s0[[2**i - 1 for i in range(modes)]] = 0.1
    flow = spectral_flow(s0, t_max=1e10)
    floor = math.log(k / 2**modes)
    assert flow.loss[-1] == pytest.approx(floor, abs=1e-6)
    assert flow.loss[-1] >= floor
    z = logit_vector(flow.s[-1])
    assert (z > z[0] - 1e-9).sum() == k / 2**modes


def test_squared_loss_has_saxes_closed_form():
    s0 = np.array([0.1, 0.2, 0.05])
    flow = spectral_flow(s0, loss="squared", t_max=50.0)
    t = np.exp(flow.log_time[-1])
    grown = math.exp(2 * t / 4)
    np.testing.assert_allclose(flow.s[-1], grown * s0 / (1 + s0 * (grown - 1)))
    np.testing.assert_allclose(flow.s[0], s0)


# ----------------------------------------------------------------------------------------------------------- bad input


def test_what_no_basis_holds_is_refused():
    with pytest.raises(InputError, match=r"no power of 2.*fourier"):
        spectral_flow(np.ones(4))
    with pytest.raises(InputError, match="conjugate pair"):
        spectral_flow(np.array([1.0, 2.0, 3.0, 4.0]), basis="fourier")
    with pytest.raises(InputError, match="mode 2 is -1"):
        spectral_flow(np.array([1.0, -1.0, 1.0]))
    with pytest.raises(InputError, match="12 is no power of 2"):
        walsh_hadamard(np.ones(12))
    with pytest.raises(InputError, match="mode 2 is nan"):
        spectral_flow(np.array([1.0, np.nan, 1.0]))
    with pytest.raises(InputError, match="balanced layers"):
        spectral_flow(np.ones(3), loss="squared", n_per_class=2)
    with pytest.raises(InputError, match="width is 2"):
        spectral_network(4, 2, np.ones(3))
    with pytest.raises(InputError, match="2 modes for 4 classes"):
        spectral_network(4, 8, np.ones(2))
    with pytest.raises(InputError, match="'ce' or 'squared'"):
        spectral_flow(np.ones(3), loss="hinge")
    with pytest.raises(InputError, match="a0 has shape"):
        spectral_flow((np.ones(3), np.ones(2)))
    assert time_to_collapse(np.ones(3), 0.1) == -math.inf
    assert time_to_collapse(np.array([0.1, 0.0, 0.1]), 0.1, t_max=1e4) == math.inf
    with pytest.raises(InputError, match="eps=0"):
        time_to_collapse(np.ones(3), 0)
