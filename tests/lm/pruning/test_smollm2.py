"""The whole way on a real model, where its sample has been fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fairtrial.causal_lm.layout import block_layouts
from fairtrial.causal_lm.loading import load
from fairtrial.causal_lm.windows import windows
from fairtrial.data.samples import sample_path
from fairtrial.data.text import wikipedia_articles
from fairtrial.errors import MissingSampleError
from fairtrial.lm.pruning import BlockGraph, FiedlerPrune, OneShotPrune, load_packed, save_packed
from fairtrial.lm.pruning.graph import fiedler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, torch.Tensor]:
    """The model from its GGUF file, and three windows of text."""
    try:
        model, tokenizer = load(sample_path("smollm2-135m"))
        return model, windows(tokenizer, wikipedia_articles()[:3], 384).ids[:3]
    except MissingSampleError as error:
        pytest.skip(str(error))


def test_fiedler_vectors_of_a_real_mlp_spread_and_combinatorial_ones_do_not(smollm2: Any) -> None:
    layouts = block_layouts(smollm2[0])
    for depth in (0, 10, 29):
        matrix = BlockGraph.from_block(layouts[depth]).graphs["mlp"].matrix()
        spread, localised = fiedler(matrix), fiedler(matrix, laplacian="combinatorial")
        assert 0 < spread.value < 1
        assert spread.participation > 3 > localised.participation
        assert localised.value == pytest.approx(min(float(matrix.sum(dim).min()) for dim in (0, 1)), rel=0.01)


def test_block_lanczos_agrees_with_eigh_on_a_real_block(smollm2: Any) -> None:
    graph = BlockGraph.from_block(block_layouts(smollm2[0])[10])
    gram, krylov = graph.fiedler(solver="gram"), graph.fiedler(solver="krylov")
    for name in gram:
        assert krylov[name].value == pytest.approx(gram[name].value, abs=1e-4)
        exact, found = gram[name].sensitivity(), krylov[name].sensitivity()
        assert float((found - exact).norm() / exact.norm()) < 1e-4


def test_a_gguf_model_pruned_saved_and_reloaded_gives_identical_logits(smollm2: Any, tmp_path: Path) -> None:
    model, ids = smollm2
    report = FiedlerPrune(sparsity=0.5).prune(model, None, ids)
    assert report.sparsity == 0.5
    assert 0.55 < report.densities["self_attn.v_proj"].mean() < 0.8  # the only bridge from X to O
    model.save_pretrained(tmp_path / "dense")
    size = save_packed(model, tmp_path / "packed")
    assert size < 0.7 * sum(file.stat().st_size for file in (tmp_path / "dense").glob("*.safetensors"))
    with torch.no_grad():
        logits = model(ids).logits
        for again in (AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), load_packed(tmp_path / "packed")):
            assert torch.equal(again(ids).logits, logits)
    with pytest.warns(UserWarning, match="sparse already: 50.0%"):
        OneShotPrune("magnitude", group="block").prune(model, None, ids)
