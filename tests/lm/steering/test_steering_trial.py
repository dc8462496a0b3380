import json

import pytest

from fairtrial.errors import InputError
from fairtrial.lm.steering.axes import AXES, TOPICS, sentences
from fairtrial.lm.steering.trial import SteeringParams, axis_names, check, parts, split_of, trial
from fairtrial.testing import check_trial

TINY = {"first": "tiny-0", "second": "tiny-1", "anchors": "tiny", "n_anchors": 20}


def test_the_trial_is_sound():
    check_trial(trial)


def test_no_wording_and_no_topic_is_in_both_halves_of_a_split():
    params = SteeringParams()
    for axis in AXES:
        split = split_of(axis, 1, params)
        assert not {*split.positive, *split.negative} & {*split.test_positive, *split.test_negative}
        assert len(split.positive) == len(split.negative) == 24
        assert len(split.test_positive) == len(split.test_negative) == 16


def test_every_template_tells_the_topic():
    for axis, pairs in AXES.items():
        for pair in range(len(pairs)):
            for side in sentences(axis, pair, list(TOPICS)):
                assert all(topic in text for topic, text in zip(TOPICS, side, strict=True))


def test_axes_of_the_users_are_read_and_split_as_they_say(tmp_path):
    def write(name, rows):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    free = [{"text": f"w{i} w3", "label": i % 2} for i in range(12)]
    write("free", free)
    write("fixed", [{**row, "split": "extract" if i < 6 else "test"} for i, row in enumerate(free)])
    params = SteeringParams(axes=str(tmp_path), **TINY)
    check(params)
    assert axis_names(params) == ["fixed", "free"]
    assert split_of("fixed", 0, params).positive == ["w1 w3", "w3 w3", "w5 w3"]
    assert split_of("free", 0, params) != split_of("free", 1, params)
    assert parts(params)[0].replicate.values == ["fixed", "free"]
    for rows, word in (
        ([{"text": "a", "label": 2}], "line 1"),
        ([{"label": 1}], "line 1"),
        ([*free[:4], {**free[4], "split": "test"}, *free[5:]], "to all or to none"),
        (free[:4], "at least two"),
    ):
        write("bad", rows)
        with pytest.raises(InputError, match=word):
            check(params)


def test_models_and_anchors_are_refused_before_any_work(tmp_path):
    (tmp_path / "few.txt").write_text("a\nb\n")
    for given, word in (
        ({"first": "no-such-model"}, "no such folder"),
        ({"first": "tiny-1"}, "one name"),
        ({"second": ""}, "between models"),
        ({"anchors": str(tmp_path / "none.txt")}, "no such file"),
        ({"anchors": str(tmp_path / "few.txt")}, "at least 8"),
        ({"axes": str(tmp_path)}, "at least two"),
    ):
        with pytest.raises(InputError, match=word):
            check(SteeringParams(**{"axes": "tiny", **TINY, **given}))
