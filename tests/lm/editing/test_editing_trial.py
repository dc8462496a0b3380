import json

import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.lm.editing.trial import EditingParams, check, horizon_of, trial
from fairtrial.testing import check_trial

TINY = {"model": "tiny", "text": "tiny", "layers": [1], "n_edits": 2, "blocks": 2}


def test_the_trial_is_sound():
    check_trial(trial)


def test_the_horizon_says_nothing_where_the_plain_editor_does_not_break():
    params = EditingParams(n_edits=40)
    assert horizon_of(None, "plain", params) is None
    assert horizon_of(None, "anchored", params) == np.log(40)
    assert horizon_of(16.0, "plain", params) == np.log(16)
    assert horizon_of(0.0, "anchored", params) == 0


def test_what_cannot_be_read_is_refused_before_any_work(tmp_path):
    file = tmp_path / "mine.jsonl"
    row = {"prompt": "w4 {} w5", "subject": "w9", "target_new": "w11"}
    file.write_text("\n".join(json.dumps({**row, "subject": f"w{i}"}) for i in range(2, 8)))
    check(EditingParams(edits=str(file), **TINY))
    for given, word in (
        ({"model": "./none"}, "no such file"),
        ({"text": "none.txt"}, "no such file"),
        ({"edits": "none.jsonl"}, "cannot be read"),
        ({"edits": str(file), "n_edits": 9}, "not of 9"),
        ({"device": "nowhere"}, "nowhere"),
    ):
        with pytest.raises(InputError, match=word):
            check(EditingParams(**{"edits": "tiny", **TINY, **given}))
    file.write_text("\n".join(json.dumps({**row, "target_new": t}) for t in ("w1", "w2")))
    with pytest.raises(InputError, match="edits 0 and 1"):
        check(EditingParams(edits=str(file), **TINY))
