"""Direct feedback: its limits are backpropagation and DFA, and nothing leaks."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fairtrial.training.feedback_alignment import DirectFeedback, RandomFeedback, resnet8, vit4
from fairtrial.training.networks import mlp

X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


def small_resnet():
    return resnet8(1, 3, widths=(4, 8), blocks=4)


def small_vit():
    return vit4(1, 8, 3, patch=4, width=16, layers=2)


def backpropagated(model, x=X, y=Y, scale=1.0):
    twin = copy.deepcopy(model)
    (scale * F.cross_entropy(twin(x), y)).backward()
    return [p.grad for p in twin.parameters()]


def direct(model, x=X, y=Y, scale=1.0, **options):
    feedback = DirectFeedback(model, **options)
    logits = model(x)
    feedback.backward(scale * F.cross_entropy(logits, y), logits, labels=y)
    return feedback, [p.grad for p in model.parameters()]


def close(a, b, tol=1e-6):
    return all((p is None) == (q is None) and (p is None or torch.allclose(p, q, atol=tol, rtol=1e-5))
               for p, q in zip(a, b, strict=True))  # fmt: skip


class Tail(nn.Module):
    """What comes after a block of a sequential network, or of ``small_vit``: the surrogate that makes BP."""

    def __init__(self, *modules, pick=None):
        super().__init__()
        self.rest, self.pick = nn.Sequential(*modules), pick

    def forward(self, h):
        for module in self.rest:
            h = module(h)
        return self.pick(h) if self.pick else h


@pytest.mark.parametrize("training", [True, False])
def test_true_tails_as_surrogates_give_backpropagation(training):
    model = small_resnet().train(training)
    expected = backpropagated(model)
    _, found = direct(model, surrogate=lambda name, *_: Tail(*model[int(name) + 1 :]), learn=False)
    assert close(found, expected)


def test_true_tails_give_backpropagation_in_a_transformer():
    model = small_vit()
    expected = backpropagated(model)
    _, found = direct(
        model,
        surrogate=lambda name, *_: Tail(
            *model.layers[int(name[-1]) + 1 :], pick=lambda h: model.head(model.norm(h[:, 0]))
        ),
        learn=False,
    )
    assert close(found, expected)


def test_fixed_linear_surrogates_give_a_handwritten_dfa():
    model = mlp([5, 7, 6, 3], seed=1)
    x = torch.randn(4, 5)
    y = torch.tensor([0, 1, 2, 0])
    w1, b1, w2, b2, w3, b3 = model.parameters()
    h1 = torch.tanh(x @ w1.T + b1)
    h2 = torch.tanh(h1 @ w2.T + b2)
    e = (torch.softmax(h2 @ w3.T + b3, 1) - F.one_hot(y, 3)) / 4
    feedback, found = direct(model, x, y, method="dfa")
    d1, d2 = (
        e @ feedback.surrogates[name].matrix() * (1 - h**2) for name, h in zip(feedback.blocks, (h1, h2), strict=True)
    )
    expected = [d1.T @ x, d1.sum(0), d2.T @ h1, d2.sum(0), e.T @ h2, e.sum(0)]
    assert close(found, expected)


def test_a_frozen_linear_module_sends_back_the_error_times_its_weight():
    model = small_resnet()
    fixed = {}

    def linear(name, shape, classes):
        fixed[name] = nn.Linear(math.prod(shape), classes)
        return nn.Sequential(nn.Flatten(), fixed[name])

    feedback, _ = direct(model, surrogate=linear, learn=False)
    e = torch.randn(6, 3)
    for name, shape in feedback._shapes.items():
        delta, _ = feedback._feedback(feedback.surrogates[name], torch.randn(6, *shape), e, None, keep=False)
        assert torch.equal(delta, (e @ fixed[name].weight).view(6, *shape))


@pytest.mark.parametrize("method", ["ndfa", "dfa", "drtp", "local"])
def test_the_heads_gradient_is_always_backpropagations(method):
    model = small_resnet()
    expected = backpropagated(model)[-2:]
    _, found = direct(model, method=method)
    assert close(found[-2:], expected)


def test_without_blocks_it_is_backpropagation():
    model = small_resnet()
    expected = backpropagated(model)
    _, found = direct(model, blocks=[])
    assert close(found, expected, tol=0)


def test_fitting_touches_surrogates_only_and_training_blocks_never_surrogates():
    model = small_resnet()
    before = [p.clone() for p in model.parameters()]
    feedback, fitted = direct(model)
    learned = copy.deepcopy({name: s.state_dict() for name, s in feedback.surrogates.items()})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for s in feedback.surrogates.values() for p in s.parameters())
    twin = small_resnet()
    frozen, same = direct(twin, learn=False)
    assert close(fitted, same, tol=0)  # the fit added nothing to the network's gradients
    assert all(
        not torch.equal(value, frozen.surrogates[name].state_dict()[key])
        for name, state in learned.items() for key, value in state.items()
    )  # fmt: skip


@given(st.floats(-50, 50))
@settings(max_examples=5, deadline=None)
def test_a_constant_added_to_all_logits_changes_no_fit(constant):
    model = mlp([64, 8, 8, 3], seed=2).double()
    learned = []
    for shift in (0.0, constant):
        twin = copy.deepcopy(model)
        feedback = DirectFeedback(twin)
        logits = twin(X.double()) + shift
        feedback.backward(F.cross_entropy(logits, Y), logits)
        learned.append([p for s in feedback.surrogates.values() for p in s.parameters()])
    assert close(*learned, tol=1e-9)


def test_no_error_gives_zero_gradients():
    model = small_resnet()
    feedback = DirectFeedback(model)
    logits = model(X)
    feedback.backward(None, logits, error=torch.zeros_like(logits))
    assert all(not p.grad.any() for p in model.parameters())


def test_an_error_given_directly_is_that_of_its_loss():
    a, b = small_resnet(), small_resnet()
    _, expected = direct(a)
    feedback = DirectFeedback(b)
    logits = b(X)
    feedback.backward(None, logits, error=(logits.softmax(1) - F.one_hot(Y, 3)).detach() / len(Y))
    assert close([p.grad for p in b.parameters()], expected)


@pytest.mark.parametrize("method", ["ndfa", "dfa"])
def test_threads_agree_with_one_after_another(method):
    runs = []
    for executor in ("serial", "threads"):
        model = small_vit()
        feedback, gradients = direct(model, method=method, executor=executor)
        logits = model(X)
        feedback.backward(F.cross_entropy(logits, Y), logits)
        runs.append([*gradients, *(p for s in feedback.surrogates.values() for p in s.parameters())])
        feedback.detach()
    assert close(*runs)


@pytest.mark.gpu
def test_streams_agree_with_one_after_another():
    runs = []
    for executor in ("serial", "streams"):
        model = small_resnet().cuda()
        runs.append(direct(model, X.cuda(), Y.cuda(), executor=executor)[1])
    assert close(*runs)


def test_detaching_leaves_outputs_hooks_and_names_as_they_were():
    model = small_resnet()
    before, names = model(X), list(model.state_dict())
    feedback = DirectFeedback(model)
    with torch.no_grad():
        assert torch.equal(model(X), before)
    assert torch.equal(model(X), before)
    assert list(model.state_dict()) == names
    feedback.detach()
    assert torch.equal(model(X), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    F.cross_entropy(model(X), Y).backward()
    assert close([p.grad for p in model.parameters()], backpropagated(model))


def test_differences_find_a_linear_tail_exactly():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    feedback = DirectFeedback(model, ["0"], surrogate="linear", objective="difference", surrogate_every=1, noise=1.0,
                              surrogate_lr=0.05)  # fmt: skip
    for _ in range(150):
        logits = model(torch.randn(16, 4))
        feedback.backward(None, logits, error=torch.zeros_like(logits))
    tail = model[1].weight - model[1].weight.mean(0)
    found = feedback.surrogates["0"][1].weight
    assert F.cosine_similarity((found - found.mean(0)).flatten(), tail.flatten(), dim=0) > 0.999


def test_differences_leave_no_trace_in_buffers_or_the_random_state():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8),
                          nn.Dropout(0.5), nn.Linear(8, 3))  # fmt: skip
    twin = copy.deepcopy(model)
    states = []
    for net, objective in ((model, "difference"), (twin, "value")):
        torch.manual_seed(3)
        feedback = DirectFeedback(net, objective=objective, surrogate_every=1)
        for _ in range(2):
            logits = net(torch.ones(6, 4))
            feedback.backward(F.cross_entropy(logits, Y), logits)
        states.append([*net.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("method", ["ndfa", "dfa"])
@pytest.mark.parametrize("scale", [8.0, 2.0**10])
def test_scaling_the_loss_scales_all_gradients(method, scale):
    _, once = direct(small_resnet(), method=method)
    _, scaled = direct(small_resnet(), scale=scale, method=method)
    assert close([scale * g for g in once], scaled, tol=1e-6 * scale)


def test_backpropagations_feedback_aligns_with_itself():
    model = small_resnet()
    feedback = DirectFeedback(model, surrogate=lambda name, *_: Tail(*model[int(name) + 1 :]), learn=False)
    for told in feedback.alignment(X, Y).values():
        assert (told.cosine, told.norm_ratio, told.gradient_cosine) == pytest.approx((1, 1, 1), abs=1e-5)


def test_alignment_leaves_everything_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(),
                          nn.Linear(8, 3))  # fmt: skip
    feedback = DirectFeedback(model)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    feedback.alignment(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), Y)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


def test_dropout_masks_are_those_of_the_one_forward_pass():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 3))
    seen = []
    model[1].register_forward_hook(lambda *a: seen.append(a[2].detach()))
    feedback = DirectFeedback(model, ["1"], method="dfa")
    logits = model(torch.ones(1, 4))
    feedback.backward(F.cross_entropy(logits, torch.tensor([0])), logits)
    assert len(seen) == 1
    dropped = seen[0][0] == 0
    assert dropped.any()
    assert not model[0].weight.grad[dropped].any()
    assert model[0].weight.grad[~dropped].all()


def test_regularisers_on_weights_reach_their_weights():
    model, plain = small_resnet(), small_resnet()
    _, expected = direct(plain, method="dfa")
    feedback = DirectFeedback(model, method="dfa")
    logits = model(X)
    penalty = sum(p.square().sum() for p in model.parameters())
    feedback.backward(F.cross_entropy(logits, Y) + 0.5 * penalty, logits)
    expected = [g + p for g, p in zip(expected, plain.parameters(), strict=True)]
    assert close([p.grad for p in model.parameters()], expected, 1e-5)


def test_a_block_that_runs_twice_has_two_surrogates_and_adds_its_gradients():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.block(torch.tanh(self.block(self.stem(x)))))

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(6, 4)
    expected = backpropagated(model, x)
    again = Tail(nn.Tanh(), model.block, model.head)
    feedback, found = direct(
        model, x, blocks=["block"], learn=False, surrogate=lambda name, *_: model.head if name[-2:] == "#2" else again
    )
    assert feedback.blocks == ["block", "block#2"]
    assert close(found, expected)


def test_gradients_accumulate_over_calls():
    once, twice = small_resnet(), small_resnet()
    direct(once, method="dfa")
    feedback, _ = direct(twice, method="dfa")
    logits = twice(X)
    feedback.backward(F.cross_entropy(logits, Y), logits)
    assert close([2 * p.grad for p in once.parameters()], [p.grad for p in twice.parameters()], 1e-5)


def test_warmup_fits_surrogates_before_blocks_get_gradients():
    model = small_resnet()
    _, gradients = direct(model, warmup=1)
    assert [g is None for g in gradients] == [True] * (len(gradients) - 2) + [False] * 2


def test_surrogates_are_fitted_every_so_many_steps():
    feedback, _ = direct(model := small_resnet(), surrogate_every=2, updates_per_step=3)
    assert next(iter(feedback._optimizers["4"].state.values()))["step"] == 3
    logits = model(X)
    feedback.backward(F.cross_entropy(logits, Y), logits)
    assert next(iter(feedback._optimizers["4"].state.values()))["step"] == 3


@pytest.mark.parametrize("options", [{}, {"method": "local"}, {"target": "labels"}, {"surrogate": "linear"}])
def test_surrogates_learn_what_they_are_to(options):
    model = small_resnet()
    feedback = DirectFeedback(model, surrogate_lr=3e-2, capped=False, **options)
    errors = []
    for _ in range(15):
        logits = model(X)
        with torch.no_grad():
            if feedback.surrogates:
                h = feedback._cuts[1].root
                errors.append(float(feedback._fit_loss(feedback.surrogates["2"](h), logits, Y)))
        feedback.backward(None, logits, error=torch.zeros_like(logits), labels=Y)
    assert errors[-1] < 0.7 * errors[0]


def test_drtp_sends_back_the_labels():
    model = small_resnet()
    _, found = direct(model, method="drtp")
    twin = small_resnet()
    other = DirectFeedback(twin, method="dfa")
    logits = twin(X)
    other.backward(None, logits, error=-F.one_hot(Y, 3).float() / 6)
    assert close(found[:-2], [p.grad for p in twin.parameters()][:-2])


def test_a_state_is_taken_up_before_the_first_pass_too():
    feedback, _ = direct(model := small_resnet())
    state = copy.deepcopy(feedback.state_dict())
    feedback.detach()
    other = DirectFeedback(model, seed=5)
    other.load_state_dict(state)
    logits = model(X)
    other.backward(F.cross_entropy(logits, Y), logits)
    assert other.steps == 2
    third = DirectFeedback(small_resnet(), seed=6)
    third.load_state_dict(other.state_dict())
    assert third.state_dict()["steps"] == 2


def test_a_large_matrix_is_drawn_on_demand_and_is_the_stored_one(monkeypatch):
    import fairtrial.training.feedback_alignment.surrogates as surrogates

    monkeypatch.setattr(surrogates, "CHUNK", 100)
    stored = RandomFeedback((5, 7, 3), 4, seed=1)
    monkeypatch.setattr(surrogates, "ON_DEMAND", 0)
    drawn = RandomFeedback((5, 7, 3), 4, seed=1)
    e = torch.randn(3, 4)
    assert drawn.weight is None
    assert torch.allclose(stored.feedback(e), drawn.feedback(e), atol=1e-6)


def test_surrogates_stay_within_a_tenth_of_their_blocks():
    feedback, _ = direct(resnet8(1, 3, widths=(16, 32), blocks=4), X)
    assert all(0 < share <= 0.1 for share in feedback.added.values())
    feedback, _ = direct(resnet8(1, 3, widths=(16, 32), blocks=4), X, capped=False)
    assert feedback.surrogates["1"][0].out_channels == 32


def test_half_precision_blocks_are_trained_through_full_precision_surrogates():
    model = mlp([64, 8, 8, 3])
    with torch.autocast("cpu", torch.bfloat16):
        _, gradients = direct(model, X)
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)


def test_a_state_that_waits_for_its_surrogates_is_its_own_and_can_be_saved_again():
    model = mlp([64, 8, 8, 3], seed=2)
    feedback, _ = direct(model)
    waiting = DirectFeedback(mlp([64, 8, 8, 3], seed=2))
    waiting.load_state_dict(feedback.state_dict())
    before = copy.deepcopy(feedback.state_dict())
    logits = model(X)
    feedback.backward(F.cross_entropy(logits, Y), logits)
    again = waiting.state_dict()
    assert again["steps"] == before["steps"]
    for name, state in before["surrogates"].items():
        assert all(torch.equal(value, again["surrogates"][name][key]) for key, value in state.items())
