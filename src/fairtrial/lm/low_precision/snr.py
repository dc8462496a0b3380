"""Where the signal-to-noise ratio of a model's dot products comes from.

For y = sum_i z_i with products z_i = w_i x_i, and noise n_i = q(w_i) q(x_i) - z_i, exactly

    SNR = E[y^2] / E[(q(y) - y)^2] = SNR_elem * kappa_signal / kappa_noise
    SNR_elem = sum E[z_i^2] / sum E[n_i^2]        kappa_signal = E[y^2] / sum E[z_i^2] = 1 + (d - 1) rho

and kappa_noise likewise, with the expectation over tokens and outputs, and rho the mean correlation of two products,
about zero, not about their mean. Products that agree a little add up over the width while noise averages out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.errors import InputError
from fairtrial.lm.low_precision.linear import checked_skip, is_called
from fairtrial.lm.low_precision.products import Noise, quantized
from fairtrial.lm.low_precision.recipe import Operand
from fairtrial.seeds import torch_generator

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class DotProducts:
    """The decomposition for one layer.

    Attributes
    ----------
    snr
        Power of the outputs over power of their noise.
    snr_elem
        The same of single products.
    kappa_signal, kappa_noise
        How much more power the sum has than its terms alone: 1 where they are uncorrelated.
    rho, rho_noise
        Mean correlation about zero of two products, and of their noise.
    d
        Length of the sums.
    """

    snr: float
    snr_elem: float
    kappa_signal: float
    kappa_noise: float
    rho: float
    rho_noise: float
    d: int


@torch.no_grad()
def decompose(x: torch.Tensor, w: torch.Tensor, qx: torch.Tensor, qw: torch.Tensor) -> DotProducts:
    """Return the decomposition for outputs x w^T, whose noise is that of qx qw^T; two products of matrices.

    The powers of single products need no more than sums over columns, since tokens and outputs are independent axes.

    Parameters
    ----------
    x, qx
        (n, d) inputs and what quantization makes of them.
    w, qw
        (m, d) weights likewise.
    """
    d = x.shape[-1]
    dx, dw = qx - x, qw - w  # n_i = qx_i dw_i + dx_i w_i, two terms that do not cancel
    signal = float(_column_means(x, x) @ _column_means(w, w))
    noise = float(
        _column_means(qx, qx) @ _column_means(dw, dw)
        + 2 * _column_means(qx, dx) @ _column_means(dw, w)
        + _column_means(dx, dx) @ _column_means(w, w)
    )
    y = x @ w.mT
    error = torch.addmm(y, qx, qw.mT, beta=-1)  # (n, m)
    y_power, error_power = (float(v.square().mean(dtype=torch.float64)) for v in (y, error))
    kappa_signal, kappa_noise = _ratio(y_power, signal), _ratio(error_power, noise)
    pairs = max(d - 1, 1)
    return DotProducts(
        snr=_ratio(y_power, error_power),
        snr_elem=_ratio(signal, noise),
        kappa_signal=kappa_signal,
        kappa_noise=kappa_noise,
        rho=(kappa_signal - 1) / pairs,
        rho_noise=(kappa_noise - 1) / pairs,
        d=d,
    )


def _column_means(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).mean(0, dtype=torch.float64)


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else float("inf") if a > 0 else float("nan")


def dot_product_snr(
    model: nn.Module,
    batch: torch.Tensor | Mapping[str, Any],
    *,
    tensor_scale: float | str = "tensor",
    skip: Iterable[str] = ("lm_head",),
    shuffle_seed: int | None = None,
) -> pd.DataFrame:
    """Measure the dot products of every linear layer of a model under NVFP4, on one batch.

    Parameters
    ----------
    model
        Any module; its ``nn.Linear`` layers are read, converted ones too. Outputs are not changed.
    batch
        What the model is called with: a tensor (token ids), or keyword arguments, whose ``attention_mask``, if there is
        one, says which tokens count.
    tensor_scale
        Of inputs and weights: ``"tensor"`` or a number.
    skip
        Layers to leave, by whole name or its last part.
    shuffle_seed
        A control: the dimensions of every token's input are shuffled, which leaves single products as large as they
        were and takes away what their signs agreed on.

    Returns
    -------
    pandas.DataFrame
        A row a layer that was given a token, in the order in which they run: ``layer`` and the fields of
        :class:`DotProducts`.

    Raises
    ------
    InputError
        No linear layer ran, a name in ``skip`` that none has, or the input or weights of one, which is named, are not
        finite.
    """
    import pandas as pd

    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    skip = checked_skip(skip, linear)
    if tensor_scale == "pow2-delayed":
        raise InputError("tensor_scale='pow2-delayed' is for gradients: give a number or 'tensor'")
    operand, noise = Operand(tensor_scale=tensor_scale), Noise()
    mask = _mask(batch)
    rows: list[dict[str, Any]] = []

    def read(name: str, layer: nn.Linear, inputs: torch.Tensor) -> None:
        x = _tokens(inputs.detach(), mask).float()
        if not len(x):  # an expert no token was sent to
            return
        w = layer.weight.detach().float()
        if not (bool(x.isfinite().all()) and bool(w.isfinite().all())):
            raise InputError(f"{name}: its inputs or weights are not finite: see nonfinite_layers for where it starts")
        if shuffle_seed is not None:
            order = torch.rand(x.shape, generator=torch_generator(shuffle_seed, "shuffle", name)).argsort(1)
            x = x.gather(1, order.to(x.device))
        qx, qw = (quantized(value, -1, operand, noise)[:, : value.shape[1]] for value in (x, w))
        rows.append({"layer": name, **asdict(decompose(x, w, qx, qw))})

    with _reading(model, read, skip), evaluation_mode(model), torch.no_grad():
        _call(model, batch)
    if not rows:
        raise InputError(f"no linear layer of {type(model).__name__} was run, but for those that are skipped")
    return pd.DataFrame(rows)


@contextmanager
def _reading(model: nn.Module, read: Any, skip: tuple[str, ...]) -> Iterator[None]:
    """Give ``read`` every linear layer that runs, with its name and input."""
    handles = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: read(name, layer, args[0]))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not any(is_called(name, left) for left in skip)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def nonfinite_layers(model: nn.Module, batch: torch.Tensor | Mapping[str, Any]) -> list[str]:
    """Return the names of the linear layers whose outputs on a batch are not all finite, in the order they run.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> nonfinite_layers(model, torch.tensor([[float("nan"), 1.0]]))
    ['0', '1']
    """
    found: list[str] = []
    handles = [
        layer.register_forward_hook(
            lambda layer, args, output, name=name: None if bool(output.isfinite().all()) else found.append(name)
        )
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        with evaluation_mode(model), torch.no_grad():
            _call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _call(model: nn.Module, batch: torch.Tensor | Mapping[str, Any]) -> Any:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Mapping):
        return model(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()})
    if not isinstance(batch, torch.Tensor):
        raise InputError(f"a batch is a tensor or a mapping of keyword arguments, not a {type(batch).__name__}")
    if not batch.numel():
        raise InputError("the batch is empty: give at least one text")
    return model(batch.to(device))


def _mask(batch: torch.Tensor | Mapping[str, Any]) -> torch.Tensor | None:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return None if mask is None else mask.bool()


def _tokens(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the inputs (n, d) of the tokens that count."""
    flat = x.reshape(-1, x.shape[-1])  # some layers are given all tokens in a row
    return flat[mask.flatten().to(x.device)] if mask is not None and mask.numel() == len(flat) else flat
