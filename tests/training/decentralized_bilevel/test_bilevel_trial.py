import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.testing import check_trial
from fairtrial.training.decentralized_bilevel import DecentralizedBilevel, Problem, QuadraticOracle, Ring
from fairtrial.training.decentralized_bilevel.learning import (
    cleaning_pieces,
    deal,
    gradient_noise,
    language_pieces,
    shard,
)
from fairtrial.training.decentralized_bilevel.problem import Pieces, Variable, combined
from fairtrial.training.decentralized_bilevel.recursion import Recursion
from fairtrial.training.decentralized_bilevel.study import Noise, march
from fairtrial.training.decentralized_bilevel.trial import (
    METHOD,
    BilevelParams,
    check,
    network,
    noise_of,
    parts,
    search,
    trial,
    worst_beats,
)


def test_the_trial_is_sound():
    check_trial(trial)


def test_many_runs_at_once_are_the_optimizer_on_each():
    """The study's loop over leading dimensions makes the steps of DecentralizedBilevel."""
    oracle, n = QuadraticOracle(3, 2, 3), 3
    source = Noise(1.5, 0.1, True).pieces(oracle.sizes, [0, 1], n, ("test",))
    draws = [next(source) for _ in range(8)]  # (seeds, n, Q): fx, 0, fy, gy, gy
    w = torch.zeros(2, n, 8, dtype=torch.float64)
    rates = [0.1 * size**0.5 for size in oracle.sizes]
    rule = Recursion(w, oracle.sizes, rates, lambda m, lam: combined(m, lam, sizes=oracle.sizes))
    rest = iter(draws[1:])

    def pair(w, before):
        noise = next(rest)
        return oracle.pieces(w) + noise, oracle.pieces(before) + noise

    mixing = torch.from_numpy(Ring(n).mixing)
    march(METHOD, rule, mixing, oracle.pieces(w) + draws[0], pair, 8, lambda made, rule: None)
    for seed in (0, 1):
        x, y = (torch.zeros(k, dtype=torch.float64) for k in oracle.sizes[:2])
        opt = DecentralizedBilevel(oracle.upper, oracle.lower, x, y, network=Ring(n), init_batches=1)
        for draw in draws:
            fx, _, fy, gy, _ = draw[seed].split([2, 2, 3, 3, 3], -1)
            opt.step({"node": torch.arange(n), "x": fx, "y": fy}, {"node": torch.arange(n), "x": 0 * fx, "y": gy})
        assert torch.allclose(opt._all("w"), rule.w[seed], atol=1e-11)


def test_the_closed_form_of_cleaning_is_the_presets_gradient():
    g = torch.Generator().manual_seed(0)
    n, m, d, classes, b = 2, 5, 3, 4, 6
    problem = Problem.hyper_cleaning(nn.Linear(d, classes, bias=False).double(), F.cross_entropy, examples=m)
    pieces = Pieces(problem.upper, problem.lower, Variable(problem.x, "x"), Variable(problem.y, "y"))
    w = torch.randn(n, m + 2 * d * classes, generator=g, dtype=torch.float64)
    inputs = torch.randn(2, 1, n, b, d, generator=g, dtype=torch.float64)
    labels, index = (torch.randint(k, (2, 1, n, b), generator=g) for k in (classes, m))
    upper, lower = ({"input": inputs[k, 0], "label": labels[k, 0], "index": index[k, 0]} for k in (0, 1))
    ((expected, _),) = pieces.rows([w], upper, lower)
    sets = [(inputs[k], labels[k], index[k]) for k in (0, 1)]
    assert torch.allclose(cleaning_pieces(w[None, None, None], *sets, classes)[0, 0, 0], expected)


def test_shards_have_flipped_training_labels_and_clean_validation():
    x, y = torch.randn(400, 3), torch.arange(400) % 4
    x[:, 0] = y.float()  # the true label
    data = shard(x, y, (x, y), range(3), n=2, train=200, valid=50, concentration=0.5, flipped=0.4)
    assert torch.equal(data.valid_x[..., 0].long(), data.valid_y)
    assert torch.equal(data.x[..., 0].long() != data.y, data.wrong)
    assert float(data.wrong.float().mean()) == pytest.approx(0.4, abs=0.05)


def test_the_closed_form_of_next_tokens_is_the_gradient_of_its_losses():
    g = torch.Generator().manual_seed(0)
    n, d, classes, b, groups = 2, 3, 4, 6, torch.tensor([0, 1, 1, 0])

    def upper(x, y, batch):
        return F.cross_entropy(batch["input"] @ y.T, batch["label"])

    def lower(x, y, batch):
        return upper(x, y, batch) + 0.5 * (x.exp()[groups] * y.square().sum(1)).sum()

    x, y = torch.zeros(2, dtype=torch.float64), torch.zeros(classes, d, dtype=torch.float64)
    pieces = Pieces(upper, lower, Variable(x, "x"), Variable(y, "y"))
    w = torch.randn(n, 2 + 2 * d * classes, generator=g, dtype=torch.float64)
    inputs = torch.randn(2, 1, n, b, d, generator=g, dtype=torch.float64)
    labels = torch.randint(classes, (2, 1, n, b), generator=g)
    ((expected, _),) = pieces.rows([w], *({"input": inputs[k, 0], "label": labels[k, 0]} for k in (0, 1)))
    sets = [(inputs[k], labels[k], labels[k]) for k in (0, 1)]
    assert torch.allclose(language_pieces(w[None, None, None], *sets, groups)[0, 0, 0], expected)


def test_texts_are_dealt_out_whole_and_once():
    y = torch.arange(20)[:, None].expand(-1, 5)  # every token tells its text
    data = deal(y[..., None].float(), y, (torch.zeros(5, 1), torch.zeros(5, dtype=torch.long)), range(3), n=4)
    assert data.y.shape == (3, 4, 20)
    assert data.valid_y.shape == (3, 4, 5)
    for seed in range(3):
        assert sorted(torch.cat([data.y[seed], data.valid_y[seed]], 1).flatten().tolist()) == sorted([*range(20)] * 5)
    assert torch.equal(data.x[..., 0].long(), data.y)
    with pytest.raises(InputError, match="7 texts are too few for 4 nodes: give 8"):
        deal(y[:7, :, None].float(), y[:7], (y, y), [0], n=4)


def test_gradient_noise_is_what_gradients_of_samples_differ_by():
    y = torch.arange(8)[:, None] % 3
    data = deal(torch.randn(8, 1, 2), y, (torch.randn(3, 2), torch.arange(3)), [0], n=4)
    model = data.models([0])[0, 0].unflatten(0, (3, 2)).requires_grad_()
    each = torch.stack([
        torch.autograd.grad(F.cross_entropy(x @ model.T, label), model)[0]
        for x, label in zip(data.x[0], data.y[0], strict=True)
    ])  # fmt: skip
    expected = (each - each.mean(0)).flatten(1).norm(dim=1)
    found = gradient_noise(data, 0, tokens=1, draws=1000)
    assert np.allclose(np.unique(found.round(5)), np.unique(expected.detach().numpy().round(5)), atol=2e-5)
    assert gradient_noise(data, 0, tokens=64, draws=1000).mean() < found.mean() / 4


def test_tuning_goes_on_until_the_best_is_inside():
    for best in (3, -1):
        found = search(METHOD, lambda rates, clips, best=best: (rates.log10() - best).abs())
        assert found == (pytest.approx(10.0**best), 1.0)

    def clipped(rates, clips):
        return (rates.log10() + 1).abs() + (clips.log() - np.log(625)).abs()

    assert search("clipped-sgd", clipped) == (pytest.approx(0.1), 625.0)


def test_the_worst_seed_is_judged_on_every_graph():
    frame = pd.DataFrame({"noise": "t1.5", "graph": ["a", "a", "b", "b"], "candidate": [METHOD, "sgd"] * 2,
                          "gap": [1.0, 2.0, 3.0, 4.0]})  # fmt: skip
    assert worst_beats("sgd", "t1.5")(frame) is True
    frame.loc[3, "gap"] = 2.0
    assert worst_beats("sgd", "t1.5")(frame) == "b: 3 against 2"


def test_bad_names_and_files_are_refused(tmp_path):
    assert network("star5").size == 5
    for name in ("ring", "ring1", "mesh8"):
        with pytest.raises(InputError, match="ring8"):
            network(name)
    for name in ("cauchy", "t0", "t"):
        with pytest.raises(InputError, match=r"t1\.5"):
            noise_of(name, BilevelParams())
    with pytest.raises(InputError, match="same number of nodes"):
        parts(BilevelParams(graphs=("ring4", "ring5")))
    bad = tmp_path / "bad.npz"
    np.savez(bad, x=np.zeros((8, 2)), y=np.zeros(7, int))
    for data, word in ((str(bad), "8 rows"), (str(tmp_path / "none.npz"), "no such file"), ("mnist", "fashion-mnist")):
        with pytest.raises(InputError, match=word):
            check(BilevelParams(data=data))
