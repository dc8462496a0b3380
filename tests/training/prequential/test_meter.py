import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.training.networks import mlp
from fairtrial.training.prequential import (
    IndexedDataset,
    PrequentialMeter,
    PrequentialSampler,
    average_orders,
    prequential_trainer,
)


def uniform(n, k):
    return lambda x: torch.zeros(len(x), k)


def data(n=60, k=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return x, (x @ torch.randn(4, k, generator=g)).argmax(1)


def run(meter, model, x, y, *, epochs=3, lr=0.3, batch=8, seed=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    g = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for idx in torch.randperm(len(y), generator=g).split(batch):
            logits = model(x[idx])
            meter.update(idx, logits, y[idx])
            optimizer.zero_grad()
            F.cross_entropy(logits, y[idx]).backward()
            optimizer.step()
    return meter.finish(model, [(torch.arange(len(y)), x, y)])


def test_a_uniform_predictor_codes_each_label_in_log_k_and_regrets_nothing():
    x, y = data()
    meter = PrequentialMeter(60, 3)
    for idx in torch.arange(60).split(7):
        meter.update(idx, torch.zeros(len(idx), 3), y[idx])
    report = meter.finish(uniform(60, 3), [(torch.arange(60), x, y)])
    assert report.code_length == pytest.approx(60 * math.log(3), rel=1e-6)
    assert report.regret == pytest.approx(0, abs=1e-4)
    assert report.compression_ratio == pytest.approx(1)
    assert report.bits == pytest.approx(60 * math.log2(3), rel=1e-6)
    assert not report.interpolating


def test_a_memoriser_codes_all_in_log_k_regrets_it_all_and_has_a_vacuous_bound():
    x, y = data()
    meter = PrequentialMeter(60, 3, eps=0)
    for idx in torch.arange(60).split(7):
        meter.update(idx, torch.zeros(len(idx), 3), y[idx])
    table = {tuple(row.tolist()): label for row, label in zip(x, y, strict=True)}
    memory = lambda z: torch.stack([60.0 * F.one_hot(table[tuple(r.tolist())], 3) for r in z])  # noqa: E731
    report = meter.finish(memory, [(torch.arange(60), x, y)])
    assert report.regret == pytest.approx(60 * math.log(3), rel=1e-6)
    assert report.interpolating
    assert report.train_error == 0
    assert report.bound().vacuous


def test_the_code_is_the_loss_before_the_step_and_the_regret_its_excess_over_the_final_model():
    x, y = data()
    model = mlp([4, 8, 3])
    report = run(PrequentialMeter(60, 3, eps=0, warmup_examples=0), model, x, y, epochs=1, seed=5)
    twin = mlp([4, 8, 3])
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3)
    code = 0.0
    for idx in torch.randperm(60, generator=torch.Generator().manual_seed(5)).split(8):
        loss = F.cross_entropy(twin(x[idx]), y[idx])
        code += float(loss.detach()) * len(idx)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    final = float(F.cross_entropy(twin(x), y, reduction="sum").detach())
    assert report.code_length == pytest.approx(code, rel=1e-5)
    assert report.regret == pytest.approx(code - final, rel=1e-5)
    table = report.per_example
    assert (table["loss_first"] - table["loss_final"]).sum() == pytest.approx(report.regret)


@pytest.mark.parametrize("epochs", [1, 4])
def test_each_example_is_counted_once_whatever_the_epochs(epochs):
    x, y = data()
    first = run(PrequentialMeter(60, 3), mlp([4, 8, 3]), x, y, epochs=epochs)
    assert sorted(first.per_example["example"]) == list(range(60))
    once = run(PrequentialMeter(60, 3), mlp([4, 8, 3]), x, y, epochs=1)
    assert first.code_length == pytest.approx(once.code_length)


def test_a_resumed_run_codes_as_one_that_was_not_interrupted():
    x, y = data()
    order = torch.randperm(60)
    logits = torch.randn(60, 3)

    def coded(stops):
        meter = PrequentialMeter(60, 3, trajectory=True)
        for i, idx in enumerate([*order.split(9), *order.split(9)]):
            if i in stops:
                state = meter.state_dict()
                meter = PrequentialMeter(60, 3, trajectory=True)
                meter.load_state_dict(state)
            meter.update(idx, logits[idx], y[idx])
        return meter.finish(uniform(60, 3), [(torch.arange(60), x, y)])

    whole, parted = coded(()), coded((3, 9))
    assert parted.code_length == pytest.approx(whole.code_length)
    assert parted.sum_of_losses == pytest.approx(whole.sum_of_losses)
    pd.testing.assert_frame_equal(parted.per_example, whole.per_example)
    with pytest.raises(InputError, match="num_examples=5"):
        PrequentialMeter(5, 3).load_state_dict({"indices": torch.tensor([7])})


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-4, 0.3), st.integers(0, 10**6))
def test_mixing_costs_at_most_its_share_and_bounds_every_label(eps, seed):
    g = torch.Generator().manual_seed(seed)
    logits, y = 20 * torch.randn(40, 5, generator=g), torch.randint(5, (40,), generator=g)
    lengths = {}
    for e in (0.0, eps):
        meter = PrequentialMeter(40, 5, eps=e, warmup_examples=0)
        meter.update(torch.arange(40), logits, y)
        lengths[e] = meter.finish(uniform(40, 5), [(torch.arange(40), torch.zeros(40), y)]).per_example["loss_first"]
    assert lengths[eps].sum() <= lengths[0.0].sum() + 40 * -math.log1p(-eps) + 1e-3
    assert lengths[eps].max() <= math.log(5 / eps) + 1e-4


def test_second_copies_cost_less_than_the_first():
    x, y = data(40)
    x, y = torch.cat([x, x]), torch.cat([y, y])
    meter = PrequentialMeter(80, 3)
    model = mlp([4, 16, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for idx in torch.arange(80).split(5):
        for _ in range(8):
            logits = model(x[idx])
            meter.update(idx, logits, y[idx])
            optimizer.zero_grad()
            F.cross_entropy(logits, y[idx]).backward()
            optimizer.step()
    losses = meter.finish(model, [(torch.arange(80), x, y)]).per_example.set_index("example")["loss_first"]
    assert losses[losses.index >= 40].sum() < losses[losses.index < 40].sum()


def test_update_adds_nothing_to_the_graph():
    x, y = data()
    model = mlp([4, 8, 3])
    logits = model(x)
    PrequentialMeter(60, 3, trajectory=True).update(torch.arange(60), logits, y)
    F.cross_entropy(logits, y).backward()
    with_meter = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(with_meter, model.parameters(), strict=True))


def test_a_sequence_is_coded_as_the_sum_of_its_tokens():
    torch.manual_seed(0)
    logits, y = torch.randn(6, 4, 5), torch.randint(5, (6, 4))
    y[0, 2:] = -100
    meter = PrequentialMeter(6, 5, eps=0, warmup_examples=1)
    meter.update(torch.arange(6), logits, y)
    table = meter.finish(lambda x: logits, [(torch.arange(6), None, y)]).per_example
    each = F.cross_entropy(logits.reshape(-1, 5), y.reshape(-1), reduction="none").reshape(6, 4).sum(1)
    np.testing.assert_allclose(table["loss_first"][1:], each[1:], rtol=1e-5)
    assert table["loss_first"][0] == pytest.approx(2 * math.log(5))
    np.testing.assert_allclose(table["loss_final"], each, rtol=1e-5)


def test_real_targets_are_coded_by_the_spread_of_earlier_residuals():
    torch.manual_seed(0)
    y, predicted = torch.randn(50), torch.zeros(50)
    meter = PrequentialMeter(50, None, warmup_examples=10, prior_scale=2.0)
    for idx in torch.arange(50).split(10):
        meter.update(idx, predicted[idx], y[idx])
    report = meter.finish(lambda x: torch.zeros(50), [(torch.arange(50), None, y)])
    expected = []
    for start in range(0, 50, 10):
        variance = 4.0 if start == 0 else float(y[:start].square().mean())
        expected += [0.5 * (float(v) ** 2 / variance + math.log(2 * math.pi * variance)) for v in y[start : start + 10]]
    np.testing.assert_allclose(report.per_example["loss_first"], expected, rtol=1e-5)
    assert math.isnan(report.train_error)
    with pytest.raises(InputError, match="real targets"):
        report.bound()


def test_predictions_of_one_column_meet_targets_of_none():
    torch.manual_seed(0)
    y, predicted = torch.randn(20), torch.randn(20)
    lengths = []
    for z, target in ((predicted, y), (predicted[:, None], y), (predicted[:, None], y[:, None])):
        meter = PrequentialMeter(20, None)
        meter.update(torch.arange(20), z, target)
        lengths.append(meter.finish(lambda x, z=z: z, [(torch.arange(20), None, target)]).code_length)
    assert max(lengths) - min(lengths) < 1e-4
    with pytest.raises(InputError, match="differ in shape"):
        PrequentialMeter(20, None).update(torch.arange(20), torch.zeros(20, 2), y)


def test_a_loader_that_lacks_examples_is_told_so():
    meter = PrequentialMeter(4, 3)
    meter.update(torch.arange(4), torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="lacks example 2"):
        meter.finish(uniform(2, 3), [(torch.arange(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64))])


def test_calibration_learns_from_earlier_examples_only():
    torch.manual_seed(0)
    y = torch.randint(3, (400,))
    logits = 12 * (F.one_hot(torch.where(torch.rand(400) < 0.7, y, torch.randint(3, (400,))), 3) - 0.3)
    lengths = {}
    for calibrate in (False, True):
        meter = PrequentialMeter(400, 3, eps=0, warmup_examples=0, calibrate=calibrate)
        for idx in torch.arange(400).split(50):
            meter.update(idx, logits[idx], y[idx])
        lengths[calibrate] = meter.finish(uniform(400, 3), [(torch.arange(400), torch.zeros(400), y)]).per_example
    raw, fitted = lengths[False]["loss_first"], lengths[True]["loss_first"]
    np.testing.assert_allclose(fitted[:50], raw[:50], rtol=1e-5)  # nothing was known yet
    assert fitted[50:].sum() < 0.5 * raw[50:].sum()


def test_coding_by_an_evaluation_pass_ignores_dropout():
    x, y = data()
    model = nn.Sequential(mlp([4, 8, 3]), nn.Dropout(0.9)).train()
    meter = PrequentialMeter(60, 3, eps=0, warmup_examples=0, eval_forward=True, model=model)
    meter.update(torch.arange(60), model(x), y, inputs=x)
    assert model.training
    report = meter.finish(model, [(torch.arange(60), x, y)])
    assert report.regret == pytest.approx(0, abs=1e-4)
    with pytest.raises(InputError, match="inputs="):
        PrequentialMeter(60, 3, eval_forward=True, model=model).update(torch.arange(60), model(x), y)


def test_the_trajectory_counts_every_step_and_the_code_only_the_first():
    x, y = data()
    model = mlp([4, 8, 3])
    meter = PrequentialMeter(60, 3, trajectory=True)
    total, twin = 0.0, mlp([4, 8, 3])
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3)
    report = run(meter, model, x, y, epochs=3)
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        for idx in torch.randperm(60, generator=g).split(8):
            loss = F.cross_entropy(twin(x[idx]), y[idx])
            total += float(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert report.sum_of_losses == pytest.approx(total, rel=1e-4)
    assert report.trajectory < report.sum_of_losses


def test_the_report_shows_the_entropy_no_code_beats():
    x, y = data(200)
    y = torch.where(torch.rand(200) < 0.5, y, torch.randint(3, (200,)))
    meter = PrequentialMeter(200, 3)
    g = torch.Generator().manual_seed(0)
    for idx in torch.randperm(200, generator=g).split(20):
        meter.update(idx, torch.zeros(20, 3), y[idx])
    report = meter.finish(uniform(200, 3), [(torch.arange(200), x, y)], entropy=1.0)
    assert report.code_length >= 200 * 1.0
    assert "no code beats" in str(report)
    assert set(report.to_dict()) >= {"code_length", "regret", "bound", "interpolating"}


def test_orders_show_the_resolution_of_the_instrument():
    x, y = data()
    reports = [run(PrequentialMeter(60, 3), mlp([4, 8, 3]), x, y, seed=s) for s in range(3)]
    told = average_orders(reports)
    assert told.orders == 3
    assert told.code_length == pytest.approx(np.mean([r.code_length for r in reports]))
    assert told.code_spread > 0
    with pytest.raises(InputError, match="two reports"):
        average_orders(reports[:1])


# ------------------------------------------------------------------------------------------------------------- replay


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 200), st.integers(1, 40), st.sampled_from(["linear", "geometric"]),
    st.floats(0.1, 1.0), st.integers(0, 99),
)  # fmt: skip
def test_replay_releases_each_index_once_by_its_share_and_before_it_is_trained_on(n, steps, batch, schedule, by, seed):
    sampler = PrequentialSampler(n, steps, batch, schedule=schedule, release_by=by, seed=seed)
    released: set[int] = set()
    for step, chosen in enumerate(sampler):
        arrivals = set(sampler.arrivals(step).tolist())
        assert not arrivals & released
        released |= arrivals
        assert set(chosen) <= released
        assert len(set(chosen)) == len(chosen) == min(batch, len(released))
        if step >= max(1, int(steps * by)) - 1:
            assert len(released) == n
    assert released == set(range(n))
    assert len(sampler) == steps


def test_a_replay_trains_a_loader():
    x, y = data()
    set_ = IndexedDataset(torch.utils.data.TensorDataset(x, y))
    loader = torch.utils.data.DataLoader(set_, batch_sampler=PrequentialSampler(60, 30, 8))
    meter = PrequentialMeter(60, 3)
    model = mlp([4, 8, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for idx, a, b in loader:
        logits = model(a)
        meter.update(idx, logits, b)
        optimizer.zero_grad()
        F.cross_entropy(logits, b).backward()
        optimizer.step()
    assert meter.finish(model, [(torch.arange(60), x, y)]).n == 60


@pytest.mark.parametrize("bad", [{"n": 0}, {"release_by": 0.0}, {"schedule": "square"}])
def test_a_replay_of_nothing_is_refused(bad):
    with pytest.raises(InputError):
        PrequentialSampler(**{"n": 10, "total_steps": 5, "batch_size": 2, **bad})
    with pytest.raises(InputError, match="step=9"):
        PrequentialSampler(10, 5, 2).arrivals(9)


# ----------------------------------------------------------------------------------------------------------- bad input


def test_a_sampler_with_replacement_is_warned_about_and_counted_at_first_sight():
    meter = PrequentialMeter(5, 3)
    with pytest.warns(UserWarning, match="replacement"):
        meter.update(torch.tensor([0, 1, 1]), torch.zeros(3, 3), torch.tensor([0, 1, 1]))
    meter.update(torch.tensor([2, 3, 4]), torch.zeros(3, 3), torch.tensor([0, 1, 1]))
    report = meter.finish(uniform(5, 3), [(torch.arange(5), torch.zeros(5), torch.zeros(5, dtype=torch.int64))])
    assert report.n == 5


def test_an_update_after_the_step_is_refused():
    x, y = data()
    model = mlp([4, 8, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    meter = PrequentialMeter(60, 3, model=model, optimizer=optimizer)
    logits = model(x)
    meter.update(torch.arange(60), logits, y)
    F.cross_entropy(logits, y).backward()
    optimizer.step()
    with pytest.raises(InputError, match="before step"):
        meter.update(torch.arange(60), logits, y)
    meter.update(torch.arange(60), model(x), y)


def test_missing_examples_are_counted_and_refused_unless_partial():
    x, y = data()
    meter = PrequentialMeter(60, 3)
    meter.update(torch.arange(50), torch.zeros(50, 3), y[:50])
    everything = [(torch.arange(60), x, y)]
    with pytest.raises(InputError, match=r"10 of 60 .* such as 50"):
        meter.finish(uniform(60, 3), everything)
    report = meter.finish(uniform(60, 3), everything, partial=True)
    assert report.n == 50
    assert "10 examples" in report.notes[0]
    with pytest.raises(InputError, match="no example was coded"):
        PrequentialMeter(60, 3).finish(uniform(60, 3), everything, partial=True)


@pytest.mark.parametrize(
    ("logits", "labels", "word"),
    [
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 3]), "example 3 has the label 3"),
        (torch.full((4, 3), 1 / 3), torch.zeros(4, dtype=torch.int64), "not probabilities"),
        (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64), "K = 3"),
        (torch.zeros(4, 3), torch.zeros(4), "real numbers"),
        (torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64), "do not match"),
    ],
)
def test_what_is_not_a_batch_of_logits_is_refused(logits, labels, word):
    with pytest.raises(InputError, match=word):
        PrequentialMeter(4, 3).update(torch.arange(4), logits, labels)


def test_an_index_outside_and_a_loss_that_is_no_number_are_named():
    with pytest.raises(InputError, match="index 9 is outside 0 to 3"):
        PrequentialMeter(4, 3).update(torch.tensor([9]), torch.zeros(1, 3), torch.tensor([0]))
    meter = PrequentialMeter(4, 3, warmup_examples=0)
    logits = torch.zeros(4, 3)
    logits[2] = math.nan
    meter.update(torch.arange(4), logits, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="loss_first of example 2"):
        meter.finish(uniform(4, 3), [(torch.arange(4), torch.zeros(4), torch.zeros(4, dtype=torch.int64))])


@pytest.mark.parametrize(
    "bad", [{"num_classes": 1}, {"eps": 1.0}, {"eval_forward": True}, {"num_classes": None, "calibrate": True}]
)
def test_a_meter_that_cannot_be_is_refused(bad):
    with pytest.raises(InputError):
        PrequentialMeter(**{"num_examples": 4, "num_classes": 3, **bad})


# ----------------------------------------------------------------------------------------------------------- ecosystem


def test_transformers_trainer_codes_each_example_once(tmp_path):
    transformers = pytest.importorskip("transformers")
    x, y = data(32)

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp([4, 8, 3])

        def forward(self, x, labels):
            z = self.net(x)
            return {"loss": F.cross_entropy(z, labels), "logits": z}

    items = [{"index": i, "x": x[i], "labels": y[i]} for i in range(32)]
    arguments = transformers.TrainingArguments(
        tmp_path, num_train_epochs=2, per_device_train_batch_size=8, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True, logging_strategy="no", remove_unused_columns=False, dataloader_pin_memory=False,
    )  # fmt: skip
    meter = PrequentialMeter(32, 3)
    model = Wrapped()
    trainer = prequential_trainer(meter, model, arguments, train_dataset=items)
    trainer.train()
    assert meter.finish(model.net, [(torch.arange(32), x, y)]).n == 32
    with pytest.raises(InputError, match="remove_unused_columns"):
        prequential_trainer(meter, model, arguments, train_dataset=[{"x": x[0], "labels": y[0]}]).train()


def shard(rank, folder, overlap):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    meter = PrequentialMeter(8, 3, warmup_examples=0, eps=0)
    mine = torch.arange(rank * 4, rank * 4 + 4) - (rank if overlap else 0)
    meter.update(mine, torch.eye(3)[mine % 3] * (1 + rank), mine % 3)
    try:
        meter.synchronize()
        report = meter.finish(uniform(8, 3), [(torch.arange(8), torch.zeros(8), torch.arange(8) % 3)])
        (folder / f"{rank}.txt").write_text(repr(report.code_length))
    except InputError as error:
        (folder / f"{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_shards_of_two_processes_are_one_code(tmp_path, overlap):
    torch.multiprocessing.spawn(shard, (tmp_path, overlap), nprocs=2)
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)]
    if overlap:
        assert all("example 3 was coded by two ranks" in line for line in told)
    else:
        losses = [math.log(2 + math.exp(s)) - s for s in (1.0, 2.0)]
        assert [float(line) for line in told] == pytest.approx([4 * sum(losses)] * 2, rel=1e-6)
