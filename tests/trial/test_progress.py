import re

import pytest
from rich.progress import Progress as Bar

from fairtrial.trial.progress import TimeLeft, time_left


def test_the_time_left_counts_what_the_cells_already_known_did_not_cost():
    now = [0.0]
    bar = Bar(get_time=lambda: now[0])
    bar.add_task("", total=40, completed=20, known=20)
    (task,) = bar.tasks
    assert time_left(task) == ""
    assert "-" in TimeLeft().render(task).plain
    now[0] = 90.0  # a shared stage, then a burst
    bar.advance(task.id)
    now[0] = 91.0
    bar.advance(task.id, 9)
    assert time_left(task) == "0:01:31"
    bar.advance(task.id, 10)
    assert time_left(task) == "0:00:00"


@pytest.mark.parametrize("known", [0, 3])
def test_lines_tell_the_time_left_where_there_is_no_terminal(known, capsys):
    from types import SimpleNamespace

    from fairtrial.trial.progress import Progress

    progress = Progress()
    progress.planned(10, known)
    for _ in range(known, 10):
        progress.finished(SimpleNamespace(status="done", part="main", candidate="a"))
    told = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"{known + 1} of 10 cells, about 0:00:00 left", told[0])
    assert told[-1] == "10 of 10 cells"
