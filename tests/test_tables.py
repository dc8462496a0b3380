import pandas as pd
import pytest

from fairtrial.errors import InputError
from fairtrial.tables import read_table


def test_a_table_is_read_from_either_format(tmp_path):
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        pd.testing.assert_frame_equal(read_table(tmp_path / name), frame, check_dtype=False)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("none.csv", None, "no such file"),
        ("t.txt", b"a\n1\n", "give a .csv or .parquet"),
        ("empty.csv", b"", "cannot be read"),
        ("bare.csv", b"a,b\n", "no rows"),
        ("binary.csv", b"\xff\xfe\x00\x81", "cannot be read"),
        ("t.parquet", b"not parquet", "cannot be read"),
        ("shifted.csv", b"x,z\n1,2,3\n4,5,6\n", "more fields than the header"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path, name, content, word):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=word) as caught:
        read_table(tmp_path / name)
    assert name in str(caught.value)


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(InputError, match="two columns are called 'a'"):
        read_table(tmp_path / "t.csv")
