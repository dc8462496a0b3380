"""Where commands may write, and numbers that options may be."""

import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.options import checked_count, checked_number
from fairtrial.outputs import check_file, check_new_file, check_new_folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "there.csv").write_text("a\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "model").write_text("m")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt", "ends in .csv or .json"),
        ("none/a.csv", "there is no folder"),
        ("a.csv/b.csv", "there is no folder"),
        ("folder.csv", "it is a folder"),
        ("there.csv", "it is read here"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(folder, name, message):
    (folder / "folder.csv").mkdir()
    with pytest.raises(InputError, match=message):
        check_file(folder / name, ".csv", ".json", inputs=[None, folder / "full" / ".." / "there.csv"])
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "folder.csv", "full", "there.csv"]


def test_a_file_may_be_left_out_new_or_written_over(folder):
    check_file(None, ".csv")
    check_file(folder / "there.csv")
    check_new_file(folder / "new.csv", ".csv")
    with pytest.raises(InputError, match=r"there\.csv exists: give another --out"):
        check_new_file(folder / "there.csv")


def test_a_folder_must_be_new_or_empty(folder):
    for name in ("new", "new/below", "empty"):
        check_new_folder(folder / name)
    for name in ("full", "there.csv"):
        with pytest.raises(InputError, match="give another --out"):
            check_new_folder(folder / name)
    with pytest.raises(InputError, match=r"nothing can be written in .*there\.csv"):
        check_new_folder(folder / "there.csv" / "model")


@pytest.mark.parametrize("value", [0, 7, True, 2.0, "2", None, np.float64(2), [2]])
def test_a_count_is_a_whole_number_in_its_range(value):
    with pytest.raises(InputError, match=r"folds=.*: give a whole number from 1 to 6"):
        checked_count(value, "folds", most=6)
    assert checked_count(np.int64(2), "folds", most=6) == 2


@pytest.mark.parametrize("value", [0, 1, -1, float("nan"), float("inf"), "0.5", None, True, 1j, [0.5]])
def test_a_number_is_finite_and_within_its_bounds(value):
    with pytest.raises(InputError, match=r"rate=.*: give a finite number above 0 and below 1$"):
        checked_number(value, "rate", above=0, below=1)
    assert checked_number(np.float32(0.5), "rate", above=0, below=1) == 0.5
    assert checked_number(1, "rate", least=1, most=1) == 1
