import json

import pandas as pd
import pytest
from typer import Typer
from typer.testing import CliRunner

from fairtrial.causal_lm.loading import load
from fairtrial.errors import FairtrialError
from fairtrial.lm.editing.command import norm_anchor

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def files(tiny, texts, tmp_path):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "t.txt").write_text("\n".join(texts))
    rows = [{"prompt": "w4 {} w5", "subject": f"w{i}", "target_new": "w11"} for i in range(20, 24)]
    (tmp_path / "e.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def call(files, **change):
    app = Typer()
    app.command()(norm_anchor)
    given = {"edits": "e.jsonl", "text": "t.txt", "out": "o", **change}
    paths = {name: str(files / value) for name, value in given.items() if name in ("edits", "text", "out")}
    rest = {name: value for name, value in given.items() if name not in paths}
    options = [part for name, value in {**paths, "layers": "1", **rest}.items() for part in (f"--{name}", value)]
    return CliRunner().invoke(app, [str(files / "m"), *options, "--json"])


def test_a_model_is_edited_and_kept(files):
    told = call(files)
    assert told.exit_code == 0, told.exception
    report = json.loads(told.output)
    assert report["made"] == report["edits"] == 4
    assert report["weight_ratio"] > 1
    assert pd.read_csv(files / "o" / "edits.csv")["edit"].tolist() == [4]
    edited, _ = load(files / "o")
    original, _ = load(files / "m")
    changed = [n for n, p in edited.named_parameters() if not p.equal(original.get_parameter(n))]
    assert changed == ["model.layers.1.mlp.down_proj.weight"]


def test_what_cannot_be_done_is_refused(files):
    for change, word in (
        ({"layers": "x"}, "numbers of blocks"),
        ({"layers": "9"}, "blocks 0..2"),
        ({"editor": "mend"}, "no editor"),
        ({"edits": "none.jsonl"}, "cannot be read"),
        ({"text": "none.txt"}, "no such file"),
        ({"out": "m"}, "exists"),
    ):
        failed = call(files, **change)
        assert isinstance(failed.exception, FairtrialError)
        assert word in str(failed.exception)
