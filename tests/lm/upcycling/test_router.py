import itertools
import math

import pytest
import torch

from fairtrial.errors import InputError
from fairtrial.lm.upcycling import GroupTopRouter


def router(g=4, f=3, k=2, d=6, std=1.0, **more):
    return GroupTopRouter(d, n_groups=g, n_slices=f, n_active=k, std=std, **more)


def tokens(n, d=6, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def test_at_most_one_expert_a_group_of_ten_thousand_tokens():
    for k in (1, 2, 3, 4):
        groups = router(k=k)(tokens(10_000)).experts // 3
        assert all(len({*row}) == k for row in groups.tolist())


def test_all_groups_are_taken_once_where_k_is_g():
    groups = router(k=4)(tokens(500)).experts // 3
    assert torch.equal(groups, torch.arange(4).expand(500, 4))


def test_what_is_taken_has_the_greatest_sum_of_logits_of_all_admissible_sets():
    for k in (1, 2, 3, 4):
        routing = router(k=k)(tokens(40))
        logits = routing.logits.flatten(1)  # (N, 12)
        admissible = [s for s in itertools.combinations(range(12), k) if len({e // 3 for e in s}) == k]
        best = torch.stack([logits[:, list(s)].sum(1) for s in admissible]).max(0).values
        torch.testing.assert_close(logits.gather(1, routing.experts).sum(1), best)


def test_shares_are_the_softmax_over_what_is_taken_and_nothing_else():
    routing = router()(tokens(50))
    taken = routing.logits.flatten(1).gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, taken.softmax(1))


def test_groups_of_one_expert_are_free_top_k():
    routing = router(g=12, f=1, k=3)(tokens(50))
    best = routing.logits.flatten(1).topk(3).indices
    assert torch.equal(routing.experts.sort(1).values, best.sort(1).values)


def test_selected_logits_have_a_gradient_and_the_others_exactly_none():
    routing = router()(tokens(64))
    routing.logits.retain_grad()
    (routing.weights * torch.arange(1.0, 3.0)).sum().backward()
    taken = torch.zeros(64, 12).scatter_(1, routing.experts, 1.0).bool()
    grad = routing.logits.grad.flatten(1)
    assert (grad[taken] != 0).all()
    assert (grad[~taken] == 0).all()


def test_the_balance_is_1_at_uniform_load_and_f_where_load_and_probability_sit_on_one():
    r = router(k=4, std=0.0)
    one = r(tokens(30))
    r.coverage_bias.copy_(torch.tensor([50.0, 0, 0]).repeat(4))
    assert r(tokens(30)).within_balance().item() == pytest.approx(3)
    assert one.within_balance().item() == pytest.approx(1)  # all load on one, probability even
    even = GroupTopRouter(3, n_groups=1, n_slices=3, n_active=1, std=0)
    with torch.no_grad():
        even.weight.copy_(40 * torch.eye(3))
    assert even(torch.eye(3)).within_balance().item() == pytest.approx(1)


def test_the_balance_never_exceeds_f_and_masked_tokens_do_not_count():
    routing = router()(tokens(40))
    assert 0 < routing.within_balance().item() <= 3
    mask = torch.arange(40) < 17
    cut = router()(tokens(40)[:17])
    for name in ("within_balance", "across_balance", "z_loss"):
        torch.testing.assert_close(getattr(routing, name)(mask), getattr(cut, name)())


def test_the_balance_across_groups_is_1_where_all_are_taken_and_counts_the_rest():
    assert router(k=4)(tokens(20)).across_balance().item() == pytest.approx(1)
    r = router(k=1, std=0.0)
    r.coverage_bias[:3] = 50.0
    assert r(tokens(20)).across_balance().item() == pytest.approx(4)


def test_the_z_loss_is_the_squared_log_sum_exp_without_the_bias():
    r = router()
    before = r(tokens(20)).z_loss()
    r.coverage_bias.fill_(7.0)
    r.coverage_bias[0] = 9.0
    torch.testing.assert_close(r(tokens(20)).z_loss(), before)
    torch.testing.assert_close(before, (tokens(20) @ r.weight.T).logsumexp(1).square().mean())


def test_the_coverage_bias_falls_linearly_to_nothing_over_the_first_tenth():
    r = router()
    r.coverage_bias.fill_(8.0)
    for progress, left in ((0.0, 8.0), (0.05, 4.0), (0.1, 0.0), (1.0, 0.0)):
        r.progress.fill_(progress)
        assert r.bias()[0].item() == pytest.approx(left, abs=1e-5)


def test_gumbel_noise_draws_the_choice_from_the_softmax_in_training_only():
    r = GroupTopRouter(1, n_groups=1, n_slices=2, n_active=1, gumbel=1.0)
    with torch.no_grad():
        r.weight.copy_(torch.tensor([[0.0], [1.0]]))
    x = torch.ones(20_000, 1)
    assert r.eval()(x).experts.float().mean() == 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        share = r.train()(x).experts.float().mean().item()
    assert share == pytest.approx(1 / (1 + math.exp(-1)), abs=4 * 0.5 / math.sqrt(20_000))
    r.progress.fill_(1.0)
    assert r(x).experts.float().mean() == 1


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"k": 5}, "n_active=4 or less"),
        ({"g": 0}, "n_groups=0"),
        ({"f": 2.0}, "n_slices=2.0"),
        ({"k": True}, "n_active=True"),
        ({"gumbel": -1.0}, "gumbel=-1.0"),
        ({"std": float("nan")}, "std=nan"),
        ({"decay": 0.0}, "decay=0.0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(given, word):
    with pytest.raises(InputError, match=word):
        router(**given)
