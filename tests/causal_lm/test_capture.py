from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from fairtrial.causal_lm.capture import evaluation_mode, propagate
from fairtrial.causal_lm.layout import AttentionSpec, ChainSpec, MLPSpec, find_blocks
from fairtrial.errors import InputError


def block_outputs(model, **batch):
    """What each block really gives in a forward pass of the model."""
    outputs = []
    hooks = [block.register_forward_hook(lambda b, a, out: outputs.append(out)) for block in find_blocks(model)[1]]
    with torch.no_grad():
        model(**batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs


def test_replayed_blocks_give_what_the_model_gives(model, ids):
    expected = block_outputs(model, input_ids=ids)
    for depth, (_, inputs) in enumerate(propagate(model, ids.split(2))):
        torch.testing.assert_close(torch.cat(list(inputs.run())), expected[depth], rtol=0, atol=1e-6)


def test_replayed_blocks_give_what_the_model_gives_under_padding(model, padded):
    expected = block_outputs(model, **padded)
    real = padded["attention_mask"].bool()
    for depth, (_, inputs) in enumerate(propagate(model, [padded])):
        (output,) = inputs.run()
        torch.testing.assert_close(output[real], expected[depth][real], rtol=0, atol=1e-6)
        assert torch.equal(inputs.masks[0], real)


def test_a_modified_block_changes_what_the_next_is_given(model, ids):
    for depth, (layout, inputs) in enumerate(propagate(model, [ids])):
        if depth == 1:
            expected = block_outputs(model, input_ids=ids)[0]
            torch.testing.assert_close(inputs.hidden[0], expected, rtol=0, atol=1e-6)
        for view in layout:
            view.weight.mul_(0.5)


def test_kept_outputs_are_those_of_the_unmodified_block(llama, ids):
    expected = block_outputs(llama, input_ids=ids)[0]
    for depth, (layout, inputs) in enumerate(propagate(llama, [ids])):
        if depth == 1:
            torch.testing.assert_close(inputs.hidden[0], expected, rtol=0, atol=1e-6)
        list(inputs.run(keep=True))
        layout.mlps[0].down.weight.zero_()


def test_only_the_inputs_of_the_current_block_are_kept(tiny, ids):
    seen = []
    for _, inputs in propagate(tiny("llama", num_hidden_layers=4), [ids]):
        assert all(old() is None for old in seen)
        seen.append(weakref.ref(inputs.hidden[0]))
        del inputs


def test_the_capturing_pass_runs_one_block_and_no_head(llama, ids):
    ran = []
    llama.lm_head.register_forward_hook(lambda *args: ran.append("head"))
    for block in llama.model.layers:
        block.mlp.register_forward_hook(lambda *args: ran.append("mlp"))
    next(propagate(llama, [ids]))
    assert ran == ["mlp"]


def test_outputs_can_be_used_with_autograd(llama, ids):
    _, inputs = next(propagate(llama, [ids]))
    args, kwargs = inputs.arguments[0]
    inputs.block(inputs.hidden[0], *args, **kwargs).sum().backward()
    assert inputs.block.mlp.down_proj.weight.grad is not None


def test_the_model_is_left_as_it_was(llama, ids):
    llama.train()
    llama.model.layers[0].mlp.eval()
    steps = propagate(llama, [ids])
    next(steps)
    assert not any(module.training for module in llama.modules())
    steps.close()
    assert llama.training
    assert not llama.model.layers[0].mlp.training
    for block in llama.model.layers:
        assert "forward" not in vars(block)
        assert not block._forward_pre_hooks
        assert not block._forward_hooks


def test_a_wrapped_forward_is_put_back(llama, ids):
    block = llama.model.layers[1]
    wrapped = block.forward = lambda *args, **kwargs: type(block).forward(block, *args, **kwargs)
    expected = block_outputs(llama, input_ids=ids)
    outputs = [next(inputs.run()) for _, inputs in propagate(llama, [ids])]
    torch.testing.assert_close(outputs[1], expected[1], rtol=0, atol=1e-6)
    assert vars(block)["forward"] is wrapped


class TupleBlock(nn.Module):
    """A block as older code writes them: hidden states by keyword, a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, hidden_states, shift):
        return hidden_states + self.down(torch.relu(self.up(hidden_states + shift))), None


class TupleModel(nn.Module):
    def __init__(self, ran: slice = slice(None)) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList(TupleBlock() for _ in range(3))
        self.ran = ran

    def forward(self, ids):
        hidden = self.embed(ids)
        for i, layer in enumerate(self.layers[self.ran]):
            hidden = layer(hidden_states=hidden, shift=float(i))[0]
        return hidden


TUPLE_SPEC = ChainSpec("layers", None, (MLPSpec(up="up", down="down"),))


def test_blocks_that_take_keywords_and_return_tuples_are_replayed():
    model, ids = TupleModel(), torch.arange(10).view(2, 5)
    outputs = [next(inputs.run()) for _, inputs in propagate(model, [ids], TUPLE_SPEC)]
    torch.testing.assert_close(outputs[-1], model(ids).detach())


# ---------------------------------------------------------------- bad input


def test_no_text_is_refused(llama):
    with pytest.raises(InputError, match="no batch of text"):
        next(propagate(llama, []))


@pytest.mark.parametrize("ran", [slice(1, None), slice(0, 2), slice(None, None, -1)])
def test_skipped_or_repeated_blocks_are_refused(ran):
    with pytest.raises(InputError, match="does not run its 3 blocks one after the other"):
        next(propagate(TupleModel(ran), [torch.arange(5)[None]], TUPLE_SPEC))


def test_an_unknown_architecture_is_refused_before_any_pass():
    with pytest.raises(InputError, match="ChainSpec"):
        next(propagate(TupleModel(), [torch.arange(5)[None]]))
    with pytest.raises(InputError, match="not covered"):
        next(propagate(TupleModel(), [], ChainSpec("layers", AttentionSpec(*"qkvo"), ())))


def test_evaluation_mode_restores_after_an_exception(llama):
    llama.train()
    with pytest.raises(ZeroDivisionError), evaluation_mode(llama):
        1 / 0  # noqa: B018
    assert all(module.training for module in llama.modules())
