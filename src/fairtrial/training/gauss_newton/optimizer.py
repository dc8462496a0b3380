"""Fast Gauss-Newton as an optimizer: curvature steps for softmax cross-entropy at one row an example.

With the margins m_i of a batch of B examples (see :mod:`fairtrial.training.gauss_newton.margins`) and
W = [sqrt(s_i / B) dm_i/dtheta], (B, P), a step solves

    (W'W + lam I) d = -gradient

through the B x B system in the space of the rows, and lam follows the ratio of achieved to predicted decrease.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.training.gauss_newton.linearised import (
    Closure,
    LinearHead,
    Linearised,
    Products,
    RandomState,
    captured,
    explicit_rows,
    read,
)
from fairtrial.training.gauss_newton.solving import (
    Direction,
    ExplicitRows,
    HeadRows,
    ProductRows,
    Rows,
    row_space_direction,
)

Solver = Literal["cg", "gram"]
Form = Literal["auto", "paper", "woodbury"]
RatioBatch = Literal["same", "next"]
Damping = float | Callable[["StepInfo"], float]

RETRIES = 3
LEAST_DAMPING, MOST_DAMPING = 1e-6, 1e4
SHARED = "damping", "steps", "slope", "predicted", "last"  # what every group holds alike, to be saved with the state
PAPER_FORM_MARGIN = -8.0  # below it the paper's right-hand side, exp(-m/2), drowns the other rows


@dataclass(frozen=True)
class StepInfo:
    """What a step did.

    Attributes
    ----------
    step : int
        Counted from 1.
    loss, new_loss : float
        Objective before and after (mean cross-entropy in nats and ``l2 |theta|^2 / 2``), on the batch of the ratio.
    gradient_norm : float
    ratio : float
        Achieved over predicted decrease; NaN where no decrease was predicted or rounding hides it.
    damping : float
        lam of this step.
    cg_iterations : int
        0 with ``solver="gram"``.
    residual : float
        Of the linear system, relative.
    accepted : bool or None
        Whether the step was kept. With ``ratio_batch="next"`` this, ``new_loss`` and ``ratio`` are known (``None``,
        NaN) only once the next batch was seen, in :attr:`FastGaussNewton.judged`.
    """

    step: int = 0
    loss: float = math.nan
    new_loss: float = math.nan
    gradient_norm: float = math.nan
    ratio: float = math.nan
    damping: float = math.nan
    cg_iterations: int = 0
    residual: float = math.nan
    accepted: bool | None = None


class FastGaussNewton(torch.optim.Optimizer):
    """Train a softmax classifier by damped Gauss-Newton steps that keep only the curvature along each margin.

    Minimises mean cross-entropy plus ``l2 |theta|^2 / 2``. Loss and gradient are exact; the curvature matrix is the
    generalized Gauss-Newton matrix without the covariance among the competitors, equal to it for two classes and
    below it otherwise.

    Parameters
    ----------
    params : iterable of parameters or of groups
        A group may set ``l2``, ``weight_decay`` and ``frozen`` (its parameters stay as they are, as do those that
        require no gradient). One ``lr`` and one damping hold for all.
    lr : float
        Factor of the step; schedulers of PyTorch set it.
    damping : float or callable
        lam at the start, at the scale of the mean loss; then it follows the ratio of achieved to predicted decrease:
        doubled below .25, divided by 1.5 above .75, within 1e-6 and 1e4. A callable sets it instead from a
        :class:`StepInfo` whose step, loss and gradient norm are those of the step under way, and the rest those of the
        step before (NaN at first).
    momentum : float
        mu of the proximal form (W'W + lam) d = -g + lam mu d_previous; 0 = none.
    l2 : float
        Weight of ``|theta|^2 / 2`` in the objective; it also adds to the damping.
    weight_decay : float
        Decoupled: after a step the old parameters are subtracted ``lr * weight_decay`` times.
    solver : {"cg", "gram"}
        Conjugate gradients without a matrix, or rows in memory (B x P up to 2e8 numbers), their inner products and
        Cholesky. "gram" needs ``model``, whose output the closure must return as it is; for an ``nn.Linear`` rows are
        never formed, whatever the number of classes.
    form : {"auto", "paper", "woodbury"}
        How the row space is used: the paper's form where the right-hand side is the gradient and every margin exceeds
        -8, else Woodbury's identity.
    cg_tol, cg_max_iter : float, int
        Relative residual and most iterations of conjugate gradients; B + 1 suffice but for rounding.
    products : {"double-backward", "forward"}
        How Jacobian-vector products are made: any closure, or forward mode, which needs ``model``.
    model : nn.Module, optional
        What the closure calls.
    ratio_batch : {"same", "next"}
        Where a step is judged: on its own batch, with up to three retries at four times the damping; or, for small
        random batches, by the curvature that the next batch finds along it, which a step that only fits its own batch
        does not pass. It is then undone at the next call, without retries.
    recompute : bool
        Rebuild the graph for every product: memory for time.
    ignore_index : int
        Label of examples to leave out.
    process_group : torch.distributed.ProcessGroup, optional
        Ranks that share each batch: rows stay on their rank.

    Attributes
    ----------
    last : StepInfo
        Of the last step.
    judged : StepInfo
        Of the last step whose outcome is known.

    Raises
    ------
    InputError
        For parameters in half precision or on several devices, a closure that returns a loss, soft targets, logits
        that are not finite, and what the messages say.

    Notes
    -----
    Source: Fast Gauss-Newton, the damped update as a whitened row-space system. Damping control: Levenberg-Marquardt as
    in Martens (2010). Proximal momentum: SPRING, Goldshlager et al. (2024). The stable form is ours.

    ``step`` calls each closure at least twice, the second time with the random state of the first and without
    gradients: a closure must return the same logits again.

    Examples
    --------
    >>> model = nn.Linear(3, 4)
    >>> x, y = torch.eye(3), torch.tensor([0, 2, 3])
    >>> optimizer = FastGaussNewton(model.parameters(), damping=0.1)
    >>> losses = [float(optimizer.step(lambda: (model(x), y))) for _ in range(20)]
    >>> losses[-1] < 0.1 < losses[0], optimizer.last.accepted
    (True, True)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.0,
        *,
        damping: Damping = 1.0,
        momentum: float = 0.0,
        l2: float = 0.0,
        weight_decay: float = 0.0,
        solver: Solver = "cg",
        form: Form = "auto",
        cg_tol: float = 1e-2,
        cg_max_iter: int = 20,
        products: Products = "double-backward",
        model: nn.Module | None = None,
        ratio_batch: RatioBatch = "same",
        recompute: bool = False,
        ignore_index: int = -100,
        process_group: Any = None,
    ) -> None:
        for kind, value, known in (
            ("solver", solver, Solver),
            ("form", form, Form),
            ("kind of products", products, Products),
            ("batch of the ratio", ratio_batch, RatioBatch),
        ):
            if value not in get_args(known):
                raise UnknownNameError(kind, value, get_args(known))
        if model is None and (solver == "gram" or products == "forward"):
            raise InputError("solver='gram' and products='forward' call the model themselves: give model=")
        if solver == "gram" and process_group is not None:
            raise InputError("solver='gram' works in one process: take solver='cg' with a process_group")
        if not callable(damping) and not 0 < damping < math.inf:
            raise InputError(f"damping={damping}: a positive number, or a callable of StepInfo")
        if not (lr > 0 and 0 <= momentum < 1 and cg_max_iter >= 1 and cg_tol > 0):
            raise InputError(
                f"lr={lr}, momentum={momentum}, cg_tol={cg_tol}, cg_max_iter={cg_max_iter}: lr, cg_tol and cg_max_iter "
                "are positive, momentum lies in [0, 1)"
            )
        self.rule = damping if callable(damping) else None
        start = 1.0 if callable(damping) else float(damping)
        self.momentum, self.solver, self.form, self.products, self.model = momentum, solver, form, products, model
        self.cg_tol, self.cg_max_iter, self.ratio_batch = cg_tol, cg_max_iter, ratio_batch
        self.recompute, self.ignore_index, self.process_group = recompute, ignore_index, process_group
        self.judged = StepInfo()
        self._warned = False
        self._kernel: tuple[Any, Tensor, Tensor] | None = None  # of a head's features: a full batch comes again
        defaults = {"lr": lr, "l2": l2, "weight_decay": weight_decay, "frozen": False, "damping": start, "steps": 0}
        super().__init__(params, defaults)

    @property
    def last(self) -> StepInfo:
        """Of the last step; kept with the state, as a callable damping may follow it."""
        return StepInfo(*self.param_groups[0].get("last", ()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; it takes the damping and the count of steps of the others."""
        others = self.param_groups[0] if self.param_groups else {}
        shared = {name: others[name] for name in SHARED if name in others}
        super().add_param_group({**shared, **param_group})
        try:
            _check_group(self.param_groups[-1])
        except InputError:
            self.param_groups.pop()
            raise

    # --------------------------------------------------------------------------------------------------------- a step

    @torch.no_grad()
    def step(self, closure: Closure | Sequence[Closure]) -> Tensor:  # type: ignore[override]
        """Take a step and return the objective before it, a detached scalar.

        Parameters
        ----------
        closure : callable or sequence of callables
            Returns ``(logits (..., K), labels (...))`` with the graph of the logits attached; no ``backward()``. Of
            several, micro-batches, the rows are put together to one batch.
        """
        closures: list[Closure] = [closure] if callable(closure) else list(closure or ())
        if not closures:
            raise InputError(
                "there is no closure: give one, or several for micro-batches, that return (logits, labels)"
            )
        parameters = self._parameters()
        pending = {p: kept.pop("previous") for p, kept in self.state.items() if "previous" in kept}
        if pending:
            self._judge_last(closures, parameters, pending)
        batch = self._linearise(closures)
        self._warn_of_batchnorm(batch)
        states = batch.states
        loss, gradient = self._objective(batch.logits, batch.labels), self._gradient(batch)
        lr, damping = self._shared("lr"), self._shared("damping")
        step = self._shared("steps") + 1
        norm = math.sqrt(_dot(gradient, gradient))
        if self.rule:
            damping = float(self.rule(replace(self.last, step=step, loss=loss, gradient_norm=norm)))
            if not (damping > 0 and math.isfinite(damping)):
                raise InputError(f"the damping callable returned {damping}: return a positive number")
        for attempt in range(1 if self.ratio_batch == "next" else RETRIES + 1):
            if attempt:  # without momentum, whose direction more damping would only come closer to
                damping = _raised(damping)
                batch = self._linearise(closures, states)
            right, rho_is_known = self._right(gradient, damping, momentum=not attempt)
            found = self._direction(batch, right, damping + self._most_l2(), rho_is_known)
            floor = self._check_damping(batch, damping, found)
            del batch  # its graph goes before the trial evaluation
            slope = lr * _dot(gradient, found.vector)
            predicted = slope + lr**2 / 2 * (found.curvature + self._l2_form(found.vector))
            info = StepInfo(
                step, loss, gradient_norm=norm, damping=damping, cg_iterations=found.solution.iterations,
                residual=found.solution.relative,
            )  # fmt: skip
            old = [p.clone() for p in parameters]
            torch._foreach_add_(parameters, found.vector, alpha=lr)
            if self.ratio_batch == "next":
                self._keep(parameters, found.vector, old)
                for p, before in zip(parameters, old, strict=True):
                    self.state[p]["previous"] = before
                self._share(slope=slope, predicted=predicted)
                break
            info = self._judge(info, self._evaluate(closures, states), predicted)
            if info.accepted:
                self._keep(parameters, found.vector, old)
                break
            torch._foreach_copy_(parameters, old)
        if info.accepted is False:
            for p in parameters:
                self.state[p].pop("direction", None)
        if info.accepted is not None:
            self.judged = info
            damping = self._adapted(info, floor)
        self._share(damping=damping, steps=step, last=astuple(info))
        return torch.tensor(loss, dtype=parameters[0].dtype, device=parameters[0].device)

    def _keep(self, parameters: list[Tensor], vector: list[Tensor], old: list[Tensor]) -> None:
        """Decay weights, and remember the direction for momentum."""
        lr = self._shared("lr")
        for p, before, d, decay in zip(parameters, old, vector, self._each("weight_decay"), strict=True):
            if decay:
                p.sub_(before, alpha=lr * decay)
            if self.momentum:
                self.state[p]["direction"] = d

    def _judge(self, info: StepInfo, new_loss: float, predicted: float) -> StepInfo:
        """Judge a step on its own batch."""
        noise = self._noise(info.loss)
        ratio = (new_loss - info.loss) / predicted if predicted < -noise else math.nan
        return replace(info, new_loss=new_loss, ratio=ratio, accepted=new_loss <= info.loss + noise)

    def _judge_last(self, closures: Sequence[Closure], parameters: list[Tensor], pending: dict[Tensor, Tensor]) -> None:
        """Judge the last step by the curvature that this batch finds along it, and undo it or go on from it.

        The slope stays that of the step's own batch: another batch's differs by noise which no damping removes, and a
        ratio with it would raise the damping without end.
        """
        current = [p.clone() for p in parameters]
        previous = [pending.get(p, now) for p, now in zip(parameters, current, strict=True)]
        torch._foreach_copy_(parameters, previous)
        batch = self._linearise(closures)
        states, loss = batch.states, self._objective(batch.logits, batch.labels)
        here = _dot(self._gradient(batch), torch._foreach_sub(current, previous))
        del batch
        torch._foreach_copy_(parameters, current)
        new_loss = self._evaluate(closures, states)
        slope, predicted = self._shared("slope"), self._shared("predicted")
        ratio = (slope + new_loss - loss - here) / predicted if predicted < -self._noise(loss) else math.nan
        accepted = math.isfinite(new_loss) and not ratio < 0
        self.judged = replace(self.last, loss=loss, new_loss=new_loss, ratio=ratio, accepted=accepted)
        damping = self._shared("damping")
        if accepted:
            self._share(damping=self._adapted(replace(self.judged, damping=damping), LEAST_DAMPING))
            return
        torch._foreach_copy_(parameters, previous)
        for p in parameters:
            self.state[p].pop("direction", None)
        self._share(damping=_raised(damping))

    def _noise(self, loss: float) -> float:
        """Return what rounding may move a loss by."""
        return 10 * torch.finfo(self._parameters()[0].dtype).eps * abs(loss)

    def _adapted(self, info: StepInfo, floor: float) -> float:
        """Return the next damping by Levenberg and Marquardt's rule."""
        damping = info.damping
        if self.rule or not info.accepted:  # a refused step has raised it already
            return damping
        if info.ratio < 0.25:
            damping *= 2
        elif info.ratio > 0.75:
            damping /= 1.5
        return min(max(damping, floor), max(MOST_DAMPING, floor))

    # ------------------------------------------------------------------------------------------------ what is solved

    def _linearise(self, closures: Sequence[Closure], states: list[Any] | None = None) -> Linearised:
        parameters = self._parameters()
        how: dict[str, Any] = {
            "products": self.products, "model": self.model, "recompute": self.recompute,
            "ignore_index": self.ignore_index, "states": states, "group": self.process_group,
        }  # fmt: skip
        with torch.enable_grad():
            if isinstance(self.model, nn.Linear):
                return LinearHead(closures, parameters, **how)
            if self.solver == "cg":
                return Linearised(closures, parameters, **how)
            assert self.model is not None
            with captured(self.model, len(closures)) as calls:
                batch = Linearised(closures, parameters, **how)
        batch.calls = calls
        return batch

    def _gradient(self, batch: Linearised) -> list[Tensor]:
        """Return the gradient of the objective."""
        found = batch.margins
        gradient = batch.pull(found.slope * (found.residual / batch.total)[:, None])
        for p, g, l2 in zip(self._parameters(), gradient, self._each("l2"), strict=True):
            g.add_(p, alpha=l2)
        return gradient

    def _right(self, gradient: list[Tensor], damping: float, *, momentum: bool) -> tuple[list[Tensor], bool]:
        """Return the right-hand side h, and whether it lies in the row space with known coefficients."""
        previous = [self.state[p].get("direction") for p in self._parameters()]
        if not (momentum and self.momentum) or any(d is None for d in previous):
            return gradient, not any(self._each("l2"))
        return [g - damping * self.momentum * d for g, d in zip(gradient, previous, strict=True)], False

    def _rows(self, batch: Linearised) -> tuple[Tensor, Tensor | None]:
        """Return the rows' weighted slopes (B, K) and, where it is known and safe, the rho of the gradient."""
        found = batch.margins
        scaled = found.slope * (found.weight / batch.total).sqrt()[:, None]
        if self.form == "woodbury" or (self.form == "auto" and self._least(found.margin) <= PAPER_FORM_MARGIN):
            return scaled, None
        return scaled, torch.exp(-found.margin.double() / 2) / math.sqrt(batch.total)

    def _direction(self, batch: Linearised, right: list[Tensor], damping: float, rho_is_known: bool) -> Direction:
        scaled, rho = self._rows(batch)
        if self.form == "paper" and not rho_is_known:
            raise InputError("form='paper' solves for the plain gradient: without momentum and l2, or form='auto'")
        rows: Rows = ProductRows(batch, scaled)
        if self.solver == "gram":
            rows = (
                HeadRows(batch, scaled, self._features_kernel(batch))
                if isinstance(batch, LinearHead)
                else ExplicitRows(explicit_rows(batch, scaled))
            )
        return row_space_direction(
            rows,
            right,
            damping,
            rho=rho if rho_is_known else None,
            tol=self.cg_tol,
            max_iter=self.cg_max_iter,
            total=lambda scalar: batch.summed([scalar])[0],
        )

    def _features_kernel(self, batch: LinearHead) -> Tensor:
        x = batch.features
        which = x.data_ptr(), x.shape, x._version
        if self._kernel is None or self._kernel[0] != which:
            self._kernel = which, x, batch.kernel()  # holding x keeps its memory from being another's
        return self._kernel[2]

    def _check_damping(self, batch: Linearised, damping: float, found: Direction) -> float:
        """Refuse a damping that rounding swallows, and return the least that the control may choose."""
        lost = torch.finfo(batch.parameters[0].dtype).eps * found.solution.top
        if damping + self._most_l2() < lost:
            raise InputError(
                f"damping={damping:.3g} is below the rounding of a curvature of {found.solution.top:.3g} in "
                f"{str(batch.parameters[0].dtype).removeprefix('torch.')}: give damping={10 * lost:.1g} or more"
            )
        return max(LEAST_DAMPING, 10 * lost)

    # ------------------------------------------------------------------------------------------------ what is measured

    def _evaluate(self, closures: Sequence[Closure], states: list[RandomState]) -> float:
        """Return the objective, seeing the random states of an earlier pass."""
        logits, labels = [], []
        for closure, state in zip(closures, states, strict=True):
            with state.replayed():
                z, y, _ = read(closure, self.ignore_index)
            logits.append(z)
            labels.append(y)
        return self._objective(torch.cat(logits), torch.cat(labels))

    def _objective(self, logits: Tensor, labels: Tensor) -> float:
        values = nn.functional.cross_entropy(logits.double(), labels, reduction="sum")
        total = torch.stack([values, values.new_tensor(len(labels))])
        if self.process_group is not None:
            torch.distributed.all_reduce(total, group=self.process_group)
        return float(total[0] / total[1]) + self._l2_form(self._parameters()) / 2

    def _l2_form(self, vector: Sequence[Tensor]) -> float:
        """Return the sum of l2 |v|^2 over groups."""
        return sum(
            l2 * float(v.square().sum(dtype=torch.float64))
            for v, l2 in zip(vector, self._each("l2"), strict=True)
            if l2
        )

    def _least(self, values: Tensor) -> float:
        least = values.min() if len(values) else values.new_tensor(torch.inf)
        if self.process_group is not None:
            torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self.process_group)
        return float(least)

    # ---------------------------------------------------------------------------------------------------- parameters

    def _active(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if not group["frozen"]]

    def _parameters(self) -> list[Tensor]:
        parameters = [p for group in self._active() for p in group["params"] if p.requires_grad]
        if not parameters:
            raise InputError("every parameter is frozen or requires no gradient: there is nothing to train")
        if len({p.device for p in parameters}) > 1:
            raise InputError(
                f"the parameters are on {sorted({str(p.device) for p in parameters})}: put them on one device"
            )
        return parameters

    def _each(self, name: str) -> list[float]:
        """Return an option of the groups for each parameter."""
        return [group[name] for group in self._active() for p in group["params"] if p.requires_grad]

    def _most_l2(self) -> float:
        return max(self._each("l2"))

    def _shared(self, name: str) -> Any:
        values = {group[name] for group in self._active()}
        if len(values) > 1:
            raise InputError(f"groups have {name} = {sorted(values)}: one value holds for all, or the ratio is wrong")
        return values.pop()

    def _share(self, **values: Any) -> None:
        for group in self.param_groups:
            group.update(values)

    def _warn_of_batchnorm(self, batch: Linearised) -> None:
        if self._warned:
            return
        self._warned = True
        if any(_normalises_batches(z) for z in batch._graphs if z is not None):
            warnings.warn(
                "BatchNorm is in training mode: rows depend on the whole batch, and its running statistics see every "
                "evaluation of the closure",
                stacklevel=3,
            )


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "l2", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise InputError(f"{name}={group[name]} of a group: give a number of at least 0")
    for p in group["params"]:
        if p.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"a parameter of shape {tuple(p.shape)} is {p.dtype}: keep float32 master weights and run the forward "
                "pass under torch.autocast"
            )


def _raised(damping: float) -> float:
    """Return the damping after a refused step; one that was chosen above the bound stays."""
    return max(damping, min(4 * damping, MOST_DAMPING))


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return float(torch.stack([(x * y).sum(dtype=torch.float64) for x, y in zip(a, b, strict=True)]).sum())


def _normalises_batches(z: Tensor) -> bool:
    """Whether the graph of ``z`` has a BatchNorm in training mode."""
    seen, open_nodes = set(), [z.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "BatchNorm" in node.name() and getattr(node, "_saved_training", True):
            return True
        open_nodes += [following for following, _ in node.next_functions]
    return False
