import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fairtrial.errors import InputError
from fairtrial.training.edge_of_stability import (
    Sharpness,
    StabilityMonitor,
    edge_of,
    figure,
    huggingface_callback,
    predict_regime,
    simulate_reduced,
)
from fairtrial.training.edge_of_stability.monitor import COLUMNS, read
from fairtrial.training.networks import mlp


def squared(model, batch):
    return 0.5 * (model(batch[0]) - batch[1]).square().sum(1).mean()


def train(steps, *, lr=0.5, weight_decay=0.0, seed=0, **options):
    torch.manual_seed(seed)
    model = mlp([3, 8, 2], seed=seed)
    batch = torch.randn(16, 3), torch.randn(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)
    monitor = StabilityMonitor(Sharpness(model, squared, [batch]), optimizer=optimizer, **options)
    for step in range(steps):
        optimizer.zero_grad()
        squared(model, batch).backward()
        optimizer.step()
        monitor.after_step(step)
    return monitor, model


# --------------------------------------------------------------------------------------------------------- reduced map


def test_without_decay_the_reduced_map_conserves_its_energy_to_first_order():
    """y^2 / 2 - alpha log |x| + beta x^2 / 4."""
    drift = []
    for eta in (0.01, 0.005):
        x, y = simulate_reduced(0.5, 1.0, 0.0, 0.0, eta, round(20 / eta), x0=0.3)
        energy = y**2 / 2 - 0.5 * np.log(np.abs(x)) + x**2 / 4
        drift.append(np.abs(energy - energy[0]).max())
    assert drift[0] < 0.1
    assert drift[1] < 0.6 * drift[0]


def test_with_decay_the_orbit_spirals_into_a_steady_oscillation():
    """At the edge x*^2 = 2 (alpha - lambda kappa edge) / beta."""
    eta, lambda_, kappa = 0.01, 0.005, 2.0
    alpha = lambda_ * kappa * (2 / eta - lambda_) + 0.02
    x, y = simulate_reduced(alpha, 1.0, kappa, lambda_, eta, 200_000, x0=0.1)
    assert x[-1] ** 2 == pytest.approx(2 * 0.02, rel=1e-3)
    assert np.abs(y[-1000:]).max() < 1e-3 * np.abs(y).max()
    periods = np.diff(np.flatnonzero((y[:-1] < 0) & (y[1:] >= 0)))[:5] * eta
    np.testing.assert_allclose(2 * np.pi / periods, math.sqrt(2 * 0.02 - 0.005**2), rtol=0.1)


def test_beyond_the_critical_decay_the_sharpness_settles_below_the_edge():
    eta, kappa, alpha = 0.1, 2.0, 0.5
    critical = alpha / (kappa * 2 / eta)
    _, at_edge = simulate_reduced(alpha, 1.0, kappa, 0.98 * critical, eta, 50_000)
    assert abs(at_edge[-1]) < 1e-3
    _, below = simulate_reduced(alpha, 1.0, kappa, 2 * critical, eta, 50_000)
    sharpness = 2 / eta - 2 * critical + below[-1]
    assert sharpness == pytest.approx(alpha / (2 * critical * kappa), rel=1e-6)  # where alpha = lambda A


def approach(alpha=0.6, kappa=2.0, n=12, edge=20.0):
    return pd.DataFrame(
        {"step": range(n), "sharpness": np.linspace(0.7, 0.96, n) * edge, "edge": edge, "alpha": alpha, "kappa": kappa}
    )


def test_the_critical_decay_is_alpha_over_kappa_edge_on_the_first_approach():
    frame = approach()
    told = predict_regime(frame)
    assert told.lambda_c == pytest.approx(0.6 / 40)
    assert told.low == pytest.approx(told.high)
    late = pd.concat([frame, frame.assign(sharpness=20.5, alpha=-9.0), frame.assign(alpha=-9.0)])
    assert predict_regime(late).lambda_c == pytest.approx(told.lambda_c)  # alpha while oscillating means nothing


def test_no_prediction_is_made_from_too_little():
    assert predict_regime(approach(n=4)).reason.endswith("5 needed")
    assert math.isnan(predict_regime(approach(edge=20.0).assign(sharpness=3.0)).lambda_c)
    assert "not approached" in predict_regime(approach().assign(sharpness=3.0)).reason
    with pytest.raises(InputError, match="a positive learning rate"):
        simulate_reduced(0.5, 1.0, 2.0, 0.1, 0.0, 10)
    with pytest.raises(InputError, match="alpha"):
        predict_regime(approach().drop(columns="alpha"))


# ------------------------------------------------------------------------------------------------------------- monitor


def test_the_monitor_measures_on_its_schedule_and_densely_near_the_edge():
    monitor, _ = train(60, lr=0.01, every=20, gradient_every=40, ntk_every=40, ntk_probe=torch.randn(5, 3))
    frame = monitor.frame
    assert list(frame.columns) == list(COLUMNS)
    assert list(frame["step"]) == [0, 20, 40]
    assert list(frame["cos"].notna()) == [True, False, True]
    assert list(frame["ntk_drift"].notna()) == [True, False, True]
    assert frame["ntk_drift"].iloc[0] == 0
    assert (frame["ntk_velocity"].dropna() > 0).all()
    assert set(frame["flip"].dropna()) <= {0.0, 1.0}


def test_the_approach_to_the_edge_is_measured_densely_with_gradients():
    w = nn.Parameter(torch.ones(1))
    probe = Sharpness(nn.ParameterList([w]), lambda m, x: (x * m[0].square() / 2).mean(), [torch.ones(4, 1)])
    monitor = StabilityMonitor(probe, edge=lambda: next(edges), every=20, gradient_every=1000)
    edges = iter([1 / 0.5, 1 / 0.8, 1 / 0.9, 1 / 0.96, 1 / 0.98, 1 / 0.99, 1 / 0.99])
    for step in range(61):
        monitor.after_step(step)
    assert list(monitor.frame["step"]) == [0, 20, 25, 30, 35, 40, 60]
    assert list(monitor.frame["A"].notna()) == [True, False, True, True, True, False, False]


def test_monitoring_does_not_change_the_run():
    _, watched = train(80, lr=0.3, ntk_probe=torch.ones(4, 3), ntk_every=20)
    _, unwatched = train(80, lr=0.3, every=1000)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), unwatched.parameters(), strict=True))


def test_a_run_that_diverges_keeps_its_table():
    monitor, _ = train(400, lr=80.0, every=1)
    assert "inf" in monitor.ended or "nan" in monitor.ended
    assert len(monitor.frame) > 0
    assert np.isfinite(monitor.frame["loss"]).all()


def synthetic(ratio, grad_along=None, steps=3000):
    n = len(ratio)
    frame = pd.DataFrame(dict.fromkeys(COLUMNS, np.nan), index=range(n))
    frame["step"] = np.linspace(0, steps, n).astype(int)
    frame["edge"], frame["ratio"], frame["sharpness"] = 20.0, ratio, 20.0 * np.asarray(ratio)
    frame["loss"] = np.linspace(1, 0.1, n)
    frame["grad_along"] = 1.0 if grad_along is None else grad_along
    frame["unrest"] = 0.5
    return frame


def test_the_regime_is_read_off_the_last_third():
    rise = np.linspace(0.2, 1, 60)
    assert read(synthetic([*rise, *np.full(60, 1.02)])).regime == "edge"
    calm = [*np.ones(80), *np.full(40, 0.1)]
    assert read(synthetic([*rise, *np.full(60, 1.02)], calm)).regime == "damped edge"
    assert read(synthetic([*np.linspace(0.2, 0.6, 60), *np.full(60, 0.6)])).regime == "below edge"
    told = read(synthetic(np.linspace(0.2, 0.8, 120)))
    assert told.regime == "sharpening"
    assert told.steps_to_edge is None
    assert told.sharpening_rate == pytest.approx(0.6 * 20 / 3000, rel=1e-3)
    assert told.rate_low <= told.sharpening_rate <= told.rate_high
    assert told.loss_falls == pytest.approx(1 - 0.1 / synthetic(np.ones(120)).loss[80], rel=0.02)
    assert told.to_dict()["prediction"]["reason"] == "the edge was not approached"


def test_too_few_measurements_give_no_report():
    monitor, _ = train(40)
    with pytest.raises(InputError, match="at least 12"):
        monitor.report()


def test_the_figure_has_a_panel_for_each_reading():
    monitor, _ = train(60, ntk_probe=torch.ones(4, 3), ntk_every=20)
    assert len(figure(monitor.frame).axes) == 4  # the loss has an axis of its own
    with pytest.raises(InputError, match="lacks cos, edge, kappa"):
        figure(pd.DataFrame({"step": [1]}))
    with pytest.raises(InputError, match="ntk_probe has no examples"):
        train(1, ntk_probe=torch.ones(0, 3))
    plain, _ = train(60)
    assert len(figure(plain.frame).axes) == 3


# ---------------------------------------------------------------------------------------------------------------- edge


def test_the_edge_follows_the_optimizer():
    w = [nn.Parameter(torch.ones(2))]
    assert edge_of(torch.optim.SGD(w, lr=0.1, weight_decay=0.5)).value == pytest.approx(19.5)
    assert edge_of(torch.optim.SGD(w, lr=0.1, momentum=0.9)).value == pytest.approx(38)
    nesterov = torch.optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True)
    assert edge_of(nesterov).value == pytest.approx(3.8 / 0.28)
    adam = torch.optim.AdamW(w, lr=0.1, betas=(0.9, 0.999), weight_decay=0.5)
    with pytest.raises(InputError, match="no step yet"):
        edge_of(adam)
    w[0].square().sum().backward()
    adam.step()
    edge = edge_of(adam)
    assert edge.value == pytest.approx(380 - 0.5)
    np.testing.assert_allclose(edge.precondition, [2.0, 2.0], rtol=1e-5)  # |grad|, bias-corrected


def test_a_step_of_zero_has_no_edge_to_cross():
    w = [nn.Parameter(torch.ones(2))]
    for options in (
        {"lr": 0.0},
        {"lr": 0.0, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 1},
    ):
        assert edge_of(torch.optim.SGD(w, **options)).value == math.inf
    monitor, _ = train(40, lr=0.0, every=2)  # as a warm-up begins
    assert (monitor.frame["ratio"] == 0).all()
    assert monitor.report().steps_to_edge is None


@pytest.mark.parametrize("edge", [0.0, -1.0, math.nan, lambda: 0.0])
def test_an_edge_that_is_not_positive_is_refused(edge):
    probe = Sharpness(
        nn.ParameterList([nn.Parameter(torch.ones(1))]), lambda m, x: (x * m[0] ** 2).mean(), [torch.ones(2)]
    )
    with pytest.raises(InputError, match="must be positive"):
        StabilityMonitor(probe, edge=edge).after_step(0)
    with pytest.raises(InputError, match="decay alone"):
        train(1, lr=0.5, weight_decay=5.0)


def test_amsgrad_is_preconditioned_by_its_largest_moments():
    w = [nn.Parameter(torch.ones(1))]
    adam = torch.optim.AdamW(w, lr=1e-6, amsgrad=True, betas=(0.9, 0.5))
    for slope in (4.0, 0.0):
        w[0].grad = torch.tensor([slope])
        adam.step()
    state = adam.state[w[0]]
    assert float(edge_of(adam).precondition) == pytest.approx(float((state["max_exp_avg_sq"] / 0.75).sqrt()), rel=1e-5)


def test_adam_and_the_probe_must_have_the_same_parameters():
    model = mlp([3, 4, 2])
    batch = torch.randn(8, 3), torch.randn(8, 2)
    adam = torch.optim.AdamW(reversed(list(model.parameters())), lr=1e-3)
    squared(model, batch).backward()
    adam.step()
    with pytest.raises(InputError, match="another order"):
        StabilityMonitor(Sharpness(model, squared, [batch]), optimizer=adam).after_step(0)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("off", [-0.02, 0.02])
def test_a_quadratic_diverges_exactly_above_the_edge_of_its_optimizer(momentum, nesterov, off):
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=momentum, nesterov=nesterov)
    sharpness = edge_of(optimizer).value * (1 + off)
    for _ in range(800):
        optimizer.zero_grad()
        (0.5 * sharpness * w**2).sum().backward()
        optimizer.step()
    assert (abs(w.item()) > 1) == (off > 0)


def test_what_has_no_edge_is_told_what_to_pass():
    w = [nn.Parameter(torch.ones(2))]
    with pytest.raises(InputError, match=r"pass edge="):
        edge_of(torch.optim.RMSprop(w))
    with pytest.raises(InputError, match="differ in lr"):
        edge_of(torch.optim.SGD([{"params": w, "lr": 0.1}, {"params": [nn.Parameter(torch.ones(1))], "lr": 0.2}]))
    with pytest.raises(InputError, match="maximizes"):
        edge_of(torch.optim.SGD(w, lr=0.1, maximize=True))
    with pytest.raises(InputError, match="AdamW"):
        edge_of(torch.optim.Adam(w, weight_decay=0.1))

    class Custom(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    with pytest.raises(InputError, match="no learning rate"):
        edge_of(Custom(w))
    probe = Sharpness(nn.ParameterList(w), lambda m, x: (x * m[0].sum() ** 2).mean(), [torch.ones(2)])
    with pytest.raises(InputError, match="either the optimizer or edge"):
        StabilityMonitor(probe)
    monitor = StabilityMonitor(probe, edge=lambda: 5.0, every=1)
    monitor.after_step(0)
    assert monitor.frame["edge"].iloc[0] == 5


def test_a_trainer_calls_the_monitor(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = mlp([3, 4, 2])

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x, labels):
            z = self.net(x)
            return {"loss": nn.functional.cross_entropy(z, labels), "logits": z}

    data = [{"x": torch.randn(3), "labels": torch.tensor(i % 2)} for i in range(16)]
    batch = torch.stack([d["x"] for d in data]), torch.stack([d["labels"] for d in data])
    probe = Sharpness(model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), [batch])
    monitor = StabilityMonitor(probe, edge=20.0, every=2)
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=6, per_device_train_batch_size=8, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    transformers.Trainer(Wrapped(), arguments, train_dataset=data, callbacks=[huggingface_callback(monitor)]).train()
    assert list(monitor.frame["step"]) == [2, 4, 6]
