import json

import pytest

from fairtrial.cards import find
from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality import trial as module
from fairtrial.evaluation.proof_quality.operators import DAMAGE
from fairtrial.evaluation.proof_quality.theorems import bank
from fairtrial.evaluation.proof_quality.trial import (
    METHODS,
    TARGETS,
    ProofQualityParams,
    check,
    formal_pairs,
    measure_damage,
    measure_ideas,
    measure_judge,
    measure_newer,
    parts,
    proofs_of,
    trial,
)
from fairtrial.testing import check_trial
from fairtrial.trial.declare import Candidate

SMOKE = trial.presets["smoke"]


class Direct:
    """Stages without a store."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    def __call__(self, function, *arguments):
        wants = function.__code__.co_varnames[:1] == ("stages",)
        return function(self, *arguments) if wants else function(*arguments)


@pytest.fixture(scope="module")
def result():
    return check_trial(trial)


def test_the_trial_is_sound(result):
    assert {verdict.id for verdict in result.verdicts} >= {"C3", "C4"}


def test_the_card_states_the_claims_of_the_trial():
    claims = [c.id for part in parts(ProofQualityParams()) for c in part.claims if c.id.startswith("C")]
    assert sorted(claims) == sorted(claim.id for claim in find("proof-quality").claims)


def test_every_operator_has_its_axis():
    assert set(TARGETS) == set(DAMAGE)
    assert set(TARGETS.values()) == {candidate.label for candidate in METHODS}


def database(path, count=8):
    """Theorems proved twice: OLD by the same lemmas in more steps, ALT by others; one OLD of another hypothesis."""
    lines = ["$c |- T U $. a $a |- T $. b $a |- T $. ${ l.1 $e |- T $. lift $a |- T $. $}"]
    for i in range(count):
        lines += [f"new{i} $p |- T $= a lift $.", f"new{i}OLD $p |- T $= a lift lift $."]
        lines += [f"way{i} $p |- T $= a lift $.", f"way{i}ALT $p |- T $= b $."]
    lines += [
        "odd $p |- T $= a lift $.",
        "${ odd.1 $e |- U $. oddOLD $p |- T $= a lift $. $}",
        "otherOLD $p |- T $= a $.",
    ]
    path.write_text("\n".join(lines))
    return str(path)


def test_pairs_of_formal_proofs_prefer_the_shorter_and_tell_another_idea(tmp_path):
    params = ProofQualityParams(**{**SMOKE, "metamath": database(tmp_path / "x.mm")})
    stages = Direct()
    pairs = formal_pairs(stages, params)
    assert len(pairs) == 17
    assert [pair["label"] for pair in pairs if not pair["whole"]] == ["odd"]
    for name, whole in zip(module.PAIRS, (False, True), strict=True):
        steps = measure_newer(Candidate("steps", "method"), {"pairs": name}, params, stages)
        assert steps["prefers newer"].values == (1.0,) * 8
        assert steps["tied"] == pytest.approx(0 if whole else 1 / 9)
        used = measure_newer(Candidate("used share", "method"), {"pairs": name}, params, stages)
        assert used == {"prefers newer": None, "tied": 1}  # in a formal proof every step is used
        ideas = measure_ideas(Candidate("diversity", "method"), {"pairs": name}, params, stages)
        assert ideas["AUC"].values.mean() == 1


def test_too_few_pairs_are_refused(tmp_path):
    params = ProofQualityParams(**{**SMOKE, "metamath": database(tmp_path / "x.mm", count=3)})
    with pytest.raises(InputError, match="fewer than 8"):
        formal_pairs(Direct(), params)


def rows(path, count, **more):
    texts = [entry.proof.source for entry in bank()]
    path.write_text(
        "\n".join(json.dumps({"problem_id": f"p{i // 2}", "proof": texts[i], **more}) for i in range(count))
    )
    return str(path)


def test_the_users_own_proofs_are_damaged_like_the_bank(tmp_path):
    params = ProofQualityParams(**{**SMOKE, "proofs": rows(tmp_path / "p.jsonl", 9, correct=True)})
    check(params)
    stages = Direct()
    for operator, target in TARGETS.items():
        found = measure_damage(Candidate(target, "method"), {"draw": 0, "operator": operator}, params, stages)
        assert len(found["shift"].ids) == (
            8 if target == "diversity" and operator != "copy" else len(found["lowered"].ids)
        )
        assert found["lowered"].values.mean() > 0.5
    assert "9 of 9 proofs" in stages.notes[0]
    few = ProofQualityParams(**{**SMOKE, "proofs": rows(tmp_path / "few.jsonl", 3, correct=True)})
    with pytest.raises(InputError, match="8 or more"):
        proofs_of(Direct(), few)
    with pytest.raises(InputError, match="correct: true"):
        check(ProofQualityParams(**{**SMOKE, "proofs": rows(tmp_path / "none.jsonl", 9)}))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"judge": "http://localhost:1/v1"}, "judge_model"),
        ({"encoder": "./nowhere"}, "no such file or folder"),
        ({"metamath": "x.mm"}, "no such file or folder"),
        ({"proofs": "nowhere.jsonl"}, "no such file"),
    ],
)
def test_what_cannot_be_read_is_refused_before_the_run(values, said):
    with pytest.raises(InputError, match=said):
        check(ProofQualityParams(**{**SMOKE, **values}))


def judged(monkeypatch, judge):
    monkeypatch.setattr(module, "judge_of", lambda stages, params: judge)
    params, stages = ProofQualityParams(**{**SMOKE, "judge": "mine", "judge_proofs": 3}), Direct()
    return measure_judge(Candidate("judge", "method"), {}, params, stages), stages.notes


def test_a_judge_that_cannot_judge_gets_no_verdict_and_the_notes_say_how_bad_it_is(monkeypatch):
    found, notes = judged(monkeypatch, lambda prompt: '{"correct": true, "confidence": 1}')
    assert found["kappa"] is None
    assert found["right on known proofs"].values == [0.5] * 8
    assert "not usable" in notes[0]
    assert "C5 has no verdict" in notes[0]


def test_a_judge_that_knows_the_needed_steps_agrees(monkeypatch):
    """It accepts a bank proof with anything inserted, and nothing that lacks a step."""
    steps = [[step.text for step in entry.proof.steps] for entry in bank()]

    def judge(prompt):
        correct = any(all(text in prompt for text in proof) for proof in steps)
        return json.dumps({"correct": correct, "confidence": 0.9})

    found, notes = judged(monkeypatch, judge)
    assert found["right on known proofs"].values == [1.0] * 8
    assert found["kappa"].values.mean() > 0.4
    assert "usable" in notes[0]
    control = measure_judge(Candidate("random", "control"), {}, ProofQualityParams(**SMOKE), Direct())
    assert abs(control["kappa"].values.mean()) < 0.4
