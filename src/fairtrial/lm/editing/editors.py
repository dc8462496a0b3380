"""ROME, MEMIT and AlphaEdit: write solved values into the last linear of MLPs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fairtrial.causal_lm.layout import ChainSpec, LinearView, block_layouts, find_blocks
from fairtrial.errors import InputError
from fairtrial.lm.editing.covariance import checked_layers, key_covariance, read_covariance
from fairtrial.lm.editing.edits import Edit, check_edits
from fairtrial.lm.editing.rows import rows_of
from fairtrial.lm.editing.solving import Place, Solver, keys_and_outputs, solve, tuned
from fairtrial.options import checked_number

RIDGE = 1e-2  # of the mean diagonal, added to the covariance of keys


@dataclass(frozen=True, eq=False)
class EditContext:
    """What a hook is told beside the values.

    Attributes
    ----------
    editor : the editor at work.
    edits : the n edits.
    outputs : (n, d), what the linear gives at the subjects now.
    """

    editor: ValueEditor
    edits: Sequence[Edit]
    outputs: torch.Tensor


ValueHook: TypeAlias = Callable[[torch.Tensor, EditContext], torch.Tensor]
"""Takes solved values (n, d), float32, and returns the values to write."""


@dataclass(frozen=True, eq=False)
class Write:
    """One write in factors: layer l gains left @ right.T, after which it is drawn towards the original by ``decay``.

    Attributes
    ----------
    factors : per layer (left (d, r), right (m, r)), float32 on the CPU.
    decay : share of the distance to the original weights that is taken back.
    n_edits : how many edits it writes.
    """

    factors: dict[int, tuple[torch.Tensor, torch.Tensor]]
    decay: float
    n_edits: int


class Editor(ABC):
    """Makes edits and can take them back; see :class:`ROME`, :class:`MEMIT` and :class:`AlphaEdit`.

    Parameters
    ----------
    model, tokenizer
        A causal language model of transformers, edited in place, and its fast tokenizer.
    layers
        Blocks to write to, counted from 0; values are solved at the last.
    covariance
        What :func:`~fairtrial.lm.editing.covariance.key_covariance` found of this model, or the file that
        ``save_covariance`` wrote of it; ``None`` = from ``text``.
    text
        Text, or a file or folder of it, on which the uncentred covariance of keys is taken.
    hooks
        Called with the solved values one after the other; see :data:`ValueHook`.
    decay
        Share of the distance to the original weights taken back after each write, in [0, 1).
    solver
        How values are solved; ``None`` = the defaults of :class:`~fairtrial.lm.editing.solving.Solver`.
    spec
        For an architecture that :mod:`fairtrial.causal_lm.layout` does not know.

    Attributes
    ----------
    writes : list of Write, what has been written.

    Raises
    ------
    InputError
        A layer the model lacks, or whose MLP is none (experts); neither covariance nor text; a covariance of another
        shape or layer; quantised weights.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        layers: Sequence[int],
        covariance: str | Path | Mapping[int, torch.Tensor] | None = None,
        text: Any = None,
        hooks: Iterable[ValueHook] = (),
        decay: float = 0.0,
        solver: Solver | None = None,
        spec: ChainSpec | None = None,
    ) -> None:
        self.hooks = list(hooks) if isinstance(hooks, Iterable) else []
        if not isinstance(hooks, Iterable) or not all(map(callable, self.hooks)):
            raise InputError(f"hooks={hooks!r}: give a list of hooks, such as [NormAnchor()]")
        self.decay = checked_number(decay, "decay", least=0, below=1)
        self.model, self.tokenizer, self.solver = model, tokenizer, solver or Solver()
        _, self._blocks = find_blocks(model, spec)
        self.layers = checked_layers(layers, len(self._blocks))
        self._views = _last_linears(model, self.layers, spec)
        self._weights = {layer: view.weight.detach().float().clone() for layer, view in self._views.items()}
        self._originals = {layer: weight.clone() for layer, weight in self._weights.items()}
        self.writes: list[Write] = []
        if covariance is not None:
            shapes = {layer: view.in_features for layer, view in self._views.items()}
            self.covariances = read_covariance(covariance, shapes)
        elif text is not None:
            self.covariances = key_covariance(model, tokenizer, text, self.layers, spec=spec)
        else:
            raise InputError("give covariance=, or text= to take the covariance of keys on")
        self.text = text
        self._factor = {}
        for layer, C in self.covariances.items():
            factor, failed = torch.linalg.cholesky_ex(_ridged(C).to(self._views[layer].parameter.device))
            if failed:
                raise InputError(f"layer {layer}: the covariance of keys is not positive: take it on other text")
            self._factor[layer] = factor

    # ------------------------------------------------------------------------------------------------------------ edits

    @abstractmethod
    def apply(self, edits: Sequence[Edit]) -> torch.Tensor:
        """Make edits together on the weights as they are; return what the last linear is to give, (n, d)."""

    def keys(self, edits: Sequence[Edit], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs (n, m) and outputs (n, d) of a layer's linear at the subjects' last tokens."""
        rows = rows_of(self.model, self.tokenizer, edits, prefixes=self.solver.prefixes, targets=False)
        return keys_and_outputs(self._place(layer), rows, len(edits))

    def _place(self, layer: int) -> Place:
        return Place(self.model, self._blocks, layer, self._views[layer])

    # ---------------------------------------------------------------------------------------------------------- weights

    def _add(self, layer: int, left: torch.Tensor, right: torch.Tensor) -> None:
        weight = self._weights[layer]
        if not bool(torch.isfinite(left).all() and torch.isfinite(right).all()):
            raise InputError(f"layer {layer}: the change is not finite; the model may have collapsed before")
        weight.addmm_(left.to(weight.device), right.to(weight.device).T)
        self._views[layer].weight.copy_(weight)

    def _do(self, write: Write, *, added: bool = False) -> None:
        """Take a write into the weights and the record."""
        for layer, (left, right) in write.factors.items():
            if not added:
                self._add(layer, left, right)
            if write.decay:
                self._weights[layer].lerp_(self._originals[layer], write.decay)
                self._views[layer].weight.copy_(self._weights[layer])
        self.writes.append(write)

    def replay(self, writes: Sequence[Write]) -> None:
        """Start from the original weights and take these writes into them, as they were taken first, bit for bit."""
        self.writes = []
        for layer, original in self._originals.items():
            self._weights[layer].copy_(original)
            self._views[layer].weight.copy_(original)
        for write in writes:
            self._do(write)

    @contextmanager
    def original_weights(self) -> Iterator[None]:
        """Let the model have its original weights for a while."""
        try:
            for layer, original in self._originals.items():
                self._views[layer].weight.copy_(original)
            yield
        finally:
            for layer, weight in self._weights.items():
                self._views[layer].weight.copy_(weight)

    def weight_ratio(self) -> float:
        """Return the norm of the edited matrices over that of the original ones."""
        now, then = (
            torch.stack([w.norm() for w in weights.values()]).norm() for weights in (self._weights, self._originals)
        )
        return float(now / then)


class ValueEditor(Editor):
    """Solves for values and writes them: :class:`ROME`, :class:`MEMIT`, :class:`AlphaEdit`.

    Parameters as for :class:`Editor`.
    """

    def apply(self, edits: Sequence[Edit]) -> torch.Tensor:
        """Solve edits together on the weights as they are, and write them; return the values written, (n, d)."""
        check_edits(edits)
        values = self.hooked(edits, *self.solve(edits))
        self.write(edits, values)
        return values

    def solve(self, edits: Sequence[Edit]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the last layer's linear gives at the subjects, (n, d), and what it should, before any hook."""
        return solve(self._place(self.layers[-1]), self.tokenizer, edits, self.solver)

    def hooked(self, edits: Sequence[Edit], outputs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return values after all hooks."""
        context = EditContext(self, edits, outputs)
        for hook in self.hooks:
            values = hook(values, context)
        return values

    def write(self, edits: Sequence[Edit], values: torch.Tensor) -> None:
        """Write values (n, d) of edits, the distance that is left shared out over the layers that remain."""
        factors = {}
        for remaining, layer in zip(range(len(self.layers), 0, -1), self.layers, strict=True):
            keys, outputs = self.keys(edits, layer)
            if remaining > 1:
                _, outputs = self.keys(edits, self.layers[-1])
            residual = (values - outputs) / remaining  # (n, d)
            left, right = self._factors(layer, keys.T, residual.T)
            factors[layer] = (left.cpu(), right.cpu())
            self._add(layer, left, right)
        self._do(Write(factors, self.decay, len(edits)), added=True)

    @abstractmethod
    def _factors(self, layer: int, keys: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return left (d, r) and right (m, r) of the change for keys (m, n) and what is missing, (d, n)."""

    def _solved_keys(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Return C^-1 K, (m, n)."""
        return torch.cholesky_solve(keys, self._factor[layer])


class ROME(ValueEditor):
    """One edit at a time: W gains (v - W k) (C^-1 k)' / (k' C^-1 k), with k the mean over prefixes in all places.

    Parameters as for :class:`Editor`; one layer. Edits that are given together are solved together and written one
    after the other.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm, tiny_texts
    >>> from fairtrial.lm.editing import ROME, Edit, Solver
    >>> editor = ROME(*tiny_causal_lm(), layers=[0], text=tiny_texts(), solver=Solver(prefixes=("",)))
    >>> values = editor.apply([Edit("w4 {} w5", "w9", "w11")])
    >>> bool((editor.keys([Edit("w4 {} w5", "w9", "w11")], 0)[1] - values).norm() < 1e-4 * values.norm())
    True
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        if len(self.layers) != 1:
            raise InputError(f"layers={self.layers}: ROME writes to one layer; MEMIT takes several")

    def write(self, edits: Sequence[Edit], values: torch.Tensor) -> None:
        """Write values (n, d) one after the other."""
        for edit, value in zip(edits, values, strict=True):
            super().write([edit], value[None])

    def _factors(self, layer: int, keys: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        solved = self._solved_keys(layer, keys)
        return residual / (keys * solved).sum(), solved


class MEMIT(ValueEditor):
    """Many edits at once: W gains R K' (weight C + K K')^-1.

    Parameters
    ----------
    *args, **how
        As for :class:`Editor`.
    covariance_weight
        How much what W gives for other keys is kept, against what edits want: 0 writes exactly.
    """

    def __init__(self, *args: Any, covariance_weight: float = 20.0, **how: Any) -> None:
        super().__init__(*args, **how)
        self.covariance_weight = checked_number(covariance_weight, "covariance_weight", least=0)

    def _factors(self, layer: int, keys: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        solved = self._solved_keys(layer, keys)  # (m, n)
        inner = keys.T @ solved + self.covariance_weight * torch.eye(keys.shape[1], device=keys.device)
        return torch.linalg.solve(inner.double(), residual.T.double()).T.float(), solved


class AlphaEdit(ValueEditor):
    """Edits in the directions other keys leave free, with earlier edits kept.

    W gains R K' P (K_p K_p' P + K K' P + ridge I)^-1: P projects on the eigenvectors of C with eigenvalues below
    ``null_threshold``, K_p are the keys of earlier edits.

    Parameters
    ----------
    *args, **how
        As for :class:`Editor`.
    null_threshold
        Eigenvalues of C below this count as free.
    ridge
        Of the solve.

    Attributes
    ----------
    free_ : dict of int to int, how many directions of each layer are free.
    """

    def __init__(self, *args: Any, null_threshold: float = 2e-2, ridge: float = 10.0, **how: Any) -> None:
        super().__init__(*args, **how)
        self.ridge = checked_number(ridge, "ridge", above=0)
        null_threshold = checked_number(null_threshold, "null_threshold", above=0)
        self._bases, self.free_ = {}, {}
        for layer, C in self.covariances.items():
            values, vectors = torch.linalg.eigh(C.double())
            basis = vectors[:, values < null_threshold].float()  # (m, free)
            if not basis.shape[1]:
                raise InputError(
                    f"layer {layer}: no eigenvalue of the keys' covariance is below null_threshold={null_threshold:g}; "
                    f"they begin at {float(values[0]):.3g}"
                )
            self._bases[layer] = basis.to(self._views[layer].parameter.device)
            self.free_[layer] = basis.shape[1]

    def _factors(self, layer: int, keys: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # K' P (X X' P + ridge I)^-1 = (X' P X + ridge I)^-1 X' P with X = [K_p K], in as many dimensions as edits, and
        # X' P X = (P X)' P X. Earlier writes hold their P K in their last columns.
        basis = self._bases[layer]
        earlier = [write.factors[layer][1][:, -write.n_edits :].to(keys.device) for write in self.writes]
        projected = torch.cat([*earlier, basis @ (basis.T @ keys)], 1)  # (m, N)
        inner = (projected.T @ projected).double() + self.ridge * torch.eye(projected.shape[1], device=keys.device)
        wanted = torch.zeros(projected.shape[1], len(residual), dtype=torch.float64, device=keys.device)
        wanted[-keys.shape[1] :] = residual.T
        return torch.linalg.solve(inner, wanted).T.float(), projected


class FineTune(Editor):
    """The simplest rival: Adam on the same matrix, to raise the likelihood of the targets."""

    def apply(self, edits: Sequence[Edit]) -> torch.Tensor:
        """Train the last layer's matrix on edits for as many steps as the solver has; return its outputs, (n, d)."""
        check_edits(edits)
        (layer,) = self.layers[-1:]
        change = tuned(self._place(layer), self.tokenizer, edits, self.solver)  # (d, m)
        self._do(Write({layer: (torch.eye(len(change)), change.T.cpu())}, self.decay, len(edits)))
        return self.keys(edits, layer)[1]


def _ridged(C: torch.Tensor) -> torch.Tensor:
    return C + RIDGE * C.diagonal().mean() * torch.eye(len(C))


def _last_linears(model: Any, layers: Sequence[int], spec: ChainSpec | None) -> dict[int, LinearView]:
    layouts = block_layouts(model, spec)
    for layer in layers:
        if len(layouts[layer].mlps) != 1:
            raise InputError(f"{layouts[layer].name} has {len(layouts[layer].mlps)} MLPs: edits need exactly one")
    return {layer: layouts[layer].mlps[0].down for layer in layers}
