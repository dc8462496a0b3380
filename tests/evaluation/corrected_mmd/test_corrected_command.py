import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fairtrial.cli.app import app
from fairtrial.errors import InputError
from fairtrial.evaluation.corrected_mmd import EnergyKernel, Stratified, mec_mmd2


@pytest.fixture
def tables(tmp_path):
    """200 rows of a biased sensor, 40 of them audited, and a sample of the true distribution."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    z = x + 0.8 + 0.2 * rng.normal(size=(200, 2))
    audited = np.sort(rng.choice(200, 40, replace=False))
    frame = pd.DataFrame({"x": np.nan, "w": np.nan, "z": z[:, 0], "v": z[:, 1], "site": ["a", "b"] * 100})
    frame.loc[audited, ["x", "w"]] = x[audited]
    frame.to_csv(tmp_path / "data.csv", index=False)
    y = rng.normal(size=(150, 2))
    pd.DataFrame(y, columns=["x", "w"]).to_csv(tmp_path / "simulated.csv", index=False)
    return tmp_path, x, z, audited, y


def apply(folder, *words):
    """Run the command; an error that a user would see is raised."""
    words = ["apply", "corrected-mmd", str(folder / "data.csv"), "--against", str(folder / "simulated.csv"), *words]
    result = CliRunner().invoke(app, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


BOTH = ("--truth", "x", "--truth", "w", "--noisy", "z", "--noisy", "v")


def test_the_answer_is_that_of_the_function(tables):
    folder, x, z, audited, y = tables
    answer = json.loads(apply(folder, *BOTH, "--json").stdout)
    estimate = mec_mmd2(z, x[audited], audited, y)
    assert answer["mmd2"] == pytest.approx(estimate.value)
    assert answer["standard_error"] == pytest.approx(estimate.standard_error)
    assert answer["bias_of_plain"] == pytest.approx(estimate.bias_of_plain)
    assert (answer["rows"], answer["audited"], answer["against"]) == (200, 40, 150)
    assert answer["warnings"] == []


def test_options_reach_the_estimate(tables):
    folder, x, z, audited, y = tables
    words = ("--estimator", "pairwise", "--form", "v", "--strength", "0.5", "--kernel", "energy", "--strata", "site")
    answer = json.loads(apply(folder, *BOTH, *words, "--json").stdout)
    how = {"estimator": "pairwise", "form": "v", "strength": 0.5, "kernel": EnergyKernel()}
    expected = mec_mmd2(z, x[audited], audited, y, inclusion=Stratified(["a", "b"] * 100), **how)
    assert answer["mmd2"] == pytest.approx(expected.value)


def test_the_table_says_whether_correction_pays_and_how_many_rows_to_audit(tables):
    folder = tables[0]
    out = apply(folder, "--truth", "x", "--noisy", "z", "--target-se", "0.03").stdout
    assert "40 audited" in out
    assert "correction pays" in out
    assert "rows to audit" in out


def test_a_fitted_strength_and_proxy_are_taken(tables):
    answer = json.loads(apply(tables[0], *BOTH, "--strength", "auto", "--calibrated", "--json").stdout)
    assert 0 <= answer["strength"] <= 1


def test_a_table_with_other_names_and_as_many_columns_will_do(tables):
    folder, *_, y = tables
    before = json.loads(apply(folder, *BOTH, "--json").stdout)
    pd.DataFrame(y, columns=["first", "second"]).to_csv(folder / "simulated.csv", index=False)
    assert json.loads(apply(folder, *BOTH, "--json").stdout) == before
    with pytest.raises(InputError, match="leave 1 in it; it has 2"):
        apply(folder, "--truth", "x", "--noisy", "z")


def test_an_audit_of_the_largest_is_warned_of(tables):
    folder, x, z, *_ = tables
    frame = pd.DataFrame({"x": np.where(z[:, 0] > np.quantile(z[:, 0], 0.8), x[:, 0], np.nan), "z": z[:, 0]})
    frame.to_csv(folder / "data.csv", index=False)
    pd.DataFrame({"x": x[:, 0]}).to_csv(folder / "simulated.csv", index=False)
    assert "audited rows differ" in apply(folder, "--truth", "x", "--noisy", "z").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--truth", "x", "--noisy", "q"), "has no column 'q'; it has x, w, z"),
        (("--truth", "x", "--noisy", "z", "--noisy", "v"), "--truth has 1 columns and --noisy 2"),
        (("--truth", "site", "--noisy", "z"), "not a number"),
        (("--truth", "z", "--noisy", "x"), "column 'x' is blank in row"),
        ((*BOTH, "--strength", "most"), "must be a number or auto"),
        ((*BOTH, "--kernel", "cubic"), "gaussian or energy"),
        ((*BOTH, "--strata", "region"), "no column 'region'"),
        ((*BOTH, "--strength", "auto", "--target-se", "0.1"), "fixed --strength"),
        ((*BOTH, "--target-se", "0.00001"), "collect more rows"),
    ],
)
def test_bad_input_is_refused_naming_file_and_place(tables, words, message):
    with pytest.raises(InputError, match=message):
        apply(tables[0], *words)


def test_half_a_truth_and_a_missing_file_are_refused(tables):
    folder = tables[0]
    frame = pd.read_csv(folder / "data.csv")
    frame.loc[frame.x.notna().to_numpy().argmax(), "w"] = np.nan
    frame.to_csv(folder / "data.csv", index=False)
    with pytest.raises(InputError, match="some of its truths"):
        apply(folder, *BOTH)
    (folder / "simulated.csv").unlink()
    with pytest.raises(InputError, match="no such file"):
        apply(folder, *BOTH)
