"""FiedlerPrune: one-shot pruning that keeps each Transformer block well connected, not just each layer accurate.

To a layer's own metric S (Wanda's |W_ij| ||x_j||, say) comes the weight's contribution to the Fiedler value of its
block's channel graph. With S' = S / mean(S) for each matrix and q the sensitivity of lambda_2 (see
:mod:`fairtrial.lm.pruning.graph`), scaled so that strength times q has mean 1 over a graph's weights, the score is

    S' (1 + alpha q)

which for Wanda equals S' + alpha c / mean(c): local importance plus contribution. All matrices of a block compete under
one threshold, so that the graph also decides how dense each matrix stays.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, nn

from fairtrial.causal_lm.layout import BlockLayout, block_layouts
from fairtrial.causal_lm.likelihood import mean_nll
from fairtrial.causal_lm.statistics import LinearStatistics
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.pruning.graph import BlockGraph, Fiedler, Laplacian, Resistance
from fairtrial.lm.pruning.masks import Group
from fairtrial.lm.pruning.oneshot import Calibration, Clock, OneShotPrune, PruneReport, progress_bar

Combine = Literal["linear", "saturating", "power"]
Edge = Literal["activation", "magnitude"]

_ALPHAS = {"linear": (0.05, 0.15, 0.3), "saturating": (0.05, 0.15, 0.3), "power": (0.25, 0.5, 1.0)}  # "auto" tries


@dataclass(frozen=True)
class FiedlerPrune(OneShotPrune):
    """Prune a language model in one shot by local importance and contribution to the connectivity of its blocks.

    Parameters
    ----------
    intra, sparsity, pattern, sequential, window, connectivity, spec
        As in :class:`~fairtrial.lm.pruning.oneshot.OneShotPrune`; ``connectivity`` is on.
    group
        "block" by default. Matrices then differ in density (the value projection keeps most); where all must have the
        same sparsity take "layer", which gains less, or "row", where one mode gains nothing.
    alpha
        Weight of the graph; 0 = the metric alone. ``None`` = .15, or .3 from 70 % sparsity (.5 with "power"). "auto"
        prunes and measures with .05, .15, .3 (.25, .5, 1) and with the metric alone in rows, and takes what has the
        lowest loss on the last quarter of the calibration text: five times the work, and a copy of the weights.
    modes
        How many eigenvectors the sensitivity sums over; 1 is the paper's Fiedler vector. "all" takes the whole spectrum
        in closed form (effective resistance); it compares only within rows or N:M groups.
    combine
        "linear" S (1 + alpha q), "saturating" S (1 + alpha q / (1 + q)), or "power" S q^alpha, for ``modes="all"``.
    laplacian
        "normalised", or "combinatorial", whose eigenvector on dense weights sits on a single channel (warned of).
    edge
        Edge strength: "activation" |W_ij| ||x_j||, or "magnitude" |W_ij|.
    rounds
        Raise the sparsity in this many equal steps, the graph rebuilt on the edges that are left.

    Examples
    --------
    >>> import torch
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> report = FiedlerPrune(intra="wanda", sparsity=0.5).prune(model, None, torch.arange(16).view(2, 8))
    >>> report.frame[["layer", "graph", "alpha"]].values.tolist(), report.sparsity
    ([[0, 'attention', 0.15], [0, 'mlp', 0.15]], 0.5)
    """

    group: Group = "block"
    connectivity: bool = True
    alpha: float | Literal["auto"] | None = None
    modes: int | Literal["all"] = 1
    combine: Combine = "linear"
    laplacian: Laplacian = "normalised"
    edge: Edge = "activation"
    rounds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind, value, known in (
            ("combine", self.combine, Combine),
            ("Laplacian", self.laplacian, Laplacian),
            ("edge", self.edge, Edge),
        ):
            if value not in get_args(known):
                raise UnknownNameError(kind, value, get_args(known))
        if self.modes != "all" and not (isinstance(self.modes, int) and self.modes >= 1):
            raise InputError(f"modes must be a positive integer or 'all', got {self.modes!r}")
        if self.modes == "all" and self.pattern is None and self.group != "row":
            raise InputError(
                "modes='all' compares weights only within a row or an N:M group: give group='row' or pattern="
            )
        if self.combine == "power" and self.modes != "all":
            raise InputError("combine='power' is for modes='all': a power of the Fiedler sensitivity ruins the model")
        if self.alpha not in (None, "auto") and not (isinstance(self.alpha, (int, float)) and self.alpha >= 0):
            raise InputError(f"alpha must be a number >= 0, 'auto' or None, got {self.alpha!r}")
        if self.rounds < 1 or (self.rounds > 1 and self.pattern is not None):
            raise InputError(
                "rounds must be a positive integer, and 1 with a pattern, whose sparsity cannot be raised in steps"
            )

    def prune(self, model: nn.Module, tok: Any, calibration: Calibration, *, progress: bool = False) -> PruneReport:
        """Prune ``model`` in place; see :meth:`OneShotPrune.prune`."""
        if self.alpha == "auto":
            ids = self._windows(model, tok, calibration)
            self._check_model(model)
            if len(ids) < 4:
                raise InputError(
                    f"alpha='auto' needs 4 windows of text, three to prune by and one to choose by; got {len(ids)}"
                )
            candidates = self._candidates()
            blocks, runs = len(block_layouts(model, self.spec)), len(candidates) + 1
            with progress_bar(f"Pruning {blocks} blocks {runs} times", blocks * runs, shown=progress) as step:
                return self._best(candidates, model, ids, step)._run(model, ids, step)
        return super().prune(model, tok, calibration, progress=progress)

    def _candidates(self) -> list[FiedlerPrune]:
        """Return what alpha="auto" chooses from."""
        none = replace(self, alpha=0.0, group="row", rounds=1, modes=1, combine="linear")
        return [none, *(replace(self, alpha=alpha) for alpha in _ALPHAS[self.combine])]

    def _best(
        self, candidates: list[FiedlerPrune], model: nn.Module, ids: Tensor, step: Callable[[], object]
    ) -> FiedlerPrune:
        """Return the candidate whose pruned model has the lowest mean loss on the last quarter of the windows."""
        cut = len(ids) - len(ids) // 4
        parameters = {view.parameter for layout in block_layouts(model, self.spec) for view in layout}
        dense = [(parameter, parameter.detach().clone()) for parameter in parameters]
        losses = []
        for candidate in candidates:
            candidate._run(model, ids[:cut], step)
            losses.append(mean_nll(model, ids[cut:]))
            for parameter, weight in dense:
                parameter.detach().copy_(weight)
        return candidates[losses.index(min(losses))]

    @property
    def _alpha(self) -> float:
        if self.alpha is not None:
            return float(self.alpha)
        if self.combine == "power":
            return 0.5
        return 0.3 if self.pattern is None and self.sparsity >= 0.7 else 0.15

    def _prune_block(
        self, layout: BlockLayout, stats: Mapping[str, LinearStatistics], clock: Clock
    ) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        with clock("graph"):
            graph = BlockGraph.from_block(layout, stats if self.edge == "activation" else None)
            before = self._fiedler(graph) if self.connectivity or (self._alpha > 0 and self.modes != "all") else {}
        self._warn_if_localised(layout.name, before)
        for step in range(1, self.rounds + 1):
            with clock("graph"):
                spectra = self._spectra(graph, before if step == 1 else {})
            with clock("scores"):
                factors = self._factors(graph, spectra) if self._alpha > 0 else ()
                keep = self._sparsify(layout, stats, self.sparsity * step / self.rounds, factors)
        with clock("graph"):
            return self._rows(graph, before, keep, self._alpha), keep

    def _fiedler(self, graph: BlockGraph) -> dict[str, Fiedler]:
        return graph.fiedler(laplacian=self.laplacian, modes=1 if self.modes == "all" else self.modes)

    def _spectra(self, graph: BlockGraph, solved: Mapping[str, Fiedler]) -> Mapping[str, Fiedler | Resistance]:
        """Return what the sensitivities are made of; ``solved`` are the graph's Fiedler vectors if they are known."""
        if self._alpha == 0:
            return {}
        return graph.resistance() if self.modes == "all" else solved or self._fiedler(graph)

    def _factors(self, graph: BlockGraph, spectra: Mapping[str, Fiedler | Resistance]) -> Iterator[tuple[str, Tensor]]:
        """Yield view name and what its scores are multiplied by, (out, in)."""
        alpha = self._alpha
        for name, q in self._sensitivities(graph, spectra):
            if self.combine == "saturating":
                q.div_(1 + q)
            yield name, q.pow_(alpha) if self.combine == "power" else q.mul_(alpha).add_(1)

    def _sensitivities(
        self, graph: BlockGraph, spectra: Mapping[str, Fiedler | Resistance]
    ) -> Iterator[tuple[str, Tensor]]:
        return graph.relative_sensitivities(spectra)

    def _warn_if_localised(self, block: str, spectra: Mapping[str, Fiedler]) -> None:
        for name, result in spectra.items():
            if self.laplacian == "combinatorial" and 0 < result.participation < 3:
                warnings.warn(
                    f"{block}: the combinatorial Fiedler vector of {name} sits on {result.participation:.2f} channels, "
                    "so the score protects little else: laplacian='normalised' spreads",
                    stacklevel=5,
                )
