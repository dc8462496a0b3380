"""The bank: twenty classical theorems with two to four proofs each, written for this library, tagged by technique."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fairtrial.evaluation.proof_quality.proof import Proof


class BankProof(NamedTuple):
    """A correct proof of the bank, and its techniques."""

    proof: Proof
    techniques: frozenset[str]


@cache
def bank() -> tuple[BankProof, ...]:
    """Return the proofs of the bank, theorem by theorem; ``proof.problem`` is the theorem's id.

    >>> len(bank()), len({entry.proof.problem for entry in bank()})
    (55, 20)
    """
    theorems = tomllib.loads(Path(__file__).with_name("bank.toml").read_text(encoding="utf-8"))["theorem"]
    return tuple(
        BankProof(
            Proof(entry["text"], theorem["id"], correct=True, statement=theorem["statement"]),
            frozenset(entry["techniques"]),
        )
        for theorem in theorems
        for entry in theorem["proof"]
    )
