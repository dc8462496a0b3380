from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fairtrial.causal_lm.layout import block_layouts
from fairtrial.errors import InputError
from fairtrial.lm.pruning.packing import SparseMeasurement


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    """A saved model and tokenizer, with a text beside them."""
    letters = Tokenizer(models.WordLevel({"?": 0} | {chr(97 + i): i + 1 for i in range(26)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[attr-defined]
    llama.save_pretrained(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("pack my box with five dozen liquor jugs " * 20)
    return tmp_path


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer's own, of click


def apply(folder: Path, *options: str) -> Any:
    from typer import Typer
    from typer.testing import CliRunner

    from fairtrial.lm.pruning.command import fiedler_prune

    app = Typer()
    app.command()(fiedler_prune)
    arguments = [str(folder / "model"), "--calibration", str(folder / "text.txt"), "--out", str(folder / "out")]
    return CliRunner().invoke(app, [*arguments, "--window", "32", *options])


def test_the_command_writes_a_pruned_model_and_its_report(folder: Path) -> None:
    result = apply(folder, "--sparsity", "0.5", "--tokens", "128", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["sparsity"] == 0.5
    assert [row["graph"] for row in report["graphs"]] == ["attention", "mlp"] * 2
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    weights = [view.weight for layout in block_layouts(model) for view in layout]
    assert sum(int((w == 0).sum()) for w in weights) == sum(w.numel() for w in weights) / 2
    assert (folder / "out" / "tokenizer.json").is_file()


def test_the_command_prints_a_table_and_what_the_zeros_buy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = SparseMeasurement(100, 60, "compressed rows (CSR)", 100.0, 50.0, "cpu")
    monkeypatch.setattr("fairtrial.lm.pruning.packing.measure_sparse", lambda model: measured)
    result = apply(folder, "--pattern", "2:4", "--measure", "--alpha", "0.1")
    assert result.exit_code == 0, result.output
    assert "self_attn.v_proj" in result.stdout
    assert "50.00% of the block weights are zero" in result.stdout
    assert "0.60 of dense; no speed-up on this device" in result.stdout


def test_an_output_folder_in_use_is_refused_before_any_work(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine").touch()
    result = apply(folder)
    assert isinstance(result.exception, InputError)
    assert "not an empty folder" in str(result.exception)


@pytest.mark.parametrize(("option", "value"), [("--alpha", "much"), ("--modes", "few"), ("--tokens", "-1")])
def test_values_that_are_no_numbers_are_refused(folder: Path, option: str, value: str) -> None:
    assert isinstance(apply(folder, option, value).exception, InputError)


def test_importing_the_command_and_the_package_loads_no_torch() -> None:
    code = "import sys, fairtrial.lm.pruning.command; assert not {'torch', 'numpy', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_export_exists() -> None:
    from fairtrial import lm
    from fairtrial.lm import pruning

    for module in (lm, pruning):
        assert all(getattr(module, name) is not None for name in module.__all__)
        with pytest.raises(AttributeError):
            module.nothing  # noqa: B018


def test_windows_are_spread_over_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairtrial.lm.pruning.fiedler import FiedlerPrune

    seen: list[torch.Tensor] = []
    monkeypatch.setattr(FiedlerPrune, "prune", lambda self, model, tok, ids, progress: seen.append(ids))
    apply(folder, "--tokens", "96")
    assert seen[0].shape == (3, 32)
