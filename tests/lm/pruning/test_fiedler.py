from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairtrial.causal_lm.capture import propagate
from fairtrial.causal_lm.layout import AttentionSpec, ChainSpec, MLPSpec, block_layouts
from fairtrial.causal_lm.statistics import second_moments
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.pruning import (
    BlockGraph,
    FiedlerInverted,
    FiedlerPermuted,
    FiedlerPrune,
    FiedlerShuffled,
    Magnitude,
    OneShotPrune,
    RowScaled,
    SparseGPT,
    Wanda,
    mask_overlap,
)
from fairtrial.lm.pruning.baselines import METRICS


def matrices(model: Any) -> dict[str, torch.Tensor]:
    return {f"{layout.name}.{view.name}": view.weight for layout in block_layouts(model) for view in layout}


def copy_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in matrices(model).items()}


def sparsity_of(model: Any) -> float:
    weights = matrices(model).values()
    return sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)


# ---------------------------------------------------------------- prune, exact zeros, save, reload


@pytest.mark.parametrize("pruner", [FiedlerPrune(sparsity=0.5), FiedlerPrune(SparseGPT(), pattern="2:4")])
def test_prune_save_reload_gives_exact_zeros_and_identical_logits(
    model: Any, ids: torch.Tensor, tmp_path: Path, pruner: FiedlerPrune
) -> None:
    report = pruner.prune(model, None, ids)
    for layout in block_layouts(model):
        zeros = sum(int((view.weight == 0).sum()) for view in layout)
        assert zeros == math.floor(0.5 * sum(view.weight.numel() for view in layout))
    for name, weight in matrices(model).items():
        assert torch.equal(weight != 0, report.mask(name))
        if pruner.pattern:
            assert ((weight == 0).unflatten(1, (-1, 4)).sum(2) == 2).all()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
    assert sparsity_of(again) == pytest.approx(report.sparsity) == 0.5


@pytest.mark.parametrize("name", sorted(METRICS))
@pytest.mark.parametrize("group", ["row", "layer", "block"])
def test_every_metric_prunes_exactly_in_every_group(llama: Any, ids: torch.Tensor, name: str, group: str) -> None:
    OneShotPrune(name, sparsity=0.6, group=group).prune(llama, None, ids)
    for layout in block_layouts(llama):
        views = list(layout)
        if group == "row":
            for view in views:
                assert ((view.weight == 0).sum(1) == math.floor(0.6 * view.in_features)).all()
        elif group == "layer":
            for view in views:
                assert int((view.weight == 0).sum()) == math.floor(0.6 * view.weight.numel())
        else:
            total = sum(view.weight.numel() for view in views)
            assert sum(int((view.weight == 0).sum()) for view in views) == math.floor(0.6 * total)


def test_embeddings_head_norms_and_routers_are_not_pruned(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("mixtral")
    covered = {id(view.parameter) for layout in block_layouts(model) for view in layout}
    others = {n: p.detach().clone() for n, p in model.named_parameters() if id(p) not in covered}
    assert any("gate" in name for name in others)
    FiedlerPrune(sparsity=0.5).prune(model, None, ids)
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in others.items())


# ---------------------------------------------------------------- the criterion


def test_alpha_zero_in_rows_is_wandas_mask_bit_for_bit(tiny: Any, ids: torch.Tensor) -> None:
    a, b = tiny("llama"), tiny("llama")
    FiedlerPrune(alpha=0, group="row").prune(a, None, ids)
    OneShotPrune(Wanda()).prune(b, None, ids)
    assert all(torch.equal(w, matrices(b)[name]) for name, w in matrices(a).items())


def test_wanda_is_its_formula(tiny: Any, ids: torch.Tensor) -> None:
    model, dense = tiny("llama"), tiny("llama")
    OneShotPrune(Wanda(), sparsity=0.5).prune(model, None, ids)
    pruned = matrices(model)
    for layout, inputs in propagate(dense, ids.split(1)):
        stats = second_moments(layout, inputs, keep=True)
        for view in layout:
            scores = view.weight.abs() * stats[view.name].x_norm
            zeros = scores.argsort(dim=1, stable=True)[:, : view.in_features // 2]
            expected = view.weight.scatter(1, zeros, 0.0)
            assert torch.equal(pruned[f"{layout.name}.{view.name}"], expected)


@pytest.mark.parametrize("alpha", [0.0, 0.15])
def test_block_score_is_local_importance_plus_alpha_times_contribution(
    tiny: Any, ids: torch.Tensor, alpha: float
) -> None:
    """With Wanda and activation edges S'(1 + alpha q) = S' + alpha c / mean(c), one threshold a block."""
    model, dense = tiny("llama"), tiny("llama")
    FiedlerPrune(alpha=alpha, sparsity=0.5).prune(model, None, ids)
    pruned = matrices(model)
    for layout, inputs in propagate(dense, ids.split(1)):
        stats = second_moments(layout, inputs, keep=True)
        block = BlockGraph.from_block(layout, stats)
        contributions = block.contributions()
        scores = {}
        for part, graph in block.graphs.items():
            mean = block.fiedler()[part].value / graph.n_weights
            for name in graph.edges:
                local = layout[name].weight.abs() * stats[name].x_norm
                scores[name] = local / local.mean() + alpha * contributions[name] / mean
        threshold = torch.cat([s.flatten() for s in scores.values()]).sort().values
        cut = threshold[math.floor(0.5 * len(threshold)) - 1]
        for name, s in scores.items():
            zero = pruned[f"{layout.name}.{name}"] == 0
            clear = (s / cut - 1).abs() > 1e-4  # the two ways round differently
            assert torch.equal(zero[clear], (s <= cut)[clear])


def test_sparsity_zero_leaves_the_weights_bitwise_equal(llama: Any, ids: torch.Tensor) -> None:
    before = copy_of(llama)
    report = FiedlerPrune(sparsity=0).prune(llama, None, ids)
    assert all(torch.equal(w, before[name]) for name, w in matrices(llama).items())
    assert report.sparsity == 0
    assert (report.frame.block_error == 0).all()
    assert (report.frame.lambda2_after == report.frame.lambda2_before).all()


@pytest.mark.parametrize(
    "options",
    [
        {"modes": "all", "combine": "power", "group": "row"},
        {"modes": "all", "combine": "power", "pattern": "2:4", "edge": "magnitude"},
        {"modes": 3, "combine": "saturating"},
        {"sequential": True},
        {"rounds": 2, "sparsity": 0.7},
        {"edge": "magnitude", "intra": Magnitude(), "group": "layer"},
        {"intra": SparseGPT(), "group": "row"},
    ],
    ids=str,
)
def test_each_variant_prunes_to_its_sparsity_by_another_mask_than_the_metric(
    tiny: Any, ids: torch.Tensor, options: dict[str, Any]
) -> None:
    method, base = tiny("llama"), tiny("llama")
    report = FiedlerPrune(**options).prune(method, None, ids)
    common = {k: v for k, v in options.items() if k in ("intra", "sparsity", "group", "pattern", "sequential")}
    metric = OneShotPrune(**{"group": "block", **common}).prune(base, None, ids)
    assert report.sparsity == pytest.approx(options.get("sparsity", 0.5), abs=0.03)
    assert 0.3 < mask_overlap(report, metric).mean() < 1


def test_sequential_calibrates_on_the_pruned_model(tiny: Any, ids: torch.Tensor) -> None:
    one, two = tiny("llama"), tiny("llama")
    OneShotPrune(sparsity=0.7).prune(one, None, ids)
    OneShotPrune(sparsity=0.7, sequential=True).prune(two, None, ids)
    first, second = (matrices(m) for m in (one, two))
    assert all(torch.equal(first[n], second[n]) for n in first if "layers.0" in n)
    assert not all(torch.equal(first[n], second[n]) for n in first if "layers.1" in n)


def test_default_alpha_rises_at_seventy_percent() -> None:
    def alpha(**options: Any) -> float:
        return FiedlerPrune(**options)._alpha

    assert (alpha(), alpha(sparsity=0.7), alpha(sparsity=0.7, pattern="2:4"), alpha(alpha=0.2)) == (
        0.15,
        0.3,
        0.15,
        0.2,
    )


def test_auto_takes_the_candidate_of_lowest_loss_on_the_last_quarter(
    tiny: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def loss(model: Any, held_out: torch.Tensor) -> float:
        seen.append(held_out)
        return [3.0, 2.0, 1.0, 4.0][len(seen) - 1]  # of the metric alone, .05, .15, .3

    monkeypatch.setattr("fairtrial.lm.pruning.fiedler.mean_nll", loss)
    auto, fixed = tiny("llama"), tiny("llama")
    report = FiedlerPrune(alpha="auto").prune(auto, None, ids)
    FiedlerPrune(alpha=0.15).prune(fixed, None, ids)
    assert (report.frame.alpha == 0.15).all()
    assert all(torch.equal(held_out, ids[3:]) for held_out in seen)
    assert all(torch.equal(w, matrices(fixed)[name]) for name, w in matrices(auto).items())


def test_auto_may_decline_the_graph(tiny: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([1.0, 2.0, 2.0, 2.0])
    monkeypatch.setattr("fairtrial.lm.pruning.fiedler.mean_nll", lambda model, ids: next(losses))
    auto, wanda = tiny("llama"), tiny("llama")
    assert (FiedlerPrune(alpha="auto").prune(auto, None, ids).frame.alpha == 0).all()
    OneShotPrune("wanda").prune(wanda, None, ids)
    assert all(torch.equal(w, matrices(wanda)[name]) for name, w in matrices(auto).items())


# ---------------------------------------------------------------- controls


def test_controls_keep_the_values_of_q_and_lose_their_place(llama: Any, ids: torch.Tensor) -> None:
    graph = BlockGraph.from_block(block_layouts(llama)[0])
    spectra = graph.fiedler()
    q = dict(FiedlerPrune()._sensitivities(graph, spectra))
    permuted = dict(FiedlerPermuted(seed=1)._sensitivities(graph, spectra))
    shuffled = dict(FiedlerShuffled(seed=1)._sensitivities(graph, spectra))
    for name in q:
        assert not torch.equal(permuted[name], q[name])
        assert torch.allclose(permuted[name].flatten().sort().values, q[name].flatten().sort().values)
        assert torch.allclose(permuted[name].mean(1).sort().values, q[name].mean(1).sort().values)  # rows stay whole
        assert torch.equal(shuffled[name].sort(1).values, q[name].sort(1).values)
    method, inverted = FiedlerPrune(), FiedlerInverted()
    down = dict(inverted._factors(graph, spectra))
    assert all(torch.allclose(down[name] * f, torch.ones_like(f)) for name, f in method._factors(graph, spectra))


def test_controls_prune_the_same_count_by_another_mask(tiny: Any, ids: torch.Tensor) -> None:
    pruners = [
        FiedlerPrune(),
        FiedlerPermuted(RowScaled(Wanda())),
        FiedlerShuffled(),
        FiedlerInverted(),
        OneShotPrune(RowScaled(Wanda()), group="block"),
    ]
    reports = [pruner.prune(tiny("llama"), None, ids) for pruner in pruners]
    assert all(report.sparsity == 0.5 for report in reports)
    assert all(mask_overlap(reports[0], report).mean() < 0.95 for report in reports[1:])


# ---------------------------------------------------------------- the report


def test_report_measures_every_graph_of_every_layer(llama: Any, ids: torch.Tensor) -> None:
    report = FiedlerPrune(sparsity=0.5).prune(llama, None, ids)
    frame = report.frame
    assert list(zip(frame.layer, frame.graph, strict=True)) == [
        (0, "attention"), (0, "mlp"), (1, "attention"), (1, "mlp")
    ]  # fmt: skip
    assert (frame.lambda2_before > 0).all()
    assert (frame.participation >= 1).all()
    assert (frame.block_error > 0).all()
    assert report.lambda2_retained > 0
    assert report.densities.shape == (2, 7)
    for name, weight in matrices(llama).items():
        layer, matrix = name.removeprefix("model.layers.").split(".", 1)
        assert report.densities.loc[int(layer), matrix] == pytest.approx(float((weight != 0).float().mean()))
    assert set(report.to_dict()) == {"sparsity", "seconds", "graphs", "densities"}


def test_lambda2_retained_is_the_raw_mean_ratio_of_the_graphs_connected_before(llama: Any, ids: torch.Tensor) -> None:
    report = OneShotPrune("magnitude", connectivity=True).prune(llama, None, ids)
    report.frame["isolated"] = [1, 0, 0, 0]
    ratio = report.frame.lambda2_after / report.frame.lambda2_before
    assert report.lambda2_retained == pytest.approx(ratio.mean())
    report.frame.loc[0, "lambda2_before"] = 0.0
    assert report.lambda2_retained == pytest.approx(ratio[1:].mean())


def test_the_report_shows_sparsity_and_count_in_one_line(llama: Any, ids: torch.Tensor) -> None:
    assert repr(OneShotPrune().prune(llama, None, ids)) == "PruneReport(sparsity=0.5, matrices=14)"


@pytest.mark.parametrize("pruner", [OneShotPrune(), FiedlerPrune(), OneShotPrune(SparseGPT())], ids=str)
def test_weights_that_were_zero_already_count_as_pruned(llama: Any, ids: torch.Tensor, pruner: OneShotPrune) -> None:
    OneShotPrune("magnitude", sparsity=0.6, group="block").prune(llama, None, ids)
    zeros = {name: weight == 0 for name, weight in matrices(llama).items()}
    share = sum(int(z.sum()) for z in zeros.values()) / sum(z.numel() for z in zeros.values())
    with pytest.warns(UserWarning, match="sparse already"):
        report = pruner.prune(llama, None, ids)
    assert report.sparsity >= share > 0.59
    for name, weight in matrices(llama).items():
        assert torch.equal(report.mask(name.removesuffix(".weight")), weight != 0)
    assert report.frame.sparsity.mean() > 0.55


def test_token_ids_of_another_vocabulary_are_refused_before_any_work(llama: Any, ids: torch.Tensor) -> None:
    before = copy_of(llama)
    for wrong in (ids + 48, ids - 48):
        with pytest.raises(InputError, match=r"outside 0\.\.47"):
            FiedlerPrune().prune(llama, None, wrong)
    assert all(torch.equal(w, before[name]) for name, w in matrices(llama).items())


def test_auto_shows_one_progress_bar_over_all_its_runs(
    llama: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[tuple[str, int]] = []
    steps: list[int] = []

    @contextmanager
    def bar(text: str, total: int, *, shown: bool) -> Iterator[Callable[[], object]]:
        bars.append((text, total))
        yield lambda: steps.append(1)

    monkeypatch.setattr("fairtrial.lm.pruning.fiedler.progress_bar", bar)
    FiedlerPrune(alpha="auto").prune(llama, None, ids, progress=True)
    assert bars == [("Pruning 2 blocks 5 times", 10)]
    assert len(steps) == 10


def test_progress_goes_to_standard_error_alone(llama: Any, ids: torch.Tensor, capsys: Any) -> None:
    OneShotPrune().prune(llama, None, ids, progress=True)
    shown = capsys.readouterr()
    assert "Pruning 2 blocks" in shown.err
    assert not shown.out


def test_mask_overlap_is_the_jaccard_index_of_the_zeros(tiny: Any, ids: torch.Tensor) -> None:
    a, b = (OneShotPrune("wanda").prune(tiny("llama"), None, part) for part in ids.split(2))
    overlap = mask_overlap(a, b)
    name = a.matrices[3]
    zero_a, zero_b = ~a.mask(name), ~b.mask(name)
    assert overlap[name] == pytest.approx(float((zero_a & zero_b).sum() / (zero_a | zero_b).sum()))
    assert (mask_overlap(a, a) == 1).all()
    with pytest.raises(InputError, match="same model"):
        mask_overlap(a, OneShotPrune("wanda").prune(tiny("gpt2"), None, ids))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.0}, r"\[0, 1\)"),
        ({"pattern": "2/4"}, "pattern"),
        ({"group": "column"}, "block, layer, row"),
        ({"combine": "product"}, "linear, power, saturating"),
        ({"laplacian": "random-walk"}, "combinatorial, normalised"),
        ({"edge": "gradient"}, "activation, magnitude"),
        ({"intra": "wonda"}, "did you mean 'wanda'"),
        ({"alpha": "automatic"}, "alpha must be"),
        ({"alpha": -1.0}, "alpha must be"),
        ({"modes": 0}, "modes must be"),
        ({"modes": "all"}, "row or an N:M group"),
        ({"combine": "power"}, "modes='all'"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": 2, "pattern": "2:4"}, "rounds"),
    ],
)
def test_bad_options_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=message):
        FiedlerPrune(**options)


def test_a_pattern_that_does_not_fit_names_the_layer(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("llama", intermediate_size=22)
    before = copy_of(model)
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.down_proj has 22 inputs, not a multiple of 4"):
        FiedlerPrune(pattern="2:4").prune(model, None, ids)
    assert all(torch.equal(w, before[name]) for name, w in matrices(model).items())


class WordTokenizer:
    """Letters as tokens, as far as ``windows`` asks."""

    def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
        return {"input_ids": [[ord(c) % 48 for c in t] for t in text] if isinstance(text, list) else [1] * len(text)}


def test_calibration_shorter_than_one_window_is_refused(llama: Any) -> None:
    with pytest.raises(InputError, match="less than one window"):
        FiedlerPrune(window=32).prune(llama, WordTokenizer(), ["too short"])


def test_texts_are_cut_into_windows(llama: Any) -> None:
    report = FiedlerPrune(window=8).prune(llama, WordTokenizer(), ["a text of some length", "and another one"])
    assert report.sparsity == 0.5


def test_windows_beyond_the_context_and_ids_of_the_wrong_kind_are_refused(llama: Any, ids: torch.Tensor) -> None:
    with pytest.raises(InputError, match="context of 64"):
        FiedlerPrune().prune(llama, None, torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(InputError, match=r"\(n, window\)"):
        FiedlerPrune().prune(llama, None, ids[0])
    with pytest.raises(InputError, match="4 windows"):
        FiedlerPrune(alpha="auto").prune(llama, None, ids[:3])


def test_an_unknown_architecture_prints_its_tree_and_how_to_declare_it(ids: torch.Tensor) -> None:
    with pytest.raises(InputError, match="ChainSpec"):
        FiedlerPrune().prune(torch.nn.Sequential(torch.nn.Linear(4, 4)), None, ids)


def test_a_chain_spec_of_ones_own_works(tiny: Any, ids: torch.Tensor) -> None:
    model = tiny("llama")
    model.config.model_type = "somebodys-llama"
    names = (f"self_attn.{role}_proj" for role in "qkvo")
    spec = ChainSpec(
        "layers", AttentionSpec(*names), (MLPSpec(gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"),)
    )
    with pytest.raises(InputError, match="somebodys-llama"):
        FiedlerPrune().prune(model, None, ids)
    assert FiedlerPrune(spec=spec).prune(model, None, ids).sparsity == 0.5


def test_quantised_linears_ask_for_dequantising(llama: Any, ids: torch.Tensor) -> None:
    layer = llama.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(InputError, match="dequantize"):
        FiedlerPrune().prune(llama, None, ids)


def test_activations_that_are_not_finite_name_the_layer_and_the_text(llama: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        llama.model.embed_tokens.weight[ids[2, 3]] = float("nan")
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.q_proj.*text [02]"):
        FiedlerPrune().prune(llama, None, ids)


def test_tied_and_meta_weights_are_refused(tiny: Any, ids: torch.Tensor) -> None:
    tied = tiny("llama")
    tied.model.layers[0].mlp.gate_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    with pytest.raises(InputError, match="tied"):
        FiedlerPrune().prune(tied, None, ids)
    with pytest.raises(InputError, match="no data"):
        FiedlerPrune().prune(tiny("llama").to("meta"), None, ids)


def test_a_sparse_model_is_reported_and_its_zeros_count_as_pruned(llama: Any, ids: torch.Tensor) -> None:
    OneShotPrune("wanda", sparsity=0.3).prune(llama, None, ids)
    zeros = {name: weight == 0 for name, weight in matrices(llama).items()}
    with pytest.warns(UserWarning, match="sparse already: 2"):
        OneShotPrune("magnitude", sparsity=0.5).prune(llama, None, ids)
    for name, weight in matrices(llama).items():
        assert (weight[zeros[name]] == 0).all()
        assert ((weight == 0).sum(1) == math.floor(0.5 * weight.shape[1])).all()


def test_experts_no_token_reached_are_pruned_by_magnitude_and_named(tiny: Any) -> None:
    model = tiny("mixtral", num_local_experts=8, num_experts_per_tok=1)
    with pytest.warns(UserWarning, match=r"no calibration token reached mlp\.experts\.\d"):
        report = FiedlerPrune(sparsity=0.5).prune(model, None, torch.full((1, 3), 5))
    assert report.sparsity == 0.5
    assert not report.frame.lambda2_before.isna().any()


def test_the_combinatorial_laplacian_warns_when_its_vector_sits_on_one_channel(llama: Any, ids: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="sits on"):
        FiedlerPrune(laplacian="combinatorial").prune(llama, None, ids)


def test_a_failed_check_warns_of_nothing_and_training_mode_is_restored(llama: Any, ids: torch.Tensor) -> None:
    llama.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FiedlerPrune().prune(llama, None, ids)
    assert llama.training
