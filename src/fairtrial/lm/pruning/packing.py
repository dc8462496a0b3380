"""What a sparse model saves: bytes on disk by bitmap and values, tokens per second by what the device can do, measured.

A matrix with a share of zeros s takes 1 bit a weight for the bitmap and its values: at 50 % in half precision 9/16 of
the dense size. Zeros alone do not make a dense matrix product any faster; :func:`measure_sparse` measures the backends
that could (2:4 tensor cores, compressed rows, hidden channels that died altogether) and says so where none does.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.layout import ChainSpec, MLPLayout, block_layouts
from fairtrial.errors import InputError
from fairtrial.lm.pruning.masks import pack_bits, unpack_bits

_FILE = "packed.safetensors"

# ---------------------------------------------------------------- on disk


def packed_bytes(tensor: Tensor) -> int:
    """Return the bytes a tensor takes as bitmap and values, or dense where that is smaller.

    >>> packed_bytes(torch.tensor([[1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]]))    # one byte and two float32
    9
    """
    packed = -(-tensor.numel() // 8) + int(tensor.count_nonzero()) * tensor.element_size()
    return min(packed, tensor.numel() * tensor.element_size())


def save_packed(model: Any, folder: str | Path) -> int:
    """Write a pruned model of transformers, matrices as bitmap and values; return the bytes of the weights file.

    Parameters
    ----------
    model
        A causal language model; weights that share memory are written once.
    folder
        Made if need be; config.json is written beside the weights. :func:`load_packed` reads it back bit for bit.

    Examples
    --------
    >>> import tempfile
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> from fairtrial.lm.pruning import OneShotPrune
    >>> _ = OneShotPrune("magnitude").prune(model, None, torch.arange(16).view(2, 8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     size = save_packed(model, folder)
    ...     again = load_packed(folder)
    >>> bool((again.model.layers[0].mlp.up_proj.weight == model.model.layers[0].mlp.up_proj.weight).all())
    True
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        original = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
        if original != name:
            aliases[name] = original
        elif packed_bytes(tensor) < tensor.numel() * tensor.element_size():
            tensor = tensor.cpu()
            keep = tensor != 0
            shapes[name] = tuple(tensor.shape)
            tensors[f"{name}.bitmap"], tensors[f"{name}.values"] = pack_bits(keep), tensor[keep]
        else:
            tensors[name] = tensor.cpu().contiguous()
    save_file(tensors, folder / _FILE, {"format": "pt", "packed": json.dumps(shapes), "aliases": json.dumps(aliases)})
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    return (folder / _FILE).stat().st_size


def load_packed(folder: str | Path) -> Any:
    """Return the dense model :func:`save_packed` wrote, in evaluation mode on the CPU, equal bit for bit.

    Raises
    ------
    InputError
        The folder holds no packed model.
    """
    from safetensors import safe_open
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.initialization import no_init_weights

    folder = Path(folder)
    if not (folder / _FILE).is_file() or not (folder / "config.json").is_file():
        raise InputError(
            f"{folder}: no packed model here: it needs {_FILE} and config.json, as save_packed writes them"
        )
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    with safe_open(folder / _FILE, "pt") as file:
        shapes, aliases = (json.loads(file.metadata()[key]) for key in ("packed", "aliases"))
        names = [name for name in file.keys() if name.removesuffix(".bitmap").removesuffix(".values") not in shapes]  # noqa: SIM118
        state = {name: file.get_tensor(name) for name in names}
        for name, shape in shapes.items():
            values = file.get_tensor(f"{name}.values")
            keep = unpack_bits(file.get_tensor(f"{name}.bitmap"), tuple(shape))
            state[name] = values.new_zeros(shape).masked_scatter_(keep, values)
    model.load_state_dict(state | {alias: state[name] for alias, name in aliases.items()})
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


# ---------------------------------------------------------------- on the device


@dataclass(frozen=True)
class SparseMeasurement:
    """Size and speed of a pruned model beside the dense one of the same shape.

    Attributes
    ----------
    dense_bytes, packed_bytes
        Of all weights: as they are, and as :func:`save_packed` writes them.
    backend
        Of those this device has for these zeros, the one with the best worst pair of runs; "none" where there is none
        to try.
    dense_tokens_per_second, sparse_tokens_per_second
        New tokens over wall time of greedy generation, all texts of the batch together; median of three runs, the two
        models in turn.
    device
        Where it was measured.
    ratios
        Tokens per second sparse over dense of each of these pairs of runs; empty where the backend is "none".
    """

    dense_bytes: int
    packed_bytes: int
    backend: str
    dense_tokens_per_second: float
    sparse_tokens_per_second: float
    device: str
    ratios: tuple[float, ...] = ()

    @property
    def bytes_ratio(self) -> float:
        """Packed over dense bytes."""
        return self.packed_bytes / self.dense_bytes

    @property
    def speedup(self) -> float:
        """Tokens per second with the backend over those of the dense model, the median of ``ratios``; 1 without one."""
        return statistics.median(self.ratios) if self.ratios else 1.0

    @property
    def faster(self) -> bool:
        """Whether the sparse model was over 5 % faster in every pair of runs: less cannot be told from noise."""
        return bool(self.ratios) and min(self.ratios) > 1.05

    def __str__(self) -> str:
        size = f"{self.packed_bytes / 1e6:.1f} MB packed, {self.bytes_ratio:.2f} of dense"
        speed = "no speed-up on this device"
        if self.ratios:
            median = f"{self.speedup:.2f}x"
            span = f"{min(self.ratios):.2f} to {max(self.ratios):.2f} in {len(self.ratios)} pairs of runs"
            speed = (
                f"{median} with {self.backend} ({span})"
                if self.faster
                else f"{speed} (best: {self.backend}, {median}, {span})"
            )
        return f"{size}; {speed}: {self.dense_tokens_per_second:.1f} tokens/s dense on {self.device}"


def measure_sparse(
    model: Any, *, batch: int = 1, new_tokens: int = 64, spec: ChainSpec | None = None
) -> SparseMeasurement:
    """Measure what the zeros of a model buy on its device: bytes, and tokens per second dense and sparse.

    Parameters
    ----------
    model
        A pruned causal language model of transformers. It is left as it is: backends run on copies.
    batch
        Texts generated at once.
    new_tokens
        Tokens generated for each, after a prompt of 8.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> from fairtrial.lm.pruning import OneShotPrune
    >>> _ = OneShotPrune("magnitude").prune(model, None, torch.arange(16).view(2, 8))
    >>> measured = measure_sparse(model, new_tokens=2)
    >>> measured.packed_bytes < measured.dense_bytes, measured.backend
    (True, 'compressed rows (CSR)')
    """
    if batch < 1 or new_tokens < 1:
        raise InputError(f"batch and new_tokens must be positive, got {batch} and {new_tokens}")
    weights = {p.data_ptr(): p for p in model.parameters()}.values()
    best = "none"
    ratios: tuple[float, ...] = ()
    dense = sparse = _tokens_per_second([model], batch, new_tokens)[0]
    for name, convert in _backends(model, spec):
        converted = copy.deepcopy(model)
        convert(converted, spec)
        speeds = _tokens_per_second([model, converted], batch, new_tokens)
        paired = tuple(s / d for d, s in zip(*speeds, strict=True))
        if not ratios or min(paired) > min(ratios):
            best, ratios, (dense, sparse) = name, paired, speeds
    return SparseMeasurement(
        sum(p.numel() * p.element_size() for p in weights),
        sum(packed_bytes(p) for p in weights),
        best,
        statistics.median(dense),
        statistics.median(sparse),
        str(next(model.parameters()).device),
        ratios,
    )


def _tokens_per_second(models: list[Any], batch: int, new_tokens: int) -> list[list[float]]:
    """Time greedy generation of the models in turn, three times after a warm-up; return each model's runs."""
    device = next(models[0].parameters()).device
    ids = torch.arange(8, device=device).remainder(models[0].config.vocab_size).expand(batch, -1)
    speeds: list[list[float]] = [[] for _ in models]
    for run in range(4):
        for model, runs in zip(models, speeds, strict=True):
            with evaluation_mode(model):
                start = time.perf_counter()
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                    min_new_tokens=new_tokens, max_new_tokens=new_tokens,
                )  # fmt: skip
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            if run:
                runs.append(batch * new_tokens / (time.perf_counter() - start))
    return speeds


Backend = Callable[[Any, ChainSpec | None], object]


def _backends(model: Any, spec: ChainSpec | None) -> Iterator[tuple[str, Backend]]:
    """Yield what this device and these zeros allow: a name and a function that converts a copy in place."""
    layouts = block_layouts(model, spec)
    weight = next(iter(layouts[0])).weight
    if any(_dead_channels(mlp).any() for layout in layouts for mlp in layout.mlps):
        yield "dead channels removed", remove_dead_channels
    if weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64):
        yield "compressed rows (CSR)", _to_compressed_rows
    if (
        weight.device.type == "cuda"
        and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        and weight.dtype in (torch.float16, torch.bfloat16)
        and all(_is_two_of_four(view.weight) for layout in layouts for view in layout)
    ):
        yield "2:4 tensor cores", to_semi_structured


def _is_two_of_four(weight: Tensor) -> bool:
    return weight.shape[1] % 4 == 0 and bool(((weight != 0).unflatten(1, (-1, 4)).sum(2) <= 2).all())


def to_semi_structured(model: Any, spec: ChainSpec | None = None) -> int:
    """Turn every 2:4 sparse Linear into torch's semi-structured form, in place; return how many.

    Needs CUDA with compute capability 8.0 and half precision. The model then runs but cannot be trained or saved.
    """
    converted = 0
    for _, module in _linear_modules(model, spec):
        if isinstance(module, nn.Linear) and _is_two_of_four(module.weight):
            sparse = torch.sparse.to_sparse_semi_structured(module.weight.detach())
            module.weight = nn.Parameter(sparse, requires_grad=False)
            converted += 1
    return converted


class _CompressedRows(nn.Module):
    """A linear layer that multiplies by a matrix in compressed sparse rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support", category=UserWarning)
            self.weight = nn.Parameter(weight.to_sparse_csr(), requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        y = (self.weight @ x.flatten(0, -2).T).T.unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias


def _to_compressed_rows(model: Any, spec: ChainSpec | None) -> None:
    for parents, module in _linear_modules(model, spec):
        weight = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T
        sparse = _CompressedRows(weight, module.bias)
        for parent, name in parents:
            setattr(parent, name, sparse)


def _linear_modules(model: Any, spec: ChainSpec | None) -> Iterator[tuple[list[tuple[nn.Module, str]], Any]]:
    """Yield every Linear or Conv1D of the blocks once, with the places that hold it; stacked experts are left out."""
    modules = {view.module for layout in block_layouts(model, spec) for view in layout if view.expert is None}
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {module: [] for module in modules}
    for parent in model.modules():
        for name, child in parent.named_children():
            if child in places:
                places[child].append((parent, name))
    for module, parents in places.items():
        yield parents, module


def remove_dead_channels(model: Any, spec: ChainSpec | None = None) -> int:
    """Take hidden channels that cannot affect the output out of every MLP, in place; return how many.

    A channel is dead if nothing reads it (its column of the down projection is zero), or in a gated MLP if its row of
    the up projection is zero and there is no bias. The matrices really shrink, so the blocks run faster on any device;
    they no longer fit the config's one intermediate size, so the result is for running, not for ``save_pretrained``.
    Stacked experts, which must keep one size, are left alone.
    """
    removed = 0
    for layout in block_layouts(model, spec):
        for mlp in layout.mlps:
            dead = _dead_channels(mlp)
            if not dead.any():
                continue
            keep = (~dead).nonzero()[:, 0]
            if len(keep) == 0:  # a matrix needs a channel
                keep = keep.new_zeros(1)
            removed += len(dead) - len(keep)
            if mlp.up.rows is None:
                for view in (mlp.gate, mlp.up):
                    if view is not None:
                        _select(view.module, keep, output=True)
            else:  # gate and up, one after the other
                _select(mlp.up.module, torch.cat([keep, keep + len(dead)]), output=True)
            _select(mlp.down.module, keep, output=False)
    return removed


def _dead_channels(mlp: MLPLayout) -> Tensor:
    """Return which hidden channels have no effect, boolean (m,)."""
    if mlp.up.expert is not None:
        return torch.zeros(mlp.up.out_features, dtype=torch.bool)
    dead = (mlp.down.weight == 0).all(0)
    if mlp.gate is not None and mlp.up.module.bias is None:
        dead = dead | (mlp.up.weight == 0).all(1)
    return dead


def _select(module: Any, index: Tensor, *, output: bool) -> None:
    """Keep the outputs (or inputs) at ``index`` of a Linear or Conv1D."""
    conv1d = not isinstance(module, nn.Linear)  # Conv1D stores (in, out)
    weight = module.weight.detach().index_select(int(output == conv1d), index)
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    if output and module.bias is not None:
        module.bias = nn.Parameter(module.bias.detach()[index], requires_grad=module.bias.requires_grad)
    if conv1d:
        module.nx, module.nf = weight.shape
    else:
        module.out_features, module.in_features = weight.shape
