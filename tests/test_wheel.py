"""The built wheel alone, in a clean environment with the core dependencies only."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command, **options):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not a source checkout")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build writes into its tree, which others may be using
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", ".mypy_cache"))
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder, source)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("fairtrial-*.whl")
    return built


def install(folder, what):
    """Return the folder of the commands of a clean environment that holds only ``what``."""
    venv.create(folder, with_pip=True)
    commands = folder / ("Scripts" if sys.platform == "win32" else "bin")
    done = run(commands / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", what)
    assert done.returncode == 0, done.stderr
    return commands


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    return install(tmp_path_factory.mktemp("clean"), wheel)


def test_the_wheel_holds_the_cards_the_samples_and_the_page_template(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    cards = [str(card.relative_to(ROOT / "src")) for card in (ROOT / "src").rglob("card.toml")]
    assert set(cards) <= set(names)
    assert {"fairtrial/data/samples.toml", "fairtrial/report/page.html.j2"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests/")]


def test_list_and_doctor_work(bin_folder, tmp_path):
    listed = run(bin_folder / "fairtrial", "list", "--json", cwd=tmp_path)
    assert len(json.loads(listed.stdout)) >= 57
    examined = run(bin_folder / "fairtrial", "doctor", cwd=tmp_path)
    assert "run  pip install 'fairtrial[lm]'" in examined.stdout
    assert (listed.stderr, examined.stderr) == ("", "")


def test_compare_works_from_end_to_end(bin_folder, tmp_path):
    file = tmp_path / "script.py"
    file.write_text(
        "import fairtrial\n"
        "result = fairtrial.compare(\n"
        "    {'mine': lambda cell: 1 + cell % 3 / 9, 'base': lambda cell: cell % 2 / 9}, cells=range(8),\n"
        "    baseline='base', metric=fairtrial.Metric('score'), out='out', jobs=2,\n"
        ")\n"
        "print(result.verdicts[0].state, len(result.to_frame()), result.report('out/report.html'))\n"
    )
    done = run(bin_folder / "python", "-W", "error", file, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("HOLDS 16 out/report.html\n", "")
    assert {"result.json", "cells.parquet", "cells.sqlite", "report.html"} <= {
        f.name for f in (tmp_path / "out").iterdir()
    }


def test_a_trial_whose_extra_is_missing_names_it_and_exits_2(bin_folder, tmp_path):
    done = run(bin_folder / "fairtrial", "run", "pruning", "--preset", "smoke", "--quiet", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'fairtrial[lm]'" in done.stderr
    (tmp_path / "text.txt").write_text("words")
    options = ("--calibration", "text.txt", "--out", "out")
    applied = run(bin_folder / "fairtrial", "apply", "fiedler-prune", "model", *options, cwd=tmp_path)
    assert applied.returncode == 2
    assert "pip install 'fairtrial[lm]'" in applied.stderr


def test_the_engines_own_trial_needs_no_extra(bin_folder, tmp_path):
    done = run(bin_folder / "fairtrial", "run", "verdicts", "--preset", "smoke", "--json", "--jobs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["trial"] == "verdicts"


def test_with_its_extra_the_smoke_trial_of_pruning_runs(wheel, tmp_path):
    commands = install(tmp_path / "with_lm", f"{wheel}[lm]")
    done = run(commands / "fairtrial", "run", "pruning", "--preset", "smoke", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not json.loads(done.stdout)["lost"]
    assert (tmp_path / "runs" / "pruning" / "report.html").stat().st_size < 500_000
