import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer import Typer
from typer.testing import CliRunner

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import InputError
from fairtrial.lm.upcycling import DivMoEForCausalLM
from fairtrial.lm.upcycling.command import divmoe, pairs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer's own, of click


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tuned):
    path = tmp_path_factory.mktemp("divmoe")
    base, tokenizer = tiny_causal_lm()
    for name, model in (("base", base), ("math", tuned(base, 1)), ("code", tuned(base, 2))):
        model.save_pretrained(path / name)
        tokenizer.save_pretrained(path / name)
    (path / "texts.txt").write_text("w1 w2 w3 w4\n")
    return path


def apply(folder, *more):
    app = Typer()
    app.command()(divmoe)
    domains = [f"--domain={name}={folder / name}" for name in ("math", "code")]
    return CliRunner().invoke(app, [str(folder / "base"), *domains, "--granularity=2", *more])


def test_folders_go_in_and_a_mixture_that_loads_comes_out(folder):
    texts = [f"--texts={name}={folder / 'texts.txt'}" for name in ("math", "code")]
    result = apply(folder, f"--out={folder / 'moe'}", "--json", *texts)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["covered"]
    assert told["start_loss"].keys() == {"math", "code"}
    moe = AutoModelForCausalLM.from_pretrained(folder / "moe")
    assert isinstance(moe, DivMoEForCausalLM)
    math = AutoModelForCausalLM.from_pretrained(folder / "math")
    assert torch.equal(moe.layers()[1].up_proj[0, :32], math.model.layers[1].mlp.gate_proj.weight[:32])
    assert "exists" in str(apply(folder, f"--out={folder / 'moe'}").exception)
    assert "every slice is taken once" in apply(folder, f"--out={folder / 'moe2'}").stdout


def test_another_vocabulary_is_refused(folder):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0, "w0": 1}, unk_token="w0")))
    AutoModelForCausalLM.from_pretrained(folder / "math").save_pretrained(folder / "other")
    other.save_pretrained(folder / "other")
    found = apply(folder, f"--domain=other={folder / 'other'}", f"--out={folder / 'moe3'}").exception
    assert "another vocabulary" in str(found)


def test_arguments_that_are_no_pairs_are_refused():
    assert pairs("--domain", ["a=b", "c=d=e"]) == {"a": "b", "c": "d=e"}
    for given in (["a"], ["=b"], ["a="], ["a=b", "a=c"]):
        with pytest.raises(InputError, match="--domain"):
            pairs("--domain", given)
