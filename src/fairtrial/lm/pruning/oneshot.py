"""The loop every one-shot pruning method here runs: measure a block, score its weights, zero the lowest, go on.

Blocks are visited in order of depth with the inputs they really get (see :mod:`fairtrial.causal_lm.capture`): those
the dense model gives, or with ``sequential=True`` those of the model as pruned so far. One block's statistics and
scores are in memory at a time.
"""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, get_args

import pandas as pd
import torch
from torch import Tensor, nn

from fairtrial.causal_lm.capture import propagate
from fairtrial.causal_lm.layout import BlockLayout, ChainSpec, LinearView, block_layouts
from fairtrial.causal_lm.statistics import LinearStatistics, second_moments
from fairtrial.causal_lm.windows import windows
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.pruning.baselines import IntraMetric, SparseGPT, intra_metric
from fairtrial.lm.pruning.graph import BlockGraph, Fiedler
from fairtrial.lm.pruning.masks import (
    Group,
    check_sparsity,
    keep_masks,
    lowest,
    pack_bits,
    parse_pattern,
    unpack_bits,
    zeros_among,
)

Calibration: TypeAlias = str | Path | Sequence[str] | Tensor
"""A .txt or .jsonl file or a folder of them, a list of documents, or token ids (n, window)."""


@dataclass(frozen=True)
class OneShotPrune:
    """Prune every matrix of a language model's decoder blocks by a layer's own metric, in place, without retraining.

    Embeddings, head, norms and routers are left alone. With ``intra=Wanda()`` and the defaults this is Wanda.

    Parameters
    ----------
    intra
        The importance of a weight to its layer: an object of :mod:`fairtrial.lm.pruning.baselines`, its name, or any
        object with ``scores(weight, stats)``.
    sparsity
        Share of zeros in [0, 1).
    pattern
        "N:M": of every M consecutive inputs N are kept; overrides ``sparsity`` and ``group``.
    group
        What competes: the weights of a "row", of a "layer" (one matrix), or of a "block" (all its matrices, each
        divided by the mean of its scores).
    sequential
        Calibrate each block on what the already pruned blocks give, instead of the dense model.
    window
        Tokens of a calibration window.
    connectivity
        Also solve for the Fiedler value of every graph before and after, for the report.
    spec
        How the blocks of an architecture unknown to :mod:`fairtrial.causal_lm.layout` are built.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> report = OneShotPrune("wanda", sparsity=0.5).prune(model, None, torch.arange(16).view(2, 8))
    >>> (model.model.layers[0].mlp.down_proj.weight == 0).sum(1).tolist()
    [6, 6, 6, 6, 6, 6, 6, 6]
    """

    intra: IntraMetric | str = "wanda"
    _: KW_ONLY
    sparsity: float = 0.5
    pattern: str | None = None
    group: Group = "row"
    sequential: bool = False
    window: int = 384
    connectivity: bool = False
    spec: ChainSpec | None = None

    def __post_init__(self) -> None:
        intra_metric(self.intra)
        check_sparsity(self.sparsity)
        if self.pattern is not None:
            parse_pattern(self.pattern)
        if self.group not in get_args(Group):
            raise UnknownNameError("group", self.group, get_args(Group))

    def prune(self, model: nn.Module, tok: Any, calibration: Calibration, *, progress: bool = False) -> PruneReport:
        """Prune ``model`` in place.

        Parameters
        ----------
        model
            A causal language model of transformers, all of it on one device.
        tok
            Its tokenizer; not used where ``calibration`` is token ids.
        calibration
            Representative text; see :data:`Calibration`. 4096 tokens are usual for small models.
        progress
            Show a progress bar.

        Returns
        -------
        PruneReport

        Raises
        ------
        InputError
            The text is shorter than one window or longer than the model's context; token ids outside its vocabulary; a
            pattern does not fit a layer; the model cannot be laid out or its activations are not finite (the message
            names the layer).
        """
        ids = self._windows(model, tok, calibration)
        self._check_model(model)
        blocks = len(block_layouts(model, self.spec))
        with progress_bar(f"Pruning {blocks} blocks", blocks, shown=progress) as step:
            return self._run(model, ids, step)

    # ------------------------------------------------------------ one pass over the blocks

    def _run(self, model: nn.Module, ids: Tensor, step: Callable[[], object]) -> PruneReport:
        """Prune and report; ``step`` is called after each block."""
        clock = Clock()
        rows: list[dict[str, Any]] = []
        densities: list[dict[str, float]] = []
        masks: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        with clock("total"):
            for depth, (layout, inputs) in enumerate(propagate(model, ids.split(1), self.spec)):
                with clock("calibration"):
                    hessian = getattr(intra_metric(self.intra), "needs_hessian", False)
                    stats = second_moments(layout, inputs, hessian=hessian, keep=not self.sequential)
                    dense = next(inputs.run())
                stats = _reached(layout, stats)
                measured, keep = self._prune_block(layout, stats, clock)
                with clock("calibration"):
                    error = float((next(inputs.run()) - dense).norm() / dense.norm())
                rows += [{"layer": depth, **row, "block_error": error} for row in measured]
                densities.append({name: float(mask.float().mean()) for name, mask in keep.items()})
                for name, mask in keep.items():
                    masks[f"{layout.name}.{name}"] = pack_bits(mask), tuple(mask.shape)
                step()
        frame, table = pd.DataFrame(rows), pd.DataFrame(densities).rename_axis("layer")
        return PruneReport(frame, table, dict(clock.seconds), masks)

    def _prune_block(
        self, layout: BlockLayout, stats: Mapping[str, LinearStatistics], clock: Clock
    ) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """Prune one block; return a row of the report for each of its graphs, and the masks."""
        with clock("graph"):
            graph = BlockGraph.from_block(layout, stats)
            before = self._fiedler(graph) if self.connectivity else {}
        with clock("scores"):
            keep = self._sparsify(layout, stats, self.sparsity)
        with clock("graph"):
            return self._rows(graph, before, keep), keep

    def _fiedler(self, graph: BlockGraph) -> dict[str, Fiedler]:
        return graph.fiedler()

    def _sparsify(
        self,
        layout: BlockLayout,
        stats: Mapping[str, LinearStatistics],
        sparsity: float,
        factors: Iterable[tuple[str, Tensor]] = (),
    ) -> dict[str, Tensor]:
        """Zero the lowest weights of a block by metric times factor, (out, in) by view name; return the masks."""
        intra = intra_metric(self.intra)
        scores = {}
        for view in layout:
            score = intra.scores(view.weight, stats[view.name])
            if self.group == "block":
                score = score / score.mean().clamp(min=torch.finfo(score.dtype).tiny)
            scores[view.name] = score.masked_fill(view.weight == 0, -1.0)  # what is zero already goes first
        used = {}
        for name, factor in factors:  # one at a time: only SparseGPT, which scores again, needs them later
            scores[name].mul_(factor)
            if isinstance(intra, SparseGPT):
                used[name] = factor
        keep = keep_masks(scores, sparsity, group=self.group, pattern=self.pattern)
        for view in layout:
            if isinstance(intra, SparseGPT):
                step = None if self.pattern is None else parse_pattern(self.pattern)[1]
                choose = self._chooser(view, sparsity, used.get(view.name), keep[view.name])
                weight, keep[view.name] = intra.reconstruct(view.weight, stats[view.name], choose, step)
                view.weight.copy_(weight)
            else:
                view.weight.masked_fill_(~keep[view.name], 0)
            keep[view.name] &= view.weight != 0  # what was zero already may be more than was asked for
        return keep

    def _chooser(self, view: LinearView, sparsity: float, factor: Tensor | None, keep: Tensor) -> Any:
        """Return how SparseGPT chooses within a block of columns: as many as the group asks for there."""
        zeros = view.weight == 0

        def choose(saliency: Tensor, columns: slice) -> Tensor:  # (out, w)
            if factor is not None:
                saliency = saliency * factor[:, columns]
            saliency = saliency.masked_fill(zeros[:, columns], -1.0)
            if self.pattern is not None:
                return keep_masks({view.name: saliency}, sparsity, pattern=self.pattern)[view.name]
            if self.group == "row":
                return ~lowest(saliency, zeros_among(columns.stop, sparsity) - zeros_among(columns.start, sparsity))
            if self.group == "layer":
                rows = len(saliency)
                count = zeros_among(rows * columns.stop, sparsity) - zeros_among(rows * columns.start, sparsity)
            else:  # the share of these columns in the threshold of the whole block
                count = int((~keep[:, columns]).sum())
            return ~lowest(saliency.flatten(), count).view_as(saliency)

        return choose

    def _rows(
        self, graph: BlockGraph, before: Mapping[str, Fiedler], keep: Mapping[str, Tensor], alpha: float = float("nan")
    ) -> list[dict[str, Any]]:
        after = self._fiedler(graph) if self.connectivity else {}  # of the weights as they are now
        nan = float("nan")
        return [
            {
                "graph": name,
                "sparsity": 1 - sum(int(keep[view].sum()) for view in part.edges) / part.n_weights,
                "alpha": alpha,
                "lambda2_before": before[name].value if name in before else nan,
                "lambda2_after": after[name].value if name in after else nan,
                "participation": before[name].participation if name in before else nan,
                "isolated": after[name].n_isolated if name in after else nan,
            }
            for name, part in graph.graphs.items()
        ]

    # ------------------------------------------------------------ checks before any long work

    def _windows(self, model: nn.Module, tok: Any, calibration: Calibration) -> Tensor:
        ids = calibration if isinstance(calibration, Tensor) else windows(tok, calibration, self.window).ids
        if ids.ndim != 2 or not len(ids) or ids.is_floating_point():
            raise InputError(
                f"calibration ids must be integers (n, window), got {ids.dtype} of shape {tuple(ids.shape)}"
            )
        context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if context is not None and ids.shape[1] > context:
            raise InputError(
                f"windows of {ids.shape[1]} tokens exceed the model's context of {context}: give window={context}"
            )
        if hasattr(model, "get_input_embeddings"):
            vocabulary = model.get_input_embeddings().num_embeddings
            if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
                raise InputError(f"calibration ids lie outside 0..{vocabulary - 1}: they are of another tokenizer")
        return ids

    def _check_model(self, model: nn.Module) -> None:
        zeros = total = 0
        for layout in block_layouts(model, self.spec):
            for view in layout:
                if self.pattern is not None and view.in_features % (m := parse_pattern(self.pattern)[1]):
                    raise InputError(
                        f"{layout.name}.{view.name} has {view.in_features} inputs, not a multiple of {m}: pattern "
                        f"{self.pattern} does not fit; use another pattern or sparsity="
                    )
                zeros += int((view.weight == 0).sum())
                total += view.weight.numel()
        if zeros > 0.01 * total:
            warnings.warn(
                f"the model is sparse already: {zeros / total:.1%} of its block weights are zero; they count as pruned",
                stacklevel=3,
            )


def _reached(layout: BlockLayout, stats: dict[str, LinearStatistics]) -> dict[str, LinearStatistics]:
    """Give linears that no token reached (experts) unit moments, so that magnitude decides, and say so."""
    missed = [name for name, moments in stats.items() if moments.n_tokens == 0]
    if missed:
        warnings.warn(
            f"{layout.name}: no calibration token reached {', '.join(missed)}: pruned by magnitude; give more text",
            stacklevel=4,
        )
    for name in missed:
        square, hessian = stats[name].x_square, stats[name].hessian
        unit = None if hessian is None else torch.eye(len(square), device=square.device)
        stats[name] = LinearStatistics(torch.ones_like(square), unit)
    return stats


class Clock:
    """Seconds spent on each kind of work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """Count the time inside as this kind of work."""
        start = time.perf_counter()
        yield
        self.seconds[kind] += time.perf_counter() - start


@contextmanager
def progress_bar(text: str, total: int, *, shown: bool) -> Iterator[Callable[[], object]]:
    """Show a bar on standard error while the context lasts; yields what is to be called after each of its steps."""
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=total)
        yield lambda: bar.advance(task)


# ---------------------------------------------------------------- what is reported


@dataclass(frozen=True, eq=False)
class PruneReport:
    """What was pruned, what it cost each block, and the masks.

    Attributes
    ----------
    frame
        One row a graph of a block: ``layer`` (depth), ``graph``, ``sparsity``, ``alpha`` (0 = the graph was declined),
        ``lambda2_before`` and ``lambda2_after`` (of the edges left, isolated channels dropped, each matrix still
        divided by its dense mean; it may rise, as that of a subgraph can; both need ``connectivity=True``),
        ``participation`` of the Fiedler vector, ``isolated`` channels after, ``block_error`` (relative change of the
        block's output on the first calibration window).
    densities
        Share of weights kept: a row a layer, a column a matrix.
    seconds
        Wall time of "calibration", "graph", "scores" and the "total".
    """

    frame: pd.DataFrame = field(repr=False)
    densities: pd.DataFrame = field(repr=False)
    seconds: dict[str, float]
    _masks: dict[str, tuple[Tensor, tuple[int, ...]]] = field(repr=False)

    def __repr__(self) -> str:
        return f"PruneReport(sparsity={self.sparsity:.4g}, matrices={len(self.matrices)})"

    @property
    def matrices(self) -> list[str]:
        """Full names of the pruned matrices, such as "model.layers.3.mlp.up_proj"."""
        return list(self._masks)

    def mask(self, matrix: str) -> Tensor:
        """Return the mask of one matrix, boolean (out, in), ``True`` = kept; what was zero before counts as pruned."""
        if matrix not in self._masks:
            raise UnknownNameError("pruned matrix", matrix, self._masks)
        return unpack_bits(*self._masks[matrix])

    @property
    def sparsity(self) -> float:
        """Share of zeros among all weights of the blocks."""
        kept = sum(int(self.mask(name).sum()) for name in self._masks)
        return 1 - kept / sum(self.mask(name).numel() for name in self._masks)

    @property
    def lambda2_retained(self) -> float:
        """Mean over graphs of lambda_2 after / before, not clipped; ``frame`` counts isolated channels apart.

        Graphs that were disconnected before have no ratio and are left out; NaN without ``connectivity=True``.
        """
        connected = self.frame[self.frame.lambda2_before > 0]
        return float((connected.lambda2_after / connected.lambda2_before).mean())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values, without the masks."""
        return {
            "sparsity": self.sparsity,
            "seconds": self.seconds,
            "graphs": self.frame.astype(object).where(self.frame.notna(), None).to_dict("records"),
            "densities": self.densities.to_dict("records"),
        }


def mask_overlap(a: PruneReport, b: PruneReport) -> pd.Series:
    """Return for each matrix how far two prunings agree: zeros in both over zeros in either (Jaccard), 1 = the same.

    Prunings of one model from two calibration texts say by this how much the mask depends on the text.

    Examples
    --------
    >>> import copy
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> texts = torch.arange(32).view(2, 2, 8) % 16
    >>> a, b = (OneShotPrune("magnitude").prune(copy.deepcopy(model), None, ids) for ids in texts)
    >>> float(mask_overlap(a, b).min())                                   # magnitude does not look at the text
    1.0
    """
    if a.matrices != b.matrices:
        raise InputError("the two reports are not of the same model: their matrices differ")

    def jaccard(name: str) -> float:
        zero_a, zero_b = ~a.mask(name), ~b.mask(name)
        either = int((zero_a | zero_b).sum())
        return int((zero_a & zero_b).sum()) / either if either else 1.0

    return pd.Series({name: jaccard(name) for name in a.matrices}, name="overlap")
