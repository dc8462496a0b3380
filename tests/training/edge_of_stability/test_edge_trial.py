import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.testing import check_trial
from fairtrial.training.edge_of_stability.trial import EdgeParams, aligned, check, parts, trial


def test_the_trial_is_sound():
    check_trial(trial)


def test_the_grid_needs_a_run_without_decay_and_the_one_claimed():
    for decays in ((0.01, 0.03), (0.0, 0.01)):
        with pytest.raises(InputError, match="among them"):
            parts(EdgeParams(decays=decays))


def test_an_example_of_the_users_must_have_a_label(tmp_path):
    good = tmp_path / "good.npz"
    np.savez(good, x=np.zeros((8, 2)), y=np.arange(8) % 2)
    check(EdgeParams(data=str(good)))
    bad = tmp_path / "bad.npz"
    for arrays, word in (
        ({"x": np.zeros((8, 2))}, "arrays x and y"),
        ({"x": np.zeros((8, 2)), "y": np.zeros(7, int)}, "8 rows"),
        ({"x": np.full((8, 2), np.nan), "y": np.zeros(8, int)}, "row 0"),
    ):
        np.savez(bad, **arrays)
        with pytest.raises(InputError, match=word):
            check(EdgeParams(data=str(bad)))
    with pytest.raises(InputError, match="no such file"):
        check(EdgeParams(data=str(tmp_path / "none.npz")))


def test_a_network_of_the_users_is_imported_or_named():
    check(EdgeParams(data="tiny", networks=("torch.nn:Linear",)))
    for name, word in (("linear", "neither"), ("torch.nn:Missing", "cannot import")):
        with pytest.raises(InputError, match=word):
            check(EdgeParams(data="tiny", networks=(name,)))


def test_alignment_names_the_run_that_lacks_it():
    import pandas as pd

    frame = pd.DataFrame(
        {"candidate": ["weight-decay"] * 2, "network": "mlp", "decay": [0.0, 0.1], "seed": 0, "lowest_cos": [0.1, -0.2]}
    )
    assert aligned(frame.head(1)) is True
    assert "decay 0.1" in aligned(frame)


@pytest.mark.slow
def test_its_report_is_written(tmp_path):
    from fairtrial.report import write_report
    from fairtrial.trial.runner import run

    run("edge-of-stability", preset="smoke", out=tmp_path / "run", jobs=1)
    page = write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    assert "transition" in page


def test_a_level_that_is_a_list_is_found_in_the_table_of_cells():
    import pandas as pd

    from fairtrial.report.figures import _cells_of

    class Panel:
        class part:
            name = "transition"

        class metric:
            name = "miss"

        where = {"decays": [0.0, 0.03]}  # noqa: RUF012

    class Recorded:
        cells = pd.DataFrame(
            {"part": "transition", "candidate": "a", "status": "done", "miss": [1.0] * 3, "decays": "[0.0, 0.03]"}
        )

    assert len(_cells_of(Recorded(), Panel())) == 3
