"""``fairtrial apply proof-quality``: a file of proofs goes in, a table of their quality comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.outputs import check_file

if TYPE_CHECKING:
    from fairtrial.evaluation.proof_quality.simplicity import Encoder
    from fairtrial.judges import Judge


def proof_quality(
    proofs: Annotated[
        Path,
        typer.Argument(
            help="A .jsonl file, a proof a line: problem_id, proof (LaTeX or a list of steps) and, if known, model, "
            "correct, technique_requested, statement."
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Table with one row a proof: .parquet or .csv.")],
    judge: Annotated[
        str | None, typer.Option(help="Base URL of an OpenAI-compatible endpoint, or a local model's folder.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the judge's URL.")] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the judge's replies for a rerun; left out, it is beside --out."),
    ] = None,
    votes: Annotated[int, typer.Option(min=1, help="Replies to each question, sampled if more than one.")] = 1,
    taxonomy: Annotated[Path | None, typer.Option(help="A TOML file of techniques and levels of your own.")] = None,
    encoder: Annotated[
        str | None, typer.Option(help="Folder of a sentence encoder, or the sample minilm; words if left out.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(help="Two models, compared on the problems that both have solved.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Score proofs of unknown correctness as if they were correct.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON, nothing else.")] = False,
) -> None:
    """Score proofs for conciseness, ease, simplicity and diversity, correctness apart."""
    from fairtrial.evaluation.proof_quality.proof import read_jsonl
    from fairtrial.evaluation.proof_quality.rank import rank_proofs
    from fairtrial.evaluation.proof_quality.simplicity import Taxonomy

    check_file(out, ".parquet", ".csv", inputs=[proofs])
    if judge is not None and judge.startswith(("http://", "https://")) and model is None:
        raise InputError(f"--judge {judge}: name the model it serves with --model")
    given = read_jsonl(proofs)
    known = Taxonomy(taxonomy)
    for proof in given:
        if proof.requested is not None:
            known[proof.requested]  # refused before anything is asked
    models = {proof.model for proof in given}
    for name in compare or ():
        if name not in models:
            raise UnknownNameError("model", name, sorted(filter(None, models)))
    # What a judge has said is kept from the first reply: whatever ends the run, the next one asks only the rest.
    kept = cache or out.with_suffix(".replies")
    table = rank_proofs(
        given,
        judge=None if judge is None else _judge(judge, model, kept, 0.7 if votes > 1 else 0.0),
        votes=votes,
        taxonomy=taxonomy,
        encoder=None if encoder is None else _encoder(encoder),
        force=force,
    )
    if out.suffix == ".csv":
        table.frame.to_csv(out, index=False)
    else:
        table.frame.to_parquet(out, index=False)
    against = None if compare is None else table.compare(*compare)  # refuses few common problems; the table is written
    if as_json:
        frames = {"summary": table.summary(), "sets": table.sets, "comparison": against}
        found = {k: None if v is None else json.loads(v.to_json(orient="records")) for k, v in frames.items()}
        fronts = {metric: table.pareto(metric) for metric in table.metrics}
        asked = {model: {"rate": score.rate, "lift": score.lift} for model, score in table.adaptivity.items()}
        judged = None if table.reliability is None else str(table.reliability)
        typer.echo(json.dumps({"out": str(out), **found, "pareto": fronts, "adaptivity": asked, "judge": judged}))
        return
    typer.echo(str(table))
    for name, score in table.adaptivity.items():
        typer.echo(f"{name} follows {score.rate:.2f} of the requests, {score.lift:+.2f} above its own habit")
    if compare is not None and against is not None:
        typer.echo(f"{compare[0]} minus {compare[1]}, on common problems:\n{against.to_string(index=False)}")
    typer.echo(f"written to {out}")


def _judge(judge: str, model: str | None, cache: Path, temperature: float) -> Judge:
    from fairtrial.judges import LocalJudge, OpenAIJudge

    if judge.startswith(("http://", "https://")):
        asked = OpenAIJudge(judge, str(model), cache=cache, temperature=temperature)
        asked.chat.probe()
        return asked
    if not Path(judge).exists():
        raise InputError(f"--judge {judge}: give the URL of an endpoint, or the folder or .gguf file of a model")
    return LocalJudge(judge, cache=cache, temperature=temperature)


def _encoder(encoder: str) -> Encoder:
    from fairtrial.data.samples import sample_path
    from fairtrial.sentences import SentenceEncoder

    return SentenceEncoder(Path(encoder) if Path(encoder).exists() else sample_path(encoder))
