import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from fairtrial.causal_lm.likelihood import mean_nll
from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import InputError
from fairtrial.lm.upcycling import (
    CoverageDecay,
    DivMoEConfig,
    DivMoEForCausalLM,
    routing_report,
    save_as_mixtral,
    upcycle,
)

KINDS = ("llama", "qwen2", "phi3", "phi", "gpt2", "gpt_neox")
IDS = torch.randint(2, 40, (3, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def moe(llama, four):
    return upcycle(llama, four)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_loads_by_the_auto_classes_with_the_same_logits_and_generates_the_same(
    kind, tmp_path, model_of, tuned
):
    base = model_of(kind)
    moe = upcycle(base, {"math": tuned(base, 1), "code": tuned(base, 2)}, granularity=2)
    moe.set_progress(0.04)
    moe.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, DivMoEForCausalLM)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), DivMoEConfig)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, moe(IDS).logits)
    assert again.layers()[0].router.progress.item() == pytest.approx(0.04)
    assert again.num_parameters() == moe.num_parameters()
    told = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(IDS, **told), moe.generate(IDS, **told))


def test_generation_with_the_cache_is_what_the_whole_text_gives(moe):
    ids = IDS
    for _ in range(4):
        with torch.no_grad():
            ids = torch.cat([ids, moe(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    generated = moe.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(generated, ids)


def test_a_bfloat16_mixture_keeps_its_router_in_float32(tmp_path, model_of, tuned):
    model_of("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    moe = upcycle(base, {"math": tuned(base, 1), "code": tuned(base, 2)}, granularity=2)
    moe.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.layers()[0].up_proj.dtype == torch.bfloat16
    assert again.layers()[0].router.weight.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, moe(IDS).logits)


def test_the_loss_is_the_cross_entropy_and_the_weighted_auxiliary_losses_averaged_over_layers(moe):
    out = moe(IDS, labels=IDS, output_router_logits=True)
    nll = mean_nll(moe, IDS)
    assert (out.loss - out.aux_loss).item() == pytest.approx(nll, rel=1e-5)
    wanted = 0.0
    for logits in out.router_logits:
        grouped = logits.view(-1, 4, 4)
        load = torch.nn.functional.one_hot(grouped.argmax(-1), 4).float().mean(0)
        balance = 4 * (load * grouped.softmax(-1).mean(0)).sum(-1).mean()
        wanted += 0.01 * balance / 3
    bias = [layer.router.coverage_bias for layer in moe.layers()]
    z = [(r - b).logsumexp(1).square().mean() for r, b in zip(out.router_logits, bias, strict=True)]
    assert out.aux_loss.item() == pytest.approx((wanted + 0.001 * sum(z) / 3).item(), rel=1e-5)
    assert moe(IDS).aux_loss is None
    assert all(layer.routing is None for layer in moe.layers())


def test_padding_counts_in_no_auxiliary_loss(llama, four):
    moe = upcycle(llama, four, active=2)
    padded = torch.cat([IDS, torch.zeros(3, 5, dtype=torch.int64)], dim=1)
    mask = torch.arange(14).expand(3, 14) < 9
    labels = padded.masked_fill(~mask, -100)
    wanted = moe(IDS, labels=IDS)
    got = moe(padded, attention_mask=mask.long(), labels=labels)
    torch.testing.assert_close((got.loss, got.aux_loss), (wanted.loss, wanted.aux_loss), rtol=1e-4, atol=1e-5)


def test_it_trains_in_a_trainer_which_tells_it_the_progress(moe, tmp_path):
    model = copy.deepcopy(moe)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=3, learning_rate=1e-2, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    before = mean_nll(model, IDS)
    with torch.random.fork_rng(devices=[]):
        Trainer(model, arguments, train_dataset=rows, callbacks=[CoverageDecay()]).train()
    assert mean_nll(model, IDS) < before
    assert model.layers()[0].router.progress.item() == pytest.approx(0.75)
    with pytest.raises(InputError, match="DivMoEForCausalLM"):
        CoverageDecay().on_step_begin(None, None, None, model=torch.nn.Linear(1, 1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_it_trains_in_trl_with_the_models_own_loss(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    base, tokenizer = tiny_causal_lm()
    tokenizer.pad_token, tokenizer.eos_token = "w0", "w1"
    model = upcycle(base, {name: tiny_causal_lm(seed=i + 1)[0] for i, name in enumerate("ab")}, granularity=2)

    class Tuner(trl.SFTTrainer):
        compute_loss = Trainer.compute_loss

    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    rows = datasets.Dataset.from_dict({"text": ["w3 w4 w5 w6", "w7 w8 w9"] * 4})
    before = model.layers()[0].router.weight.clone()
    with torch.random.fork_rng(devices=[]):
        Tuner(
            model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[CoverageDecay()]
        ).train()
    assert model.layers()[0].router.progress.item() == pytest.approx(0.5)
    assert not torch.equal(before, model.layers()[0].router.weight)


def test_progress_outside_its_range_is_refused(moe):
    for fraction in (-0.1, 1.5, float("nan")):
        with pytest.raises(InputError, match=r"in \[0, 1\]"):
            moe.set_progress(fraction)


def test_tuples_hidden_states_and_embeddings_are_as_in_the_base(moe):
    assert isinstance(moe(IDS, return_dict=False), tuple)
    assert len(moe(IDS, output_hidden_states=True).hidden_states) == 4
    assert moe.get_input_embeddings().weight.shape == (40, 16)
    resized = copy.deepcopy(moe)
    resized.resize_token_embeddings(44, mean_resizing=False)
    assert resized(IDS).logits.shape[-1] == 44


# ----------------------------------------------------------------------------------------------------------- the report


def test_the_routing_report_counts_what_the_router_does(llama, four):
    moe = upcycle(llama, four, active=2)
    moe.set_progress(1.0)
    texts = {"math": IDS[:2], "code": IDS[1:]}
    report = routing_report(moe, None, texts)
    assert len(report) == 3 * 16
    sums = report.groupby("layer")[["load", "load_math", "load_code"]].sum()
    assert sums.to_numpy() == pytest.approx(2)
    seen = []
    handle = moe.layers()[1].router.register_forward_hook(lambda module, given, routing: seen.append(routing.experts))
    moe(IDS[:2])
    handle.remove()
    counted = torch.bincount(seen[0].flatten(), minlength=16) / 18
    assert report.loc[report.layer == 1, "load_math"].tolist() == pytest.approx(counted.tolist())
    table = torch.tensor(report.attrs["co_occurrence"])
    assert table.shape == (3, 4, 4)
    torch.testing.assert_close(table.sum((1, 2)), torch.full((3,), 4.0))  # K^2 pairs a token
    assert report.attrs["collapsed"] == 0
    assert report.entropy.between(0, 1).all()
    assert set(report.affinity) <= {"math", "code"}


def test_experts_alike_have_diversity_1_and_free_routing_may_collapse(llama, four):
    with pytest.warns(UserWarning, match="no diversity"):
        moe = upcycle(llama, {"a": llama, "b": llama}, granularity=1, active=2)
    assert routing_report(moe, None, {"a": IDS}).diversity.to_numpy() == pytest.approx(1, abs=1e-5)
    free = upcycle(llama, four, recipe="free-top-k")
    free.set_progress(1.0)
    assert routing_report(free, None, {"a": IDS}).attrs["collapsed"] > 0
    with pytest.raises(InputError, match="texts"):
        routing_report(free, None, {})


# -------------------------------------------------------------------------------------------------------------- Mixtral


def test_whole_layers_export_to_mixtral_with_the_same_logits_and_a_warning(llama, four, tmp_path):
    moe = upcycle(llama, four, granularity=1, active=2)
    with pytest.warns(UserWarning, match="group constraint"):
        save_as_mixtral(moe, tmp_path / "mixtral")
    mixtral = AutoModelForCausalLM.from_pretrained(tmp_path / "mixtral")
    assert mixtral.config.model_type == "mixtral"
    with torch.no_grad():
        torch.testing.assert_close(mixtral(IDS).logits, moe(IDS).logits, rtol=1e-4, atol=1e-5)


def test_an_export_that_would_lose_the_constraint_is_refused(moe, llama, four, tmp_path, model_of, tuned):
    with pytest.raises(InputError, match="lost silently"):
        save_as_mixtral(moe, tmp_path / "new")
    base = model_of("qwen2")
    qwen = upcycle(base, {"a": tuned(base, 1), "b": tuned(base, 2)}, granularity=1)
    with pytest.raises(InputError, match="qwen2"):
        save_as_mixtral(qwen, tmp_path / "new")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="holds files"):
        save_as_mixtral(upcycle(llama, four, granularity=1), tmp_path)
