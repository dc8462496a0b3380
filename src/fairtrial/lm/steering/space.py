"""A space of anchors that several models share, and directions averaged in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fairtrial.causal_lm.hidden import as_states
from fairtrial.causal_lm.layout import ChainSpec, find_blocks
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.steering.direction import ContrastiveDirection, Direction, read_safetensors
from fairtrial.lm.steering.frames import LEAST_ANCHORS, AnchorFrame, Frame
from fairtrial.lm.steering.states import Pooling, layer_at, pooling_of, text_states

if TYPE_CHECKING:
    import pandas as pd


@dataclass(eq=False)
class _Member:
    """A model of the space: its frame, and where its states come from."""

    frame: AnchorFrame
    states: torch.Tensor  # (N, d)
    layer: int | None = None
    model: Any = None
    tokenizer: Any = None
    pooling: Literal["last", "mean"] = "last"
    spec: ChainSpec | None = None
    directions: dict[str, torch.Tensor] = field(default_factory=dict)


class AnchorSpace:
    """Models that saw the same anchor texts, and the directions known in some of them.

    Parameters
    ----------
    anchors
        N different texts, at least 8; a few hundred of any kind do.
    frame, remove_pcs, eps
        See :class:`~fairtrial.lm.steering.frames.AnchorFrame`.

    Raises
    ------
    InputError
        Too few anchors, or the same text twice.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> from fairtrial.lm.steering import contrastive_direction
    >>> space = AnchorSpace([f"w{i} w{i % 5} w{i % 3}" for i in range(20)])
    >>> for seed, name in enumerate(("old", "new")):
    ...     space.add(name, *tiny_causal_lm(seed=seed))
    >>> model, tokenizer = tiny_causal_lm(seed=0)
    >>> space.add_direction("old", "rare", contrastive_direction(model, tokenizer, ["w7 w9"], ["w1 w2"]))
    >>> space.canonical("rare").reconstruct("new").vector.shape
    torch.Size([32])
    """

    def __init__(
        self, anchors: Sequence[str], *, frame: Frame = "cosine", remove_pcs: int | None = None, eps: float = 1e-6
    ) -> None:
        if isinstance(anchors, str) or len(anchors) < LEAST_ANCHORS:
            raise InputError(f"anchors: give a list of at least {LEAST_ANCHORS} texts")
        self.anchors = list(anchors)
        first: dict[str, int] = {}
        for i, text in enumerate(self.anchors):
            if first.setdefault(text, i) != i:
                raise InputError(f"anchors {first[text]} and {i} are the same text: drop one")
        self._how: dict[str, Any] = {"frame": frame, "remove_pcs": remove_pcs, "eps": eps}
        self._members: dict[str, _Member] = {}

    @property
    def digest(self) -> str:
        """32 hexadecimal digits of the anchors and their order."""
        return hashlib.blake2b(json.dumps(self.anchors).encode(), digest_size=16).hexdigest()

    @property
    def names(self) -> list[str]:
        """The models of the space, in the order they were added."""
        return [*self._members]

    def add(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        *,
        depth: float | Literal["auto"] = 0.6,
        layer: int | None = None,
        pooling: Pooling = "auto",
        spec: ChainSpec | None = None,
        cache: str | Path | None = None,
    ) -> None:
        """Let a model read the anchors, one forward pass each.

        Parameters
        ----------
        name
            What the model is called in this space.
        model, tokenizer, pooling, spec, cache
            As for :func:`~fairtrial.lm.steering.states.text_states`.
        depth
            Share of the blocks after which states are taken; "auto": the layer at which the anchors are most alike, by
            linear CKA, to what the models already added make of them. It needs no label.
        layer
            The layer itself, instead of a depth.
        """
        n = len(find_blocks(model, spec)[1])
        how = pooling_of(model, pooling)
        layers = range(n) if layer is None and depth == "auto" else None
        if layers is not None and not self._members:
            raise InputError("depth='auto' needs a model already in the space: give the first one a number")
        if layer is not None:
            at = layer % n if -n <= layer < n else layer  # what does not exist is refused below
        elif depth != "auto":
            at = layer_at(model, depth, spec)
        states = text_states(
            model, tokenizer, self.anchors, [at] if layers is None else layers, pooling=how, spec=spec, cache=cache
        )  # (N, L, d)
        if layers is not None:
            consensus = sum(_gram(member.states) for member in self._members.values())
            at = max(layers, key=lambda i: float((_gram(states[:, i]) * consensus).sum()))
        chosen = states[:, at if layers is not None else 0]
        self._members[name] = _Member(AnchorFrame(chosen, **self._how), chosen, at, model, tokenizer, how, spec)

    def add_states(self, name: str, states: Any) -> None:
        """Add a model by its states of the anchors, (N, d), in their order."""
        X = as_states(states)
        if X.ndim != 2 or len(X) != len(self.anchors):
            raise InputError(
                f"states have shape {tuple(X.shape)}: give (N, d) for the {len(self.anchors)} anchors, in their order"
            )
        self._members[name] = _Member(AnchorFrame(X, **self._how), X)

    def add_direction(self, name: str, axis: str, direction: Any) -> None:
        """Tell the space a direction (d,) of one of its models: an array, or what ``contrastive_direction`` found.

        Raises
        ------
        InputError
            A direction of another layer or pooling than the model's states in this space.
        UnreachableDirection
            A direction orthogonal to all anchors.
        """
        member = self.member(name)
        if isinstance(direction, ContrastiveDirection):
            if member.layer is not None and (direction.layer, direction.pooling) != (member.layer, member.pooling):
                raise InputError(
                    f"the direction is of layer {direction.layer}, pooling {direction.pooling!r}; {name!r} is in the "
                    f"space with layer {member.layer}, pooling {member.pooling!r}: find both at one place"
                )
            direction = direction.vector
        vector = as_states(direction, "direction")
        member.frame.of_direction(vector)  # refuses what has no coordinates
        member.directions[axis] = vector

    def canonical(self, axis: str, sources: Sequence[str] | None = None) -> CanonicalDirection:
        """Return the mean of a direction's coordinates over the models that know it, or over ``sources``."""
        known = [name for name, member in self._members.items() if axis in member.directions]
        if not known:
            axes = {axis: None for member in self._members.values() for axis in member.directions}
            raise UnknownNameError("axis", axis, [*axes])
        for name in sources or ():
            if name not in known:
                raise UnknownNameError(f"source of {axis!r}", name, known)
        names = list(sources or known)
        rows = torch.stack(
            [self.member(name).frame.of_direction(self.member(name).directions[axis]) for name in names]
        )  # (m, N)
        poolings = {self.member(name).pooling for name in names if self.member(name).layer is not None}
        pooling: Pooling = poolings.pop() if len(poolings) == 1 else "auto"
        return CanonicalDirection(axis, names, rows, self, pooling)

    def member(self, name: str) -> _Member:
        """Return a model of the space by its name."""
        if name not in self._members:
            raise UnknownNameError("model", name, self.names)
        return self._members[name]


def _gram(states: torch.Tensor) -> torch.Tensor:
    """Return the centred Gram matrix of states (N, d), of Frobenius length 1: products of two are their linear CKA."""
    centred = states.double() - states.double().mean(0)
    gram = centred @ centred.T
    return gram / gram.norm()


@dataclass(eq=False)
class CanonicalDirection:
    """A direction in anchor coordinates, averaged over models.

    Attributes
    ----------
    axis
        Its name.
    sources
        The m models it comes from.
    rows
        (m, N) float64: its coordinates in each, of length 1.
    space
        The space it lives in.
    pooling
        That of the sources, "auto" where they differ.
    """

    axis: str
    sources: list[str]
    rows: torch.Tensor
    space: AnchorSpace
    pooling: Pooling = "auto"

    @property
    def coordinates(self) -> torch.Tensor:
        """(N,) float64 of length 1."""
        mean = self.rows.mean(0)
        return mean / mean.norm()

    @property
    def alignment(self) -> pd.DataFrame:
        """Cosines between the sources' coordinates, (m, m): 1 = two models know the same direction."""
        import pandas as pd

        return pd.DataFrame((self.rows @ self.rows.T).numpy(), index=self.sources, columns=self.sources)

    @property
    def leave_one_out(self) -> pd.Series:
        """The cosine of each source to the mean of the others; NaN for a single source."""
        import pandas as pd

        others = self.rows.sum(0) - self.rows
        cosines = (self.rows * others).sum(1) / others.norm(dim=1)
        return pd.Series(cosines.where(others.norm(dim=1) > 1e-9, torch.nan).numpy(), index=self.sources)

    def choose_ridge(self, grid: Sequence[float] = (0.001, 0.01, 0.1, 1.0, 10.0)) -> float:
        """Return the ridge of ``grid`` that best foretells held-out anchors' coordinates in the sources.

        Labels of the model that the direction is carried to are not needed, and not used.
        """
        errors = {
            ridge: sum(
                self.space.member(name).frame.held_out_error(row, ridge=ridge)
                for name, row in zip(self.sources, self.rows, strict=True)
            )
            for ridge in grid
        }
        return min(errors, key=errors.__getitem__)

    def reconstruct(self, name: str, *, ridge: float = 0.1) -> Direction:
        """Return the direction in a model of the space, from nothing but its states of the anchors.

        Parameters
        ----------
        name
            The model; it needs no direction of its own.
        ridge
            See :meth:`AnchorFrame.reconstruct <fairtrial.lm.steering.frames.AnchorFrame.reconstruct>`.
        """
        member = self.space.member(name)
        vector, probe, residual = member.frame.reconstruct(self.coordinates, ridge=ridge)
        X = member.states.double()
        spread = float(((X - member.frame.mean) @ probe).std())
        return Direction(
            vector=vector,
            probe=probe,
            mean=member.frame.mean,
            spread=spread,
            scale=float(X.norm(dim=1).median()),
            fit_residual=residual,
            layer=member.layer,
            model=member.model,
            tokenizer=member.tokenizer,
            pooling=member.pooling,
            spec=member.spec,
        )

    def save(self, path: str | Path) -> None:
        """Write the coordinates to a ``.safetensors`` file, with the digest of the anchors they belong to."""
        from safetensors.torch import save_file

        if Path(path).suffix != ".safetensors":
            raise InputError(f"{path}: give a name that ends in .safetensors")
        told = {
            "axis": self.axis,
            "sources": self.sources,
            "anchors": self.space.digest,
            "pooling": self.pooling,
            **self.space._how,
        }
        save_file({"rows": self.rows.contiguous()}, path, {"canonical": json.dumps(told)})

    @classmethod
    def load(cls, path: str | Path, anchors: Sequence[str]) -> CanonicalDirection:
        """Read what :meth:`save` wrote, into a new space of the same anchors that models may be added to.

        Raises
        ------
        InputError
            Not such a file, or one of other anchors.
        """
        tensors, told = read_safetensors(path, "canonical")
        space = AnchorSpace(anchors, frame=told["frame"], remove_pcs=told["remove_pcs"], eps=told["eps"])
        if told["anchors"] != space.digest:
            raise InputError(f"{path}: it belongs to other anchors, or to these in another order: give the same list")
        return cls(told["axis"], told["sources"], tensors["rows"], space, told["pooling"])
