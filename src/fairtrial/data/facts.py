"""Readers of facts: the samples ``analogies`` (word pairs by relation) and ``countries``."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd

from fairtrial.data.samples import sample_path


def word_relations() -> dict[str, list[tuple[str, str]]]:
    """Return the word pairs of 14 relations, such as ("Athens", "Greece") of "capital-world".

    Returns
    -------
    dict
        Relation to its distinct pairs in their order: "capital-common-countries", "capital-world", "currency",
        "city-in-state", "family", and nine of grammar, whose names begin with "gram".

    Raises
    ------
    MissingSampleError
        If the sample ``analogies`` has not been fetched.
    """
    relations: dict[str, dict[tuple[str, str], None]] = {}
    for line in sample_path("analogies", "questions-words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(":"):
            pairs = relations.setdefault(line[1:].strip(), {})
        elif words := line.split():
            pairs[words[0], words[1]] = pairs[words[2], words[3]] = None
    return {relation: [*pairs] for relation, pairs in relations.items()}


def countries() -> pd.DataFrame:
    """Return one row a country or territory, 246 of them, by name.

    Returns
    -------
    DataFrame with columns ``name``, ``code`` (ISO 3166, three letters), ``capital``, ``currency`` (ISO 4217),
    ``region`` (Africa, Americas, Asia, Europe, Oceania), ``subregion``, ``demonym``, ``population``, ``borders``
    (a list of codes). What is not known is ``None``, except that every row has a capital.

    Raises
    ------
    MissingSampleError
        If the sample ``countries`` has not been fetched.
    """
    files = sorted(sample_path("countries", "countries").glob("*.json"))
    told = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    codes = {one["ISO"]["alpha2"]: one["ISO"]["alpha3"] for one in told if "alpha3" in one["ISO"]}
    rows: dict[str, dict[str, Any]] = {}
    for one in sorted(told, key=lambda one: bool(one.get("demonym"))):  # of two files on one country, the fuller
        if capital := one.get("capital"):
            rows[one["ISO"]["alpha3"]] = {
                "name": one["name"],
                "code": one["ISO"]["alpha3"],
                "capital": capital[0] if isinstance(capital, list) else capital,
                "currency": next(iter(one.get("currencies") or []), None),
                **{key: one.get(key) or None for key in ("region", "subregion", "demonym", "population")},
                "borders": [codes.get(code, code) for code in one.get("borders") or []],
            }
    return pd.DataFrame([*rows.values()]).sort_values("name", ignore_index=True)
