import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.lm.low_precision import GPT, NGPT, HypersphereHook, NGPTConfig, TransformerConfig, convert_linears
from fairtrial.lm.low_precision.transformer import rotary, rotate
from fairtrial.seeds import torch_generator

SMALL = {"vocab_size": 24, "width": 32, "layers": 2, "heads": 2}
IDS = torch.arange(32).view(2, 16) % 24


def trained(model, steps=10, hook=True, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0)
    if hook:
        HypersphereHook(model).attach(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
    return model, float(loss.detach())


@pytest.fixture(scope="module")
def model():
    return trained(NGPT(NGPTConfig(**SMALL)))[0]


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def by_hand(model, ids):
    """The equations of nGPT in float64, loops over positions and heads."""
    d, heads = model.config.width, model.config.heads
    size = d // heads
    p = {name: value.detach().double() for name, value in model.named_parameters()}
    h = unit(p["embedding.weight"][ids])  # (T, d)
    angle = torch.outer(torch.arange(len(ids)), 10_000.0 ** (-torch.arange(size // 2) / (size // 2))).double()

    def turn(x):
        a, b = x[:, : size // 2], x[:, size // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], 1)

    for i in range(model.config.layers):
        w = {name.removeprefix(f"blocks.{i}."): v for name, v in p.items() if name.startswith(f"blocks.{i}.")}
        q, k, v = (h @ w[f"attention.{n}.weight"].T for n in "qkv")
        s_qk = w["attention.qk_scale.weight"] * 1.0 / d**-0.5
        outputs = []
        for head in range(heads):
            at = slice(head * size, (head + 1) * size)
            qh, kh = unit(turn(q[:, at])) * s_qk[at], unit(turn(k[:, at])) * s_qk[at]
            scores = (qh @ kh.T * math.sqrt(size)).masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), -math.inf)
            outputs.append(scores.softmax(1) @ v[:, at])
        suggestion = unit(torch.cat(outputs, 1) @ w["attention.o.weight"].T)
        h = unit(h + (w["attention_step.weight"] * 0.05 / d**-0.5).abs() * (suggestion - h))
        up = h @ w["mlp.up.weight"].T * w["mlp.up_scale.weight"]
        gate = h @ w["mlp.gate.weight"].T * w["mlp.gate_scale.weight"] * math.sqrt(d)
        suggestion = unit((up * F.silu(gate)) @ w["mlp.down.weight"].T)
        h = unit(h + (w["mlp_step.weight"] * 0.05 / d**-0.5).abs() * (suggestion - h))
    return h @ p["lm_head.weight"].T * p["logit_scale.weight"] / d**-0.5


def test_the_forward_pass_is_that_of_the_equations(model):
    torch.testing.assert_close(model(IDS).logits[1].double(), by_hand(model, IDS[1]), rtol=1e-4, atol=1e-4)


def test_after_ten_steps_every_listed_matrix_has_unit_vectors_along_the_width(model):
    matrices = [*model.sphere_matrices()]
    assert len(matrices) == 2 + 7 * SMALL["layers"]
    for name, weight, axis in matrices:
        assert weight.shape[axis] == SMALL["width"]
        assert float((weight.detach().norm(dim=axis) - 1).abs().max()) < 1e-6, name
    assert {name for name, weight in model.named_parameters() if weight.ndim == 2} == {m.name for m in matrices}
    assert next(m.axis for m in matrices if m.name.endswith("attention.o.weight")) == 0


def test_hidden_states_have_length_one_after_every_part(model):
    seen = []
    hooks = [block.mlp.register_forward_pre_hook(lambda m, args: seen.append(args[0])) for block in model.blocks]
    hooks += [block.register_forward_hook(lambda m, args, output: seen.append(output)) for block in model.blocks]
    model(IDS)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2 * SMALL["layers"]
    for h in seen:
        torch.testing.assert_close(h.norm(dim=-1), torch.ones(2, 16), rtol=0, atol=1e-6)


def test_logits_do_not_change_when_a_row_is_scaled_before_the_hook_runs_again(model):
    with torch.no_grad():
        wanted = model(IDS).logits
        model.blocks[0].attention.q.weight[3].mul_(3)
        HypersphereHook(model)
        torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-5, atol=1e-5)


def test_without_steps_the_model_is_embedding_and_head():
    model = NGPT(NGPTConfig(**SMALL, step=0.0))
    h = F.normalize(model.embedding.weight[IDS], dim=-1)
    torch.testing.assert_close(model(IDS).logits, h @ model.lm_head.weight.T, rtol=1e-5, atol=1e-6)


def test_stored_scaled_parameters_set_the_size_of_a_step():
    model = NGPT(NGPTConfig(**SMALL))
    root = SMALL["width"] ** 0.5
    for module, init in ((model.logit_scale, 1.0), (model.blocks[0].attention.qk_scale, 1.0),
                         (model.blocks[0].mlp_step, 0.05)):  # fmt: skip
        torch.testing.assert_close(module().detach(), torch.full_like(module.weight, init))
        torch.testing.assert_close(module.weight.detach(), torch.full_like(module.weight, 1 / root))
        with torch.no_grad():
            module.weight.add_(0.01)
        torch.testing.assert_close(module().detach(), torch.full_like(module.weight, init * (1 + 0.01 * root)))


def test_both_models_learn_in_float32_and_in_nvfp4():
    losses = {}
    for kind, build in (("ngpt", lambda: NGPT(NGPTConfig(**SMALL))), ("gpt", lambda: GPT(TransformerConfig(**SMALL)))):
        for recipe in ("none", "nvfp4"):
            model = build()
            convert_linears(model, recipe)
            losses[kind, recipe] = trained(model, 6, hook=kind == "ngpt")[1]
    assert max(losses.values()) < math.log(24) - 0.1
    assert abs(losses["ngpt", "nvfp4"] - losses["ngpt", "none"]) < 0.2
    assert losses["ngpt", "nvfp4"] != losses["ngpt", "none"]


def test_the_loss_is_that_of_the_next_token_and_future_tokens_are_not_seen(model):
    output = model(IDS, labels=IDS)
    wanted = F.cross_entropy(output.logits[:, :-1].reshape(-1, 24), IDS[:, 1:].reshape(-1))
    torch.testing.assert_close(output.loss, wanted)
    other = IDS.clone()
    other[:, 10:] = 0
    for lm in (model, GPT(TransformerConfig(**SMALL))):
        torch.testing.assert_close(lm(IDS).logits[:, :10], lm(other).logits[:, :10])


def test_rotary_scores_depend_on_distance_only():
    cos, sin = rotary(TransformerConfig(**SMALL), 12, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch_generator(0))
    scores = rotate(q.expand(1, 1, 12, 16), cos, sin)[0, 0] @ rotate(k.expand(1, 1, 12, 16), cos, sin)[0, 0].T
    for shift in (1, 5):
        torch.testing.assert_close(scores[shift:, shift:], scores[:-shift, :-shift], rtol=1e-4, atol=1e-4)


def test_seeds_decide_the_weights_and_no_global_state_is_touched():
    state = torch.get_rng_state()
    one, two, other = (NGPT(NGPTConfig(**SMALL), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert torch.equal(state, torch.get_rng_state())


# --------------------------------------------------------------------------------------------------------- hook, errors


def test_a_step_without_the_hook_is_refused_at_the_next_pass():
    model, _ = trained(NGPT(NGPTConfig(**SMALL)), steps=1, hook=False)
    with pytest.raises(InputError, match=r"a step was taken without HypersphereHook"):
        model(IDS)
    model.eval()
    model(IDS)
    HypersphereHook(model)
    model.train()
    model(IDS)


def test_weights_of_a_checkpoint_that_lie_on_the_sphere_are_taken(model):
    other = NGPT(NGPTConfig(**SMALL), seed=5)
    other.load_state_dict(model.state_dict())
    other(IDS)


def test_a_row_of_zeros_raises_and_nothing_is_changed():
    model = NGPT(NGPTConfig(**SMALL))
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[:, 4] = 0
        model.lm_head.weight.mul_(2)
    before = model.lm_head.weight.clone()
    with pytest.raises(InputError, match=r"blocks\.1\.mlp\.down\.weight: vector 4 is all zeros"):
        HypersphereHook(model)
    assert torch.equal(before, model.lm_head.weight)


def test_an_optimizer_of_copies_is_refused():
    model = NGPT(NGPTConfig(**SMALL))
    copies = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in model.parameters()])
    with pytest.raises(InputError, match=r"does not hold embedding\.weight"):
        HypersphereHook(model).attach(copies)
    with pytest.raises(InputError, match=r"no torch\.optim\.Optimizer"):
        HypersphereHook(model).attach(None)
    hook = HypersphereHook(model).attach(torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(InputError, match="attached already"):
        hook.attach(torch.optim.SGD(model.parameters(), lr=1))
    hook.detach()


def test_a_hook_works_on_other_models_by_named_axes():
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    HypersphereHook(layer, axes={"weight": 0}).attach(optimizer)
    layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.norm(dim=0), torch.ones(4))
    for axes, message in (
        (None, "give axes"),
        ({}, "name some"),
        ({"w": 0}, "no parameter 'w'"),
        ({"weight": 2}, "0 or 1"),
        ({"bias": 0}, "0 or 1"),
    ):
        with pytest.raises(InputError, match=message):
            HypersphereHook(layer, axes=axes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "heads of even length"),
        ({"width": 0}, "width=0"),
        ({"layers": True}, "layers=True"),
        ({"hidden": 0}, "hidden=0"),
        ({"rope_base": 0.5}, "rope_base"),
        ({"tie_embeddings": True}, "tied embeddings are not supported"),
        ({"step": -0.1}, "step=-0.1"),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        NGPTConfig(**{**SMALL, **change})


def test_a_configuration_goes_through_json():
    config = NGPTConfig(**SMALL)
    assert NGPTConfig.from_dict(config.to_dict()) == config
    assert config.inner == 80
    with pytest.raises(InputError, match="unknown key 'depth'"):
        NGPTConfig.from_dict({**SMALL, "depth": 2})
    with pytest.raises(InputError, match="NGPTConfig"):
        NGPT(TransformerConfig(**SMALL))
    with pytest.raises(InputError, match="TransformerConfig"):
        GPT(None)


@pytest.mark.parametrize(
    ("ids", "labels", "message"),
    [
        (torch.ones(2, 4), None, "integer tensor"),
        (torch.ones(4, dtype=torch.int64), None, "integer tensor"),
        (torch.full((1, 4), 24), None, "vocab_size is 24"),
        (torch.ones(0, 4, dtype=torch.int64), None, "empty"),
        (IDS, IDS[:1], "give the ids as labels"),
        (IDS[:, :1], IDS[:, :1], "no next one"),
        (IDS, IDS + 1000, "labels reach to"),
    ],
)
def test_what_are_no_ids_is_refused(model, ids, labels, message):
    with pytest.raises(InputError, match=message):
        model(ids, labels=labels)
