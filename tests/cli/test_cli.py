"""The command line: what it prints, what it writes, and what its exit codes mean."""

import importlib.metadata
import json
import subprocess
import sys

import pytest

import fairtrial
from fairtrial import cards
from fairtrial.cli import BAD_INPUT, CELLS_LOST, DONE, run_app
from fairtrial.testing import WorkerHere
from fairtrial.trial import pool

# Typer imports names that the newest click deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")

CARD = """
name = "little"
method = "LittleTest"
area = "engine"
line = "A trial of two numbers."
state = "working"
trial = "fairtrial.little.trial:trial"
use_when = "Testing."
not_when = "Otherwise."
extras = ["lm"]

[commands]
little-apply = "fairtrial.little.command:little_apply"
"""
COMMAND = """
from __future__ import annotations
from pathlib import Path
from typing import Annotated
import typer

def little_apply(model: Annotated[Path, typer.Argument(help="A model.")], rate: float = 0.5) -> None:
    \"\"\"Apply it.\"\"\"
    if rate > 1:
        import a_module_that_nobody_has
    print(f"{model.name} at {rate}")
"""
TRIAL = """
from pydantic import BaseModel, Field
from fairtrial.errors import MissingSampleError
from fairtrial.trial.declare import Candidate, Claim, Factor, Metric, Part, Trial, difference, for_each

class Params(BaseModel):
    seeds: int = Field(6, ge=1, le=50, description="draws", json_schema_extra={"scope": "plan"})
    shift: float = Field(1.0, ge=0, le=2, description="how far apart")
    text: str = ""
    fail: bool = False

def measure(candidate, cell, params, stages):
    if params.fail and cell["seed"] == 0:
        raise RuntimeError("seed zero")
    mine = candidate.label == "mine"
    return {"score": params.shift * mine + cell["seed"] % 3 * (0.1 if mine else 0.2)}

def parts(params):
    claim = Claim("C1", "mine beats base", difference("mine", "base", "score"), above=0)
    return (
        Part(
            "main", (Candidate("mine", "method"), Candidate("base", "control")), (Metric("score"),),
            (Factor("seed", range(params.seeds), kind="replicate"), Factor("rate", (0.1, 0.2))), "independent",
            (claim, for_each("rate", Claim("C2", "at each rate", claim.quantity, above=0))), measure,
        ),
    )

def check(params):
    if params.text == "big":
        raise MissingSampleError("big-text", "little")

trial = Trial("little", Params, parts, presets={"smoke": {"seeds": 3}, "full": {"seeds": 8}}, check=check)
"""


@pytest.fixture
def little(tmp_path, monkeypatch):
    """A working system of the catalogue, in a temporary package, and an engine without processes."""
    package = tmp_path / "src" / "fairtrial"
    folder = package / "little"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "card.toml").write_text(CARD)
    (folder / "trial.py").write_text(TRIAL)
    (folder / "command.py").write_text(COMMAND)
    monkeypatch.setattr(fairtrial, "__path__", [*fairtrial.__path__, str(package)])
    catalogue = {**cards.cards(), "little": cards.read_card(folder / "card.toml")}
    monkeypatch.setattr(cards, "cards", lambda: catalogue)
    monkeypatch.setitem(pool.ENGINES, "inline", WorkerHere)
    monkeypatch.chdir(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("fairtrial.little")]:
        del sys.modules[name]


@pytest.fixture
def call(capsys):
    """Return a function that runs the command line and returns (exit code, standard output, standard error)."""

    def run(*arguments):
        code = run_app([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def refused(call, *arguments):
    """Return the one line with which bad input is refused."""
    code, out, err = call(*arguments)
    assert code == BAD_INPUT, (out, err)
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("fairtrial: ")
    assert err.count("\n") == 1
    return err.removeprefix("fairtrial: ").strip()


RUN = ("run", "little", "--engine", "inline", "--jobs", "1", "--threads", "1")


def test_run_prints_verdicts_and_writes_result_cells_and_report(little, call, tmp_path):
    code, out, _ = call(*RUN, "--quiet")
    assert code == DONE
    assert "HOLDS" in out
    assert "C2[rate=0.1]" in out
    assert "report: runs/little/report.html" in out
    assert {"cells.parquet", "cells.sqlite", "report.html", "result.json"} <= {
        f.name for f in (tmp_path / "runs" / "little").iterdir()
    }


def test_run_json_prints_the_document_and_nothing_else(little, call, tmp_path):
    code, out, err = call(*RUN, "--json", "--out", tmp_path / "out")
    assert code == DONE
    assert err == ""
    assert json.loads(out) == json.loads((tmp_path / "out" / "result.json").read_text())
    assert json.loads(out)["command"] == "fairtrial run little"


def test_progress_goes_to_standard_error_a_line_a_tenth_without_a_terminal(little, call):
    _, out, err = call(*RUN)
    assert "little: 24 cells in main (2 candidates)" in err
    assert "24 of 24 cells" in err
    assert "of 24 cells" not in out
    assert len(err.splitlines()) <= 12
    assert ", 24 of them already done" in call(*RUN)[2]


@pytest.mark.parametrize(
    ("flags", "seeds"), [((), 6), (("--preset", "smoke"), 3), (("--full",), 8), (("--full", "--set", "seeds=4"), 4)]
)
def test_presets_and_settings_choose_the_cells(little, call, flags, seeds):
    document = json.loads(call(*RUN, "--json", *flags)[1])
    assert document["parts"][0]["planned"] == 2 * 2 * seeds


def test_lost_cells_are_exit_code_3_until_they_are_measured(little, call):
    code, out, _ = call(*RUN, "--quiet", "--set", "fail=true")
    assert code == CELLS_LOST
    assert "4 cells were lost: --retry measures again" in out
    code, out, _ = call(*RUN, "--json", "--set", "fail=true")
    assert code == CELLS_LOST
    assert json.loads(out)["lost"][0]["reason"].startswith("RuntimeError: seed zero")


def test_a_parameter_file_and_level_and_until(little, call, tmp_path):
    (tmp_path / "p.yaml").write_text("seeds: 20\nshift: 0.5\n")
    document = json.loads(call(*RUN, "--params", "p.yaml", "--until-decided", "--level", "0.9", "--json")[1])
    assert document["parameters"]["shift"] == 0.5
    assert document["level"] == 0.9
    assert document["parts"][0]["planned"] < 80
    assert document["peeked"]


# bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--set", "sheeds=3"),
            "there is no parameter of little 'sheeds'; did you mean 'seeds'? Known: fail, seeds, shift, text",
        ),
        (("--set", "shift=9"), "shift=9: input should be less than or equal to 2 (how far apart)"),
        (("--set", "seeds=many"), "seeds='many': input should be a valid integer"),
        (("--set", "seeds"), "--set 'seeds': write it as name=value"),
        (("--params", "nowhere.yaml"), "cannot read nowhere.yaml: No such file"),
        (("--preset", "fast"), "there is no preset 'fast'. Known: full, smoke"),
        (("--full", "--preset", "smoke"), "--full and --preset smoke contradict each other"),
        (("--until-flat", "--until-decided"), "contradict each other"),
        (("--engine", "slurm"), "there is no engine 'slurm'. Known: inline, local, ray"),
        (("--set", "text=big"), "the sample 'big-text' is not here: run  fairtrial samples get little"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_written(little, call, tmp_path, arguments, message):
    assert message in refused(call, *RUN, *arguments)
    assert not (tmp_path / "runs").exists()


def test_an_unknown_trial_suggests_the_nearest(call):
    assert "there is no trial 'prunning'; did you mean 'pruning'?" in refused(call, "run", "prunning")


def test_a_planned_trial_says_so(call):
    planned = next(card for card in cards.cards().values() if card.state == "planned")
    assert f"{planned.shown} is planned, not built yet" in refused(call, "run", planned.shown)
    assert f"{planned.shown} is planned, not built yet" in refused(call, "apply", planned.shown)


def test_a_folder_of_another_trial_is_refused(little, call, tmp_path):
    from fairtrial.trial.store import Store

    Store(tmp_path / "taken", "drafting").close()
    assert "holds the trial 'drafting'" in refused(call, *RUN, "--out", "taken")


def test_a_folder_of_a_newer_version_is_refused(little, call, tmp_path):
    from fairtrial.trial.store import Store

    store = Store(tmp_path / "newer", "little")
    store.db.execute("UPDATE meta SET value='9'")
    store.close()
    assert "newer Fairtrial: upgrade" in refused(call, *RUN, "--out", "newer")


def test_a_missing_extra_names_the_line_that_installs_it(little, call):
    (little / "trial.py").write_text("import a_module_that_nobody_has\n")
    assert refused(call, *RUN) == "a_module_that_nobody_has is not installed: run  pip install 'fairtrial[lm]'"


def test_a_missing_extra_that_only_the_work_meets_ends_the_run_with_the_same_line(little, call, tmp_path):
    text = (little / "trial.py").read_text()
    (little / "trial.py").write_text(
        text.replace("    if params.fail", "    import a_module_that_nobody_has\n    if params.fail")
    )
    assert (
        refused(call, *RUN, "--quiet") == "a_module_that_nobody_has is not installed: run  pip install 'fairtrial[lm]'"
    )


def test_debug_shows_the_traceback(little):
    from fairtrial.errors import InputError

    with pytest.raises(InputError):
        run_app([*RUN, "--set", "shift=9", "--debug"])


@pytest.mark.parametrize(
    "arguments", [("run",), ("run", "pruning", "--bogus"), ("nonsense",), ("run", "x", "--jobs", "0")]
)
def test_wrong_usage_is_exit_code_2_too(call, arguments):
    code, _, err = call(*arguments)
    assert code == BAD_INPUT
    assert "Usage" in err


# the other commands -------------------------------------------------------------------------------------------------


def test_list_shows_every_card_and_its_state(call):
    _, out, _ = call("list")
    for card in cards.cards().values():
        assert card.method in out
    entries = json.loads(call("list", "--json")[1])
    assert len(entries) == len(cards.cards())
    assert {entry["state"] for entry in json.loads(call("list", "--working", "--json")[1])} <= {"working"}
    assert {entry["area"] for entry in json.loads(call("list", "rl", "--json")[1])} == {"rl"}
    assert "there is no area 'rll'; did you mean 'rl'?" in refused(call, "list", "rll")


def test_show_knows_every_name_of_a_system(call):
    for name in ("pruning", "FiedlerPrune", "fiedler prune"):
        assert "Fiedler" in call("show", name)[1]
        assert json.loads(call("show", name, "--json")[1])["name"] == "pruning"
    assert "there is no trial" in refused(call, "show", "nothing-like-it")


def test_doctor_says_what_is_missing_and_how_to_install_it(call, monkeypatch):
    found = json.loads(call("doctor", "--json")[1])
    assert found["fairtrial"] == importlib.metadata.version("fairtrial")
    assert {"lm", "rl", "ray"} <= found["extras"].keys()
    from fairtrial.cli import doctor

    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "ray" else "1.0")
    out = call("doctor")[1]
    assert "missing ray; run  pip install 'fairtrial[ray]'" in out


def test_samples_list_says_what_is_here(call):
    entries = json.loads(call("samples", "list", "--json")[1])
    assert {"name", "here", "megabytes", "licence", "what"} == entries[0].keys()
    assert entries[0]["name"] in call("samples", "list")[1]


def test_report_needs_a_folder_with_results(call, tmp_path):
    assert "cannot be read: give a folder" in refused(call, "report", tmp_path)


def test_report_writes_one_page_of_many_runs(little, call, tmp_path):
    for name in ("one", "two"):
        call(*RUN, "--quiet", "--out", name)
    page = json.loads(call("report", "one", "two", "--out", "page.html", "--json")[1])["report"]
    assert (tmp_path / page).read_text().count("LittleTest") > 1


def test_version(call):
    assert call("--version")[:2] == (DONE, f"fairtrial {fairtrial.__version__}\n")


def test_apply_lists_the_commands_of_the_cards(call):
    commands = [name for card in cards.cards().values() for name in card.commands]
    out = call("apply", "--help")[1]
    for name in commands:
        assert name in out


@pytest.mark.parametrize("name", ["little-apply", "little", "LittleTest"])
def test_apply_runs_the_command_of_a_card_by_any_of_its_names(little, call, name):
    assert call("apply", name, "model")[:2] == (DONE, "model at 0.5\n")
    assert "Apply it." in call("apply", name, "--help")[1]
    missing = "a_module_that_nobody_has is not installed: run  pip install 'fairtrial[lm]'"
    assert refused(call, "apply", name, "model", "--rate", "2") == missing


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (("mine", "base=f.py:base"), "write a candidate as LABEL=FILE.py:FUNCTION"),
        (("mine=g.py:mine", "base=f.py:base"), "g.py is not a Python file"),
        (("mine=f.py:nope", "base=f.py:base"), "f.py has no function 'nope'"),
        (("mine=f.py:K", "base=f.py:base"), "f.py has no function 'K'"),
        (
            ("mine=broken.py:mine", "base=f.py:base"),
            "broken.py cannot be imported: NameError: name 'nothing' is not defined",
        ),
        (("mine=f.py:mine", "bass=f.py:base"), "there is no candidate 'base'; did you mean 'bass'?"),
        (("base=f.py:base",), "compare needs two candidates at least"),
        (("mine=f.py:mine", "mine=f.py:base"), "label 'mine' is given twice"),
    ],
)
def test_compare_refuses_candidates_it_cannot_use(call, tmp_path, monkeypatch, candidates, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "f.py").write_text("K = 3\ndef mine(cell): return 1\ndef base(cell): return 0\n")
    (tmp_path / "broken.py").write_text("nothing\n")
    (tmp_path / "json.py").write_text("")
    sys.modules.pop("f", None)
    assert message in refused(call, "compare", *candidates, "--baseline", "base", "--metric", "score", "--cells", "2")


@pytest.mark.parametrize("command", ["list --json", "list", "show pruning"])
def test_a_closed_pipe_ends_quietly(command):
    text = f"set -o pipefail; {sys.executable} -m fairtrial.cli {command} | true"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode in (0, 141)


def test_warnings_are_lines_for_the_user_not_places_in_the_code():
    code = """
import sys, warnings
from fairtrial import cli
sys.argv = ["fairtrial", "list"]
cli.run_app = lambda arguments: warnings.warn("two seeds were averaged")
cli.main()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == "fairtrial: two seeds were averaged\n"


def test_a_warning_is_told_once(capsys):
    import warnings

    from fairtrial import cli

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = cli._show_warning
        for _ in range(2):
            warnings.warn("the splits are repeated", stacklevel=1)
    assert capsys.readouterr().err == "fairtrial: the splits are repeated\n"
