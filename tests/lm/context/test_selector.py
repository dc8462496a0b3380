"""Diagnosis, selection, and what users hand in."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import FairtrialError, InputError
from fairtrial.lm.context import CorrectionMeter, ProperCorrectionSelector, consensus
from fairtrial.lm.context.selector import predicted_changes, text_of

CHOICES = ["w7", "w8", "w9", "w11"]
CONTEXTS = ["w5 w7 w7", "w9 w9 w9 w9", "w20 w21", "w30 w8"]


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = tiny_causal_lm(layers=3)
    model.lm_head.weight.data.mul_(30)  # random logits are nearly equal
    return model, tokenizer


@given(st.integers(0, 300))
def test_consensus_and_predicted_changes(seed):
    rng = np.random.default_rng(seed)
    y0, y = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4), size=6)
    t = consensus(y0, y)
    np.testing.assert_allclose(t, (y.mean(0) * y0**0.25) ** 2 / ((y.mean(0) * y0**0.25) ** 2).sum())
    order = rng.permutation(6)
    np.testing.assert_allclose(consensus(y0, y[order]), t)
    np.testing.assert_allclose(predicted_changes(y0, y[order], t), predicted_changes(y0, y, t)[order])
    np.testing.assert_allclose(consensus(np.array([0, 1, 1]) / 2, np.ones((3, 3)) / 3, beta=0), 1 / 3)
    truth = np.eye(4)[1]
    with_truth = np.concatenate([y, truth[None]])
    assert predicted_changes(y0, with_truth, truth).argmin() == 6


def test_none_is_chosen_where_every_context_should_harm(tiny, monkeypatch):
    selector = ProperCorrectionSelector(*tiny)
    y0, worse = np.array([0.97, 0.01, 0.01, 0.01]), np.array([[0.4, 0.2, 0.2, 0.2]] * 3)
    monkeypatch.setattr(selector, "_answers", lambda *_: (y0, worse, CHOICES))
    told = selector.select("w4", CONTEXTS[:3], choices=CHOICES)
    assert told.indices == []
    assert "no context should lower" in told.reason
    assert (told.scores > 0).all()


def test_permuted_contexts_give_the_permuted_answer(tiny):
    selector = ProperCorrectionSelector(*tiny, k=4)
    one = selector.select("w4 w5", CONTEXTS, choices=CHOICES)
    order = [2, 0, 3, 1]
    other = selector.select("w4 w5", [CONTEXTS[i] for i in order], choices=CHOICES)
    np.testing.assert_allclose(other.scores, one.scores[order], atol=1e-6)
    assert [order[i] for i in other.indices] == one.indices
    assert one.indices == [int(i) for i in np.argsort(one.scores) if one.scores[i] < 0]


def test_a_repeated_context_counts_once_unless_asked(tiny):
    repeated = [*CONTEXTS, CONTEXTS[0], CONTEXTS[0]]
    once = ProperCorrectionSelector(*tiny).select("w4 w5", repeated, choices=CHOICES)
    plain = ProperCorrectionSelector(*tiny).select("w4 w5", CONTEXTS, choices=CHOICES)
    thrice = ProperCorrectionSelector(*tiny, deduplicate=False).select("w4 w5", repeated, choices=CHOICES)
    np.testing.assert_allclose(once.scores[:4], plain.scores, atol=1e-6)
    assert not np.allclose(thrice.scores[:4], plain.scores, atol=1e-4)


def test_documents_are_put_in_order(tiny):
    docs = [SimpleNamespace(page_content=text) for text in CONTEXTS[:2]] + [
        SimpleNamespace(text=CONTEXTS[2]),
        CONTEXTS[3],
    ]
    selector = ProperCorrectionSelector(*tiny)
    scores = selector.select("w4 w5", CONTEXTS, choices=CHOICES).scores
    assert [text_of(doc) for doc in selector.rerank("w4 w5", docs, choices=CHOICES)] == [
        CONTEXTS[i] for i in np.argsort(scores)
    ]
    with pytest.raises(InputError, match="int is no text"):
        text_of(3)


def test_the_models_own_answers_serve_as_choices(tiny):
    told = ProperCorrectionSelector(*tiny).select("w4 w5", CONTEXTS)
    assert len(told.scores) == 4
    table = CorrectionMeter(*tiny, space="generate").diagnose("w4 w5", CONTEXTS, answer="w9", attention=False)
    assert len(table) == 4
    hidden = CorrectionMeter(*tiny, space="hidden").diagnose("w4 w5", CONTEXTS, answer="w9", attention=False)
    change = hidden["error_before"] * (hidden["rho"] ** 2 - 2 * hidden["rho"] * hidden["cos"])
    np.testing.assert_allclose(hidden["error_after"] - hidden["error_before"], change, rtol=1e-6)


def test_a_diagnosis_and_its_report(tiny):
    meter = CorrectionMeter(*tiny)
    rows = pd.concat(
        [
            meter.diagnose(q, CONTEXTS, choices=CHOICES, answer="w9", sources=["a", "a", "b", "b"])
            for q in ("w4", "w6 w5")
        ]
    )
    assert rows["attention_mass"].between(0, 1).all()
    assert (rows["complementarity"] > 0).all()
    told = meter.report(rows)
    assert told.loc["a", "n"] == 4
    np.testing.assert_allclose(told[["UNDER", "PROPER", "OVERSHOOT", "OVER", "MISDIRECTED"]].sum(1), 1)
    np.testing.assert_allclose(told["harmful"], told["OVER"] + told["MISDIRECTED"])
    with pytest.raises(InputError, match="no column"):
        meter.report(rows.drop(columns="verdict"))


def test_fitting_finds_better_settings_and_a_window(tiny):
    rng = np.random.default_rng(0)
    queries = [f"w{i}" for i in rng.integers(2, 60, 50)]
    contexts = [[f"w{i} w{j}" for i, j in rng.integers(2, 60, (3, 2))] for _ in queries]
    answers = [CHOICES[i] for i in rng.integers(0, 4, 50)]
    selector = ProperCorrectionSelector(*tiny, by="window")
    with pytest.raises(InputError, match="fitted first"):
        selector.select("w4", CONTEXTS, choices=CHOICES)
    selector.fit(queries, contexts, answers, choices=CHOICES)
    assert selector.select("w4", CONTEXTS[:1], choices=CHOICES).scores.shape == (1,)
    with pytest.raises(InputError, match="at least 50"):
        selector.fit(queries[:9], contexts[:9], answers[:9], choices=CHOICES)
    given = {"queries": queries, "contexts": contexts, "answers": answers, "choices": CHOICES}
    for change, word in (
        ({"answers": ["w60"] * 50}, "query 0: .*is not among"),
        ({"contexts": [contexts[0], ["w5", ""], *contexts[2:]]}, "query 1: context 1 is empty"),
        ({"choices": [CHOICES] * 49}, "'choices': 49"),
        ({"choices": []}, "one list of choices"),
        ({"start": [None] * 50}, "query 0: start=None"),
    ):
        with pytest.raises(InputError, match=word):
            selector.fit(**{**given, **change})


def test_fitting_counts_repeated_contexts_as_selecting_does(tiny):
    queries = [f"w{i}" for i in range(2, 52)]
    contexts = [[f"w{i} w3", f"w{i + 1} w9", f"w{i} w7"] for i in range(2, 52)]
    answers = [CHOICES[i % 4] for i in range(50)]
    plain, repeated = (
        ProperCorrectionSelector(*tiny).fit(queries, [[*z, *z[:1] * n] for z in contexts], answers, choices=CHOICES)
        for n in (0, 4)
    )
    assert (plain.beta, plain.gamma) == (repeated.beta, repeated.gamma)


def test_bad_inputs_are_refused(tiny):
    meter, selector = CorrectionMeter(*tiny), ProperCorrectionSelector(*tiny)
    for call, word in (
        (lambda: meter.diagnose("w4", [], choices=CHOICES, answer="w9"), "at least one"),
        (lambda: meter.diagnose("w4", "w5", choices=CHOICES, answer="w9"), "at least one"),
        (lambda: meter.diagnose("w4", ["w5", ""], choices=CHOICES, answer="w9"), "context 1 is empty"),
        (lambda: meter.diagnose("w4", CONTEXTS, choices=CHOICES, answer="w60"), "not among the 4"),
        (lambda: meter.diagnose("w4", CONTEXTS, choices=CHOICES, answer=9), "answer=9"),
        (lambda: meter.diagnose("w4", CONTEXTS, choices=CHOICES, answer="w9", sources="abcd"), "sources: give a list"),
        (lambda: meter.diagnose("w4", CONTEXTS, choices=CHOICES, answer="w9", start=None), "start=None"),
        (lambda: meter.diagnose("w4", CONTEXTS, answer="w9"), "needs it"),
        (
            lambda: CorrectionMeter(*tiny, space="hidden").diagnose("w4", CONTEXTS, choices=CHOICES, answer="w9"),
            "neither",
        ),
        (lambda: CorrectionMeter(*tiny, tau=float("nan")), "tau=nan"),
        (lambda: meter.report([]), "one table"),
        (lambda: meter.diagnose("w4", CONTEXTS, choices=CHOICES, answer="w9", sources=["a"]), "1 sources"),
        (lambda: CorrectionMeter(*tiny, space="words"), "no space"),
        (lambda: selector.select("w4", CONTEXTS[:2], choices=CHOICES), "needs at least 3"),
        (lambda: selector.select("w4", ["w5"] * 3, choices=CHOICES), "1 different contexts"),
        (lambda: selector.select("w4", [*CONTEXTS, " ".join(["w5"] * 600)]), "prompt 5 has 601 tokens and an answer"),
        (lambda: selector.rerank("w4", "w5 w6", choices=CHOICES), "needs at least 3"),
        (lambda: ProperCorrectionSelector(*tiny, k=0), "k=0"),
        (lambda: ProperCorrectionSelector(*tiny, k=1.5), "k=1.5"),
        (lambda: ProperCorrectionSelector(*tiny, beta=float("nan")), "beta=nan"),
        (lambda: ProperCorrectionSelector(*tiny, gamma=float("inf")), "gamma=inf"),
        (lambda: consensus(np.ones(2), np.full((3, 2), np.nan)), "after: answer vectors"),
        (lambda: consensus(np.ones(2), np.ones(2)), "give probabilities"),
        (lambda: consensus(np.ones(2), np.array([[-0.5, 1.5]])), "give probabilities"),
        (lambda: consensus(np.array([0.0, 1]), np.array([[1.0, 0]])), "give beta=0"),
        (lambda: ProperCorrectionSelector(*tiny, by="luck"), "no by"),
    ):
        with pytest.raises(FairtrialError, match=word):
            call()


def test_a_file_of_queries_is_selected_from(tiny, tmp_path):
    from typer import Typer
    from typer.testing import CliRunner

    from fairtrial.lm.context.command import proper_correction

    model, tokenizer = tiny
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    rows = [
        {"query": "w4 w5", "contexts": CONTEXTS, "choices": CHOICES, "answer": "w9"},
        {"query": "w6", "contexts": CONTEXTS[:3], "choices": CHOICES, "start": "w2 w3"},
        {"query": "w4 w5", "contexts": CONTEXTS, "answer": "w9"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    app = Typer()
    app.command()(proper_correction)
    args = [str(tmp_path / "m"), "--in", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    told = CliRunner().invoke(app, [*args, "--json"])
    assert told.exit_code == 0, told.exception
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    verdicts = [verdict for row in out for verdict in row.get("verdicts", ())]  # by its own answers without choices
    assert len(verdicts) == 8
    harmful = sum(verdict in ("OVER", "MISDIRECTED") for verdict in verdicts)
    assert json.loads(told.output) == {
        "out": str(tmp_path / "out.jsonl"), "queries": 3, "none": sum(not row["selected"] for row in out),
        "diagnosed": 8, "harmful": harmful, "lost": 0,
    }  # fmt: skip
    expected = ProperCorrectionSelector(*tiny).select("w4 w5", CONTEXTS, choices=CHOICES)
    assert out[0]["selected"] == expected.indices
    np.testing.assert_allclose(out[0]["scores"], expected.scores, atol=1e-5)
    begun = ProperCorrectionSelector(*tiny).select("w6", CONTEXTS[:3], choices=CHOICES, start="w2 w3")
    np.testing.assert_allclose(out[1]["scores"], begun.scores, atol=1e-5)
    assert "verdicts" not in out[1]
    assert out[1]["query"] == "w6"
    again = CliRunner().invoke(app, args)
    assert "exists" in str(again.exception)
    long = {"query": "w4", "contexts": ["w5", "w6", "w7 " * 5000], "choices": CHOICES}
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, [long, rows[1]])))
    with pytest.warns(UserWarning, match="1 of 2 queries are lost, the first at query 1: prompt 3 has 5"):
        CliRunner().invoke(app, [*args[:-1], str(tmp_path / "rest.jsonl")])
    first, second = [json.loads(line) for line in (tmp_path / "rest.jsonl").read_text().splitlines()]
    assert first["selected"] == []
    assert "window" in first["error"]
    assert second["scores"] == pytest.approx(out[1]["scores"], abs=1e-5)
    (tmp_path / "in.jsonl").write_text(json.dumps(long))
    assert "query 1: prompt 3" in str(CliRunner().invoke(app, [*args[:-1], str(tmp_path / "none.jsonl")]).exception)
    (tmp_path / "in.jsonl").write_text("{")
    failed = CliRunner().invoke(app, [*args[:-1], str(tmp_path / "other.jsonl")])
    assert isinstance(failed.exception, InputError)
    assert not (tmp_path / "other.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "no queries"),
        ("{", "line 2"),
        ("[1]", "line 2: not a JSON object"),
        ('{"query": "w4"}', "line 2: give an object"),
        ('{"query": "w4", "contexts": "w5 w6 w7"}', "a list 'contexts'"),
        ('{"query": " ", "contexts": ["w5", "w6", "w7"]}', "query 0 is empty"),
        ('{"query": "w4", "contexts": ["w5", "", "w7"]}', "line 2: context 1 is empty"),
        ('{"query": "w4", "contexts": ["w5", "w5", "w7"]}', "at least 3 different contexts"),
        ('{"query": "w4", "contexts": ["w5", "w6", "w7"], "start": null}', "start=None"),
        ('{"query": "w4", "contexts": ["w5", "w6", "w7"], "answer": 0}', "the answer 0 is no text"),
        ('{"query": "w4", "contexts": ["w5", "w6", "w7"], "choices": 5}', "at least two texts"),
        ('{"query": "w4", "contexts": ["w5", "w6", "w7"], "choices": ["5", "7"], "answer": "-5"}', "not among"),
        (b"\xff", "UTF-8"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_before_any_model_is_loaded(tmp_path, text, word):
    from fairtrial.lm.context.command import read_queries

    (tmp_path / "in.jsonl").write_bytes(b"\n" + (text if isinstance(text, bytes) else text.encode()))
    with pytest.raises(InputError, match=word):
        read_queries(tmp_path / "in.jsonl")
