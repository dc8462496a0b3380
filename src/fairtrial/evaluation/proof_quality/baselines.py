"""What ProofRank is compared with: lengths, a language model's surprise, overlap of tokens, one grade, and chance.

All are turned so that more is better: shorter, less surprising, less alike.
"""

from __future__ import annotations

import gzip
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.seeds import generator


def token_score(proof: Proof) -> float:
    """Return minus the number of tokens."""
    return -float(proof.length)


def gzip_score(proof: Proof) -> float:
    """Return minus the bytes of the source, compressed: a length that repetition does not add to."""
    return -float(len(gzip.compress(proof.source.encode(), mtime=0)))


def random_score(proof: Proof, *, seed: int = 0) -> float:
    """Return a number in [0, 1) that depends on the source and on nothing in it: the control."""
    return float(generator(seed, "random score", proof.source).random())


def fluency_scores(proofs: Sequence[Proof], model: Any, tokenizer: Any) -> list[float]:
    """Return minus the mean loss of each text under a causal language model, in nats a token."""
    from fairtrial.causal_lm.likelihood import token_log_likelihoods

    ids = [tokenizer(proof.text)["input_ids"] for proof in proofs]
    return [float(row.double().mean()) for row in token_log_likelihoods(model, ids)]


def self_bleu(one: Sequence[str], other: Sequence[str], *, longest: int = 4) -> float:
    """Return the BLEU of two token sequences, each read as the other's reference, averaged; in [0, 1], 1 = alike.

    Geometric mean of the precisions of 1- to 4-grams, those without a match counted as half a match (smoothing by
    epsilon, Chen and Cherry 2014), times the brevity penalty (Papineni et al. 2002).

    >>> self_bleu("a b c d e".split(), "a b c d e".split())
    1.0
    """
    return (_bleu(one, other, longest) + _bleu(other, one, longest)) / 2


def _bleu(candidate: Sequence[str], reference: Sequence[str], longest: int) -> float:
    logs = []
    for n in range(1, min(longest, len(candidate)) + 1):
        found, known = _ngrams(candidate, n), _ngrams(reference, n)
        matches = sum(min(count, known[gram]) for gram, count in found.items())
        logs.append(math.log(max(matches, 0.5) / sum(found.values())))
    brevity = min(0.0, 1 - len(reference) / len(candidate))
    return math.exp(float(np.mean(logs)) + brevity)


def _ngrams(tokens: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


def tokens_of(proof: Proof) -> list[str]:
    """Return the tokens of a proof in order, words in lower case; of a formal proof, its labels."""
    if proof.formal:
        return [step.text for step in proof.steps]
    return [
        token for step in proof.steps for token in (*step.prose.lower().split(), *(t for f in step.formulas for t in f))
    ]
