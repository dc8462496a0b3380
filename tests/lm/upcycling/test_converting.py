import copy
import warnings

import pytest
import torch

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.upcycling import DivMoEConfig, upcycle
from fairtrial.lm.upcycling.architectures import feed_forwards, read_feed_forward
from fairtrial.lm.upcycling.recipes import RECIPES, deal_domains, find_recipe, reinitialise
from fairtrial.lm.upcycling.slicing import partition_neurons
from fairtrial.lm.upcycling.starting import coverage_of

KINDS = ("llama", "qwen2", "phi3", "phi", "gpt2", "gpt_neox")
IDS = torch.randint(0, 40, (2, 11), generator=torch.Generator().manual_seed(0))


def quiet(*args, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return upcycle(*args, **more)


def settled(moe):
    """Without the random rows, which move the start by their size."""
    with torch.no_grad():
        for layer in moe.layers():
            layer.router.weight.zero_()
    return moe


def same(base, n=4):
    return {f"d{i}": base for i in range(n)}


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_models_the_mixture_is_the_base_in_every_layer(kind, model_of):
    base = model_of(kind)
    inputs, outputs = [], []
    moe = settled(quiet(base, same(base)))

    def keep(module, given, out):
        inputs.append(given[0])
        outputs.append(out)

    for place in feed_forwards(base):
        place.module.register_forward_hook(keep)
    with torch.no_grad():
        logits = base(IDS).logits
        torch.testing.assert_close(moe(IDS).logits, logits, rtol=0, atol=1e-5)
        for layer, given, out in zip(moe.layers(), inputs, outputs, strict=True):
            torch.testing.assert_close(layer(given), out, rtol=1e-6, atol=1e-6)
    assert moe.upcycle_report.covered


@pytest.mark.parametrize(("n", "f", "k"), [(4, 4, 4), (4, 2, 4), (4, 3, 4), (3, 2, 3), (2, 1, 1), (4, 1, 1), (4, 1, 3)])
def test_the_start_is_exact_where_k_is_g_from_f_on_and_for_whole_layers_at_any_k(llama, n, f, k):
    moe = settled(quiet(llama, same(llama, n), granularity=f, active=k))
    assert moe.upcycle_report.covered
    with torch.no_grad():
        torch.testing.assert_close(moe(IDS).logits, llama(IDS).logits, rtol=0, atol=1e-5)


def test_copies_in_groups_and_slices_as_groups_start_exactly_too(llama, four):
    for recipe in ("grouped-copies", "sparse"):
        moe = settled(quiet(llama, four, recipe=recipe, granularity=4 if recipe != "sparse" else 1))
        assert moe.upcycle_report.covered
        with torch.no_grad():
            torch.testing.assert_close(moe(IDS).logits, llama(IDS).logits, rtol=0, atol=1e-5)
    moe = settled(quiet(llama, same(llama), recipe="slice-groups"))
    with torch.no_grad():
        torch.testing.assert_close(moe(IDS).logits, llama(IDS).logits, rtol=0, atol=1e-5)


def test_below_g_active_experts_the_error_of_the_start_is_measured(llama):
    moe = quiet(llama, same(llama), granularity=4, active=2)
    report = moe.upcycle_report
    assert not report.covered
    assert report.layer_error > 0.1
    assert "does not cover" in str(report)


@pytest.mark.parametrize("partition", ["contiguous", "balanced-kmeans"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_the_experts_of_a_group_are_the_layer_of_its_domain_bit_for_bit(kind, partition, model_of, tuned):
    base = model_of(kind)
    domains = {f"d{i}": tuned(base, i) for i in range(3)}
    moe = upcycle(base, domains, granularity=4, active=3, partition=partition, seed=5)
    for g, model in enumerate(domains.values()):
        for place, layer in zip(feed_forwards(model), moe.layers(), strict=True):
            dense = read_feed_forward(place.module)
            slices = layer.up_proj[4 * g : 4 * g + 4].view(4, 1 + layer.gated, 6, 16)
            up = slices[:, -1].reshape(24, 16)
            down = layer.down_proj[4 * g : 4 * g + 4].permute(0, 2, 1).reshape(24, 16)
            order = [next(i for i in range(24) if torch.equal(up[i], row)) for row in dense.up]
            assert sorted(order) == list(range(24))
            if partition == "contiguous":
                assert order == list(range(24))
            assert torch.equal(down[order], dense.down.T)
            if layer.gated:
                assert torch.equal(slices[:, 0].reshape(24, 16)[order], dense.gate)
            else:
                assert torch.equal(layer.up_bias[4 * g : 4 * g + 4].flatten()[order], dense.up_bias)


def test_neurons_that_act_together_come_into_one_slice_for_all_domains_alike(llama):
    dense = read_feed_forward(feed_forwards(copy.deepcopy(llama))[0].module)
    kind = torch.arange(24) % 4
    with torch.no_grad():
        dense.gate.copy_(torch.eye(4).repeat_interleave(4, 1)[kind] + 0.01 * torch.randn(24, 16))
    slices = partition_neurons(dense, 4, partition="balanced-kmeans", seed=1)
    assert all(len(set(kind[row].tolist())) == 1 for row in slices)
    assert sorted(slices.flatten().tolist()) == list(range(24))


def test_the_rest_is_the_average_of_the_domains_or_the_base(llama, four, model_of, tuned):
    moe = upcycle(llama, four)
    name = "model.layers.1.self_attn.q_proj.weight"
    mean = torch.stack([model.get_parameter(name) for model in four.values()]).mean(0)
    torch.testing.assert_close(moe.language_model.get_parameter(name), mean)
    assert torch.equal(upcycle(llama, four, rest="base").language_model.get_parameter(name), llama.get_parameter(name))
    base = model_of("gpt2")
    domains = {f"d{i}": tuned(base, i) for i in range(3)}
    bias = torch.stack([model.transformer.h[2].mlp.c_proj.bias for model in domains.values()]).mean(0)
    torch.testing.assert_close(upcycle(base, domains, active=3).layers()[2].down_bias, bias)


def test_nothing_given_is_changed(llama, four):
    before = copy.deepcopy((llama.state_dict(), four["math"].state_dict(), llama.config.to_dict()))
    moe = upcycle(llama, four)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    for old, new in zip(before[:2], (llama.state_dict(), four["math"].state_dict()), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert llama.config.to_dict() == before[2]
    assert llama.config._attn_implementation == "sdpa"


def test_parameters_are_those_of_the_base_g_minus_1_feed_forwards_and_the_router(llama, four):
    moe = upcycle(llama, four)
    ffn, router = 3 * 3 * 16 * 24, 3 * 16 * 16
    dense = sum(p.numel() for p in llama.parameters())
    report = moe.upcycle_report
    assert sum(p.numel() for p in moe.parameters()) == dense + 3 * ffn + router == report.total_parameters
    assert report.active_parameters == dense + router
    assert upcycle(llama, four, active=2).upcycle_report.active_parameters == dense - ffn // 2 + router


def test_coverage_gives_every_slice_shares_that_sum_to_one_fth():
    for g, f, layer in ((4, 4, 0), (4, 2, 1), (5, 3, 2), (7, 4, 3)):
        bias = coverage_of(layer, g, f)
        slices = bias.argmax(1)
        assert slices.tolist() == [(i + layer) % f for i in range(g)]
        shares = bias.max(1).values.softmax(0)
        torch.testing.assert_close(torch.zeros(f).index_add(0, slices, shares), torch.full((f,), 1 / f))


def test_hidden_gates_send_a_domains_inputs_to_it_and_the_start_is_reported(llama, four):
    g = torch.Generator().manual_seed(1)
    texts = {name: torch.randint(10 * i, 10 * i + 10, (6, 12), generator=g) for i, name in enumerate(four)}
    moe = upcycle(llama, four, granularity=1, active=2, router_init="hidden", texts=texts)
    report = moe.upcycle_report
    assert report.start_loss.keys() == report.base_loss.keys() == four.keys()
    moe(texts["code"])
    seen = []
    moe.layers()[0].router.register_forward_hook(lambda module, given, routing: seen.append(routing))
    for name in four:
        moe(texts[name])
    by_domain = torch.stack([routing.logits.squeeze(-1).mean(0) for routing in seen])  # (texts, gates)
    assert by_domain.argmax(0).tolist() == [0, 1, 2, 3]  # a gate is widest open to its own texts
    logits = torch.cat([routing.logits.flatten() for routing in seen])
    assert logits.std().item() == pytest.approx(1, rel=0.05)
    written = {name: (f"w{w} w{w + 1} w{w + 2}" for w in (3, 7, 11)) for name in four}  # generators can be read once
    moe = upcycle(
        llama, four, granularity=1, active=2, router_init="hidden", texts=written, tokenizer=tiny_causal_lm()[1]
    )
    assert moe.upcycle_report.start_loss.keys() == four.keys()


def test_shuffled_groups_hold_one_of_each_slice_and_every_expert_once(llama, four):
    deal = deal_domains(find_recipe("shuffled-groups"), 4, 8, seed=2)
    assert torch.equal(deal.sort(1).values, torch.arange(4).expand(8, 4))
    assert len({tuple(row) for row in deal.tolist()}) > 1
    plain, shuffled = upcycle(llama, four), upcycle(llama, four, recipe="shuffled-groups")
    for a, b in zip(plain.layers(), shuffled.layers(), strict=True):
        assert not torch.equal(a.up_proj, b.up_proj)
        assert torch.equal(a.up_proj.sum((1, 2)).sort().values, b.up_proj.sum((1, 2)).sort().values)


def test_free_routing_takes_the_covering_set_at_the_start(llama, four):
    grouped, free = settled(upcycle(llama, four)), settled(upcycle(llama, four, recipe="free-top-k"))
    with torch.no_grad():
        torch.testing.assert_close(free(IDS).logits, grouped(IDS).logits, rtol=0, atol=1e-5)


def test_dropped_neurons_are_drawn_anew_with_the_moments_of_their_matrix(llama, four):
    copies = quiet(llama, four, recipe="sparse", granularity=1, active=1)
    drop = quiet(llama, four, recipe="drop", granularity=1, active=1)
    for a, b in zip(copies.layers(), drop.layers(), strict=True):
        same_gate, same_up = (a.up_proj == b.up_proj).all(-1).view(4, 2, 24).unbind(1)
        assert (same_gate.sum(1) == 12).all()
        assert torch.equal(same_gate, same_up)
        assert torch.equal(same_gate, (a.down_proj == b.down_proj).all(1))
        assert len({tuple(row) for row in same_gate.tolist()}) == 4  # each expert its own
    wide = copies.layers()[0]
    wide.down_proj = torch.nn.Parameter(3 + 2 * torch.randn(1, 400, 100, generator=torch.Generator().manual_seed(0)))
    wide.up_proj = torch.nn.Parameter(torch.zeros(1, 200, 400))
    reinitialise(wide, 1.0, seed=0)
    assert wide.down_proj.mean().item() == pytest.approx(3, abs=0.05)
    assert wide.down_proj.std().item() == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_a_step_and_is_reproducible(llama, four, recipe):
    moe, again = (quiet(llama, four, recipe=recipe, seed=3).train() for _ in range(2))
    loss = moe(IDS, labels=IDS).loss
    assert torch.equal(loss, again(IDS, labels=IDS).loss)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())
    other = quiet(llama, four, recipe=recipe, seed=4)
    assert not torch.equal(moe.layers()[0].router.weight, other.layers()[0].router.weight)


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"granularity": 5}, "give one of 1, 2, 3, 4, 6, 8, 12, 24"),
        ({"granularity": 0}, "granularity=0"),
        ({"active": 5}, "from 1 to 4"),
        ({"active": 0}, "from 1 to 4"),
        ({"active": 2.0}, "active=2.0"),
        ({"partition": "random"}, "balanced-kmeans"),
        ({"rest": "sum"}, "average, base"),
        ({"router_init": "zeros"}, "random, hidden"),
        ({"router_init": "hidden"}, "reads each domain's texts"),
        ({"texts": {"math": IDS}}, "give texts of each"),
        ({"texts": {name: ["a b"] for name in ("math", "code", "science", "news")}}, "tokenizer"),
        ({"gumbel": -1.0}, "gumbel"),
        ({"decay": 2.0}, "decay"),
    ],
)
def test_options_that_cannot_be_are_refused(llama, four, given, word):
    with pytest.raises(InputError, match=word):
        upcycle(llama, four, **given)


def test_an_unknown_recipe_names_the_nearest(llama, four):
    with pytest.raises(UnknownNameError, match="did you mean 'sparse'"):
        upcycle(llama, four, recipe="sparce")


def test_domains_that_do_not_belong_to_the_base_are_refused(llama, four, model_of, tuned):
    other = type(llama.config)(**{**llama.config.to_dict(), "intermediate_size": 48})
    wide = type(llama)(other)
    nan = tuned(llama, 1)
    with torch.no_grad():
        nan.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    quantised = copy.deepcopy(llama)
    quantised.is_quantized = True
    for domains, word in (
        ({"math": four["math"]}, "at least two"),
        ([four["math"], four["code"]], "at least two"),
        ({"math": four["math"], "code": 3}, "int is no model"),
        ({"math": four["math"], "code": "no/such/folder"}, "no such file"),
        ({"math": four["math"], "code": wide}, "domain code.*the base's architecture"),
        ({"math": four["math"], "code": model_of("qwen2")}, "domain code"),
        ({"math": four["math"], "code": nan}, "not finite"),
        ({"math": four["math"], "code": quantised}, "quantised"),
    ):
        with pytest.raises(InputError, match=word):
            upcycle(llama, domains)


def test_models_without_a_dense_feed_forward_are_refused(llama, four):
    from transformers import MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM

    tiny = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixtral = MixtralForCausalLM(MixtralConfig(**tiny, intermediate_size=24, num_key_value_heads=2))
    opt = OPTForCausalLM(OPTConfig(**tiny, ffn_dim=24, word_embed_proj_dim=16))
    for model, word in (
        (mixtral, "mixture of experts already"),
        (opt, "no dense feed-forward"),
        (upcycle(llama, four), "already"),
    ):
        with pytest.raises(InputError, match=word):
            upcycle(model, {"a": model, "b": model})
    biased = type(llama)(type(llama.config)(**{**llama.config.to_dict(), "mlp_bias": True}))
    with pytest.raises(InputError, match="mlp_bias"):
        upcycle(biased, {"a": biased, "b": biased})


def test_what_is_probably_a_mistake_is_warned_of(llama, four, model_of):
    with pytest.warns(UserWarning, match="domain b has the base's"):
        upcycle(llama, {"a": four["math"], "b": llama})
    with pytest.warns(UserWarning, match="probably no fine-tune"):
        upcycle(llama, {"a": four["math"], "b": model_of("llama", seed=8)})
    with pytest.warns(UserWarning, match="no gradient"):
        upcycle(llama, four, granularity=1, active=1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's use of transformers
def test_adapters_are_merged_and_refused_where_they_leave_the_experts_alone(llama, four, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(*targets):
        config = peft.LoraConfig(
            r=2, target_modules=list(targets), lora_alpha=1, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        return peft.get_peft_model(copy.deepcopy(llama), config)

    model = adapted("up_proj", "q_proj")
    model.save_pretrained(tmp_path / "lora")
    merged = copy.deepcopy(model).merge_and_unload()
    for given in (model, tmp_path / "lora"):
        moe = upcycle(llama, {"math": given, "code": four["code"]}, granularity=2)
        wanted = read_feed_forward(feed_forwards(merged)[2].module).up
        torch.testing.assert_close(moe.layers()[2].up_proj[:2, 12:].reshape(24, 16), wanted)
    assert hasattr(model, "peft_config")
    with pytest.raises(InputError, match=r"domain code.*copies of the base"):
        upcycle(llama, {"math": model, "code": adapted("q_proj")})
    with pytest.raises(InputError, match="base carries PEFT adapters"):
        upcycle(model, four)


def test_a_config_refuses_unknown_routings(llama):
    for given in ({"routing": "top"}, {"groups": "random"}):
        with pytest.raises(InputError, match="give '"):
            DivMoEConfig(llama.config, **given)


@pytest.mark.parametrize("coverage", [float("nan"), float("inf"), -1.0, "ten"])
def test_a_coverage_that_is_no_number_is_refused(model_of, coverage):
    base = model_of("llama")
    with pytest.raises(InputError, match="coverage"):
        upcycle(base, {"a": base, "b": base}, coverage=coverage)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_act": "relu"}, "activation"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001, the base's 1e-0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "inv_freq"),
    ],
)
def test_a_domain_that_computes_otherwise_is_refused(model_of, change, said):
    base = model_of("llama")
    config = copy.deepcopy(base.config)
    for name, value in change.items():
        setattr(config, name, value)
    domain = type(base)(config)
    domain.load_state_dict(base.state_dict())
    with pytest.raises(InputError, match=said):
        quiet(base, {"a": domain, "b": base})


def test_weights_outside_the_feed_forward_layers_must_be_finite_and_may_be_of_half_precision(model_of):
    base = model_of("llama")
    damaged = copy.deepcopy(base)
    assert quiet(base, {"a": copy.deepcopy(base).half(), "b": copy.deepcopy(base).bfloat16()}, granularity=2).config
    with torch.no_grad():
        damaged.get_input_embeddings().weight[0, 0] = float("nan")
    for models in ((base, damaged), (damaged, base)):
        with pytest.raises(InputError, match="not finite"):
            quiet(models[0], {"a": models[1], "b": base})
