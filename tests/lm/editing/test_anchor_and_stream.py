"""The anchor, streams that can be taken back and gone on with, scores, files of edits."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import FairtrialError, InputError
from fairtrial.lm.editing import (
    MEMIT,
    AlphaEdit,
    ClampIncrement,
    Edit,
    EditCollapse,
    EditStream,
    NormAnchor,
    Solver,
    expected_growth,
    read_edits,
    score,
    simulate,
)
from fairtrial.lm.editing.editors import EditContext
from fairtrial.lm.editing.hooks import CurrentAnchor, RandomValue, anchor_norm, rescaled
from fairtrial.lm.editing.scoring import answered, harmonic

QUICK = Solver(steps=3, prefixes=("",))


def memit(texts, *hooks, **how):
    how = {"covariance_weight": 1.0, "solver": QUICK, **how}
    return MEMIT(*tiny_causal_lm(layers=3), layers=[1], text=texts, hooks=hooks, **how)


# --------------------------------------------------------------------------------------------------------------- anchor


@given(st.integers(0, 500), st.floats(0.01, 100))
def test_anchored_values_keep_their_direction_and_have_the_norm(seed, rho):
    v = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    once = rescaled(v, torch.tensor(rho))
    torch.testing.assert_close(once.norm(dim=1), torch.full((5,), rho), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.cosine_similarity(once, v), torch.ones(5))
    torch.testing.assert_close(rescaled(once, torch.tensor(rho)), once)


def test_zero_values_and_those_below_the_bound_stay():
    v = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
    with pytest.warns(UserWarning, match="no direction"):
        assert torch.equal(rescaled(v, torch.tensor(1.0))[0], v[0])
    under, over = torch.tensor([[1.9, 0.0]]), torch.tensor([[2.1, 0.0]])
    assert torch.equal(rescaled(under, torch.tensor(1.0), factor=2), under)
    assert rescaled(over, torch.tensor(1.0), factor=2).norm() == pytest.approx(1)
    for when in ("exceeds", "exceeds:x", "exceeds:-1", "never"):
        with pytest.raises(InputError, match="exceeds:2"):
            NormAnchor(when=when)
    with pytest.raises(FairtrialError, match="no reference"):
        NormAnchor("mine")


def test_the_anchor_is_of_the_original_weights_whenever_it_is_taken(texts, edits):
    anchor = NormAnchor()
    editor = memit(texts, anchor)
    editor.apply(edits)
    editor.apply(edits)
    assert editor.weight_ratio() > 1.01
    for reference in ("solved", "output"):
        fresh = anchor_norm(memit(texts), edits, reference)
        assert anchor_norm(editor, edits, reference) == pytest.approx(fresh, rel=1e-6)
    assert anchor.rho == pytest.approx(anchor_norm(memit(texts), edits))
    norms = memit(texts).solve(edits)[1].norm(dim=1).sort().values
    assert anchor.rho == pytest.approx(float(norms[:11].mean()), rel=1e-4)  # the largest 5 % of 12 left out


def test_each_reference_gives_its_norm(texts, edits):
    h = memit(texts).keys(edits[:3], 1)[1].norm(dim=1)
    written = memit(texts, NormAnchor("per-edit")).apply(edits[:3])
    torch.testing.assert_close(written.norm(dim=1), h)
    written = memit(texts, NormAnchor("output")).apply(edits[:3])
    torch.testing.assert_close(written.norm(dim=1), h.mean().expand(3))
    written = memit(texts, NormAnchor(rho=2.5)).apply(edits[:3])
    torch.testing.assert_close(written.norm(dim=1), torch.full((3,), 2.5))


def test_what_it_is_compared_with():
    h, v = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 24.0]])
    context = EditContext(None, [], h)
    torch.testing.assert_close(ClampIncrement(2.0)(v, context), torch.tensor([[3.0, 14.0]]))
    assert torch.equal(ClampIncrement(9.0)(v, context), v)
    current = CurrentAnchor(keep=0.5)
    assert current(v, context).norm() == pytest.approx(float(v.norm()))
    assert current(2 * v, context).norm() == pytest.approx(1.5 * float(v.norm()))
    one, two = (RandomValue(NormAnchor(rho=2.0), seed=s)(v, context) for s in (0, 1))
    assert one.norm() == pytest.approx(2.0)
    assert not torch.equal(one, two)
    with pytest.raises(InputError, match="max_ratio"):
        ClampIncrement(0)


def test_the_law_of_a_linear_memory():
    growth = np.mean([simulate(64, 0.75, 128, anchored=False, seed=s) for s in range(40)])
    assert growth == pytest.approx(expected_growth(64, 0.75, 128), rel=0.05)
    assert np.mean([simulate(64, 0.75, 128, anchored=True, seed=s) for s in range(40)]) == pytest.approx(1, rel=0.01)
    with pytest.raises(InputError, match="d=1"):
        simulate(1, 0.5, 3, anchored=True)


# --------------------------------------------------------------------------------------------------------------- stream


def test_a_stream_is_written_down_and_taken_back(texts, edits):
    editor = memit(texts, NormAnchor())
    model = editor.model
    states = [model.model.layers[1].mlp.down_proj.weight.detach().clone()]
    stream = EditStream(editor, batch_size=4, check_every=8)
    told = []

    def progress(done, of):
        told.append((done, of))
        states.append(model.model.layers[1].mlp.down_proj.weight.detach().clone())

    stream.apply(edits, progress=progress)
    assert told == [(4, 12), (8, 12), (12, 12)]
    history = stream.history
    assert history["edit"].tolist() == [4, 8, 12]
    assert history["ppl"].notna().tolist() == [False, True, False]
    assert (history["weight_ratio"].diff()[1:] > 0).all()
    np.testing.assert_allclose(history["value_norm"], editor.hooks[0].rho, rtol=1e-5)
    dense = states[0] + sum(left @ right.T for left, right in (write.factors[1] for write in editor.writes))
    torch.testing.assert_close(dense, states[3], atol=1e-6, rtol=1e-6)
    for to, state in ((8, states[2]), (0, states[0])):
        stream.rollback(to=to)
        assert torch.equal(model.model.layers[1].mlp.down_proj.weight, state)
        assert len(stream.edits) == to
    with pytest.raises(InputError, match="nearest is 0"):
        stream.rollback(to=4)


@pytest.mark.parametrize("decay", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_a_stream_that_goes_on_is_one_that_never_stopped(texts, edits, tmp_path, decay):
    whole = EditStream(memit(texts, NormAnchor(), decay=decay), batch_size=4, check_every=8)
    whole.apply(edits)
    first = EditStream(memit(texts, NormAnchor(), decay=decay), batch_size=4, check_every=8)
    first.apply(edits[:8])
    first.save(tmp_path / "s.safetensors")
    second = EditStream.load(
        tmp_path / "s.safetensors", memit(texts, NormAnchor(), decay=decay), batch_size=4, check_every=8
    )
    assert second.edits == edits[:8]
    second.editor.hooks[0].rho = whole.editor.hooks[0].rho  # of the first eight instead of all twelve otherwise
    second.apply(edits[8:])
    again = EditStream(
        memit(texts, NormAnchor(rho=whole.editor.hooks[0].rho), decay=decay), batch_size=4, check_every=8
    )
    again.apply(edits[:8])
    again.save(tmp_path / "s.safetensors")
    third = EditStream.load(
        tmp_path / "s.safetensors", memit(texts, NormAnchor(), decay=decay), batch_size=4, check_every=8
    )
    third.apply(edits[8:])
    assert torch.equal(third.editor._weights[1], whole.editor._weights[1])
    pd.testing.assert_frame_equal(third.history, whole.history)
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="not a readable"):
        EditStream.load(tmp_path / "broken.safetensors", memit(texts))
    other = MEMIT(*tiny_causal_lm(layers=3), layers=[0], text=texts)
    with pytest.raises(InputError, match=r"layers \[1\]"):
        EditStream.load(tmp_path / "s.safetensors", other)


def test_an_editor_that_keeps_earlier_edits_goes_on_as_if_it_had_not_stopped(texts, edits, tmp_path):
    def made():
        return AlphaEdit(*tiny_causal_lm(layers=3), layers=[1], text=texts, solver=QUICK, null_threshold=1e9)

    whole = EditStream(made(), batch_size=4, check_every=100)
    whole.apply(edits)
    first = EditStream(made(), batch_size=4, check_every=100)
    first.apply(edits[:8])
    first.save(tmp_path / "s.safetensors")
    second = EditStream.load(tmp_path / "s.safetensors", made(), batch_size=4, check_every=100)
    second.apply(edits[8:])
    assert torch.equal(second.editor._weights[1], whole.editor._weights[1])
    second.rollback(to=8)
    second.apply(edits[8:])
    assert torch.equal(second.editor._weights[1], whole.editor._weights[1])


def test_a_model_that_breaks_is_taken_back(texts, edits, monkeypatch):
    read = iter([10.0, 11.0, 29.0, 31.0])
    monkeypatch.setattr(EditStream, "_perplexity", lambda self: next(read))
    editor = memit(texts)
    stream = EditStream(editor, batch_size=2, check_every=2)
    with pytest.raises(EditCollapse, match=r"31 after 6 edits, it was 10.*back at edit 4") as caught:
        stream.apply(edits)
    assert caught.value.edits == 4 == len(stream.edits)
    assert stream.history["edit"].tolist() == [2, 4]
    assert len(editor.writes) == 2


def test_perplexity_is_infinite_where_the_model_gives_no_numbers(texts, edits):
    editor = memit(texts)
    stream = EditStream(editor)
    assert stream._perplexity() == pytest.approx(64, rel=0.1)
    editor.model.lm_head.weight.data.fill_(float("nan"))
    assert stream._perplexity() == float("inf")


def test_streams_refuse_what_they_cannot_do(texts, edits, tmp_path):
    editor = memit(texts)
    stream = EditStream(editor, batch_size=4)
    with pytest.raises(InputError, match="edits 0 and 12"):
        stream.apply([*edits, Edit(edits[0].prompt, edits[0].subject, "w1")])
    with pytest.raises(InputError, match=r"\.safetensors"):
        stream.save(tmp_path / "s.pt")
    stream.apply(edits[:4])
    with pytest.raises(InputError, match="written already"):
        EditStream(editor)
    with pytest.raises(InputError, match="at least 1"):
        EditStream(memit(texts), batch_size=0)


# ---------------------------------------------------------------------------------------------------------------- score


def test_scores_are_what_greedy_decoding_says(tiny, edits):
    model, tokenizer = tiny
    with torch.no_grad():
        asked = []
        for prompt in ("w4 w9 w5", "w7", "w3 w2 w1 w8 w20"):
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            out = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
            asked.append((prompt, tokenizer.decode(out[0, ids.shape[1] :])))
    assert answered(model, tokenizer, asked).all()
    wrong = [(prompt, answer.split()[0] + " w63") for prompt, answer in asked]
    assert not answered(model, tokenizer, wrong).any()
    right = Edit("w4 {} w5", "w9", asked[0][1], paraphrases=("w6 w6 {} w5",), neighbours=(asked[1], wrong[2]))
    told = score(model, tokenizer, [right, edits[0]])
    assert told.edits.loc[0, ["efficacy", "specificity"]].tolist() == [1.0, 0.5]
    assert told.efficacy == told.edits["efficacy"].mean()
    assert np.isnan(score(model, tokenizer, [Edit("w4 {} w5", "w9", "w1")]).paraphrase)
    assert harmonic([0.5, 0.25]) == pytest.approx(1 / 3)
    assert harmonic([0.5, 0.0, np.nan]) == 0


# ---------------------------------------------------------------------------------------------------------------- files


def test_files_of_edits_are_read(tmp_path):
    counterfact = {
        "requested_rewrite": {
            "prompt": "The mother tongue of {} is", "subject": "Danielle Darrieux",
            "target_new": {"str": "English"}, "target_true": {"str": "French"},
        },
        "paraphrase_prompts": ["Shayna does this. Danielle Darrieux, a native", "nothing of her"],
        "neighborhood_prompts": ["The mother tongue of Léon Blum is"],
    }  # fmt: skip
    zsre = {
        "subject": "Watts Hall", "src": "Who designed Watts Hall?", "rephrase": "Who drew Watts Hall?",
        "alt": "Ludwig Mies", "loc": "nq question: who sang it", "loc_ans": "Nas",
    }  # fmt: skip
    own = {"prompt": "The capital of Chad is", "subject": "Chad", "target_new": "Lima", "neighbours": [["a b", "c"]]}
    (tmp_path / "e.json").write_text(json.dumps([counterfact, zsre, own]))
    one, two, three = read_edits(tmp_path / "e.json")
    assert one.question == "The mother tongue of Danielle Darrieux is"
    assert one.paraphrases == ("Shayna does this. {}, a native",)
    assert one.neighbours == (("The mother tongue of Léon Blum is", "French"),)
    assert (two.prompt, two.target_new, two.neighbours) == (
        "Who designed {}?", "Ludwig Mies", (("who sang it", "Nas"),),
    )  # fmt: skip
    assert (three.prompt, three.neighbours) == ("The capital of {} is", (("a b", "c"),))
    (tmp_path / "e.jsonl").write_text(f"{json.dumps(own)}\n\n{json.dumps(own)}\n")
    assert read_edits(tmp_path / "e.jsonl") == [three, three]
    for name, text, word in (
        ("a.csv", "", ".jsonl"),
        ("a.jsonl", "", "no edits"),
        ("a.jsonl", "{", "not JSON"),
        ("a.json", '{"a": 1}', "no edits"),
        ("a.jsonl", "[1]", "row 1"),
        ("a.jsonl", json.dumps({**own, "subject": "Mali"}), "row 1.*'Mali'"),
        ("a.jsonl", json.dumps({"prompt": "x", "subject": "y"}), "row 1"),
        ("a.jsonl", json.dumps({**own, "target_new": 3}), "row 1"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=word):
            read_edits(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        read_edits(tmp_path / "none.json")
