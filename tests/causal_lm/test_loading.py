from __future__ import annotations

import json
import shutil

import gguf
import numpy as np
import pytest
import torch

from fairtrial.causal_lm.likelihood import mean_nll
from fairtrial.causal_lm.loading import check_device, context_length, forget_quantization, load, stored_as
from fairtrial.errors import InputError


@pytest.fixture
def folder(llama, tokenizer, tmp_path):
    llama.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory, tokenizer):
    """A one-block Llama with Q4_1 weights, as llama.cpp writes it."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    d, m, heads, kv, vocabulary = 64, 96, 4, 2, tokenizer.get_vocab()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(d)
    writer.add_block_count(1)
    writer.add_feed_forward_length(m)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(d // heads)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.NORMAL] * (len(tokens) - 2))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    draw = np.random.default_rng(0)
    shapes = {"attn_q": (d, d), "attn_k": (d // 2, d), "attn_v": (d // 2, d), "attn_output": (d, d)}
    shapes |= {"ffn_gate": (m, d), "ffn_up": (m, d), "ffn_down": (d, m)}
    names = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()} | {"token_embd.weight": (len(tokens), d)}
    for name, shape in names.items():
        weight = draw.normal(size=shape).astype(np.float32) / 8
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        writer.add_tensor(name, np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def logits(model, text=(5, 9, 60, 7)):
    with torch.no_grad():
        return model(torch.tensor([text])).logits


def test_a_saved_model_is_loaded_as_it_was(folder, llama):
    model, tokenizer = load(folder)
    assert torch.equal(logits(model), logits(llama))
    assert not model.training
    assert len(tokenizer) == 300
    assert tokenizer("abc")["input_ids"]


def test_the_dtype_is_as_saved_or_as_asked_for(folder, llama):
    assert load(folder)[0].dtype == torch.float32
    assert load(folder, dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    llama.bfloat16().save_pretrained(folder)
    assert load(folder)[0].dtype == torch.bfloat16


def test_a_gguf_model_saves_and_reloads_with_identical_logits(tiny_gguf, tmp_path):
    model, tokenizer = load(tiny_gguf)
    assert model.dtype == torch.float32
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = load(tmp_path)
    assert torch.equal(logits(again), logits(model))
    text = "abc ghij, def"
    assert tokenizer_again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_how_the_weights_were_stored_is_read_from_a_gguf_file_alone(tiny_gguf, folder):
    assert stored_as(tiny_gguf) == stored_as(tiny_gguf.parent) == "Q4_1"
    assert stored_as(folder) is None


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_the_context_length_is_read_from_the_config(tmp_path, name):
    assert context_length(tmp_path) is None
    for content, length in ((json.dumps({name: 77}), 77), ("{}", None), ("[]", None), ("{", None)):
        (tmp_path / "config.json").write_text(content)
        assert context_length(tmp_path) == length


@pytest.mark.parametrize("device", ["foo", "cuda:99", "meta", "vulkan", "hpu", ""])
def test_a_device_that_is_not_here_is_refused_in_one_line(device):
    check_device("cpu")
    with pytest.raises(InputError, match=f"device={device}: .*such as cpu$") as refused:
        check_device(device)
    assert len(str(refused.value)) < 300


def test_a_folder_that_holds_a_gguf_file_is_that_file(tiny_gguf):
    assert torch.equal(logits(load(tiny_gguf.parent)[0]), logits(load(tiny_gguf)[0]))


def test_the_cached_copy_of_a_gguf_model_is_the_same_model(tiny_gguf, tmp_path, monkeypatch):
    direct = logits(load(tiny_gguf)[0])
    first, _ = load(tiny_gguf, cache=tmp_path / "cache")
    monkeypatch.setattr("fairtrial.causal_lm.loading._from_gguf", None)  # from now on only the copy will do
    second, tokenizer = load(tiny_gguf, cache=tmp_path / "cache")
    assert torch.equal(logits(first), direct)
    assert torch.equal(logits(second), direct)
    assert tokenizer.decode(tokenizer("abc j")["input_ids"]) == "abc j"
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [
        path.name for path in (tmp_path / "cache").glob("tiny-*-float32-transformers-*") if path.is_dir()
    ]


def test_an_interrupted_copy_leaves_nothing(tiny_gguf, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    with pytest.raises(KeyboardInterrupt):
        load(tiny_gguf, cache=tmp_path)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_loading_is_silent(folder, tiny_gguf, tmp_path, capfd):
    load(folder)
    load(tiny_gguf, cache=tmp_path)
    out, err = capfd.readouterr()
    assert out == err == ""


def test_forgetting_an_unquantised_model_changes_nothing(llama):
    before = logits(llama)
    forget_quantization(llama)
    assert torch.equal(logits(llama), before)


@pytest.mark.slow
def test_smollm2_round_trip(smollm2, tmp_path):
    """GGUF-loaded model: save, reload: identical logits, and it is the model it should be."""
    model, tokenizer = load(smollm2)
    text = "The capital of France is Paris, and the capital of Italy is Rome."
    ids = [tokenizer(text)["input_ids"]]
    assert mean_nll(model, ids) < 3.0
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = load(tmp_path)
    assert tokenizer_again(text)["input_ids"] == ids[0]
    assert torch.equal(logits(again, ids[0]), logits(model, ids[0]))
    assert tokenizer_again.chat_template == tokenizer.chat_template


# ---------------------------------------------------------------- bad input


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file or folder; models are read from this machine"):
        load("HuggingFaceTB/SmolLM2-135M")
    with pytest.raises(InputError, match=r"not a model: it has no config\.json"):
        load(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match="not a GGUF file"):
        load(tmp_path / "model.gguf")


def test_a_damaged_gguf_is_refused(tiny_gguf, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(tiny_gguf.read_bytes()[:2000])
    with pytest.raises(InputError, match="cannot load it"):
        load(tmp_path / "cut.gguf")


def test_damaged_weights_are_refused(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(InputError, match="cannot load it"):
        load(folder)


def test_several_gguf_files_are_listed(tiny_gguf, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(tiny_gguf, tmp_path / name)
    with pytest.raises(InputError, match=r"a\.gguf, b\.gguf"):
        load(tmp_path)


def test_a_config_that_is_not_json_is_refused(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json: not JSON"):
        load(folder)


def test_pickled_weights_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"only the pickle pytorch_model\.bin"):
        load(folder)


def test_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no weights in safetensors$"):
        load(folder)


def test_incomplete_weights_are_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"1 weights are missing, model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_missing_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"no tokenizer \(tokenizer\.json, .*tokenizer\.save_pretrained"):
        load(folder)


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes"])
def test_quantised_checkpoints_ask_to_dequantise(folder, method):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(InputError, match=rf"quantised \({method}\): dequantise"):
        load(folder)


def test_adapters_alone_are_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="adapters, not a model: merge them"):
        load(folder)


def test_an_architecture_transformers_lacks_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    with pytest.raises(InputError, match="cannot load it"):
        load(folder)
