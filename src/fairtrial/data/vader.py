"""Readers of the sample ``vader``: English sentences rated for sentiment by many people, and a lexicon of sentiment."""

from __future__ import annotations

import json
import tarfile

import pandas as pd

from fairtrial.data.samples import sample_path
from fairtrial.errors import UnknownNameError

_FILES = {
    "tweets": "tweets",
    "amazon": "amazonReviewSnippets",
    "movies": "movieReviewSnippets",
    "nyt": "nytEditorialSnippets",
}
DOMAINS = tuple(_FILES)
"""The domains: posts, product reviews, film reviews and newspaper editorials, a sentence or short text a row."""


def vader_sentences(domain: str) -> pd.DataFrame:
    """Return the rated sentences of a domain.

    Parameters
    ----------
    domain : {"tweets", "amazon", "movies", "nyt"}

    Returns
    -------
    DataFrame with columns ``text``, ``mean`` (of its ratings, -4 most negative to 4 most positive) and ``ratings``
    (a list of 15 to 99 whole numbers, in no order that would name a rater). Tweets whose published mean is not that
    of their published ratings, 199 of 4,200, are left out.

    Raises
    ------
    UnknownNameError
        If there is no such domain.
    MissingSampleError
        If the sample has not been fetched.
    """
    if domain not in _FILES:
        raise UnknownNameError("domain", domain, DOMAINS)
    texts, ratings = (_rows(f"{_FILES[domain]}_{kind}.txt") for kind in ("GroundTruth", "anonDataRatings"))
    rows = []
    for key, (stated, text) in texts.items():
        rated = json.loads(ratings[key][2])
        mean = sum(rated) / len(rated)
        if abs(mean - float(stated)) < 1e-3:
            rows.append((text, mean, rated))
    return pd.DataFrame(rows, columns=["text", "mean", "ratings"])


def vader_lexicon() -> dict[str, float]:
    """Return the mean valence of 7,500 words, acronyms and emoticons, -4 (most negative) to 4.

    Raises
    ------
    MissingSampleError
        If the sample has not been fetched.
    """
    lines = sample_path("vader", "lexicon.txt").read_text(encoding="utf-8").splitlines()
    return {token: float(valence) for token, valence, *_ in (line.split("\t") for line in lines if line)}


def _rows(name: str) -> dict[str, list[str]]:
    """Read one tab-separated file of the archive: first column to the others."""
    with tarfile.open(sample_path("vader", "ratings.tar.gz")) as tar:
        file = tar.extractfile(f"hutto_ICWSM_2014/{name}")
        assert file is not None, f"{name} is a regular file"
        lines = file.read().decode("utf-8-sig").splitlines()
    return {key: columns for key, *columns in (line.split("\t") for line in lines)}
