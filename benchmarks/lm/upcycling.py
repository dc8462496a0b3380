"""Speed of a layer of experts beside the dense layer of equal active width, and memory of ``upcycle``.

The peers are the dense gated layer and the experts of Mixtral in transformers (top-1 of whole layers, the same active
width). All are timed in turn on the same tokens.

Run:  python benchmarks/lm/upcycling.py [cpu|cuda]
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from fairtrial.lm.upcycling import DivMoEFeedForward, GroupTopRouter, upcycle

D, M, TOKENS = 576, 1536, 2048  # SmolLM2-135M's layer


class Dense(nn.Module):
    """The gated layer of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(i, o, bias=False) for i, o in ((D, M), (D, M), (M, D)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of tokens (..., d)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def divmoe(granularity: int, active: int) -> DivMoEFeedForward:
    """Return a layer of 4 * F experts whose router sends tokens everywhere."""
    router = GroupTopRouter(D, n_groups=4, n_slices=granularity, n_active=active, std=1.0)
    return DivMoEFeedForward(D, M, router, granularity=granularity)


def mixtral() -> nn.Module:
    """Four whole layers, one a token."""
    config = MixtralConfig(hidden_size=D, intermediate_size=M, num_local_experts=4, num_experts_per_tok=1)
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def seconds(run: Callable[[], object], device: str) -> float:
    """CPU seconds on the CPU, where other work does not count; wall time on a GPU."""
    if device == "cpu":
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def layers(device: str, dtype: torch.dtype) -> Table:
    """Time the layers, forward alone and with backward, in turn."""
    x = torch.randn(1, TOKENS, D, device=device, dtype=dtype)
    contenders = {
        "dense": Dense(),
        "DivMoE F=4, K=4": divmoe(4, 4),
        "DivMoE F=2, K=2": divmoe(2, 2),
        "DivMoE F=1, K=1": divmoe(1, 1),
        "transformers' Mixtral, top-1 of 4": mixtral(),
    }
    contenders = {name: layer.to(device, dtype) for name, layer in contenders.items()}

    def forward(layer: nn.Module) -> None:
        with torch.inference_mode():
            layer(x)

    def both(layer: nn.Module) -> None:
        given = x.clone().requires_grad_()
        layer(given).sum().backward()
        layer.zero_grad(set_to_none=True)

    table = Table("layer, 2048 tokens", "forward (s)", "over dense", "with backward (s)", "over dense")
    told: dict[str, list[float]] = {name: [] for name in contenders}
    for run in (forward, both):
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(9):
            for name, layer in contenders.items():
                took = seconds(lambda f=run, it=layer: f(it), device)  # type: ignore[misc]
                if turn:
                    times[name].append(took)
        for name in contenders:
            ratios = [a / b for a, b in zip(times[name], times["dense"], strict=True)]
            told[name] += [statistics.median(times[name]), statistics.median(ratios)]
    for name, (fwd, fwd_ratio, bwd, bwd_ratio) in told.items():
        table.add_row(name, f"{fwd:.4f}", f"{fwd_ratio:.2f}", f"{bwd:.4f}", f"{bwd_ratio:.2f}")
    return table


def memory() -> str:
    """Peak memory of upcycling four folders, over that of base, one domain model and the result."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("base", "a", "b", "c", "d")}
        for path in paths.values():
            model = LlamaForCausalLM(config)
            dense = 4 * sum(p.numel() for p in model.parameters())
            model.save_pretrained(path)
            tokenizer.save_pretrained(path)
            del model
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        start = time.perf_counter()
        moe = upcycle(paths["base"], {name: paths[name] for name in "abcd"})
        took = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    result = 4 * moe.upcycle_report.total_parameters
    return (
        f"upcycle of four folders of {dense / 2**20:.0f} MiB: {took:.1f} s, peak {peak / 2**20:.0f} MiB above before, "
        f"{peak / (2 * dense + result):.2f} of base + one domain model + result"
    )


def main() -> None:
    """Print the table."""
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    if device == "cpu":
        print(memory())
    Console(width=130).print(layers(device, torch.float32 if device == "cpu" else torch.bfloat16))


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore", UserWarning)  # random models are no fine-tunes of one another
    main()
