import json

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from fairtrial.errors import InputError
from fairtrial.lm.steering import AnchorSpace, contrastive_direction, read_control_vector
from fairtrial.lm.steering.command import acs

POSITIVE, NEGATIVE = ["w2 w7 w9", "w3 w7 w8"], ["w2 w5 w9", "w3 w5 w8"]


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer's own, of click


@pytest.fixture(scope="module")
def given(tmp_path_factory, tiny, anchors):
    folder = tmp_path_factory.mktemp("acs")
    model, tokenizer = tiny
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "anchors.txt").write_text("\n".join(anchors))
    space = AnchorSpace(anchors)
    space.add("m", model, tokenizer)
    space.add_direction("m", "axis", contrastive_direction(model, tokenizer, POSITIVE, NEGATIVE))
    space.canonical("axis").save(folder / "c.safetensors")
    return folder, space.canonical("axis").reconstruct("m")


def apply(folder, *more):
    app = Typer()
    app.command()(acs)
    given = [str(folder / "model"), "--canonical", str(folder / "c.safetensors")]
    return CliRunner().invoke(app, [*given, "--anchors", str(folder / "anchors.txt"), *more])


def test_the_command_writes_the_direction_that_the_library_finds(given):
    folder, direction = given
    result = apply(folder, "--out", str(folder / "d.gguf"), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["axis"], told["layer"], told["sources"]) == ("axis", direction.layer, ["m"])
    written = read_control_vector(folder / "d.gguf")[direction.layer].double()
    torch.testing.assert_close(written, direction.vector * direction.scale, rtol=1e-4, atol=1e-5)
    assert "exists" in str(apply(folder, "--out", str(folder / "d.gguf")).exception)
    lines = apply(folder, "--out", str(folder / "d.safetensors")).stdout.splitlines()
    assert lines[0].startswith("'axis' of m rebuilt after block 1")


def test_what_it_cannot_do_it_says(given):
    folder, _ = given
    (folder / "other.txt").write_text("\n".join(f"w{i} w3" for i in range(20)))
    for more, word in (
        (["--out", str(folder / "d.bin")], "ends in"),
        (["--out", str(folder / "no" / "d.gguf")], "there is no folder"),
        (["--out", str(folder / "e.gguf"), "--anchors", str(folder / "other.txt")], "other anchors"),
        (["--out", str(folder / "e.gguf"), "--canonical", str(folder / "anchors.txt")], "not a readable"),
    ):
        result = apply(folder, *more)
        assert isinstance(result.exception, InputError)
        assert word in str(result.exception)
