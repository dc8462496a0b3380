"""MEC-MMD as a loss: fit a simulator or a generator to the truths behind noisy measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.evaluation.corrected_mmd.designs import Design
from fairtrial.evaluation.corrected_mmd.kernels import Kernel, kernel_for, kernel_sums, mean_within
from fairtrial.evaluation.corrected_mmd.mec_mmd import FormName
from fairtrial.evaluation.corrected_mmd.quadratic import Side, choose_for_embedding
from fairtrial.evaluation.corrected_mmd.samples import (
    Proxy,
    Strength,
    embed,
    generator_of,
    proxies,
    read_sample,
    rows_of,
)


class CorrectedMMDLoss(nn.Module):
    """The corrected MMD^2 between the truths behind ``noisy`` and a simulator's output.

    Its value is that of :func:`~fairtrial.evaluation.corrected_mmd.mec_mmd.mec_mmd2`, and its gradient in the output is
    unbiased, over audits, for the gradient of the loss computed with all truths. Only 2 <mu, mean phi(y)> and the mean
    of k(y, y') depend on the output; the rest is computed once, when the loss is made.

    Parameters
    ----------
    noisy, truth, audited, strength, proxy, form, inclusion, folds, seed : as in ``mec_mmd2``; ``"auto"`` minimises the
        variance of the corrected embedding, as there is no output yet. Tensors (N, d), (m, d), (m,) or arrays.
    kernel : as in ``mec_mmd2``; left out, its bandwidths come from the audited truths.
    fit_only : leave out the constant, whose cost is N^2 kernel values; the gradient is the same.

    Examples
    --------
    >>> g = torch.Generator().manual_seed(0)
    >>> x = 1 + 0.8 * torch.randn(500, 1, generator=g)
    >>> noisy = x + 0.6 + 0.3 * torch.randn(500, 1, generator=g)
    >>> loss = CorrectedMMDLoss(noisy, x[:100], torch.arange(100))
    >>> theta = torch.nn.Parameter(torch.zeros(2)); optimizer = torch.optim.Adam([theta], 0.1)
    >>> for _ in range(60):
    ...     optimizer.zero_grad()
    ...     loss(theta[0] + theta[1].exp() * torch.randn(128, 1, generator=g)).backward()
    ...     optimizer.step()
    >>> abs(theta[0].item() - 1) < 0.2
    True
    """

    def __init__(
        self,
        noisy: Any,
        truth: Any,
        audited: Any,
        *,
        kernel: Kernel | None = None,
        strength: Strength = 1.0,
        proxy: Proxy = None,
        form: FormName = "u",
        inclusion: Design = None,
        fit_only: bool = False,
        folds: int = 5,
        seed: int | np.random.Generator = 0,
    ) -> None:
        super().__init__()
        if form not in ("u", "v"):
            raise InputError(f"form={form!r}: give 'u' or 'v'")
        sample = read_sample(noisy, truth, audited, inclusion)
        self.kernel = kernel_for(kernel, sample.truth)
        self.form = form
        made = proxies(sample, noisy, proxy, strength, folds, generator_of(seed))
        made = choose_for_embedding(sample, made, self.kernel, strength)
        parts = embed(sample, made)
        self.strength = sum(fold.strength for fold in made) / len(made)
        for name in ("noisy", "noisy_weights", "audited", "audited_weights"):
            self.register_buffer(name, getattr(parts, name))
        constant = torch.zeros((), dtype=sample.noisy.dtype, device=sample.noisy.device)
        if not fit_only:  # what mec_mmd2 gives for an embedding that is nothing
            nothing = type(parts.sample())(sample.noisy[:1], constant[None])
            constant = Side(sample, self.kernel, embedding=True, unbiased=form == "u").correct(made, nothing)[0]
        self.register_buffer("constant", constant)

    def forward(self, y: Tensor, z_batch: Tensor | None = None, audit_batch: Tensor | None = None) -> Tensor:
        """Return the loss () of the simulator's output.

        Parameters
        ----------
        y : the output (M, d), M >= 2, of the dtype and device of the loss.
        z_batch, audit_batch : row numbers of the noisy sample (B,), and places in ``audited`` (b,), to use instead of
            all. Drawn at random and independently, each keeps the loss and its gradient unbiased: both enter linearly.
            (One joint batch with its own audited rows would need the share audited within the batch.)
        """
        y = rows_of(y, "y", self.noisy[0])
        if len(y) < 2:
            raise InputError("y has 1 row: the loss needs 2 at least")
        cross = self._toward(y, self.noisy, self.noisy_weights, z_batch)
        cross = cross + self._toward(y, self.audited, self.audited_weights, audit_batch)
        return self.constant - 2 * cross + mean_within(self.kernel, y, self.form == "u")

    def _toward(self, y: Tensor, points: Tensor, weights: Tensor, batch: Tensor | None) -> Tensor:
        """Return <sum_i weights_i phi(points_i), mean phi(y)> for points (F, n, d), of a batch of n scaled up."""
        if batch is not None:
            try:
                batch = torch.as_tensor(batch, device=points.device)
            except (TypeError, ValueError, RuntimeError):
                batch = torch.empty(0)
            if batch.ndim != 1 or not len(batch) or batch.dtype != torch.int64:
                raise InputError("z_batch and audit_batch: give row numbers (B,), one at least; None = all")
            if bool(((batch < 0) | (batch >= points.shape[1])).any()):
                raise InputError(f"z_batch or audit_batch: row numbers must lie in 0..{points.shape[1] - 1}")
            points, weights = points[:, batch], weights[:, batch] * (points.shape[1] / len(batch))
        mean = torch.full((len(y),), 1 / len(y), dtype=y.dtype, device=y.device)
        return weights.flatten() @ kernel_sums(self.kernel, points.flatten(0, 1), y, mean)
