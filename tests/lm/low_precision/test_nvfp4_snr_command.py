import json

import pandas as pd
import pytest
from typer import Typer
from typer.testing import CliRunner

from fairtrial.causal_lm.windows import windows
from fairtrial.data.tiny import tiny_causal_lm, tiny_texts
from fairtrial.errors import InputError
from fairtrial.lm.low_precision import dot_product_snr
from fairtrial.lm.low_precision.command import nvfp4_snr

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer's own, of click


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snr")
    model, tokenizer = tiny_causal_lm()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(tiny_texts(documents=1)[0])
    return folder


def apply(folder, *more):
    app = Typer()
    app.command()(nvfp4_snr)
    return CliRunner().invoke(app, [str(folder / "model"), "--text", str(folder / "text.txt"), *more])


def test_the_command_writes_the_table_of_the_library(folder):
    out = folder / "table.csv"
    done = apply(folder, "--out", str(out), "--sequences", "3", "--length", "16", "--json")
    assert done.exit_code == 0, done.output
    model, tokenizer = tiny_causal_lm()
    ids = windows(tokenizer, folder / "text.txt", 16).ids[:3]
    pd.testing.assert_frame_equal(pd.read_csv(out), dot_product_snr(model, ids), rtol=1e-4)
    told = json.loads(done.output)
    assert (told["layers"], told["tokens"]) == (14, 48)
    with pytest.raises(InputError, match="exists"):
        raise apply(folder, "--out", str(out)).exception


def test_the_report_names_the_worst_layer_and_files_are_checked_first(folder, tmp_path):
    done = apply(folder, "--out", str(tmp_path / "t.csv"), "--length", "16")
    assert "14 layers on 128 tokens" in done.output
    assert "least" in done.output
    for out, message in (("a.txt", r"ends in \.csv"), ("none/a.csv", "there is no folder")):
        with pytest.raises(InputError, match=message):
            raise apply(folder, "--out", str(tmp_path / out)).exception
