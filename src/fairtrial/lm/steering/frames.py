"""Anchor frames: the same texts seen by two models give coordinates both share.

A state h of model m has one coordinate an anchor, the cosine of the centred state to the centred state of that anchor;
a direction r, a difference of states, has ``A r``. Coordinates do not change when the hidden space is rotated, scaled
or shifted, so a direction may be carried from one model to another: given its coordinates c, the direction of a model
that has only its own anchors is the ridge solution ``argmin_r |A r - c|^2 + ridge |r|^2``.

After "Anchor coordinate space" and Moschella et al. 2023, "Relative representations".
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from fairtrial.causal_lm.hidden import as_states
from fairtrial.errors import InputError, UnknownNameError

Frame: TypeAlias = Literal["cosine", "whitened"]
LEAST_ANCHORS = 8


class UnreachableDirection(InputError):
    """A direction that no anchor points along, so that it has no coordinates."""


class Reconstruction(NamedTuple):
    """A direction rebuilt from its coordinates.

    Attributes
    ----------
    vector
        (d,) float64 of length 1: what is added to states to move them along the direction.
    probe
        (d,) float64: ``(h - mean) @ probe`` tells how far a state lies along it. The vector itself, but in a whitened
        frame, where the two differ as a covariance does from its inverse.
    fit_residual
        ``|A r - c|`` of the ridge solution, before ``r`` is scaled: 0 fits, near 1 means that the model's anchors
        cannot express the direction.
    """

    vector: torch.Tensor
    probe: torch.Tensor
    fit_residual: float


class AnchorFrame:
    """The states of the anchors in one model, and what they make of states and directions.

    Parameters
    ----------
    states
        (N, d) of tensor or array: one state an anchor, N at least 8.
    frame
        "cosine": coordinates are the same under rotation, scale and shift of the hidden space. "whitened": under any
        invertible linear map; it needs more anchors than dimensions to know the covariance.
    remove_pcs
        Principal components of the anchors that are removed first. ``None`` = 1 in a cosine frame, where the dominant
        direction of a language model's states otherwise makes all cosines nearly 1, and 0 in a whitened frame.
    eps
        What a whitened frame adds to the variance of every direction, in units of their mean.

    Attributes
    ----------
    mean
        (d,) float64, of the anchors.
    rows
        (N, d) float64: the matrix A, of unit rows.

    Raises
    ------
    InputError
        Fewer than 8 anchors; states that are not finite; an anchor whose state is the mean of all.

    Examples
    --------
    >>> X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    >>> turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))[0]
    >>> ours, theirs = AnchorFrame(X), AnchorFrame(7 * X @ turn + 3)
    >>> r = X[0] - X[1]
    >>> bool(torch.allclose(ours.of_direction(r), theirs.of_direction(r @ turn), atol=1e-6))
    True
    """

    def __init__(
        self, states: Any, *, frame: Frame = "cosine", remove_pcs: int | None = None, eps: float = 1e-6
    ) -> None:
        if frame not in ("cosine", "whitened"):
            raise UnknownNameError("frame", frame, ["cosine", "whitened"])
        X = as_states(states)  # (N, d)
        if X.ndim != 2 or len(X) < LEAST_ANCHORS:
            raise InputError(f"anchor states have shape {tuple(X.shape)}: give (N, d) with N at least {LEAST_ANCHORS}")
        if not bool(torch.isfinite(X).all()):
            bad = int((~torch.isfinite(X)).any(1).nonzero()[0])
            raise InputError(f"the state of anchor {bad} is not finite")
        self.frame: Frame = frame
        self.remove_pcs = (1 if frame == "cosine" else 0) if remove_pcs is None else remove_pcs
        if self.remove_pcs not in range(min(X.shape)):
            raise InputError(
                f"remove_pcs={self.remove_pcs} of {min(X.shape)} components: give a whole number, 0 or more, below that"
            )
        if not 0 < eps < float("inf"):
            raise InputError(f"eps={eps}: give a positive number, such as 1e-6")
        self.mean = X.mean(0)
        centred = X - self.mean
        basis, deviations = _principal(centred)  # (d, rank), (rank,)
        self._removed = basis[:, : self.remove_pcs]  # (d, k)
        self._basis, self._gains = None, None
        if frame == "whitened":
            variances = deviations[self.remove_pcs :].square()
            self._basis = basis[:, self.remove_pcs :]
            self._gains = (variances + eps * variances.mean()).rsqrt()
        transformed = self._transform(centred)
        norms = transformed.norm(dim=1, keepdim=True)
        if bool((norms <= 1e-9 * centred.norm(dim=1).max()).any()):
            bad = int(norms.squeeze(1).argmin())
            raise InputError(f"the state of anchor {bad} equals the mean of all: constant states have no directions")
        self.rows = transformed / norms

    def of_states(self, states: Any) -> torch.Tensor:
        """Return the coordinates of states: (n, d) to (n, N), cosines to the anchors."""
        seen = self._transform(self._read(states) - self.mean)
        return (seen / seen.norm(dim=-1, keepdim=True).clamp_min(1e-300)) @ self.rows.T

    def of_direction(self, direction: Any) -> torch.Tensor:
        """Return the coordinates of a direction: (d,) to (N,), of length 1.

        Raises
        ------
        UnreachableDirection
            It is orthogonal to all anchors.
        """
        r = self._read(direction)
        coordinates = self.rows @ self._transform(r)
        if not float(coordinates.norm()) >= 1e-6 * float(r.norm()) > 0:
            raise UnreachableDirection("the direction is zero or orthogonal to all anchors: take more varied anchors")
        return coordinates / coordinates.norm()

    def reconstruct(self, coordinates: Any, *, ridge: float = 0.1) -> Reconstruction:
        """Return the direction whose coordinates are nearest to ``coordinates``, (N,).

        ``ridge`` is relative to the mean squared length of the rows, which is 1. Solved in the smaller of the N and d
        dimensions.

        Raises
        ------
        InputError
            Coordinates of another shape, or a ridge that is not positive.
        UnreachableDirection
            No direction of this model has anything of such coordinates.
        """
        c = as_states(coordinates, "coordinates")
        if c.shape != (len(self.rows),) or not bool(torch.isfinite(c).all()):
            raise InputError(f"coordinates have shape {tuple(c.shape)}: one finite number for {len(self.rows)} anchors")
        r = _ridge(self.rows, c, ridge)
        if not float(r.norm()) > 1e-9 * float(c.norm()):
            raise UnreachableDirection("the anchors of this model express nothing of the direction")
        vector, probe = self._untransform(r), self._transform(r)
        length = vector.norm()
        return Reconstruction(vector / length, probe / length, float((self.rows @ r - c).norm()))

    def held_out_error(self, coordinates: Any, *, ridge: float) -> float:
        """Return how badly coordinates are foretold from those of all other anchors, 1 = no better than zero.

        The leave-one-out error of the ridge solution in closed form, over the length of the coordinates. It needs no
        label, so a ridge may be chosen by it.
        """
        c = as_states(coordinates, "coordinates")
        gram = self.rows @ self.rows.T  # (N, N)
        eye = torch.eye(len(gram), dtype=gram.dtype)
        hat = torch.linalg.solve(gram + _checked(ridge) * eye, gram)  # symmetric: the two commute
        return float(((c - hat @ c) / (1 - hat.diagonal())).norm() / c.norm())

    def _read(self, states: Any) -> torch.Tensor:
        x = as_states(states)
        if x.shape[-1:] != self.mean.shape:
            raise InputError(f"states have shape {tuple(x.shape)}: the anchors' have {len(self.mean)} dimensions")
        if not bool(torch.isfinite(x).all()):
            raise InputError("states are not finite")
        return x

    def _transform(self, x: torch.Tensor) -> torch.Tensor:
        """Remove the leading components of differences x (..., d) and, in a whitened frame, scale the others."""
        if self._basis is not None:
            return x @ self._basis * self._gains @ self._basis.T
        return x - x @ self._removed @ self._removed.T

    def _untransform(self, r: torch.Tensor) -> torch.Tensor:
        """Return the difference of states that is seen as ``r``, a combination of the frame's rows."""
        if self._basis is not None:
            return r @ self._basis / self._gains @ self._basis.T
        return r


def _principal(centred: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the principal directions (d, rank) and standard deviations (rank,) of centred rows, largest first.

    By the smaller of the two Gram matrices, which for 1000 anchors of 8192 dimensions is much cheaper than an SVD.
    """
    n, d = centred.shape
    values, vectors = torch.linalg.eigh(centred @ centred.T if n <= d else centred.T @ centred)
    kept = values.flip(0) > 1e-12 * values[-1].clamp_min(1e-300)
    values, vectors = values.flip(0)[kept], vectors.flip(1)[:, kept]
    basis = centred.T @ vectors / values.sqrt() if n <= d else vectors
    return basis, (values / n).sqrt()


def _ridge(A: torch.Tensor, c: torch.Tensor, ridge: float) -> torch.Tensor:
    """Return argmin_r |A r - c|^2 + ridge |r|^2, r (d,), in the smaller of the two spaces."""
    n, d = A.shape
    if n <= d:
        return A.T @ torch.linalg.solve(A @ A.T + _checked(ridge) * torch.eye(n, dtype=A.dtype), c)
    return torch.linalg.solve(A.T @ A + _checked(ridge) * torch.eye(d, dtype=A.dtype), A.T @ c)


def _checked(ridge: float) -> float:
    if not 0 < ridge < float("inf"):
        raise InputError(f"ridge={ridge}: give a positive number, such as 0.1")
    return ridge
