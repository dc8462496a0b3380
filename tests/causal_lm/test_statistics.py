from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fairtrial.causal_lm.capture import propagate
from fairtrial.causal_lm.layout import ChainSpec, MLPSpec, block_layouts
from fairtrial.causal_lm.statistics import second_moments
from fairtrial.errors import InputError


def inputs_of_linears(model, batches):
    """Inputs (n, in) of every view of every block, by brute force: hooks on every module in whole forward passes."""
    layouts = block_layouts(model)
    seen = [{view.name: [] for view in layout} for layout in layouts]
    mask = None
    hooks = []

    def keep(x, views, store):
        x = x.reshape(-1, x.shape[-1])
        for view in views:
            store[view.name].append(x if mask is None else x[mask.reshape(-1)])

    for layout, store in zip(layouts, seen, strict=True):
        for module in layout.block.modules():
            views = [view for view in layout if view.module is module]
            if isinstance(module, (nn.Linear, Conv1D)) and views:
                hooks.append(
                    module.register_forward_pre_hook(lambda m, a, views=views, store=store: keep(a[0], views, store))
                )
            elif views:  # experts: one token at a time
                mlps = [mlp for mlp in layout.mlps if mlp.up.module is module]

                def expert_inputs(module, args, mlps=mlps, store=store):
                    for t, (x, chosen) in enumerate(zip(args[0], args[1], strict=True)):
                        if mask is None or mask.reshape(-1)[t]:
                            for e in chosen.tolist():
                                gate, up, down = mlps[e]
                                z = module.act_fn(F.linear(x, gate.weight)) * F.linear(x, up.weight)
                                store[gate.name].append(x[None])
                                store[up.name].append(x[None])
                                store[down.name].append(z[None])

                hooks.append(module.register_forward_pre_hook(expert_inputs))
    with torch.no_grad():
        for batch in batches:
            mask = batch["attention_mask"].bool() if "attention_mask" in batch else None
            model(**batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [{name: torch.cat(xs) if xs else None for name, xs in store.items()} for store in seen]


def check(model, batches):
    expected = inputs_of_linears(model, batches)
    for depth, (layout, inputs) in enumerate(propagate(model, batches)):
        statistics = second_moments(layout, inputs, hessian=True)
        assert list(statistics) == [view.name for view in layout]
        for name, found in statistics.items():
            x = expected[depth][name]
            if x is None:
                assert found.n_tokens == 0
                assert not found.x_norm.any()
                continue
            assert found.n_tokens == len(x)
            torch.testing.assert_close(found.x_norm, x.norm(dim=0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found.hessian, x.T @ x, rtol=1e-4, atol=1e-4)


def test_moments_equal_those_of_the_inputs_in_whole_passes(model, ids):
    check(model, [{"input_ids": rows} for rows in ids.split(2)])


def test_padding_is_left_out(model, padded):
    check(model, [padded])


def test_linears_that_share_an_input_share_their_statistics(model, ids):
    layout, inputs = next(propagate(model, [ids]))
    statistics = second_moments(layout, inputs)
    q, k, v, o = (statistics[view.name] for view in layout.attention)
    assert q is k is v
    assert o is not q
    for mlp in layout.mlps:
        if mlp.gate is not None:
            assert statistics[mlp.gate.name] is statistics[mlp.up.name]


def test_the_hessian_is_made_on_request_and_its_diagonal_is_the_squared_norm(llama, ids):
    layout, inputs = next(propagate(llama, [ids]))
    assert all(s.hessian is None for s in second_moments(layout, inputs).values())
    for s in second_moments(layout, inputs, hessian=True).values():
        torch.testing.assert_close(s.hessian.diagonal(), s.x_norm.square())
        assert s.x_norm.dtype == s.hessian.dtype == torch.float32


@pytest.mark.parametrize(("keep", "runs"), [(True, 1), (False, 2)])
def test_one_pass_a_block_if_kept(llama, ids, keep, runs):
    counts = [0, 0]
    for i, block in enumerate(llama.model.layers):
        block.register_forward_hook(lambda *args, i=i: counts.__setitem__(i, counts[i] + 1))
    for layout, inputs in propagate(llama, [ids]):
        second_moments(layout, inputs, keep=keep)
    assert counts == [1 + runs, 1]  # the first block also ran in the capturing pass; after the last comes nothing


def test_half_precision_is_accumulated_in_float32(llama, ids):
    layout, inputs = next(propagate(llama.bfloat16(), [ids]))
    (hidden,) = inputs.hidden
    with torch.no_grad():
        x = layout.block.input_layernorm(hidden).reshape(-1, 16)
    found = second_moments(layout, inputs)["self_attn.q_proj"].x_norm
    torch.testing.assert_close(found, x.float().norm(dim=0))


def test_hooks_are_gone_afterwards(model, ids):
    layout, inputs = next(propagate(model, [ids]))
    second_moments(layout, inputs)
    assert not any(module._forward_pre_hooks for module in layout.block.modules())


class RoutedBlock(nn.Module):
    """Two experts in a ModuleList; even token ids go to the first, odd ones to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(2))

    def forward(self, x, expert):
        out = torch.empty_like(x)
        for e in range(2):
            out[expert == e] = self.experts[e](x[expert == e])
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(10, 4), nn.ModuleList([RoutedBlock()])

    def forward(self, ids, attention_mask=None):
        return self.blocks[0](self.embed(ids), ids % 2)


def test_experts_in_a_module_list_count_their_own_tokens():
    model, spec = Routed(), ChainSpec("blocks", None, (MLPSpec(up="experts.*.0", down="experts.*.2"),))
    ids = torch.tensor([[0, 1, 3], [5, 7, 9]])
    layout, inputs = next(propagate(model, [ids], spec))
    found = second_moments(layout, inputs)
    assert [found[f"experts.{e}.{k}"].n_tokens for e in range(2) for k in (0, 2)] == [1, 1, 5, 5]
    torch.testing.assert_close(found["experts.1.0"].x_norm, model.embed(ids[ids % 2 == 1]).norm(dim=0))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    layout, inputs = next(propagate(model, [{"input_ids": ids, "attention_mask": mask}], spec))
    with pytest.raises(InputError, match="without padding"):
        second_moments(layout, inputs)


@pytest.mark.parametrize("kind", ["llama", "opt", "mixtral"])
def test_activations_that_are_not_finite_name_layer_and_text(tiny, kind):
    model = tiny(kind)
    model.get_input_embeddings().weight.data[7] = torch.nan
    ids = torch.full((5, 4), 9)
    ids[3, 2] = 7  # in the second batch
    layout, inputs = next(propagate(model, ids.split(2)))
    with pytest.raises(InputError, match=rf"{layout.name}\.\S+: its input is not finite in text 3"):
        second_moments(layout, inputs)


@pytest.mark.parametrize(("kind", "name"), [("llama", r"mlp\.down_proj"), ("mixtral", r"mlp\.experts\.\d\.down_proj")])
def test_an_overflow_inside_a_block_names_the_linear_it_reaches(tiny, ids, kind, name):
    layout, inputs = next(propagate(tiny(kind), [ids]))
    for mlp in layout.mlps:
        mlp.gate.weight.mul_(1e25)
        mlp.up.weight.mul_(1e25)
    with pytest.raises(InputError, match=rf"{name}: its input is not finite in text 0"):
        second_moments(layout, inputs)
