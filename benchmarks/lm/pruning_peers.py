"""Are our Wanda and SparseGPT llmcompressor's? One linear layer of random weights and correlated inputs, side by side.

Needs llmcompressor, in an environment of its own (llmcompressor.txt).
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fairtrial.causal_lm.statistics import LinearStatistics
from fairtrial.lm.pruning.baselines import SparseGPT, Wanda
from fairtrial.lm.pruning.masks import keep_masks, lowest

OUT, IN, TOKENS = 576, 1536, 4096


def timed(work: Callable[[], Tensor]) -> tuple[Tensor, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def main() -> None:
    if not importlib.util.find_spec("llmcompressor"):
        print("llmcompressor is not installed: pip install -r benchmarks/lm/llmcompressor.txt in its own environment")
        return
    from llmcompressor.modifiers.pruning.sparsegpt.sgpt_sparsify import sparsify_weight as peer_sparsegpt
    from llmcompressor.modifiers.pruning.wanda.wanda_sparsify import sparsify_weight as peer_wanda

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(OUT, IN, generator=generator) / IN**0.5
    mix = torch.eye(IN) + torch.randn(IN, IN, generator=generator) / IN**0.5
    x = torch.randn(TOKENS, IN, generator=generator) * torch.rand(IN, generator=generator) @ mix
    stats = LinearStatistics(x.square().sum(0), x.T @ x, TOKENS)
    layer = nn.Linear(IN, OUT, bias=False).requires_grad_(False)
    layer.weight.data = weight.clone()

    def sparsegpt(sparsity: float, m: int) -> Tensor:
        def choose(saliency: Tensor, columns: slice) -> Tensor:
            if m:
                return keep_masks({"w": saliency}, sparsity, pattern="2:4")["w"]
            return ~lowest(saliency.flatten(), int(sparsity * saliency.numel())).view_as(saliency)

        return SparseGPT().reconstruct(weight, stats, choose, m or None)[0]

    def wanda(pattern: str | None) -> Tensor:
        return weight * keep_masks({"w": Wanda().scores(weight, stats)}, 0.5, pattern=pattern)["w"]

    cases: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "Wanda 50 %": (lambda: wanda(None), lambda: peer_wanda(layer, {layer: stats.x_square.clone()}, 0.5, 0, 0)),
        "Wanda 2:4": (lambda: wanda("2:4"), lambda: peer_wanda(layer, {layer: stats.x_square.clone()}, 0.5, 2, 4)),
        "SparseGPT 50 %": (lambda: sparsegpt(0.5, 0), lambda: _peer(peer_sparsegpt, layer, stats, 0, 0)),
        "SparseGPT 2:4": (lambda: sparsegpt(0.5, 4), lambda: _peer(peer_sparsegpt, layer, stats, 2, 4)),
    }
    table = Table("method", "same mask", "error ours", "error peer", "seconds ours", "peer", "ratio")
    for name, (ours, peer) in cases.items():
        (a, seconds_a), (b, seconds_b) = timed(ours), timed(peer)
        same = float(((a != 0) == (b != 0)).float().mean())
        error_a, error_b = (float(((weight - w) @ x.T).norm() / (weight @ x.T).norm()) for w in (a, b))
        times = f"{seconds_a:.3f}", f"{seconds_b:.3f}", f"{seconds_a / seconds_b:.2f}"
        table.add_row(name, f"{same:.3%}", f"{error_a:.4f}", f"{error_b:.4f}", *times)
    Console().print(table)


def _peer(
    prune: Callable[..., tuple[float, Tensor]], layer: nn.Linear, stats: LinearStatistics, n: int, m: int
) -> Tensor:
    hessian = 2 * stats.hessian.clone()  # type: ignore[union-attr]
    return prune(layer, {layer: hessian}, 0.5, n, m, 128, 0.01, False)[1]  # after the loss


if __name__ == "__main__":
    main()
