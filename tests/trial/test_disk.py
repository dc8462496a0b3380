"""Folders that cannot be written: a full disk, a read-only disk, no permission. Mounts small file systems of memory."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.trial import result as results
from fairtrial.trial.declare import Items, stage
from fairtrial.trial.runner import run_declared
from fairtrial.trial.store import Store


@pytest.fixture
def mount(tmp_path):
    """Return a function that mounts a tmpfs and returns its folder; skip where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mounted(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting is not allowed here")
        return folder

    try:
        yield mounted
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True)


def fill(folder, leave=0):
    """Fill the disk but for ``leave`` bytes and return the file that does."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as stream:
        size = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - leave
        stream.write(bytes(max(size, 0)))
    return ballast


def measure_items(candidate, cell, params, stages):
    values = [float(cell["seed"])] * 4000
    return {"score": Items(list(range(4000)), values)}


def test_a_disk_that_fills_up_ends_the_run_in_one_line_and_loses_nothing(mount, make_trial, inline):
    folder = mount("size=900k")
    trial = make_trial(lambda *arguments: measure_items(*arguments))
    ballast = fill(folder, leave=400_000)

    def go():
        return run_declared(
            trial, trial.params(seeds=6), "little", out=folder / "out", engine=inline, jobs=1, threads=1
        )

    with pytest.raises(InputError, match="is full: free some space; finished cells are kept: run the same") as error:
        go()
    assert "\n" not in str(error.value)
    store = Store(folder / "out", "little")
    (kept,) = store.db.execute("SELECT count(*) FROM cells WHERE status='done'").fetchone()
    assert store.db.execute("SELECT count(*) FROM cells").fetchone() == (kept,), "a full disk is no lost cell"
    store.close()
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(folder)], check=True)
    result = go()
    assert result.document["parts"][0]["done"] == 12
    assert result.document["lost"] == []


def test_a_disk_that_fills_up_at_the_end_says_so_too(mount, make_trial, inline, monkeypatch):
    folder = mount("size=2m")
    trial = make_trial()
    write = results._write_parquet

    def write_on_a_full_disk(frame, file):
        fill(folder)
        write(frame, file)

    monkeypatch.setattr(results, "_write_parquet", write_on_a_full_disk)
    with pytest.raises(InputError, match="is full: free some space"):
        run_declared(trial, trial.params(), "little", out=folder / "out", engine=inline, jobs=1, threads=1)
    assert not list((folder / "out").glob("*.part"))
    (folder / "ballast").unlink()
    monkeypatch.undo()
    monkeypatch.setattr("fairtrial.trial.engine.Pool", None)  # nothing is left to run
    document = run_declared(trial, trial.params(), "little", out=folder / "out", jobs=1, threads=1).document
    assert json.loads((folder / "out" / "result.json").read_text()) == document


def test_a_stage_on_a_full_disk_ends_the_run(mount, make_trial, inline):
    folder = mount("size=2m")

    @stage(save="npz")
    def big(seed):
        return {"x": np.random.default_rng(seed).normal(size=200_000)}

    trial = make_trial(lambda c, cell, params, stages: {"score": float(stages(big, cell["seed"])["x"][0])})
    with pytest.raises(InputError, match="the disk is full"):
        run_declared(trial, trial.params(), "little", out=folder / "out", engine=inline, jobs=1, threads=1)
    assert not list((folder / "out" / "stages").glob("*.part"))


def test_a_read_only_disk_is_refused_in_one_line(mount):
    folder = mount("size=1m,ro")
    for out in (folder, folder / "deeper" / "out"):
        with pytest.raises(InputError, match="choose another") as error:
            Store(out, "little")
        assert str(out) in str(error.value)


def test_no_permission_is_refused_in_one_line(request):
    """Root may write anywhere, so a child gives up its rights first."""
    if not hasattr(os, "setuid"):
        pytest.skip("there are no users here")
    folder = Path(tempfile.mkdtemp())  # not below pytest's folders, which are closed to others
    request.addfinalizer(lambda: shutil.rmtree(folder))
    folder.chmod(0o755)
    text = f"""
import os
from pathlib import Path
from fairtrial.errors import InputError
from fairtrial.trial import result as results
from fairtrial.trial.store import Store
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
else:
    os.chmod({str(folder)!r}, 0o555)
for out in (Path({str(folder)!r}), Path({str(folder)!r}) / "out"):
    try:
        Store(out, "little")
    except InputError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd="/")
    first, second = done.stdout.splitlines()
    assert first == f"no permission to write in {folder}: choose another output folder with --out"
    assert second == f"cannot make the output folder {folder / 'out'}: Permission denied; choose another --out"
