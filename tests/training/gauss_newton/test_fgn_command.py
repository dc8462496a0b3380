import json

import numpy as np
import pytest
from safetensors.torch import load_file

from fairtrial.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer's own, of click


def apply(*arguments):
    from typer import Typer
    from typer.testing import CliRunner

    from fairtrial.training.gauss_newton.command import fgn_head

    app = Typer()
    app.command()(fgn_head)
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(4, size=200)
    np.save(tmp_path / "x.npy", np.eye(4)[y] * 3 + rng.standard_normal((200, 4)))
    np.save(tmp_path / "y.npy", np.array(["ant", "bee", "cow", "dog"])[y])
    return tmp_path


def test_the_command_writes_a_head_and_its_report(files):
    result = apply(files / "x.npy", files / "y.npy", "--out", files / "head.safetensors", "--json", "--tol", "1e-4")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["classes"] == ["ant", "bee", "cow", "dog"]
    assert report["test_accuracy"] > 0.7
    head = load_file(files / "head.safetensors")
    logits = np.load(files / "x.npy") @ head["weight"].numpy().T + head["bias"].numpy()
    truth = np.load(files / "y.npy")
    hits = np.array(report["classes"])[logits.argmax(1)][160:] == truth[160:]
    assert hits.mean() == pytest.approx(report["test_accuracy"])


def test_the_command_speaks_to_people(files):
    out = files / "head.safetensors"
    result = apply(files / "x.npy", files / "y.npy", "--out", out, "--max-iter", "2", "--batch-size", "50")
    assert "not settled" in result.output
    assert "test: cross-entropy" in result.output
    assert f"written to {out}" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.npy", "nowhere.npy", "--out", "new"), "not a .npy file"),
        (("x.npy", "x.npy", "--out", "new"), "give"),
        (("x.npy", "y.npy", "--out", "x.npy"), "give another --out"),
        (("x.npy", "y.npy", "--out", "new", "--test", "1.5"), "a share in"),
        (("x.npy", "y.npy", "--out", "new", "--test", "0.999"), "x.npy, y.npy: Found array with 0 sample"),
        (("x.npy", "y.npy", "--out", "new", "--C", "0"), "'C' parameter"),
        (("x.npy", "y.npy", "--out", "no/new"), "there is no folder"),
    ],
)
def test_the_command_refuses_what_does_not_fit(files, monkeypatch, arguments, message):
    monkeypatch.chdir(files)
    result = apply(*arguments)
    assert isinstance(result.exception, InputError)
    assert message in str(result.exception)
