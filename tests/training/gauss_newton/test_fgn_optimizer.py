import copy
import math
import warnings

import pytest
import torch
from torch import nn

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.training.gauss_newton import FastGaussNewton, MarginMap, curvature_gap
from fairtrial.training.gauss_newton.baselines import (
    DampedIdentity,
    EmpiricalFisher,
    GaussNewtonCG,
    SampledFisher,
    ShuffledWeights,
    sampled_slopes,
)
from fairtrial.training.networks import cnn, mlp

F64 = torch.float64


def data(n=24, classes=5, seed=0, dtype=F64):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=draw, dtype=dtype), torch.randint(classes, (n,), generator=draw)


def network(seed=0, dtype=F64):
    return mlp([6, 8, 5], seed=seed).to(dtype)


def train(steps=4, *, model=None, closures=None, x_y=None, kind=FastGaussNewton, **how):
    model = network() if model is None else model
    x, y = x_y or data()
    how = {"cg_tol": 1e-10, "cg_max_iter": 99, **how}
    if how.get("solver") == "gram" or how.get("products") == "forward":
        how["model"] = model
    optimizer = kind(model.parameters(), **how)
    losses = [float(optimizer.step(closures(model) if closures else lambda: (model(x), y))) for _ in range(steps)]
    return torch.tensor([*losses, optimizer.judged.new_loss], dtype=F64), optimizer, model


# ---------------------------------------------------------------------------------------- ways to the same step


@pytest.mark.parametrize(
    "how",
    [
        {"products": "forward"}, {"solver": "gram"}, {"form": "paper"}, {"form": "woodbury"}, {"recompute": True},
        {"recompute": True, "products": "forward"},
    ],
    ids=str,
)  # fmt: skip
def test_every_engine_solver_and_form_takes_the_same_steps(how):
    torch.testing.assert_close(train(**how)[0], train()[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("how", [{}, {"recompute": True}, {"products": "forward"}, {"solver": "gram"}], ids=str)
def test_micro_batches_make_one_batch(how):
    x, y = data()

    def parts(model):
        return [lambda s=s: (model(x[s]), y[s]) for s in (slice(0, 7), slice(7, 24))]

    torch.testing.assert_close(train(closures=parts, **how)[0], train()[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "how", [{"solver": "gram"}, {"solver": "gram", "momentum": 0.5}, {"solver": "gram", "l2": 0.1}]
)
def test_a_linear_head_takes_the_steps_of_any_other_model(how):
    head = nn.Linear(6, 5).double()
    wrapped = nn.Sequential(copy.deepcopy(head))
    torch.testing.assert_close(train(model=head, **how)[0], train(model=wrapped, **how)[0], rtol=1e-6, atol=1e-8)


def test_sequences_are_flattened_and_ignored_labels_left_out():
    x, y = data()
    ignored = torch.where(torch.arange(24) % 3 == 0, -100, y).view(4, 6)

    def sequences(model):
        return lambda: (model(x).view(4, 6, 5), ignored)

    kept = torch.arange(24) % 3 != 0
    for how in ({}, {"products": "forward"}):
        torch.testing.assert_close(
            train(closures=sequences, **how)[0], train(x_y=(x[kept], y[kept]))[0], rtol=1e-7, atol=1e-9
        )


def test_dropout_is_the_same_in_every_pass_of_a_step_and_moves_on_as_if_called_once():
    x, y = data()
    for how in ({}, {"recompute": True}, {"products": "forward"}):
        model = nn.Sequential(network(), nn.Dropout(0.5))
        torch.manual_seed(7)
        with torch.no_grad():
            first = nn.functional.cross_entropy(model(x), y)
            after = torch.get_rng_state()
        torch.manual_seed(7)
        optimizer = FastGaussNewton(model.parameters(), **({**how, "model": model} if "products" in how else how))
        assert float(optimizer.step(lambda model=model: (model(x), y))) == pytest.approx(float(first))
        assert optimizer.last.new_loss < optimizer.last.loss
        assert torch.equal(torch.get_rng_state(), after)


# ------------------------------------------------------------------------------------------------- what a step is


def test_the_loss_falls_and_the_info_says_what_happened():
    losses, optimizer, _ = train(12)
    assert (losses.diff() <= 0).all()
    assert losses[-1] < 0.8 * losses[0]
    info = optimizer.last
    assert info.step == 12
    assert info.accepted
    assert 0 < info.ratio < 2
    assert info.cg_iterations >= 2
    assert info.residual <= 1e-4
    assert info.gradient_norm > 0


def test_a_step_that_raises_the_loss_is_undone_and_the_damping_raised():
    x, y = data()
    model = network()
    # The closure's second pass and later ones add a loss, as if every step were a bad one.
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        return model(x) if calls[-1] else 100 * model(x), y

    before = [p.clone() for p in model.parameters()]
    optimizer = FastGaussNewton(model.parameters())
    optimizer.step(closure)
    assert optimizer.last.accepted is False
    assert optimizer.last.damping == optimizer.param_groups[0]["damping"] == 64.0
    assert calls.count(False) == 4
    assert all(map(torch.equal, before, model.parameters()))


def test_the_ratio_moves_the_damping_within_its_bounds():
    _, optimizer, _ = train(12)
    assert 1e-6 <= optimizer.param_groups[0]["damping"] <= 1e4
    assert optimizer.param_groups[0]["damping"] != 1.0


def test_the_damping_may_follow_the_gradient_norm_by_a_callable():
    seen = []

    def rule(info):
        seen.append(info)
        return 0.5 * info.gradient_norm

    _, optimizer, _ = train(3, damping=rule)
    assert [info.step for info in seen] == [1, 2, 3]
    assert math.isnan(seen[0].ratio)
    assert seen[1].ratio > 0
    assert optimizer.last.damping == 0.5 * optimizer.last.gradient_norm
    with pytest.raises(InputError, match="return a positive number"):
        train(1, damping=lambda info: 0.0)


def test_momentum_solves_the_proximal_system():
    x, y = data()
    model = network()
    parameters = list(model.parameters())
    optimizer = FastGaussNewton(parameters, damping=lambda info: 0.5, momentum=0.7, cg_tol=1e-13, cg_max_iter=99)
    directions = []
    for _ in range(2):
        before = torch.cat([p.detach().flatten() for p in parameters])
        m = MarginMap(lambda: (model(x), y), parameters)
        rows = torch.stack([m.vjp(e) for e in torch.eye(24, dtype=F64)])
        fgn = rows.T @ torch.diag(m.weights) @ rows
        gradient = rows.T @ (-torch.sigmoid(-m.margins) / 24)
        previous = directions[-1] if directions else torch.zeros_like(before)
        wanted = torch.linalg.solve(fgn + 0.5 * torch.eye(len(fgn), dtype=F64), -gradient + 0.5 * 0.7 * previous)
        optimizer.step(lambda: (model(x), y))
        directions.append(torch.cat([p.detach().flatten() for p in parameters]) - before)
        torch.testing.assert_close(directions[-1], wanted, rtol=1e-6, atol=1e-9)


def test_l2_is_part_of_the_objective_and_weight_decay_is_not():
    _, optimizer, model = train(30, l2=0.3, damping=0.01, solver="gram")
    x, y = data()
    loss = nn.functional.cross_entropy(model(x), y) + 0.15 * sum(p.square().sum() for p in model.parameters())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert math.sqrt(sum(float(g.square().sum()) for g in gradients)) < 1e-3
    assert optimizer.last.new_loss == pytest.approx(float(loss.detach()), rel=1e-6)
    plain, decayed = network(), network()
    start = [p.clone() for p in plain.parameters()]
    train(1, model=plain)
    train(1, model=decayed, weight_decay=0.1, lr=1.0)
    for a, b, p in zip(plain.parameters(), decayed.parameters(), start, strict=True):
        torch.testing.assert_close(b, a - 0.1 * p)


def test_groups_may_be_frozen_and_must_share_lr():
    model = network()
    first, *rest = model.parameters()
    before = first.clone()
    optimizer = FastGaussNewton([{"params": [first], "frozen": True}, {"params": rest}])
    x, y = data()
    optimizer.step(lambda: (model(x), y))
    assert torch.equal(first, before)
    assert optimizer.last.accepted
    optimizer.param_groups[0]["frozen"] = False
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(InputError, match="groups have lr"):
        optimizer.step(lambda: (model(x), y))


def follow_the_last_step(info):
    return 1.0 if math.isnan(info.ratio) else 0.2 + abs(info.ratio)


@pytest.mark.parametrize(
    "how",
    [{"momentum": 0.5}, {"ratio_batch": "next", "weight_decay": 0.01}, {"damping": follow_the_last_step}],
    ids=["momentum", "next", "callable"],
)
def test_loading_the_state_continues_bit_for_bit(how, tmp_path):
    def batch(i):
        return data(seed=i, dtype=torch.float32)

    def go(model, optimizer, steps):
        for i in steps:
            x, y = batch(i)
            optimizer.step(lambda x=x, y=y: (model(x), y))

    model = network(dtype=torch.float32)
    optimizer = FastGaussNewton(model.parameters(), **how)
    go(model, optimizer, range(4))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    go(model, optimizer, range(4, 8))
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other = network(seed=1, dtype=torch.float32)
    other.load_state_dict(saved["model"])
    resumed = FastGaussNewton(other.parameters(), **how)
    resumed.load_state_dict(saved["optimizer"])
    go(other, resumed, range(4, 8))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert resumed.param_groups[0]["damping"] == optimizer.param_groups[0]["damping"]
    assert resumed.param_groups[0]["steps"] == 8
    assert resumed.last == optimizer.last or math.isnan(optimizer.last.ratio)


@pytest.mark.parametrize("how", [{}, {"ratio_batch": "next"}, {"momentum": 0.5}], ids=str)
def test_a_group_added_later_joins_with_the_damping_of_the_others(how):
    x, y = data()
    body, head = network(), nn.Linear(5, 5).double()
    optimizer = FastGaussNewton(body.parameters(), **how)
    for _ in range(3):
        optimizer.step(lambda: (head(body(x)), y))
    before = head.weight.clone()
    optimizer.add_param_group({"params": head.parameters()})
    for _ in range(3):
        optimizer.step(lambda: (head(body(x)), y))
    assert optimizer.judged.accepted
    assert not torch.equal(head.weight, before)
    assert optimizer.param_groups[1]["steps"] == 6
    with pytest.raises(InputError, match="float32 master weights"):
        optimizer.add_param_group({"params": nn.Linear(2, 2).half().parameters()})
    assert len(optimizer.param_groups) == 2


def test_a_group_frozen_or_freed_between_two_steps_judged_late_is_taken_as_it_stands():
    x, y = data()
    model = network()
    first, *rest = model.parameters()
    optimizer = FastGaussNewton([{"params": [first]}, {"params": rest}], ratio_batch="next")
    for frozen in (False, True, False, False):
        optimizer.param_groups[0]["frozen"] = frozen
        before = first.clone()
        optimizer.step(lambda: (model(x), y))
        assert torch.equal(first, before) is frozen
    assert optimizer.judged.accepted


def test_parameters_without_gradient_stay_as_they_are():
    x, y = data()
    model, twin = network(), network()
    model[1].bias.requires_grad_(False)
    before = model[1].bias.clone()
    train(2, model=model, l2=0.1)
    assert torch.equal(model[1].bias, before)
    optimizer = FastGaussNewton([p for p in twin.parameters() if p is not twin[1].bias], l2=0.1, cg_tol=1e-10)
    for _ in range(2):
        optimizer.step(lambda: (twin(x), y))
    torch.testing.assert_close(model[3].weight, twin[3].weight, rtol=1e-6, atol=1e-9)


def test_a_damping_chosen_above_the_bound_is_never_lowered_by_a_refusal():
    x, y = data()
    model = network()
    optimizer = FastGaussNewton(model.parameters(), damping=1e6)
    optimizer.step(lambda: (model(x) if torch.is_grad_enabled() else 100 * model(x), y))
    assert optimizer.last.accepted is False
    assert optimizer.last.damping == 1e6


def test_schedulers_of_pytorch_set_the_factor_of_the_step():
    x, y = data()
    model = network()
    optimizer = FastGaussNewton(model.parameters(), damping=lambda info: 1.0, cg_tol=1e-12, cg_max_iter=99)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 1),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[1],
    )
    twin, before = copy.deepcopy(model), [p.clone() for p in model.parameters()]
    optimizer.step(lambda: (model(x), y))
    scheduler.step()
    FastGaussNewton(twin.parameters(), damping=lambda info: 1.0, cg_tol=1e-12, cg_max_iter=99).step(
        lambda: (twin(x), y)
    )
    for half, whole, start in zip(model.parameters(), twin.parameters(), before, strict=True):
        torch.testing.assert_close(half - start, 0.5 * (whole - start))
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_judged_on_the_next_batch_a_step_is_known_one_step_later():
    x, y = data()
    model = network()
    optimizer = FastGaussNewton(model.parameters(), ratio_batch="next")
    optimizer.step(lambda: (model(x), y))
    assert optimizer.last.accepted is None
    assert math.isnan(optimizer.last.ratio)
    optimizer.step(lambda: (model(x), y))
    assert optimizer.judged.step == 1
    assert optimizer.judged.accepted
    # On the very same batch the slope is the same too, and the ratio is the usual one.
    same = train(1, cg_tol=1e-2, cg_max_iter=20)[1].last
    assert optimizer.judged.ratio == pytest.approx(same.ratio, rel=1e-9)


def test_a_step_that_the_next_batch_refuses_is_undone():
    x, y = data()
    model = network()
    optimizer = FastGaussNewton(model.parameters(), ratio_batch="next")
    start = [p.clone() for p in model.parameters()]
    optimizer.step(lambda: (model(x), y))
    seen = []

    def steep():  # a batch whose curvature is a thousand times that of the last
        seen.append([p.detach().clone() for p in model.parameters()])
        return 300 * model(x), y

    optimizer.step(steep)
    assert optimizer.judged.accepted is False
    assert optimizer.judged.ratio < 0
    assert optimizer.last.damping == 4.0
    assert all(map(torch.equal, seen[-1], start))  # the step itself begins where the refused one did


def test_autocast_keeps_float32_parameters_and_margins():
    x, y = data(dtype=torch.float32)
    model = network(dtype=torch.float32)

    def closure():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x), y

    optimizer = FastGaussNewton(model.parameters())
    losses = [float(optimizer.step(closure)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_convolutions_pooling_and_tied_weights_need_no_rules():
    model = cnn(channels=(2,), size=8, classes=3)
    x, y = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    optimizer = FastGaussNewton(model.parameters())
    losses = [float(optimizer.step(lambda: (model(x), y))) for _ in range(6)]
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------------- bad input


def closure_of(logits, labels):
    return lambda: (logits, labels)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z, y: lambda: nn.functional.cross_entropy(z, y), r"returned a loss: return \(logits, labels\)"),
        (lambda z, y: closure_of(z, y.double()), "single true class"),
        (lambda z, y: closure_of(z, y > 1), "single true class"),
        (lambda z, y: closure_of(z, y.to("meta")), "put them on one device"),
        (lambda z, y: closure_of(z, z.softmax(1)), "soft targets, mixup and label smoothing"),
        (lambda z, y: closure_of(z.detach(), y), "have no graph"),
        (lambda z, y: closure_of(z[:, :1], y * 0), "at least two"),
        (lambda z, y: closure_of(z, y * 0 - 100), "every label of the batch is ignore_index=-100"),
        (
            lambda z, y: closure_of(z + torch.where(torch.arange(24) == 3, math.inf, 0.0)[:, None], y),
            "example 3 are not",
        ),
    ],
)
def test_a_closure_of_the_wrong_kind_says_what_to_return(make, message):
    x, y = data()
    model = network()
    with pytest.raises(InputError, match=message):
        FastGaussNewton(model.parameters()).step(make(model(x), y))


def test_half_precision_parameters_are_refused():
    with pytest.raises(InputError, match="float32 master weights"):
        FastGaussNewton(network(dtype=torch.bfloat16).parameters())


def test_parameters_on_two_devices_are_refused():
    model = nn.Linear(2, 2)
    other = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(InputError, match="put them on one device"):
        FastGaussNewton([*model.parameters(), other]).step(lambda: (model(torch.eye(2)), torch.tensor([0, 1])))


def test_a_fused_attention_kernel_names_the_remedy():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

        def forward(self, x):
            q, k, v = (part[:, None] for part in self.into(x).chunk(3, -1))  # (N, 1, T, 8)
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])

    model, x, y = Attention(), torch.randn(2, 16, 8), torch.randint(3, (2, 16))
    for how in ({}, {"products": "forward", "model": model}):
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
            pytest.raises(InputError, match='attn_implementation="eager"'),
        ):
            FastGaussNewton(model.parameters(), **how).step(lambda: (model(x), y))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert FastGaussNewton(model.parameters()).step(lambda: (model(x), y)) > 0


def test_batchnorm_in_training_is_allowed_and_warned_of_once():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    x, y = data()
    optimizer = FastGaussNewton(model.parameters())
    with pytest.warns(UserWarning, match="BatchNorm is in training mode"):
        optimizer.step(lambda: (model(x), y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(lambda: (model(x), y))
        FastGaussNewton(model.eval().parameters()).step(lambda: (model(x), y))


def test_rows_by_example_refuse_batchnorm_and_dropout_in_training_and_other_logits():
    x, y = data()
    for last in (nn.Dropout(0.5), nn.BatchNorm1d(5).double()):
        model = nn.Sequential(network(), last)
        optimizer = FastGaussNewton(model.parameters(), solver="gram", model=model)
        optimizer._warned = True
        with pytest.raises(InputError, match="evaluation mode"):
            optimizer.step(lambda model=model: (model(x), y))
    model = network()
    with pytest.raises(InputError, match="returns model"):
        FastGaussNewton(model.parameters(), solver="gram", model=model).step(lambda: (2 * model(x), y))
    head = nn.Linear(6, 5).double()
    with pytest.raises(InputError, match="not its outputs"):
        FastGaussNewton(head.parameters(), solver="gram", model=head).step(lambda: (2 * head(x), y))
    with pytest.raises(InputError, match="called 2 times"):
        FastGaussNewton(head.parameters(), solver="gram", model=head).step(lambda: (head(x) + head(x), y))


def test_rows_that_do_not_fit_into_memory_are_refused(monkeypatch):
    monkeypatch.setattr("fairtrial.training.gauss_newton.linearised.MAX_ROW_ENTRIES", 100)
    with pytest.raises(InputError, match="take solver='cg' or smaller batches"):
        train(1, solver="gram")


def test_a_damping_that_rounding_swallows_is_refused():
    x, y = data(dtype=torch.float32)
    model = network(dtype=torch.float32)
    optimizer = FastGaussNewton(model.parameters(), damping=lambda info: 1e-12, form="woodbury")
    with pytest.raises(InputError, match="below the rounding of a curvature"):
        optimizer.step(lambda: (model(x), y))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"solver": "lu"}, UnknownNameError, "solver 'lu'"),
        ({"form": "papers"}, UnknownNameError, "did you mean 'paper'"),
        ({"products": "reverse"}, UnknownNameError, "kind of products"),
        ({"ratio_batch": "all"}, UnknownNameError, "batch of the ratio"),
        ({"solver": "gram"}, InputError, "give model="),
        ({"products": "forward"}, InputError, "give model="),
        ({"damping": 0.0}, InputError, "a positive number"),
        ({"damping": math.inf}, InputError, "a positive number"),
        ({"lr": math.nan}, InputError, "positive"),
        ({"cg_tol": math.nan}, InputError, "positive"),
        ({"l2": -1.0}, InputError, "l2=-1.0 of a group"),
        ({"weight_decay": math.nan}, InputError, "weight_decay=nan of a group"),
        ({"momentum": 1.0}, InputError, r"lies in \[0, 1\)"),
        ({"lr": 0.0}, InputError, "positive"),
    ],
)
def test_wrong_options_are_refused(how, error, message):
    with pytest.raises(error, match=message):
        FastGaussNewton(network().parameters(), **how)


def test_the_papers_form_is_refused_outside_the_row_space():
    with pytest.raises(InputError, match="without momentum and l2"):
        train(1, form="paper", l2=0.1)


def test_a_model_that_lacks_a_parameter_and_frozen_groups_are_refused():
    x, y = data()
    model, other = network(), network()
    with pytest.raises(InputError, match="not one of model="):
        FastGaussNewton(model.parameters(), products="forward", model=other).step(lambda: (model(x), y))
    with pytest.raises(InputError, match="nothing to train"):
        FastGaussNewton([{"params": model.parameters(), "frozen": True}]).step(lambda: (model(x), y))
    for dampings in ((0.0,), (math.nan,), ()):
        with pytest.raises(InputError, match="all positive"):
            curvature_gap(model, x, y, dampings=dampings)
    with pytest.raises(InputError, match="max_iter=0"):
        curvature_gap(model, x, y, max_iter=0)
    with pytest.raises(UnknownNameError, match="kind of products"):
        MarginMap(lambda: (model(x), y), model.parameters(), products="reverse")
    for nothing in (None, []):
        with pytest.raises(InputError, match="there is no closure"):
            FastGaussNewton(model.parameters()).step(nothing)
    with pytest.raises(InputError, match="give model="):
        MarginMap(lambda: (model(x), y), model.parameters(), products="forward")
    m = MarginMap(lambda: (model(x), y), model.parameters())
    with pytest.raises(InputError, match="the vector has shape"):
        m.jvp(torch.zeros(3))


# ------------------------------------------------------------------------------------------------- baselines


def test_the_full_matrix_by_conjugate_gradients_equals_fgn_for_two_classes():
    x, y = data(classes=2)

    def last(kind):
        model = mlp([6, 8, 2], seed=3).double()
        return train(3, model=model, x_y=(x, y), kind=kind)[0]

    torch.testing.assert_close(last(GaussNewtonCG), last(FastGaussNewton), rtol=1e-7, atol=1e-9)


def test_the_full_matrix_step_is_the_dense_one():
    from fairtrial.training.curvature import GaussNewton

    x, y = data()
    model = network()
    parameters = list(model.parameters())
    newton = GaussNewton(lambda b: model(b[0]), lambda z, b: nn.functional.cross_entropy(z, b[1]), parameters, [(x, y)])
    full = newton.product(torch.eye(newton.size, dtype=F64))
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)]
    )
    wanted = torch.linalg.solve(full + torch.eye(newton.size, dtype=F64), -gradient)
    before = torch.cat([p.detach().flatten() for p in parameters])
    GaussNewtonCG(parameters, cg_tol=1e-12, cg_max_iter=99).step(lambda: (model(x), y))
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in parameters]) - before, wanted, rtol=1e-6, atol=1e-9
    )


def test_the_empirical_fisher_is_the_mean_outer_product_of_gradients():
    x, y = data()
    model = network()
    parameters = list(model.parameters())

    def gradient_of(x, y):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])

    each = torch.stack([gradient_of(*pair) for pair in zip(x, y, strict=True)])
    wanted = torch.linalg.solve(each.T @ each / 24 + torch.eye(each.shape[1], dtype=F64), -each.mean(0))
    before = torch.cat([p.detach().flatten() for p in parameters])
    EmpiricalFisher(parameters, cg_tol=1e-12, cg_max_iter=99).step(lambda: (model(x), y))
    torch.testing.assert_close(
        torch.cat([p.detach().flatten() for p in parameters]) - before, wanted, rtol=1e-6, atol=1e-9
    )


def test_sampled_slopes_are_unbiased():
    p = torch.tensor([0.6, 0.3, 0.1], dtype=F64)
    slopes = sampled_slopes(p.log().expand(20000, 3), torch.Generator().manual_seed(0))
    torch.testing.assert_close(slopes.T @ slopes / 20000, torch.diag(p) - torch.outer(p, p), rtol=0, atol=0.01)


def test_the_controls_train_too_and_the_identity_is_gradient_descent():
    model = network()
    x, y = data()
    parameters = list(model.parameters())
    before = [p.clone() for p in parameters]
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), parameters)
    DampedIdentity(parameters, damping=2.0).step(lambda: (model(x), y))
    for p, b, g in zip(parameters, before, gradient, strict=True):
        torch.testing.assert_close(p - b, -g / 2)
    for kind in (ShuffledWeights, SampledFisher):
        losses, *_ = train(4, kind=kind, generator=torch.Generator().manual_seed(0))
        assert losses[-1] < losses[0]
