import copy
import logging
import math
import threading
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.training.decentralized_bilevel import (
    Complete,
    DecentralizedBilevel,
    Erdos,
    Exponential,
    GossipError,
    Isolated,
    Network,
    Problem,
    ProcessGroup,
    QuadraticOracle,
    Ring,
    Star,
    Torus,
    batches_of,
    metropolis,
    tail_index,
)
from fairtrial.training.decentralized_bilevel.agreement import advance, build, sample
from fairtrial.training.decentralized_bilevel.baselines import ClippedSGD, NormalisedMomentum, PlainSGD
from fairtrial.training.decentralized_bilevel.problem import Pieces, Variable
from fairtrial.training.decentralized_bilevel.recursion import Recursion, lower_median
from fairtrial.training.decentralized_bilevel.tails import clamped, hill

torch.set_num_threads(1)
zeros = torch.zeros(1, dtype=torch.float64)


def oracle_of(n, dx=2, dy=3):
    return QuadraticOracle(n, dx, dy)


def mixed(opt, rows):
    return torch.from_numpy(opt._mixing.matrix(opt.t)) @ rows


def stationary(oracle, x, hypergradient, penalty=1e3):
    """Variables (P,) at which the mean gradients of y and z vanish for a given x."""
    a, b, c, t = (v.mean(0) for v in (oracle.a, oracle.b, oracle.c, oracle.target))
    low = torch.linalg.solve(a, b @ x + c)
    if hypergradient == "implicit":
        return torch.cat([x, low, torch.linalg.solve(a, low - t)])
    y = torch.linalg.solve(a + torch.eye(len(a), dtype=a.dtype) / penalty, b @ x + c + t / penalty)
    return torch.cat([x, y, low])


def mean_gradient(oracle, w, hypergradient, penalty=1e3):
    x, y = (Variable(torch.zeros(k, dtype=torch.float64), "v") for k in oracle.sizes[:2])
    pieces = Pieces(oracle.upper, oracle.lower, x, y, hypergradient)
    quiet = {"node": torch.arange(oracle.n)} | {
        k: torch.zeros(oracle.n, size, dtype=torch.float64) for k, size in zip("xy", oracle.sizes, strict=False)
    }
    ((m, _),) = pieces.rows([w.expand(oracle.n, -1)], quiet, quiet)
    return pieces.combine(m, penalty).mean(0).split(oracle.sizes)


# ------------------------------------------------------------------------------------------------ invariants of a step


def test_the_mean_tracker_is_the_mean_estimate_at_every_step():
    oracle = oracle_of(6)
    opt = build(oracle, Erdos(6, seed=1), init_batches=1)
    largest = 0.0
    for call in range(12):
        advance(oracle, opt, 1, call)
        g, s = opt._all("g"), opt._all("s")
        largest = max(largest, float(g.abs().max()))
        assert (s.mean(0) - g.mean(0)).abs().max() <= 1e-12 * largest


def test_every_move_of_a_block_has_the_length_eta():
    oracle = oracle_of(4)
    opt = build(oracle, Ring(4), init_batches=1)
    for call in range(12):
        rest, t = mixed(opt, opt._all("w")), opt.t
        advance(oracle, opt, 1, call)
        moves = (opt._all("w") - rest).split(oracle.sizes, 1)
        for move, s, size in zip(moves, opt._all("s").split(oracle.sizes, 1), oracle.sizes, strict=True):
            eta = 0.1 * math.sqrt(size) * (t + 1) ** -0.75  # of a block that starts at zero
            seen = s.norm(dim=1) > 1e-3
            assert torch.allclose(move.norm(dim=1)[seen], torch.tensor(eta, dtype=torch.float64), rtol=1e-9)


def test_a_block_that_is_not_zero_moves_by_a_share_of_its_norm():
    x = torch.full((4,), 3.0, dtype=torch.float64)
    opt = DecentralizedBilevel(lambda x, y, b: (x - y).square().sum(), lambda x, y, b: (y - x.sum()).square().sum(),
                               x, zeros, network=Complete(2), init_batches=1, lr=(0.2, 0.1, 0.1))  # fmt: skip
    opt.step([0, 0], [0, 0])
    assert (opt.variables["x"] - x).norm(dim=1).tolist() == pytest.approx([0.2 * 6] * 2)


def test_on_a_complete_graph_all_nodes_are_one_node_on_averaged_gradients():
    oracle, n = oracle_of(4), 4
    many = build(oracle, Complete(n), init_batches=2)

    def averaged(loss):
        return lambda x, y, batches: torch.stack([loss(x, y, b) for b in batches]).mean()

    x, y = (torch.zeros(k, dtype=torch.float64) for k in oracle.sizes[:2])
    one = DecentralizedBilevel(averaged(oracle.upper), averaged(oracle.lower), x, y, network=Network([[1.0]]),
                               init_batches=2)  # fmt: skip
    for call in range(12):
        upper, lower = ([sample(oracle, many, i, 2 * call + k) for i in range(n)] for k in (0, 1))
        many.step(upper, lower)
        one.step([upper], [lower])
        w = many._all("w")
        assert (w - w[:1]).abs().max() < 1e-12
        assert (w[:1] - one._all("w")).abs().max() < 1e-12


def test_with_full_weight_the_estimate_is_the_gradient_and_with_none_its_noise_stays_the_first():
    rule = Recursion(torch.zeros(2, 3), [1, 1, 1], [1.0] * 3, lambda m, lam: m)
    now, before, noise, other = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(rule.updated(noise, now, before, 1.0), now)
    # Additive noise at the same sample cancels in the difference: what is left is the noise of the first estimate.
    estimate = rule.updated(before + noise, now + other, before + other, 0.0)
    assert torch.allclose(estimate - now, noise, atol=1e-15)


def test_multiplying_both_losses_leaves_the_trajectory():
    oracle, paths = oracle_of(3), []
    for c in (1.0, 1e3):
        scaled = copy.copy(oracle)
        scaled.upper = lambda x, y, b, c=c: c * oracle.upper(x, y, b)
        scaled.lower = lambda x, y, b, c=c: c * oracle.lower(x, y, b)
        paths.append(advance(scaled, build(scaled, Ring(3), init_batches=1), 8))
    assert torch.allclose(*paths, rtol=1e-9, atol=1e-11)


def test_relabelling_the_nodes_relabels_the_trajectory():
    oracle, order = oracle_of(4), [2, 0, 3, 1]
    w = Star(4).mixing
    straight, shuffled = build(oracle, w, init_batches=1), build(oracle, w[np.ix_(order, order)], init_batches=1)
    for call in range(6):
        batches = [[sample(oracle, straight, i, 2 * call + k) for i in range(4)] for k in (0, 1)]
        straight.step(*batches)
        shuffled.step(*([b[i] for i in order] for b in batches))
    assert torch.allclose(straight._all("w")[order], shuffled._all("w"), atol=1e-12)


def test_a_single_huge_sample_moves_any_node_by_eta_and_the_tracker_recovers():
    oracle = oracle_of(4)
    opt = build(oracle, Ring(4), init_batches=1)
    advance(oracle, opt, 8)
    for call in range(8, 45):
        batches = [[sample(oracle, opt, i, 2 * call + k) for i in range(4)] for k in (0, 1)]
        if call == 8:
            batches[0][1]["y"] = torch.full((3,), 1e12, dtype=torch.float64)
            batches[0][1]["x"] = torch.full((2,), -1e12, dtype=torch.float64)
        rest, t = mixed(opt, opt._all("w")), opt.t
        opt.step(*batches)
        for move, size in zip((opt._all("w") - rest).split(oracle.sizes, 1), oracle.sizes, strict=True):
            assert move.norm(dim=1).max() <= 0.1 * math.sqrt(size) * (t + 1) ** -0.75 * (1 + 1e-9)
    g, s = opt._all("g"), opt._all("s")
    assert (s.mean(0) - g.mean(0)).abs().max() <= 1e-12 * g.abs().max()


def test_trackers_start_anew_every_200_steps_and_at_a_spike():
    rule = Recursion(torch.zeros(2, 3), [1, 1, 1], [1.0] * 3, lambda m, lam: m)
    small = torch.ones(2, 3)
    rule.estimate(small, small, 0, 1.0)
    for _ in range(4):
        rule.estimate(small, small, 3, 1.0)
        assert not rule.spikes().any()
    huge = small * torch.tensor([[1.0], [1e9]])
    rule.estimate(huge, small, 3, 1.0)
    assert rule.spikes().flatten().tolist() == [False, True]
    rule.s = torch.full((2, 3), 5.0, dtype=torch.float64)
    assert torch.equal(rule.offer(True), rule.g)
    assert torch.equal(rule.offer(False), rule.s + rule.change)
    oracle = oracle_of(2, 1, 1)
    opt = build(oracle, Complete(2), init_batches=1)
    advance(oracle, opt, 1)
    opt.t = 200
    opt._recursions[0].s = opt._recursions[0].s + 7.0  # as if rounding had gone astray
    advance(oracle, opt, 1, 1)
    assert torch.allclose(opt._all("s").mean(0), opt._all("g").mean(0), atol=1e-12)


def test_the_first_estimate_is_the_mean_or_below_one_and_a_half_the_lower_median_by_piece():
    g = torch.Generator().manual_seed(0)
    samples = torch.randn(8, 3, 5, generator=g)
    chosen = lower_median(samples, [2, 3])
    for node in range(3):
        for at in (slice(0, 2), slice(2, 5)):
            norms = samples[:, node, at].norm(dim=1)
            assert torch.equal(chosen[node, at], samples[norms.argsort()[3], node, at])
    oracle = oracle_of(2)
    for p, robust in ((1.4, True), (1.5, False)):
        opt = build(oracle, Ring(2), p=p, exact=True)
        quiet = [{"node": torch.tensor(i), "x": torch.zeros(2).double(), "y": torch.zeros(3).double()} for i in (0, 1)]
        loud = [{**b, "y": torch.full((3,), 1e6).double()} for b in quiet]
        for call in range(8):
            assert opt.t == 0
            opt.step(loud if call == 2 else quiet, quiet)
        assert opt.t == 1
        assert bool(opt._all("m").abs().max() < 1e3) is robust


def test_the_tracker_is_float64_whatever_the_model():
    model = nn.Linear(3, 2)
    problem = Problem.hyper_cleaning(model, F.cross_entropy, examples=4)
    opt = DecentralizedBilevel(**vars(problem), network=Ring(3), init_batches=1, private_upper=True)
    batch = {"index": torch.tensor([0, 3]), "input": torch.ones(2, 3), "label": torch.tensor([0, 1])}
    info = opt.step([batch] * 3, [batch] * 3)
    assert opt._all("s").dtype == torch.float64
    assert opt._all("w").dtype == torch.float32
    # 16 entries of y and z to two neighbours of each of three nodes, as float32 and float64.
    assert info.bytes == 3 * 2 * 16 * (4 + 8)


# ----------------------------------------------------------------------------------------------------- hypergradients


def test_the_oracles_closed_forms_are_those_of_its_losses():
    oracle = oracle_of(3)
    x = torch.randn(2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    (slope,) = torch.autograd.grad(oracle.value(x), x)
    assert torch.allclose(slope, oracle.gradient(x.detach()))
    w = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    v = [Variable(torch.zeros(k, dtype=torch.float64), "v") for k in oracle.sizes[:2]]
    quiet = {"node": torch.arange(3), "x": torch.zeros(3, 2).double(), "y": torch.zeros(3, 3).double()}
    ((m, _),) = Pieces(oracle.upper, oracle.lower, *v).rows([w[0]], quiet, quiet)
    assert torch.allclose(oracle.pieces(w)[0], m)


def test_the_penalty_solution_errs_by_half_when_the_penalty_doubles():
    for seed in range(3):
        oracle = QuadraticOracle(4, 3, 5, seed=seed)
        errors = [float((oracle.penalised(lam) - oracle.x_star).norm()) for lam in (40, 80, 160)]
        assert errors[1] / errors[0] == pytest.approx(0.5, abs=0.05)
        assert errors[2] / errors[1] == pytest.approx(0.5, abs=0.05)
        w = stationary(oracle, oracle.penalised(40), "penalty", 40)
        assert all(block.norm() < 1e-9 for block in mean_gradient(oracle, w, "penalty", 40))


def test_the_implicit_fixed_point_is_the_solution():
    oracle = oracle_of(4)
    blocks = mean_gradient(oracle, stationary(oracle, oracle.x_star, "implicit"), "implicit")
    assert all(block.norm() < 1e-8 for block in blocks)


def test_penalty_and_implicit_hypergradients_agree_to_one_over_lambda():
    for seed in range(3):
        oracle = QuadraticOracle(3, 2, 4, seed=seed)
        x = torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        exact = mean_gradient(oracle, stationary(oracle, x, "implicit"), "implicit")[0]
        assert torch.allclose(exact, oracle.gradient(x))
        off = []
        for lam in (100.0, 200.0):
            w = stationary(oracle, x, "penalty", lam)
            off.append(float((mean_gradient(oracle, w, "penalty", lam)[0] - exact).norm()))
        assert off[1] / off[0] == pytest.approx(0.5, abs=0.05)


def test_a_rank_deficient_lower_level_is_refused_by_implicit_and_taken_by_penalty():
    def lower(x, y, b):
        return 0.5 * (y[0] + y[1] - x.sum()).square()

    def upper(x, y, b):
        return (y - 1).square().sum()

    x, y = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    opt = DecentralizedBilevel(upper, lower, x, y, network=Ring(2), hypergradient="implicit")
    with pytest.raises(InputError, match="not strongly convex"):
        opt.step([0, 0], [0, 0])
    opt = DecentralizedBilevel(upper, lower, x, y, network=Ring(2), init_batches=1)
    for _ in range(20):
        opt.step([0, 0], [0, 0])
    assert opt._all("w").isfinite().all()


def test_implicit_solves_the_oracle():
    oracle = oracle_of(3)
    opt = build(oracle, Complete(3), hypergradient="implicit", init_batches=1, p=2.0)
    quiet = {"node": torch.arange(3), "x": torch.zeros(3, 2).double(), "y": torch.zeros(3, 3).double()}
    start = float(oracle.value(opt.consensus()[0]))
    for _ in range(40):
        opt.step(quiet, quiet)
    assert oracle.value(opt.consensus()[0]) - oracle.f_star < 0.1 * (start - oracle.f_star)


# ---------------------------------------------------------------------------------------------------------- networks


def test_metropolis_weights_are_symmetric_and_sum_to_one():
    for network in (Ring(8), Torus(2, 3), Complete(5), Exponential(9), Star(6), Erdos(7, seed=3)):
        assert np.allclose(network.mixing, network.mixing.T)
        assert np.allclose(network.mixing.sum(1), 1)
        assert network.rho < 1
    assert Ring(8).rho == pytest.approx((1 + 2 * math.cos(math.pi / 4)) / 3)
    assert Complete(5).rho == pytest.approx(0)
    assert Exponential(8).rho < Ring(8).rho
    assert np.array_equal(Isolated(3).mixing, np.eye(3))


def test_networkx_graphs_and_matrices_are_networks():
    networkx = pytest.importorskip("networkx")
    graph = networkx.path_graph(["a", "b", "c"])
    assert np.allclose(DecentralizedBilevel_mixing(graph), metropolis(3, [(0, 1), (1, 2)]))
    assert np.allclose(DecentralizedBilevel_mixing(Ring(4).mixing), Ring(4).mixing)


def DecentralizedBilevel_mixing(network):
    return DecentralizedBilevel(lambda *_: 0, lambda *_: 0, zeros, zeros, network=network)._mixing.matrix(0)


def test_gossip_rounds_are_powers_of_the_mixing_matrix():
    oracle = oracle_of(4)
    twice = advance(oracle, build(oracle, Ring(4), gossip_rounds=2, init_batches=1), 4)
    w = Ring(4).mixing
    assert torch.allclose(twice, advance(oracle, build(oracle, w @ w, init_batches=1), 4), atol=1e-12)


def test_a_network_may_change_from_step_to_step():
    oracle = oracle_of(4)
    pairs = [metropolis(4, edges) for edges in ([(0, 1), (2, 3)], [(1, 2), (3, 0)])]
    opt = build(oracle, lambda t: pairs[t % 2], init_batches=1)
    for call in range(4):
        rest, t = mixed(opt, opt._all("w")), opt.t
        advance(oracle, opt, 1, call)
        assert (opt._all("w") - rest).norm(dim=1).max() <= 0.1 * math.sqrt(8) * (t + 1) ** -0.75 + 1e-9
    assert (opt._all("s").mean(0) - opt._all("g").mean(0)).abs().max() < 1e-9


def test_a_node_that_misses_a_step_keeps_its_state_and_is_told():
    oracle = oracle_of(4)
    paths = []
    for exact in (False, True):
        opt = build(oracle, Ring(4), init_batches=1, exact=exact)
        advance(oracle, opt, 3)
        before = {name: opt._all(name)[2].clone() for name in ("w", "s", "m", "g")}
        upper, lower = ([sample(oracle, opt, i, 6 + k) for i in range(4)] for k in (0, 1))
        upper[2] = lower[2] = None
        info = opt.step(upper, lower)
        assert not info.tracking
        assert info.upper.isnan().tolist() == [False, False, True, False]
        assert all(torch.equal(opt._all(name)[2], value) for name, value in before.items())
        assert not opt.step(*([sample(oracle, opt, i, 8 + k) for i in range(4)] for k in (0, 1))).tracking
        paths.append(opt._all("w"))
        opt.t = 400  # trackers start anew
        assert opt.step(*([sample(oracle, opt, i, 8 + k) for i in range(4)] for k in (0, 1))).tracking
    assert torch.allclose(*paths, atol=1e-12)


def test_private_weights_take_no_part_in_gossip():
    oracle = oracle_of(3)
    opt = build(oracle, Complete(3), private_upper=True, init_batches=1)
    advance(oracle, opt, 6)
    x, y = opt.consensus()
    assert x.shape == (3, 2)
    assert (x - x.mean(0)).norm() > 0.01
    # y is mixed: what differs between nodes is their last step at most.
    assert y.shape == (3,)
    own = opt.variables["x"]
    assert torch.equal(own, x)


def test_x_moves_at_every_inner_steps_th_step_only():
    oracle = oracle_of(2)
    path = advance(oracle, build(oracle, Complete(2), inner_steps=3, init_batches=1), 6)[:, 0, :2]
    assert path[:2].abs().max() == 0
    assert torch.equal(path[2], path[3])
    assert not torch.equal(path[4], path[5])


# ----------------------------------------------------------------------------------------- one process and many: gloo


def in_threads(n, work):
    """Run ``work(group)`` as each of n ranks over gloo, a thread a rank, and return what they return."""
    import torch.distributed as dist

    store, results = dist.HashStore(), [None] * n

    def rank(i):
        try:
            results[i] = work(dist.ProcessGroupGloo(store, i, n, timedelta(seconds=20)))
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_simulated_nodes_and_gloo_ranks_agree_bit_for_bit():
    oracle = oracle_of(3)

    def work(group):
        network = ProcessGroup(Ring(3), group=group)
        opt = build(oracle, network, gossip_rounds=2, init_batches=2)
        path = advance(oracle, opt, 10)
        return path[:, 0], opt.consensus()[0], network.smallest(group.rank() + 3)

    exact = build(oracle, Ring(3), gossip_rounds=2, init_batches=2, exact=True)
    together = advance(oracle, exact, 10)
    for rank, (path, x, smallest) in enumerate(in_threads(3, work)):
        assert torch.equal(path, together[:, rank])
        assert torch.equal(x, exact.consensus()[0])
        assert smallest == 3
    stacked = advance(oracle, build(oracle, Ring(3), gossip_rounds=2, init_batches=2), 10)
    assert torch.allclose(stacked, together, atol=1e-12)


def test_a_rank_that_misses_a_step_sends_nothing_and_all_know():
    oracle = oracle_of(3)

    def walk(opt, ranks):
        told = []
        for call in range(4):
            batches = [[sample(oracle, opt, i, 2 * call + k) for i in ranks] for k in (0, 1)]
            if call == 2 and 1 in ranks:
                batches = [[None if i == 1 else b for i, b in zip(ranks, each, strict=True)] for each in batches]
            info = opt.step(*(batches if len(ranks) > 1 else (batches[0][0], batches[1][0])))
            told.append(info.tracking)
        return opt._all("w"), told

    def work(group):
        return walk(build(oracle, ProcessGroup(Ring(3), group=group), init_batches=1), [group.rank()])

    together, told = walk(build(oracle, Ring(3), init_batches=1, exact=True), range(3))
    for rank, (w, own) in enumerate(in_threads(3, work)):
        assert own == told == [True, True, False, False]
        assert torch.equal(w[0], together[rank])


def test_a_silent_neighbour_ends_the_run_naming_edge_and_step():
    oracle = oracle_of(2)

    def work(group):
        opt = build(oracle, ProcessGroup(Ring(2), group=group, timeout=0.5), init_batches=1)
        if group.rank() == 0:
            advance(oracle, opt, 4)
        else:
            advance(oracle, opt, 2)
            opt.gossip.all_rows(torch.zeros(1, dtype=torch.float64), 2)  # says it is fine, then falls silent
            import time

            time.sleep(1.5)

    error = in_threads(2, work)[0]
    assert isinstance(error, GossipError)
    assert "step 2: no message from rank 1 (edge 0-1) within 0.5 s" in str(error)
    assert "last checkpoint" in str(error)


def test_a_loss_that_is_not_finite_stops_all_ranks_at_once():
    oracle = oracle_of(2)

    def work(group):
        opt = build(oracle, ProcessGroup(Ring(2), group=group), init_batches=1)
        advance(oracle, opt, 2)
        batch = sample(oracle, opt, group.rank(), 9)
        if group.rank() == 1:
            batch["y"] = batch["y"] * math.inf
        opt.step(batch, batch)

    for error in in_threads(2, work):
        assert isinstance(error, InputError)
        assert "rank 1, step 2: its loss is not finite or" in str(error)


def test_a_node_draws_from_a_source_of_its_own_at_every_call_alike_in_one_process_and_many():
    oracle = oracle_of(2)

    def draws(opt):
        seen = []
        for call in range(4):
            seen.append([opt.generator(node).initial_seed() for node in (0, 1)])
            advance(oracle, opt, 1, call)
        return seen

    together = draws(build(oracle, Ring(2), init_batches=2, exact=True))
    assert len({seed for pair in together for seed in pair}) == 8
    assert (
        in_threads(2, lambda g: draws(build(oracle, ProcessGroup(Ring(2), group=g), init_batches=2))) == [together] * 2
    )


def test_world_and_graph_must_have_one_size():
    results = in_threads(2, lambda group: ProcessGroup(Ring(3), group=group))
    assert all("2 processes for a graph of 3 nodes" in str(error) for error in results)
    with pytest.raises(InputError, match="init_process_group"):
        ProcessGroup(Ring(2))


def test_a_run_resumes_from_its_state_bit_for_bit(tmp_path):
    oracle = oracle_of(3)
    for stop in (3, 12):  # while the first samples are gathered, and later
        opt = build(oracle, Ring(3))
        advance(oracle, opt, stop)
        torch.save(opt.state_dict(), tmp_path / "state.pt")
        rest = advance(oracle, opt, 8, stop)
        again = build(oracle, Ring(3))
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert torch.equal(advance(oracle, again, 8, stop), rest)
    with pytest.raises(InputError, match="other nodes"):
        build(oracle_of(4), Ring(4)).load_state_dict(opt.state_dict())
    with pytest.raises(InputError, match="the state lacks"):
        opt.load_state_dict({})
    opt = build(oracle, Ring(3))
    advance(oracle, opt, 2)
    state = opt.state_dict()
    advance(oracle, opt, 2, 2)
    assert len(state["_samples"]) == 2  # what was kept does not follow the run


# ------------------------------------------------------------------------------------------------------------ diagnosis


def test_the_hill_index_of_pareto_draws():
    rng = np.random.default_rng(0)
    assert np.mean([hill(rng.pareto(1.5, 20_000) + 1) for _ in range(20)]) == pytest.approx(1.5, abs=0.1)
    assert tail_index(rng.standard_normal((5000, 3)), level=0.9).infinite_variance is False
    assert tail_index(rng.standard_t(1.2, (6000, 2))).p == pytest.approx(1.1, abs=0.2)


def test_fewer_draws_cannot_decide_and_too_few_are_refused():
    lengths = np.random.default_rng(0).pareto(1.2, 400) + 1
    with pytest.warns(UserWarning, match="5000"):
        told = tail_index(lambda b: [b, 0.0], lengths)
    assert told.infinite_variance is None
    assert told.low < told.alpha < told.high
    with pytest.raises(InputError, match="at least 200"):
        tail_index(lengths[:100])
    with pytest.raises(InputError, match="not finite"):
        tail_index(np.r_[lengths, np.nan])
    with pytest.raises(InputError, match=r"as \(N, 1\)"):
        tail_index(-lengths)
    with pytest.raises(InputError, match="at least 200"):
        tail_index(lambda b: b, [])
    with pytest.raises(InputError, match="no arrays of real numbers"):
        tail_index(["a"] * 300)
    with pytest.raises(InputError, match="between 0 and 1"):
        tail_index(lengths, level=95)
    assert [clamped(a) for a in (0.9, 1.5, 3.0)] == [1.1, 1.4, 2.0]


def test_p_is_chosen_from_the_noise_at_the_start():
    def run(df):
        g = torch.Generator().manual_seed(0)

        def batch():
            noise = torch.from_numpy(np.random.default_rng(int(torch.randint(10**6, (1,), generator=g)))
                                     .standard_t(df, (10, 1)))  # fmt: skip
            return noise

        opt = DecentralizedBilevel(lambda x, y, b: y @ b, lambda x, y, b: (y - x).square().sum() + y @ b, zeros, zeros,
                                   network=Complete(10), p="auto")  # fmt: skip
        calls = 0
        while opt.t == 0:
            opt.step(batch(), batch())
            calls += 1
        assert calls == 40  # 20 pairs at each of 10 nodes
        return opt.p

    assert run(1.1) < 1.5
    assert run(50) > 1.7


# --------------------------------------------------------------------------------------------------- problems, loaders


def test_presets_are_problems_the_optimizer_takes():
    g = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(6, 3, generator=g), torch.tensor([0, 1, 0, 1, 1, 0])
    cleaning = Problem.hyper_cleaning(nn.Linear(3, 2), F.cross_entropy, examples=6)
    meta = Problem.meta_representation(nn.Linear(3, 4), nn.Linear(4, 2), F.cross_entropy)
    ridge = Problem.ridge_per_feature(3)
    batch = {"index": torch.arange(6), "input": inputs, "label": labels, "target": inputs[:, 0]}
    for problem in (cleaning, meta, ridge):
        opt = DecentralizedBilevel(**vars(problem), network=Ring(2), init_batches=1)
        for _ in range(3):
            opt.step([batch] * 2, [batch] * 2)
        _, y = opt.consensus()
        if isinstance(problem.y, nn.Module):
            problem.y.load_state_dict(y)
        assert problem.upper(problem.x, Variable(problem.y, "y").build(opt.variables["y"][0]), batch).isfinite()
    weight = torch.tensor([0.5, 0, -1, 2, 0, 0])
    built = Variable(cleaning.y, "y").build(Variable(cleaning.y, "y").flat)
    each = F.cross_entropy(built(inputs), labels, reduction="none")
    decay = 1e-3 * sum(p.square().sum() for p in cleaning.y.parameters())
    assert torch.allclose(cleaning.lower(weight, built, batch), (weight.sigmoid() * each).mean() + decay)


def test_dicts_of_tensors_are_variables_and_what_vmap_cannot_take_is_looped(caplog):
    def lower(x, y, b):
        if float(y["a"].detach().sum()) > 1e9:  # a branch on a value
            return y["a"].sum()
        return (y["a"] - x).square().sum() + (y["b"] - 2).square().sum()

    y = {"a": zeros, "b": torch.zeros(2, 2, dtype=torch.float64)}
    opt = DecentralizedBilevel(lambda x, y, b: (y["a"] - b).square().sum(), lower, zeros, y, network=Ring(2),
                               init_batches=1)  # fmt: skip
    with caplog.at_level(logging.INFO):
        opt.step(torch.ones(2, 1).double(), torch.ones(2, 1).double())
    assert "a loop is used" in caplog.text
    assert opt.consensus()[1]["b"].shape == (2, 2)


def test_batches_of_different_shapes_are_looped():
    opt = DecentralizedBilevel(lambda x, y, b: (y - b.mean()).square().sum(), lambda x, y, b: (y - x).square().sum(),
                               zeros, zeros, network=Ring(2), init_batches=1)  # fmt: skip
    info = opt.step([torch.ones(2), torch.ones(3)], [torch.ones(1)] * 2)
    assert info.upper.tolist() == [1.0, 1.0]


def test_loaders_end_with_the_shortest_and_say_so(caplog):
    with pytest.raises(InputError, match="one of each a node"):
        list(batches_of([], [[1]]))
    drawn = list(batches_of([[1, 2, 3], [4, 5]], [[6, 7, 8], [9, 10, 11]]))
    assert drawn == [([1, 4], [6, 9]), ([2, 5], [7, 10])]
    assert "from 2 to 3 batches: 2 steps" in caplog.text


# ------------------------------------------------------------------------------------------------------------ baselines


def test_plain_descent_follows_the_latest_gradient_and_clipping_bounds_its_length():
    w = torch.zeros(2, 3, dtype=torch.float64)
    now = torch.tensor([[3.0, 4.0, 0.1], [0.3, 0.4, 0.1]], dtype=torch.float64)
    for rule, length in ((PlainSGD(w, [2, 1, 0], [0.1] * 3, lambda m, lam: m), 5.0),
                         (ClippedSGD(w, [2, 1, 0], [0.1] * 3, lambda m, lam: m, threshold=1.0), 1.0)):  # fmt: skip
        rule.estimate(now, now, 0, 1.0)
        rule.move(w, rule.g, 0)
        assert rule.w[:, :2].norm(dim=1).tolist() == pytest.approx([0.1 * length, 0.05])


def test_normalised_momentum_averages_gradients():
    rule = NormalisedMomentum(torch.zeros(1, 1), [1, 0, 0], [1.0] * 3, lambda m, lam: m, p=2.0)
    rule.estimate(torch.ones(1, 1), torch.ones(1, 1), 0, 1.0)
    rule.estimate(torch.full((1, 1), 3.0), torch.zeros(1, 1), 3, 1.0)
    assert float(rule.m) == pytest.approx(1 + 2 * 4**-0.5)


# ------------------------------------------------------------------------------------------------------------ bad input


def quadratic(**options):
    losses = {"upper": lambda x, y, b: (y - 1).square().sum(), "lower": lambda x, y, b: (y - x).square().sum()}
    return DecentralizedBilevel(**(losses | {"x": zeros, "y": zeros, "network": Ring(2), "init_batches": 1} | options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"network": np.kron(np.eye(2), np.full((2, 2), 0.5))}, r"parts are \[\[0, 1\], \[2, 3\]\]"),
        ({"network": [[0.5, 0.4], [0.5, 0.5]]}, "row 0 of the mixing matrix sums to 0.9"),
        ({"network": [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]}, "symmetric"),
        ({"network": [[1.0, 2.0]]}, "shape"),
        ({"x": zeros.half()}, "float32 or float64"),
        ({"x": zeros.float()}, "one precision"),
        ({"p": 1.0}, r"\(1, 2\]"),
        ({"p": 2.1}, r"\(1, 2\]"),
        ({"hypergradient": "unrolled"}, "'penalty' or 'implicit'"),
        ({"lr": (0.1, -1, 0.1)}, "three step lengths"),
        ({"lr": (0.1, math.nan, 0.1)}, "three step lengths"),
        ({"lr": 0.1}, "three step lengths"),
        ({"penalty": 0.0}, "a positive number, or a callable"),
        ({"p": "tail"}, "or 'auto'"),
        ({"inner_steps": 1.5}, "whole numbers"),
        ({"x": zeros[:0]}, "no trainable parameters"),
        ({"x": {"a": zeros, "b": zeros.float()}}, "give all alike"),
        ({"x": zeros.to("meta")}, "on one device"),
        ({"network": "ring"}, "no matrix of real numbers"),
        ({"gossip_rounds": 0}, "whole numbers"),
        ({"y": nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))}, "dropout"),
        ({"y": nn.ReLU()}, "no trainable parameters"),
    ],
)
def test_bad_arguments_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        quadratic(**options)


def test_bad_steps_are_refused():
    with pytest.raises(InputError, match=r"upper\(x, y, batch\) must return a scalar"):
        quadratic(upper=lambda x, y, b: y).step([0, 0], [0, 0])
    with pytest.raises(InputError, match=r"lower\(x, y, batch\) must return a scalar"):
        quadratic(lower=lambda x, y, b: 3.0).step([0, 0], [0, 0])
    with pytest.raises(InputError, match="rank 1, step 0: its loss is not finite"):
        quadratic(upper=lambda x, y, b: (y - b).square().sum()).step(torch.tensor([[0.0], [math.nan]]), [0, 0])
    with pytest.raises(InputError, match="3 batches for 2 nodes"):
        quadratic().step([0, 0, 0], [0, 0])
    with pytest.raises(InputError, match="first axis"):
        quadratic().step(torch.zeros(3), [0, 0])
    with pytest.raises(InputError, match="first axis"):
        quadratic().step({"a": torch.zeros(2), "b": torch.zeros(3)}, [0, 0])
    with pytest.raises(InputError, match="a batch with NoneType"):
        quadratic().step(None, [0, 0])
    growing = quadratic(network=lambda t: Complete(2 + 2 * t))
    growing.step([0, 0], [0, 0])
    with pytest.raises(InputError, match="4 nodes at step 1, 2 at first"):
        growing.step([0, 0], [0, 0])
    with pytest.raises(InputError, match="whole number from 1"):
        Ring(-1)
    with pytest.raises(InputError, match="no node can miss the first"):
        quadratic().step([0, None], [0, 0])
    with pytest.raises(InputError, match="none of 100 draws"):
        Erdos(20, 0.01)


@pytest.mark.parametrize("exact", [False, True])
def test_a_sample_that_is_refused_leaves_no_trace(exact):
    opt = quadratic(upper=lambda x, y, b: (y - b).square().sum(), exact=exact)
    fine = torch.tensor([[0.0], [0.5]], dtype=torch.float64)
    for _ in range(2):
        opt.step(fine, fine)
    twin = copy.deepcopy(opt.state_dict())
    with pytest.raises(InputError, match="rank 1, step 2: its loss is not finite"):
        opt.step(torch.tensor([[0.0], [math.nan]], dtype=torch.float64), fine)
    opt.step(fine, fine)
    after = opt._all("w")
    opt.load_state_dict(twin)
    opt.step(fine, fine)
    assert torch.equal(opt._all("w"), after)


def test_a_gradient_that_is_not_finite_is_refused_though_the_loss_is():
    opt = quadratic(upper=lambda x, y, b: (y + b).abs().sqrt().sum())
    with pytest.raises(InputError, match="rank 1, step 0: its loss is not finite or its gradient"):
        opt.step(torch.tensor([[1.0], [0.0]], dtype=torch.float64), [0, 0])


def test_a_lower_loss_without_x_is_warned_of():
    opt = quadratic(lower=lambda x, y, b: y.square().sum(), upper=lambda x, y, b: (y - x).square().sum())
    with pytest.warns(UserWarning, match="does not depend on x"):
        opt.step([0, 0], [0, 0])
