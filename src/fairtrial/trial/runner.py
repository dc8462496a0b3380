"""Running a trial by name, from Python or from the command line."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fairtrial import cards
from fairtrial.errors import FairtrialError, InputError
from fairtrial.trial.declare import Claim, Statistic, Trial, leaves
from fairtrial.trial.engine import InterruptedRunError, Run, Until
from fairtrial.trial.machine import cores
from fairtrial.trial.params import make_params
from fairtrial.trial.progress import Progress, Silent
from fairtrial.trial.result import Result, collect
from fairtrial.trial.table import Table
from fairtrial.trial.verdict import FIRST_LOOK, evidence, judge
from fairtrial.trial.worker import load_trial, missing_extra

logger = logging.getLogger(__name__)


def run(
    trial: str | Trial,
    *,
    preset: str | None = None,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    engine: str = "local",
    time_limit: float | None = None,
    until: Until | None = None,
    retry: bool = False,
    level: float = 0.95,
    progress: bool = False,
    **params: Any,
) -> Result:
    """Run a trial and return its verdicts.

    Parameters
    ----------
    trial : any of a card's names, or a :class:`~fairtrial.trial.declare.Trial`.
    preset : ``smoke``, ``full`` or another of the trial's presets; ``params`` override it.
    out : the output folder, ``runs/<trial>`` if left out. Finished cells found there are not computed again.
    jobs, threads : worker processes and threads of each; by default all cores are used, one thread a job.
    engine : ``local``, or ``ray`` for a Ray cluster.
    time_limit : seconds after which a cell is given up as lost.
    until : ``"flat"`` stops when further replicates add too little sample gain, ``"decided"`` when every claim is
        decided, with anytime-valid intervals.
    retry : measure lost cells again.
    level : confidence level of the verdicts, over all claims together.
    progress : show a progress bar and the verdicts so far.

    Raises
    ------
    UnknownNameError, InputError, MissingExtraError, MissingSampleError
        Before any long work starts.
    InterruptedRunError
        On Ctrl-C; the same call goes on from the last finished cell.

    Examples
    --------
    >>> from fairtrial.trial import run
    >>> result = run("verdicts", preset="smoke", out="runs/verdicts")  # doctest: +SKIP
    >>> result.verdicts[0].state  # doctest: +SKIP
    'HOLDS'
    """
    card = None
    if isinstance(trial, str):
        card = cards.find(trial)
        if card.state != "working":
            raise InputError(f"{card.shown} is planned, not built yet: fairtrial list shows what works")
        trial = card.trial
    declaration = _declaration(trial, card)
    checked = make_params(declaration, preset, params)
    if declaration.check:
        declaration.check(checked)
    return run_declared(
        trial, checked, declaration.name, out=out, jobs=jobs, threads=threads, engine=engine, time_limit=time_limit,
        until=until, retry=retry, level=level, progress=progress, preset=preset, card=card,
    )  # fmt: skip


def run_declared(
    trial: str | Trial,
    params: BaseModel,
    name: str,
    *,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    threads: int | None = None,
    engine: str = "local",
    time_limit: float | None = None,
    until: Until | None = None,
    retry: bool = False,
    level: float = 0.95,
    progress: bool = False,
    version: str | None = None,
    **about: Any,
) -> Result:
    """Run a trial whose parameters are checked; ``about`` goes into the result's document."""
    if until not in (None, "flat", "decided"):
        raise InputError(f"until={until!r}: choose 'flat' or 'decided'")
    if (jobs is not None and jobs < 1) or (threads is not None and threads < 1):
        raise InputError(f"jobs={jobs}, threads={threads}: each must be at least 1, or None for all cores")
    if time_limit is not None and not time_limit > 0:
        raise InputError(f"time_limit={time_limit}: give seconds above 0, or None")
    if not 0 < level < 1:
        raise InputError(f"level={level}: give a confidence level between 0 and 1, such as 0.95")
    jobs, threads = _share_cores(jobs, threads)
    folder = Path(out) if out is not None else Path("runs") / name
    with Progress() if progress else Silent() as watcher:
        opened = Run(
            trial, params, folder, jobs=jobs, threads=threads, engine=engine, time_limit=time_limit, version=version,
            watcher=watcher,
        )  # fmt: skip
        try:
            replicates = _carry_out(opened, watcher, until=until, retry=retry, level=level)
            result = collect(opened, replicates=replicates, level=level, until=until, **about)
            result.save()
            return result
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"stopped; the finished cells are in {folder}: run the same command to go on"
            ) from None
        finally:
            opened.close()


def _carry_out(
    opened: Run,
    watcher: Progress | Silent,
    *,
    until: Until | None,
    retry: bool,
    level: float,
) -> int | None:
    """Run what is missing, in looks where ``until`` asks for them; return how many replicates that took."""
    rows = opened.rows()
    if retry:
        opened.store.forget_lost(row.key for row in rows)
    opened.notes += opened.explain_missing(rows)
    for note in opened.notes:
        logger.info(note)
    watcher.describe(opened, level)
    if until is None:
        opened.execute(rows)
        return None
    if until == "decided":
        _check_may_peek(opened)
        opened.store.mark("peeked")
    most = opened.most_replicates()
    replicates = min(FIRST_LOOK, most)
    flat_looks = 0
    while True:
        opened.execute(opened.rows(replicates))
        flat_looks = flat_looks + 1 if until == "flat" and _is_flat(opened, replicates) else 0
        decided = until == "decided" and _all_decided(opened, replicates, level)
        if replicates >= most or flat_looks == 2 or decided:
            return replicates
        replicates += 1


def _check_may_peek(opened: Run) -> None:
    """Refuse to look at bootstraps and at claims over items before the end: their intervals are valid for one look."""
    for part in opened.parts:
        for claim in (leaf for whole in part.claims for leaf in leaves(whole)):
            if isinstance(claim, Claim) and isinstance(claim.quantity, Statistic):
                raise InputError(
                    f"--until-decided: claim {claim.id!r} is bootstrapped, which is valid for one look only"
                )
            if isinstance(claim, Claim) and claim.over == "item":
                draws = part.replicate.name if part.replicate else "replicate"
                raise InputError(
                    f"--until-decided: claim {claim.id!r} generalises over the items of {part.name!r}, not over its "
                    f"{draws}s: ask for 5 {draws}s or more"
                )


def _declaration(trial: str | Trial, card: Any) -> Trial:
    if isinstance(trial, Trial):
        return trial
    with extra_named(card) if card else contextlib.nullcontext():
        return load_trial(trial)


@contextlib.contextmanager
def extra_named(card: cards.Card) -> Iterator[None]:
    """Say which extra of a system is missing where importing it fails for the lack of one."""
    try:
        yield
    except FairtrialError:
        raise
    except ImportError as error:
        if missing := missing_extra(card, error):
            raise missing from None
        raise


def _share_cores(jobs: int | None, threads: int | None) -> tuple[int, int]:
    """Return jobs and threads whose product does not exceed the cores, unless the caller asked for it."""
    if jobs is None:
        jobs = max(1, cores() // (threads or 1))
    return jobs, threads or max(1, cores() // jobs)


def _tables(opened: Run, replicates: int) -> dict[str, Table]:
    rows = opened.known(opened.rows(replicates))
    return {part.name: Table(part, [row for row in rows if row.part == part.name]) for part in opened.parts}


def _all_decided(opened: Run, replicates: int, level: float) -> bool:
    verdicts = judge(_tables(opened, replicates), level=level, peeked=True)
    return all(verdict.state != "UNDECIDED" for verdict in verdicts)


def _is_flat(opened: Run, replicates: int, *, ahead: int = 5, min_gain: float = 0.05) -> bool:
    """Whether ``ahead`` further replicates would add less than ``min_gain`` of sample gain to every claim."""
    looks = [look for table in _tables(opened, replicates).values() for look in evidence(table)]
    gains = [look.moments.gain_ahead(ahead) for look in looks if look.moments is not None]
    return bool(gains) and all(gain < min_gain for gain in gains)
