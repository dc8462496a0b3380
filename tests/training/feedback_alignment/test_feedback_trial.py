"""The trial, what it reads, and the baselines it needs."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.testing import check_trial
from fairtrial.training.feedback_alignment import (
    DirectFeedback,
    block_feedback,
    feedback_alignment,
    held_bytes,
    resnet8,
)
from fairtrial.training.feedback_alignment.baselines import PermutedFeedback
from fairtrial.training.feedback_alignment.direct import default_logits
from fairtrial.training.feedback_alignment.trial import (
    FeedbackParams,
    check,
    images,
    network,
    parts,
    read_folder,
    trial,
)

X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


@pytest.mark.slow
def test_the_trial_is_sound():
    check_trial("fairtrial.training.feedback_alignment.trial:trial")


def small(**changes):
    return FeedbackParams(**{**trial.presets["smoke"], **changes})


def test_rules_of_every_kind_are_measured_on_a_transformer_too():
    from fairtrial.training.feedback_alignment.trial import measure

    params, kept = small(), {}

    def stages(function, *arguments):
        key = (function, repr(arguments))
        if key not in kept:
            kept[key] = function(stages, *arguments)
        return kept[key]

    stages.note = lambda text: None
    training = parts(params)[0]
    kinds = ("ndfa", "feedback-alignment", "frozen-trunk", "permuted-feedback")
    for candidate in [c for c in training.candidates if c.label in kinds]:
        told = measure(candidate, {"architecture": "vit4", "seed": 0}, params, stages)
        assert 0 <= told["accuracy"] <= 1
        assert set(told) == {metric.name for metric in training.metrics}
        direct = candidate.label != "frozen-trunk"
        assert (told["cosine"] is not None) == direct
        assert (told["added"] > 0) == direct


def test_arrays_of_the_user_make_the_network(tmp_path):
    rng = np.random.default_rng(0)
    file = tmp_path / "own.npz"
    np.savez(file, x=rng.normal(size=(70, 3, 8, 8)), y=np.arange(70) % 4)
    params = small(data=str(file))
    check(params)
    data = images(None, params)
    assert [len(data[f"{name}_y"]) for name in ("train", "held_out", "test")] == [20, 20, 20]
    assert network("vit4", data, params, 0)(data["test_x"]).shape == (20, 4)
    with pytest.raises(InputError, match="ask for fewer"):
        images(None, small(data=str(file), examples=100))


@pytest.mark.parametrize("shape", [(5, 4), (5, 8, 6), (5, 9, 8, 8)])
def test_arrays_that_are_no_square_images_are_refused(tmp_path, shape):
    file = tmp_path / "own.npz"
    np.savez(file, x=np.zeros(shape), y=np.zeros(5, dtype=int))
    with pytest.raises(InputError, match="square images"):
        check(small(data=str(file)))


def test_a_folder_of_pictures_for_each_class_is_read(tmp_path):
    for k, colour in enumerate(((255, 0, 0), (0, 0, 255))):
        (tmp_path / f"class{k}").mkdir()
        for i in range(2):
            Image.new("RGB", (10, 7), colour).save(tmp_path / f"class{k}" / f"{i}.png")
    x, y = read_folder(tmp_path, 8)
    assert x.shape == (4, 3, 8, 8)
    assert y.tolist() == [0, 0, 1, 1]
    assert (x[0, 0] == 255).all()
    (tmp_path / "class0" / "notes.txt").write_text("no picture")
    with pytest.raises(InputError, match=r"notes\.txt"):
        check(small(data=str(tmp_path)))
    with pytest.raises(InputError, match="two classes"):
        read_folder(tmp_path / "class1", 8)


@pytest.mark.parametrize(("changes", "message"), [({"blocks": 3}, "blocks=3"), ({"size": 9}, "size=9")])
def test_parameters_that_fit_no_network_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        parts(small(**changes))


def test_feedback_alignment_changes_only_what_goes_on_to_a_layers_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3, stride=2), nn.Flatten(), nn.Linear(8, 3))
    expected = torch.autograd.grad(F.cross_entropy(model(X), Y), list(model.parameters()))
    with feedback_alignment(model):
        found = torch.autograd.grad(F.cross_entropy(model(X), Y), list(model.parameters()))
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert torch.allclose(a, b, atol=1e-6) == (i >= 4), i  # the last layer's own gradient alone is the true one


def test_feedback_alignment_by_the_layers_own_weights_is_backpropagation(monkeypatch):
    import fairtrial.training.feedback_alignment.baselines as baselines

    model = resnet8(1, 3, widths=(4, 8), blocks=2)
    through = baselines._through
    monkeypatch.setattr(baselines, "_through", lambda layer, fixed, x: through(layer, layer.weight.detach(), x))
    expected = torch.autograd.grad(F.cross_entropy(model(X), Y), list(model.parameters()))
    with feedback_alignment(model):
        found = torch.autograd.grad(F.cross_entropy(model(X), Y), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, found, strict=True))


def test_permuted_feedback_has_the_true_head_and_other_examples_errors():
    gradients, errors = [], []
    for kind in (DirectFeedback, PermutedFeedback):
        model = resnet8(1, 3, widths=(4, 8), blocks=2)
        feedback = kind(model, method="dfa")
        logits = model(X)
        feedback.backward(F.cross_entropy(logits, Y), logits)
        gradients.append([p.grad for p in model.parameters()])
        h = torch.zeros(6, *feedback._shapes["1"])
        errors.append(feedback._feedback(feedback.surrogates["1"], h, torch.eye(6)[:, :3], None, keep=False)[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients[0][-2:], gradients[1][-2:], strict=True))
    assert not torch.allclose(gradients[0][0], gradients[1][0])
    assert sorted(errors[0].sum((1, 2, 3)).tolist()) == pytest.approx(sorted(errors[1].sum((1, 2, 3)).tolist()))


def test_block_feedback_is_what_autograd_says_of_each_output():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 3))
    x = X.flatten(1)
    deltas, gradients, seconds = block_feedback(model, ["1"], x, Y, logits=default_logits)
    e = (model(x).softmax(1) - F.one_hot(Y, 3)) / 6
    assert torch.allclose(deltas[0], e @ model[2].weight, atol=1e-6)
    assert torch.allclose(gradients[2], e.T @ model[1](model[0](x)), atol=1e-6)
    assert seconds > 0


def test_a_cut_step_holds_no_more_than_an_ordinary_one():
    model = resnet8(1, 3, widths=(8, 16), blocks=8)
    x = torch.randn(16, 1, 8, 8)
    y = torch.arange(16) % 3
    keep = (x, *model.parameters())

    def ordinary():
        F.cross_entropy(model(x), y).backward()

    plain = held_bytes(ordinary, keep=keep)
    feedback = DirectFeedback(model, method="dfa")

    def direct():
        logits = model(x)
        feedback.backward(F.cross_entropy(logits, y), logits)

    direct()
    assert held_bytes(direct, keep=keep) <= 1.05 * plain


def test_timing_counts_every_job_and_the_longest():
    model = resnet8(1, 3, widths=(4, 8), blocks=4)
    feedback = DirectFeedback(model)
    logits = model(X)
    feedback.backward(F.cross_entropy(logits, Y), logits)
    told = feedback.timing()
    totals = [block.total for block in told.per_block.values()]
    assert list(told.per_block) == feedback.blocks
    assert told.serial == pytest.approx(told.error + told.head + sum(totals))
    assert told.critical_path == pytest.approx(told.error + max(told.head, *totals))
    assert told.backpropagation is None
    feedback.alignment(X, Y)
    assert feedback.timing().backpropagation > 0


def average(rank, path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = resnet8(1, 3, widths=(4, 8), blocks=2)
    feedback = DirectFeedback(model, seed=0)
    rows = slice(3 * rank, 3 * rank + 3)
    logits = model(X[rows])
    feedback.backward(F.cross_entropy(logits, Y[rows]), logits)
    feedback.synchronize()
    values = [
        *(p.grad for p in model.parameters()),
        *(p.data for s in feedback.surrogates.values() for p in s.parameters()),
    ]
    own = torch.cat([v.flatten() for v in values])
    gathered = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(gathered, own)
    assert torch.equal(*gathered)
    twin = resnet8(1, 3, widths=(4, 8), blocks=2)
    whole = DirectFeedback(twin, seed=0)
    logits = twin(X)
    whole.backward(F.cross_entropy(logits, Y), logits)  # half of each half's mean: the mean of all
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_end_with_the_gradients_of_the_whole_batch(tmp_path):
    torch.multiprocessing.start_processes(average, args=(tmp_path / "store",), nprocs=2, start_method="fork")
