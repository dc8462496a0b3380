"""What cannot be used is refused by name."""

import json
import math

import numpy as np
import pandas as pd
import pytest

from fairtrial.errors import FairtrialError, InputError
from fairtrial.evaluation.language_development import (
    Corpus,
    DevBench,
    EgoStream,
    binding,
    build_devbench,
    evaluate,
    fit_acquisition,
    items_needed,
    label_alignment,
    linear_probe,
    retrieval,
    retrieval_alignment,
    temporal_grounding,
)

CORPUS = Corpus.from_documents(["the dog sleeps\nthe cat eats", "a dog eats"])
BENCH = DevBench(
    pd.DataFrame([{"task": "L1", "phenomenon": "p", "bin": 0, "word": "dog", "good": "a dog", "bad": ["dog a"]}]),
    per_cell=2, chance_margin=0.1, seed=0, notes=(),
)  # fmt: skip
PICTURES = pd.DataFrame({"image": ["1", "2"], "word": ["dog", 3], "category": ["animal", "animal"]})
ABOUT = {"format": 1, "per_cell": 2, "chance_margin": 0.1, "seed": 0, "notes": []}
F, C, N = [1.0, 4.0, 16.0], [1.0, 2.0, 3.0], [4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: Corpus.from_documents("the dog"), "one text"),
        (lambda: Corpus.from_documents(["the dog"], unit="page"), "no unit 'page'"),
        *((lambda share=share: CORPUS.split(share), "share=") for share in (0, 1, math.nan)),
        (lambda: fit_acquisition([math.nan, 2, 3], C, N, 0.5), "each at least 1"),
        (lambda: fit_acquisition(F, [5.0, 1, 1], N, 0.5), "between 0 and trials"),
        (lambda: fit_acquisition(F, [math.nan, 1, 1], N, 0.5), "each at least 1"),
        (lambda: fit_acquisition(F, C[:2], N, 0.5), "give \\(W,\\) each"),
        (lambda: fit_acquisition(F, C, N, 1.0), "chance=1"),
        (lambda: items_needed(0.6, 0.5, level=1.0), "level=1.0"),
        (lambda: items_needed(0.6, 0.5, power=math.nan), "power=nan"),
        (lambda: retrieval_alignment(np.ones((8, 2)), np.ones((8, 2)), folds=1), "folds=1"),
        (lambda: EgoStream(episode=0), "episode=0"),
        (lambda: EgoStream().record(0), "frames=0"),
    ],
)
def test_what_cannot_be_is_refused(call, word):
    with pytest.raises(FairtrialError, match=word):
        call()


def test_blank_utterances_say_nothing_and_times_must_be_finite(tmp_path):
    (tmp_path / "1.png").touch()
    (tmp_path / "2.png").touch()
    said = pd.DataFrame({"t": [1.0, 1.5, 2.0], "text": ["look", None, "a dog"]})
    assert Corpus.from_stream(tmp_path, said).utterances == ("look", "a dog")
    with pytest.raises(InputError, match="row 1 has no time"):
        Corpus.from_stream(tmp_path, said.assign(t=[1.0, np.inf, 2.0]))
    (tmp_path / "said.csv").write_text("t,text\n1,look,3\n")
    with pytest.raises(InputError, match="more fields than the header"):
        Corpus.from_stream(tmp_path, tmp_path / "said.csv")


NAN = [[math.nan, 1.0], [0.0, 1.0]]
SHOWN = [[True, False], [False, True]]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: retrieval(NAN, SHOWN), r"similarity is nan at \(0, 0\)"),
        (lambda: temporal_grounding(NAN, SHOWN, [0, 1]), "similarity is nan"),
        (lambda: binding([NAN]), r"similarity is nan at \(0, 0, 0\)"),
        (lambda: linear_probe(NAN, SHOWN, folds=2), "features is nan"),
        (lambda: retrieval([["a", "b"]], [[True, False]]), "real numbers"),
        (lambda: binding(np.ones((1, 2, 2)) * 1j), "real numbers"),
        (lambda: retrieval(np.ones((2, 2)), [[math.nan, 1], [0, 1]]), "shown: give an array of booleans"),
        (lambda: linear_probe(np.ones((4, 2)), np.arange(8).reshape(4, 2)), "shown: give an array of booleans"),
        (lambda: linear_probe(np.ones((4, 2)), np.ones((4, 1), bool), folds=1), "folds=1"),
        (lambda: linear_probe(np.ones((4, 2)), np.ones(4, bool)), "give \\(N, ...\\) and"),
        (lambda: retrieval(np.ones((2, 2)), SHOWN, k=3), "k=3: give a whole number from 1 to 2"),
        (lambda: temporal_grounding(np.ones((2, 2)), SHOWN, [0, 2]), r"times\[1\]=2"),
        (lambda: temporal_grounding(np.ones((2, 2)), SHOWN, [0, 1], window=0.5), "window=0.5"),
        (lambda: evaluate(BENCH, lambda texts: ["good"] * len(texts)), "list of no numbers"),
        (lambda: EgoStream(episode=math.nan), "episode=nan"),
        (lambda: EgoStream(mean_lag=math.inf), "mean_lag=inf"),
        (lambda: EgoStream(alpha="1"), "alpha='1'"),
        (lambda: EgoStream(most_in_view=0), "most_in_view=0"),
        (lambda: EgoStream().record(1.5), "frames=1.5"),
        (lambda: build_devbench(CORPUS, chance_margin=math.nan), "chance_margin=nan"),
        (lambda: linear_probe([[math.inf, 1.0], [0.0, 1.0]], SHOWN, folds=2), "features: give finite numbers"),
        (lambda: retrieval_alignment(NAN * 2, NAN * 2, folds=2), "frames is nan"),
        (lambda: retrieval_alignment(np.ones(8), np.ones((8, 2))), r"give \(U, d\)"),
        (lambda: label_alignment(NAN, ["dog", "cat"]), "visible: give an array of booleans"),
        (lambda: label_alignment(SHOWN, ["dog", "cat"], shuffles=0), "shuffles=0"),
        (lambda: EgoStream(episode=1.5), "episode=1.5"),
        (lambda: build_devbench(CORPUS, pictures=PICTURES), "row 1 of the pictures has the word 3: give text"),
    ],
)
def test_what_cannot_be_scored_is_not_scored_silently(call, word):
    with pytest.raises(FairtrialError, match=word):
        call()


@pytest.mark.parametrize("about", [[], {"format": 1}, {"notes": []}, {**ABOUT, "notes": None}])
def test_a_bench_file_of_other_content_is_refused(about, tmp_path):
    (tmp_path / "bench.json").write_text(json.dumps(about))
    (tmp_path / "items.jsonl").write_text("")
    with pytest.raises(InputError, match="generate the bench again"):
        DevBench.load(tmp_path)


def test_environments_and_alphas_are_refused_before_any_work():
    from fairtrial.evaluation.language_development.trial import DevelopmentParams, check

    smoke = {"text": "speech", "foreign_text": "", "model": ""}
    for wrong, word in (({"env": "Nowhere-v0"}, "env="), ({"alphas": (1.0, 2.0)}, "alpha=2")):
        with pytest.raises(InputError, match=word):
            check(DevelopmentParams(**smoke, **wrong))


def test_a_stream_of_bare_images_is_taken():
    import gymnasium
    from minigrid.wrappers import ImgObsWrapper

    env = ImgObsWrapper(gymnasium.make("BabyAI-PickupLoc-v0"))
    assert (EgoStream(env, seed=1).record(20).frames == EgoStream(seed=1).record(20).frames).all()
