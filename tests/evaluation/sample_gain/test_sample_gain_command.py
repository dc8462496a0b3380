"""fairtrial apply sample-gain."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import RepeatedKFold

from fairtrial import stats
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.sample_gain import read_scores

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer's own, of click


@pytest.fixture
def scores(tmp_path):
    rng = np.random.default_rng(0)
    hard = rng.random(60)
    rows = []
    for split, (_, test) in enumerate(RepeatedKFold(n_splits=5, n_repeats=2, random_state=0).split(hard)):
        luck = rng.random(len(test))
        for label, skill in (("forest", 0.9), ("logistic", 0.6)):
            right = (hard[test] + 0.3 * luck < skill).astype(int)
            rows += [(label, split, f"s{i}", score) for i, score in zip(test, right, strict=True)]
    file = tmp_path / "scores.csv"
    pd.DataFrame(rows, columns=["candidate", "split", "sample", "score"]).to_csv(file, index=False)
    return file


def apply(*arguments):
    from typer import Typer
    from typer.testing import CliRunner

    from fairtrial.evaluation.sample_gain.command import sample_gain

    app = Typer()
    app.command()(sample_gain)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_each_candidate_has_its_interval_and_gain(scores):
    result = apply(scores)
    assert result.exit_code == 0, result.output
    for label, table in read_scores(scores).items():
        assert f"{label}: {stats.interval(table)}" in result.stdout
        assert str(stats.sample_gain(table)) in result.stdout
    assert "against" not in result.stdout


def test_with_a_baseline_there_are_verdicts_and_a_report(scores, tmp_path):
    out = tmp_path / "report.json"
    result = apply(scores, "--baseline", "logistic", "--out", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    tables = read_scores(scores)
    expected = stats.compare(tables["forest"], tables["logistic"], higher_is_better=True)
    (verdict,) = report["verdicts"]
    assert (verdict["candidate"], verdict["state"]) == ("forest", expected.state) == ("forest", "HOLDS")
    assert (verdict["low"], verdict["high"]) == pytest.approx((expected.low, expected.high))
    assert f"forest against logistic: {expected}" in result.stdout
    assert [one["candidate"] for one in report["candidates"]] == ["forest", "logistic"]
    assert set(report["candidates"][0]["ahead"]) == {"1", "5", "10", "inf"}
    printed = json.loads(apply(scores, "--baseline", "logistic", "--json").stdout)
    assert printed == report


def test_lower_is_better_margins_and_the_variance_are_heeded(scores):
    verdict = json.loads(apply(scores, "--baseline", "logistic", "--lower-is-better", "--json").stdout)["verdicts"][0]
    assert verdict["state"] == "FAILS"
    verdict = json.loads(apply(scores, "--baseline", "logistic", "--margin", "0.9", "--json").stdout)["verdicts"][0]
    assert verdict["state"] == "FAILS"
    one = json.loads(apply(scores, "--variance", "nadeau_bengio", "--json").stdout)["candidates"][0]
    expected = stats.interval(read_scores(scores)["forest"], variance="nadeau_bengio")
    assert (one["low"], one["high"]) == pytest.approx((expected.low, expected.high))


def test_what_is_not_known_is_null_in_json(tmp_path):
    file = tmp_path / "folds.csv"
    pd.DataFrame({"candidate": "a", "split": [0, 1], "score": 0.5, "n_test": 9, "n_train": 81}).to_csv(file)
    one = json.loads(apply(file, "--json").stdout)["candidates"][0]
    assert one["low"] is None
    assert one["sample_gain"] is None


def test_a_single_split_has_the_binomial_interval_and_no_gain(scores, tmp_path):
    frame = pd.read_csv(scores)
    frame[frame.split == 0].to_csv(tmp_path / "one.csv", index=False)
    result = apply(tmp_path / "one.csv")
    assert "binomial" in result.stdout
    assert "sample gain" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--baseline", "tree"), UnknownNameError, "no candidate 'tree'"),
        (("--variance", "naive"), UnknownNameError, "no variance 'naive'"),
        (("--out", "nowhere/report.json"), InputError, "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_done_is_refused(scores, arguments, error, message):
    result = apply(scores, *arguments)
    assert isinstance(result.exception, error)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_importing_command_and_package_loads_neither_sklearn_nor_torch():
    code = (
        "import sys, fairtrial.evaluation.sample_gain.command, fairtrial.evaluation.sample_gain;"
        "assert not {'torch', 'numpy', 'pandas', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_cross_validating_loads_no_torch():
    code = "import sys; from fairtrial.evaluation.sample_gain import *; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_export_exists():
    from fairtrial.evaluation import sample_gain

    assert all(getattr(sample_gain, name) is not None for name in sample_gain.__all__)
    with pytest.raises(AttributeError):
        sample_gain.nothing  # noqa: B018
