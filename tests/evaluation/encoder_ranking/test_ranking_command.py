from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.encoder_ranking.files import read_families, read_features, read_vector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer's own, of click


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Features of 140 items by five encoders, in three kinds of files, with labels and families beside them."""
    rng = np.random.default_rng(0)
    labels = np.arange(140) % 3
    truth = np.hstack([np.eye(3)[labels] * 3, rng.normal(size=(140, 5))])

    def encoder(width: int, noise: float) -> np.ndarray:
        return (truth @ rng.normal(size=(8, width)) + noise * rng.normal(size=(140, width))).astype(np.float32)

    np.save(tmp_path / "clip.npy", encoder(20, 0.1))
    np.save(tmp_path / "dino.npy", encoder(30, 0.2))
    np.savez(tmp_path / "pool.npz", small=encoder(4, 1.0), large=encoder(60, 4.0))
    save_file({"x": encoder(12, 1.0)}, tmp_path / "vit.safetensors")
    np.save(tmp_path / "labels.npy", labels)
    (tmp_path / "families.csv").write_text("encoder,family\ndino,dino\npool/small,pool\npool/large,pool\nvit,vit\n")
    return tmp_path


def apply(
    folder: Path, *options: str, features: tuple[str, ...] = ("clip.npy", "dino.npy", "pool.npz", "vit.safetensors")
) -> Any:
    from typer import Typer
    from typer.testing import CliRunner

    from fairtrial.evaluation.encoder_ranking.command import encoder_ranking

    app = Typer()
    app.command()(encoder_ranking)
    paths = [str(folder / name) for name in features]
    return CliRunner().invoke(app, [*paths, "--reference", str(folder / "clip.npy"), "--rank", "8", *options])


def test_the_command_ranks_files_and_writes_json(folder: Path) -> None:
    out = folder / "ranking.json"
    result = apply(folder, "--bootstrap", "20", "--out", str(out), "--families", str(folder / "families.csv"))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["order"][0] == "dino"
    assert set(written["order"]) == {"dino", "pool/small", "pool/large", "vit"}
    assert written["families"]["pool/large"] == "pool"
    assert "clip: the reference, and so no candidate" in result.stdout
    assert f"written to {out}" in result.stdout.replace("\n", "")


def test_with_labels_it_evaluates_the_first_and_chooses(folder: Path) -> None:
    result = apply(folder, "--bootstrap", "0", "--labels", str(folder / "labels.npy"), "--budget", "2", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["labelled"]["accuracy"]) == found["order"][:2]
    assert found["labelled"]["best"] == "dino"
    shown = apply(folder, "--bootstrap", "0", "--labels", str(folder / "labels.npy"))
    assert "chosen: dino" in shown.stdout


def test_labels_may_be_of_some_rows(folder: Path) -> None:
    rows = np.arange(0, 140, 2)
    np.save(folder / "rows.npy", rows)
    np.save(folder / "some.npy", (np.arange(140) % 3)[rows])
    how = ("--bootstrap", "0", "--labels", str(folder / "some.npy"), "--budget", "1", "--json")
    found = json.loads(apply(folder, *how, "--labelled", str(folder / "rows.npy")).stdout)
    assert found["labelled"]["accuracy"]["dino"] > 0.9
    np.save(folder / "rows.npy", rows[:-1])
    wrong = apply(folder, *how, "--labelled", str(folder / "rows.npy"))
    assert isinstance(wrong.exception, InputError)
    assert "70 labels for 69 rows of 140 items" in str(wrong.exception)


def test_a_reference_that_is_no_candidate_and_several_references(folder: Path) -> None:
    outside = apply(folder, "--bootstrap", "0", "--json", features=("dino.npy", "vit.safetensors"))
    assert json.loads(outside.stdout)["references"] == ["clip"]
    several = apply(folder, "--bootstrap", "0", "--json", "--reference", str(folder / "vit.safetensors"))
    assert json.loads(several.stdout)["references"] == ["clip", "vit"]
    assert set(json.loads(several.stdout)["order"]) == {"dino", "pool/small", "pool/large"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: np.save(f / "dino.npy", np.eye(139, 3)), "clip has 140 items and dino has 139"),
        (lambda f: np.save(f / "dino.npy", np.full((140, 3), "a")), "dino holds <U1: give real numbers"),
        (lambda f: (f / "dino.npy").write_bytes(b"no"), "cannot be read as .npy"),
        (lambda f: (f / "dino.npy").unlink(), "no such file"),
        (lambda f: (f / "families.csv").write_text("a,b\n1,2\n"), "must name the columns encoder and family"),
    ],
)
def test_files_that_cannot_be_used_are_named(folder: Path, change: Any, message: str) -> None:
    change(folder)
    result = apply(folder, "--families", str(folder / "families.csv"))
    assert isinstance(result.exception, InputError), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_options_that_do_not_exist_are_named(folder: Path) -> None:
    assert apply(folder, "--score", "ssr", "--bootstrap", "0").exit_code == 0
    assert isinstance(apply(folder, "--score", "scr").exception, UnknownNameError)
    assert isinstance(apply(folder, "--out", str(folder / "none" / "x.json")).exception, InputError)


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_ranked(folder: Path) -> None:
    for out in (folder, folder / "none" / "x.json", folder / "labels.npy"):
        result = apply(folder, "--out", str(out), "--labels", str(folder / "labels.npy"), features=("none.npy",))
        assert isinstance(result.exception, InputError)
        assert str(result.exception).startswith(f"--out {out}: ")


def test_labelled_rows_want_labels_and_occur_once(folder: Path) -> None:
    np.save(folder / "rows.npy", np.arange(140) // 2)
    rows = ("--bootstrap", "0", "--labelled", str(folder / "rows.npy"))
    alone = apply(folder, *rows)
    assert isinstance(alone.exception, InputError)
    assert "give the --labels of these rows too" in str(alone.exception)
    twice = apply(folder, *rows, "--labels", str(folder / "labels.npy"))
    assert isinstance(twice.exception, InputError)
    assert "a row occurs twice" in str(twice.exception)


def test_files_are_read_by_their_suffix(folder: Path) -> None:
    found = read_features([folder / "clip.npy", folder / "pool.npz", folder / "vit.safetensors"])
    assert set(found) == {"clip", "pool/small", "pool/large", "vit"}
    assert isinstance(found["clip"], np.memmap)
    assert read_vector(folder / "labels.npy").shape == (140,)
    assert read_families(folder / "families.csv")["vit"] == "vit"
    with pytest.raises(InputError, match="called clip too"):
        read_features([folder / "clip.npy", folder / "clip.npy"])
    with pytest.raises(InputError, match="features are read from"):
        read_features([folder / "families.csv"])
    with pytest.raises(InputError, match="2 arrays: labels are one"):
        read_vector(folder / "pool.npz")


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be read"):
        read_features([tmp_path / "evil.npy"])


def test_importing_the_command_and_the_package_loads_no_numpy_or_torch() -> None:
    code = (
        "import sys, fairtrial.evaluation.encoder_ranking.command;"
        "assert not {'torch', 'numpy', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_export_exists() -> None:
    from fairtrial.evaluation import encoder_ranking

    assert all(getattr(encoder_ranking, name) is not None for name in encoder_ranking.__all__)
