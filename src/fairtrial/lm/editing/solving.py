"""The value solve: what an MLP must write at the subject's last token for the model to go on with the target."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fairtrial.causal_lm.capture import evaluation_mode, passing_through
from fairtrial.causal_lm.layout import LinearView
from fairtrial.causal_lm.likelihood import cache_name
from fairtrial.errors import InputError
from fairtrial.lm.editing.edits import Edit
from fairtrial.lm.editing.rows import PREFIXES, Rows, essence_rows, rows_of
from fairtrial.options import checked_count, checked_number


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
        checked_count(self.steps, "steps")
        for name in ("lr", "clamp"):
            checked_number(getattr(self, name), name, above=0)
        for name in ("kl", "weight_decay"):
            checked_number(getattr(self, name), name, least=0)
        texts = isinstance(self.prefixes, list | tuple) and all(isinstance(text, str) for text in self.prefixes)
        if not texts or not self.prefixes:
            raise InputError(f"prefixes={self.prefixes!r}: give a list of at least one text")


@dataclass(frozen=True, eq=False)
class Place:
    """Where edits are written: the model, its blocks, the layer's index and its MLP's last linear."""

    model: Any
    blocks: Sequence[Any]
    layer: int
    view: LinearView

    @property
    def inputs(self) -> torch.device:
        """Where token ids go."""
        return self.model.get_input_embeddings().weight.device


def solve(place: Place, tokenizer: Any, edits: Sequence[Edit], solver: Solver) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the linear gives now, h (n, d), and what it must give, v (n, d), float32.

    All edits are solved at once: a step passes the tokens from each subject's last one on through the blocks from the
    edited one up.
    """
    model = place.model
    asked = rows_of(model, tokenizer, edits, prefixes=solver.prefixes)
    essence = essence_rows(model, tokenizer, edits)
    per_edit = len(solver.prefixes)
    with evaluation_mode(model), _frozen(model):
        question = _Reading(place, asked, asked.subject, _target_places(asked))
        meaning = _Reading(place, essence, essence.subject, (torch.arange(len(essence)), essence.stop - 1))
        h = question.outputs.view(len(edits), per_edit, -1).mean(1)  # (n, d)
        limit = solver.clamp * h.norm(dim=1, keepdim=True)
        delta = torch.zeros_like(h, requires_grad=True)
        adam = torch.optim.Adam([delta], lr=solver.lr)
        with torch.no_grad():
            usual = meaning.log_probs(delta)  # (n, V)
        for _ in range(solver.steps):
            loss = -_target_log_likelihood(question, delta).sum() / per_edit
            loss = loss + solver.kl * F.kl_div(meaning.log_probs(delta), usual, log_target=True, reduction="sum")
            loss = loss + solver.weight_decay * (delta.norm(dim=1) / h.square().sum(1)).sum()
            (delta.grad,) = torch.autograd.grad(loss, [delta])
            adam.step()
            with torch.no_grad():
                delta *= (limit / delta.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
    return h, h + delta.detach()


def keys_and_outputs(place: Place, rows: Rows, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (n, m) and outputs (n, d) of the linear at the subjects' last tokens, means over an edit's rows."""
    with evaluation_mode(place.model):
        given, told = _at_linear(place, rows.ids)
    at = torch.arange(len(rows)), rows.subject
    keys, outputs = (states[at].float().view(n, len(rows) // n, -1).mean(1) for states in (given, told))
    return keys, outputs


class _LayerDone(Exception):
    """Ends a pass above which nothing is wanted."""


@torch.no_grad()
def _at_linear(place: Place, ids: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the edited linear is given, (R, T, m), and gives, (R, T, d), by a pass that ends there."""
    given = told = torch.empty(0)

    def keep(module: Any, args: tuple, output: torch.Tensor) -> None:
        nonlocal given, told
        given, told = args[0], output
        raise _LayerDone

    handle = place.view.module.register_forward_hook(keep)
    try:
        with suppress(_LayerDone):
            place.model(ids.to(place.inputs), use_cache=False, **inputs)
    finally:
        handle.remove()
    return given, told


class _Reading:
    """Rows that are read again and again from the edited layer up, with all that does not change kept.

    Under causal attention nothing changes before a row's ``first`` changed token: of the tokens before it the keys and
    values are kept, of those from it on what the block below the edited one gives. Rows are aligned at that token, with
    padding on both sides.

    Parameters
    ----------
    place, rows
        Where values are added, and R rows.
    first
        (R,) the first token whose output changes.
    wanted
        (M,) rows and (M,) tokens after which probabilities are read.

    Attributes
    ----------
    outputs : (R, d) float32, what the edited linear gives at the subjects as it is.
    """

    def __init__(
        self, place: Place, rows: Rows, first: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        model = self.model = place.model
        self.place, self.rows, self.wanted = place, rows, wanted
        kept = int(first.max())  # columns whose keys are kept
        pad = kept - first  # (R,) columns of padding at the left
        token = torch.arange(int((pad + rows.stop).max())) - pad[:, None]  # (R, W): the token that stands in a column
        ids = rows.ids.gather(1, token.clamp(0, rows.ids.shape[1] - 1))
        self._places = wanted[0], wanted[1] + pad[wanted[0]] - kept
        self._inputs: dict[str, torch.Tensor] = {}
        if bool(pad.any()):
            self._inputs["attention_mask"] = (token >= 0).long().to(place.inputs)
            if "position_ids" in inspect.signature(model.forward).parameters:  # others take them from the mask
                self._inputs["position_ids"] = token.clamp_min(0).to(place.inputs)
        self._below, self.outputs = self._read_below(ids, pad + rows.subject, kept)
        self._cache = self._read_before(ids[:, :kept].to(place.inputs)) if kept else None
        self._ids = ids[:, kept:].to(place.inputs)
        if "position_ids" in self._inputs:
            self._inputs["position_ids"] = self._inputs["position_ids"][:, kept:]

    def _read_below(self, ids: torch.Tensor, subject: torch.Tensor, kept: int) -> tuple[Any, torch.Tensor]:
        """Return what the block below the edited one gives from column ``kept`` on, and the linear's outputs."""
        place, below = self.place, None

        def keep(block: Any, args: tuple, output: Any) -> None:
            nonlocal below
            below = (output[0][:, kept:], *output[1:]) if isinstance(output, tuple) else output[:, kept:]

        handles = [block.register_forward_hook(keep) for block in place.blocks[: place.layer][-1:]]
        try:
            _, told = _at_linear(place, ids, **self._inputs)
        finally:
            for handle in handles:
                handle.remove()
        return below, told[torch.arange(len(ids)), subject].float()

    @torch.no_grad()
    def _read_before(self, ids: torch.Tensor) -> Any:
        """Return the cache of the columns before the first changed one."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        inputs = {name: value[:, : ids.shape[1]] for name, value in self._inputs.items()}
        self.model(ids, use_cache=True, logits_to_keep=1, **{cache_name(self.model): cache}, **inputs)
        return cache

    def log_probs(self, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Return log-probabilities (M, V) after the wanted tokens, with delta (n, d) added at the first ones."""
        edit = self.rows.edit

        def add(module: Any, args: tuple, output: torch.Tensor) -> torch.Tensor:
            if delta is None:
                return output
            return torch.cat([output[:, :1] + delta[edit, None].to(output.dtype), output[:, 1:]], 1)

        def pick(head: Any, args: tuple) -> tuple:
            return (args[0][self._places][None], *args[1:])

        # A copy: passes write into a cache.
        extra = {} if self._cache is None else {cache_name(self.model): copy.deepcopy(self._cache)}
        place = self.place
        hooks = [
            place.view.module.register_forward_hook(add),
            self.model.get_output_embeddings().register_forward_pre_hook(pick),
        ]
        try:
            with passing_through(list(place.blocks[: place.layer]), [self._below]):
                out = self.model(self._ids, use_cache=self._cache is not None, **extra, **self._inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return out.logits[0].float().log_softmax(1)


def _target_places(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (M,) and the tokens (M,) after which a target's token comes."""
    token = torch.arange(rows.ids.shape[1])
    row, at = ((token >= rows.start[:, None]) & (token < rows.stop[:, None])).nonzero(as_tuple=True)
    return row, at - 1


def _target_log_likelihood(reading: _Reading, delta: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean log-likelihood of each row's target tokens, (R,), of a reading at :func:`_target_places`."""
    rows = reading.rows
    log_p = reading.log_probs(delta)
    row, at = (index.to(log_p.device) for index in reading.wanted)
    token = log_p.gather(1, rows.ids.to(log_p.device)[row, at + 1, None])[:, 0]  # (M,)
    total = torch.zeros(len(rows), device=log_p.device).index_add(0, row, token)
    return total / (rows.stop - rows.start).to(log_p.device)


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
        reading = _Reading(place, rows, torch.zeros_like(rows.subject), _target_places(rows))
        handle = view.module.register_forward_hook(changed)
        try:
            for _ in range(solver.steps):
                loss = -_target_log_likelihood(reading).mean()
                (change.grad,) = torch.autograd.grad(loss, [change])
                adam.step()
        finally:
            handle.remove()
    return change.detach()
