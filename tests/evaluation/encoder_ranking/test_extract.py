import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import BertConfig, BertModel

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.encoder_ranking.extraction import extract


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.drop = nn.Dropout(0.5)
        self.mix = nn.Linear(4, width)
        self.head = nn.Linear(width, 2)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.head(self.drop(self.mix(self.stem(x).mean(dim=(2, 3)))))


@pytest.fixture
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


@pytest.fixture
def images():
    return torch.randn(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_penultimate_is_what_enters_the_last_linear_layer(net, images):
    features = extract(net, images.split(4))
    with torch.no_grad():
        expected = net.mix(net.stem(images).mean(dim=(2, 3)))
    assert features.dtype == np.float32
    np.testing.assert_allclose(features, expected, rtol=1e-5)
    assert net.training  # dropout was off, and is on again


def test_a_named_layer_is_pooled_over_space(net, images):
    with torch.no_grad():
        expected = net.stem(images).mean(dim=(2, 3))
    np.testing.assert_allclose(extract(net, images.split(4), "stem"), expected, rtol=1e-5)
    np.testing.assert_allclose(extract(net, images.split(4), "output").shape, (10, 2))


def test_several_layers_cost_one_pass(net, images):
    found = extract(net, images.split(4), ["stem", "penultimate"])
    assert net.passes == 3
    assert {name: values.shape for name, values in found.items()} == {"stem": (10, 4), "penultimate": (10, 6)}


def test_batches_may_carry_targets_and_a_transform_comes_before_the_model(net, images):
    pairs = [(part, torch.zeros(len(part))) for part in images.split(4)]
    assert (extract(net, pairs) == extract(net, images.split(4))).all()
    doubled = extract(net, images.split(4), transform=lambda batch: 2 * batch)
    assert (doubled == extract(net, (2 * images).split(4))).all()


@pytest.fixture
def bert():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BertModel(
            BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12)
        )


def tokenize(texts):
    ids = [[int(word) for word in text.split()] for text in texts]
    longest = max(map(len, ids))
    rows = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    return {"input_ids": rows, "attention_mask": (torch.arange(longest) < torch.tensor([[len(r)] for r in ids])).long()}


def test_a_transformers_model_is_pooled_over_unmasked_tokens(bert):
    texts = ["3 4 5", "7", "1 2"]
    together = extract(bert, [texts], transform=tokenize)
    alone = extract(bert, [[text] for text in texts], transform=tokenize)
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)
    inner = extract(bert, [texts], ["encoder.layer.0", "encoder.layer.1"], transform=tokenize)
    np.testing.assert_allclose(inner["encoder.layer.1"], together, rtol=1e-4, atol=1e-6)
    first = extract(bert, [texts], "encoder.layer.1", "first", transform=tokenize)
    assert not np.allclose(first, together)


def test_a_callable_is_an_encoder():
    features = extract(lambda texts: np.array([[len(text), 1.0] for text in texts]), [["a", "bb"], ["ccc"]])
    assert features.tolist() == [[1, 1], [2, 1], [3, 1]]


# ------------------------------------------------------------------------------------------------------------ the cache


def test_the_cache_is_a_memory_map_and_spares_the_second_pass(net, images, tmp_path):
    direct = extract(net, images.split(4))
    net.passes = 0
    first = extract(net, images.split(4), cache=tmp_path)
    assert isinstance(first, np.memmap)
    assert not first.flags.writeable
    assert (first == direct).all()
    assert net.passes == 3
    assert (extract(net, images.split(4), cache=tmp_path) == direct).all()
    assert net.passes == 3
    note = next(tmp_path.glob("*.json")).read_text()
    assert '"model": "Net"' in note
    assert '"layer": "penultimate"' in note
    assert not list(tmp_path.glob("*.part"))


def test_other_weights_data_layers_or_transforms_are_extracted_anew(net, images, tmp_path):
    base = extract(net, images.split(4), cache=tmp_path)
    with torch.no_grad():
        net.mix.weight[0, 0] += 1
    changed = extract(net, images.split(4), cache=tmp_path)
    assert not (changed == base).all()
    extract(net, images.flip(0).split(4), cache=tmp_path)
    extract(net, images.split(4), "stem", cache=tmp_path)
    extract(net, images.split(4), transform=lambda batch: batch * 3, cache=tmp_path)
    assert len(list(tmp_path.glob("*.npy"))) == 5


def test_a_loader_that_shuffles_is_refused_where_features_are_kept(net, images, tmp_path):
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images), 4, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    with pytest.raises(InputError, match="make it shuffle=False"):
        extract(net, loader, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_extraction_leaves_nothing(net, images, tmp_path):
    images[9] = torch.nan
    with pytest.raises(InputError, match="not finite"):
        extract(net, images.split(4), cache=tmp_path)
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------- timm


class FakeTimm:
    """timm's interface, as far as it is used."""

    class data:
        @staticmethod
        def resolve_model_data_config(model):
            return {"side": 8}

        @staticmethod
        def create_transform(side, is_training):
            return lambda image: torch.from_numpy(np.array(image.resize((side, side)))).permute(2, 0, 1) / 255

    @staticmethod
    def is_model(name):
        return name == "tiny_net"

    @staticmethod
    def list_models():
        return ["tiny_net"]

    @staticmethod
    def create_model(name, pretrained, num_classes):
        assert pretrained
        assert num_classes == 0
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_timm_name_brings_its_own_transform(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", FakeTimm)
    pictures = [Image.new("RGB", (20, 30), (shade, 0, 0)) for shade in (0, 128, 255)]
    assert extract("tiny_net", [pictures]).shape == (3, 5)
    with pytest.raises(UnknownNameError, match="did you mean 'tiny_net'"):
        extract("tinny_net", [pictures])


def test_without_timm_its_names_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match="pip install timm"):
        extract("resnet18", [[]])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layer": "mixx"}, "did you mean 'mix'"),
        ({"pool": "max"}, "no pool 'max'"),
        ({"layer": "stem", "pool": "first"}, "cannot be pooled"),
        ({"loader": []}, "no batch"),
        ({"model": 3}, "no encoder"),
    ],
)
def test_what_cannot_be_extracted_is_refused(net, images, how, message):
    given = {"model": net, "loader": images.split(4), **how}
    with pytest.raises((InputError, UnknownNameError), match=message):
        extract(given.pop("model"), given.pop("loader"), **given)


@pytest.mark.gpu
def test_features_of_a_gpu_are_those_of_the_cpu(net, images):
    here = extract(net, images.split(4))
    np.testing.assert_allclose(extract(net, images.split(4), device="cuda"), here, rtol=1e-3, atol=1e-4)
