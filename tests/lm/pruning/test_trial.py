import json

import pandas as pd
import pytest

from fairtrial.errors import InputError, MissingSampleError
from fairtrial.lm.pruning.trial import (
    CANDIDATES,
    FOLDS,
    PruningParams,
    connectivity_of,
    dense_model,
    documents_of,
    fold_of,
    measure_quality,
    method,
    parts,
    pruned,
    trial,
    windows_of_text,
)
from fairtrial.testing import check_trial
from fairtrial.trial.declare import leaves
from fairtrial.trial.params import make_params

SMOKE = trial.presets["smoke"]


class Direct:
    """Stages without a store."""

    def __init__(self):
        self.notes = []
        self.asked = []

    def note(self, text):
        self.notes.append(text)

    def __call__(self, function, *arguments):
        self.asked.append((function.__name__, arguments))
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


@pytest.mark.parametrize("documents", [1, 2, 3, 6, 11])
@pytest.mark.parametrize("eval_windows", [8, 11, 24])
def test_with_fewer_than_two_documents_a_fold_the_items_are_windows_spread_over_the_text(
    tmp_path, documents, eval_windows
):
    file = tmp_path / "few.jsonl"
    words = " ".join(documents_of("tiny") * 3).split()
    size = len(words) // documents
    texts = [" ".join(words[i * size : (i + 1) * size]) for i in range(documents)]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    stages = Direct()
    text = windows_of_text(stages, PruningParams(**{**SMOKE, "text": str(file), "eval_windows": eval_windows}))
    everything = windows_of_text(Direct(), PruningParams(**{**SMOKE, "text": str(file), "eval_windows": 10**6}))
    items, n = text["documents"].tolist(), len(everything["evaluation"])
    assert items == [i * n // eval_windows for i in range(eval_windows)]
    assert (text["evaluation"] == everything["evaluation"][items]).all()
    assert all(len(fold_of(text, fold)[0]) >= 2 for fold in range(FOLDS))
    assert any("items are windows" in note for note in stages.notes)


def test_evaluation_documents_of_another_calibration_text_may_be_few(tmp_path):
    file = tmp_path / "one.txt"
    file.write_text(" ".join(documents_of("tiny")))
    values = {**SMOKE, "text": str(file), "calibration_text": "tiny"}
    text = windows_of_text(Direct(), PruningParams(**values))
    assert all(len(fold_of(text, fold)[0]) for fold in range(FOLDS))


def test_the_notes_say_what_was_really_used(monkeypatch, tmp_path):
    stages = Direct()
    params = PruningParams(**{**SMOKE, "calibration_tokens": 100})
    windows_of_text(stages, params)
    assert stages.notes == ["calibrated on 3 windows of 32 tokens, 96 in all"]
    stages(pruned, CANDIDATES[1], 0, params)
    assert stages.notes[-1] == "fiedler+wanda: alpha=0.15"
    monkeypatch.setattr("fairtrial.causal_lm.loading.load", lambda path, **how: (None, None))
    for stored, said in (("Q4_1", ["the model's weights were stored in 4 bits (Q4_1) and dequantised"]), (None, [])):
        monkeypatch.setattr("fairtrial.causal_lm.loading.stored_as", lambda path, stored=stored: stored)
        stages = Direct()
        dense_model(stages, PruningParams(model=str(tmp_path)))
        assert stages.notes == said


# ------------------------------------------------------------------------------------------------ connectivity


def test_the_edges_of_connectivity_match_the_base_metric():
    assert method("connectivity+magnitude", PruningParams()).edge == "magnitude"
    assert method("connectivity+wanda", PruningParams()).edge == "activation"
    assert method("connectivity+magnitude", PruningParams()).alpha is None


@pytest.mark.parametrize("label", ["fiedler+wanda", "wanda", "ria"])
def test_measuring_connectivity_is_booked_to_no_candidate(label, monkeypatch):
    stages = Direct()
    candidate = next(c for c in CANDIDATES if c.label == label)
    measured = measure_quality(candidate, {"draw": 0, "fold": 0}, PruningParams(**SMOKE), stages)
    asked = [arguments for name, arguments in stages.asked if name == "kept_connectivity"]
    assert [arguments[0] for arguments in asked] == ([label] if label != "ria" else [])
    for name in ("lambda2_retained", "isolated_graphs"):
        assert (measured[name] is None) == (label == "ria")

    def used(label, params, *, connectivity=False, method=method):
        assert not connectivity
        return method(label, params)

    monkeypatch.setattr("fairtrial.lm.pruning.trial.method", used)
    pruned(stages, candidate, 0, PruningParams(**SMOKE))


def test_connectivity_is_the_raw_ratio_and_isolated_channels_are_counted_apart():
    frame = pd.DataFrame(
        {
            "layer": [0, 0, 1, 1],
            "graph": ["attention", "mlp"] * 2,
            "lambda2_before": [0.5, 0.5, 0.0, 0.2],
            "lambda2_after": [0.25, 0.75, 0.0, 0.1],
            "isolated": [0, 3, 1, 0],
        }
    )
    measured = connectivity_of(frame)
    assert measured["lambda2_retained"][:2] == (["0/attention", "0/mlp", "1/mlp"], [0.5, 1.5, 0.5])
    assert measured["isolated_graphs"][:2] == (["0/attention", "0/mlp", "1/attention", "1/mlp"], [0, 1, 1, 0])
    assert connectivity_of(frame.assign(lambda2_before=0.0))["lambda2_retained"] is None


def test_isolated_graphs_are_reported_with_fewer_as_better():
    quality = parts(PruningParams())[0]
    assert not quality.metric("isolated_graphs").higher_is_better
    assert "R4" in {claim.id for claim in quality.claims}


def test_with_a_pattern_block_norow_is_wanda_and_left_out():
    quality = parts(PruningParams(pattern="2:4"))[0]
    assert "block-norow" not in {candidate.label for candidate in quality.candidates}
    third = next(claim for claim in quality.claims if claim.id == "C3")
    assert [claim.id for claim in leaves(third)] == ["C3-permuted"]
    params, stages = PruningParams(**{**SMOKE, "pattern": "2:4"}), Direct()
    of = {
        c.label: stages(pruned, c, 0, params)[0].state_dict() for c in CANDIDATES if c.label in ("wanda", "block-norow")
    }
    assert all((of["wanda"][name] == of["block-norow"][name]).all() for name in of["wanda"])
    assert "block-norow" in {candidate.label for candidate in parts(PruningParams())[0].candidates}


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
    model, _ = Direct()(dense_model, PruningParams(**{**SMOKE, "dtype": "bfloat16"}))
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


def test_a_window_longer_than_the_context_is_refused_before_any_worker_starts(tmp_path):
    model, tokenizer = Direct()(dense_model, PruningParams(**SMOKE))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    trial.check(PruningParams(**{**SMOKE, "model": str(tmp_path), "window": 512}))
    with pytest.raises(InputError, match=r"window=513 exceeds .* give --set window=512"):
        trial.check(PruningParams(**{**SMOKE, "model": str(tmp_path), "window": 513}))


def test_a_missing_sample_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    with pytest.raises(MissingSampleError, match="fairtrial samples get"):
        trial.check(PruningParams())
