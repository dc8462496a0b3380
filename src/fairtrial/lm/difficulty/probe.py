"""Referential latent difficulty: where a problem's hidden state lies between those of easy and of hard references.

The state is that of the last prompt token, before any answer. In a layer's frame (standardised over references and
unlabelled prompts, with what is linear in the log of the prompt's length taken out) references with difficulties d_r
give a direction ``w = sum_r (d_r - mean d) z_r``; a prompt's score is its projection on it. Layers are weighted by how
well they order the references when each is left out.

After "Referential Latent Difficulty Perception" (RLDP); scores, frame and weights are ours.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from fairtrial.causal_lm.hidden import as_states, hidden_states, model_digest
from fairtrial.causal_lm.layout import ChainSpec, find_blocks
from fairtrial.causal_lm.prompts import checked_texts, prompt_texts
from fairtrial.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from sklearn.isotonic import IsotonicRegression

Method: TypeAlias = Literal["direction", "kernel", "shrinkage"]
METHODS = ("direction", "kernel", "shrinkage")
DEPTHS = (0.4, 0.9)  # of candidate layers
TEMPERATURE = 0.1  # of the kernel
SHRINKAGE = 0.5
AT_ONCE = 64  # states that are scored at once, for the processor's cache
FEWEST_TO_LEAVE_OUT = 4  # references; with fewer, leaving one out leaves nothing to compare
FEWEST_TO_CALIBRATE = 30


class NoSignal(UserWarning):
    """No layer orders the references better than chance when they are left out in turn."""


class DifficultyProbe:
    """How hard prompts are for a model, from one forward pass and a few reference problems.

    Parameters
    ----------
    model, tokenizer
        Of transformers. A prompt is put as a user's turn where the tokenizer has a chat template.
    method
        "direction": the difference of hard and easy references. "kernel": the mean difficulty of the references a
        prompt's state is most like, so that a score is a difficulty. "shrinkage": the direction of a linear
        discriminant, its covariance shrunk half-way to a sphere.
    remove_length
        Take out of the states what is linear in the log of the prompt's length, so that scores are no length meter.
    standardize
        "coordinate": divide each coordinate by its deviation. "layer": all of a layer by one number, so that scores do
        not change when states are rotated.
    layers
        Candidate layers; ``None`` = all at depths .4 to .9 of the model.
    spec
        For an architecture that :mod:`fairtrial.causal_lm.layout` does not know.

    Attributes
    ----------
    layers_ : candidate layers.
    reference_prompts_ : the references' texts, empty where they were states.
    weights_ : (L,) float64: what each layer counts, 0 for one that orders the references no better than chance.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> easy, hard = [f"w{i} w2" for i in range(20, 28)], [f"w{i} w9" for i in range(20, 28)]
    >>> probe = DifficultyProbe(*tiny_causal_lm(layers=6)).fit(easy + hard, [0] * 8 + [1] * 8)
    >>> probe.predict(["w40 w2", "w40 w9"]).shape
    (2,)
    """

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        *,
        method: Method = "direction",
        remove_length: bool = True,
        standardize: Literal["coordinate", "layer"] = "coordinate",
        layers: Sequence[int] | None = None,
        spec: ChainSpec | None = None,
    ) -> None:
        if method not in METHODS:
            raise UnknownNameError("method", method, METHODS)
        if standardize not in ("coordinate", "layer"):
            raise UnknownNameError("standardize", standardize, ["coordinate", "layer"])
        self.model = model
        self.tokenizer = tokenizer
        self.method: Method = method
        self.remove_length = remove_length
        self.standardize = standardize
        self.layers = layers
        self.spec = spec
        self.reference_prompts_: tuple[str, ...] = ()

    # ------------------------------------------------------------------------------------------------------- from texts

    def fit(self, prompts: Sequence[str], difficulty: Any, *, unlabelled: Sequence[str] = ()) -> DifficultyProbe:
        """Learn from reference problems.

        Parameters
        ----------
        prompts
            n references, 8 to 64 of one kind; mixed kinds would make the probe tell kinds apart.
        difficulty
            (n,) in [0, 1], 0 easy: failed or not, one less the pass rate, a grade over its range.
        unlabelled
            More prompts like those to come, which make the frame better.

        Raises
        ------
        InputError
            No two difficulties; values outside [0, 1]; prompts beyond the model's window; a prompt twice.
        """
        prompts = checked_texts(prompts, "prompt")
        d = _checked_difficulty(difficulty, len(prompts))
        every = checked_texts([*prompts, *unlabelled], "prompt")
        first: dict[str, int] = {}
        for i, prompt in enumerate(every):
            if first.setdefault(prompt, i) != i:
                raise InputError(f"prompts {first[prompt]} and {i} are the same: a reference may not be its own test")
        H, lengths = self.states(every)
        self._fit(H, d, lengths if self.remove_length else None)
        self.reference_prompts_ = tuple(prompts)
        return self

    def predict(self, prompts: Any, lengths: Any = None) -> np.ndarray:
        """Return scores (n,): higher is harder; with "kernel" a difficulty in [0, 1].

        Parameters
        ----------
        prompts
            n texts, or an array of their states, (n, L, d) or (n, d).
        lengths
            Prompt lengths (n,) beside states, where :meth:`from_states` had them.
        """
        return self._combine(self.transform(prompts, lengths))

    def transform(self, prompts: Any, lengths: Any = None) -> np.ndarray:
        """Return scores by candidate layer, (n, L); arguments as in :meth:`predict`."""
        if isinstance(prompts, np.ndarray | torch.Tensor):
            return self._layer_scores(_three(prompts, dtype=None), lengths)
        return self._layer_scores(*self.states(prompts))

    def states(self, prompts: Sequence[str]) -> tuple[torch.Tensor, np.ndarray]:
        """Return what scores are made of: states (n, L, d) float32, and lengths (n,) in tokens."""
        if self.model is None:
            raise InputError("the probe has no model: give states, an array")
        ids = self.token_ids(prompts)
        H = hidden_states(self.model, ids, self._candidates(), pooling="last", spec=self.spec)
        return H.float().cpu(), np.array([len(row) for row in ids])

    def token_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of prompts, up to where their answers begin."""
        return self.tokenizer(prompt_texts(self.tokenizer, prompts), add_special_tokens=False)["input_ids"]

    def _candidates(self) -> list[int]:
        n = len(find_blocks(self.model, self.spec)[1])
        if self.layers is not None:
            return [layer % n if -n <= layer < n else layer for layer in self.layers]
        return [layer for layer in range(n) if DEPTHS[0] <= (layer + 1) / n <= DEPTHS[1]] or [n // 2]

    # ------------------------------------------------------------------------------------------------------ from states

    @classmethod
    def from_states(
        cls,
        states: Any,
        difficulty: Any,
        *,
        lengths: Any = None,
        unlabelled: Any = None,
        unlabelled_lengths: Any = None,
        method: Method = "direction",
        standardize: Literal["coordinate", "layer"] = "coordinate",
    ) -> DifficultyProbe:
        """Return a fitted probe of states alone, such as the embeddings that a closed model returns.

        Parameters
        ----------
        states, unlabelled
            (n, L, d) or (n, d), of references and of other prompts.
        difficulty
            (n,) in [0, 1].
        lengths, unlabelled_lengths
            Prompt lengths, (n,); with them what is linear in their log is taken out.
        """
        probe = cls(method=method, standardize=standardize, remove_length=lengths is not None)
        H = _three(states)
        d = _checked_difficulty(difficulty, len(H))
        if unlabelled is not None:
            more = _three(unlabelled)
            if more.shape[1:] != H.shape[1:]:
                raise InputError(f"unlabelled states have shape {tuple(more.shape)}, references {tuple(H.shape)}")
            H = torch.cat([H, more])
            if lengths is not None:
                lengths = [*lengths, *(() if unlabelled_lengths is None else unlabelled_lengths)]
        probe._fit(H, d, lengths)
        return probe

    # -------------------------------------------------------------------------------------------------------------- fit

    def _fit(self, H: torch.Tensor, d: np.ndarray, lengths: Any) -> None:
        n = len(d)
        logs = None if lengths is None else _log_lengths(lengths, len(H))
        self.layers_ = [*range(H.shape[1])] if self.model is None else self._candidates()
        self._d = torch.from_numpy(d)
        # The frame, from references and unlabelled prompts. (m, L, d_model)
        X = H.double()
        self._mean = X.mean(0)
        deviation = (X - self._mean).square().mean(0).sqrt()
        if self.standardize == "layer":
            deviation = deviation.square().mean(1, keepdim=True).sqrt().expand_as(deviation)
        self._scale = deviation + 1e-6 * deviation.mean(1, keepdim=True).clamp_min(1e-30)
        self._slope = None
        Z = (X - self._mean) / self._scale
        if logs is not None:
            self._log_length = float(logs.mean())
            centred = logs - self._log_length
            if float(centred.square().sum()) > 1e-12:
                self._slope = torch.einsum("m,mld->ld", centred, Z) / centred.square().sum()  # (L, d)
        Z = self._frame(H, lengths)
        self._references = Z[:n]  # (n, L, d)
        if self.method != "kernel":
            self._w = _direction(self._references, self._d, self.method)  # (L, d)
        pool = self._raw(Z)  # (m, L)
        self._pool_mean, self._pool_deviation = pool.mean(0), pool.std(0, unbiased=False).clamp_min(1e-12)
        self.weights_ = self._layer_weights()
        self.pool_scores_ = self._combine(pool.numpy())

    def _layer_weights(self) -> np.ndarray:
        """Return 2 AUROC - 1 of each layer's leave-one-out scores, where positive; equal weights for very few."""
        n, L = self._references.shape[:2]
        if n < FEWEST_TO_LEAVE_OUT:
            return np.full(L, 1 / L)
        left_out = self._left_out_scores()  # (n, L)
        weights = np.array([max(0.0, 2 * concordance(self._d.numpy(), left_out[:, layer]) - 1) for layer in range(L)])
        if not weights.any():
            warnings.warn(
                "no layer orders the references better than chance when each is left out: the middle one is used",
                NoSignal,
                stacklevel=4,
            )
            weights[L // 2] = 1.0
        return weights

    def _left_out_scores(self) -> np.ndarray:
        """Return the score of each reference from all others, (n, L); the frame stays."""
        Z, d = self._references, self._d
        n = len(d)
        if self.method == "direction":
            # Without r, w is w - (d_r - mean) z_r, corrected for the shift of the mean: no fit is made again.
            others = (d.sum() - d) / (n - 1)  # (n,): the mean difficulty of the others
            gram = torch.einsum("rld,sld->lrs", Z, Z)  # (L, n, n)
            coefficients = (d[None, :] - others[:, None]) * (1 - torch.eye(n, dtype=d.dtype))  # (r, s)
            products = torch.einsum("lrs,rs->rl", gram, coefficients)
            squares = torch.einsum("ra,lab,rb->rl", coefficients, gram, coefficients)
            return (products / (squares.sqrt() * Z.shape[2] ** 0.5).clamp_min(1e-300)).numpy()
        scores = torch.empty(n, Z.shape[1], dtype=Z.dtype)
        for r in range(n):
            kept = [s for s in range(n) if s != r]
            if self.method == "kernel":
                scores[r] = _kernel(Z[r : r + 1], Z[kept], d[kept])[0]
            else:
                scores[r] = _project(Z[r : r + 1], _direction(Z[kept], d[kept], self.method))[0]
        return scores.numpy()

    # ----------------------------------------------------------------------------------------------------------- scores

    def _frame(self, H: torch.Tensor, lengths: Any) -> torch.Tensor:
        """Return states (m, L, d) in the frame, float64."""
        self._check_shape(H)
        Z = (H.double() - self._mean) / self._scale
        _check_finite(Z)
        return Z if self._slope is None else Z - self._centred(lengths, len(H))[:, None, None] * self._slope

    def _check_shape(self, H: torch.Tensor) -> None:
        if H.ndim != 3 or H.shape[1:] != self._mean.shape:
            fitted = [str(size) for size in self._mean.shape]
            raise InputError(
                f"states have shape {tuple(H.shape)}: the probe was fitted on (n, L, d) = (n, {', '.join(fitted)})"
            )

    def _centred(self, lengths: Any, n: int) -> torch.Tensor:
        """Return the logs of n lengths less that of the frame."""
        return _log_lengths(() if lengths is None else lengths, n) - self._log_length

    def _raw(self, Z: torch.Tensor) -> torch.Tensor:
        """Return the scores of framed states by layer, (m, L)."""
        if self.method == "kernel":
            return _kernel(Z, self._references, self._d)
        return _project(Z, self._w)

    def _layer_scores(self, H: torch.Tensor, lengths: Any) -> np.ndarray:
        if not hasattr(self, "weights_"):
            raise InputError("the probe is not fitted: call fit with reference prompts and their difficulties")
        if self.method == "kernel":
            return self._raw(self._frame(H, lengths)).numpy()
        # What the frame and the direction do to a state is one product: no state is copied, some at a time are widened.
        self._check_shape(H)
        w = _unit(self._w)
        a = w / self._scale
        scores = torch.cat([torch.einsum("mld,ld->ml", some.double(), a) for some in H.split(AT_ONCE)])
        scores -= (a * self._mean).sum(1)
        if self._slope is not None:
            scores -= self._centred(lengths, len(H))[:, None] * (w * self._slope).sum(1)
        _check_finite(scores)
        return scores.numpy()

    def _combine(self, scores: np.ndarray) -> np.ndarray:
        """Return the weighted mean over layers, of all but kernel scores in units of the pool's spread."""
        if self.method != "kernel":
            scores = (scores - self._pool_mean.numpy()) / self._pool_deviation.numpy()
        return scores @ self.weights_ / self.weights_.sum()

    # ------------------------------------------------------------------------------------------------------ calibration

    def calibrate(self, scores: Any, wrong: Any) -> DifficultyProbe:
        """Learn what scores mean from at least 30 prompts with known outcomes at the cheapest effort.

        Parameters
        ----------
        scores
            (n,) of :meth:`predict`, for prompts that are no references.
        wrong
            (n,) of 0 and 1.
        """
        from sklearn.isotonic import IsotonicRegression

        s, y = np.asarray(scores, float), np.asarray(wrong, float)
        if s.ndim != 1 or s.shape != y.shape or len(s) < FEWEST_TO_CALIBRATE:
            raise InputError(
                f"{y.size} outcomes for {s.size} scores: calibrate with at least {FEWEST_TO_CALIBRATE} of both"
            )
        if not np.isfinite(s).all() or not np.isin(y, (0, 1)).all():
            raise InputError("scores must be finite and outcomes 0 or 1")
        self._isotonic: IsotonicRegression = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(s, y)
        return self

    def probability_wrong(self, prompts: Sequence[str]) -> np.ndarray:
        """Return the probability (n,) that the cheapest effort gets prompts wrong; needs :meth:`calibrate`."""
        if not hasattr(self, "_isotonic"):
            raise InputError("the probe is not calibrated: call calibrate with scores and outcomes")
        return self._isotonic.predict(self.predict(prompts))

    # ------------------------------------------------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write the fitted probe, without its calibration, to a ``.safetensors`` file, with its model's fingerprint."""
        from safetensors.torch import save_file

        if Path(path).suffix != ".safetensors":
            raise InputError(f"{path}: give a name that ends in .safetensors")
        if not hasattr(self, "weights_"):
            raise InputError("the probe is not fitted: there is nothing to save")
        tensors = {
            "mean": self._mean, "scale": self._scale, "references": self._references, "d": self._d,
            "pool_mean": self._pool_mean, "pool_deviation": self._pool_deviation,
            "weights": torch.from_numpy(self.weights_), "pool_scores": torch.from_numpy(self.pool_scores_),
        }  # fmt: skip
        if self._slope is not None:
            tensors["slope"] = self._slope
        told = {
            "method": self.method, "remove_length": self.remove_length, "standardize": self.standardize,
            "layers": self.layers_, "log_length": getattr(self, "_log_length", 0.0),
            "model": None if self.model is None else model_digest(self.model),
        }  # fmt: skip
        save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path, {"probe": json.dumps(told)})

    @classmethod
    def load(
        cls, path: str | Path, model: Any = None, tokenizer: Any = None, *, spec: ChainSpec | None = None
    ) -> DifficultyProbe:
        """Read what :meth:`save` wrote.

        Raises
        ------
        InputError
            Not such a file, or one of another model: what is hard for one model is not for another.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                told = json.loads((file.metadata() or {}).get("probe", "null"))
                t = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: not a readable safetensors file: {error}") from error
        if told is None:
            raise InputError(f"{path}: no probe in it: give a file that DifficultyProbe.save wrote")
        if model is not None and told["model"] != model_digest(model):
            raise InputError(
                f"{path}: a probe of another model; difficulty is a model's own, so fit one for this model"
            )
        probe = cls(
            model, tokenizer, method=told["method"], remove_length=told["remove_length"],
            standardize=told["standardize"], layers=told["layers"], spec=spec,
        )  # fmt: skip
        probe.layers_ = told["layers"]
        probe._mean, probe._scale, probe._references, probe._d = t["mean"], t["scale"], t["references"], t["d"]
        probe._pool_mean, probe._pool_deviation = t["pool_mean"], t["pool_deviation"]
        probe._slope, probe._log_length = t.get("slope"), told["log_length"]
        probe.weights_, probe.pool_scores_ = t["weights"].numpy(), t["pool_scores"].numpy()
        if probe.method != "kernel":
            probe._w = _direction(probe._references, probe._d, probe.method)
        return probe


# ---------------------------------------------------------------------------------------------------------------- maths


def concordance(truth: Any, score: Any) -> float:
    """Return how often the score orders two prompts of unequal truth rightly, ties half: AUROC where truth is 0 and 1.

    Raises
    ------
    InputError
        If all truths are equal, or there is not one of both a prompt.

    Examples
    --------
    >>> concordance([0, 0, 1], [0.1, 0.3, 0.2])
    0.5
    """
    truth, score = np.asarray(truth, float), np.asarray(score, float)
    if truth.ndim != 1 or truth.shape != score.shape or not np.isfinite([truth, score]).all():
        raise InputError(f"truth has shape {truth.shape}, score {score.shape}: give a finite number of both a prompt")
    harder = truth[:, None] > truth[None, :]
    if not harder.any():
        raise InputError("all are equally difficult: there are no two to order")
    right = np.sign(score[:, None] - score[None, :])[harder]
    return float((right.mean() + 1) / 2)


def _three(states: Any, *, dtype: torch.dtype | None = torch.float64) -> torch.Tensor:
    """Return states as (n, L, d)."""
    H = as_states(states, dtype=dtype)
    if H.ndim not in (2, 3) or not len(H):
        raise InputError(f"states have shape {tuple(H.shape)}: give (n, L, d) or (n, d) of at least one prompt")
    return H[:, None] if H.ndim == 2 else H


def _checked_difficulty(difficulty: Any, n: int) -> np.ndarray:
    """Return difficulties (n,) of n references; refuse those that order nothing."""
    try:
        d = np.asarray(difficulty, dtype=float)
    except (TypeError, ValueError):
        d = np.empty(0)
    if d.shape != (n,) or not np.isfinite(d).all():
        raise InputError(f"difficulty: give one finite number for each of the {n} references")
    if d.min() < 0 or d.max() > 1:
        raise InputError(
            f"difficulties lie in [{d.min():g}, {d.max():g}]: scale them to [0, 1], for grades by "
            "scipy.stats.rankdata(d, 'average') / len(d)"
        )
    if len(np.unique(d)) < 2:
        raise InputError("all references are equally difficult: give easy and hard ones")
    return d


def _log_lengths(lengths: Any, n: int) -> torch.Tensor:
    """Return the logs of the lengths (n,) of n prompts."""
    given = np.asarray(lengths, dtype=float)
    if given.shape != (n,) or not (given > 0).all():
        raise InputError(f"the probe takes out the prompt's length: give lengths=, a positive number for {n} prompts")
    return torch.from_numpy(np.log(given))


def _direction(Z: torch.Tensor, d: torch.Tensor, method: Method) -> torch.Tensor:
    """Return the direction of each layer, (L, d), from references (n, L, d)."""
    centred = d - d.mean()
    w = torch.einsum("n,nld->ld", centred, Z)
    if method == "direction":
        return w
    # Within-class covariance: what is left of the states when a line in d is taken out. Inverted in n dimensions.
    n, _, size = Z.shape
    left = Z - Z.mean(0) - centred[:, None, None] * (w / centred.square().sum())
    R = left.transpose(0, 1) / n**0.5  # (L, n, d): Sigma = R^T R
    ridge = SHRINKAGE * R.square().sum((1, 2)) / size  # gamma tr(Sigma) / d
    ridge = ridge.clamp_min(1e-12)[:, None, None]
    small = R @ R.transpose(1, 2) + ridge * torch.eye(n, dtype=R.dtype)  # (L, n, n)
    inner = torch.linalg.solve(small, R @ w[..., None])  # (L, n, 1)
    return (w - (R.transpose(1, 2) @ inner)[..., 0]) / ridge[:, 0]


def _project(Z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return <z, w> / (|w| sqrt(d)) of each layer, (m, L)."""
    return torch.einsum("mld,ld->ml", Z, _unit(w))


def _unit(w: torch.Tensor) -> torch.Tensor:
    """Return directions (L, d) of length 1 / sqrt(d)."""
    return w / (w.norm(dim=1, keepdim=True) * w.shape[1] ** 0.5).clamp_min(1e-300)


def _check_finite(values: torch.Tensor) -> None:
    """Refuse states, or scores, (m, ...) that are not numbers."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).flatten(1).any(1).nonzero()[0])
        raise InputError(f"the states of prompt {bad} are not finite")


def _kernel(Z: torch.Tensor, references: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return the softmax-weighted mean difficulty of the references a state is like, (m, L)."""
    unit = [x / x.norm(dim=2, keepdim=True).clamp_min(1e-300) for x in (Z, references)]
    cosines = torch.einsum("mld,nld->mln", *unit)
    return torch.softmax(cosines / TEMPERATURE, dim=2) @ d
