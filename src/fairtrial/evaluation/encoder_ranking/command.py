"""``fairtrial apply encoder-ranking``: feature files go in, a ranking comes out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairtrial.errors import InputError
from fairtrial.outputs import check_file

if TYPE_CHECKING:
    from rich.table import Table

    from fairtrial.evaluation.encoder_ranking.ranking import Ranking


def encoder_ranking(
    features: Annotated[
        list[Path],
        typer.Argument(
            help="Feature files (items, features), one an encoder: .npy, or .npz and .safetensors of several."
        ),
    ],
    *,
    reference: Annotated[
        list[Path], typer.Option(help="The reference encoder's features; twice or more for the mean rank over several.")
    ],
    families: Annotated[Path | None, typer.Option(help="CSV with the columns encoder and family.")] = None,
    score: Annotated[str, typer.Option(help="ssr_dagger, ssr_z, cka, rankme, ssr or projected_rankme.")] = "ssr_dagger",
    stages: Annotated[int, typer.Option(help="2: the families' representatives, then the best family.")] = 1,
    rank: Annotated[int, typer.Option(help="Components of the reference.")] = 32,
    bootstrap: Annotated[int, typer.Option(help="Resamples of the items behind intervals; 0 for none.")] = 200,
    labels: Annotated[
        Path | None, typer.Option(help="Labels of the items, .npy: evaluate encoders with them and choose one.")
    ] = None,
    labelled: Annotated[
        Path | None, typer.Option(help="Rows of the items that the labels belong to, .npy; left out, all or the first.")
    ] = None,
    budget: Annotated[int, typer.Option(help="Encoders to evaluate with labels.")] = 5,
    strategy: Annotated[str, typer.Option(help="prior: in the ranking's order; bandit: by halving.")] = "prior",
    seed: Annotated[int, typer.Option(help="Of resamples and ties.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the ranking as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ranking as JSON, nothing else.")] = False,
) -> None:
    """Rank pretrained encoders on your unlabelled items, across architectures."""
    import warnings

    import numpy as np
    from rich.console import Console

    from fairtrial.evaluation.encoder_ranking.few_labels import FewLabelSelector
    from fairtrial.evaluation.encoder_ranking.files import read_families, read_features, read_vector
    from fairtrial.evaluation.encoder_ranking.ranking import rank_encoders
    from fairtrial.evaluation.encoder_ranking.subspace import Features

    if labelled is not None and labels is None:
        raise InputError(f"--labelled {labelled}: give the --labels of these rows too")
    check_file(out, inputs=[*features, *reference, families, labels, labelled])
    pool = read_features(features)
    # A reference among the features is named, so that it is no candidate; another is given as it is.
    inside = {path.resolve() for path in features}
    references: list[Any] = [
        name if path.resolve() in inside else Features(values, name)
        for path in reference
        for name, values in read_features([path]).items()
    ]
    known = read_families(families) if families else {}
    if families and not known.keys() & pool.keys():
        raise InputError(f"{families}: names {', '.join(known)}, but the encoders are {', '.join(pool)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it is among the notes
        ranking = rank_encoders(
            pool,
            reference=references if len(references) > 1 else references[0],
            score=score,
            families={name: family for name, family in known.items() if name in pool} or None,
            stages=stages,  # type: ignore[arg-type]
            rank=rank,
            bootstrap=bootstrap,
            seed=seed,
        )
    report = ranking.to_dict()
    if labels is not None:
        y = read_vector(labels)
        rows = read_vector(labelled) if labelled else np.arange(len(y))
        items = len(next(iter(pool.values())))
        if rows.dtype.kind not in "iu" or len(rows) != len(y) or rows.min() < 0 or rows.max() >= items:
            raise InputError(f"{labels}: {len(y)} labels for {len(rows)} rows of {items} items: give --labelled rows")
        if len(np.unique(rows)) < len(rows):
            raise InputError(f"{labelled}: a row occurs twice, and a probe would be tested on what it has learned")
        selector = FewLabelSelector(ranking, budget=budget, strategy=strategy, seed=seed)  # type: ignore[arg-type]
        selector.fit({name: np.asarray(pool[name])[rows] for name in ranking.order}, y)
        report["labelled"] = {
            "best": selector.best_,
            "regret_bound": selector.regret_bound_,
            "accuracy": {name: float(seen.mean()) for name, seen in selector.observed.items()},
        }
    if out is not None:
        out.write_text(json.dumps(report, indent=1))
    if as_json:
        typer.echo(json.dumps(report))
        return
    console = Console()
    console.print(_table(ranking))
    lines = list(ranking.notes)
    if labels is not None:
        found = report["labelled"]
        seen = ", ".join(f"{name} {accuracy:.3f}" for name, accuracy in found["accuracy"].items())
        lines.append(f"accuracy of a probe on {len(y)} labels: {seen}")
        lines.append(f"chosen: {found['best']}; of those evaluated none gains more than {found['regret_bound']:.3f}")
    lines += [f"written to {out}"] if out else []
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)  # a name may hold brackets


def _table(ranking: Ranking) -> Table:
    """Lay out the ranking for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    reference = " and ".join(ranking.references)
    table = Table(
        "encoder",
        "family",
        "width",
        ranking.score,
        "95 %",
        "first",
        title=f"Encoders by what a probe of {reference} reads",
    )
    for name in ranking.order:
        (low, high), first = ranking.intervals[name], ranking.p_best[name]
        table.add_row(
            escape(name),
            escape(ranking.families.get(name, "")),
            str(ranking.widths[name]),
            f"{ranking.scores[name]:.4g}",
            "" if math.isnan(low) else f"{low:.3f} to {high:.3f}",
            "" if math.isnan(first) else f"{first:.0%}",
        )
    return table
