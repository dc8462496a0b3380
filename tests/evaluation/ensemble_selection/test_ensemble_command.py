import json

import numpy as np
import pandas as pd
import pytest
from typer import Typer
from typer.testing import CliRunner

from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection.answers import read_answers
from fairtrial.evaluation.ensemble_selection.command import ensemble_selection
from fairtrial.evaluation.ensemble_selection.simulation import simulate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer's own, of click


@pytest.fixture
def folder(tmp_path):
    codes, y = simulate(np.random.default_rng(0), 300, 2)
    names = np.array(["no", "yes"])
    frame = pd.DataFrame(names[codes[:, 3:9]], columns=["[big]", "b", "c", "d", "e", "f"])
    frame.assign(label=names[y]).to_csv(tmp_path / "answers.csv", index_label="item")
    frame.assign(label=names[y]).to_parquet(tmp_path / "answers.parquet")
    (tmp_path / "costs.csv").write_text("model,cost\n" + "".join(f"{name},{1 + i}\n" for i, name in enumerate(frame)))
    return tmp_path


def apply(*arguments):
    app = Typer()
    app.command()(ensemble_selection)
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "140"})


def test_it_writes_and_prints_what_to_query(folder):
    result = apply(folder / "answers.csv", "--budget", 3, "--out", folder / "selection.json")
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "selection.json").read_text())
    assert 1 <= len(report["selected"]) <= 3
    assert [row["model"] for row in report["prefixes"]] == report["selected"]
    copula = report["copula"]
    assert copula["floor_low"] <= copula["floor"] <= copula["majority_error"] + 0.02
    for words in ("[big]" if "[big]" in report["selected"] else "In the order of choice", "Fano: no rule", "errs on"):
        assert words in result.stdout
    assert "however many, on" in result.stdout


def test_json_is_all_that_is_printed_and_parquet_gives_the_same(folder):
    one, two = (json.loads(apply(folder / name, "--json").stdout) for name in ("answers.csv", "answers.parquet"))
    assert one == two


def test_costs_bound_what_is_chosen(folder):
    result = apply(
        folder / "answers.csv", "--budget", 4, "--costs", folder / "costs.csv", "--min-gain", "-inf", "--json"
    )
    report = json.loads(result.stdout)
    assert report["prefixes"][-1]["cost"] <= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--label", "truth"), "no column 'truth'"),
        (("--budget", 0.1), "below the cheapest cost"),
        (("--estimator", "knn"), "no estimator 'knn'"),
        (("--costs", "none.csv"), "no such file"),
        (("--costs", "{}/twice.csv"), "'b' has two costs"),
        (("--costs", "{}/words.csv"), "no table of costs"),
        (("--factors", 3), "--factors=3: give a whole number from 1 to 2"),
        (("--out", "{}/answers.csv"), "it is read here"),
    ],
)
def test_bad_input_is_one_line(folder, options, message):
    (folder / "twice.csv").write_text("model,cost\nb,1\nb,2\n")
    (folder / "words.csv").write_text("model,cost\nb,much\n")
    result = apply(folder / "answers.csv", *(str(option).format(folder) for option in options))
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_a_single_model_has_no_copula(folder):
    frame = pd.read_csv(folder / "answers.csv")[["b", "label"]]
    frame.to_csv(folder / "one.csv", index=False)
    report = json.loads(apply(folder / "one.csv", "--json").stdout)
    assert report["copula"] is None
    assert "Fano" in apply(folder / "one.csv").stdout


def test_rows_of_more_fields_than_the_header_are_refused(folder):
    (folder / "shifted.csv").write_text("a,label\nx,y,y\ny,x,x\n")
    assert "more fields than the header" in str(apply(folder / "shifted.csv").exception)


def test_json_lines_keep_answers_as_they_are_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"m": 1, "label": 1}\n{"m": null, "label": 2}\n{"label": 1}\n')
    frame, labels = read_answers(tmp_path / "a.jsonl", "label")
    assert labels.tolist() == ["1", "2", "1"]
    assert frame["m"].iloc[0] == "1"
    assert frame["m"].isna().tolist() == [False, True, True]
    (tmp_path / "a.jsonl").write_text('{"m": 1}\n[1]\n')
    with pytest.raises(InputError, match=r"line 2: no object"):
        read_answers(tmp_path / "a.jsonl", "label")
