"""A stream of edits on one model, with its health written down and every earlier state within reach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fairtrial.causal_lm.likelihood import perplexity
from fairtrial.causal_lm.windows import windows
from fairtrial.errors import FairtrialError, InputError
from fairtrial.lm.editing.editors import Editor, ValueEditor, Write
from fairtrial.lm.editing.edits import Edit, check_edits
from fairtrial.lm.editing.hooks import NormAnchor
from fairtrial.lm.editing.scoring import answered
from fairtrial.options import checked_count
from fairtrial.seeds import generator

if TYPE_CHECKING:
    import pandas as pd

OLD = 16  # earlier edits asked again at a check
COLLAPSE = 3.0  # times the original perplexity
COLUMNS = ["edit", "weight_ratio", "value_norm", "efficacy_new", "efficacy_old", "ppl"]


class EditCollapse(FairtrialError):
    """The model's perplexity has risen beyond three times the original: the edits that follow were not made.

    The model is back at the last check at which it was healthy, ``edits`` edits in.
    """

    def __init__(self, message: str, edits: int) -> None:
        super().__init__(message)
        self.edits = edits


class EditStream:
    """Applies edits in order and keeps track.

    Parameters
    ----------
    editor
        An editor on the unedited model.
    batch_size
        Edits solved and written together.
    check_every
        Edits between two checks, in which perplexity is read and earlier edits are asked again.
    text
        What perplexity is read on; ``None`` = the editor's text. Without either, perplexity is ``nan`` and no collapse
        is noticed.
    tokens
        How many of the text, from its end.

    Attributes
    ----------
    edits : those applied so far.
    history : DataFrame, a row a batch: ``edit`` (how many so far), ``weight_ratio`` (|W| / |W_0|), ``value_norm`` (mean
        |v| written), ``efficacy_new`` (of the batch), and at checks ``efficacy_old`` (of 16 earlier ones) and ``ppl``.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm, tiny_texts
    >>> from fairtrial.lm.editing import MEMIT, Edit, EditStream, NormAnchor
    >>> editor = MEMIT(*tiny_causal_lm(), layers=[0], text=tiny_texts(), hooks=[NormAnchor()])
    >>> stream = EditStream(editor, batch_size=2, check_every=4)
    >>> stream.apply([Edit("w4 {} w5", f"w{i}", "w11") for i in range(20, 26)])
    >>> stream.history["edit"].tolist()
    [2, 4, 6]
    >>> stream.rollback(to=4)
    >>> len(stream.edits)
    4
    """

    def __init__(
        self, editor: Editor, *, batch_size: int = 8, check_every: int = 64, text: Any = None, tokens: int = 2048
    ) -> None:
        batch_size, check_every = checked_count(batch_size, "batch_size"), checked_count(check_every, "check_every")
        tokens = checked_count(tokens, "tokens", least=2)
        if editor.writes:
            raise InputError("the editor has written already: give one of the unedited model, or EditStream.load")
        self.editor, self.batch_size, self.check_every = editor, batch_size, check_every
        self.edits: list[Edit] = []
        self._rows: list[dict[str, float]] = []
        text = editor.text if text is None else text
        self._windows = None if text is None else _last_windows(editor, text, tokens)
        self._healthy = self._perplexity()

    @property
    def history(self) -> pd.DataFrame:
        """What happened, a row a batch."""
        import pandas as pd

        return pd.DataFrame(self._rows, columns=COLUMNS)

    def apply(self, edits: Sequence[Edit], *, progress: Any = None) -> None:
        """Apply edits, the next ``batch_size`` at a time; ``progress(done, of)`` is called after each batch.

        Raises
        ------
        EditCollapse
            At a check perplexity was beyond three times the original; the model is back at the last healthy check.
        InputError
            As the editor does; edits that contradict each other or earlier ones.
        """
        check_edits([*self.edits, *edits])
        if isinstance(self.editor, ValueEditor):
            for hook in self.editor.hooks:
                if isinstance(hook, NormAnchor):
                    hook.prepare(self.editor, edits)
        for start in range(0, len(edits), self.batch_size):
            batch = edits[start : start + self.batch_size]
            values = self.editor.apply(batch)
            before = len(self.edits)
            self.edits += batch
            self._note(batch, values, check=len(self.edits) // self.check_every > before // self.check_every)
            if progress:
                progress(min(start + self.batch_size, len(edits)), len(edits))

    def _note(self, batch: Sequence[Edit], values: torch.Tensor, *, check: bool) -> None:
        old, ppl = float("nan"), float("nan")
        if check:
            earlier = self.edits[: -len(batch)]
            picked = generator(len(earlier), "earlier edits").permutation(len(earlier))[:OLD]
            old = self._efficacy([earlier[i] for i in picked])
            ppl = self._perplexity()
        self._rows.append(
            {
                "edit": len(self.edits),
                "weight_ratio": self.editor.weight_ratio(),
                "value_norm": float(values.norm(dim=1).mean()),
                "efficacy_new": self._efficacy(batch),
                "efficacy_old": old,
                "ppl": ppl,
            }
        )
        if check and ppl > COLLAPSE * self._healthy:
            healthy = [row["edit"] for row in self._rows if row["ppl"] <= COLLAPSE * self._healthy]
            to = int(max(healthy, default=0))
            told = f"perplexity is {ppl:.3g} after {len(self.edits)} edits, it was {self._healthy:.3g}"
            self.rollback(to=to)
            raise EditCollapse(f"{told}: the model is back at edit {to}, where it was healthy", to)

    def _efficacy(self, edits: Sequence[Edit]) -> float:
        if not edits:
            return float("nan")
        asked = [(edit.question, edit.target_new) for edit in edits]
        return float(answered(self.editor.model, self.editor.tokenizer, asked).mean())

    def _perplexity(self) -> float:
        """Return the perplexity now; inf where the model gives no numbers any more."""
        if self._windows is None:
            return float("nan")
        try:
            return perplexity(self.editor.model, self._windows)
        except (InputError, OverflowError):
            return float("inf")

    def rollback(self, *, to: int) -> None:
        """Take the model back to its state after ``to`` edits, bit for bit.

        Raises
        ------
        InputError
            There was no such state: it lies within a batch, or ahead.
        """
        counts = [0]
        for write in self.editor.writes:
            counts.append(counts[-1] + write.n_edits)
        if to not in counts:
            near = min(counts, key=lambda n: abs(n - to))
            raise InputError(f"to={to}: no state was kept after so many edits; the nearest is {near}")
        self.editor.replay(self.editor.writes[: counts.index(to)])
        self.edits = self.edits[:to]
        self._rows = [row for row in self._rows if row["edit"] <= to]

    # ------------------------------------------------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write edits, history and all writes, as factors, to a ``.safetensors`` file."""
        from safetensors.torch import save_file

        if Path(path).suffix != ".safetensors":
            raise InputError(f"{path}: give a name that ends in .safetensors")
        tensors = {"empty": torch.zeros(1)}
        for i, write in enumerate(self.editor.writes):
            for layer, (left, right) in write.factors.items():
                tensors[f"{i}.{layer}.left"], tensors[f"{i}.{layer}.right"] = left.contiguous(), right.contiguous()
        told = {
            "edits": [asdict(edit) for edit in self.edits],
            "history": self._rows,
            "writes": [[write.decay, write.n_edits] for write in self.editor.writes],
            "rho": [hook.rho for hook in self.editor.hooks if isinstance(hook, NormAnchor)],
            "layers": self.editor.layers,
            "shapes": [list(self.editor._views[layer].weight.shape) for layer in self.editor.layers],
        }
        save_file(tensors, path, {"stream": json.dumps(told)})

    @classmethod
    def load(cls, path: str | Path, editor: Editor, **how: Any) -> EditStream:
        """Go on with a saved stream on a fresh editor of the same unedited model; ``how`` as for the class.

        Raises
        ------
        InputError
            Not such a file, or one of other layers.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                told = json.loads((file.metadata() or {}).get("stream", "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: not a readable safetensors file: {error}") from None
        if told is None:
            raise InputError(f"{path}: no stream in it: give a file that EditStream.save wrote")
        shapes = [list(editor._views[layer].weight.shape) for layer in editor.layers]
        if told["layers"] != editor.layers or told["shapes"] != shapes:
            raise InputError(f"{path}: a stream on layers {told['layers']} of shapes {told['shapes']}, not {shapes}")
        stream = cls(editor, **how)
        editor.replay(
            [
                Write(
                    {layer: (tensors[f"{i}.{layer}.left"], tensors[f"{i}.{layer}.right"]) for layer in written}, *rest
                )
                for i, rest in enumerate(told["writes"])
                if (written := [layer for layer in editor.layers if f"{i}.{layer}.left" in tensors])
            ]
        )
        anchors = [hook for hook in editor.hooks if isinstance(hook, NormAnchor)]
        for hook, rho in zip(anchors, told["rho"], strict=False):
            hook.rho = rho
        stream.edits = [
            Edit(
                **{**one, "paraphrases": tuple(one["paraphrases"]), "neighbours": tuple(map(tuple, one["neighbours"]))}
            )
            for one in told["edits"]
        ]
        stream._rows = told["history"]
        return stream


def _last_windows(editor: Editor, text: Any, tokens: int) -> torch.Tensor:
    window = min(256, tokens, getattr(editor.model.config, "max_position_embeddings", None) or 256)
    return windows(editor.tokenizer, text, window).ids[-max(1, tokens // window) :]
