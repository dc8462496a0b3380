"""The commands. Each imports what it needs when it runs, so that ``--help`` and ``list`` start at once."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from fairtrial import cards
from fairtrial.cli import INTERRUPTED
from fairtrial.errors import InputError, UnknownNameError

app = typer.Typer(
    name="fairtrial",
    help="Give every method a fair trial.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
samples_app = typer.Typer(help="Data and models that trials use by default.", no_args_is_help=True)
app.add_typer(samples_app, name="samples")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Worker processes; all cores if left out.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of each worker.")]
Engine = Annotated[str, typer.Option(help="'local' workers, or 'ray' for a Ray cluster.")]
TimeLimit = Annotated[float | None, typer.Option(min=0.001, help="Seconds after which a cell is given up as lost.")]
UntilFlat = Annotated[bool, typer.Option("--until-flat", help="Stop when more replicates add little.")]
UntilDecided = Annotated[bool, typer.Option("--until-decided", help="Stop when every claim is decided.")]
Retry = Annotated[bool, typer.Option("--retry", help="Measure lost cells again.")]
Level = Annotated[float, typer.Option(min=0.5, max=0.9999, help="Confidence level of the verdicts together.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Version = Annotated[bool, typer.Option("--version", help="Print the version.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.callback(invoke_without_command=True)
def _main(context: typer.Context, version: Version = False, debug: Debug = False) -> None:
    if version:
        from fairtrial import __version__

        print(f"fairtrial {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list")
def list_(
    area: Annotated[str | None, typer.Argument(help="Only this area.")] = None,
    working: Annotated[bool, typer.Option("--working", help="Only what works today.")] = False,
    json: Json = False,
) -> None:
    """List all methods and their state."""
    from fairtrial.cli import show

    show.catalogue(area, working, as_json=json)


@app.command("show")
def show_(name: Annotated[str, typer.Argument(help="Any name of a system.")], json: Json = False) -> None:
    """Show a system: what it is, what its paper states, what its trial claims, how to run it."""
    from fairtrial.cli import show

    show.system(cards.find(name), as_json=json)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Say how a run that was stopped goes on; typer would swallow it."""
    from fairtrial.trial.engine import InterruptedRunError

    try:
        yield
    except InterruptedRunError as stopped:
        print(f"fairtrial: {stopped}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="Any name of a system.")],
    preset: Annotated[str | None, typer.Option(help="Named parameters: smoke, full.")] = None,
    full: Annotated[bool, typer.Option("--full", help="The same as --preset full.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A parameter, name=value; repeat it.")] = None,
    params: Annotated[Path | None, typer.Option(help="A YAML file of parameters.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output folder; runs/NAME if left out.")] = None,
    jobs: Jobs = None,
    threads: Threads = None,
    engine: Engine = "local",
    time_limit: TimeLimit = None,
    until_flat: UntilFlat = False,
    until_decided: UntilDecided = False,
    retry: Retry = False,
    level: Level = 0.95,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Run a trial: compare a method with its baselines and controls, and print the verdicts."""
    from fairtrial.cli import show
    from fairtrial.trial.params import parse_settings
    from fairtrial.trial.runner import run as run_trial

    if full and preset not in (None, "full"):
        raise InputError(f"--full and --preset {preset} contradict each other: give one")
    if until_flat and until_decided:
        raise InputError("--until-flat and --until-decided contradict each other: give one")
    with _stoppable():
        result = run_trial(
            name,
            preset="full" if full else preset,
            out=out,
            jobs=jobs,
            threads=threads,
            engine=engine,
            time_limit=time_limit,
            until="flat" if until_flat else "decided" if until_decided else None,
            retry=retry,
            level=level,
            progress=not (quiet or json),
            **parse_settings(set_ or [], params),
        )
    return show.result(result, as_json=json)


@app.command()
def compare(
    candidates: Annotated[list[str], typer.Argument(help="LABEL=FILE.py:FUNCTION, two or more; each takes a cell.")],
    baseline: Annotated[str, typer.Option(help="The label that the others are compared with.")],
    metric: Annotated[str, typer.Option(help="The metric that the functions return.")],
    cells: Annotated[int, typer.Option(min=2, help="How many cells: 0, 1, 2, ...")] = 20,
    lower_is_better: Annotated[bool, typer.Option("--lower-is-better", help="For errors, losses, times.")] = False,
    margin: Annotated[float, typer.Option(help="What a difference must exceed.")] = 0.0,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder.")] = Path("runs/compare"),
    jobs: Jobs = None,
    threads: Threads = None,
    engine: Engine = "local",
    time_limit: TimeLimit = None,
    retry: Retry = False,
    level: Level = 0.95,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Compare your own functions on paired cells: fairtrial compare mine=a.py:f base=b.py:g --baseline base ..."""
    from fairtrial.cli import show
    from fairtrial.trial.adhoc import compare as compare_candidates
    from fairtrial.trial.declare import Metric

    labels = [candidate.partition("=")[0] for candidate in candidates]
    if len(set(labels)) < len(labels):
        raise InputError(
            f"label {next(x for x in labels if labels.count(x) > 1)!r} is given twice: name each candidate"
        )
    with _stoppable():
        result = compare_candidates(
            dict(map(_function, candidates)),
            baseline=baseline,
            metric=Metric(metric, higher_is_better=not lower_is_better),
            cells=range(cells),
            margin=margin,
            out=out,
            jobs=jobs,
            threads=threads,
            engine=engine,
            time_limit=time_limit,
            retry=retry,
            level=level,
            progress=not (quiet or json),
        )
    return show.result(result, as_json=json)


def _function(candidate: str) -> tuple[str, Any]:
    """Return (label, function) of ``LABEL=FILE.py:FUNCTION``."""
    import importlib.util

    import cloudpickle

    from fairtrial.trial.code import digest

    label, equals, target = candidate.partition("=")
    file, colon, name = target.rpartition(":")
    path = Path(file)
    if not (label and equals and colon and name):
        raise InputError(f"{candidate!r}: write a candidate as LABEL=FILE.py:FUNCTION")
    if not path.is_file() or path.suffix != ".py":
        raise InputError(f"{path} is not a Python file")
    # Each file is a module of its own, pickled by value: two files may have one name.
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{digest(str(path.resolve()))}", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    cloudpickle.register_pickle_by_value(module)
    if not callable(getattr(module, name, None)):
        raise InputError(f"{path} has no function {name!r}")
    return label, getattr(module, name)


class _ApplyGroup(typer.core.TyperGroup):
    """The commands of the cards, each loaded when it is called."""

    def list_commands(self, context: typer.Context) -> list[str]:  # type: ignore[override]
        return [name for card in cards.cards().values() for name in card.commands]

    def get_command(self, context: typer.Context, name: str) -> Any:  # type: ignore[override]
        import importlib

        from fairtrial.trial.runner import extra_named

        try:
            card = cards.find(name)
        except UnknownNameError:
            raise UnknownNameError("command", name, self.list_commands(context)) from None
        if not card.commands:
            state = "is planned, not built yet" if card.state == "planned" else "has no command"
            raise InputError(f"{card.shown} {state}: fairtrial apply --help lists the commands")
        command = name if name in card.commands else next(iter(card.commands))
        module, _, function = card.commands[command].partition(":")
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        with extra_named(card):
            body = getattr(importlib.import_module(module), function)
        single.command(name=command)(extra_named(card)(body))  # what it imports when called counts too
        return typer.main.get_command(single)


apply_app = typer.Typer(cls=_ApplyGroup, help="Apply a method to your own files.", no_args_is_help=True)


@apply_app.callback()
def _apply() -> None:
    """Apply a method to your own files."""


app.add_typer(apply_app, name="apply")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Output folders of runs.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page; report.html in the first folder.")] = None,
    json: Json = False,
) -> None:
    """Write the HTML page of one trial or of many."""
    from fairtrial.report import write_report

    page = write_report(folders, out or folders[0] / "report.html", card_lookup=cards.find)
    print(json_module.dumps({"report": str(page)}) if json else page)


@samples_app.command("list")
def samples_list(json: Json = False) -> None:
    """List the samples, their licences, and which are here."""
    from fairtrial.cli import show

    show.samples(as_json=json)


@samples_app.command("get")
def samples_get(
    names: Annotated[list[str], typer.Argument(help="Samples, or systems whose samples are wanted.")],
    source: Annotated[Path | None, typer.Option("--from", help="A folder that has the archives already.")] = None,
    json: Json = False,
) -> None:
    """Fetch samples: the one command that may download."""
    from fairtrial.data import samples

    known = samples.list_samples()
    wanted = [sample for name in names for sample in ([name] if name in known else _samples_of(name, known))]
    say = None if json else lambda line: print(line, file=sys.stderr)
    found = {name: str(samples.get(name, source, progress=say)) for name in dict.fromkeys(wanted)}
    print(json_module.dumps(found) if json else "\n".join(f"{name}  {path}" for name, path in found.items()))


def _samples_of(name: str, known: Iterable[str]) -> tuple[str, ...]:
    try:
        return cards.find(name).samples
    except UnknownNameError:
        with_samples = [card.shown for card in cards.cards().values() if card.samples]
        raise UnknownNameError("sample or system with samples", name, [*known, *with_samples]) from None


@app.command()
def doctor(json: Json = False) -> None:
    """Say what is installed, what is missing for which area, and the line that installs it."""
    from fairtrial.cli import doctor as examine

    examine.report(as_json=json)
