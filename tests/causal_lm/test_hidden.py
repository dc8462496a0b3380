from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from transformers import BertConfig, BertModel

from fairtrial.causal_lm import hidden
from fairtrial.causal_lm.hidden import cached_hidden_states, hidden_states, model_digest, token_hidden_states
from fairtrial.causal_lm.layout import ChainSpec
from fairtrial.errors import InputError, UnknownNameError

IDS = [[3, 7, 4, 250, 9], [8, 2], [5, 6, 7, 8, 9, 10, 11]]


def reference(model, text: list[int]) -> torch.Tensor:
    """(layers, T, d) of one text alone, by transformers' own recording; the last is taken before the final norm."""
    last = []
    blocks = model.base_model.h if model.config.model_type == "gpt2" else model.base_model.layers
    hook = blocks[-1].register_forward_hook(lambda b, a, out: last.append(out))
    with torch.no_grad():
        recorded = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    return torch.cat([*recorded[1:-1], *last])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "gemma3_text", "mixtral"])
def test_states_are_the_residual_stream_after_each_block(tiny, kind):
    model = tiny(kind)
    found = token_hidden_states(model, IDS, [0, 1])
    for states, text in zip(found, IDS, strict=True):
        torch.testing.assert_close(states, reference(model, text).transpose(0, 1), rtol=1e-4, atol=1e-4)


def test_pooled_states_are_the_last_or_the_mean_of_those_of_the_tokens(llama):
    tokens = token_hidden_states(llama, IDS, [1, 0])
    torch.testing.assert_close(hidden_states(llama, IDS, [1, 0]), torch.stack([states[-1] for states in tokens]))
    mean = hidden_states(llama, IDS, [1, 0], pooling="mean")
    torch.testing.assert_close(mean, torch.stack([states[1:].mean(0) for states in tokens]))
    mean = hidden_states(llama, IDS, [1, 0], pooling="mean", ignore_ids=[7, 10])
    kept = ([2, 3, 4], [1], [1, 3, 4, 6])
    torch.testing.assert_close(mean, torch.stack([s[rows].mean(0) for s, rows in zip(tokens, kept, strict=True)]))


def test_batch_size_does_not_change_the_states(model):
    together = hidden_states(model, IDS, [0, 1])
    alone = torch.cat([hidden_states(model, [text], [0, 1]) for text in IDS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden_states(model, IDS, [0, 1], batch_tokens=1), alone, rtol=1e-4, atol=1e-4)


def test_layers_come_in_the_order_asked_for_and_count_from_the_end(llama):
    a, b = hidden_states(llama, IDS, [1, 0]), hidden_states(llama, IDS, [0, -1])
    assert torch.equal(a, b.flip(1))


def test_the_pass_ends_after_the_deepest_layer_wanted(llama):
    ran = []
    llama.model.layers[1].register_forward_hook(lambda *args: ran.append(1))
    hidden_states(llama, IDS, [0])
    assert not ran
    assert not llama.model.layers[0]._forward_hooks


def test_states_keep_the_dtype_and_are_ordinary_tensors(llama):
    states = hidden_states(llama.bfloat16(), IDS, [0], pooling="mean")
    assert states.dtype == torch.bfloat16
    assert not states.is_inference()
    assert not states.requires_grad


def test_an_encoder_sees_no_padding():
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24
    )
    model, spec = BertModel(config), ChainSpec("encoder.layer", None, ())
    together = hidden_states(model, IDS, [1], pooling="mean", spec=spec)
    alone = torch.cat([hidden_states(model, [text], [1], pooling="mean", spec=spec) for text in IDS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- cache


def test_states_are_computed_once(llama, tmp_path, monkeypatch):
    expected = hidden_states(llama, IDS, [0, 1])
    first = cached_hidden_states(tmp_path, llama, IDS, [0, 1])
    monkeypatch.setattr(hidden, "hidden_states", None)
    second = cached_hidden_states(tmp_path, llama, IDS, [0, 1], digest=model_digest(llama))
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_another_model_text_layer_or_pooling_is_computed_anew(llama, tmp_path):
    ask = partial(cached_hidden_states, tmp_path)
    answers = [
        ask(llama, IDS, [0]),
        ask(llama, IDS[:2], [0]),
        ask(llama, IDS, [1]),
        ask(llama, IDS, [0], pooling="mean"),
    ]
    # The same tokens cut otherwise are other texts.
    answers.append(ask(llama, [IDS[0] + IDS[1], IDS[2]], [0]))
    llama.model.layers[0].mlp.down_proj.weight.data[0, 0] += 1e-3
    answers.append(ask(llama, IDS, [0]))
    assert len(list(tmp_path.glob("*.safetensors"))) == len(answers)
    assert torch.equal(answers[-1], hidden_states(llama, IDS, [0]))


ASK = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from fairtrial.causal_lm import hidden

torch.manual_seed(0)
config = LlamaConfig(vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                     bos_token_id=0, eos_token_id=1)
compute = hidden.hidden_states
hidden.hidden_states = lambda *args, **kwargs: print("computed") or compute(*args, **kwargs)
print(hidden.cached_hidden_states(sys.argv[1], AutoModelForCausalLM.from_config(config), [[3, 4], [5]], [0]).tolist())
"""


@pytest.mark.slow
def test_two_processes_compute_once(tmp_path):
    processes = [
        subprocess.Popen([sys.executable, "-c", ASK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    first, second = (process.communicate(timeout=120)[0].splitlines() for process in processes)
    assert first[-1] == second[-1]
    assert sorted(map(len, (first, second))) == [1, 2]  # one of them computed


def test_the_digest_depends_on_every_weight_and_not_on_where_it_came_from(tiny, tmp_path):
    model = tiny("llama")
    digest = model_digest(model)
    assert digest == model_digest(tiny("llama"))
    model.save_pretrained(tmp_path)
    assert digest == model_digest(type(model).from_pretrained(tmp_path))
    assert digest != model_digest(tiny("llama", rms_norm_eps=1e-3))
    for parameter in model.parameters():
        parameter.data.view(-1)[-1] += 1
        assert model_digest(model) != digest
        digest = model_digest(model)


# ---------------------------------------------------------------- bad input


def test_a_layer_out_of_range_is_refused(llama):
    for layer in (2, -3):
        with pytest.raises(InputError, match=f"no layer {layer}: the model has 2"):
            hidden_states(llama, IDS, [0, layer])
    with pytest.raises(InputError, match="no layer is asked for"):
        hidden_states(llama, IDS, [])


def test_states_that_are_not_finite_name_the_text(llama):
    llama.get_input_embeddings().weight.data[250] = torch.nan
    with pytest.raises(InputError, match="text 0 are not finite"):
        hidden_states(llama, IDS, [0])


def test_a_mean_over_nothing_is_refused(llama):
    with pytest.raises(InputError, match="text 1 has no token"):
        hidden_states(llama, IDS, [0], pooling="mean", ignore_ids=[2])


def test_an_unknown_pooling_lists_those_there_are(llama):
    with pytest.raises(UnknownNameError, match="Known: last, mean"):
        hidden_states(llama, IDS, [0], pooling="max")
