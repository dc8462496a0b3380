"""Synthetic results: what a trial leaves in its folder, without a trial."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

ROLES = {
    "FiedlerPrune": "method",
    "Wanda": "baseline",
    "magnitude": "baseline",
    "random mask": "control",
    "dense": "reference",
}


def claim(id, text, verdict="HOLDS", *, kind="difference", estimate=0.11, half=0.05, bound=None, children=(), **fields):
    """Return a claim's entry; ``fields`` replace any of it."""
    quantity = {
        "difference": {"a": "FiedlerPrune", "b": "Wanda", "metric": "perplexity", "where": {}, "scale": "log"},
        "level": {"a": "FiedlerPrune", "metric": "accuracy", "where": {}},
        "statistic": {"name": "slope_over_draws"},
        "contrast": {
            "terms": [
                {"candidate": "FiedlerPrune", "metric": "accuracy", "where": {"sparsity": 0.5}, "weight": 1.0},
                {"candidate": "FiedlerPrune", "metric": "accuracy", "where": {"sparsity": 0.7}, "weight": -1.0},
            ]
        },
    }.get(kind, {})
    quantity = {"kind": kind, **quantity, **fields.pop("quantity", {})}
    numbers = estimate is not None and kind not in ("exact", "all_of", "for_each")
    return {
        "id": id, "part": "quality", "text": text, "verdict": verdict, "quantity": quantity, "over": "replicate",
        "difference": estimate if numbers else None, "low": estimate - half if numbers else None,
        "high": estimate + half if numbers else None, "level": 0.9833, "low95": None, "high95": None,
        "bound": ({"above": 0.0} if bound is None and numbers else bound) or {}, "p_value": 0.0031 if numbers else None,
        "cells": 20 if numbers else 0, "lost": 0, "units": 5 if numbers else 0,
        "sample_gain": 4.2 if numbers else None, "paired_gain": 3.0 if numbers else None,
        "cost_ratio": 1.83 if numbers else None, "reason": None, "claims": list(children), **fields,
    }  # fmt: skip


SIX = (
    claim("C1a", "With Wanda as the base metric, FiedlerPrune loses less perplexity than Wanda alone."),
    claim("C1b", "Connectivity by the whole spectrum on top of Wanda loses less perplexity than Wanda alone.",
          "UNDECIDED", estimate=0.02, half=0.045, quantity={"where": {"sparsity": 0.5}}),
    claim("C2", "FiedlerPrune finds the right answer more often than magnitude pruning, by at least 0.02.", "FAILS",
          estimate=-0.031, half=0.018, bound={"above": 0.02},
          quantity={"b": "magnitude", "metric": "accuracy", "scale": "raw"}),
    claim("C3", "The graph itself matters.", "UNDECIDED", kind="all_of", children=(
        claim("C3.permuted", "FiedlerPrune beats the same scores with the graph term permuted.",
              estimate=0.08, half=0.03),
        claim("C3.blockwide", "FiedlerPrune beats the same block-wide comparison without a graph.", "UNDECIDED",
              estimate=0.012, half=0.03, quantity={"b": "magnitude"}),
    )),
    claim("C5", "FiedlerPrune takes at most three times Wanda’s pruning time.", estimate=-0.6, half=0.11,
          bound={"above": -1.0986}, part="time", quantity={"metric": "pruning time"}),
    claim("C6", "Wanda loses less log perplexity than a random mask, by at least 1 (a check of the trial itself).",
          estimate=3.4, half=0.4, bound={"above": 1.0}, quantity={"a": "Wanda", "b": "random mask"}),
)  # fmt: skip
MORE = (
    claim("C7", "At every sparsity FiedlerPrune is at least as accurate as Wanda.", "HOLDS", kind="for_each",
          quantity={"factor": "sparsity"}, children=[
        claim(f"C7[sparsity={s}]", "At every sparsity FiedlerPrune is at least as accurate as Wanda.",
              estimate=0.03, half=0.02, quantity={"metric": "accuracy", "scale": "raw", "where": {"sparsity": s}})
        for s in (0.5, 0.7)]),
    claim("C8", "The mask keeps exactly half of the weights.", kind="exact"),
    claim("R1", "How accurate the pruned model is.", "REPORTED", kind="level", estimate=0.612, half=0.013, bound={}),
    claim("R2", "What is lost from half to seventy per cent.", "REPORTED", kind="contrast", estimate=0.07,
          half=0.02, bound={}),
    claim("C9", "The advantage grows with the draw.", "UNDECIDED", kind="statistic", estimate=0.4, half=1.0,
          low=None, high=None, reason="5 units: a bootstrap needs 8"),
    claim("C10", "It beats SparseGPT.", "UNDECIDED", estimate=None, reason="these parameters leave out 'SparseGPT'"),
)  # fmt: skip


def cells_of(candidates=ROLES, *, draws=5, sparsities=(0.5, 0.7), lost=0, diverged=0, seed=0):
    """Return a part's cells: two metrics, a replicate and a setting."""
    rng = np.random.default_rng(seed)
    shift = {draw: rng.normal(0, 0.05) for draw in range(draws)}
    rows = []
    for draw, sparsity in itertools.product(range(draws), sparsities):
        for i, (label, role) in enumerate(candidates.items()):
            harm = (0.0 if role == "reference" else 3.0 if role == "control" else 0.2 + 0.1 * i) * sparsity / 0.5
            rows.append({
                "part": "quality", "candidate": label, "role": role, "draw": draw, "sparsity": sparsity,
                "perplexity": float(np.exp(2.9 + harm + shift[draw] + rng.normal(0, 0.03))),
                "accuracy": float(np.clip(0.7 - 0.1 * harm + shift[draw] / 4 + rng.normal(0, 0.01), 0.01, 0.99)),
                "seconds": float(rng.gamma(9, 1.5)), "peak": 1.3e9 + 1e8 * i, "status": "done", "reason": None,
            })  # fmt: skip
    for row in rows[1 : 1 + 7 * lost : 7]:
        row |= {"perplexity": None, "accuracy": None, "status": "failed",
                "reason": "LinAlgError: eigenvalues did not converge (fiedler.py:41)"}  # fmt: skip
    for row in rows[3 : 3 + 5 * diverged : 5]:
        row["perplexity"] = float("inf")
    return pd.DataFrame(rows)


def summary_of(cells):
    """Return means and intervals as a trial's summary has them."""
    entries = []
    for (label, role, sparsity), group in cells.groupby(["candidate", "role", "sparsity"], sort=False):
        for metric in ("perplexity", "accuracy"):
            values = pd.to_numeric(group[metric]).to_numpy(float)
            finite = values[np.isfinite(values)]
            half = 2.0 * finite.std(ddof=1) / len(finite) ** 0.5 if len(finite) > 1 else float("nan")
            mean = finite.mean() if len(finite) else float("nan")
            ends = [None if np.isnan(v) else float(v) for v in (mean, mean - half, mean + half)]
            entries.append({
                "part": "quality", "candidate": label, "role": role, "metric": metric, "where": {"sparsity": sparsity},
                **dict(zip(("mean", "low", "high"), ends, strict=True)), "cells": len(finite),
                "lost": int((group["status"] == "failed").sum()),
            })  # fmt: skip
    return entries


def document_of(cells, claims=SIX, **changes):
    """Return a whole ``result.json``."""
    roles = dict(cells[["candidate", "role"]].drop_duplicates().itertuples(index=False))
    lost = cells[cells["status"] == "failed"]
    part = {
        "name": "quality", "variance": "independent", "timed": False,
        "factors": [
            {"name": "draw", "kind": "replicate", "values": sorted(cells["draw"].unique().tolist())},
            {"name": "sparsity", "kind": "setting", "values": cells["sparsity"].unique().tolist()},
        ],
        "metrics": [
            {"name": "perplexity", "unit": "", "higher_is_better": False, "per": None},
            {"name": "accuracy", "unit": "share of answers", "higher_is_better": True, "per": None},
        ],
        "candidates": [{"label": c, "role": r, "tuned": 6 if r == "baseline" else 0} for c, r in roles.items()],
        "planned": len(cells), "done": len(cells) - len(lost), "lost": len(lost),
    }  # fmt: skip
    time = {
        "name": "time", "variance": "independent", "timed": True, "factors": [], "planned": 10, "done": 10, "lost": 0,
        "metrics": [{"name": "pruning time", "unit": "s", "higher_is_better": False, "per": None}],
        "candidates": part["candidates"][:2],
    }  # fmt: skip
    stages = {"magnitude": 2.0, "Wanda": 40.5, "FiedlerPrune": 71.0}
    costs = [
        {"candidate": c, "role": r, "seconds": 9.0 + stages.get(c, 0.4) + i, "peak": 1.6e9 + 3e8 * i,
         "peak_sampled": i % 2 == 1, "stages": {"prune": stages[c]} if c in stages else {}}
        for i, (c, r) in enumerate(roles.items())
    ]  # fmt: skip
    costs.append({"candidate": None, "role": None, "seconds": 25.0, "peak": None, "peak_sampled": False,
                  "stages": {"load_model": 3.0, "calibration_inputs": 22.0}})  # fmt: skip
    return {
        "schema": 1, "fairtrial": "0.1.0", "trial": "pruning", "method": "FiedlerPrune",
        "line": "Prune a language model in one shot, keeping each Transformer block well connected.",
        "finished": "2026-11-30T20:14:09+00:00", "preset": None, "command": "fairtrial run pruning --set sparsity=0.5",
        "parameters": {"model": "smollm2-135m", "sparsities": [0.5, 0.7], "draws": 5, "text": None}, "level": 0.95,
        "seeds": {"quality": list(range(cells["draw"].nunique()))}, "inputs": {"model": "3f0c9d1f00aa77b1"},
        "until": None, "peeked": False, "notes": [],
        "machine": {"processor": "Example CPU @ 2.60GHz", "cores": 2, "memory": 8_322_000_000, "system": "Linux 6.1",
                    "python": "3.11.9", "gpu": None},
        "versions": {"fairtrial": "0.1.0", "numpy": "2.4.6", "torch": "2.9.1", "transformers": "5.1.0"},
        "code": {"quality": dict.fromkeys(roles, "0f1e2d3c4b5a6978")}, "parts": [part, time], "claims": list(claims),
        "summary": summary_of(cells), "costs": costs,
        "lost": [{"part": "quality", "candidate": r.candidate, "factors": {"draw": r.draw, "sparsity": r.sparsity},
                  "reason": r.reason} for r in lost.itertuples()],
        "paper": [
            "Layer-wise pruning scores each linear layer alone and misses the dependencies between layers.",
            "The paper reports consistent gains over layer-wise baselines. Its abstract gives no figure.",
        ],
        **changes,
    }  # fmt: skip


def curves_of(cells):
    """Return an items table with a loss curve a cell, and scores of items beside them."""
    frames = []
    for row in cells[cells["sparsity"] == 0.5].itertuples():
        x = np.arange(0, 500, 5.0)
        level = {"method": 1.0, "baseline": 1.3, "control": 3.0, "reference": 0.8}[row.role] + row.draw / 40
        frames.append(pd.DataFrame({
            "part": "quality", "candidate": row.candidate, "cell": json.dumps({"draw": row.draw}),
            "metric": "training loss", "kind": "curve", "item": None, "x": x,
            "value": level + 3 * np.exp(-x / (40 + 20 * level)),
        }))  # fmt: skip
    frames.append(frames[0].assign(kind="items", item="q1", x=np.nan, metric="accuracy"))
    return pd.concat(frames, ignore_index=True)


def save(folder, document, cells=None, items=None):
    """Write a result folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(document, default=int), encoding="utf-8")
    if cells is not None:
        cells.to_parquet(folder / "cells.parquet", index=False)
    if items is not None:
        items.to_parquet(folder / "items.parquet", index=False)
    return folder


@pytest.fixture(scope="session")
def make():
    """The factory."""
    return SimpleNamespace(
        claim=claim, SIX=SIX, MORE=MORE, cells=cells_of, document=document_of, curves=curves_of, save=save, ROLES=ROLES
    )
