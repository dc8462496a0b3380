"""Cost of emulating NVFP4, in one run: quantization beside torchao's, steps beside float32's, the SNR instrument.

Run:  python benchmarks/lm/low_precision.py        (torchao is left out where it is not installed)
"""

from __future__ import annotations

import argparse
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fairtrial.lm.low_precision import (
    GPT,
    NGPT,
    HypersphereHook,
    NGPTConfig,
    TransformerConfig,
    convert_linears,
    dot_product_snr,
    quantize_nvfp4,
)
from fairtrial.lm.low_precision.nvfp4 import fake_quantize
from fairtrial.seeds import torch_generator


def seconds(*runs: Callable[[], Any], repeat: int = 5) -> list[float]:
    """Least CPU seconds of each, taken in turn: other work on the machine does not count."""
    least = [float("inf")] * len(runs)
    for i in range(repeat + 1):
        for at, run in enumerate(runs):
            start = time.process_time()
            run()
            if i:
                least[at] = min(least[at], time.process_time() - start)
    return least


def by_lookup(x: torch.Tensor) -> torch.Tensor:
    """Quantize the plain way: compare every element with all fifteen values."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([-values.flip(0)[:-1], values])
    blocks = x.unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / (6 * 2**-4)).to(torch.float8_e4m3fn).float() * 2**-4
    nearest = ((blocks / scale)[..., None] - values).abs().argmin(-1)
    return (values[nearest] * scale).flatten(-2)


def step_of(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if isinstance(model, NGPT):
        HypersphereHook(model).attach(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def row(table: Table, what: str, first: float, second: float) -> None:
    table.add_row(what, f"{1e3 * first:.2f}", f"{1e3 * second:.2f}", f"{second / first:.2f}")


def quantization(table: Table) -> None:
    x = torch.randn(2048, 512, generator=torch_generator(0))
    noise = torch_generator(1)
    ours, copy, stochastic, packed, lookup = seconds(
        lambda: fake_quantize(x, -1, 2**-4),
        lambda: x.mul(1.5),
        lambda: fake_quantize(x, -1, 2**-4, up=True, generator=noise),
        lambda: quantize_nvfp4(x).dequantize(),
        lambda: by_lookup(x),
    )
    row(table, "quantize 2048 x 512, nearest: here | lookup of 15 values", ours, lookup)
    row(table, "the same: one multiplication of it | here", copy, ours)
    row(table, "the same: nearest | stochastic", ours, stochastic)
    row(table, "the same: here | here packed and unpacked", ours, packed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.prototype.mx_formats import nvfp4_tensor as peer
    except ImportError:
        return

    def torchao() -> torch.Tensor:
        scale = peer.per_tensor_amax_to_scale(x.abs().max())
        return peer.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(torch.float32)

    same = torch.equal(torchao(), quantize_nvfp4(x).dequantize())
    packed, theirs = seconds(lambda: quantize_nvfp4(x).dequantize(), torchao)
    row(table, f"packed and unpacked: here | torchao (same values: {same})", packed, theirs)


def steps(table: Table, width: int) -> None:
    shape: dict[str, Any] = {"vocab_size": 256, "width": width, "layers": 2, "heads": width // 64 or 1}
    ids = torch.randint(0, 256, (8, 128), generator=torch_generator(2))
    for name, build in (("GPT", lambda: GPT(TransformerConfig(**shape))), ("nGPT", lambda: NGPT(NGPTConfig(**shape)))):
        exact, plain, square, usual = (build() for _ in range(4))
        convert_linears(plain)
        convert_linears(square, weight_block="16x16")
        convert_linears(usual, tensor_scale="tensor", grad_scale="tensor", hadamard=True)
        base, *others = seconds(*(step_of(model, ids) for model in (exact, plain, square, usual)), repeat=3)
        for what, took in zip(("NVFP4", "NVFP4, weights in 16 x 16", "NVFP4, usual recipe"), others, strict=True):
            row(table, f"step of {name}, width {width}: float32 | {what}", base, took)
        forward, instrument = seconds(
            torch.no_grad()(functools.partial(exact, ids)), functools.partial(dot_product_snr, exact, ids)
        )
        row(table, f"{name}, width {width}: forward pass | dot_product_snr", forward, instrument)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = Table("what: first | second", "first (CPU ms)", "second (CPU ms)", "second / first")
    quantization(table)
    for width in given.widths:
        steps(table, width)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
