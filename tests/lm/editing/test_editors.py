"""Writes against their own equations and dense twins."""

import copy

import numpy as np
import pytest
import tiny_models
import torch

from fairtrial.causal_lm.likelihood import token_log_likelihoods
from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import FairtrialError, InputError
from fairtrial.lm.editing import (
    MEMIT,
    ROME,
    AlphaEdit,
    ClampIncrement,
    Edit,
    EditStream,
    FineTune,
    NormAnchor,
    Solver,
    key_covariance,
    save_covariance,
)
from fairtrial.lm.editing.editors import RIDGE
from fairtrial.lm.editing.hooks import CurrentAnchor
from fairtrial.lm.editing.rows import rows_of
from fairtrial.lm.editing.solving import _Reading, _target_log_likelihood, _target_places, solve

QUICK = Solver(steps=4, prefixes=("", "w3 w8 "))


def matrix(editor, layer=1):
    return editor._views[layer].weight.clone()


def dense_covariance(editor, layer=1):
    C = editor.covariances[layer].double()
    return C + RIDGE * C.diagonal().mean() * torch.eye(len(C), dtype=C.dtype)


def test_rome_writes_the_value_and_leaves_orthogonal_keys(tiny, texts, edits):
    editor = ROME(*tiny, layers=[1], text=texts, solver=QUICK)
    before = matrix(editor)
    k = editor.keys(edits[:1], 1)[0][0]
    v = editor.apply(edits[:1])[0]
    after = matrix(editor)
    assert (after @ k - v).norm() < 1e-4 * v.norm()
    direction = torch.linalg.solve(dense_covariance(editor), k.double())
    q = torch.randn(len(k), dtype=torch.float64)
    q -= direction * (direction @ q) / (direction @ direction)
    assert ((after - before).double() @ q).norm() < 1e-5 * (before.double() @ q).norm()


def test_memit_is_the_dense_solution(tiny, texts, edits):
    editor = MEMIT(*tiny, layers=[1], text=texts, covariance_weight=3.0, solver=QUICK)
    before = matrix(editor).double()
    K, outputs = (x.T.double() for x in editor.keys(edits[:4], 1))
    V = editor.apply(edits[:4]).T.double()
    C = dense_covariance(editor)
    dense = (V - outputs) @ K.T @ torch.linalg.inv(3 * C + K @ K.T)
    torch.testing.assert_close(matrix(editor).double() - before, dense, atol=1e-5, rtol=1e-3)


def test_the_covariances_weight_goes_from_exact_to_nothing(tiny, texts, edits):
    exact = MEMIT(*tiny, layers=[1], text=texts, covariance_weight=0.0, solver=QUICK)
    K = exact.keys(edits[:4], 1)[0]
    V = exact.apply(edits[:4])
    torch.testing.assert_close(K @ matrix(exact).T, V, atol=2e-3, rtol=1e-3)
    exact.replay([])
    none = MEMIT(*tiny, layers=[1], text=texts, covariance_weight=1e12, solver=QUICK)
    before = matrix(none)
    none.apply(edits[:4])
    torch.testing.assert_close(matrix(none), before, atol=1e-6, rtol=0)


def test_one_edit_of_memit_without_covariance_is_romes(texts, edits):
    weights = []
    for kind, how in ((ROME, {}), (MEMIT, {"covariance_weight": 0.0})):
        editor = kind(*tiny_causal_lm(layers=3), layers=[1], text=texts, solver=QUICK, **how)
        editor.apply(edits[:1])
        weights.append(matrix(editor))
    torch.testing.assert_close(*weights, atol=1e-4, rtol=1e-4)


def test_alphaedit_is_the_dense_solution_and_keeps_the_subspace(tiny, texts, edits):
    threshold = float(torch.linalg.eigvalsh(key_covariance(*tiny, texts, [1])[1])[40])
    editor = AlphaEdit(*tiny, layers=[1], text=texts, null_threshold=threshold, ridge=0.5, solver=QUICK)
    assert editor.free_ == {1: 40}
    P = (editor._bases[1] @ editor._bases[1].T).double()
    before, keys = matrix(editor).double(), []
    for batch in (edits[:3], edits[3:6]):
        start = matrix(editor).double()
        K, outputs = (x.T.double() for x in editor.keys(batch, 1))
        V = editor.apply(batch).T.double()
        X = torch.cat([*keys, K], 1)
        dense = (V - outputs) @ K.T @ P @ torch.linalg.inv(X @ X.T @ P + 0.5 * torch.eye(len(P), dtype=P.dtype))
        torch.testing.assert_close(matrix(editor).double() - start, dense, atol=1e-5, rtol=1e-3)
        keys.append(K)
    kept = torch.linalg.eigh(editor.covariances[1])[1][:, 40:].double()
    change = (matrix(editor).double() - before) @ kept
    assert change.norm() < 1e-4 * (before @ kept).norm()


def test_several_layers_share_what_is_missing(tiny, texts, edits):
    editor = MEMIT(*tiny, layers=[0, 1], text=texts, covariance_weight=0.0, solver=QUICK)
    before = [matrix(editor, layer) for layer in (0, 1)]
    values = editor.apply(edits[:2])
    assert all((matrix(editor, layer) - old).norm() > 1e-3 for layer, old in zip((0, 1), before, strict=True))
    torch.testing.assert_close(editor.keys(edits[:2], 1)[1], values, atol=5e-3, rtol=1e-2)


def test_values_solved_together_are_those_solved_alone(tiny, texts, edits):
    editor = MEMIT(*tiny, layers=[1], text=texts, solver=Solver(steps=8, prefixes=("", "w3 w8 ")))
    together = editor.solve(edits[:4])
    for i in range(4):
        for ours, alone in zip(together, editor.solve(edits[i : i + 1]), strict=True):
            torch.testing.assert_close(ours[i], alone[0], atol=1e-3, rtol=1e-3)


def test_a_value_makes_the_target_likelier_within_its_clamp(tiny, texts, edits):
    tiny[0].lm_head.weight.data.mul_(30)  # random logits are nearly equal
    solver = Solver(steps=20, clamp=1e4, weight_decay=0.0, prefixes=("",))  # and what random weights give is tiny
    editor = MEMIT(*tiny, layers=[1], text=texts, covariance_weight=0.0, solver=solver)
    place, rows = editor._place(1), rows_of(*tiny, edits[:3])
    reading = _Reading(place, rows, rows.subject, _target_places(rows))
    h, v = editor.solve(edits[:3])
    assert ((v - h).norm(dim=1) <= 1e4 * h.norm(dim=1) * (1 + 1e-5)).all()
    with torch.no_grad():
        before, solved = (_target_log_likelihood(reading, delta) for delta in (torch.zeros_like(h), v - h))
    assert (solved > before + 0.2).all()
    for row, (start, stop, at) in enumerate(zip(rows.start, rows.stop, rows.subject, strict=True)):

        def add(module, args, output, row=row, at=at):
            output[0, at] += (v - h)[row]

        hook = editor._views[1].module.register_forward_hook(add)
        (whole,) = token_log_likelihoods(tiny[0], [rows.ids[row, :stop]])  # nothing of the layers below was kept
        hook.remove()
        assert float(whole[start - 1 :].mean()) == pytest.approx(float(solved[row]), abs=1e-4)
    near = solve(place, tiny[1], edits[:3], Solver(steps=5, clamp=0.1))
    assert ((near[1] - near[0]).norm(dim=1) <= 0.1001 * near[0].norm(dim=1)).all()


def test_solving_keeps_gradients_modes_and_weights(tiny, texts, edits):
    model, _ = tiny
    model.train()
    editor = MEMIT(*tiny, layers=[1], text=texts, solver=QUICK)
    before = copy.deepcopy(model.state_dict())
    editor.solve(edits[:2])
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def other(family):
    return tiny_models.build(family, layers=3, vocab_size=64), tiny_causal_lm()[1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "phi"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_aligned_rows_over_kept_keys_read_as_each_row_alone_does(family, layer, texts):
    model, tokenizer = other(family)
    edits = [
        Edit("w4 {} w5 w6", "w20", "w11"),
        Edit("w7 w8 w9 {} w5", "w21 w22", "w12 w13"),
        Edit("{} w5", "w23", "w9"),
    ]
    editor = MEMIT(model, tokenizer, layers=[layer], text=texts)
    place, rows = editor._place(layer), rows_of(model, tokenizer, edits, prefixes=("", "w3 w8 "))
    delta = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    token = _target_log_likelihood(_Reading(place, rows, rows.subject, _target_places(rows)), delta)
    (slope,) = torch.autograd.grad(token.sum(), [delta])
    for row, (start, stop, at, edit) in enumerate(zip(rows.start, rows.stop, rows.subject, rows.edit, strict=True)):

        def add(module, args, output, at=at, edit=edit):
            return torch.cat([output[:, :at], output[:, at : at + 1] + delta[edit], output[:, at + 1 :]], 1)

        hook = editor._views[layer].module.register_forward_hook(add)
        log_p = model(rows.ids[row : row + 1, :stop]).logits[0].log_softmax(1)
        hook.remove()
        alone = log_p[start - 1 : stop - 1].gather(1, rows.ids[row, start:stop, None]).mean()
        torch.testing.assert_close(token[row], alone, atol=1e-5, rtol=1e-5)
        slope = slope - torch.autograd.grad(alone, [delta])[0]
    assert slope.abs().max() < 1e-5


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "phi"])
def test_other_families_are_edited(family, texts, edits):
    model, tokenizer = other(family)
    editor = ROME(model, tokenizer, layers=[1], text=texts, solver=QUICK)
    values = editor.apply(edits[:1])
    torch.testing.assert_close(editor.keys(edits[:1], 1)[1], values, atol=1e-3, rtol=1e-3)


def test_transposed_weights_get_the_same_edit(texts, edits):
    """The Conv1D of GPT-2 in place of an equal Linear, keys, values and change."""
    model, tokenizer = other("gpt2")
    twin = copy.deepcopy(model)
    old = twin.transformer.h[1].mlp.c_proj
    linear = torch.nn.Linear(old.nx, old.nf)
    linear.weight.data, linear.bias.data = old.weight.data.T.clone(), old.bias.data.clone()
    twin.transformer.h[1].mlp.c_proj = linear
    changes = []
    for one in (model, twin):
        editor = MEMIT(one, tokenizer, layers=[1], text=texts, solver=QUICK)
        before = matrix(editor)
        editor.apply(edits[:2])
        changes.append(matrix(editor) - before)
    torch.testing.assert_close(*changes, atol=1e-5, rtol=1e-4)
    assert changes[0].norm() > 0


def test_fine_tuning_changes_the_same_matrix_only(tiny, texts, edits):
    model, _ = tiny
    before = copy.deepcopy(model.state_dict())
    editor = FineTune(*tiny, layers=[1], text=texts, solver=Solver(steps=30))
    old = model.get_parameter("model.layers.1.mlp.down_proj.weight").clone()
    editor.apply(edits[:1])
    changed = [name for name, value in model.state_dict().items() if not torch.equal(before[name], value)]
    assert changed == ["model.layers.1.mlp.down_proj.weight"]
    editor.replay([])
    assert torch.equal(model.get_parameter(changed[0]), old)


def test_half_precision_keeps_the_small_changes(texts, edits):
    model, tokenizer = tiny_causal_lm(layers=3)
    editor = MEMIT(model.bfloat16(), tokenizer, layers=[1], text=texts, solver=QUICK)
    editor.apply(edits[:2])
    assert editor._weights[1].dtype == torch.float32
    assert torch.equal(matrix(editor), editor._weights[1].bfloat16())


def test_a_covariance_is_kept_in_a_file(tiny, texts, edits, tmp_path):
    found = key_covariance(*tiny, texts, [1])
    model, tokenizer = tiny
    keys = []
    hook = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, args: keys.append(args[0]))
    ids = tokenizer("\n\n".join(texts), return_tensors="pt").input_ids
    with torch.no_grad():
        model(ids[:, : 256 * (ids.shape[1] // 256)].view(-1, 256))
    hook.remove()
    x = torch.cat(keys).flatten(0, 1)
    torch.testing.assert_close(found[1], x.T @ x / len(x), atol=1e-5, rtol=1e-3)
    save_covariance(tmp_path / "c.safetensors", found)
    editor = ROME(*tiny, layers=[1], covariance=tmp_path / "c.safetensors")
    known = ROME(*tiny, layers=[1], covariance=editor.covariances)
    assert torch.equal(known.covariances[1], editor.covariances[1])
    assert torch.equal(editor.covariances[1], found[1])
    save_covariance(tmp_path / "small.safetensors", {1: torch.eye(3)})
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    for how, word in (
        ({"layers": [0], "covariance": tmp_path / "c.safetensors"}, "no layer 0"),
        ({"layers": [1], "covariance": tmp_path / "small.safetensors"}, r"\(3, 3\)"),
        ({"layers": [1], "covariance": tmp_path / "broken.safetensors"}, "not a readable"),
        ({"layers": [1], "covariance": tmp_path / "none.safetensors"}, "not a readable"),
        ({"layers": [1]}, "covariance="),
        ({"layers": [3], "text": texts}, "blocks 0..2"),
        ({"layers": [], "text": texts}, "blocks 0..2"),
        ({"layers": [0, 1], "text": texts}, "one layer"),
        ({"layers": [1], "text": texts, "decay": 1.0}, "decay"),
    ):
        with pytest.raises(InputError, match=word):
            ROME(*tiny, **how)
    for kind, how, word in (
        (MEMIT, {"covariance_weight": -1}, "covariance_weight=-1"),
        (AlphaEdit, {"null_threshold": 1e-30}, "they begin at"),
        (AlphaEdit, {"ridge": 0}, "ridge=0"),
    ):
        with pytest.raises(InputError, match=word):
            kind(*tiny, layers=[1], text=texts, **how)


def test_edits_that_cannot_be_made_are_named(tiny, texts):
    editor = ROME(*tiny, layers=[1], text=texts, solver=QUICK)
    good = Edit("w4 {} w5", "w9", "w11")
    for batch, word in (
        ([], "at least one"),
        (["w4"], "edit 0 is str"),
        ([good, Edit("w4 {} w5", "w9", "w12")], "edits 0 and 1"),
        ([good, Edit("w4 {}x w5", "w9", "w11")], "edit 1.*merged"),
        ([Edit(" ".join(["w4"] * 520) + " {} w5", "w9", "w11")], "window"),
    ):
        with pytest.raises(FairtrialError, match=word):
            editor.apply(batch)
    for how in (("w4 w5", "w9", "w11"), ("w4 {} {}", "w9", "w11"), ("w4 {}", "", "w11"), ("w4 {}", "w9", " ")):
        with pytest.raises(InputError):
            Edit(*how)
    for neighbours in (("w1", "w2"), (("w1",),), (("w1", "w2", "w3"),), "w1", ((1, 2),)):
        with pytest.raises(InputError, match="neighbour"):
            Edit("w4 {}", "w9", "w11", neighbours=neighbours)
    for paraphrases in ("w4 {}", (3,)):
        with pytest.raises(InputError, match=r"give lists|write \{\} once"):
            Edit("w4 {}", "w9", "w11", paraphrases=paraphrases)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (Solver, [{"steps": 0}, {"steps": 2.5}, {"steps": True}, {"lr": 0}, {"lr": NAN}, {"clamp": -1}]),
        (Solver, [{"clamp": INF}, {"kl": -1}, {"kl": NAN}, {"weight_decay": "1"}, {"prefixes": ()}]),
        (Solver, [{"prefixes": "w3"}, {"prefixes": (3,)}]),
        (NormAnchor, [{"rho": NAN}, {"rho": 0}, {"rho": -1.0}, {"anchor_prompts": []}, {"anchor_prompts": ["w4"]}]),
        (NormAnchor, [{"when": "exceeds:inf"}, {"when": "exceeds:nan"}, {"when": "exceeds:0"}]),
        (CurrentAnchor, [{"keep": NAN}, {"keep": 1}, {"keep": -0.1}]),
        (ClampIncrement, [{"max_ratio": 0}, {"max_ratio": NAN}]),
    ],
)
def test_options_that_cannot_be_are_named(made, options):
    for how in options:
        ((name, _),) = how.items()
        with pytest.raises(InputError, match=name.replace("anchor_prompts", "edit")):
            made(**how)


def test_editors_and_streams_refuse_what_they_cannot_use(tiny, texts):
    for how, word in (
        ({"layers": 1}, "layers=1: give a list"),
        ({"layers": [True]}, "whole numbers"),
        ({"layers": [1.0]}, "whole numbers"),
        ({"layers": "1"}, "whole numbers"),
        ({"hooks": NormAnchor()}, "give a list of hooks"),
        ({"hooks": [3]}, "give a list of hooks"),
        ({"hooks": None}, "give a list of hooks"),
        ({"decay": NAN}, "decay=nan"),
        ({"covariance_weight": NAN}, "covariance_weight=nan"),
        ({"covariance": 3}, "give what key_covariance returned"),
        ({"covariance": {1: torch.eye(64, dtype=torch.complex64)}}, "symmetric finite matrix"),
        ({"covariance": {1: np.zeros((64, 64))}}, "not positive"),
    ):
        with pytest.raises(InputError, match=word):
            MEMIT(*tiny, **{"layers": [1], "text": texts, "solver": QUICK, **how})
    edit = Edit("w4 {}", "w9", "w11", paraphrases=(text for text in ["{} w5"]), neighbours=[["w1", "w2"]])
    assert (edit.paraphrases, edit.neighbours) == (("{} w5",), (["w1", "w2"],))
    editor = MEMIT(*tiny, layers=[1], text=texts, hooks=(hook for hook in [NormAnchor(), CurrentAnchor()]))
    assert [type(hook) for hook in editor.hooks] == [NormAnchor, CurrentAnchor]  # one look at a generator uses it up
    with pytest.raises(InputError, match="give a causal language model"):
        MEMIT(None, tiny[1], layers=[1], text=texts)
    with pytest.raises(InputError, match=r"blocks 0\.\.2"):
        key_covariance(*tiny, texts, [9])
    editor = MEMIT(*tiny, layers=[1], text=texts, solver=QUICK)
    with pytest.raises(InputError, match="give a list of at least one"):
        editor.apply(edit for edit in [Edit("w4 {}", "w9", "w11")])
    for how in ({"batch_size": 1.5}, {"check_every": True}, {"tokens": 1}):
        ((name, value),) = how.items()
        with pytest.raises(InputError, match=f"{name}={value}"):
            EditStream(editor, **how)


def test_too_few_tokens_for_a_covariance_are_told(tiny, texts, monkeypatch):
    monkeypatch.setattr("fairtrial.lm.editing.covariance.WINDOW", 16)
    with pytest.warns(UserWarning, match=r"layer 0: 32 tokens tell little of a covariance \(64, 64\)"):
        key_covariance(*tiny, texts, [0], tokens=32)
