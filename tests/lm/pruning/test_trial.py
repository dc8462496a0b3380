import pytest

from fairtrial.errors import InputError, MissingSampleError
from fairtrial.lm.pruning.trial import (
    CANDIDATES,
    FOLDS,
    PruningParams,
    dense_model,
    documents_of,
    fold_of,
    method,
    parts,
    trial,
    windows_of_text,
)
from fairtrial.testing import check_trial
from fairtrial.trial.declare import leaves
from fairtrial.trial.params import make_params

SMOKE = trial.presets["smoke"]


class Direct:
    """Stages without a store."""

    def __call__(self, function, *arguments):
        wants = function.__code__.co_varnames[:1] == ("stages",)
        return function(self, *arguments) if wants else function(*arguments)


def test_the_trial_is_sound():
    check_trial(trial)


def test_every_candidate_but_the_dense_model_has_its_method():
    for candidate in CANDIDATES[1:]:
        assert method(candidate.label, PruningParams()).sparsity == 0.5


def test_folds_divide_the_evaluation_windows_and_keep_documents_whole():
    params = PruningParams(**{**SMOKE, "eval_windows": 16})
    text = windows_of_text(Direct(), params)
    folds = [fold_of(text, fold) for fold in range(FOLDS)]
    assert sum(len(ids) for ids, _ in folds) == 16 == len(text["evaluation"])
    seen = [set(documents) for _, documents in folds]
    assert sum(map(len, seen)) == len(set.union(*seen)) == 8  # of 24 documents two thirds calibrate


def test_no_evaluation_window_was_seen_in_calibration():
    text = windows_of_text(Direct(), PruningParams(**SMOKE))
    calibration = {tuple(row) for row in text["calibration"].tolist()}
    assert not calibration & {tuple(row) for row in text["evaluation"].tolist()}


def test_a_text_of_one_document_is_divided_by_windows(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text(" ".join(documents_of("tiny")))
    text = windows_of_text(Direct(), PruningParams(**{**SMOKE, "text": str(file)}))
    assert len(text["documents"].unique()) == 8


def test_too_little_text_says_what_is_needed(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("w1 w2 w3 " * 30)
    with pytest.raises(InputError, match="give more text"):
        windows_of_text(Direct(), PruningParams(**{**SMOKE, "text": str(file)}))


def test_five_draws_turn_claims_over_items_into_claims_over_draws():
    def over(draws):
        quality = parts(PruningParams(draws=draws))[0]
        return {claim.over for whole in quality.claims for claim in leaves(whole) if claim.id.startswith("C")}

    assert over(1) == over(4) == {"item"}
    assert over(5) == {"replicate"}


def test_the_tiny_model_takes_dtype_and_device():
    model, _ = dense_model(PruningParams(**{**SMOKE, "dtype": "bfloat16"}))
    assert str(model.dtype) == "torch.bfloat16"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pattern": "4:2"}, "write N:M"),
        ({"sparsity": 1.0}, "less than 1"),
        ({"model": "./no-such-folder"}, "no such file or folder"),
        ({"text": "no/such.txt"}, "no such file or folder"),
        ({"device": "cuda:99"}, "device=cuda:99"),
    ],
)
def test_bad_input_is_refused_before_any_worker_starts(values, message):
    with pytest.raises(InputError, match=message):
        trial.check(make_params(trial, "smoke", values))


def test_a_missing_sample_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    with pytest.raises(MissingSampleError, match="fairtrial samples get"):
        trial.check(PruningParams())
