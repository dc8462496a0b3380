"""The value solve: what an MLP must write at the subject's last token for the model to go on with the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fairtrial.causal_lm.capture import evaluation_mode, passing_through
from fairtrial.causal_lm.layout import LinearView
from fairtrial.errors import InputError
from fairtrial.lm.editing.edits import Edit
from fairtrial.lm.editing.rows import PREFIXES, Rows, essence_rows, rows_of


@dataclass(frozen=True)
class Solver:
    """How values are solved.

    For each edit delta minimises the mean over prefixes of -log p(target | h + delta) a token, plus ``kl`` times the
    divergence of what follows "<subject> is a" from what did, plus ``weight_decay`` |delta| / |h|^2, by Adam, with
    |delta| <= ``clamp`` |h| (Meng et al., 2022).

    Parameters
    ----------
    steps, lr
        Of Adam.
    clamp
        Greatest |delta| in lengths of h.
    kl, weight_decay
        Weights of the two penalties.
    prefixes
        Texts before the prompt; the first should be empty.
    """

    steps: int = 25
    lr: float = 0.5
    clamp: float = 4.0
    kl: float = 0.0625
    weight_decay: float = 0.5
    prefixes: tuple[str, ...] = PREFIXES

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.lr > 0 or not self.clamp > 0 or self.kl < 0 or self.weight_decay < 0:
            raise InputError(
                "solver: steps must be at least 1, lr and clamp positive, kl and weight_decay not negative"
            )
        if isinstance(self.prefixes, str) or not self.prefixes:
            raise InputError("solver: prefixes must be a list of at least one text")


@dataclass(frozen=True, eq=False)
class Place:
    """Where edits are written: the model, its blocks, the layer's index and its MLP's last linear."""

    model: Any
    blocks: Sequence[Any]
    layer: int
    view: LinearView

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        return self.view.parameter.device


def solve(place: Place, tokenizer: Any, edits: Sequence[Edit], solver: Solver) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the linear gives now, h (n, d), and what it must give, v (n, d), float32.

    All edits are solved at once: a step is one pass from the edited layer up, with the states below kept.
    """
    model = place.model
    asked = rows_of(model, tokenizer, edits, prefixes=solver.prefixes)
    essence = essence_rows(model, tokenizer, edits)
    per_edit = len(solver.prefixes)
    with evaluation_mode(model), _frozen(model):
        asked_states, outputs = _states_below(place, asked)
        essence_states, _ = _states_below(place, essence)
        h = outputs.view(len(edits), per_edit, -1).mean(1)  # (n, d)
        limit = solver.clamp * h.norm(dim=1, keepdim=True)
        delta = torch.zeros_like(h, requires_grad=True)
        adam = torch.optim.Adam([delta], lr=solver.lr)
        with torch.no_grad():
            usual = _last_log_probs(place, essence, essence_states, delta)  # (n, V)
        for _ in range(solver.steps):
            loss = -_target_log_likelihood(place, asked, asked_states, delta).sum() / per_edit
            now = _last_log_probs(place, essence, essence_states, delta)
            loss = loss + solver.kl * F.kl_div(now, usual, log_target=True, reduction="sum")
            loss = loss + solver.weight_decay * (delta.norm(dim=1) / h.square().sum(1)).sum()
            (delta.grad,) = torch.autograd.grad(loss, [delta])
            adam.step()
            with torch.no_grad():
                delta *= (limit / delta.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
    return h, h + delta.detach()


def keys_and_outputs(place: Place, rows: Rows, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (n, m) and outputs (n, d) of the linear at the subjects' last tokens, means over an edit's rows."""
    keys = torch.empty(0)
    at, subject = torch.arange(len(rows)), rows.subject

    def keep(module: Any, args: tuple) -> None:
        nonlocal keys
        keys = args[0].detach()[at, subject].float()

    handle = place.view.module.register_forward_pre_hook(keep)
    try:
        with evaluation_mode(place.model):
            _, outputs = _states_below(place, rows)
    finally:
        handle.remove()
    return keys.view(n, len(rows) // n, -1).mean(1), outputs.view(n, len(rows) // n, -1).mean(1)


class _LayerDone(Exception):
    """Ends a pass above which nothing is wanted."""


@torch.no_grad()
def _states_below(place: Place, rows: Rows) -> tuple[Any, torch.Tensor]:
    """Return what the block below the edited one gives, and the linear's outputs (R, d) at the subjects."""
    below: list[Any] = [None]
    outputs = torch.empty(0)

    def keep_below(block: Any, args: tuple, output: Any) -> None:
        below[0] = output

    def keep_output(module: Any, args: tuple, output: torch.Tensor) -> None:
        nonlocal outputs
        outputs = output[torch.arange(len(rows)), rows.subject].float()
        raise _LayerDone

    hooks = [place.view.module.register_forward_hook(keep_output)]
    if place.layer > 0:
        hooks.append(place.blocks[place.layer - 1].register_forward_hook(keep_below))
    try:
        place.model(rows.ids.to(place.model.get_input_embeddings().weight.device), use_cache=False)
    except _LayerDone:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return below[0], outputs


def _logits(place: Place, rows: Rows, below: Any, delta: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the logits (R, len(keep), V) with delta (n, d) added to the linear's output at the subjects."""

    def add(module: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
        extra = torch.zeros_like(output)
        extra[torch.arange(len(rows)), rows.subject] = delta[rows.edit].to(output.dtype)
        return output + extra

    handle = place.view.module.register_forward_hook(add)
    device = place.model.get_input_embeddings().weight.device
    try:
        with passing_through(list(place.blocks[: place.layer]), [below]):
            return place.model(rows.ids.to(device), use_cache=False, logits_to_keep=keep.to(device)).logits.float()
    finally:
        handle.remove()


def _target_log_likelihood(place: Place, rows: Rows, below: Any, delta: torch.Tensor) -> torch.Tensor:
    """Return the mean log-likelihood of each row's target tokens, (R,)."""
    first, last = int(rows.start.min()), int(rows.stop.max())
    places = torch.arange(first - 1, last - 1)
    log_p = _logits(place, rows, below, delta, places).log_softmax(2)
    wanted = rows.ids[:, first:last].to(log_p.device)
    token = log_p.gather(2, wanted[..., None])[..., 0]  # (R, last - first)
    at = places + 1
    mask = ((at >= rows.start[:, None]) & (at < rows.stop[:, None])).to(log_p.device)
    return (token * mask).sum(1) / mask.sum(1)


def _last_log_probs(place: Place, rows: Rows, below: Any, delta: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities (R, V) of what follows each row."""
    places = (rows.stop - 1).unique()
    logits = _logits(place, rows, below, delta, places)
    return logits[torch.arange(len(rows)), torch.searchsorted(places, rows.stop - 1)].log_softmax(1)


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Let no parameter ask for a gradient, which the solve does not need."""
    asked = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in asked:
            p.requires_grad_(False)
        yield
    finally:
        for p in asked:
            p.requires_grad_(True)


def tuned(place: Place, tokenizer: Any, edits: Sequence[Edit], solver: Solver, lr: float = 1e-3) -> torch.Tensor:
    """Return the change (d, m) of the matrix that Adam makes in as many steps to raise the targets' likelihood."""
    model, view = place.model, place.view
    rows = rows_of(model, tokenizer, edits, prefixes=solver.prefixes)
    change = torch.zeros_like(view.weight, dtype=torch.float32, requires_grad=True)
    adam = torch.optim.Adam([change], lr=lr)

    def changed(module: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return output + args[0] @ change.T.to(output.dtype)

    with evaluation_mode(model), _frozen(model):
        below, outputs = _states_below(place, rows)
        nothing = torch.zeros(len(edits), outputs.shape[1], device=outputs.device)
        handle = view.module.register_forward_hook(changed)
        try:
            for _ in range(solver.steps):
                loss = -_target_log_likelihood(place, rows, below, nothing).mean()
                (change.grad,) = torch.autograd.grad(loss, [change])
                adam.step()
        finally:
            handle.remove()
    return change.detach()
