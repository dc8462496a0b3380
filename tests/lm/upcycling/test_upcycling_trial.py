import re

import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.lm.upcycling.corpora import SCIENCE, divide, python_sources, up_to, worked_problems
from fairtrial.lm.upcycling.trial import MIXTURES, ROLES, UpcyclingParams, check, named_in, orders, parts, trial
from fairtrial.testing import check_trial

TINY = {"base": "tiny", "corpora": "tiny", "vocabulary": 64}


def test_the_trial_is_sound():
    check_trial(trial)


def test_every_text_comes_once_before_any_comes_again():
    rows = np.concatenate(orders(10, 4, 7, 0, "x"))
    assert rows.shape == (28,)
    assert sorted(rows[:10]) == sorted(rows[10:20]) == list(range(10))
    assert not np.array_equal(rows, np.concatenate(orders(10, 4, 7, 1, "x")))


def test_candidates_have_equal_active_parameters_except_the_reference():
    for label, (_, granularity, active) in MIXTURES.items():
        assert label == "btx-twice" or active == granularity


def test_claims_are_about_candidates_that_are_there():
    for chosen in ((), ("drop", "drop-fine"), ("soup",)):
        quality, *speed = parts(UpcyclingParams(candidates=chosen))
        labels = {c.label for c in quality.candidates}
        assert labels == ({"divmoe", *chosen} if chosen else ROLES.keys())
        assert all(named_in(claim) <= labels for claim in quality.claims)
        assert bool(speed) == ("dense" in labels)
    assert [claim.id for claim in parts(UpcyclingParams())[0].claims][:5] == ["C1", "C2", "C3", "C4", "C5"]


def test_problems_are_worked_without_a_mistake():
    text = "\n".join(worked_problems(60, seed=1))
    found = re.findall(r"(?<![\w*+-] )\b(\d+) ([*+-]) (\d+)(?: \+ (\d+))? = (\d+)", text)
    assert len(found) > 400
    for a, sign, b, more, result in found:
        value = {"*": int(a) * int(b), "+": int(a) + int(b), "-": int(a) - int(b)}[sign]
        assert value + int(more or 0) == int(result)


def test_documents_are_divided_without_overlap_and_cut_to_size():
    texts = [f"text {i} " * 10 for i in range(30)]
    divided = divide(texts)
    assert sorted(text for part in divided.values() for text in part) == sorted(texts)
    pieces = divide(["a" * 30_000])
    assert sum(len(text) for part in pieces.values() for text in part) == 30_000
    assert up_to(["a" * 50_000, "b" * 10, "c"], 20_005) == ["a" * 20_000, "b" * 10]
    assert len(python_sources()) > 50
    assert len(SCIENCE) == len(set(SCIENCE))


def test_what_cannot_be_run_is_refused_before_any_work(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("x")
    for given, word in (
        ({"base": "tiny"}, "go together"),
        ({**TINY, "corpora": str(tmp_path)}, "go together"),
        ({"corpora": str(tmp_path)}, "at least four"),
        ({"corpora": str(tmp_path / "none")}, "no such folder"),
        ({**TINY, "candidates": ("sparce",)}, "did you mean 'sparse'"),
        ({**TINY, "active": 5}, "give 4 or less"),
        ({**TINY, "granularity": 7}, "does not divide"),
        ({**TINY, "device": "nowhere"}, "device"),
        ({**TINY, "fine_tunes": str(tmp_path)}, "name the model"),
    ):
        with pytest.raises(InputError, match=word):
            check(UpcyclingParams(**given))
    check(UpcyclingParams(**TINY))
