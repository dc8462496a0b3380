from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fairtrial.causal_lm.layout import (
    AttentionSpec,
    ChainSpec,
    LinearView,
    MLPSpec,
    block_layout,
    block_layouts,
    find_blocks,
)
from fairtrial.errors import InputError

ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")


def test_views_cover_every_matrix_of_a_block_exactly_once(model):
    for layout in block_layouts(model):
        for view in layout:
            view.weight.add_(1000.0)
        for name, parameter in layout.block.named_parameters():
            if parameter.ndim > 1 and name not in ROUTERS:
                assert ((parameter > 900) & (parameter < 1100)).all(), name
            else:
                assert (parameter < 900).all(), name


def test_views_share_memory_and_writing_changes_the_model(model, ids):
    layout = block_layouts(model)[1]
    with torch.no_grad():
        before = model(ids).logits
        layout.mlps[0].down.weight.zero_()
        layout.attention.o.weight.mul_(2)
        assert not torch.equal(model(ids).logits, before)
    view = layout.mlps[0].down
    assert view.weight.untyped_storage().data_ptr() == view.parameter.untyped_storage().data_ptr()
    assert not view.weight.requires_grad


def test_views_reproduce_the_outputs_of_their_modules(model):
    for layout in block_layouts(model):
        for view in layout:
            if isinstance(view.module, (nn.Linear, Conv1D)):
                x = torch.randn(5, view.in_features)
                bias = view.module.bias
                rows = view.rows or slice(None)
                expected = view.module(x)[:, rows]
                torch.testing.assert_close(F.linear(x, view.weight, None if bias is None else bias[rows]), expected)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_views_of_stacked_experts_reproduce_the_experts(tiny, kind):
    layout = block_layouts(tiny(kind))[0]
    module = layout.mlps[0].up.module
    x = torch.randn(6, layout.mlps[0].up.in_features)
    for mlp in layout.mlps[:3]:
        assert mlp.gate is not None
        chosen = torch.full((6, 1), mlp.up.expert)
        expected = F.linear(module.act_fn(F.linear(x, mlp.gate.weight)) * F.linear(x, mlp.up.weight), mlp.down.weight)
        torch.testing.assert_close(module(x, chosen, torch.ones(6, 1)), expected)


def test_heads_fit_the_shapes(model):
    for layout in block_layouts(model):
        a = layout.attention
        assert a.q.out_features == a.o.in_features == a.n_heads * a.head_dim
        assert a.k.out_features == a.v.out_features == a.n_kv_heads * a.head_dim
        assert a.n_heads == 4
        assert a.n_kv_heads == (2 if getattr(model.config, "num_key_value_heads", None) else 4)


def test_names_are_unique_and_found_by_name(model):
    for layout in block_layouts(model):
        names = [view.name for view in layout]
        assert len(set(names)) == len(names)
        assert all(layout[name].name == name for name in names)


def test_fused_views_are_named_for_their_role(tiny):
    names = [view.name for view in block_layouts(tiny("phi3"))[0]]
    assert names[:3] == ["self_attn.qkv_proj.q", "self_attn.qkv_proj.k", "self_attn.qkv_proj.v"]
    assert names[4:6] == ["mlp.gate_up_proj.gate", "mlp.gate_up_proj.up"]
    assert [view.name for view in block_layouts(tiny("mixtral"))[0]][7:10] == [
        "mlp.experts.1.gate_up_proj.gate",
        "mlp.experts.1.gate_up_proj.up",
        "mlp.experts.1.down_proj",
    ]


def test_shared_and_routed_experts_and_dense_blocks_mix(tiny):
    sparse, dense = block_layouts(tiny("qwen2_moe"))
    assert [mlp.up.out_features for mlp in sparse.mlps] == [12, 12, 12, 20]
    assert [mlp.up.out_features for mlp in dense.mlps] == [24]


def test_one_block_is_laid_out_without_its_model(model):
    alone, inside = block_layout(find_blocks(model)[1][1]), block_layouts(model)[1]
    assert [view.name for view in alone] == [view.name for view in inside]
    assert alone.attention.n_kv_heads == inside.attention.n_kv_heads


def test_the_inner_model_has_the_same_blocks(model):
    assert block_layouts(model.base_model)[0].block is block_layouts(model)[0].block


def test_blocks_are_named_by_their_path(tiny):
    assert [layout.name for layout in block_layouts(tiny("gpt2"))] == ["transformer.h.0", "transformer.h.1"]
    assert block_layouts(tiny("opt"))[1].name == "model.decoder.layers.1"


# ---------------------------------------------------------------- architectures of one's own


class Block(nn.Module):
    """Fused qkv with two query heads and one key-value head, a router, and two experts in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(8, 8 + 4 + 4), "out": nn.Linear(8, 8)})
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(8, 6), "w2": nn.Linear(6, 8)}) for _ in range(2))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(2))})


ATTENTION = AttentionSpec("attn.qkv", "attn.qkv", "attn.qkv", "attn.out", heads=(2, 1))
SPEC = ChainSpec("trunk.blocks", ATTENTION, (MLPSpec(up="experts.*.w1", down="experts.*.w2"),), others=("router",))


def test_a_declared_architecture_is_laid_out():
    layouts = block_layouts(Own(), SPEC)
    assert [layout.name for layout in layouts] == ["trunk.blocks.0", "trunk.blocks.1"]
    assert [(view.name, *view.weight.shape) for view in layouts[0]] == [
        ("attn.qkv.q", 8, 8),
        ("attn.qkv.k", 4, 8),
        ("attn.qkv.v", 4, 8),
        ("attn.out", 8, 8),
        ("experts.0.w1", 6, 8),
        ("experts.0.w2", 8, 6),
        ("experts.1.w1", 6, 8),
        ("experts.1.w2", 8, 6),
    ]


def test_a_chain_without_attention_is_laid_out():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 6), "b": nn.Linear(6, 4)})])})
    (layout,) = block_layouts(model, ChainSpec("layers", None, (MLPSpec(up="a", down="b"),)))
    assert layout.attention is None
    assert [view.name for view in layout] == ["a", "b"]


# ---------------------------------------------------------------- bad input


def test_unknown_architecture_prints_the_module_tree_and_how_to_write_a_chain_spec():
    with pytest.raises(InputError, match="ChainSpec") as error:
        block_layouts(Own())
    assert "trunk.blocks.0.attn.qkv: Linear" in str(error.value)
    assert "trunk.blocks.1" not in str(error.value)


def test_a_spec_whose_blocks_are_no_module_list_prints_the_tree():
    with pytest.raises(InputError, match="'blocks' is not a ModuleList of Own"):
        block_layouts(Own(), ChainSpec("blocks", ATTENTION, SPEC.mlps))


def test_a_matrix_no_view_covers_is_named():
    with pytest.raises(InputError, match=r"trunk\.blocks\.0: the matrix router\.weight"):
        block_layouts(Own(), ChainSpec("trunk.blocks", ATTENTION, SPEC.mlps))


def test_a_matrix_declared_twice_is_named():
    spec = ChainSpec("trunk.blocks", ATTENTION, (*SPEC.mlps, *SPEC.mlps), ("router",))
    with pytest.raises(InputError, match=r"experts\.0\.w1\.weight .* not covered exactly once"):
        block_layouts(Own(), spec)


def test_heads_that_do_not_fit_are_refused():
    attention = AttentionSpec("attn.qkv", "attn.qkv", "attn.qkv", "attn.out", heads=(3, 2))
    with pytest.raises(InputError, match="do not fit 3 query and 2 key-value heads"):
        block_layouts(Own(), ChainSpec("trunk.blocks", attention, SPEC.mlps, SPEC.others))
    with pytest.raises(InputError, match="no config says how many heads"):
        block_layouts(Own(), ChainSpec("trunk.blocks", AttentionSpec(*["attn.qkv"] * 3, "attn.out"), SPEC.mlps))


@pytest.mark.parametrize(
    ("mlp", "message"),
    [
        (MLPSpec(up="experts.*.w1", down="experts.*.none"), "as many linears each"),
        (MLPSpec(up="experts.*.w2", down="experts.*.w1", gate="experts.*.w1"), "does not feed"),
        (MLPSpec(up="experts", down="experts.*.w1"), "is a ModuleList, not a linear layer"),
    ],
)
def test_a_chain_that_does_not_fit_is_refused(mlp, message):
    with pytest.raises(InputError, match=message):
        block_layouts(Own(), ChainSpec("trunk.blocks", ATTENTION, (mlp,), SPEC.others))


def test_a_missing_projection_is_refused():
    with pytest.raises(InputError, match=r"0 linears at 'attn\.none'"):
        block_layouts(
            Own(), ChainSpec("trunk.blocks", AttentionSpec(*["attn.qkv"] * 3, "attn.none", (2, 1)), SPEC.mlps)
        )


def test_weights_tied_inside_a_block_are_refused():
    model = Own()
    first, second = model.trunk["blocks"][0].experts
    second["w1"].weight = first["w1"].weight
    with pytest.raises(InputError, match=r"experts\.0\.w1\.weight and experts\.1\.w1\.weight are tied"):
        block_layouts(model, SPEC)


def test_weights_tied_between_blocks_are_refused(llama):
    blocks = llama.model.layers
    blocks[1].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
    with pytest.raises(InputError, match=r"mlp\.up_proj is one tensor tied between blocks model\.layers\.0 and"):
        block_layouts(llama)


def test_meta_weights_are_refused(tiny, llama):
    with pytest.raises(InputError, match=r"model\.layers\.0\.self_attn\.q_proj .* has no data"):
        block_layouts(llama.to("meta"))
    mixtral = tiny("mixtral")
    mixtral.model.layers[0].mlp.to("meta")
    with pytest.raises(InputError, match=r"experts\.gate_up_proj .* has no data"):
        block_layouts(mixtral)


def test_offloaded_weights_are_refused(llama):
    accelerate = pytest.importorskip("accelerate")
    with pytest.raises(InputError, match="offloaded by device_map"):
        block_layouts(accelerate.cpu_offload(llama, execution_device="cpu"))


def test_quantised_linears_are_refused_with_the_remedy(llama):
    linear = llama.model.layers[1].mlp.down_proj
    linear.weight = nn.Parameter(linear.weight.to(torch.int8), requires_grad=False)  # as bitsandbytes keeps them
    with pytest.raises(
        InputError, match=r"model\.layers\.1\.mlp\.down_proj \(Linear, int8\) is quantised: .*dequantize"
    ):
        block_layouts(llama)
    linear.weight = nn.Parameter(torch.zeros(16, 24).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(InputError, match="float8_e4m3fn"):
        block_layouts(llama)
    llama.model.layers[1].mlp.down_proj = nn.Module()  # as GPTQ replaces them
    llama.model.layers[1].mlp.down_proj.register_buffer("qweight", torch.zeros(3, 16, dtype=torch.int32))
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.down_proj is a Module, .*dequantised"):
        block_layouts(llama)


def test_tensor_parallel_weights_are_refused(llama):
    llama.model.layers[0].self_attn.k_proj.weight.device_mesh = object()  # what a DTensor has and a tensor has not
    with pytest.raises(InputError, match=r"self_attn\.k_proj .* sharded .*tp_plan=None"):
        block_layouts(llama)


def test_interleaved_experts_are_refused(tiny):
    model = tiny("mixtral")
    model.model.layers[0].mlp.experts.is_concatenated = False
    with pytest.raises(InputError, match="interleaves"):
        block_layouts(model)


def test_adapters_are_refused(llama):
    llama.peft_config = {}
    with pytest.raises(InputError, match="merge_and_unload"):
        block_layouts(llama)


def test_an_unknown_name_lists_the_linears(llama):
    with pytest.raises(InputError, match=r"no linear 'mlp\.w1'; it has: self_attn\.q_proj"):
        block_layouts(llama)[0]["mlp.w1"]


def test_a_transposed_expert_is_turned():
    stacked = nn.Parameter(torch.randn(2, 4, 6))
    view = LinearView("e.1.w", nn.Module(), stacked, rows=slice(2, 6), expert=1, transposed=True)
    assert torch.equal(view.weight, stacked[1].T[2:6])
    assert (view.out_features, view.in_features) == (4, 4)
