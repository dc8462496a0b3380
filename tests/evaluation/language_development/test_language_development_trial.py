import numpy as np
import pandas as pd
import pytest

from fairtrial.errors import InputError, MissingSampleError, UnknownNameError
from fairtrial.evaluation.language_development.trial import (
    DevelopmentParams,
    _spread,
    benches,
    chance_without_alignment,
    corpus_of,
    exam,
    leaks_nothing,
    parts,
    slope_by_item,
    trial,
)
from fairtrial.testing import check_trial
from fairtrial.trial.declare import leaves
from fairtrial.trial.params import make_params

SMOKE = trial.presets["smoke"]


class Direct:
    """Stages without a store."""

    def note(self, text):
        pass

    def __call__(self, function, *arguments):
        wants = function.__code__.co_varnames[:1] == ("stages",)
        return function(self, *arguments) if wants else function(*arguments)


def test_the_trial_is_sound():
    check_trial(trial)


def test_a_slope_by_items_is_that_of_least_squares_with_its_robust_error():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, 300).astype(float)
    y = (rng.random(300) < 0.4 + 0.1 * x).astype(float)
    design = np.c_[np.ones(300), x]
    weights, *_ = np.linalg.lstsq(design, y, rcond=None)
    bread = np.linalg.inv(design.T @ design)
    meat = design.T @ (((y - design @ weights) ** 2)[:, None] * design)
    values = slope_by_item(x, y)
    assert values.mean() == pytest.approx(weights[1])
    assert values.std() / len(x) ** 0.5 == pytest.approx((bread @ meat @ bread)[1, 1] ** 0.5)


def test_questions_ask_for_a_thing_in_view_among_three_that_are_not():
    asked = exam(DevelopmentParams(**SMOKE))
    visible = asked["stream"].visible[asked["frames"]]
    rows = np.arange(len(visible))
    assert visible[rows, asked["words"][:, 0]].all()
    assert not visible[rows[:, None], asked["words"][:, 1:]].any()
    assert all(len(set(words)) == 4 for words in asked["words"].tolist())


def test_the_reference_is_asked_as_many_items_of_each_cell():
    made = benches(Direct(), DevelopmentParams(**SMOKE))
    cells = made["bench"].items.groupby(["phenomenon", "bin"]).size()
    asked = made["bench"].items.iloc[_spread(made["bench"], 2 * len(cells))]
    assert set(asked.groupby(["phenomenon", "bin"]).size()) <= {1, 2, 3}
    assert len(_spread(made["bench"], 0)) == len(made["bench"].items)


def test_the_exact_claims_say_what_is_wrong():
    frame = pd.DataFrame(
        {"candidate": "unigram", "phenomenon": ["negation", "preposition"], "bin": [0, 1], "leak": [0.1, 3.0]}
    )
    assert leaks_nothing(frame[:1]) is True
    assert leaks_nothing(frame) == "preposition, bin 1: 3.0 standard errors from chance"
    runs = pd.DataFrame({"alpha": 0.0, "mode": "unrelated", "accuracy": [0.24, 0.26, 0.25] * 3})
    runs["candidate"] = np.repeat(["infonce", "mil-nce", "counting"], 3)
    assert chance_without_alignment(runs) is True
    runs.loc[runs.candidate == "counting", "accuracy"] += 0.2
    assert "counting: [0.4" in chance_without_alignment(runs)


def test_five_trainings_turn_claims_over_items_into_claims_over_trainings():
    def over(**how):
        found = parts(DevelopmentParams(**how))
        claims = [leaf for part in found for claim in part.claims for leaf in leaves(claim)]
        return {leaf.over for leaf in claims if leaf.id.startswith(("A", "B")) and hasattr(leaf, "over")}

    assert over() == {"item"}
    assert over(lm_seeds=5, stream_seeds=5) == {"replicate"}


def test_your_own_text_is_read(tmp_path):
    (tmp_path / "mine.txt").write_text("look at the dog\nthe dog sleeps\n")
    assert corpus_of(str(tmp_path / "mine.txt"), DevelopmentParams()).utterances == (
        "look at the dog",
        "the dog sleeps",
    )


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"text": "nowhere.txt"}, InputError, "no such file or folder"),
        ({"model": "./none"}, InputError, "no such file or folder"),
        ({"phenomena": ["negations"]}, UnknownNameError, "negation"),
        ({"lm_width": 20}, InputError, "multiple of 16"),
    ],
)
def test_bad_input_is_refused_before_any_worker_starts(values, error, message):
    with pytest.raises(error, match=message):
        trial.check(make_params(trial, "smoke", values))


def test_a_missing_sample_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    with pytest.raises(MissingSampleError, match="fairtrial samples get"):
        trial.check(DevelopmentParams())
