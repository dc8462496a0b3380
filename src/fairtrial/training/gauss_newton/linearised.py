"""The logits of a mini-batch as a function of the parameters, linearised: products with J and J', never J itself.

J is the derivative of the logits (B, K) by all parameters, (B K) x P. Parameter vectors are lists of tensors in the
shapes of the parameters, so that no product concatenates anything of length P.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.training.gauss_newton.margins import Margins, check_finite, check_labels, margins

Closure = Callable[[], tuple[Tensor, Tensor]]
Products = Literal["double-backward", "forward"]

MAX_ROW_ENTRIES = 2e8  # of explicit rows, B x P


class Linearised:
    """The logits of one mini-batch, in parts of one closure each, and their derivative by the parameters.

    Parameters
    ----------
    closures : sequence of callables
        Each returns (logits (..., K) with their graph, integer labels (...)); called again they must return the same.
    parameters : list of tensors
        What is differentiated by.
    products : {"double-backward", "forward"}
        How J v is computed: by differentiating J' c by its cotangent c, or by a pass in forward mode, which keeps no
        second graph and needs ``model``.
    model : nn.Module, optional
        The module that the closures call.
    recompute : bool
        Build the graph anew for each product instead of keeping it: memory for time.
    ignore_index : int
        Examples with this label are left out.
    states : list, optional
        The random states of an earlier pass, to see the same dropout masks.
    group : torch.distributed.ProcessGroup, optional
        Ranks that share one batch: rows stay on their rank, parameter vectors and losses are summed over ranks.

    Attributes
    ----------
    logits : (B, K)
        Detached, float32 at least, without ignored examples.
    labels : (B,)
    total : int
        Examples of all ranks.
    states : list
        The random state before each closure.
    """

    def __init__(
        self,
        closures: Sequence[Closure],
        parameters: list[Tensor],
        *,
        products: Products = "double-backward",
        model: nn.Module | None = None,
        recompute: bool = False,
        ignore_index: int = -100,
        states: list[RandomState] | None = None,
        group: Any = None,
    ) -> None:
        self.closures, self.parameters, self.products, self.model = closures, parameters, products, model
        self.recompute, self.ignore_index, self.group = recompute, ignore_index, group
        self.states: list[RandomState] = []
        self.calls: list[Any] = []  # of the model, where they were captured
        self._graphs: list[Tensor | None] = []
        self._kept: list[Tensor | None] = []  # which rows of the closure's logits, where not all
        self._pulled: dict[int, tuple[tuple[Tensor, ...], Tensor]] = {}
        logits, labels = [], []
        for i, closure in enumerate(closures):
            self.states.append(states[i] if states else RandomState(parameters[0].device))
            with self.states[i].replayed() if states else nullcontext():
                z, y, kept = read(closure, ignore_index)
            check_graph(z)
            self._kept.append(kept)
            self._graphs.append(None if recompute else z)
            logits.append(z.detach().to(torch.promote_types(z.dtype, torch.float32)))
            labels.append(y)
        self.logits, self.labels = torch.cat(logits), torch.cat(labels)
        self.sizes = [len(y) for y in labels]
        (count,) = self.summed([self.logits.new_tensor([len(self.labels)], dtype=torch.float64)])
        self.total = int(count)
        if not self.total:
            raise InputError(f"every label of the batch is ignore_index={ignore_index}: there is nothing to fit")

    @cached_property
    def margins(self) -> Margins:
        """The margin form of the batch."""
        return margins(self.logits, self.labels)

    def pull(self, cotangent: Tensor) -> list[Tensor]:
        """Return J' c for a cotangent (B, K), as a parameter vector: one backward pass, summed over ranks."""
        total: list[Tensor] | None = None
        for i, c in enumerate(cotangent.split(self.sizes)):
            z = self._graph(i)
            part = torch.autograd.grad(
                z, self.parameters, c.to(z.dtype), retain_graph=not self.recompute, materialize_grads=True
            )
            if total is None:
                total = list(part)
            else:
                torch._foreach_add_(total, part)
        assert total is not None
        return self.summed(total)

    def push(self, vector: Sequence[Tensor]) -> Tensor:
        """Return J v, (B, K), for a parameter vector."""
        push = self._push_forward if self.products == "forward" else self._push_backward
        return torch.cat([push(i, vector) for i in range(len(self.sizes))]).to(self.logits.dtype)

    def summed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sum tensors over the ranks of the group, in one message."""
        if self.group is None:
            return tensors
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        torch.distributed.all_reduce(flat, group=self.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def _graph(self, i: int) -> Tensor:
        """Return the logits of part i with a graph."""
        z = self._graphs[i]
        if z is None:
            with self.states[i].replayed(), torch.enable_grad():
                z = read(self.closures[i], self.ignore_index)[0]
        return z

    def _push_backward(self, i: int, vector: Sequence[Tensor]) -> Tensor:
        # J' c is linear in c: its derivative by c, applied to v, is J v.
        pulled, cotangent = self._pulled.get(i) or self._pull_graph(i)
        pairs = [(g, v) for g, v in zip(pulled, vector, strict=True) if g.requires_grad]
        if not pairs:
            return torch.zeros_like(cotangent)
        with double_backward_named():
            (along,) = torch.autograd.grad(
                [g for g, _ in pairs], cotangent, [v for _, v in pairs], retain_graph=not self.recompute,
                materialize_grads=True,
            )  # fmt: skip
        return along

    def _pull_graph(self, i: int) -> tuple[tuple[Tensor, ...], Tensor]:
        z = self._graph(i)
        with torch.enable_grad():
            cotangent = torch.zeros_like(z, requires_grad=True)
            pulled = torch.autograd.grad(
                z, self.parameters, cotangent, create_graph=True, retain_graph=True, materialize_grads=True
            )
        if not self.recompute:
            self._pulled[i] = pulled, cotangent
        return pulled, cotangent

    def _push_forward(self, i: int, vector: Sequence[Tensor]) -> Tensor:
        assert self.model is not None
        names = names_of(self.model, self.parameters)
        kept = self._kept[i]
        calling = _Calling(self.model)
        # Buffers are passed as copies: BatchNorm in training writes its running statistics.
        buffers = {f"model.{name}": b.clone() for name, b in self.model.named_buffers()}

        def outputs(*values: Tensor) -> Tensor:
            given = {f"model.{name}": value for name, value in zip(names, values, strict=True)}
            z: Tensor = torch.func.functional_call(calling, {**given, **buffers}, (self.closures[i],))
            z = z.reshape(-1, z.shape[-1])
            return z if kept is None else z[kept]

        at = tuple(p.detach() for p in self.parameters)
        with self.states[i].replayed(), double_backward_named():
            return torch.func.jvp(outputs, at, tuple(vector))[1]


class LinearHead(Linearised):
    """The same for logits ``features @ weight.T + bias`` of an ``nn.Linear``: two matrix products, no graph.

    ``features`` (B, D) are what the layer was given when the closures called it.
    """

    def __init__(self, closures: Sequence[Closure], parameters: list[Tensor], *, model: nn.Linear, **how: Any) -> None:
        with captured(model, len(closures)) as calls:
            super().__init__(closures, parameters, model=model, **how)
        features = []
        for (args, kwargs, out), closure_labels in zip(calls, self.labels.split(self.sizes), strict=True):
            x = [*args, *kwargs.values()][0]
            flat, z = x.detach().flatten(0, -2), out.detach().flatten(0, -2)
            if len(flat) != len(closure_labels):
                raise InputError(
                    "a linear head with ignored examples or other logits than its own: leave those examples out"
                )
            features.append((flat, z))
        given = torch.cat([z for _, z in features]).to(self.logits.dtype)
        if not torch.equal(given, self.logits):
            raise InputError("model= is an nn.Linear but the closure's logits are not its outputs: leave model= out")
        self.features = features[0][0] if len(features) == 1 else torch.cat([x for x, _ in features])
        self._graphs = [None] * len(self._graphs)  # products need none
        self.is_weight = [p is model.weight for p in parameters]

    def pull(self, cotangent: Tensor) -> list[Tensor]:
        """Return J' c for a cotangent (B, K), as a parameter vector."""
        c = cotangent.to(self.features.dtype)
        return self.summed([c.T @ self.features if weight else c.sum(0) for weight in self.is_weight])

    def push(self, vector: Sequence[Tensor]) -> Tensor:
        """Return J v, (B, K), for a parameter vector."""
        total = torch.zeros_like(self.logits, dtype=self.features.dtype)
        for v, weight in zip(vector, self.is_weight, strict=True):
            total = torch.addmm(total, self.features, v.T) if weight else total + v
        return total.to(self.logits.dtype)

    def kernel(self) -> Tensor:
        """Return the inner products (B, B) of the features, and of the ones that a bias adds."""
        x = self.features
        kernel = x @ x.T if any(self.is_weight) else x.new_zeros(len(x), len(x))
        return kernel if all(self.is_weight) else kernel + 1.0


def explicit_rows(batch: Linearised, slope: Tensor) -> list[Tensor]:
    """Return the gradients of ``slope_i . z_i`` by the parameters, one an example: tensors (B, *parameter.shape).

    Each example's gradient is taken by itself, in one vectorised pass over the calls that the model received.
    """
    assert batch.model is not None
    size = sum(p.numel() for p in batch.parameters)
    if len(slope) * size > MAX_ROW_ENTRIES:
        raise InputError(
            f"solver='gram' would hold {len(slope)} rows of {size} parameters, over {MAX_ROW_ENTRIES:.0e} numbers: "
            "take solver='cg' or smaller batches"
        )
    names = names_of(batch.model, batch.parameters)
    model = batch.model
    fixed = {name: p.detach() for name, p in model.named_parameters() if name not in names}
    fixed |= dict(model.named_buffers())
    parameters = {name: p.detach() for name, p in zip(names, batch.parameters, strict=True)}

    def rows_of_example(inputs: tuple[Tensor, ...], named: dict[str, Tensor], c: Tensor) -> Any:
        def outputs(given: dict[str, Tensor]) -> Tensor:
            args, kwargs = tuple(x[None] for x in inputs), {name: x[None] for name, x in named.items()}
            z = torch.func.functional_call(model, {**given, **fixed}, args, kwargs)
            return z.reshape(-1, z.shape[-1])  # (T, K): a sequence has a row a token

        z, pull = torch.func.vjp(outputs, parameters)
        each = torch.eye(len(c), dtype=c.dtype, device=c.device)[:, :, None] * c  # (T, T, K)
        return torch.func.vmap(pull)(each.to(z.dtype))[0], z

    rows: list[list[Tensor]] = []
    for (args, kwargs, out), c, z in zip(
        batch.calls, slope.split(batch.sizes), batch.logits.split(batch.sizes), strict=True
    ):
        if out.numel() != z.numel():
            raise InputError("solver='gram' needs a batch without ignored examples, of the model's own logits")
        examples = len(out)
        # Randomness "error" refuses dropout, whose masks could not be those of the closure.
        try:
            per_example, again = torch.func.vmap(rows_of_example)(args, kwargs, c.view(examples, -1, c.shape[-1]))
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"solver='gram' cannot take each example by itself ({reason}): put dropout and BatchNorm in evaluation "
                "mode, or take solver='cg'"
            ) from error
        tolerance = math.sqrt(torch.finfo(z.dtype).eps)
        if not torch.allclose(again.reshape(z.shape).to(z.dtype), z, rtol=tolerance, atol=tolerance):
            raise InputError("solver='gram' needs a closure that returns model(x) as it is: take solver='cg'")
        rows.append([per_example[name].flatten(0, 1) for name in names])
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


# ------------------------------------------------------------------------------------------------------------- helpers


class RandomState:
    """The random state of the CPU and of a device at one moment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw from this state inside, and leave the global one as it was."""
        with torch.random.fork_rng([self.device] if self.cuda is not None else []):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield


class _Calling(nn.Module):
    """A closure as the forward pass of a module that holds the model, so that its parameters can be replaced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, closure: Closure) -> Tensor:
        return closure()[0]


def read(closure: Closure, ignore_index: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a closure's logits (B, K) and labels (B,) without ignored examples, and the rows kept if not all."""
    returned = closure()
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2 and all(map(torch.is_tensor, returned))):
        what = "a loss" if torch.is_tensor(returned) or isinstance(returned, float) else type(returned).__name__
        raise InputError(
            f"the closure returned {what}: return (logits, labels), and call no backward(): the step computes the loss"
        )
    logits, labels = returned
    check_labels(labels, logits, ignore_index)
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long()
    kept = (labels != ignore_index).nonzero()[:, 0]
    if len(kept) == len(labels):
        return logits, labels, None
    return logits[kept], labels[kept], kept


def check_graph(logits: Tensor) -> None:
    """Refuse logits that cannot be differentiated, or are not finite."""
    if not logits.requires_grad:
        raise InputError("the closure's logits have no graph: compute them from the parameters, without no_grad()")
    check_finite(logits)


def names_of(model: nn.Module, parameters: Sequence[Tensor]) -> list[str]:
    """Return the model's names of its parameters."""
    known = {id(p): name for name, p in model.named_parameters()}
    if missing := [p for p in parameters if id(p) not in known]:
        raise InputError(f"a parameter of shape {tuple(missing[0].shape)} is not one of model=: give the whole model")
    return [known[id(p)] for p in parameters]


@contextmanager
def captured(model: nn.Module, calls: int) -> Iterator[list[Any]]:
    """Collect (args, kwargs, output) of the model's calls inside; each of ``calls`` closures must make exactly one."""
    seen: list[Any] = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, out: seen.append((args, kwargs, out)), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()
    if len(seen) != calls:
        raise InputError(f"model= was called {len(seen)} times by {calls} closures: each must call it once")


@contextmanager
def double_backward_named() -> Iterator[None]:
    """Say what to do where a fused kernel has no second derivative or no forward mode."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        if "is not implemented" not in text and "does not support" not in text:
            raise
        raise InputError(
            f"{text.strip().splitlines()[0]}: a fused attention kernel cannot be differentiated twice; load the model "
            'with attn_implementation="eager", or call it within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)'
        ) from error
