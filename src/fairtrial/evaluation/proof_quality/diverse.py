"""Diversity: how many different ideas a set of proofs of one problem holds.

    d(p, q) = (1 - Jaccard of technique sets) / 2 + (1 - cosine of mean step embeddings, formulas masked) / 2
    Vendi   = exp(entropy of the eigenvalues of K / n),  K = 1 - d, made positive semidefinite by clipping

The Vendi score (Friedman and Dieng 2023) is 1 for n copies of one proof and n for n proofs without anything in common.
It grows with n, so sets are compared at a common n, by the mean over subsets of that size.

Formal proofs are compared by the lemmas they cite: as a set for Jaccard, and by how often for the cosine. Texts without
an encoder of sentences are compared by their words: mean over steps of unit vectors of counts of word stems.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.dependencies import content
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.evaluation.proof_quality.simplicity import Encoder, Taxonomy, default_taxonomy, masked
from fairtrial.seeds import generator

DISTINCT = 0.35  # proofs nearer than this are one idea
EXACT_UP_TO = 12  # proofs whose subsets are all taken
SUBSETS = 1000  # drawn where there are more


@dataclass(frozen=True)
class Diversity:
    """How different a set of proofs of one problem is.

    Attributes
    ----------
    vendi : effective number of different proofs among ``size``, from 1 to ``size``.
    distinct : clusters whose members are all nearer to each other than .35.
    size : proofs that ``vendi`` speaks of: as many as there are, or the common number it is rarefied to.
    clipped : the share of negative eigenvalues that was cut off; 0 for a proper kernel.
    """

    vendi: float
    distinct: int
    size: int
    clipped: float


def diversity(
    proofs: Sequence[Proof],
    *,
    encoder: Encoder | None = None,
    taxonomy: Taxonomy | None = None,
    size: int | None = None,
    seed: int = 0,
) -> Diversity:
    """Return how different the correct proofs of one problem are; wrong ones are left out.

    Parameters
    ----------
    encoder : of sentences, for the embeddings of steps and for technique tags; without one, words are compared.
    size : rarefy the Vendi score to this many proofs: the mean over subsets, all of them for up to 12 proofs and 1000
        drawn by ``seed`` beyond.

    Raises
    ------
    InputError
        Fewer than two correct proofs, proofs of several problems, or of unknown correctness.

    Examples
    --------
    >>> texts = ["We use induction on the number of edges.", "We count the pairs in two ways."]
    >>> diversity([Proof(text, "handshake", correct=True) for text in texts])
    Diversity(vendi=2.0, distinct=2, size=2, clipped=0.0)
    """
    if len({proof.problem for proof in proofs}) > 1:
        raise InputError("diversity is that of proofs of one problem: give each problem's proofs separately")
    if unknown := sum(proof.correct is None for proof in proofs):
        raise InputError(f"correct is not known of {unknown} proofs: judge them first, wrong proofs inflate diversity")
    right = [proof for proof in proofs if proof.correct]
    if len(right) < 2:
        raise InputError(f"diversity needs two correct proofs, there are {len(right)}: sample more")
    apart = distances(right, encoder=encoder, taxonomy=taxonomy)
    score, clipped = vendi(1 - apart)
    if size is not None:
        score = rarefied_vendi(1 - apart, size, seed=seed)
    return Diversity(score, distinct(apart), size or len(right), clipped)


def distances(
    proofs: Sequence[Proof], *, encoder: Encoder | None = None, taxonomy: Taxonomy | None = None
) -> np.ndarray:
    """Return the distances of proofs, (n, n), symmetric, from 0 to 1, 0 on the diagonal."""
    if len({proof.formal for proof in proofs}) > 1:
        raise InputError("formal and informal proofs cannot be compared: give one kind")
    known = taxonomy or default_taxonomy()
    ideas: list[set[str]]
    if proofs[0].formal:
        ideas = [set(_cited(proof)) for proof in proofs]
        vectors = _counted([_cited(proof) for proof in proofs])
    else:
        ideas = [set().union(*known.tag(proof, encoder=encoder)) for proof in proofs]
        vectors = (
            _worded(proofs) if encoder is None else np.stack([np.mean(encoder(masked(p)), axis=0) for p in proofs])
        )
    shared = np.array([[len(a & b) / len(a | b) if a | b else 1.0 for b in ideas] for a in ideas])
    norms = np.linalg.norm(vectors, axis=1)
    cosine = vectors @ vectors.T / np.maximum(np.outer(norms, norms), 1e-12)
    cosine[np.ix_(norms == 0, norms == 0)] = 1.0  # two proofs without a word
    apart = (1 - shared) / 2 + (1 - np.clip(cosine, 0, 1)) / 2
    np.fill_diagonal(apart, 0.0)
    return (apart + apart.T) / 2


def _cited(proof: Proof) -> Counter[str]:
    """Return how often a formal proof applies each lemma; of steps that a database knows, its own typecode only."""
    counts = Counter(step.text for step in proof.steps)
    if proof.library is None or proof.label is None:
        return counts
    asserted = set(proof.library.cites(proof.label))
    return Counter({label: count for label, count in counts.items() if label in asserted})


def _counted(bags: Sequence[Counter[str]]) -> np.ndarray:
    """Return counts as vectors, (n, words)."""
    index = {word: i for i, word in enumerate(dict.fromkeys(word for bag in bags for word in bag))}
    vectors = np.zeros((len(bags), max(1, len(index))))
    for row, bag in enumerate(bags):
        for word, count in bag.items():
            vectors[row, index[word]] = count
    return vectors


def _worded(proofs: Sequence[Proof]) -> np.ndarray:
    """Return the mean over steps of unit vectors of word stems, (n, words)."""
    steps = [(row, content(step).words) for row, proof in enumerate(proofs) for step in proof.steps]
    bags: list[Counter[str]] = [Counter() for _ in proofs]
    for row, words in steps:
        for word in sorted(words):  # an order that does not differ between processes: sums round alike
            bags[row][word] += 1 / math.sqrt(len(words)) / len(proofs[row])  # type: ignore[assignment]
    return _counted(bags)


def vendi(kernel: np.ndarray) -> tuple[float, float]:
    """Return the Vendi score of a similarity matrix (n, n) with ones on the diagonal, and what clipping cut off.

    Negative eigenvalues, which a kernel of one's own may have, are set to 0 and the others scaled to a sum of 1; the
    second value is their share of the sum of all absolute eigenvalues.

    >>> float(round(vendi(np.array([[1.0, 0.5], [0.5, 1.0]]))[0], 4))  # exp(.5623)
    1.7548
    """
    values = np.linalg.eigvalsh(np.asarray(kernel, dtype=float))
    negative = -values[values < 0].sum()
    clipped = float(negative / np.abs(values).sum()) if negative > 1e-12 * len(values) else 0.0
    return float(_vendi_of(values[None])[0]), clipped


def rarefied_vendi(kernel: np.ndarray, size: int, *, seed: int = 0, exact: bool | None = None) -> float:
    """Return the mean Vendi score of subsets of ``size`` proofs.

    ``exact`` takes all subsets; left out, that is done for up to 12 proofs, and 1000 subsets are drawn beyond.

    Raises
    ------
    InputError
        ``size`` lies outside 2..n.
    """
    n = len(kernel)
    if not 2 <= size <= n:
        raise InputError(f"{n} proofs can be rarefied to 2..{n} of them, not {size}")
    if (n <= EXACT_UP_TO) if exact is None else exact:
        chosen = np.array(list(itertools.combinations(range(n), size)))  # (subsets, size)
    else:
        rng = generator(seed, "rarefaction")
        chosen = rng.random((SUBSETS, n)).argsort(axis=1)[:, :size]
    values = np.linalg.eigvalsh(kernel[chosen[:, :, None], chosen[:, None, :]])  # (subsets, size)
    return float(_vendi_of(values).mean())


def _vendi_of(values: np.ndarray) -> np.ndarray:
    """Return exp of the entropy of eigenvalues (..., n), clipped at 0."""
    share = np.clip(values, 0, None)
    share = share / share.sum(axis=-1, keepdims=True)
    return np.exp(-(share * np.log(np.where(share > 0, share, 1))).sum(axis=-1))


def distinct(apart: np.ndarray, *, below: float = DISTINCT) -> int:
    """Return the number of clusters of complete linkage in which all proofs are nearer to each other than ``below``."""
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    if len(apart) == 1:
        return 1
    joined = linkage(squareform(apart, checks=False), method="complete")
    return int(fcluster(joined, np.nextafter(below, 0), criterion="distance").max())
