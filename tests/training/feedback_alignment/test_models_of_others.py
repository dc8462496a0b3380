"""Blocks of networks that others made: transformers' ViT, its Trainer, and ResNets of stages."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.training.feedback_alignment import DirectFeedback, NDFATrainerMixin, find_blocks, vit4
from fairtrial.training.feedback_alignment.networks import ResidualBlock

transformers = pytest.importorskip("transformers")

X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


def hf_vit(**options):
    torch.manual_seed(0)
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
                                    image_size=8, patch_size=4, num_channels=1, num_labels=3, **options)  # fmt: skip
    return transformers.ViTForImageClassification(config)


def layers_of(model):
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))


def test_a_transformers_vit_is_cut_at_its_layers_and_true_tails_give_backpropagation():
    model = hf_vit(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    twin = copy.deepcopy(model)
    F.cross_entropy(twin(X).logits, Y).backward()
    layers = layers_of(model)

    class Tail(nn.Module):
        def __init__(self, number):
            super().__init__()
            self.layers, self.model = layers[number + 1 :], [model]

        def forward(self, h):
            for layer in self.layers:
                told = layer(h)
                h = told[0] if isinstance(told, tuple) else told
            return self.model[0].classifier(self.model[0].vit.layernorm(h)[:, 0])

    feedback = DirectFeedback(model, surrogate=lambda name, *_: Tail(int(name.rpartition(".")[2])), learn=False)
    logits = model(X).logits
    feedback.backward(F.cross_entropy(logits, Y), logits)
    assert len(feedback.blocks) == 3
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-6), name


class Wrapped(nn.Module):
    """A layer that returns a tuple, or a mapping, as some models' layers do."""

    def __init__(self, layer, kind):
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, x):
        h = self.layer(x)
        return (h, h.mean()) if self.kind is tuple else transformers.modeling_outputs.BaseModelOutput(h)


class Unwrapping(nn.Module):
    def __init__(self, plain, kind):
        super().__init__()
        self.net = plain
        self.net.layers = nn.ModuleList(Wrapped(layer, kind) for layer in plain.layers)

    def forward(self, x):
        tokens = self.net.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.net.token.expand(len(x), -1, -1), tokens], 1) + self.net.position
        for layer in self.net.layers:
            tokens = layer(tokens)[0]
        return self.net.head(self.net.norm(tokens[:, 0]))


@pytest.mark.parametrize("kind", [tuple, dict])
def test_tuples_and_mappings_are_cut_at_their_first_tensor(kind):
    gradients = []
    for wrap in (False, True):
        model = vit4(1, 8, 3, patch=4, width=16, layers=2, seed=1)
        model = Unwrapping(model, kind) if wrap else model
        blocks = [f"net.layers.{i}" if wrap else f"layers.{i}" for i in range(2)]
        feedback = DirectFeedback(model, blocks, surrogate=lambda name, shape, k: fixed(shape, k), learn=False)
        logits = model(X)
        feedback.backward(F.cross_entropy(logits, Y), logits)
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def fixed(shape, k):
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], k))


def test_the_stages_of_a_resnet_count_as_one_list_of_blocks():
    class ResNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(3, 4, 3)
            for i in range(1, 5):
                setattr(self, f"layer{i}", nn.Sequential(*(ResidualBlock(4, 4) for _ in range(2))))
            self.fc = nn.Linear(4, 3)

    assert find_blocks(ResNet()) == [f"layer{i}.{j}" for i in range(1, 5) for j in range(2)]


@pytest.mark.slow
def test_a_trainer_with_the_mixin_learns(tmp_path):
    class NDFATrainer(NDFATrainerMixin, transformers.Trainer):
        feedback_options = {"surrogate_lr": 1e-2}  # noqa: RUF012

    model = hf_vit()
    before = copy.deepcopy(model.state_dict())
    items = [{"pixel_values": X[i], "labels": int(Y[i])} for i in range(6)]
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=2, per_device_train_batch_size=3, report_to=[],
                                               use_cpu=True, disable_tqdm=True, save_strategy="no",
                                               gradient_accumulation_steps=2)  # fmt: skip
    trainer = NDFATrainer(model, arguments, train_dataset=items)
    trainer.train()
    assert trainer.feedback.steps >= 2
    first = {name for name in before if ".layers.0." in name or ".layer.0." in name}
    assert first
    assert any(not torch.equal(before[name], model.state_dict()[name]) for name in first)


def test_a_model_that_recomputes_by_its_own_setting_is_refused():
    model = hf_vit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the method has another name in later versions
        model.gradient_checkpointing_enable()
    with pytest.raises(InputError, match="checkpointing off"):
        DirectFeedback(model)
