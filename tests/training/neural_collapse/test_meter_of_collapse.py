import json
import math

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn
from typer.testing import CliRunner

from fairtrial.cli.app import app
from fairtrial.errors import InputError
from fairtrial.testing import check_trial
from fairtrial.training.networks import mlp
from fairtrial.training.neural_collapse import CollapseTracker, collapse_report, lyapunov
from fairtrial.training.neural_collapse.trial import CollapseParams, check, trial


def gaussian(n=60, k=3, p=8, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, p)), rng.standard_normal((k, p)), np.arange(n) % k


def test_an_exact_simplex_has_zeros_everywhere():
    for k, p in ((3, 3), (5, 9)):
        frame = np.linalg.qr(np.random.default_rng(k).standard_normal((p, k)))[0].T  # (k, p), orthonormal rows
        etf = (np.eye(k) - 1 / k) @ frame
        y = np.repeat(np.arange(k), 4)
        report = collapse_report(etf[y], etf, y)
        for name in ("nc1", "nc2_norm", "nc2_angle", "nc3", "nc4", "v_logit", "v_weight", "v_mean"):
            assert getattr(report, name) == pytest.approx(0, abs=1e-9), name
        assert report.accuracy == 1
        assert report.slowdown() == 0
        assert report.simplex_possible


def test_random_features_are_far_from_collapse():
    report = collapse_report(*gaussian(n=3000, k=10, p=50))
    assert report.nc4 > 0.5
    assert report.nc1 > 1


def test_nc1_equals_its_definition_by_the_pseudo_inverse():
    h, w, y = gaussian()
    means = np.stack([h[y == c].mean(0) for c in range(3)])
    within = (h - means[y]).T @ (h - means[y]) / len(h)
    between = (means - means.mean(0)).T @ (means - means.mean(0)) / 3
    assert collapse_report(h, w, y).nc1 == pytest.approx(np.trace(within @ np.linalg.pinv(between)) / 3)


def test_v_is_that_of_the_centred_singular_values():
    h, w, y = gaussian(k=4)
    bias = np.arange(4.0)
    report = collapse_report(torch.tensor(h), torch.tensor(w), torch.tensor(y), torch.tensor(bias))
    means = np.stack([h[y == c].mean(0) for c in range(4)])
    z = w @ means.T + bias[:, None]
    values = np.linalg.svd(z - z.mean(0))[1][:3]
    assert report.v_logit == pytest.approx(float(lyapunov(values)))
    np.testing.assert_allclose(report.modes, values)
    assert report.slowdown(1e-3) == pytest.approx(2 * math.log(report.v_logit / 1e-3))
    assert json.loads(json.dumps(report.to_dict()))["accuracy"] == report.accuracy
    with pytest.raises(InputError, match="eps"):
        report.slowdown(0)


def test_two_confounded_classes_are_the_lagging_direction_and_make_v_infinite():
    k, p = 4, 6
    means = np.zeros((k, p))
    means[:, :k] = np.eye(k)
    means[3] = means[2]  # not told apart
    y = np.repeat(np.arange(k), 3)
    report = collapse_report(means[y], means, y)
    assert report.missing == 1
    assert report.v_logit == math.inf
    assert report.slowdown() == math.inf
    far = report.lagging / np.abs(report.lagging).max()
    np.testing.assert_allclose(np.abs(far), [0, 0, 1, 1], atol=1e-9)
    assert far[2] == pytest.approx(-far[3])


def test_too_few_dimensions_are_reported_and_single_examples_warned_about():
    h, w, y = gaussian(k=6, p=3)
    assert not collapse_report(h, w, y).simplex_possible
    with pytest.warns(UserWarning, match="one example"):
        assert collapse_report(h[:6], w, np.arange(6)).nc1 == pytest.approx(0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda h, w, y: (h, w, np.where(y == 1, 0, y)), "class 1 has no example"),
        (lambda h, w, y: (h, w, y + 1), "labels run from 1 to 3"),
        (lambda h, w, y: (h, w[:, :4], y), "needed"),
        (lambda h, w, y: (np.where(np.arange(60)[:, None] == 7, np.nan, h), w, y), "example 7"),
        (lambda h, w, y: (h, w, y + 0.5), "whole numbers"),
        (lambda h, w, y: (h, w * np.nan, y), "weight or bias is not finite"),
        (lambda h, w, y: (h[:0], w, y[:0]), "labels are none"),
    ],
)
def test_bad_arrays_are_named(change, word):
    with pytest.raises(InputError, match=word):
        collapse_report(*change(*gaussian()))


# ------------------------------------------------------------------------------------------------------------- tracker


def test_the_tracker_measures_what_the_head_sees_and_leaves_the_model_alone():
    torch.manual_seed(0)
    model = nn.Sequential(mlp([4, 8, 8], activation=nn.ReLU), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    tracker = CollapseTracker(model, head="2", loader=list(zip(x.split(7), y.split(7), strict=True)))
    report = tracker.measure()
    assert model.training
    model.eval()
    expected = collapse_report(model[0](x), model[2].weight, y, model[2].bias)
    assert report.nc1 == pytest.approx(expected.nc1, rel=1e-5)
    assert report.accuracy == expected.accuracy
    tracker.measure()
    assert len(tracker.history) == 2
    assert not model[2]._forward_pre_hooks


def test_a_wrong_head_is_refused():
    model = mlp([4, 8, 3], activation=nn.ReLU)
    data = [(torch.randn(6, 4), torch.arange(6) % 3)]
    with pytest.raises(InputError, match="'1', '3'"):
        CollapseTracker(model, head="classifier", loader=data)
    with pytest.raises(InputError, match="not the model's logits"):
        CollapseTracker(nn.Sequential(model, nn.Linear(3, 3)), head="0.3", loader=data).measure()
    with pytest.raises(InputError, match="not the model's logits"):
        CollapseTracker(model, head="1", loader=data).measure()
    with pytest.raises(InputError, match="empty"):
        CollapseTracker(model, head="3", loader=[]).measure()
    twice = nn.Linear(4, 4)
    with pytest.raises(InputError, match="ran 2 times"):
        CollapseTracker(nn.Sequential(twice, twice), head="0", loader=data).measure()


# ------------------------------------------------------------------------------------------------------ command, trial


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_the_command_reports_a_file(tmp_path, kind):
    h, w, y = gaussian()
    file = tmp_path / f"trained.{kind}"
    arrays = {"features": h, "weight": w, "labels": y, "bias": np.zeros(3)}
    np.savez(file, **arrays) if kind == "npz" else save_file(arrays, file)
    out = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["apply", "neural-collapse", str(file), "--json", "--out", str(out)])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["nc1"] == pytest.approx(collapse_report(h, w, y).nc1)
    assert json.loads(out.read_text()) == told
    assert "lags most" in CliRunner().invoke(app, ["apply", "neural-collapse", str(file)]).stdout


def test_classes_are_set_against_others_and_not_themselves(tmp_path):
    h, w, y = gaussian(k=2, p=4)
    np.savez(tmp_path / "two.npz", features=h, weight=w, labels=y.astype(float))
    told = CliRunner().invoke(app, ["apply", "neural-collapse", str(tmp_path / "two.npz")]).stdout
    assert "0 against 1" in told or "1 against 0" in told


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", b"\x93NUMPY"])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "bad.npz").write_bytes(content)
    done = CliRunner().invoke(app, ["apply", "neural-collapse", str(tmp_path / "bad.npz")])
    assert isinstance(done.exception, InputError)
    assert "bad.npz" in str(done.exception)


def test_a_file_without_what_is_needed_is_named(tmp_path):
    file = tmp_path / "bad.npz"
    np.savez(file, features=np.zeros((2, 2)))
    for path, word in ((file, "labels, weight"), (tmp_path / "none.npz", "no such file")):
        done = CliRunner().invoke(app, ["apply", "neural-collapse", str(path)])
        assert done.exit_code != 0
        assert word in str(done.exception) or word in done.output


def test_the_trial_is_sound():
    check_trial(trial)


def test_the_trials_parameters_are_checked(tmp_path):
    with pytest.raises(InputError, match="6 is no power of 2"):
        check(CollapseParams(classes=(4, 6), data="tiny"))
    with pytest.raises(InputError, match="no such file"):
        check(CollapseParams(data=str(tmp_path / "none.npz")))
