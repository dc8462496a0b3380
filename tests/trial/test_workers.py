"""Real worker processes: where they may be called from, how they die, and what survives it."""

import importlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import fairtrial
from fairtrial.trial.declare import Metric, Trial
from fairtrial.trial.engine import InterruptedRunError
from fairtrial.trial.runner import _share_cores, run_declared

SCORE = fairtrial.Metric("score")
PYTHON = [sys.executable, "-W", "error"]

# A comparison that notes every call of its functions, and may be slow.
SCRIPT = """
import os, sys, time
import fairtrial

def measure(name, shift, cell):
    time.sleep(SECONDS)
    with open(LOG, "a") as log:
        log.write(f"{name} {cell}\\n")
    return shift + (cell * 37 % 11) / 100

result = fairtrial.compare(
    {"mine": lambda cell: measure("mine", 1.0, cell), "base": lambda cell: measure("base", 0.0, cell + 100) },
    cells=range(CELLS), baseline="base", metric=fairtrial.Metric("score"), out=OUT, jobs=2,
)
print(result.verdicts[0].state, len(result.to_frame()))
"""


def script(tmp_path, seconds=0.0, cells=6, out="out", log="log"):
    names = {"SECONDS": seconds, "CELLS": cells, "OUT": str(tmp_path / out), "LOG": str(tmp_path / log)}
    return "\n".join(f"{name} = {value!r}" for name, value in names.items()) + SCRIPT


def lines(tmp_path, log="log"):
    file = tmp_path / log
    return file.read_text().splitlines() if file.exists() else []


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_plain_script_needs_no_guard_and_may_use_lambdas(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(script(tmp_path))
    done = subprocess.run([*PYTHON, str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("HOLDS 12\n", "")
    again = subprocess.run([*PYTHON, str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert again.stdout == "HOLDS 12\n"
    assert len(lines(tmp_path)) == 12, "the second run computed nothing"


def test_a_main_without_a_file_works_and_is_recognised_again(tmp_path):
    for _ in range(2):
        done = subprocess.run([*PYTHON, "-c", script(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
        assert (done.stdout, done.stderr) == ("HOLDS 12\n", "")
    assert len(lines(tmp_path)) == 12


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_notebook_works_and_is_recognised_again(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for _ in range(2):
        cells = [nbformat.v4.new_code_cell(text) for text in (script(tmp_path), "print(result.verdicts[0].state)")]
        book = nbformat.v4.new_notebook(cells=cells)
        nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
        assert book.cells[1].outputs[0].text == "HOLDS\n"
    assert len(lines(tmp_path)) == 12


def test_each_way_to_die_loses_its_cell_with_a_reason_and_the_others_go_on(tmp_path):
    def dies(way):
        if way == "raises":
            raise KeyError("no such thing")
        if way == "hangs":
            time.sleep(60)
        if way == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exits":
            sys.exit(3)
        if way == "prints":
            print("on standard output, which the protocol uses")
        if way == "reads" and sys.stdin.read():
            return 9.0
        return 1.0

    ways = ["fine", "raises", "hangs", "is killed", "exits", "prints", "reads", "fine after all"]
    result = fairtrial.compare(
        {"dies": dies, "base": lambda way: 0.0}, cells=ways, baseline="base", metric=SCORE, out=tmp_path, jobs=1,
        time_limit=2.0,
    )  # fmt: skip
    lost = {entry["factors"]["cell"]: entry["reason"] for entry in result.document["lost"]}
    assert lost.keys() == {"raises", "hangs", "is killed", "exits"}
    assert lost["raises"].startswith("KeyError: 'no such thing'")
    assert lost["hangs"] == "took longer than the time limit of 2 s"
    assert lost["is killed"] == "its worker was killed (signal 9), most often for lack of memory (twice)"
    assert lost["exits"] == "its worker exited with status 3 (twice)"
    frame = result.to_frame()
    assert (frame[frame.status == "done"].groupby("candidate").size() == [8, 4]).all()
    assert list(frame.query("candidate == 'dies' and status == 'done'").score) == [1.0] * 4


def test_a_worker_that_dies_once_costs_nothing(tmp_path):
    def dies_once(cell):
        mark = tmp_path / "died"
        if cell == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return float(cell)

    result = fairtrial.compare(
        {"a": dies_once, "b": lambda cell: 0.0},
        cells=range(4),
        baseline="b",
        metric=SCORE,
        out=tmp_path / "out",
        jobs=1,
    )
    assert result.document["lost"] == []


def test_killed_at_any_moment_the_same_command_runs_only_unfinished_cells(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(script(tmp_path, seconds=0.1, cells=10))
    first = subprocess.Popen([*PYTHON, str(file)], cwd=tmp_path)
    wait_for(lambda: len(lines(tmp_path)) >= 5)
    workers = psutil.Process(first.pid).children()
    assert len(workers) == 2
    first.send_signal(signal.SIGKILL)
    first.wait()
    psutil.wait_procs(workers, timeout=10)
    assert not any(worker.is_running() for worker in workers), "workers end with their parent"
    with sqlite3.connect(tmp_path / "out" / "cells.sqlite") as db:
        finished = db.execute("SELECT count(*) FROM cells").fetchone()[0]
    db.close()
    assert finished >= 3
    before = len(lines(tmp_path))
    done = subprocess.run([*PYTHON, str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "HOLDS 20\n"
    assert len(lines(tmp_path)) - before == 20 - finished


def test_two_processes_on_one_folder_compute_each_cell_once(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(script(tmp_path, seconds=0.05, cells=12))
    both = [subprocess.Popen([*PYTHON, str(file)], cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["HOLDS 24\n"] * 2
    assert len(lines(tmp_path)) == 24
    assert len(set(lines(tmp_path))) == 24
    with sqlite3.connect(tmp_path / "out" / "cells.sqlite") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("SELECT count(*) FROM leases").fetchone() == (0,)
    db.close()


COMPARED = """
import pathlib, time
HERE = pathlib.Path(__file__).parent

def mine(cell):
    time.sleep(0.2)
    with (HERE / "log").open("a") as log:
        log.write(f"{cell}\\n")
    return {"score": 1.0 + cell % 3 / 10}

def base(cell):
    return {"score": 0.5 + cell % 2 / 10}
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_a_resumable_folder_and_says_how_to_resume(tmp_path, number):
    (tmp_path / "f.py").write_text(COMPARED)
    command = [
        sys.executable, "-m", "fairtrial.cli", "compare", "mine=f.py:mine", "base=f.py:base", "--baseline", "base",
        "--metric", "score", "--cells", "8", "--out", "out", "--jobs", "1", "--quiet", "--json",
    ]  # fmt: skip
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(lines(tmp_path)) >= 2)
    first.send_signal(number)
    output, error = first.communicate(timeout=30)
    assert first.returncode == 130
    assert output == ""
    assert error.lstrip() == "fairtrial: stopped; the finished cells are in out: run the same command to go on\n"
    before = len(lines(tmp_path))
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 0
    assert json.loads(second.stdout)["parts"][0]["done"] == 16
    assert len(lines(tmp_path)) <= 8 + 1
    assert before >= 2


def test_ctrl_c_in_a_session_raises_and_the_session_goes_on(tmp_path):
    def interrupts(cell):
        if not (tmp_path / "once").exists():
            (tmp_path / "once").touch()
            os.kill(os.getppid(), signal.SIGINT)
        return float(cell)

    def go():
        return fairtrial.compare(
            {"a": interrupts, "b": lambda cell: 0.0},
            cells=range(4),
            baseline="b",
            metric=SCORE,
            out=tmp_path / "o",
            jobs=1,
        )

    with pytest.raises(InterruptedRunError, match="run the same command to go on"):
        go()
    assert go().document["lost"] == []


TRIAL = """
import os, time
from pathlib import Path
from pydantic import BaseModel
from fairtrial.trial.declare import Candidate, Factor, Metric, Part, Trial, stage

class Params(BaseModel):
    log: str

@stage(keep=True)
def model(log):
    with open(log, "a") as stream:
        stream.write(f"load {os.getpid()}\\n")
    return object()

def measure(candidate, cell, params, stages):
    stages(model, params.log)
    time.sleep(0.05)
    return {"pid": float(os.getpid()), "threads": float(os.environ["OMP_NUM_THREADS"])}

def parts(params):
    candidates = (Candidate("a", "method"), Candidate("b", "control"))
    factors = (Factor("seed", range(6), kind="replicate"),)
    return (Part("main", candidates, (Metric("pid"), Metric("threads")), factors, "independent", (), measure),)

trial = Trial("kept", Params, parts)
"""


def test_a_model_is_loaded_once_a_worker_and_workers_have_their_threads(tmp_path, monkeypatch):
    (tmp_path / "kept_trial.py").write_text(TRIAL)
    monkeypatch.syspath_prepend(tmp_path)
    params = importlib.import_module("kept_trial").Params(log=str(tmp_path / "log"))
    result = run_declared("kept_trial:trial", params, "kept", out=tmp_path / "out", jobs=2, threads=1)
    frame = result.to_frame()
    assert len(lines(tmp_path)) == frame.pid.nunique() == 2, "not once a cell"
    assert set(frame.threads) == {1.0}
    assert (frame.groupby("seed").pid.nunique() == 1).all(), "a group stays on one worker"


@pytest.mark.parametrize("jobs", [None, 1, 3])
@pytest.mark.parametrize("threads", [None, 1, 5])
@pytest.mark.parametrize("cores", [1, 2, 8])
def test_jobs_times_threads_do_not_exceed_the_cores_unless_asked(monkeypatch, cores, jobs, threads):
    monkeypatch.setattr("fairtrial.trial.runner.cores", lambda: cores)
    chosen = _share_cores(jobs, threads)
    assert chosen >= (1, 1)
    assert jobs in (None, chosen[0])
    assert threads in (None, chosen[1])
    if jobs is None or threads is None:
        assert chosen[0] * chosen[1] <= max(cores, jobs or threads or 1)


def test_a_worker_that_cannot_open_the_trial_ends_the_run_with_one_line(tmp_path, monkeypatch):
    (tmp_path / "moody_trial.py").write_text(TRIAL)
    monkeypatch.syspath_prepend(tmp_path)
    params = importlib.import_module("moody_trial").Params(log="log")
    Path(tmp_path / "moody_trial.py").write_text("raise RuntimeError('not today')")
    with pytest.raises(fairtrial.errors.InputError, match="a worker could not start: RuntimeError: not today"):
        run_declared("moody_trial:trial", params, "kept", out=tmp_path / "out", jobs=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_ray_runs_the_same_trial_and_a_killed_worker_loses_nothing(tmp_path, make_trial):
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:

        def dies_once(cell):
            mark = tmp_path / "died"
            if cell == 3 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if cell == 5:
                raise ValueError("five")
            if cell == 6:
                time.sleep(60)
            return float(cell)

        def go(engine, out):
            return fairtrial.compare(
                {"a": dies_once, "b": lambda cell: 0.0}, cells=range(8), baseline="b", metric=SCORE, out=tmp_path / out,
                jobs=2, threads=1, engine=engine, time_limit=5.0,
            )  # fmt: skip

        one, two = go("ray", "ray"), go("local", "local")
        timed = make_trial(metrics=(Metric("score", timed=True),))
        plain = make_trial()
        both = Trial(
            "both", plain.params, lambda p: (*plain.parts(p), replace(timed.parts(p)[0], name="timed", claims=()))
        )
        mixed = run_declared(both, both.params(), "both", out=tmp_path / "both", jobs=2, threads=1, engine="ray")
        assert [part["done"] for part in mixed.document["parts"]] == [10, 10], "a timed part gets all cores"
    finally:
        ray.shutdown()
    lost = [{entry["factors"]["cell"]: entry["reason"] for entry in result.document["lost"]} for result in (one, two)]
    assert lost[0] == lost[1]
    assert lost[0].keys() == {5, 6}
    assert lost[0][6] == "took longer than the time limit of 5 s"
    columns = ["candidate", "cell", "score", "status"]
    assert one.to_frame()[columns].equals(two.to_frame()[columns])
