"""The meter: three lines in a training loop that code each label by the model that has not seen it yet."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.training.prequential.report import PrequentialReport, prequential_report

RESERVOIR = 2048  # coded examples that a temperature is fitted on


class PrequentialMeter:
    """Codes every example once, by the loss of the batch it first appears in, before the step.

    Parameters
    ----------
    num_examples : int
        Examples of the training set; their indices run from 0 to it.
    num_classes : int or None
        K. None: real targets, by a Gaussian whose variance is that of the residuals coded so far.
    eps : float
        Each label's probability is ``(1 - eps) p + eps / K``: it costs at most eps nats an example and keeps any from
        costing more than ``log(K / eps)``.
    warmup_examples : int, optional
        The first so many are coded uniformly, ``log K`` each (real targets: by a Gaussian of ``prior_scale``). Left
        out: the first batch.
    calibrate : bool
        Divide the logits by a temperature fitted on examples coded before.
    eval_forward : bool
        Code by an extra forward pass in evaluation mode, of new arrivals only; give ``model`` here and ``inputs`` to
        ``update``.
    model, optimizer : optional
        With both, ``update`` refuses logits computed before the optimizer's last step.
    trajectory : bool
        Also sum the losses of all steps, for the rivals named in the report.
    prior_scale : float
        Of real targets.

    Examples
    --------
    >>> torch.manual_seed(0); x = torch.randn(64, 2); y = (x[:, 0] > 0).long()
    <torch._C.Generator object at ...>
    >>> model = nn.Linear(2, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> meter = PrequentialMeter(num_examples=64, num_classes=2)
    >>> for epoch in range(20):
    ...     for idx in torch.randperm(64).split(8):
    ...         logits = model(x[idx])
    ...         meter.update(idx, logits, y[idx])
    ...         F.cross_entropy(logits, y[idx]).backward(); optimizer.step(); optimizer.zero_grad()
    >>> report = meter.finish(model, [(torch.arange(64), x, y)])
    >>> 0 < report.regret < report.code_length < 64 * math.log(2)
    True
    """

    def __init__(
        self,
        num_examples: int,
        num_classes: int | None,
        *,
        eps: float = 1e-3,
        warmup_examples: int | None = None,
        calibrate: bool = False,
        eval_forward: bool = False,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        trajectory: bool = False,
        prior_scale: float = 1.0,
    ) -> None:
        if num_examples < 1 or (num_classes is not None and num_classes < 2):
            raise InputError(f"num_examples={num_examples}, num_classes={num_classes}: at least 1 and 2 are needed")
        if not 0 <= eps < 1 or prior_scale <= 0:
            raise InputError(f"eps={eps}, prior_scale={prior_scale}: eps in [0, 1) and a positive scale are needed")
        if eval_forward and model is None:
            raise InputError("eval_forward=True needs model=")
        if calibrate and num_classes is None:
            raise InputError("calibrate=True divides logits: real targets have none")
        self.num_examples, self.num_classes, self.eps = num_examples, num_classes, eps
        self.warmup_examples, self.calibrate, self.eval_forward = warmup_examples, calibrate, eval_forward
        self.prior_scale, self.model = prior_scale, model
        self._seen = torch.zeros(num_examples, dtype=torch.bool)  # on the CPU, where loaders keep indices
        self._coded: list[tuple[Tensor, Tensor]] = []  # indices (CPU) and losses (where the logits are)
        self._arrived = 0
        self._squares = 0.0  # of residuals coded so far
        self._kept: list[tuple[Tensor, Tensor]] = []  # logits and labels for the temperature
        self._sums: Tensor | None = torch.zeros(num_examples) if trajectory else None
        self._weights: Tensor | None = torch.zeros(num_examples) if trajectory else None
        self._steps = self._forward_at = 0
        self._checks_order = model is not None and optimizer is not None
        if model is not None and optimizer is not None:
            optimizer.register_step_post_hook(lambda *_: self._count_step())
            model.register_forward_pre_hook(lambda *_: self._mark_forward())

    def update(self, indices: Tensor, logits: Tensor, labels: Tensor, *, inputs: Any = None) -> None:
        """Code the examples of a batch that have not been seen before. Call it before ``optimizer.step()``.

        Parameters
        ----------
        indices : (B,) integers
            Which examples of the training set these are.
        logits : (B, K), or (B, T, K) where an example is a sequence, or (B,) / (B, d) real predictions
            Of the training forward; nothing is added to their graph.
        labels : (B,), (B, T) integers, -100 where a token is not predicted; or real targets like the predictions
        inputs : optional
            For ``eval_forward``: ``model(inputs[new])`` is called.

        Raises
        ------
        InputError
            If an index or label is out of range, probabilities are given for logits, shapes do not match, or the
            optimizer has stepped since the forward pass.
        """
        if self._arrived < self.num_examples or self._checks_order:
            self.code(indices, logits, labels, inputs=inputs)
        if self._sums is not None and self._weights is not None:
            losses = self._losses(logits.detach(), labels).cpu()
            at = torch.as_tensor(indices, device="cpu")
            self._sums.index_add_(0, at, losses / len(losses))
            self._weights.index_add_(0, at, torch.full((len(losses),), 1 / len(losses)))

    def code(self, indices: Tensor, logits: Tensor, labels: Tensor, *, inputs: Any = None) -> None:
        """Code examples that are no batch of a step, such as those a replay releases; otherwise as ``update``."""
        if self._checks_order and self._steps > self._forward_at:
            raise InputError("the optimizer has stepped since the forward pass: call update before step")
        indices = torch.as_tensor(indices, device="cpu")
        logits = logits.detach()
        if len(indices) != len(logits) or len(labels) != len(logits):
            raise InputError(f"{len(indices)} indices, {len(logits)} predictions and {len(labels)} labels do not match")
        new = self._arrivals(indices)
        if not len(new):
            return
        if not self._coded:
            self._check_first(logits, labels)
        where = new.to(logits.device)
        logits, labels = logits[where], labels.to(logits.device)[where]
        if self.eval_forward:
            logits = self._evaluated(inputs, new)
        if self.num_classes is not None and labels.device.type == "cpu":
            self._check_labels(indices[new], labels)
        if self.warmup_examples is None:
            self.warmup_examples = len(new)
        losses = self._code(logits, labels)
        self._seen[indices[new]] = True
        self._arrived += len(new)
        self._coded.append((indices[new], losses))

    def finish(
        self,
        model: Callable[[Any], Any],
        loader: Iterable[tuple[Tensor, Any, Tensor]],
        *,
        partial: bool = False,
        entropy: float | None = None,
    ) -> PrequentialReport:
        """Evaluate the final model once over the training set and return the report.

        Parameters
        ----------
        model : callable
            Maps inputs to logits, or to an object with ``.logits``; a module is put into evaluation mode meanwhile.
        loader : iterable of (indices, inputs, labels)
        partial : bool
            Report on the examples coded even where some never came.
        entropy : float, optional
            Known entropy of a label given its input, in nats.

        Raises
        ------
        InputError
            If examples are missing, or a loss is not finite (the example is named).
        """
        missing = self.num_examples - self._arrived
        if missing and not partial:
            first = int((~self._seen).nonzero()[0]) if missing else 0
            raise InputError(
                f"{missing} of {self.num_examples} examples were never seen, such as {first}: pass all of them to "
                "update (drop_last drops some), or partial=True"
            )
        if not self._arrived:
            raise InputError("no example was coded: call update in the training loop")
        final, correct = self._final_losses(model, loader)
        indices = torch.cat([idx for idx, _ in self._coded]).numpy()
        table = pd.DataFrame(
            {
                "example": indices,
                "arrival": np.arange(len(indices)),
                "loss_first": torch.cat([loss.double().cpu() for _, loss in self._coded]).numpy(),
                "loss_final": self._mixed(final).numpy()[indices] if self.num_classes else final.numpy()[indices],
                "loss_raw": final.numpy()[indices],
                "correct": correct.numpy()[indices],
            }
        )
        report = prequential_report(table, num_classes=self.num_classes, entropy=entropy)
        extra: dict[str, Any] = {}
        if self._sums is not None and self._weights is not None:
            extra["sum_of_losses"] = float(self._sums.sum())
            extra["trajectory"] = float((self._sums - self._weights * torch.nan_to_num(final.float())).sum())
        if missing:
            extra["notes"] = (f"{missing} examples were never seen and are left out",)
        return PrequentialReport(**{**vars(report), **extra})

    # ------------------------------------------------------------------------------------------------ resuming, shards

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on coding each example once."""
        return {
            "indices": torch.cat([idx for idx, _ in self._coded]) if self._coded else torch.zeros(0, dtype=torch.int64),
            "losses": torch.cat([loss.cpu() for _, loss in self._coded]) if self._coded else torch.zeros(0),
            "warmup_examples": self.warmup_examples,
            "squares": self._squares,
            "sums": self._sums,
            "weights": self._weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; the temperature of ``calibrate`` is fitted anew on what comes."""
        if len(state["indices"]) and int(state["indices"].max()) >= self.num_examples:
            raise InputError(f"the state knows example {int(state['indices'].max())}: num_examples={self.num_examples}")
        self._coded = [(state["indices"], state["losses"])] if len(state["indices"]) else []
        self._seen.zero_()
        self._seen[state["indices"]] = True
        self._arrived = len(state["indices"])
        self.warmup_examples = state["warmup_examples"]
        self._squares = state["squares"]
        self._sums, self._weights = state["sums"], state["weights"]

    def synchronize(self, group: Any = None) -> None:
        """Gather the codes of all ranks of a ``torch.distributed`` group, each of which coded its own shard.

        Raises
        ------
        InputError
            If two ranks coded the same example.
        """
        import torch.distributed as dist

        if self._sums is not None:
            raise InputError("trajectory=True sums the losses of one process: leave it out of a distributed run")
        losses = torch.zeros(self.num_examples, dtype=torch.float64)
        arrival = torch.zeros(self.num_examples, dtype=torch.int64)
        counts = self._seen.to(torch.int64)
        if self._coded:
            indices = torch.cat([idx for idx, _ in self._coded])
            losses[indices] = torch.cat([loss.double().cpu() for _, loss in self._coded])
            arrival[indices] = torch.arange(len(indices))
        for tensor in (losses, arrival, counts):
            dist.all_reduce(tensor, group=group)
        if (counts > 1).any():
            raise InputError(
                f"example {int((counts > 1).nonzero()[0])} was coded by two ranks: shards must be disjoint"
            )
        indices = counts.nonzero()[:, 0]
        indices = indices[arrival[indices].argsort(stable=True)]
        self._coded = [(indices, losses[indices])]
        self._seen = counts.bool()
        self._arrived = len(indices)

    # ----------------------------------------------------------------------------------------------------------- coding

    def _arrivals(self, indices: Tensor) -> Tensor:
        """Return the rows of a batch that hold an example for the first time, a repeated one once."""
        if not len(indices):
            return indices
        known, rows = np.unique(indices.numpy(), return_index=True)
        if known[0] < 0 or known[-1] >= self.num_examples:
            outside = known[0] if known[0] < 0 else known[-1]
            raise InputError(f"index {outside} is outside 0 to {self.num_examples - 1}")
        fresh = ~self._seen.numpy()[known]
        if len(known) < len(indices) and fresh.any():
            warnings.warn(
                "an example occurs twice in a batch of the first epoch: a sampler with replacement? It is counted once",
                stacklevel=4,
            )
        return torch.from_numpy(np.sort(rows[fresh]))

    def _code(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the lengths of the codes of new arrivals, (b,)."""
        assert self.warmup_examples is not None
        uniform = max(0, min(len(logits), self.warmup_examples - self._arrived))
        if self.num_classes is None:
            residuals = _residuals(logits, labels)
            coded = self._arrived * residuals.shape[1]
            variance = self._squares / coded if coded and not uniform else self.prior_scale**2
            self._squares += float(residuals.square().sum())
            return _gaussian(residuals, max(variance, 1e-12))
        scaled = logits
        if self.calibrate:
            scaled = logits / self._temperature()
            self._keep(logits, labels)
        losses = self._mixed(self._losses(scaled, labels), labels)
        if uniform:
            losses[:uniform] = _tokens(labels[:uniform]) * math.log(self.num_classes)
        return losses

    def _losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the unmixed losses of single examples, (b,), a sequence's summed over its tokens."""
        if self.num_classes is None:
            return _residuals(logits, labels).square().sum(1)
        flat = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(), labels.to(logits.device).reshape(-1), reduction="none"
        )
        return flat.reshape(len(logits), -1).sum(1)

    def _mixed(self, losses: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the losses of the prediction mixed with the uniform one; of a sequence, mixed as a whole."""
        assert self.num_classes is not None
        if not self.eps:
            return losses.clone()
        tokens = 1 if labels is None else _tokens(labels).to(losses)
        uniform = torch.as_tensor(tokens * math.log(self.num_classes)).to(losses)
        return -torch.logaddexp(math.log1p(-self.eps) - losses, math.log(self.eps) - uniform)

    def _temperature(self) -> float:
        """Fit the temperature that the examples coded before would have liked best, by Newton's method on its log."""
        if not self._kept:
            return 1.0
        logits = torch.cat([z for z, _ in self._kept]).double()
        labels = torch.cat([y for _, y in self._kept])
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for _ in range(20):
            loss = F.cross_entropy(logits * (-t).exp(), labels)
            (slope,) = torch.autograd.grad(loss, t, create_graph=True)
            (curve,) = torch.autograd.grad(slope, t)
            step = (slope.detach() / curve.abs().clamp_min(1e-6)).clamp(-1, 1)
            t = (t - step).detach().clamp(-3, 3).requires_grad_()
            if abs(float(step)) < 1e-6:
                break
        return math.exp(float(t.detach()))

    def _keep(self, logits: Tensor, labels: Tensor) -> None:
        flat = labels.reshape(-1) != -100
        self._kept.append((logits.reshape(-1, logits.shape[-1])[flat], labels.reshape(-1)[flat]))
        while sum(len(y) for _, y in self._kept[1:]) >= RESERVOIR:
            self._kept.pop(0)

    def _evaluated(self, inputs: Any, new: Tensor) -> Tensor:
        if inputs is None:
            raise InputError("eval_forward=True needs update(..., inputs=)")
        assert self.model is not None
        mode = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                return _logits(self.model(inputs[new.to(inputs.device)]))
        finally:
            self.model.train(mode)

    def _final_losses(
        self, model: Callable[[Any], Any], loader: Iterable[tuple[Tensor, Any, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the final model's unmixed losses, (n,) float64, nan where unseen, and whether it is right."""
        final = torch.full((self.num_examples,), math.nan, dtype=torch.float64)
        correct = torch.full((self.num_examples,), math.nan, dtype=torch.float64)
        residuals: list[tuple[Tensor, Tensor]] = []
        seen = torch.zeros(0, dtype=torch.int64)
        mode = model.training if isinstance(model, nn.Module) else None
        if isinstance(model, nn.Module):
            model.eval()
        try:
            with torch.no_grad():
                for indices, inputs, labels in loader:
                    z = _logits(model(inputs))
                    idx = torch.as_tensor(indices, device="cpu")
                    if self.num_classes is None:
                        residuals.append((idx, _residuals(z, labels).double().cpu()))
                        continue
                    seen = torch.cat([seen, idx])
                    final[idx] = self._losses(z, labels).double().cpu()
                    right = (z.argmax(-1) == labels.to(z.device)) | (labels.to(z.device) == -100)
                    correct[idx] = right.reshape(len(z), -1).all(1).double().cpu()
        finally:
            if isinstance(model, nn.Module) and mode is not None:
                model.train(mode)
        if residuals:
            variance = max(float(torch.cat([r for _, r in residuals]).square().mean()), 1e-12)
            for idx, r in residuals:
                final[idx] = _gaussian(r, variance)
        known = torch.cat([idx for idx, _ in residuals]) if residuals else seen
        lacking = self._seen.clone()
        lacking[known] = False
        if lacking.any():
            raise InputError(f"the loader lacks example {int(lacking.nonzero()[0])}: give it the whole training set")
        return final, correct

    def _check_first(self, logits: Tensor, labels: Tensor) -> None:
        if self.num_classes is None:
            return
        if logits.dim() < 2 or logits.shape[-1] != self.num_classes or labels.shape != logits.shape[:-1]:
            raise InputError(
                f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}: (B, K) and (B,), or "
                f"(B, T, K) and (B, T), are needed, K = {self.num_classes}"
            )
        if labels.is_floating_point():
            raise InputError("labels are real numbers: give class numbers, or num_classes=None")
        total = logits.float().sum(-1)
        if (logits >= 0).all() and ((total - 1).abs() < 1e-3).all():
            raise InputError("these rows sum to 1: give logits, not probabilities")

    def _check_labels(self, indices: Tensor, labels: Tensor) -> None:
        assert self.num_classes is not None
        bad = (labels != -100) & ((labels < 0) | (labels >= self.num_classes))
        if bad.any():
            row = int(bad.reshape(len(labels), -1).any(1).nonzero()[0])
            raise InputError(
                f"example {int(indices[row])} has the label {int(labels[bad][0])}, outside 0 to {self.num_classes - 1}"
            )

    def _count_step(self) -> None:
        self._steps += 1

    def _mark_forward(self) -> None:
        self._forward_at = self._steps


def _residuals(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return predictions less targets, (b, d); (b, 1) and (b,) are the same thing."""
    if predictions[:1].numel() != targets[:1].numel():
        raise InputError(f"predictions {tuple(predictions.shape)} and targets {tuple(targets.shape)} differ in shape")
    return predictions.reshape(len(predictions), -1) - targets.to(predictions).reshape(len(predictions), -1)


def _gaussian(residuals: Tensor, variance: float) -> Tensor:
    return 0.5 * (residuals.square() / variance + math.log(2 * math.pi * variance)).sum(1)


def _tokens(labels: Tensor) -> Tensor:
    """Return the number of predicted labels of each example, (b,)."""
    return (labels.reshape(len(labels), -1) != -100).sum(1).to(torch.float32)


def _logits(output: Any) -> Tensor:
    return output.logits if hasattr(output, "logits") else output
