import pandas as pd
import pytest

from fairtrial.errors import InputError
from fairtrial.lm.drafting.trial import DraftingParams, all_the_same, check, trial
from fairtrial.testing import check_trial


def test_the_trial_is_sound():
    check_trial(trial)


def test_a_text_that_differs_is_named():
    frame = pd.DataFrame(
        {"candidate": ["dpace", "oracle", "prompt-lookup"], "prompt": [4, 4, 4], "same": [1.0, 1.0, 0.0]}
    )
    assert all_the_same(frame) is True
    assert "prompt 4" in all_the_same(frame.assign(same=0.0))


def test_what_cannot_be_read_is_refused_before_any_work():
    tiny = {"model": "tiny", "text": "tiny"}
    check(DraftingParams(**tiny))
    for given, word in (
        ({"model": "./none"}, "no such file"),
        ({"text": "none.txt"}, "no such file"),
        ({"n_prompts": 8, "sets": 4}, "at least four"),
        ({"device": "nowhere"}, "nowhere"),
    ):
        with pytest.raises(InputError, match=word):
            check(DraftingParams(**{**tiny, **given}))
