"""The Fiedler value of a Transformer block's channel graphs, and what every weight contributes to it.

Nodes are channels, edges are weights. Both graphs of a block, X - M - O of its MLP and X - {Q, K, V} - O of its
attention, are bipartite (the middle part against X and O), so one non-negative matrix B of shape (n_a, n_b) says
everything. With degrees D_a, D_b and the Laplacian L = D - A, the Fiedler value lambda_2 is the second smallest
eigenvalue of L u = lambda D u (normalised, u' D u = 1) or of L v = lambda v (combinatorial), and

    lambda_2 = sum over edges of w_ij (u_i - u_j)^2

exactly: the term of an edge is its *contribution*, and removing any set of edges lowers the combinatorial lambda_2 by
at least the sum of their contributions. The normalised problem is a singular value problem, lambda_k = 1 - sigma_k of
D_a^-1/2 B D_b^-1/2, so the (n_a + n_b)-square Laplacian is never built for a graph of any size.

On dense weights the combinatorial Fiedler vector sits on the one node of least degree; the normalised one spreads over
tens to hundreds of channels and is the default.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from fairtrial.causal_lm.layout import AttentionLayout, BlockLayout, MLPLayout, block_layout
from fairtrial.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from fairtrial.causal_lm.statistics import LinearStatistics

Laplacian = Literal["normalised", "combinatorial"]
Solver = Literal["auto", "dense", "gram", "krylov"]

_DENSE_UP_TO = 256  # nodes: the whole Laplacian is decomposed, every tie and null space is seen
_FEW_MODES = 16  # block Lanczos beats eigh of the Gram matrix (threefold at 1536 x 1152, one mode) up to about here


# ---------------------------------------------------------------- one graph


@dataclass(frozen=True, eq=False)
class Fiedler:
    """The Fiedler value of a bipartite graph and the eigenvectors its sensitivities are made of.

    Attributes
    ----------
    value
        lambda_2; 0 for a disconnected graph.
    eigenvalues
        (K,): lambda_2 <= ... of the modes kept, a tied eigenspace being kept whole.
    weights
        (K,): lambda_2 / lambda_k, times the share of its eigenspace that ``modes`` asked for.
    a, b
        (n_a, K) and (n_b, K): eigenvectors on the two parts, u' D u = 1 (normalised) or v' v = 1 (combinatorial); 0 on
        isolated nodes and everywhere on a disconnected graph.
    participation
        1 / sum p^2 of the mass p the Fiedler vector has on each node: 1 = a single channel, n = all of them evenly, 0 =
        there is no such vector, the graph being disconnected.
    components
        (n_a + n_b,): the connected component of every node, part a first; -1 = isolated (no edge, left out).
    laplacian
        Which eigenproblem was solved.
    """

    value: float
    eigenvalues: Tensor = field(repr=False)
    weights: Tensor = field(repr=False)
    a: Tensor = field(repr=False)
    b: Tensor = field(repr=False)
    participation: float
    components: Tensor = field(repr=False)
    laplacian: Laplacian = "normalised"

    @property
    def n_components(self) -> int:
        """Number of connected components, isolated nodes not counted."""
        return int(self.components.max()) + 1

    @property
    def n_isolated(self) -> int:
        """Number of channels without any edge."""
        return int((self.components < 0).sum())

    @property
    def total(self) -> float:
        """Sum over all edges of w_ij r_ij: lambda_2 times the number of modes."""
        return float((self.weights * self.eigenvalues).sum())

    def sensitivity(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return r_ij = sum_k weights_k (u_ki - u_kj)^2 for a block of B, shape (rows, columns)."""
        a, b = self.a[rows], self.b[columns]
        r = a.new_zeros(len(a), len(b))
        for k, weight in enumerate(self.weights.tolist()):  # one mode at a time: never (n_a, n_b, K)
            r += (a[:, k, None] - b[:, k]).square_().mul_(weight)
        return r

    def derivative(self) -> Tensor:
        """Return d lambda_2 / d w_ij, (n_a, n_b), averaged over the eigenspace of lambda_2.

        Combinatorial: (v_i - v_j)^2, which is the sensitivity. Normalised: (u_i - u_j)^2 - lambda_2 (u_i^2 + u_j^2), as
        a weight also adds to the degrees; it is orthogonal to the weights, for scale does not matter.
        """
        tied = _ties(self.eigenvalues)[0]
        share = torch.full_like(self.eigenvalues[tied], 1 / len(tied))
        first = replace(self, eigenvalues=self.eigenvalues[tied], weights=share, a=self.a[:, tied], b=self.b[:, tied])
        if self.laplacian == "combinatorial":
            return first.sensitivity()
        mass_a, mass_b = first.a.square().mean(1), first.b.square().mean(1)
        return first.sensitivity() - self.value * (mass_a[:, None] + mass_b)


@dataclass(frozen=True, eq=False)
class Resistance:
    """The limit of all modes: on a dense graph the effective resistance of an edge is 1/D_i + 1/D_j.

    Summing (lambda_2/lambda_k)(v_ki - v_kj)^2 over the whole combinatorial spectrum gives lambda_2 times the effective
    resistance of the edge (Spielman and Srivastava's leverage), for which dense graphs have this closed form. It needs
    no eigensolver. ``a`` is (n_a,), ``b`` is (n_b,): inverse degrees, 0 on isolated nodes.
    """

    a: Tensor
    b: Tensor

    @property
    def total(self) -> float:
        """Sum over all edges of w_ij r_ij: the number of nodes that have an edge."""
        return float((self.a > 0).sum() + (self.b > 0).sum())

    def sensitivity(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Return r_ij = 1/D_i + 1/D_j for a block of B, shape (rows, columns)."""
        return self.a[rows, None] + self.b[columns]


def resistance(weights: Tensor) -> Resistance:
    """Return the closed-form effective resistances of a dense bipartite graph.

    Parameters
    ----------
    weights
        B, (n_a, n_b), non-negative.

    Examples
    --------
    >>> r = resistance(torch.ones(2, 3))
    >>> r.sensitivity()[0, 0].item(), r.total     # 1/3 + 1/2; the exact resistance of K_{2,3} is 2/3
    (0.833..., 5.0)
    """
    _check_weights(weights)
    inverse = (_inverse(weights.sum(dim)) for dim in (1, 0))
    return Resistance(*inverse)


def fiedler(
    weights: Tensor, *, laplacian: Laplacian = "normalised", modes: int = 1, solver: Solver = "auto"
) -> Fiedler:
    """Solve for the Fiedler value and vector of a bipartite graph.

    Parameters
    ----------
    weights
        B, (n_a, n_b), non-negative and finite; half precision is solved in float32.
    laplacian
        "normalised" (L u = lambda D u) or "combinatorial" (L v = lambda v).
    modes
        K, the number of eigenvectors above the trivial one the sensitivities sum over; 1 = the Fiedler vector.
    solver
        "dense" decomposes the Laplacian itself, "gram" the Gram matrix of the smaller part (normalised only), "krylov"
        is block Lanczos with the trivial vector projected out (combinatorial: on the pseudo-inverse, by the Schur
        complement of the smaller part; an eigenspace wider than 4 is not seen whole). "auto" chooses by size.

    Returns
    -------
    Fiedler
        On the device of ``weights``.

    Raises
    ------
    InputError, UnknownNameError
        B is not a non-negative finite matrix, ``modes`` is not in 1..n-1, or an option is unknown.

    Examples
    --------
    A path of three nodes, the middle one being part a:

    >>> path = fiedler(torch.ones(1, 2, dtype=torch.float64), laplacian="combinatorial")
    >>> round(path.value, 12), (torch.ones(1, 2) * path.sensitivity()).numpy().round(12).tolist()
    (1.0, [[0.5, 0.5]])
    """
    _check_weights(weights)
    _check_option("Laplacian", laplacian, Laplacian)
    _check_option("solver", solver, Solver)
    work = weights if weights.dtype == torch.float64 else weights.float()
    components = _components(work)
    live_a, live_b = (components >= 0).split(list(work.shape))
    n = int(live_a.sum() + live_b.sum())
    if components.max() != 0:  # disconnected, or no edge at all: lambda_2 = 0, and removing an edge cannot lower it
        return Fiedler(0.0, work.new_zeros(1), work.new_zeros(1), work.new_zeros(work.shape[0], 1),
                       work.new_zeros(work.shape[1], 1), 0.0, components, laplacian)  # fmt: skip
    if not 1 <= modes < n:
        raise InputError(f"modes must be between 1 and {n - 1} for a graph of {n} nodes, got {modes}; or use 'all'")
    core = work if n == sum(work.shape) else work[live_a][:, live_b]
    wide = core.shape[0] < core.shape[1]  # the solvers take the smaller part as b
    values, vectors_a, vectors_b = _eigenpairs(core.T if wide else core, laplacian, modes, solver)
    if wide:
        vectors_a, vectors_b = vectors_b, vectors_a

    kept, weight = _kept_modes(values, modes)
    a, b = (work.new_zeros(size, len(kept)) for size in work.shape)
    a[live_a], b[live_b] = vectors_a[:, kept], vectors_b[:, kept]
    mass_a, mass_b = a.square(), b.square()
    if laplacian == "normalised":  # u' D u = 1
        mass_a, mass_b = mass_a * work.sum(1)[:, None], mass_b * work.sum(0)[:, None]
    first = _ties(values[kept])[0]
    mass = torch.cat([mass_a, mass_b])[:, first].mean(1)  # (n,), sums to 1
    value = float(values[0])
    return Fiedler(
        value, values[kept], weight, a, b, float(1 / mass.square().sum().clamp(min=1e-30)), components, laplacian
    )


def _check_weights(weights: Tensor) -> None:
    if weights.ndim != 2 or not weights.is_floating_point():
        raise InputError(f"B must be a floating (n_a, n_b) matrix, got {weights.dtype} of shape {tuple(weights.shape)}")
    if not (torch.isfinite(weights).all() and (weights >= 0).all()):
        raise InputError("B must be non-negative and finite: take absolute values, and look for NaN in the activations")


def _check_option(kind: str, value: object, known: object) -> None:
    if value not in get_args(known):
        raise UnknownNameError(kind, value, get_args(known))


def _inverse(degrees: Tensor) -> Tensor:
    return torch.where(degrees > 0, 1 / degrees, 0.0)


def _components(weights: Tensor) -> Tensor:
    """Label the connected components, (n_a + n_b,), -1 where a node has no edge: each row of B is read about once."""
    edges = weights > 0
    label_a, label_b = (torch.full((size,), -1, device=weights.device) for size in weights.shape)
    has_edge = edges.any(1)
    component = 0
    while (todo := has_edge & (label_a < 0)).any():
        frontier = todo.nonzero()[:1, 0]  # breadth first, from part a to part b and back
        while len(frontier):
            label_a[frontier] = component
            reached = edges[frontier].any(0) & (label_b < 0)
            label_b[reached] = component
            frontier = (edges[:, reached].any(1) & (label_a < 0)).nonzero()[:, 0]
        component += 1
    return torch.cat([label_a, label_b])


def _ties(values: Tensor) -> list[Tensor]:
    """Group ascending eigenvalues into eigenspaces: neighbours closer than the relative tolerance are one value."""
    tolerance = 1e-6 if values.dtype == torch.float64 else 1e-5
    breaks = (values.diff() > tolerance * values[1:].abs()).nonzero()[:, 0] + 1
    return list(torch.arange(len(values), device=values.device).tensor_split(breaks.cpu()))


def _kept_modes(values: Tensor, modes: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the first ``modes`` eigenvalues, the last eigenspace whole, and their weights."""
    kept: list[Tensor] = []
    shares: list[Tensor] = []
    for group in _ties(values):
        left = modes - sum(len(k) for k in kept)
        if left <= 0:
            break
        kept.append(group)
        shares.append(values.new_full((len(group),), min(1.0, left / len(group))))
    index = torch.cat(kept)
    return index, torch.cat(shares) * values[0] / values[index]


# ---------------------------------------------------------------- solvers: B connected, n_a >= n_b


def _eigenpairs(weights: Tensor, laplacian: Laplacian, modes: int, solver: Solver) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues (K',) above the trivial one and eigenvectors (n_a, K'), (n_b, K'), K' >= modes."""
    n_a, n_b = weights.shape
    if solver == "auto" and (n_a + n_b <= _DENSE_UP_TO or modes >= n_b):
        solver = "dense"
    elif solver == "auto":
        solver = "krylov" if laplacian == "combinatorial" or modes <= _FEW_MODES else "gram"
    if solver == "gram" and laplacian == "combinatorial":
        raise InputError("solver 'gram' is for the normalised Laplacian: use 'dense' or 'krylov'")
    if solver == "dense":
        return _dense(weights, laplacian)
    if laplacian == "combinatorial":
        return _shift_invert(weights, modes)
    values, vectors_a, vectors_b = (_gram if solver == "gram" else _lanczos)(weights, modes)
    if values[min(modes, len(values)) - 1] > 1 - 1e-4:  # sigma near 0: its eigenspace has vectors no singular pair has
        return _dense(weights, laplacian)
    return values, vectors_a, vectors_b


def _dense(weights: Tensor, laplacian: Laplacian) -> tuple[Tensor, Tensor, Tensor]:
    n_a = len(weights)
    degrees = torch.cat([weights.sum(1), weights.sum(0)])
    full = torch.diag(degrees)
    full[:n_a, n_a:], full[n_a:, :n_a] = -weights, -weights.T
    scale = degrees.rsqrt() if laplacian == "normalised" else torch.ones_like(degrees)
    values, vectors = torch.linalg.eigh(scale[:, None] * full * scale)
    vectors = scale[:, None] * vectors
    return values[1:], vectors[:n_a, 1:], vectors[n_a:, 1:]


def _normalised(weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return N = D_a^-1/2 B D_b^-1/2, its trivial right singular vector, and D_a^-1/2, D_b^-1/2."""
    degree_a, degree_b = weights.sum(1), weights.sum(0)
    scale_a, scale_b = degree_a.rsqrt(), degree_b.rsqrt()
    trivial = degree_b.sqrt() / degree_b.sum().sqrt()
    return scale_a[:, None] * weights * scale_b, trivial, scale_a, scale_b


def _gram(weights: Tensor, modes: int) -> tuple[Tensor, Tensor, Tensor]:
    n, trivial, scale_a, scale_b = _normalised(weights)
    squares, right = torch.linalg.eigh(n.T @ n - torch.outer(trivial, trivial))  # sigma_1 deflated to 0
    top = slice(-min(modes + _BLOCK, len(squares) - 1), None)
    return _from_singular(n, squares[top], right[:, top], scale_a, scale_b)


def _lanczos(weights: Tensor, modes: int) -> tuple[Tensor, Tensor, Tensor]:
    n, trivial, scale_a, scale_b = _normalised(weights)

    def apply(x: Tensor) -> Tensor:  # (n_b, p); the trivial pair projected out
        return n.T @ (n @ x) - trivial[:, None] * (trivial @ x)

    noise = 100 * torch.finfo(n.dtype).eps  # of products with N, whose largest singular value is 1
    squares, right = _top_eigenpairs(apply, n.shape[1], modes, like=n, noise=noise)
    return _from_singular(n, squares, right, scale_a, scale_b)


def _from_singular(
    n: Tensor, squares: Tensor, right: Tensor, scale_a: Tensor, scale_b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn ascending sigma^2 and right singular vectors of N into ascending lambda and u = D^-1/2 (y_a, y_b)/sqrt 2."""
    sigma, right = squares.clamp(min=0).sqrt().flip(0), right.flip(1)
    left = n @ right / sigma.clamp(min=torch.finfo(n.dtype).tiny)
    return 1 - sigma, scale_a[:, None] * left / 2**0.5, scale_b[:, None] * right / 2**0.5


def _shift_invert(weights: Tensor, modes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Combinatorial modes: the largest eigenvalues of the pseudo-inverse of L are the inverses of the smallest of L.

    L x = f with 1'f = 0 is solved by eliminating part a: S x_b = f_b + B' D_a^-1 f_a with the Schur complement
    S = D_b - B' D_a^-1 B, whose null vector 1 is lifted by a rank-one term that does not touch the solution.
    """
    n_a, n_b = weights.shape
    degree_a, degree_b = weights.sum(1), weights.sum(0)
    walk = weights / degree_a[:, None]  # D_a^-1 B
    schur = torch.diag(degree_b) - weights.T @ walk + degree_b.mean() / n_b
    factor = torch.linalg.cholesky(schur)

    def apply(f: Tensor) -> Tensor:  # (n_a + n_b, p) -> L^+ f
        f = f - f.mean(0)
        f_a, f_b = f[:n_a], f[n_a:]
        x_b = torch.cholesky_solve(f_b + walk.T @ f_a, factor)
        x = torch.cat([f_a / degree_a[:, None] + walk @ x_b, x_b])
        return x - x.mean(0)

    inverse, vectors = _top_eigenpairs(apply, n_a + n_b, modes, like=weights)
    return 1 / inverse.flip(0), vectors[:n_a].flip(1), vectors[n_a:].flip(1)


_BLOCK = 4  # vectors a Lanczos step adds beside the modes asked for: eigenspaces up to this wide are resolved
_STEPS, _RESTARTS = 10, 60


def _top_eigenpairs(
    apply: Callable[[Tensor], Tensor], n: int, k: int, *, like: Tensor, noise: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest eigenvalues (ascending) and vectors of a symmetric positive semi-definite operator.

    Block Lanczos with full reorthogonalisation and Rayleigh-Ritz, restarted from the best Ritz vectors until the
    residuals are below 1e-5 (float32) or 1e-10 (float64) of the largest eigenvalue, or below the noise of the operator.
    More than ``k`` come back.
    """
    width = min(k + _BLOCK, n)
    tolerance = 1e-10 if like.dtype == torch.float64 else 1e-5
    generator = torch.Generator(device=like.device).manual_seed(0)  # any start does: the answer does not depend on it
    start = torch.randn(n, width, dtype=like.dtype, device=like.device, generator=generator)
    for _ in range(_RESTARTS):
        basis = torch.linalg.qr(start).Q  # (n, s), s grows by width
        image = block_image = apply(basis)
        for _ in range(min(_STEPS, n // width - 1)):
            block = block_image
            for _ in range(2):  # twice is enough (Kahan): orthogonal to working precision
                block = torch.linalg.qr(block - basis @ (basis.T @ block)).Q
            block_image = apply(block)
            basis, image = torch.cat([basis, block], 1), torch.cat([image, block_image], 1)
        inner = basis.T @ image
        values, rotation = torch.linalg.eigh((inner + inner.T) / 2)
        values, rotation = values[-width:], rotation[:, -width:]
        start = basis @ rotation
        residual = float((image @ rotation - start * values)[:, -k:].norm(dim=0).max())
        if residual <= max(tolerance * float(values[-1]), noise):
            return values, start
    warnings.warn(f"the Fiedler solver stopped at a residual of {residual:.1e}", stacklevel=2)
    return values, start


# ---------------------------------------------------------------- the graphs of a block


@dataclass(frozen=True, eq=False)
class Edges:
    """Where one weight matrix lies in B, and how strong its edges are: |W_ij| scale_j, of mean 1 when built.

    Attributes
    ----------
    weight
        (out, in), a live view of the model: strengths follow the weight when it is pruned.
    scale
        (in,): the norm of each input channel over the mean of |W_ij| ||x_j||.
    rows, columns
        The block of B; rows are nodes of the middle part.
    outward
        Whether the matrix leads out of the middle part, so that its inputs are rows.
    queries_per_value
        How many groups of ``head_dim`` inputs share their node: the query heads of one value head.
    head_dim
        Channels of a head; used where ``queries_per_value`` > 1.
    """

    weight: Tensor = field(repr=False)
    scale: Tensor = field(repr=False)
    rows: slice
    columns: slice
    outward: bool = False
    queries_per_value: int = 1
    head_dim: int = 1

    def strength(self) -> Tensor:
        """Return |W_ij| scale_j, (out, in)."""
        return self.weight.abs().to(self.scale.dtype) * self.scale

    def to_graph(self, values: Tensor) -> Tensor:
        """Lay per-weight values (out, in) into a block of B (rows, columns), parallel edges added."""
        if not self.outward:
            return values
        values = values.T  # (value heads * queries * head_dim, d)
        return values.unflatten(0, (-1, self.queries_per_value, self.head_dim)).sum(1).flatten(0, 1)

    def to_weight(self, block: Tensor) -> Tensor:
        """Give every weight (out, in) the value of its edge in a block of B (rows, columns)."""
        if not self.outward:
            return block
        heads = block.unflatten(0, (-1, 1, self.head_dim)).expand(-1, self.queries_per_value, -1, -1)
        return heads.flatten(0, 2).T


@dataclass(frozen=True, eq=False)
class Graph:
    """One bipartite graph of a block: its shape (n_a, n_b) and the matrices its edges come from, by view name."""

    shape: tuple[int, int]
    edges: Mapping[str, Edges]

    @property
    def n_weights(self) -> int:
        """|E|: the number of weights, gate, up and every head's o_proj counted singly."""
        return sum(edges.weight.numel() for edges in self.edges.values())

    def matrix(self) -> Tensor:
        """Build B, (n_a, n_b), from the weights as they are now."""
        first = next(iter(self.edges.values()))
        weights = first.scale.new_zeros(self.shape)
        for edges in self.edges.values():
            weights[edges.rows, edges.columns] += edges.to_graph(edges.strength())
        return weights

    def sensitivity(self, name: str, spectrum: Fiedler | Resistance) -> Tensor:
        """Return r of every weight of one matrix, (out, in)."""
        edges = self.edges[name]
        return edges.to_weight(spectrum.sensitivity(edges.rows, edges.columns))


class BlockGraph:
    """The channel graphs of one decoder block: "attention" and "mlp" (a block of experts: "mlp.0", "mlp.1", ...).

    MLP: inputs X and outputs O against the hidden channels M; the edges of gate and up are parallel, so they add.
    Attention: X and O against Q, K and V; a value channel feeds the same input of o_proj in every query head of its
    group, and these are one node. Queries and keys hang on X as leaves. Each matrix is divided by the mean strength of
    its edges, so that no layer dominates by scale; biases take no part.

    Parameters
    ----------
    graphs
        :class:`Graph` by name; :meth:`from_block` makes them.
    """

    def __init__(self, graphs: Mapping[str, Graph]) -> None:
        self.graphs = dict(graphs)

    @classmethod
    def from_block(
        cls, block: nn.Module | BlockLayout, stats: Mapping[str, LinearStatistics] | None = None
    ) -> BlockGraph:
        """Build the graphs of a decoder block.

        Parameters
        ----------
        block
            A decoder block of a known architecture, or its layout.
        stats
            Activation statistics by view name: edge strengths are then |W_ij| ||x_j||_2 (Wanda's product). Without
            them, and for experts no token reached, they are |W_ij|.

        Examples
        --------
        >>> from transformers import AutoModelForCausalLM, Qwen2Config
        >>> config = Qwen2Config(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> graph = BlockGraph.from_block(AutoModelForCausalLM.from_config(config).model.layers[0])
        >>> {name: round(result.value, 1) for name, result in graph.fiedler().items()}.keys()
        dict_keys(['attention', 'mlp'])
        >>> contributions = graph.contributions()
        >>> contributions["mlp.up_proj"].shape                              # (m, d)
        torch.Size([12, 8])
        >>> mlp = sum(float(c.sum()) for name, c in contributions.items() if name.startswith("mlp"))
        >>> abs(mlp - graph.fiedler()["mlp"].value) < 1e-5
        True
        """
        layout = block if isinstance(block, BlockLayout) else block_layout(block)
        graphs = {}
        if layout.attention is not None:
            graphs["attention"] = _attention_graph(layout.attention, stats)
        for i, mlp in enumerate(layout.mlps):
            graphs["mlp" if len(layout.mlps) == 1 else f"mlp.{i}"] = _mlp_graph(mlp, stats)
        return cls(graphs)

    def fiedler(
        self, *, laplacian: Laplacian = "normalised", modes: int = 1, solver: Solver = "auto"
    ) -> dict[str, Fiedler]:
        """Return :func:`fiedler` of every graph, by graph name."""
        return {
            name: fiedler(graph.matrix(), laplacian=laplacian, modes=modes, solver=solver)
            for name, graph in self.graphs.items()
        }

    def resistance(self) -> dict[str, Resistance]:
        """Return :func:`resistance` of every graph, by graph name."""
        return {name: resistance(graph.matrix()) for name, graph in self.graphs.items()}

    def contributions(self, spectra: Mapping[str, Fiedler | Resistance] | None = None) -> dict[str, Tensor]:
        """Return w_e r_e of every weight, (out, in) by view name; a graph's sum is its lambda_2 (at one mode).

        ``spectra`` come from :meth:`fiedler` (the default) or :meth:`resistance`.
        """
        spectra = self.fiedler() if spectra is None else spectra
        return {
            name: graph.edges[name].strength() * graph.sensitivity(name, spectra[part])
            for part, graph in self.graphs.items()
            for name in graph.edges
        }

    def relative_sensitivities(
        self, spectra: Mapping[str, Fiedler | Resistance] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield view name and q, (out, in), one matrix at a time.

        q is r scaled so that w q has mean 1 over the weights of a graph; at one mode q_e = |E| (u_i - u_j)^2 /
        lambda_2. A disconnected graph has no opinion: q = 0.
        """
        spectra = self.fiedler() if spectra is None else spectra
        for part, graph in self.graphs.items():
            total = spectra[part].total
            for name in graph.edges:
                q = graph.sensitivity(name, spectra[part])
                yield name, q.mul_(graph.n_weights / total) if total > 0 else q.zero_()


def _edges(name: str, weight: Tensor, stats: Mapping[str, LinearStatistics] | None, **place: object) -> Edges:
    magnitude = weight.abs().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    norm = torch.ones_like(magnitude[0])
    if stats is not None and stats[name].n_tokens > 0:
        norm = stats[name].x_norm.to(magnitude)
    mean = (magnitude.mean(0) @ norm) / len(norm)
    return Edges(weight, norm / mean.clamp(min=torch.finfo(norm.dtype).tiny), **place)  # type: ignore[arg-type]


def _mlp_graph(mlp: MLPLayout, stats: Mapping[str, LinearStatistics] | None) -> Graph:
    m, d = mlp.up.weight.shape
    every, inputs, outputs = slice(0, m), slice(0, d), slice(d, d + mlp.down.out_features)
    edges = {
        view.name: _edges(view.name, view.weight, stats, rows=every, columns=inputs)
        for view in (mlp.gate, mlp.up)
        if view is not None
    }
    edges[mlp.down.name] = _edges(mlp.down.name, mlp.down.weight, stats, rows=every, columns=outputs, outward=True)
    return Graph((m, outputs.stop), edges)


def _attention_graph(attention: AttentionLayout, stats: Mapping[str, LinearStatistics] | None) -> Graph:
    d, edges, start = attention.q.in_features, {}, 0
    for view in (attention.q, attention.k, attention.v):
        rows = slice(start, start + view.out_features)
        edges[view.name] = _edges(view.name, view.weight, stats, rows=rows, columns=slice(0, d))
        start = rows.stop
    o = attention.o
    edges[o.name] = _edges(
        o.name, o.weight, stats, rows=rows, columns=slice(d, d + o.out_features), outward=True,
        queries_per_value=attention.n_heads // attention.n_kv_heads, head_dim=attention.head_dim,
    )  # fmt: skip
    return Graph((start, d + o.out_features), edges)
