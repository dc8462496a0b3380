import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from fairtrial.cli.app import app
from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.command import proof_quality
from fairtrial.evaluation.proof_quality.theorems import bank
from fairtrial.judges import CachedJudge


@pytest.fixture
def file(tmp_path):
    """Two models on ten theorems of the bank, one of which a model got wrong; two rows ask for a technique."""
    rows, seen = [], {}
    for entry in bank():
        count = seen[entry.proof.problem] = seen.get(entry.proof.problem, 0) + 1
        if count < 3:
            model = "euler" if count == 1 else "gauss"
            rows.append(
                {"problem_id": entry.proof.problem, "proof": entry.proof.source, "model": model, "correct": True}
            )
    rows[0]["correct"] = False
    path = tmp_path / "proofs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_table_is_written_and_the_models_are_compared(file, tmp_path, capsys):
    out = tmp_path / "quality.parquet"
    proof_quality(file, out=out, compare=("euler", "gauss"))
    frame = pd.read_parquet(out)
    assert len(frame) == 40
    assert frame["used_share"].notna().sum() == 39
    said = capsys.readouterr().out
    assert "euler minus gauss, on common problems" in said
    assert f"written to {out}" in said


def test_json_is_alone_on_the_output(file, tmp_path, capsys):
    proof_quality(file, out=tmp_path / "q.csv", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"out", "summary", "sets", "comparison", "pareto", "adaptivity", "judge"}
    assert len(pd.read_csv(tmp_path / "q.csv")) == 40


def test_fairtrial_apply_runs_it(file, tmp_path):
    ran = CliRunner().invoke(app, ["apply", "proof-quality", str(file), "--out", str(tmp_path / "q.parquet")])
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "q.parquet").is_file()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"out": "q.xlsx"}, "ends in .parquet or .csv"),
        ({"judge": "http://localhost:1/v1"}, "--model"),
        ({"judge": "nowhere"}, "URL of an endpoint"),
        ({"compare": ("euler", "nobody")}, "there is no model"),
    ],
)
def test_what_cannot_be_done_is_refused_without_a_file(file, tmp_path, values, said):
    out = tmp_path / values.pop("out", "q.parquet")
    with pytest.raises((InputError, KeyError)) as raised:
        proof_quality(file, out=out, **values)
    assert said in str(raised.value)
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_refused_before_a_judge_is_asked(file, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("fairtrial.evaluation.proof_quality.command._judge", lambda *how: asked.append(how))
    (tmp_path / "q.csv").mkdir()
    for out in (tmp_path / "q.csv", file / "q.csv"):
        with pytest.raises(InputError, match=r"q\.csv.*give another"):
            proof_quality(file, out=out, judge="model")
    assert not asked


def test_replies_of_a_judge_outlive_an_error_after_them(file, tmp_path, monkeypatch):
    (tmp_path / "judge").write_text("")
    asked, made = [], []

    def reply(prompt):
        asked.append(prompt)
        return '{"correct": true, "confidence": 1}'

    def local(folder, *, cache, temperature):
        made.append(cache)
        return CachedJudge(reply, cache)

    def fails(*_):
        raise RuntimeError("later")

    monkeypatch.setattr("fairtrial.judges.LocalJudge", local)
    with monkeypatch.context() as broken:
        broken.setattr("fairtrial.evaluation.proof_quality.rank._with_correctness", fails)
        with pytest.raises(RuntimeError, match="later"):
            proof_quality(file, out=tmp_path / "q.csv", judge=str(tmp_path / "judge"))
    count = len(asked)
    assert count
    proof_quality(file, out=tmp_path / "q.csv", judge=str(tmp_path / "judge"))
    assert len(asked) == count  # this judge cannot tell proofs apart, so that nothing else is asked
    assert made == [tmp_path / "q.replies"] * 2
