"""Every input that direct feedback cannot train gets an error that names it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.training.feedback_alignment import DirectFeedback, feedback_alignment, find_blocks, held_bytes
from fairtrial.training.networks import mlp

X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3


class Net(nn.Module):
    """Two blocks and a head; ``forward`` is given."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        for name, module in modules.items():
            setattr(self, name, module)
        self.way = forward

    def forward(self, x):
        return self.way(self, x)


def step(model, blocks=("a", "b"), loss=None, **options):
    feedback = DirectFeedback(model, list(blocks), **options)
    logits = model(X)
    value = F.cross_entropy(logits, Y) if loss is None else loss(model, logits)
    feedback.backward(value, logits)
    return feedback


def chain(m, x):
    return m.head(m.b(m.a(x)))


def test_an_unknown_block_is_named_with_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'head'"):
        DirectFeedback(Net(chain), ["heed"])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [("a", "'auto' or a list"), (["a", "a"], "named twice"), ([1], "module names"), (["way"], "there is no module")],
)
def test_blocks_are_names_each_once(blocks, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        DirectFeedback(Net(chain), blocks)


def test_a_block_inside_a_block_is_refused():
    with pytest.raises(InputError, match="inside another"):
        DirectFeedback(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 3)), ["0", "0.0"])


def test_blocks_are_a_list_of_names_and_a_seed_is_a_whole_number():
    with pytest.raises(InputError, match="blocks=5: 'auto' or a list"):
        DirectFeedback(Net(chain), 5)
    with pytest.raises(InputError, match="seed='x': give a whole number"):
        step(Net(chain), seed="x")


def test_a_network_without_equal_blocks_has_to_name_them():
    with pytest.raises(InputError, match="give blocks="):
        find_blocks(Net(chain))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "bp"}, "method='bp'"), ({"rank": 0}, "rank=0"), ({"rank": True}, "rank=True"),
        ({"surrogate_lr": float("nan")}, "surrogate_lr=nan"), ({"noise": -1.0}, "noise"), ({"warmup": -1}, "warmup"),
        ({"surrogate_every": 0}, "surrogate_every"), ({"updates_per_step": 1.5}, "updates_per_step"),
        ({"target": "z"}, "target"), ({"objective": "z"}, "objective"), ({"surrogate": "cubic"}, "cubic"),
        ({"executor": "gpu"}, "executor"), ({"executor": "streams"}, "CUDA"),
        ({"method": "drtp", "learn": True}, "drtp"),
        ({"method": "local", "learn": False}, "local"), ({"objective": "difference", "target": "labels"}, "difference"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(options, message):
    with pytest.raises(InputError, match=message):
        DirectFeedback(Net(chain), ["a"], **options)


def test_not_a_module():
    with pytest.raises(InputError, match="Module is needed"):
        DirectFeedback(lambda x: x)


def test_a_block_must_return_a_tensor_first():
    class Odd(nn.Module):
        def forward(self, x):
            return [x]

    model = Net(lambda m, x: m.head(m.odd(m.a(x))[0]), odd=Odd())
    with pytest.raises(InputError, match="'odd' returns list"):
        step(model, ["odd"])


def test_a_way_around_the_cut_names_block_and_parameter():
    def dense(m, x):
        before = m.stem(x)
        return m.head(m.b(before) + before)

    with pytest.raises(InputError, match=r"the head uses block 'b' by a way around the cut \(parameter 'stem"):
        step(Net(dense, stem=nn.Linear(4, 4)), ["b"])


def test_two_pieces_may_begin_at_one_cut():
    def pyramid(m, x):
        h = m.a(x)
        return m.head(m.b(h) + h)

    step(Net(pyramid)).detach()


def test_a_block_off_the_path_is_refused():
    def off(m, x):
        h = m.a(x)
        m.b(h)
        return m.head(h)

    with pytest.raises(InputError, match="'b' does not reach the logits"):
        step(Net(off))


def test_a_change_in_place_behind_the_cut_is_found_at_every_step():
    model = Net(lambda m, x: m.head(F.relu(m.b(m.a(x)), inplace=model.inplace)))
    model.inplace = True
    with pytest.raises(InputError, match="'b' is changed in place"):
        step(model)
    model = Net(lambda m, x: m.head(F.relu(m.b(m.a(x)), inplace=model.inplace)))
    model.inplace = False
    feedback = step(model)
    model.inplace = True
    logits = model(X)
    with pytest.raises(InputError, match="'b' is changed in place"):
        feedback.backward(F.cross_entropy(logits, Y), logits)


def test_a_loss_on_hidden_states_is_refused():
    kept = []

    def keeping(m, x):
        kept.append(m.a(x))
        return m.head(m.b(kept[-1]))

    with pytest.raises(InputError, match="hidden states of block 'a'"):
        step(Net(keeping), loss=lambda m, z: F.cross_entropy(z, Y) + kept[-1].square().mean())


def test_a_loss_of_other_logits_is_refused():
    with pytest.raises(InputError, match="does not depend on these logits"):
        step(Net(chain), loss=lambda m, z: m.a.weight.sum())


def test_logits_without_gradient_or_of_another_shape():
    model = Net(chain)
    feedback = DirectFeedback(model, ["a"])
    logits = model(X)
    with pytest.raises(InputError, match="require no gradient"):
        feedback.backward(None, logits.detach(), error=logits)
    with pytest.raises(InputError, match="no forward pass"):
        feedback.backward(F.cross_entropy(logits, Y), logits)
    logits = model(X[None])
    with pytest.raises(InputError, match=r"\(1, 6, 3\)"):
        feedback.backward(logits.sum(), logits)
    logits = model(X)
    with pytest.raises(InputError, match="one of the two"):
        feedback.backward(None, logits)
    with pytest.raises(InputError, match="error has the shape"):
        feedback.backward(None, logits, error=torch.ones(2))
    logits = model(X)
    with pytest.raises(InputError, match="error has the type list"):
        feedback.backward(None, logits, error=[[0.1] * 3] * len(X))


def test_an_axis_before_the_batch_is_refused():
    model = Net(lambda m, x: m.head(m.a(x[None].expand(2, -1, -1)).mean(0)))
    with pytest.raises(InputError, match="first axis must be the batch"):
        step(model, ["a"])


def test_another_size_of_images_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    feedback = DirectFeedback(model, ["0"])
    for size in (6, 7):
        logits = model(torch.ones(2, 1, size, size))
        if size == 6:
            feedback.backward(logits.square().sum(), logits)
    with pytest.raises(InputError, match="one size"):
        feedback.backward(logits.square().sum(), logits)


def test_shapes_without_a_builtin_surrogate_ask_for_one():
    model = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Flatten(), nn.Linear(16, 3))
    feedback = DirectFeedback(model, ["0"])
    logits = model(torch.ones(2, 1, 2, 2, 2))
    with pytest.raises(InputError, match="surrogate= a function"):
        feedback.backward(logits.sum(), logits)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda *_: 3, "nn.Module is needed"), (lambda *_: nn.Flatten(), "nothing to learn"),
        (lambda *_: nn.Linear(4, 2), "one logit a class"),
    ],
)  # fmt: skip
def test_surrogates_of_the_user_are_checked(made, message):
    with pytest.raises(InputError, match=message):
        step(Net(chain), surrogate=made)


def test_a_learning_surrogate_may_not_share_the_models_parameters():
    model = Net(chain)
    with pytest.raises(InputError, match="shares parameters of the model"):
        step(model, ["b"], surrogate=lambda *_: model.head)


@pytest.mark.parametrize("options", [{"method": "local"}, {"method": "drtp"}, {"target": "labels"}])
def test_labels_are_asked_for_where_they_are_needed(options):
    with pytest.raises(InputError, match="give labels="):
        step(Net(chain), **options)


@pytest.mark.parametrize(
    "wrong", [torch.full((6,), 3), torch.full((6,), -1), torch.zeros(5, dtype=int), torch.zeros(6), [0, 1, 2] * 2]
)
def test_labels_are_classes_of_the_logits(wrong):
    model = Net(chain)
    feedback = DirectFeedback(model, ["a"], method="drtp")
    logits = model(X)
    with pytest.raises(InputError, match="class"):
        feedback.backward(F.cross_entropy(logits, Y), logits, labels=wrong)


def test_reentrant_checkpointing_is_found():
    model = Net(lambda m, x: m.head(checkpoint(m.a, x.clone().requires_grad_(), use_reentrant=True)))
    with pytest.raises(InputError, match="checkpointing"):
        step(model, ["a"])


def test_other_checkpointing_changes_no_gradient():
    torch.manual_seed(0)
    deep = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain = Net(lambda m, x: m.head(m.deep(x)), deep=deep)
    step(plain, ["deep"]).detach()
    expected = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    plain.way = lambda m, x: m.head(checkpoint(m.deep, x, use_reentrant=False))
    feedback = step(plain, ["deep"])
    found = [p.grad for p in plain.parameters() if p.grad is not None]
    assert all(torch.allclose(a, b) for a, b in zip(expected, found, strict=True))
    plain.zero_grad()
    logits = plain(X)
    feedback.backward(F.cross_entropy(logits, Y), logits)


def test_a_model_set_to_recompute_is_refused():
    model = Net(chain)
    model.gradient_checkpointing = True
    with pytest.raises(InputError, match="checkpointing off"):
        DirectFeedback(model, ["a"])


def test_a_compiled_model_is_refused():
    with pytest.raises(InputError, match="attach first"):
        DirectFeedback(torch.compile(Net(chain), backend="eager"), ["a"])
    model = Net(chain)
    model.compile(backend="eager")
    with pytest.raises(InputError, match="attach first"):
        DirectFeedback(model, ["a"])


def test_a_detached_feedback_trains_nothing():
    model = Net(chain)
    feedback = step(model)
    feedback.detach()
    logits = model(X)
    with pytest.raises(InputError, match="detached"):
        feedback.backward(F.cross_entropy(logits, Y), logits)
    with pytest.raises(InputError, match="attached model"):
        feedback.alignment(X, Y)


def test_what_is_not_there_yet_or_of_other_blocks():
    feedback = DirectFeedback(Net(chain), ["a"])
    with pytest.raises(InputError, match="call backward first"):
        feedback.timing()
    with pytest.raises(InputError, match="not initialised"):
        feedback.synchronize()
    with pytest.raises(InputError, match="of the blocks a, b, not of a"):
        step(Net(chain), ["a"]).load_state_dict(step(Net(chain)).state_dict())


def test_layerwise_feedback_needs_layers_it_knows():
    with pytest.raises(InputError, match="neither linear layers"), feedback_alignment(nn.ReLU()):
        pass
    with pytest.raises(InputError, match="pads by a name"), feedback_alignment(nn.Conv2d(1, 1, 3, padding="same")):
        pass
    with pytest.raises(InputError, match="callable"):
        held_bytes(3)


def test_blocks_of_an_mlp_end_at_its_activations():
    assert find_blocks(mlp([4, 8, 8, 2])) == ["2", "4"]


def test_logits_of_an_earlier_pass_are_refused_and_what_follows_from_the_last_are_not():
    model = Net(chain)
    feedback = step(model)
    early = model(X)
    late = model(X + 1)
    with pytest.raises(InputError, match="last forward pass"):
        feedback.backward(F.cross_entropy(early, Y), early)
    late = 2 * model(X + 1)
    feedback.backward(F.cross_entropy(late, Y), late)


@pytest.mark.parametrize(
    "option", [{"learn": "no"}, {"capped": 1}, {"logits": None}, {"noise": True}, {"surrogate_lr": True}]
)
def test_options_of_another_type_are_refused(option):
    with pytest.raises(InputError, match=next(iter(option))):
        DirectFeedback(Net(chain), ["a", "b"], **option)
