import json

import pytest
from typer.testing import CliRunner

from fairtrial.cli.app import app
from fairtrial.errors import FairtrialError
from fairtrial.evaluation.language_development import child_directed_speech, train_small_lm


def apply(*words):
    ran = CliRunner().invoke(app, ["apply", "language-development", *map(str, words)])
    if isinstance(ran.exception, FairtrialError):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return ran.output


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A reader's corpus and model."""
    folder = tmp_path_factory.mktemp("reader")
    speech = child_directed_speech(300)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("\n".join(speech), encoding="utf-8")
    for part in train_small_lm(speech, width=16, layers=1, vocabulary=300, epochs=0):
        part.save_pretrained(folder / "babylm")
    return folder


def test_a_corpus_and_a_model_give_a_bench_a_report_and_a_figure(reader, tmp_path):
    said = apply(reader / "corpus", "--model", reader / "babylm", "--out", tmp_path, "--per-cell", 6, "--json")
    report = json.loads(said)
    assert report["macro"] is None  # six items a cell have no power
    assert "sum of log-probabilities" in report["convention"]
    assert {cell["task"] for cell in report["cells"]} >= {"L1", "L2", "grammar"}
    assert (tmp_path / "curve.svg").read_text().count("<svg") == 1
    assert json.loads((tmp_path / "report.json").read_text())["cells"] == report["cells"]
    assert json.loads((tmp_path / "items.jsonl").read_text().splitlines()[0])["good"]


def test_items_alone_need_no_model(reader, tmp_path):
    said = apply(reader / "corpus", "--items-only", "--out", tmp_path, "--per-cell", 6)
    assert "items written to" in said
    assert {file.name for file in tmp_path.iterdir()} == {"items.jsonl", "bench.json"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["corpus", "--out", "x"], "give --model, or --items-only"),
        (["corpus", "--items-only", "--unit", "page", "--out", "x"], "line or sentence"),
        (["nothing", "--items-only", "--out", "x"], "no text file there"),
        (["corpus", "--model", "nothing", "--out", "x"], "no such file or folder"),
    ],
)
def test_bad_input_is_one_line(reader, monkeypatch, words, message):
    monkeypatch.chdir(reader)
    with pytest.raises(FairtrialError, match=message):
        apply(*words)
