"""Everything on a GPU gives what it gives on the CPU, and stays on the GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from fairtrial.causal_lm.capture import propagate
from fairtrial.causal_lm.hidden import cached_hidden_states, hidden_states, model_digest
from fairtrial.causal_lm.likelihood import choice_scores, next_token_log_probs, token_log_likelihoods
from fairtrial.causal_lm.loading import load
from fairtrial.causal_lm.statistics import second_moments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_moments(model, padded):
    on_gpu = copy.deepcopy(model).cuda()
    for (layout, inputs), (gpu_layout, gpu_inputs) in zip(
        propagate(model, [padded]), propagate(on_gpu, [padded]), strict=True
    ):
        expected = second_moments(layout, inputs, hessian=True)
        found = second_moments(gpu_layout, gpu_inputs, hessian=True)
        for name, statistics in found.items():
            assert statistics.hessian.is_cuda
            torch.testing.assert_close(statistics.hessian.cpu(), expected[name].hessian, rtol=1e-3, atol=1e-3)


def test_likelihoods_and_choices(model, tokenizer):
    ids, contexts, choices = [[3, 4, 5], [6, 7]], ["abc def", "gh"], [[" ab", " c"], [" j"]]
    on_gpu = copy.deepcopy(model).cuda()
    for found, expected in (
        (token_log_likelihoods(on_gpu, ids), token_log_likelihoods(model, ids)),
        (list(next_token_log_probs(on_gpu, ids)), list(next_token_log_probs(model, ids))),
        (
            [s.total for s in choice_scores(on_gpu, tokenizer, contexts, choices)],
            [s.total for s in choice_scores(model, tokenizer, contexts, choices)],
        ),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states(model, tmp_path, pooling):
    ids = [[3, 4, 5], [6, 7]]
    on_gpu = copy.deepcopy(model).cuda()
    expected = hidden_states(model, ids, [0, 1], pooling=pooling)
    for states in (
        hidden_states(on_gpu, ids, [0, 1], pooling=pooling),
        cached_hidden_states(tmp_path, on_gpu, ids, [0, 1], pooling=pooling),
        cached_hidden_states(tmp_path, on_gpu, ids, [0, 1], pooling=pooling),
    ):
        assert states.is_cuda
        torch.testing.assert_close(states.cpu(), expected, rtol=1e-3, atol=1e-3)
    assert model_digest(on_gpu) == model_digest(model)


def test_loading(llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load(tmp_path, device="cuda", dtype=torch.bfloat16)[0].device.type == "cuda"
