"""What is shown while a run goes."""

import functools
import io
import re

import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from fairtrial.trial import progress
from fairtrial.trial.runner import run_declared


@pytest.fixture
def shown(tmp_path, inline, make_trial, monkeypatch):
    """Return a function that runs a trial and returns what its progress wrote."""

    def run(measure=None, terminal=True, **params):
        stream = io.StringIO()
        console = functools.partial(Console, file=stream, force_terminal=terminal, width=120)
        monkeypatch.setattr(progress, "Console", lambda stderr: console())
        trial = make_trial(measure)
        out = tmp_path / "out"
        run_declared(trial, trial.params(**params), "little", out=out, engine=inline, jobs=1, threads=1, progress=True)
        return stream.getvalue()

    return run


def test_a_terminal_shows_a_bar_and_the_verdicts_so_far(shown):
    text = shown(seeds=8)
    assert "16/16" in text
    assert "so far" in text
    assert "C1" in text


def test_lost_cells_are_told_at_once_with_their_reason_as_it_is(shown):
    def measure(candidate, cell, params, stages):
        raise ValueError("in [brackets] like a style")

    for terminal, seeds in ((True, 1), (False, 2)):
        assert "ValueError: in [brackets] like a style" in shown(measure, terminal, seeds=seeds)


def test_elsewhere_a_line_a_tenth_says_how_far_it_is(shown):
    lines = shown(terminal=False, seeds=20).splitlines()
    assert lines[0] == "little: 40 cells in main (2 candidates)"
    assert re.fullmatch(r"\d+ of 40 cells, about 0:00:\d\d left", lines[1])
    assert lines[-1] == "40 of 40 cells"
    assert len(lines) <= 12
    assert shown(terminal=False, seeds=20).splitlines()[0].endswith("40 of them already done")


def test_a_changed_parameter_is_told(shown):
    shown(terminal=False)
    assert "10 cells run again: shift changed" in shown(terminal=False, shift=0.25)


def test_the_time_left_counts_what_the_cells_already_known_did_not_cost():
    now = [0.0]
    bar = Bar(get_time=lambda: now[0])
    bar.add_task("", total=40, completed=20, known=20)
    (task,) = bar.tasks
    assert progress.time_left(task) == ""
    assert "-" in progress.TimeLeft().render(task).plain
    now[0] = 90.0  # a shared stage, then a burst
    bar.advance(task.id)
    now[0] = 91.0
    bar.advance(task.id, 9)
    assert progress.time_left(task) == "0:01:31"
    bar.advance(task.id, 10)
    assert progress.time_left(task) == "0:00:00"
    bar.update(task.id, total=4612, completed=1, known=0)  # one of thousands, after a stage of minutes for all
    assert progress.time_left(task) == ""
    bar.advance(task.id, 99)
    assert progress.time_left(task) == "1:08:26"
