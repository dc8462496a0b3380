"""Find the decoder blocks of a causal language model and every linear map in them, whatever the architecture.

A method that reads or edits weights should not care whether queries, keys and values are three ``nn.Linear``, one fused
matrix, a transposed ``Conv1D`` or one slice of a three-dimensional tensor of experts. :func:`block_layouts` gives it
views: each :class:`LinearView` has ``.weight`` of shape (out, in) that shares memory with the model, so that what is
written into it is written into the model.

>>> from transformers import AutoModelForCausalLM, Phi3Config
>>> config = Phi3Config(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
...                     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
>>> layout, = block_layouts(AutoModelForCausalLM.from_config(config))
>>> [(view.name, view.out_features, view.in_features) for view in layout][:3]
[('self_attn.qkv_proj.q', 8, 8), ('self_attn.qkv_proj.k', 4, 8), ('self_attn.qkv_proj.v', 4, 8)]
>>> layout.attention.n_heads, layout.attention.n_kv_heads, layout.attention.head_dim
(4, 2, 2)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from fairtrial.errors import InputError

# ---------------------------------------------------------------- what a layout is


@dataclass(frozen=True, eq=False)
class LinearView:
    """One linear map of a block as a writable (out, in) view of the parameter that holds it.

    Attributes
    ----------
    name
        Unique in its block: the path of the module ("self_attn.q_proj"); a part of a fused matrix adds its role
        ("self_attn.qkv_proj.q", "mlp.gate_up_proj.up"), an expert of a three-dimensional parameter its index
        ("mlp.experts.3.gate_up_proj.gate").
    module
        The module whose forward uses the weight: a Linear or Conv1D, or the experts module of a stacked parameter.
    parameter
        The parameter that holds the weight.
    rows
        The output rows this view takes of a fused matrix; ``None`` = all.
    expert
        The leading index into a stacked (experts, ., .) parameter; ``None`` = the parameter is a matrix.
    transposed
        Whether the parameter stores (in, out), as GPT-2's Conv1D does.
    """

    name: str
    module: nn.Module = field(repr=False)
    parameter: nn.Parameter = field(repr=False)
    rows: slice | None = None
    expert: int | None = None
    transposed: bool = False

    @property
    def weight(self) -> torch.Tensor:
        """The weight, (out, in): shares memory with the model, outside autograd, writable in place."""
        weight = self.parameter.detach()
        if self.expert is not None:
            weight = weight[self.expert]
        if self.transposed:
            weight = weight.T
        return weight if self.rows is None else weight[self.rows]

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.weight.shape[1]


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """The four projections of (grouped-query) self-attention.

    ``q.weight`` is (n_heads * head_dim, d), ``k`` and ``v`` are (n_kv_heads * head_dim, d), ``o`` is
    (d, n_heads * head_dim); query head h reads key-value head h // (n_heads / n_kv_heads).
    """

    q: LinearView
    k: LinearView
    v: LinearView
    o: LinearView
    n_heads: int
    n_kv_heads: int
    head_dim: int

    def __iter__(self) -> Iterator[LinearView]:
        return iter((self.q, self.k, self.v, self.o))


@dataclass(frozen=True, eq=False)
class MLPLayout:
    """One feed-forward chain: ``down(act(gate x) * up x)``, or ``down(act(up x))`` where ``gate`` is ``None``."""

    gate: LinearView | None
    up: LinearView
    down: LinearView

    def __iter__(self) -> Iterator[LinearView]:
        return iter((self.up, self.down) if self.gate is None else (self.gate, self.up, self.down))


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """One decoder block: iterating gives every :class:`LinearView`, attention first, then each MLP (each expert).

    ``name`` is the block's path in the model ("model.layers.3"), or "" for a block laid out alone.
    """

    block: nn.Module = field(repr=False)
    attention: AttentionLayout | None
    mlps: tuple[MLPLayout, ...]
    name: str = ""

    def __iter__(self) -> Iterator[LinearView]:
        yield from self.attention or ()
        for mlp in self.mlps:
            yield from mlp

    def __getitem__(self, name: str) -> LinearView:
        for view in self:
            if view.name == name:
                return view
        raise InputError(f"block {self.name!r} has no linear {name!r}; it has: {', '.join(v.name for v in self)}")


# ---------------------------------------------------------------- how an architecture is declared


@dataclass(frozen=True)
class AttentionSpec:
    """Paths of the attention's linears inside a block; the same path for q, k and v means one fused matrix.

    The three must read the same input, as those of self-attention do. A fused matrix holds its three parts one after
    the other along the outputs, in the order q, k, v. ``heads`` is (query heads, key-value heads); ``None`` reads them
    from the block's config.
    """

    q: str
    k: str
    v: str
    o: str
    heads: tuple[int, int] | None = None


@dataclass(frozen=True)
class MLPSpec:
    """Paths of one feed-forward chain inside a block; ``gate == up`` means one fused matrix, gate first.

    Gate and up must read the same input. A path may hold one ``*`` for the items of a ModuleList of experts, and may
    name a stacked (experts, ., .) parameter: either gives one MLP an expert.
    """

    up: str
    down: str
    gate: str | None = None


@dataclass(frozen=True)
class ChainSpec:
    """Which linears an architecture's blocks consist of.

    Parameters
    ----------
    blocks
        Path of the ModuleList of decoder blocks, from the model or from its ``base_model``.
    attention
        The projections; ``None`` for an architecture without attention (a Mamba block is an MLP chain).
    mlps
        The feed-forward chains. Chains whose modules a block lacks are skipped there, so that an architecture may mix
        dense blocks and blocks of experts; every matrix of a block must be covered all the same.
    others
        Paths of matrices that are no link of a chain: routers, convolutions.

    Examples
    --------
    A Llama-like model of one's own:

    >>> spec = ChainSpec("layers", AttentionSpec(q="attn.qkv", k="attn.qkv", v="attn.qkv", o="attn.out", heads=(8, 2)),
    ...                  (MLPSpec(gate="ffn.w1", up="ffn.w3", down="ffn.w2"),))
    """

    blocks: str
    attention: AttentionSpec | None
    mlps: tuple[MLPSpec, ...]
    others: tuple[str, ...] = ()


_SEPARATE = AttentionSpec("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_GATED = MLPSpec(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")
_EXPERTS = MLPSpec(gate="mlp.experts.gate_up_proj", up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")
_SHARED = MLPSpec(
    gate="mlp.shared_expert.gate_proj", up="mlp.shared_expert.up_proj", down="mlp.shared_expert.down_proj"
)

_LLAMA = ChainSpec("layers", _SEPARATE, (_GATED,))
_PHI3 = ChainSpec(
    "layers",
    AttentionSpec("self_attn.qkv_proj", "self_attn.qkv_proj", "self_attn.qkv_proj", "self_attn.o_proj"),
    (MLPSpec(gate="mlp.gate_up_proj", up="mlp.gate_up_proj", down="mlp.down_proj"),),
)
_MOE = ChainSpec("layers", _SEPARATE, (_GATED, _EXPERTS, _SHARED), others=("mlp.gate", "mlp.shared_expert_gate"))

SPECS: dict[str, ChainSpec] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo2", "granite"), _LLAMA
    ),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), _MOE),
    "phi3": _PHI3,
    "phi": ChainSpec(
        "layers",
        AttentionSpec("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
        (MLPSpec(up="mlp.fc1", down="mlp.fc2"),),
    ),
    "gpt2": ChainSpec(
        "h",
        AttentionSpec("attn.c_attn", "attn.c_attn", "attn.c_attn", "attn.c_proj"),
        (MLPSpec(up="mlp.c_fc", down="mlp.c_proj"),),
    ),
    "opt": ChainSpec(
        "decoder.layers",
        AttentionSpec("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
        (MLPSpec(up="fc1", down="fc2"),),
    ),
}
"""The architectures known without a :class:`ChainSpec`, by ``config.model_type``."""


# ---------------------------------------------------------------- finding blocks and their views


def find_blocks(model: nn.Module, spec: ChainSpec | None = None) -> tuple[str, nn.ModuleList]:
    """Return the path in ``model`` and the ModuleList of its decoder blocks.

    Raises
    ------
    InputError
        The architecture is unknown and no ``spec`` is given, or ``spec.blocks`` is not a ModuleList of this model; the
        message prints the module tree and how to write a :class:`ChainSpec`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {type(model).__name__}: give a causal language model of transformers")
    if hasattr(model, "peft_config"):
        raise InputError("the model carries PEFT adapters: merge them first, model = model.merge_and_unload()")
    path = (spec or _known_spec(model)).blocks
    for root in (model, getattr(model, "base_model", model)):
        blocks = _descend(root, path)
        if isinstance(blocks, nn.ModuleList):
            return next(name for name, module in model.named_modules() if module is blocks), blocks
    raise InputError(f"{path!r} is not a ModuleList of {type(model).__name__}. {_how_to_declare(model)}")


def block_layouts(model: nn.Module, spec: ChainSpec | None = None) -> list[BlockLayout]:
    """Lay out every decoder block of ``model``.

    Parameters
    ----------
    model
        A causal language model of transformers, or any module with a ``spec``.
    spec
        How its blocks are built; ``None`` for the architectures in :data:`SPECS`.

    Returns
    -------
    list of BlockLayout
        In order of depth. The views of a block cover each of its matrices exactly once (``spec.others`` aside).

    Raises
    ------
    InputError
        Unknown architecture; a matrix no view covers; quantised, meta or tensor-parallel weights; weights tied inside a
        block or between blocks; head counts that do not fit the shapes. The message names the layer.
    """
    path, blocks = find_blocks(model, spec)
    spec = spec or _known_spec(model)
    layouts = [block_layout(block, spec, name=f"{path}.{i}") for i, block in enumerate(blocks)]
    home: dict[int, str] = {}
    for layout in layouts:
        for view in layout:
            other = home.setdefault(id(view.parameter), layout.name)
            if other != layout.name:
                raise InputError(
                    f"{view.name} is one tensor tied between blocks {other} and {layout.name}: an edit of one would "
                    "change both; untie them first"
                )
    return layouts


def block_layout(block: nn.Module, spec: ChainSpec | None = None, *, name: str = "") -> BlockLayout:
    """Lay out one decoder block; see :func:`block_layouts`, which does it for a whole model.

    Without a ``spec`` the architecture is read from the config that transformers' attention modules carry.
    """
    spec = spec or _known_spec(block)
    attention = None
    if spec.attention is not None and _descend(block, spec.attention.q) is not None:
        attention = _attention_layout(block, spec.attention, name)
    mlps = tuple(mlp for mlp_spec in spec.mlps for mlp in _mlp_layouts(block, mlp_spec, name))
    layout = BlockLayout(block, attention, mlps, name)
    _check_cover(layout, spec)
    return layout


def _attention_layout(block: nn.Module, spec: AttentionSpec, where: str) -> AttentionLayout:
    n_heads, n_kv_heads = spec.heads or _heads(block, where)
    fused = spec.q == spec.k == spec.v
    whole = _single_view(block, spec.q, where)
    groups = n_heads + 2 * n_kv_heads if fused else n_heads
    head_dim = whole.out_features // groups
    d_q, d_kv = n_heads * head_dim, n_kv_heads * head_dim
    if fused:
        bounds = {"q": (0, d_q), "k": (d_q, d_q + d_kv), "v": (d_q + d_kv, d_q + 2 * d_kv)}
        q, k, v = (_part(whole, role, *rows) for role, rows in bounds.items())
        fits = whole.out_features == d_q + 2 * d_kv
    else:
        q, k, v = whole, _single_view(block, spec.k, where), _single_view(block, spec.v, where)
        fits = (q.out_features, k.out_features, v.out_features) == (d_q, d_kv, d_kv)
    o = _single_view(block, spec.o, where)
    if not fits or o.in_features != d_q or n_heads % n_kv_heads:
        raise InputError(
            f"{where}: the shapes q {_shape(q)}, k {_shape(k)}, v {_shape(v)}, o {_shape(o)} do not fit {n_heads} "
            f"query and {n_kv_heads} key-value heads; give AttentionSpec(heads=(query, key-value))"
        )
    return AttentionLayout(q, k, v, o, n_heads, n_kv_heads, head_dim)


def _mlp_layouts(block: nn.Module, spec: MLPSpec, where: str) -> Iterator[MLPLayout]:
    """One layout for a dense chain, one an expert for experts, none where the block lacks these modules."""
    ups, downs = _views(block, spec.up, where), _views(block, spec.down, where)
    gates = _views(block, spec.gate, where) if spec.gate is not None else [None] * len(ups)
    if not len(ups) == len(downs) == len(gates):
        raise InputError(
            f"{where}: the paths of an MLPSpec must lead to as many linears each, but there are {len(gates)} at "
            f"{spec.gate!r}, {len(ups)} at {spec.up!r} and {len(downs)} at {spec.down!r}"
        )
    for gate, up, down in zip(gates, ups, downs, strict=True):
        if gate is not None and spec.gate == spec.up:
            m = up.out_features // 2
            gate, up = _part(gate, "gate", 0, m), _part(up, "up", m, 2 * m)
        if up.out_features != down.in_features or (gate is not None and _shape(gate) != _shape(up)):
            raise InputError(
                f"{where}: {up.name} {_shape(up)} does not feed {down.name} {_shape(down)}; mend the MLPSpec"
            )
        yield MLPLayout(gate, up, down)


def _part(view: LinearView, role: str, start: int, stop: int) -> LinearView:
    return LinearView(
        f"{view.name}.{role}", view.module, view.parameter, slice(start, stop), view.expert, view.transposed
    )


def _single_view(block: nn.Module, path: str, where: str) -> LinearView:
    views = _views(block, path, where)
    if len(views) != 1:
        raise InputError(f"{where}: there are {len(views)} linears at {path!r}, not one; mend the AttentionSpec")
    return views[0]


def _views(block: nn.Module, path: str, where: str) -> list[LinearView]:
    """Return the whole linears at ``path``: one, one an expert, or none where the block has nothing there."""
    if "*" in path:
        head, tail = path.split(".*.")
        experts = _descend(block, head)
        return [v for i in range(len(experts or ())) for v in _views(block, f"{head}.{i}.{tail}", where)]
    found = _descend(block, path)
    full = f"{where}.{path}".lstrip(".")
    if found is None:
        return []
    if isinstance(found, nn.Parameter):  # stacked experts: (E, out, in)
        owner, _, leaf = path.rpartition(".")
        module = block.get_submodule(owner)
        _check_weight(found, module, full)
        if not getattr(module, "is_concatenated", True):
            raise InputError(
                f"{full} interleaves gate and up rows, which no view can split: this architecture is not known"
            )
        transposed = bool(getattr(module, "is_transposed", False))
        return [
            LinearView(f"{owner}.{i}.{leaf}", module, found, expert=i, transposed=transposed) for i in range(len(found))
        ]
    from transformers.pytorch_utils import Conv1D

    weight = getattr(found, "weight", None)
    if not isinstance(found, (nn.Linear, Conv1D)) or not isinstance(weight, nn.Parameter):
        raise InputError(
            f"{full} is a {type(found).__name__}, not a linear layer with a weight: if it is quantised (GPTQ, AWQ), "
            "load the model with dequantised weights"
        )
    _check_weight(weight, found, full)
    return [LinearView(path, found, weight, transposed=isinstance(found, Conv1D))]


def _check_weight(weight: nn.Parameter, module: nn.Module, full: str) -> None:
    kind = f"{full} ({type(module).__name__}, {str(weight.dtype).removeprefix('torch.')})"
    if hasattr(weight, "device_mesh"):  # a DTensor
        raise InputError(f"{kind} is sharded over devices: load the model without tensor parallelism (tp_plan=None)")
    if weight.device.type == "meta":
        raise InputError(f"{kind} has no data (meta device, or offloaded by device_map): load the model on one device")
    if not weight.is_floating_point() or weight.element_size() == 1:
        raise InputError(f"{kind} is quantised: call model.dequantize() or load the unquantised weights")


def _check_cover(layout: BlockLayout, spec: ChainSpec) -> None:
    """Every matrix of the block belongs to exactly one module and is covered by views, or is named in ``others``."""
    paths: dict[int, list[str]] = {}
    for path, parameter in layout.block.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
    covered: dict[int, int] = {}
    for view in layout:
        covered[id(view.parameter)] = covered.get(id(view.parameter), 0) + view.weight.numel()
    for path, parameter in layout.block.named_parameters():
        if any(f"{path}.".startswith(f"{other}.") for other in spec.others):
            continue
        if len(paths[id(parameter)]) > 1 and id(parameter) in covered:
            raise InputError(f"{layout.name}: {' and '.join(paths[id(parameter)])} are tied: untie them first")
        if parameter.ndim > 1 and covered.get(id(parameter), 0) != parameter.numel():
            raise InputError(
                f"{layout.name}: the matrix {path} {tuple(parameter.shape)} is not covered exactly once by the views "
                f"({', '.join(view.name for view in layout) or 'none'}). {_how_to_declare(layout.block)}"
            )


def _known_spec(module: nn.Module) -> ChainSpec:
    config = _config(module)
    kind = getattr(config, "model_type", None)
    if kind not in SPECS:
        raise InputError(f"the architecture {kind or type(module).__name__!r} is not known. {_how_to_declare(module)}")
    return SPECS[kind]


def _config(module: nn.Module) -> object | None:
    """Return the config of a transformers module or of the first of its submodules that carries one."""
    return next((m.config for m in module.modules() if hasattr(m, "config")), None)


def _heads(block: nn.Module, where: str) -> tuple[int, int]:
    config = _config(block)
    n_heads = getattr(config, "num_attention_heads", None)
    if n_heads is None:
        raise InputError(
            f"{where}: no config says how many heads there are; give AttentionSpec(heads=(query, key-value))"
        )
    return n_heads, getattr(config, "num_key_value_heads", None) or n_heads


def _descend(module: nn.Module, path: str) -> nn.Module | nn.Parameter | None:
    """Return what lies at a dotted path, or ``None``."""
    found: nn.Module | nn.Parameter | None = module
    for name in path.split("."):
        found = getattr(found, name, None) if not name.isdigit() else found[int(name)]  # type: ignore[index]
    return found if isinstance(found, (nn.Module, nn.Parameter)) else None


def _shape(view: LinearView) -> tuple[int, int]:
    return view.out_features, view.in_features


def _how_to_declare(module: nn.Module) -> str:
    """Return a ChainSpec to fill in and the module tree (the first item of each ModuleList)."""
    lines = [f"  {name or '.'}: {type(m).__name__}" for name, m in module.named_modules() if not _later_item(name)]
    lines += [f"  {name}: {tuple(p.shape)}" for name, p in module.named_parameters() if p.ndim > 2]
    return (
        "Declare its blocks: ChainSpec(blocks='path.of.layers', attention=AttentionSpec(q='self_attn.q_proj', k=..., "
        "v=..., o=...), mlps=(MLPSpec(gate=..., up=..., down=...),), others=('mlp.router',)), with paths inside a "
        "block as in this tree (the same path for q, k and v means fused):\n" + "\n".join(lines)
    )


def _later_item(name: str) -> bool:
    return any(part.isdigit() and part != "0" for part in name.split("."))
