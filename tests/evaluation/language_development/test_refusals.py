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
    fit_acquisition,
    items_needed,
    retrieval_alignment,
)

CORPUS = Corpus.from_documents(["the dog sleeps\nthe cat eats", "a dog eats"])
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


@pytest.mark.parametrize("about", [[], {"format": 1}, {"notes": []}])
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
