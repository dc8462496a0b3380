"""The weights are the gradient of the expected accepted length; masks, shapes and scales."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fairtrial.errors import FairtrialError, InputError
from fairtrial.lm.drafting import DPACELoss, expected_length, position_weights
from fairtrial.lm.drafting.loss import ShuffledLoss


def row(*values):
    return torch.tensor([values], dtype=torch.float32)


@pytest.mark.parametrize(
    ("q", "alpha", "w"),
    [
        ((0.5, 0.5, 0.5), 0.0, (0.875, 0.375, 0.125)),
        ((0.5, 0.5, 0.5), 0.5, (1.734375, 0.984375, 0.421875)),
        ((1.0, 1.0, 1.0, 1.0), 0.3, (4, 3, 2, 1)),
        ((0.0, 0.0, 0.0, 0.0), 0.5, (0.9375, 0.4375, 0.1875, 0.0625)),
        ((0.2, 0.9, 0.4), 1.0, (3, 2, 1)),
    ],
)
def test_weights_worked_by_hand(q, alpha, w):
    torch.testing.assert_close(position_weights(row(*q), alpha=alpha), row(*w))


def random_case(seed, n=4, B=8, V=50, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, B, V, generator=rng, dtype=dtype) * 2
    return logits.requires_grad_(), torch.randint(V, (n, B), generator=rng)


@given(st.integers(0, 200))
def test_without_smoothing_the_gradient_is_that_of_the_expected_length(seed):
    logits, ids = random_case(seed)
    q = logits.softmax(-1).gather(2, ids[..., None])[..., 0]
    (exact,) = torch.autograd.grad(-expected_length(q).sum(), logits)
    (ours,) = torch.autograd.grad(DPACELoss(alpha=0, normalize="none")(logits, ids), logits)
    torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-7)


def test_finite_differences_of_the_expected_length():
    logits, ids = random_case(0, n=1, B=3, V=5)

    def length(x):
        return -expected_length(x.softmax(-1).gather(2, ids[..., None])[..., 0]).sum()

    (ours,) = torch.autograd.grad(DPACELoss(alpha=0, normalize="none")(logits, ids), logits)
    for i in np.ndindex(1, 3, 5):
        step = torch.zeros_like(logits)
        step[i] = 1e-5
        with torch.no_grad():
            change = float(length(logits + step) - length(logits - step))
        assert change / 2e-5 == pytest.approx(float(ours[i]), abs=1e-4)


def test_the_expected_length_is_that_of_chains_that_stop():
    q = torch.tensor([[0.9, 0.5, 0.8, 0.3]])
    hit = np.random.default_rng(0).uniform(size=(100_000, 4)) < q.numpy()
    lengths = hit.cumprod(1).sum(1)
    assert abs(lengths.mean() - float(expected_length(q))) < 4 * lengths.std() / 100_000**0.5


@given(st.integers(0, 200), st.floats(0, 1))
def test_weights_fall_and_factor_into_reach_and_continuation(seed, alpha):
    q = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) ** 3
    w, reach, value = (position_weights(q, alpha=alpha, component=c) for c in ("full", "reach", "continuation"))
    assert (w[:, 1:] <= w[:, :-1] + 1e-6).all()
    torch.testing.assert_close(w, reach * value)
    assert (value[:, -1] == 1).all()
    smooth = (1 - alpha) * q + alpha
    torch.testing.assert_close(value[:, :-1], 1 + smooth[:, 1:] * value[:, 1:])


@given(st.integers(0, 100), st.integers(1, 8))
def test_a_cut_block_is_a_shorter_block(seed, length):
    q = torch.rand(1, 8, generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(8)[None] < length
    for kind in ("dpace", "exponential", "geometric", "uniform"):
        how = {"gamma": 3.0} if kind in ("exponential", "geometric") else {}
        cut = position_weights(q, kind, mask=mask, **how)
        torch.testing.assert_close(cut[:, :length], position_weights(q[:, :length], kind, **how))
        assert not cut[:, length:].any()
    logits, ids = random_case(seed, n=1)
    short = DPACELoss()(logits[:, :length], ids[:, :length])
    torch.testing.assert_close(DPACELoss()(logits, ids, mask), short)


def test_fixed_weightings():
    q = torch.rand(2, 8)
    torch.testing.assert_close(position_weights(q, "exponential")[0], torch.exp(-torch.arange(8) / 4.0))
    torch.testing.assert_close(
        position_weights(torch.rand(1, 16), "exponential")[0], torch.exp(-torch.arange(16) / 7.0)
    )
    torch.testing.assert_close(position_weights(q, "geometric")[1], 0.8 ** torch.arange(8.0))
    assert (position_weights(q, "uniform") == 1).all()


def test_normalizations_of_one_loss():
    logits, ids = random_case(3, n=3, B=4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    loss = DPACELoss(normalize="none")
    total = loss(logits, ids, mask)
    w = loss.last.weights
    term = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(3, 4)
    torch.testing.assert_close(total, (w * term).sum().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(DPACELoss()(logits, ids, mask), total / w.sum())
    torch.testing.assert_close(DPACELoss(normalize="count")(logits, ids, mask), total / 7)
    blocks = (w * term).sum(1) / w.sum(1)
    torch.testing.assert_close(DPACELoss(normalize="block")(logits, ids, mask), blocks.mean().float())
    assert not w.requires_grad


def test_expected_length_is_told_from_raw_confidences():
    logits, ids = random_case(5)
    loss = DPACELoss(alpha=0.7)
    loss(logits, ids)
    q = logits.detach().softmax(-1).gather(2, ids[..., None])[..., 0]
    assert loss.last.expected_length == pytest.approx(float(expected_length(q).mean()), rel=1e-5)


@pytest.mark.parametrize("normalize", ["weights", "count", "block", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hopeless_drafts_give_numbers(normalize, dtype):
    logits = torch.full((2, 16, 10), 0.0, dtype=dtype)
    logits[..., 1:] = 30.0
    ids = torch.zeros(2, 16, dtype=torch.int64)
    for alpha in (0.0, 0.5):
        given_logits = logits.clone().requires_grad_()
        value = DPACELoss(alpha, normalize=normalize)(given_logits, ids)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(given_logits.grad).all()
    tiny = position_weights(torch.full((1, 16), 0.01, dtype=dtype), alpha=0.0)
    assert tiny.dtype == torch.float32
    assert torch.isfinite(tiny).all()


def test_a_token_outside_the_vocabulary_stops_the_block():
    logits, ids = random_case(6, n=1, B=5)
    loss = DPACELoss()
    outside = ids.clone()
    outside[0, 2] = -1
    value = loss(logits, outside)
    torch.testing.assert_close(value, DPACELoss()(logits[:, :2], ids[:, :2]))
    assert loss.last.weights[0, 2:].sum() == 0
    assert loss.last.confidence[0, 2] == 0
    everything = torch.full_like(ids, -1)
    assert DPACELoss()(logits, everything) == 0


def test_overlap_is_the_chance_that_sampling_accepts():
    logits, ids = random_case(7, n=2, B=3, V=6)
    p = torch.rand(2, 3, 6, dtype=torch.float64).softmax(-1)
    loss = DPACELoss(acceptance="overlap", normalize="none")
    value = loss(logits, ids, target_probs=p)
    q = logits.detach().softmax(-1)
    torch.testing.assert_close(loss.last.confidence.double(), torch.minimum(p, q).sum(-1), rtol=1e-5, atol=1e-6)
    kl = F.kl_div(q.log(), p, reduction="none").sum(-1)
    torch.testing.assert_close(value.double(), (loss.last.weights * kl).sum(), rtol=1e-5, atol=1e-6)
    perfect = DPACELoss(acceptance="overlap")(p.log(), ids, target_probs=p)
    assert abs(float(perfect)) < 1e-5
    with pytest.raises(InputError, match="target_probs"):
        loss(logits, ids)


def test_shuffled_weights_are_the_same_in_another_order():
    logits, ids = random_case(8, n=20)
    mask = torch.arange(8)[None] < torch.arange(1, 21)[:, None].clamp_max(8)
    loss, plain = ShuffledLoss(seed=1), DPACELoss()
    loss(logits, ids, mask)
    plain(logits, ids, mask)
    ours, theirs = loss.last.weights, plain.last.weights
    torch.testing.assert_close(ours.sort(1).values, theirs.sort(1).values)
    assert not torch.equal(ours, theirs)
    assert not ours[~mask].any()


def test_bad_inputs_are_refused():
    logits, ids = random_case(0, n=2, B=4)
    hole = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0]]).bool()
    for call, word in (
        (lambda: DPACELoss(1.5), "alpha=1.5"),
        (lambda: DPACELoss(kind="linear"), "no kind"),
        (lambda: DPACELoss(component="w"), "no component"),
        (lambda: DPACELoss(normalize=None), "no normalize"),
        (lambda: DPACELoss(acceptance="soft"), "no acceptance"),
        (lambda: DPACELoss(kind="geometric", gamma=0.0), "gamma=0"),
        (lambda: DPACELoss()(logits, ids[:, :3]), "do not fit"),
        (lambda: DPACELoss()(logits, ids, hole), "block 1 has a hole"),
        (lambda: DPACELoss()(logits, ids, hole[:, :2]), "mask has shape"),
        (lambda: position_weights(torch.rand(3)), "confidence has shape"),
        (lambda: position_weights(torch.rand(1, 3) - 1), "give probabilities"),
        (lambda: expected_length(torch.rand(3)), "confidence has shape"),
        (lambda: DPACELoss(float("nan")), "alpha=nan"),
        (lambda: DPACELoss()(logits, ids + logits.shape[2]), "target_ids have"),
        (lambda: DPACELoss()(logits, ids * 0 - 100), "target_ids have -100"),
        (lambda: DPACELoss()(logits, ids.float()), "target_ids are torch.float32"),
        (lambda: DPACELoss(acceptance="overlap")(logits, ids, target_probs=logits), "not logits"),
    ):
        with pytest.raises(FairtrialError, match=word):
            call()
    assert repr(DPACELoss(kind="exponential")) == (
        "DPACELoss(kind='exponential', gamma=default, normalize='weights', acceptance='token')"
    )
