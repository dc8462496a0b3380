from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.causal_lm.layout import block_layout, block_layouts
from fairtrial.causal_lm.statistics import LinearStatistics
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.pruning.graph import BlockGraph, fiedler, resistance

LAPLACIANS = ["normalised", "combinatorial"]


def random_weights(n_a: int, n_b: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n_a, n_b, dtype=torch.float64, generator=generator) * 0.8 + 0.2


def laplacian_matrix(weights: torch.Tensor, laplacian: str) -> torch.Tensor:
    n_a, n_b = weights.shape
    adjacency = torch.zeros(n_a + n_b, n_a + n_b, dtype=weights.dtype)
    adjacency[:n_a, n_a:], adjacency[n_a:, :n_a] = weights, weights.T
    degrees = adjacency.sum(0)
    full = torch.diag(degrees) - adjacency
    return full if laplacian == "combinatorial" else full / (degrees[:, None] * degrees).sqrt()


def oracle(weights: torch.Tensor, laplacian: str) -> tuple[float, torch.Tensor]:
    """lambda_2 and the contributions w_ij (u_i - u_j)^2 by numpy's way: eigh of the explicit Laplacian."""
    values, vectors = torch.linalg.eigh(laplacian_matrix(weights, laplacian))
    u = vectors[:, 1]
    if laplacian == "normalised":
        u = u / torch.cat([weights.sum(1), weights.sum(0)]).sqrt()
    a, b = u.split(list(weights.shape))
    return float(values[1]), weights * (a[:, None] - b).square()


def value_of(weights: torch.Tensor, laplacian: str) -> float:
    return float(torch.linalg.eigvalsh(laplacian_matrix(weights, laplacian))[1])


@pytest.mark.parametrize("laplacian", LAPLACIANS)
def test_path_of_three_nodes(laplacian: str) -> None:
    path = torch.ones(1, 2, dtype=torch.float64)
    result = fiedler(path, laplacian=laplacian)
    assert result.value == pytest.approx(1, abs=1e-12)
    assert torch.allclose(path * result.sensitivity(), torch.tensor([[0.5, 0.5]], dtype=torch.float64))
    if laplacian == "combinatorial":
        v = torch.cat([result.a, result.b])[:, 0]
        assert torch.allclose(v * v[1].sign(), torch.tensor([0, 1, -1], dtype=torch.float64) / math.sqrt(2), atol=1e-12)


@pytest.mark.parametrize(("laplacian", "value", "each"), [("combinatorial", 2, 1 / 3), ("normalised", 1, 1 / 6)])
def test_complete_bipartite_graph_averages_its_eigenspace(laplacian: str, value: float, each: float) -> None:
    result = fiedler(torch.ones(2, 3, dtype=torch.float64), laplacian=laplacian)
    assert result.value == pytest.approx(value, abs=1e-12)
    assert torch.allclose(result.sensitivity(), torch.full((2, 3), each, dtype=torch.float64))


@pytest.mark.parametrize("laplacian", LAPLACIANS)
@given(n_a=st.integers(2, 6), n_b=st.integers(2, 6), seed=st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_contributions_sum_to_lambda_2(laplacian: str, n_a: int, n_b: int, seed: int) -> None:
    weights = random_weights(n_a, n_b, seed)
    result = fiedler(weights, laplacian=laplacian)
    contributions = weights * result.sensitivity()
    value, expected = oracle(weights, laplacian)
    assert (contributions >= 0).all()
    assert float(contributions.sum()) == pytest.approx(result.value, abs=1e-12) == pytest.approx(value, abs=1e-12)
    if (result.eigenvalues[-1] - result.eigenvalues[0]) == 0:  # no tie: the eigenvector is unique
        assert torch.allclose(contributions, expected, atol=1e-8)


def test_normalised_lambda_2_is_one_minus_sigma_2() -> None:
    weights = random_weights(4, 6)
    normal = weights / (weights.sum(1, keepdim=True) * weights.sum(0)).sqrt()
    assert fiedler(weights).value == pytest.approx(1 - float(torch.linalg.svdvals(normal)[1]), abs=1e-12)


@pytest.mark.parametrize("laplacian", LAPLACIANS)
def test_central_differences_match_the_derivative(laplacian: str) -> None:
    weights, h = random_weights(4, 6), 1e-5
    derivative = fiedler(weights, laplacian=laplacian).derivative()
    for i in range(4):
        for j in range(6):
            step = torch.zeros_like(weights)
            step[i, j] = h
            difference = (value_of(weights + step, laplacian) - value_of(weights - step, laplacian)) / (2 * h)
            assert float(derivative[i, j]) == pytest.approx(difference, abs=1e-8)


def test_normalised_derivative_is_orthogonal_to_the_weights() -> None:
    weights = random_weights(4, 6)
    assert abs(float((weights * fiedler(weights).derivative()).sum())) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_removal_bound_holds_for_single_edges_and_random_sets(seed: int) -> None:
    weights = random_weights(4, 6, seed)
    result = fiedler(weights, laplacian="combinatorial")
    contributions = weights * result.sensitivity()
    generator = torch.Generator().manual_seed(seed)
    single = torch.eye(24, dtype=torch.bool).view(24, 4, 6)
    sets = torch.rand(20, 4, 6, generator=generator) < torch.rand(20, 1, 1, generator=generator)
    for removed in torch.cat([single, sets]):
        bound = result.value - float(contributions[removed].sum())
        assert value_of(weights.masked_fill(removed, 0), "combinatorial") <= bound + 1e-12


@pytest.mark.parametrize("laplacian", LAPLACIANS)
def test_modes_weigh_each_eigenvector_by_lambda_2_over_lambda_k(laplacian: str) -> None:
    weights = random_weights(5, 7)
    result = fiedler(weights, laplacian=laplacian, modes=3)
    values, vectors = torch.linalg.eigh(laplacian_matrix(weights, laplacian))
    if laplacian == "normalised":
        vectors = vectors / torch.cat([weights.sum(1), weights.sum(0)]).sqrt()[:, None]
    expected = sum(values[1] / values[k] * (vectors[:5, k, None] - vectors[5:, k]).square() for k in range(1, 4))
    assert torch.allclose(result.sensitivity(), expected, atol=1e-10)
    assert float((weights * result.sensitivity()).sum()) == pytest.approx(3 * result.value) == result.total


def test_a_tied_eigenspace_shares_the_modes_asked_for() -> None:
    weights = torch.ones(3, 3, dtype=torch.float64)  # combinatorial: lambda 3 four times, then 6
    half = fiedler(weights, laplacian="combinatorial", modes=2)
    assert torch.allclose(half.weights, torch.full((4,), 0.5, dtype=torch.float64))
    assert float((weights * half.sensitivity()).sum()) == pytest.approx(2 * half.value)


@pytest.mark.parametrize("laplacian", LAPLACIANS)
def test_disconnected_graph_has_lambda_2_zero_and_no_nan(laplacian: str) -> None:
    weights = torch.block_diag(random_weights(2, 3), random_weights(3, 2))
    result = fiedler(weights, laplacian=laplacian)
    assert result.value == 0
    assert (result.n_components, result.participation) == (2, 0)
    assert result.components.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 1, 1]
    assert torch.equal(result.sensitivity(), torch.zeros(5, 5, dtype=torch.float64))


@pytest.mark.parametrize("laplacian", LAPLACIANS)
def test_nodes_of_degree_zero_are_dropped_and_flagged(laplacian: str) -> None:
    weights = torch.zeros(5, 6, dtype=torch.float64)
    weights[:4, 1:] = random_weights(4, 5)
    result, core = fiedler(weights, laplacian=laplacian), fiedler(weights[:4, 1:], laplacian=laplacian)
    assert result.n_isolated == 2
    assert (result.components < 0).nonzero()[:, 0].tolist() == [4, 5]
    assert result.value == pytest.approx(core.value, abs=1e-12)
    assert torch.allclose(result.sensitivity()[:4, 1:], core.sensitivity())
    assert fiedler(torch.zeros(2, 3)).n_isolated == 5


@pytest.mark.parametrize(
    ("laplacian", "solver"), [("normalised", "gram"), ("normalised", "krylov"), ("combinatorial", "krylov")]
)
@pytest.mark.parametrize("shape", [(70, 50), (40, 60)])
def test_solvers_agree_with_eigh_of_the_laplacian(laplacian: str, solver: str, shape: tuple[int, int]) -> None:
    weights = random_weights(*shape) ** 4
    dense, result = (fiedler(weights, laplacian=laplacian, modes=2, solver=s) for s in ("dense", solver))
    assert result.value == pytest.approx(dense.value, abs=1e-10)
    assert torch.allclose(result.sensitivity(), dense.sensitivity(), atol=1e-8)
    assert result.participation == pytest.approx(dense.participation, rel=1e-6)
    single = fiedler(weights.float(), laplacian=laplacian, modes=2, solver=solver)
    assert torch.allclose(
        single.sensitivity(), dense.sensitivity().float(), atol=1e-4 * float(dense.sensitivity().max())
    )


@pytest.mark.parametrize("solver", ["gram", "krylov"])
def test_rank_one_weights_have_a_flat_spectrum_any_solver_sees(solver: str) -> None:
    weights = torch.outer(random_weights(1, 9)[0], random_weights(1, 8, 1)[0])
    dense, result = fiedler(weights, solver="dense"), fiedler(weights, solver=solver)
    assert result.value == pytest.approx(1, abs=1e-9)
    assert torch.allclose(result.sensitivity(), dense.sensitivity(), atol=1e-9)


def test_combinatorial_vector_of_dense_weights_sits_on_the_least_degree() -> None:
    weights = random_weights(150, 120)
    combinatorial = fiedler(weights, laplacian="combinatorial")
    assert combinatorial.participation < 2 < 20 < fiedler(weights).participation
    assert combinatorial.value == pytest.approx(float(torch.cat([weights.sum(0), weights.sum(1)]).min()), rel=0.05)


def test_all_modes_sum_to_the_effective_resistance() -> None:
    """lambda_2 times the pseudo-inverse's resistance is the sum over the whole spectrum, and sum w R = n - 1."""
    weights = random_weights(8, 11)
    pinv = torch.linalg.pinv(laplacian_matrix(weights, "combinatorial"))
    diagonal = pinv.diagonal()
    exact = diagonal[:8, None] + diagonal[8:] - 2 * pinv[:8, 8:]
    assert float((weights * exact).sum()) == pytest.approx(18, abs=1e-9)
    every = fiedler(weights, laplacian="combinatorial", modes=18)
    assert torch.allclose(every.sensitivity(), every.value * exact, atol=1e-10)


def test_effective_resistance_of_a_dense_graph_is_the_sum_of_inverse_degrees() -> None:
    weights = random_weights(200, 300)
    pinv = torch.linalg.pinv(laplacian_matrix(weights, "combinatorial"), hermitian=True)
    diagonal = pinv.diagonal()
    exact = diagonal[:200, None] + diagonal[200:] - 2 * pinv[:200, 200:]
    closed = resistance(weights)
    assert float((weights * exact).sum()) == pytest.approx(499, abs=1e-6)
    assert ((closed.sensitivity() / exact - 1).abs() < 0.006).all()
    assert closed.total == pytest.approx(float((weights * closed.sensitivity()).sum()))


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        (torch.tensor([[-1.0, 1.0]]), {}, "non-negative"),
        (torch.tensor([[float("nan"), 1.0]]), {}, "finite"),
        (torch.ones(3), {}, "n_a, n_b"),
        (torch.ones(2, 2), {"modes": 4}, "between 1 and 3"),
        (torch.ones(2, 2), {"laplacian": "combinatorial", "solver": "gram"}, "normalised"),
    ],
)
def test_bad_weights_and_options_are_refused(weights: torch.Tensor, options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fiedler(weights, **options)


@pytest.mark.parametrize("options", [{"laplacian": "normalized"}, {"solver": "arpack"}])
def test_unknown_laplacian_or_solver_lists_the_valid_ones(options: dict) -> None:
    with pytest.raises(UnknownNameError, match="Known"):
        fiedler(torch.ones(2, 2), **options)


# ---------------------------------------------------------------- the graphs of a block


def explicit_block(layout, part: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # type: ignore[no-untyped-def]
    """Node by node, without slices or head merging: the full adjacency of one graph and each weight's edge in it."""
    edges, index = {}, {}

    def node(*key: object) -> int:
        return index.setdefault(key, len(index))

    def add(view, source, target) -> None:  # type: ignore[no-untyped-def]
        weight = view.weight.double().abs() / view.weight.double().abs().mean()
        edges[view.name] = [
            [(source(j), target(i), float(weight[i, j])) for j in range(view.in_features)]
            for i in range(view.out_features)
        ]

    if part == "mlp":
        (mlp,) = layout.mlps
        for view in (mlp.gate, mlp.up):
            if view is not None:
                add(view, lambda j: node("X", j), lambda i: node("M", i))
        add(mlp.down, lambda j: node("M", j), lambda i: node("O", i))
    else:
        attention = layout.attention
        group, hd = attention.n_heads // attention.n_kv_heads, attention.head_dim
        for role in "qkv":
            add(getattr(attention, role), lambda j: node("X", j), lambda i, role=role: node(role, i))
        add(attention.o, lambda j: node("v", j // hd // group * hd + j % hd), lambda i: node("O", i))
    adjacency = torch.zeros(len(index), len(index), dtype=torch.float64)
    for rows in edges.values():
        for row in rows:
            for s, t, w in row:
                adjacency[s, t] += w
                adjacency[t, s] += w
    return adjacency, edges


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_block_graph_matches_the_graph_built_node_by_node(tiny, part: str) -> None:  # type: ignore[no-untyped-def]
    """d = 24, m = 64, 4 query and 2 key-value heads: value within 1e-8, contributions within 1e-6."""
    model = tiny("llama", hidden_size=24, intermediate_size=64).double()
    layout = block_layouts(model)[0]
    adjacency, edges = explicit_block(layout, part)
    degrees = adjacency.sum(0)
    values, vectors = torch.linalg.eigh(torch.eye(len(degrees)) - adjacency / (degrees[:, None] * degrees).sqrt())
    u = vectors[:, 1] / degrees.sqrt()
    graph = BlockGraph.from_block(layout)
    assert graph.fiedler()[part].value == pytest.approx(float(values[1]), abs=1e-8)
    contributions = graph.contributions()
    for name, rows in edges.items():
        expected = torch.tensor([[w * float(u[s] - u[t]) ** 2 for s, t, w in row] for row in rows])
        assert torch.allclose(contributions[name].float(), expected, atol=1e-6)


def test_contributions_of_a_graph_sum_to_its_lambda_2_and_w_q_has_mean_one(model) -> None:  # type: ignore[no-untyped-def]
    block = BlockGraph.from_block(block_layouts(model.double())[0])
    contributions, spectra = block.contributions(), block.fiedler()
    q = dict(block.relative_sensitivities(spectra))
    for part, graph in block.graphs.items():
        assert sum(float(contributions[name].sum()) for name in graph.edges) == pytest.approx(spectra[part].value)
        total = sum(float((graph.edges[name].strength() * q[name]).sum()) for name in graph.edges)
        assert total / graph.n_weights == pytest.approx(1, abs=1e-9)


def test_scaling_one_layer_changes_nothing(llama) -> None:  # type: ignore[no-untyped-def]
    layout = block_layouts(llama.double())[0]
    before = BlockGraph.from_block(layout).contributions()
    layout["mlp.up_proj"].weight.mul_(7)
    layout["self_attn.o_proj"].weight.mul_(0.1)
    after = BlockGraph.from_block(layout).contributions()
    assert all(torch.allclose(after[name], before[name], atol=1e-12) for name in before)


def test_permuting_hidden_neurons_permutes_the_scores(llama) -> None:  # type: ignore[no-untyped-def]
    layout = block_layouts(llama.double())[0]
    before = BlockGraph.from_block(layout).contributions()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    mlp = layout.mlps[0]
    for view, permuted in [(v, v.weight[order]) for v in (mlp.gate, mlp.up)] + [(mlp.down, mlp.down.weight[:, order])]:
        view.weight.copy_(permuted)
    after = BlockGraph.from_block(layout).contributions()
    assert torch.allclose(after["mlp.up_proj"], before["mlp.up_proj"][order], atol=1e-10)
    assert torch.allclose(after["mlp.down_proj"], before["mlp.down_proj"][:, order], atol=1e-10)


def test_query_heads_of_a_group_and_gate_and_up_share_their_sensitivity(llama) -> None:  # type: ignore[no-untyped-def]
    layout = block_layouts(llama)[0]
    q = dict(BlockGraph.from_block(layout).relative_sensitivities())
    assert torch.equal(q["mlp.gate_proj"], q["mlp.up_proj"])
    heads = q["self_attn.o_proj"].unflatten(1, (2, 2, 4))  # (d, value head, query head of its group, head_dim)
    assert torch.equal(heads[:, :, 0], heads[:, :, 1])


def test_without_grouped_queries_the_merged_graph_is_the_plain_one(tiny) -> None:  # type: ignore[no-untyped-def]
    layout = block_layout(tiny("llama", num_key_value_heads=4).model.layers[0])
    graph = BlockGraph.from_block(layout).graphs["attention"]
    plain = torch.zeros(48, 32)
    for i, view in enumerate((layout.attention.q, layout.attention.k, layout.attention.v)):
        plain[16 * i : 16 * (i + 1), :16] = view.weight.abs() / view.weight.abs().mean()
    plain[32:, 16:] = (layout.attention.o.weight.abs() / layout.attention.o.weight.abs().mean()).T
    assert torch.allclose(graph.matrix(), plain)


def test_every_expert_has_a_graph_of_its_own(tiny) -> None:  # type: ignore[no-untyped-def]
    block = BlockGraph.from_block(tiny("mixtral").model.layers[0])
    assert list(block.fiedler()) == ["attention", "mlp.0", "mlp.1", "mlp.2"]
    assert len({result.value for result in block.fiedler().values()}) == 4


def test_statistics_make_the_edges_wandas_product(llama) -> None:  # type: ignore[no-untyped-def]
    layout = block_layouts(llama)[0]
    square = torch.rand(16, generator=torch.Generator().manual_seed(0))
    stats = {view.name: LinearStatistics(square.repeat(2)[: view.in_features], None, 1) for view in layout}
    edges = BlockGraph.from_block(layout, stats).graphs["mlp"].edges["mlp.up_proj"]
    product = layout["mlp.up_proj"].weight.abs() * square.sqrt()
    assert torch.allclose(edges.strength(), product / product.mean())
