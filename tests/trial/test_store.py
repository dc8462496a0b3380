import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fairtrial.errors import InputError
from fairtrial.trial.declare import Curve, Items
from fairtrial.trial.store import STALE_SECONDS, Row, StageCost, Store

numbers = st.floats(allow_nan=False)
vectors = hnp.arrays(float, st.integers(1, 5), elements=numbers)
values = st.one_of(
    st.none(),
    numbers,
    vectors.map(lambda v: Items(np.array([f"é{i}" for i in range(len(v))]), v, np.arange(3))),
    vectors.map(lambda v: Items(np.arange(len(v)), v)),
    vectors.map(lambda v: Curve(v, v[::-1])),
)


def row(key="k", **changes):
    plain = {
        "part": "p",
        "candidate": "a",
        "factors": {"seed": 0},
        "params": {"x": 1},
        "inputs": {},
        "code": {"m.py": "1"},
    }
    return Row(**{"key": key, **plain, **changes})


def done(key="k", **changes):
    return row(key, status="done", metrics={"score": 1.0}, **changes)


@pytest.fixture
def store(tmp_path):
    opened = Store(tmp_path / "out", "pruning")
    yield opened
    opened.close()


@given(metrics=st.dictionaries(st.text(max_size=4), values, max_size=3))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_cell_comes_back_as_it_was_saved(store, metrics):
    saved = row(status="done", metrics=metrics, stages=["s"], seconds=1.5, peak=7, peak_sampled=True, reason=None)
    store.save(saved)
    loaded = store.load(["k"])["k"]
    assert loaded.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        if isinstance(value, tuple):
            assert type(loaded.metrics[name]) is type(value)
            for one, two in zip(loaded.metrics[name], value, strict=True):
                np.testing.assert_array_equal(one, two)
        else:
            assert loaded.metrics[name] == value
    assert (loaded.stages, loaded.seconds, loaded.peak, loaded.peak_sampled) == (["s"], 1.5, 7, True)


def test_the_file_holds_no_pickle(store):
    store.save(row(status="done", metrics={"m": Items(np.array(["a"]), np.array([1.0]))}))
    blob = store.db.execute("SELECT arrays FROM cells").fetchone()[0]
    assert blob[:2] == b"PK", "an npz archive"


def test_a_transaction_that_breaks_leaves_nothing(store):
    store.claim(["k"])
    with contextlib.suppress(RuntimeError), store._transaction():
        store.db.execute("DELETE FROM leases")
        raise RuntimeError
    assert store.db.execute("SELECT count(*) FROM leases").fetchone() == (1,)


def test_saving_a_cell_returns_its_lease(store):
    assert store.claim(["k", "l"]) == ["k", "l"]
    store.save(done())
    assert store.db.execute("SELECT key FROM leases").fetchall() == [("l",)]
    assert store.claim(["k", "l"]) == ["l"], "what is finished is never claimed again"


def lease(store, *, host=None, pid, started, beat):
    store.db.execute("INSERT INTO leases VALUES ('k', ?, ?, ?, ?)", (host or socket.gethostname(), pid, started, beat))


def test_a_lease_of_a_living_process_holds_and_of_a_dead_one_is_taken_over_at_once(store):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lease(store, pid=child.pid, started=psutil.Process(child.pid).create_time(), beat=time.time())
    assert store.claim(["k"]) == []
    child.communicate(b"\n")
    assert store.claim(["k"]) == ["k"]


def test_a_lease_of_a_reused_pid_is_taken_over(store):
    lease(store, pid=os.getppid(), started=1.0, beat=time.time())
    assert store.claim(["k"]) == ["k"]


def test_a_lease_of_another_host_is_taken_over_when_its_heart_stops(store):
    lease(store, host="elsewhere", pid=1, started=1.0, beat=time.time())
    assert store.claim(["k"]) == []
    store.db.execute("UPDATE leases SET heartbeat=heartbeat-?", (STALE_SECONDS + 1,))
    assert store.claim(["k"]) == ["k"]


def test_two_stores_on_one_folder_share_the_cells(store, tmp_path):
    other = Store(tmp_path / "out", "pruning")
    other.pid = os.getppid()  # as if it were another living process
    other.started = psutil.Process(other.pid).create_time()
    assert store.claim(["a", "b"]) == ["a", "b"]
    assert other.claim(["b", "c"]) == ["c"]
    store.release()
    assert other.claim(["a"]) == ["a"]
    other.close()


def test_the_heart_beats(store):
    store.claim(["k"])
    store.db.execute("UPDATE leases SET heartbeat=0")
    store.beat()
    assert store.db.execute("SELECT heartbeat FROM leases").fetchone()[0] > time.time() - 10


def test_a_miss_names_what_changed_since_the_last_row_of_the_cell(store):
    assert store.changes(row("new")) == []
    store.save(done(code={"fiedler.py": "1", "numpy": "2.0"}, inputs={"text": "a"}))
    changed = row("new", code={"fiedler.py": "2", "numpy": "2.1"}, inputs={"text": "b"}, params={"x": 2})
    assert store.changes(changed) == ["x changed", "the content of text changed", "fiedler.py changed", "numpy changed"]


def test_lost_cells_are_forgotten_on_demand_and_done_ones_never(store):
    store.save(done())
    store.save(row("l", status="failed", reason="why"))
    store.forget_lost(["k", "l"])
    assert store.states(["k", "l"]) == {"k": "done"}


def test_stage_costs_include_those_that_stages_asked_for_once(store):
    store.save_stages([StageCost("top", "prune", "a", 2.0, ["base"]), StageCost("base", "load", None, 5.0, [])])
    costs = store.stage_costs(["top", "top"])
    assert sorted((cost.name, cost.seconds) for cost in costs) == [("load", 5.0), ("prune", 2.0)]


def test_marks_stay(store, tmp_path):
    assert not store.marked("peeked")
    store.mark("peeked")
    store.close()
    again = Store(tmp_path / "out", "pruning")
    assert again.marked("peeked")
    again.close()


def test_more_keys_than_sqlite_takes_variables(store):
    keys = [f"k{i}" for i in range(40_000)]
    assert store.claim(keys) == keys
    assert store.states(keys) == {}


# what cannot be a store ---------------------------------------------------------------------------------------------


def test_a_folder_of_another_trial_is_refused(store, tmp_path):
    with pytest.raises(InputError, match=r"holds the trial 'pruning': choose another --out for 'drafting'"):
        Store(tmp_path / "out", "drafting")


def test_a_folder_of_a_newer_version_is_refused_and_left_as_it_is(store, tmp_path):
    store.save(done())
    store.db.execute("UPDATE meta SET value='99' WHERE name='schema'")
    with pytest.raises(InputError, match="written by a newer Fairtrial: upgrade"):
        Store(tmp_path / "out", "pruning")
    assert store.states(["k"]) == {"k": "done"}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    for folder in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(InputError, match="out"):
            Store(folder, "pruning")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "cells.sqlite").write_text("not SQLite, but long enough to be looked at " * 50)
    with pytest.raises(InputError, match="not a Fairtrial store, or is damaged"):
        Store(tmp_path, "pruning")


def test_a_locked_database_says_that_finished_cells_are_kept(store, tmp_path):
    store.db.execute("PRAGMA busy_timeout=10")
    other = sqlite3.connect(tmp_path / "out" / "cells.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(InputError, match="finished cells are kept: run the same command again"):
        store.save(done())
    other.execute("ROLLBACK")
    other.close()
    store.save(done())
    assert json.loads(store.db.execute("SELECT metrics FROM cells").fetchone()[0]) == {"score": 1.0}
