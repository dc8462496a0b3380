"""A direction in one model: a detector, a steering vector, and files of both."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fairtrial.causal_lm.hidden import as_states
from fairtrial.causal_lm.layout import ChainSpec, find_blocks
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.steering.control_vectors import write_control_vector
from fairtrial.lm.steering.states import Pooling, generates, layer_at, pooling_of, text_states

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ContrastiveDirection:
    """A direction found from labelled texts: ``vector`` (d,) float64, and the layer and pooling it was found at."""

    vector: torch.Tensor
    layer: int
    pooling: Literal["last", "mean"]


def contrastive_direction(
    model: Any,
    tokenizer: Any,
    positive: Sequence[str],
    negative: Sequence[str],
    *,
    depth: float = 0.6,
    layer: int | None = None,
    method: Literal["mean", "pca"] = "mean",
    pooling: Pooling = "auto",
    spec: ChainSpec | None = None,
    cache: str | Path | None = None,
) -> ContrastiveDirection:
    """Return the direction from negative to positive texts in a model that labels exist for.

    Parameters
    ----------
    model, tokenizer, pooling, spec, cache
        As for :func:`~fairtrial.lm.steering.states.text_states`.
    positive, negative
        n texts each, of which the i-th form a pair.
    depth, layer
        Where: after a share of the blocks, or after a given layer.
    method
        "mean": of positive minus mean of negative states. "pca": the first principal component of the pairs'
        differences, not centred, its sign that of their mean.

    Raises
    ------
    InputError
        Lists of unequal length; a model that does not tell the two apart at all.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> model, tokenizer = tiny_causal_lm()
    >>> contrastive_direction(model, tokenizer, ["w1 w2", "w1 w3"], ["w2 w2", "w2 w3"]).vector.shape
    torch.Size([32])
    """
    if method not in ("mean", "pca"):
        raise UnknownNameError("method", method, ["mean", "pca"])
    if len(positive) != len(negative):
        raise InputError(f"{len(positive)} positive and {len(negative)} negative texts: give pairs")
    at = layer_at(model, depth, spec) if layer is None else layer
    how = pooling_of(model, pooling)
    both = [*positive, *negative]
    states = text_states(model, tokenizer, both, [at], pooling=how, spec=spec, cache=cache)[:, 0].double()
    differences = states[: len(positive)] - states[len(positive) :]  # (n, d)
    vector = differences.mean(0)
    if method == "pca":
        first = torch.linalg.svd(differences, full_matrices=False).Vh[0]
        vector = first * torch.sign(first @ vector)
    if not float(vector.norm()) > 1e-6 * float(states.norm(dim=1).mean()):
        raise InputError("the model has the same states for positive and negative texts: they tell no direction")
    return ContrastiveDirection(vector, at % len(find_blocks(model, spec)[1]), how)


@dataclass(frozen=True, eq=False)
class Direction:
    """A direction of one model.

    Attributes
    ----------
    vector
        (d,) float64 of length 1: what steering adds.
    probe, mean
        (d,) float64: the score of a state h is ``(h - mean) @ probe / spread``.
    spread
        Standard deviation of ``(h - mean) @ probe`` over the anchors, so that scores need no label and directions of
        one model compare.
    scale
        Median length of the anchors' states: the unit of steering strength.
    layer
        Where the direction lives: in the residual stream after this block; ``None`` = known from states alone.
    fit_residual
        See :class:`~fairtrial.lm.steering.frames.Reconstruction`.
    model, tokenizer, pooling, spec
        Of the model, to score texts; ``None`` where only states are known.
    """

    vector: torch.Tensor
    probe: torch.Tensor
    mean: torch.Tensor
    spread: float
    scale: float
    fit_residual: float
    layer: int | None = None
    model: Any = None
    tokenizer: Any = None
    pooling: Literal["last", "mean"] = "last"
    spec: ChainSpec | None = None

    def score_states(self, states: Any) -> torch.Tensor:
        """Return how far states (n, d) lie along the direction, (n,), in standard deviations of the anchors."""
        x = as_states(states)
        if x.ndim != 2 or x.shape[1] != len(self.mean):
            raise InputError(f"states have shape {tuple(x.shape)}: give (n, {len(self.mean)})")
        return (x - self.mean) @ self.probe / self.spread

    def score(self, texts: Sequence[str]) -> torch.Tensor:
        """Return how far texts lie along the direction, (n,), in standard deviations of the anchors."""
        return self.score_states(self.states(texts))

    def states(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the states of texts that scores are made of, (n, d) float32."""
        if self.model is None or self.layer is None:
            raise InputError("the direction knows no model: score states by score_states, or load it with a model")
        return text_states(self.model, self.tokenizer, texts, [self.layer], pooling=self.pooling, spec=self.spec)[:, 0]

    @contextmanager
    def steer(
        self,
        model: Any,
        strength: float = 0.4,
        *,
        how: Literal["add", "ablate"] = "add",
        generated_only: bool = False,
    ) -> Iterator[None]:
        """Steer a model while the context lasts.

        Parameters
        ----------
        model
            A causal model of transformers with this direction's width.
        strength
            "add": every state after the layer moves by ``strength * scale`` along the vector, so the number means the
            same in every model; from -1 to 1 is usual, beyond 2 a warning is given. 0 changes nothing. Steers that are
            nested add. "ablate" takes no account of it.
        how
            "add", or "ablate": take out what states have along the vector.
        generated_only
            Leave the prompt alone: only passes of one token, those of decoding with a cache, are steered.

        Raises
        ------
        InputError
            A model that does not generate, or of another width; a direction without a layer.
        """
        if how not in ("add", "ablate"):
            raise UnknownNameError("how", how, ["add", "ablate"])
        if self.layer is None:
            raise InputError("the direction knows no layer, as it comes from states alone: there is nothing to steer")
        if not generates(model):
            raise InputError(f"{type(model).__name__} does not generate text: steer a causal language model")
        blocks = find_blocks(model, self.spec)[1]
        width = model.get_input_embeddings().embedding_dim
        if width != len(self.vector) or self.layer >= len(blocks):
            raise InputError(
                f"the model has {len(blocks)} layers of width {width}, the direction is of layer {self.layer} and "
                f"width {len(self.vector)}: it is of another model"
            )
        if abs(strength) > 2:
            warnings.warn(f"strength={strength:g} exceeds twice the length of states: expect noise", stacklevel=3)

        def hook(block: nn.Module, args: tuple, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output  # (B, T, d)
            if generated_only and states.shape[1] > 1:
                return output
            vector = self.vector.to(states)
            if how == "add":
                states = states + strength * self.scale * vector
            else:
                states = states - (states @ vector)[..., None] * vector
            return (states, *output[1:]) if isinstance(output, tuple) else states

        if how == "add" and strength == 0:
            yield
            return
        handle = blocks[self.layer].register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def save(self, path: str | Path) -> None:
        """Write the direction to a ``.safetensors`` file, or its steering vector to a ``.gguf`` file for llama.cpp.

        A GGUF control vector is scaled so that ``--control-vector-scaled FILE S`` steers with strength S. llama.cpp
        steers no layer 0.
        """
        path = Path(path)
        if path.suffix == ".gguf":
            if not self.layer:
                raise InputError("llama.cpp steers layers from 1 on: take a greater depth")
            hint = self.model.config.model_type if self.model is not None else "unknown"
            write_control_vector(path, {self.layer: self.vector * self.scale}, model_hint=hint)
        elif path.suffix == ".safetensors":
            from safetensors.torch import save_file

            told = {key: getattr(self, key) for key in ("spread", "scale", "fit_residual", "layer", "pooling")}
            tensors = {"vector": self.vector, "probe": self.probe, "mean": self.mean}
            save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path, {"direction": json.dumps(told)})
        else:
            raise InputError(f"{path}: give a name that ends in .safetensors or .gguf")

    @classmethod
    def load(
        cls, path: str | Path, model: Any = None, tokenizer: Any = None, *, spec: ChainSpec | None = None
    ) -> Direction:
        """Read what :meth:`save` wrote to a ``.safetensors`` file; with a model and tokenizer it scores texts."""
        tensors, told = read_safetensors(path, "direction")
        return cls(**tensors, **told, model=model, tokenizer=tokenizer, spec=spec)


def score_axes(directions: Mapping[str, Direction], texts: Sequence[str]) -> pd.DataFrame:
    """Return the scores of texts on several directions of one model and layer, (n, axes), in one pass of the model.

    Scores are standardised, so the column of a row's largest one, ``.idxmax(axis=1)``, is what the text shows most of.
    """
    import pandas as pd

    first = next(iter(directions.values()))
    if any((d.model, d.layer, d.pooling) != (first.model, first.layer, first.pooling) for d in directions.values()):
        raise InputError("the directions are not of one model, layer and pooling: score them one by one")
    states = first.states(texts)
    return pd.DataFrame({axis: direction.score_states(states).numpy() for axis, direction in directions.items()})


def read_safetensors(path: str | Path, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a file and what it says of itself under ``kind``, or refuse it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            told = (file.metadata() or {}).get(kind)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a readable safetensors file: {error}") from error
    if told is None:
        raise InputError(f"{path}: no {kind} of this library: give a file that its save() wrote")
    return tensors, json.loads(told)
