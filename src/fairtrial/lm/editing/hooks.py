"""What is done to solved values before they are written: Norm-Anchor Scaling, and what it is compared with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.editing.editors import EditContext, ValueEditor
from fairtrial.lm.editing.edits import Edit, check_edits
from fairtrial.options import checked_number

Reference = Literal["solved", "output", "per-edit"]
PROBES = 32  # edits on which the anchor is taken
DROPPED = 0.05  # share of the largest norms left out
AT_ONCE = 8  # edits solved in one pass


class NormAnchor:
    """Norm-Anchor Scaling: v becomes v rho / |v|, with rho a norm of the original model.

    Solved values and edited weights otherwise amplify each other: values grow with the outputs they start from, outputs
    with the values that were written.

    Parameters
    ----------
    reference
        Where rho comes from. "solved": the mean norm of values solved on the original weights, the largest 5 % left
        out. "output": the mean norm of what the original weights give at subjects. "per-edit": that of the edit itself.
    when
        "always", or "exceeds:2": only values longer than twice rho.
    anchor_prompts
        Edits on which rho is taken; ``None`` = the first 32 that come by.

    Attributes
    ----------
    rho : the anchor, ``None`` before the first edits.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm, tiny_texts
    >>> from fairtrial.lm.editing import MEMIT, Edit
    >>> edits = [Edit("w4 {} w5", f"w{i}", "w11") for i in range(20, 24)]
    >>> editor = MEMIT(*tiny_causal_lm(), layers=[0], text=tiny_texts(), hooks=[NormAnchor()])
    >>> editor.apply(edits).norm(dim=1).std().item() < 1e-4
    True
    """

    def __init__(
        self,
        reference: Reference = "solved",
        *,
        when: str = "always",
        anchor_prompts: Sequence[Edit] | None = None,
        rho: float | None = None,
    ) -> None:
        if reference not in ("solved", "output", "per-edit"):
            raise UnknownNameError("reference", reference, ["solved", "output", "per-edit"])
        self.reference = reference
        self.factor = _factor(when)
        if anchor_prompts is not None:
            check_edits(anchor_prompts)
        self.anchor_prompts = anchor_prompts
        self.rho = None if rho is None else checked_number(rho, "rho", above=0)

    def prepare(self, editor: ValueEditor, edits: Sequence[Edit]) -> None:
        """Take rho from edits, on the model's original weights, unless it is known."""
        if self.rho is None and self.reference != "per-edit":
            self.rho = anchor_norm(editor, [*(self.anchor_prompts or edits)][:PROBES], self.reference)

    def __call__(self, values: torch.Tensor, context: EditContext) -> torch.Tensor:
        """Return values (n, d) at the anchor's norm."""
        self.prepare(context.editor, context.edits)
        if self.reference == "per-edit":
            with context.editor.original_weights():
                rho = context.editor.keys(context.edits, context.editor.layers[-1])[1].norm(dim=1, keepdim=True)
        else:
            rho = torch.as_tensor(self.rho, device=values.device)
        return rescaled(values, rho, factor=self.factor)


def rescaled(values: torch.Tensor, rho: torch.Tensor, *, factor: float = 0.0) -> torch.Tensor:
    """Return values (n, d) of norm rho, those of at most ``factor`` rho and zeros as they are.

    >>> rescaled(torch.tensor([[3.0, 4.0], [0.6, 0.8]]), torch.tensor(1.0), factor=2)
    tensor([[0.6000, 0.8000],
            [0.6000, 0.8000]])
    """
    norms = values.norm(dim=1, keepdim=True)
    if bool((norms == 0).any()):
        warnings.warn("a solved value is zero and stays so: it has no direction", UserWarning, stacklevel=3)
    return torch.where((norms > factor * rho) & (norms > 0), values * (rho / norms.clamp_min(1e-30)), values)


def anchor_norm(editor: ValueEditor, edits: Sequence[Edit], reference: Reference = "solved") -> float:
    """Return the trimmed mean norm of values on the original weights, whatever was written since."""
    norms = []
    with editor.original_weights():
        for start in range(0, len(edits), AT_ONCE):
            batch = edits[start : start + AT_ONCE]
            found = editor.solve(batch)[1] if reference == "solved" else editor.keys(batch, editor.layers[-1])[1]
            norms.append(found.norm(dim=1))
    ordered = torch.cat(norms).sort().values
    kept = ordered[: max(1, round(len(ordered) * (1 - DROPPED)))]
    return float(kept.mean())


class ClampIncrement:
    """A rival: values may move from the present output by at most ``max_ratio`` times the output's norm."""

    def __init__(self, max_ratio: float = 1.0) -> None:
        self.max_ratio = checked_number(max_ratio, "max_ratio", above=0)

    def __call__(self, values: torch.Tensor, context: EditContext) -> torch.Tensor:
        """Return values (n, d) near enough to the outputs."""
        delta = values - context.outputs
        limit = self.max_ratio * context.outputs.norm(dim=1, keepdim=True)
        return context.outputs + delta * (limit / delta.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)


class CurrentAnchor:
    """A control: anchors to the mean norm of the values solved lately, on weights that have changed already."""

    def __init__(self, keep: float = 0.9) -> None:
        self.keep = checked_number(keep, "keep", least=0, below=1)
        self.mean: float | None = None

    def __call__(self, values: torch.Tensor, context: EditContext) -> torch.Tensor:
        """Return values (n, d) at the running mean of norms."""
        now = float(values.norm(dim=1).mean())
        self.mean = now if self.mean is None else self.keep * self.mean + (1 - self.keep) * now
        return rescaled(values, torch.as_tensor(self.mean, device=values.device))


class RandomValue:
    """A control: a random direction of the anchor's norm in place of each value."""

    def __init__(self, anchor: NormAnchor, seed: int = 0) -> None:
        self.anchor = anchor
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, values: torch.Tensor, context: EditContext) -> torch.Tensor:
        """Return random values (n, d)."""
        return self.anchor(torch.randn(values.shape, generator=self.generator).to(values), context)


def _factor(when: str) -> float:
    if when == "always":
        return 0.0
    name, _, number = when.partition(":")
    try:
        factor = float(number)
    except ValueError:
        factor = -1.0
    if name != "exceeds" or not 0 < factor < math.inf:
        raise InputError(f"when={when!r}: give 'always' or 'exceeds:2', a number times the anchor")
    return factor
