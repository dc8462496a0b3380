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
from fairtrial.errors import InputError, MissingSampleError
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


def apply(folder: Path, *options: str, out: str = "out", calibration: bool = True) -> Any:
    from typer import Typer
    from typer.testing import CliRunner

    from fairtrial.lm.pruning.command import fiedler_prune

    app = Typer()
    app.command()(fiedler_prune)
    arguments = [str(folder / "model"), "--out", str(folder / out)]
    if calibration:
        arguments += ["--calibration", str(folder / "text.txt")]
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
    measured = SparseMeasurement(100, 60, "compressed rows (CSR)", 100.0, 50.0, "cpu", (0.5, 0.4, 0.6))
    monkeypatch.setattr("fairtrial.lm.pruning.packing.measure_sparse", lambda model: measured)
    result = apply(folder, "--pattern", "2:4", "--measure", "--alpha", "0.1")
    assert result.exit_code == 0, result.output
    assert "self_attn.v_proj" in result.stdout
    assert "50.00% of the block weights are zero" in result.stdout
    assert "0.60 of dense; no speed-up on this device" in result.stdout


@pytest.mark.parametrize("out", ["a[b]c", "x[/b]", "[red]"])
def test_brackets_in_a_path_are_printed_as_they_are(folder: Path, out: str) -> None:
    result = apply(folder, "--tokens", "64", out=out)
    assert result.exit_code == 0, result.output
    assert f"written to {folder / out}" in result.stdout


def test_auto_says_which_alpha_it_chose(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([4.0, 3.0, 2.0, 1.0] * 2)
    monkeypatch.setattr("fairtrial.lm.pruning.fiedler.mean_nll", lambda model, ids: next(losses))
    result = apply(folder, "--tokens", "128", "--alpha", "auto")
    assert "alpha 0.3 had the lowest loss" in result.stdout, result.output
    assert "alpha 0.3" in json.loads(apply(folder, "--alpha", "auto", "--json", out="again").stdout)["note"]


def test_without_a_calibration_text_the_sample_is_used_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairtrial.lm.pruning.fiedler import FiedlerPrune

    articles = [chr(97 + i % 26) * 40 for i in range(89)]
    monkeypatch.setattr("fairtrial.data.text.wikipedia_articles", lambda: articles)
    seen: list[torch.Tensor] = []
    prune = FiedlerPrune.prune

    def watched(self: Any, model: Any, tok: Any, ids: torch.Tensor, **how: Any) -> Any:
        seen.append(ids)
        return prune(self, model, tok, ids, **how)

    monkeypatch.setattr(FiedlerPrune, "prune", watched)
    result = apply(folder, "--sparsity", "0.5", "--tokens", "0", calibration=False)
    assert result.exit_code == 0, result.output
    assert "calibrated on the first 60 articles of the sample wikipedia-articles" in result.stdout
    assert seen[0].shape[0] * 32 <= 60 * 42


def test_without_the_sample_a_calibration_text_is_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path / "empty"))
    result = apply(folder, calibration=False)
    assert isinstance(result.exception, MissingSampleError)
    assert "fairtrial samples get wikipedia-articles" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "foo"), "device=foo"),
        (("--device", "cuda:99"), "device=cuda:99"),
        (("--window", "100000"), "give --window "),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str], message: str
) -> None:
    monkeypatch.setattr("fairtrial.causal_lm.loading.load", None)
    result = apply(folder, *options)
    assert isinstance(result.exception, InputError), result.exception
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


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
