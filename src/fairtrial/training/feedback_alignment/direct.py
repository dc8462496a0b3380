"""Train the blocks of a network by direct feedback: one call in place of ``loss.backward()``.

A forward hook cuts the graph behind each block l: the rest of the network gets sg(h_l), and the block's own graph keeps
its root h_l. Once the output error e = dLoss/dz (B, K) is known, each block has a job that needs no other:

    delta_l = J_{S_l}(h_l)^T e,    gradient of theta_l = (d h_l / d theta_l)^T delta_l,
    then S_l is fitted to the centred logits:  mean (c(S_l(sg h_l)) - sg c(z))^2.

S_l is a small nonlinear network (NDFA), a fixed random matrix (DFA, Nokland 2016), or anything else of that shape.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from fairtrial.errors import InputError
from fairtrial.options import checked_count, checked_number
from fairtrial.seeds import derive, torch_generator
from fairtrial.training.feedback_alignment.alignments import BlockAlignment, alignment
from fairtrial.training.feedback_alignment.blocks import check_blocks, refuse_what_skips_hooks
from fairtrial.training.feedback_alignment.graph import (
    Cut,
    changed_in_place,
    check_graph,
    cut_output,
    first_tensor,
    no_trace,
    walk,
    with_first,
)
from fairtrial.training.feedback_alignment.jobs import BackwardTiming, BlockTiming, Stopwatch, executor_of
from fairtrial.training.feedback_alignment.surrogates import (
    LinearSurrogate,
    RandomFeedback,
    centred,
    nonlinear_surrogate,
    rank_within,
)
from fairtrial.training.networks import seeded

METHODS: dict[str, dict[str, Any]] = {
    "ndfa": {"surrogate": "nonlinear", "learn": True},
    "dfa": {"surrogate": "linear", "learn": False},
    "drtp": {"surrogate": "linear", "learn": False},
    "local": {"surrogate": "nonlinear", "learn": True},
}
SHARE = 0.1  # of a block's parameters, the most its surrogate has

Surrogate = Callable[[str, tuple[int, ...], int], nn.Module]


def default_logits(output: Any) -> Tensor:
    """Return a model's output itself, or its ``logits``."""
    return output.logits if hasattr(output, "logits") else output


class DirectFeedback:
    """Gives every block of a network its gradient from the output error, without a backward pass through later blocks.

    While attached, forward passes with gradients cut the graph at the blocks: ``loss.backward()`` would train the head
    alone. Call :meth:`backward` instead, once for each forward pass.

    Parameters
    ----------
    model : nn.Module
        Attached at once. Wrap it in DistributedDataParallel afterwards, if at all, and see :meth:`synchronize`.
    blocks : 'auto' or list of str
        Modules behind whose outputs to cut, first to last; 'auto' takes :func:`find_blocks`. An empty list is ordinary
        backpropagation. A block's output is a tensor (B, ...), or a tuple or mapping that begins with one.
    logits : callable, optional
        The logits (B, K) in the model's output; by default the output itself or its ``logits``. Used by
        :meth:`alignment` and ``objective="difference"``.
    method : {'ndfa', 'dfa', 'drtp', 'local'}
        Presets. ``dfa``: fixed random matrices. ``drtp`` (Frenkel et al. 2021): the same, of one-hot labels in place of
        the error. ``local`` (Belilovsky et al. 2020): the gradient of each surrogate's own loss on the labels. The last
        two need ``labels=`` in :meth:`backward`.
    surrogate : 'nonlinear', 'linear' or callable, optional
        The preset's by default. A function (name, shape, K) -> nn.Module gets the block's name and output shape
        without the batch; the module maps (B, *shape) to (B, K).
    learn : bool, optional
        Whether surrogates are fitted; the preset's by default. 'linear' without it is a fixed random matrix.
    rank : int
        Hidden units of nonlinear surrogates, half of it for maps of at most 32 channels; less where a surrogate would
        have more than a tenth of its block's parameters (``capped=False`` lifts that).
    surrogate_lr : float
        Of Adam, for the surrogates.
    updates_per_step, surrogate_every : int
        Fits a time, and calls of :meth:`backward` from one time to the next (by default 1; 10 for differences).
    warmup : int
        First calls that fit surrogates and write no gradients to blocks (the head gets its own).
    target : {'logits', 'labels'}
        What surrogates are fitted to; with labels (an ablation: auxiliary classifiers) by cross-entropy.
    objective : {'value', 'difference'}
        ``difference`` fits S(h + eps) - S(h) to the change of the logits when eps, of ``noise`` times the root mean
        square of h, is added to the block's output. That costs two forward passes behind each block, without gradients.
    noise : float
    executor : {'serial', 'threads', 'streams'}
        ``streams`` needs CUDA.
    capped : bool
    seed : int
        Of surrogates, fixed matrices and noise.

    Raises
    ------
    InputError
        If an argument is out of range, the model is compiled or recomputes activations, or has no blocks to find.
    UnknownNameError
        If a block is not a module of the model.

    Attributes
    ----------
    blocks : list of str
        Names, in the order of the forward pass once there was one. A module that runs twice appears as ``name`` and
        ``name#2``.
    surrogates : dict of str to nn.Module
        By block; empty until they are made at the first :meth:`backward`, when shapes and K are known. Their parameters
        are not the model's.
    added : dict of str to float
        Parameters of each surrogate over those of its block.

    Examples
    --------
    >>> from fairtrial.training.networks import mlp
    >>> model, x, y = mlp([4, 16, 16, 3]), torch.randn(8, 4), torch.arange(8) % 3
    >>> feedback = DirectFeedback(model)
    >>> logits = model(x)
    >>> feedback.backward(F.cross_entropy(logits, y), logits)
    >>> feedback.blocks, all(p.grad is not None for p in model.parameters())
    (['2', '4'], True)
    >>> feedback.detach()
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: str | Iterable[str] = "auto",
        *,
        logits: Callable[[Any], Tensor] = default_logits,
        method: Literal["ndfa", "dfa", "drtp", "local"] = "ndfa",
        surrogate: str | Surrogate | None = None,
        learn: bool | None = None,
        rank: int = 64,
        surrogate_lr: float = 1e-3,
        updates_per_step: int = 1,
        surrogate_every: int | None = None,
        warmup: int = 0,
        target: Literal["logits", "labels"] = "logits",
        objective: Literal["value", "difference"] = "value",
        noise: float = 0.1,
        executor: Literal["serial", "threads", "streams"] = "serial",
        capped: bool = True,
        seed: int = 0,
    ) -> None:
        refuse_what_skips_hooks(model)
        if method not in METHODS:
            raise InputError(f"method={method!r}: one of {', '.join(map(repr, METHODS))}")
        every = surrogate_every if surrogate_every is not None else {"difference": 10}.get(objective, 1)
        for name, value, least in (
            ("rank", rank, 1),
            ("updates_per_step", updates_per_step, 1),
            ("surrogate_every", every, 1),
            ("warmup", warmup, 0),
        ):
            checked_count(value, name, least=least)
        for name, number in (("surrogate_lr", surrogate_lr), ("noise", noise)):
            checked_number(number, name, above=0)
        if target not in ("logits", "labels") or objective not in ("value", "difference"):
            raise InputError(
                f"target={target!r}, objective={objective!r}: 'logits' or 'labels'; 'value' or 'difference'"
            )
        surrogate = METHODS[method]["surrogate"] if surrogate is None else surrogate
        learn = METHODS[method]["learn"] if learn is None else learn
        if not isinstance(learn, bool) or not isinstance(capped, bool) or not callable(logits):
            raise InputError(f"learn={learn!r}, capped={capped!r}: True or False; logits={logits!r}: a function")
        if not callable(surrogate) and surrogate not in ("nonlinear", "linear"):
            raise InputError(f"surrogate={surrogate!r}: 'nonlinear', 'linear' or a function (name, shape, K) -> module")
        if method == "drtp" and (learn or surrogate != "linear"):
            raise InputError("method='drtp' projects labels by fixed matrices: it takes neither learn nor a surrogate")
        if method == "local" and not learn:
            raise InputError(
                "method='local' learns from its surrogates' own loss: learn=False leaves nothing to follow"
            )
        if objective == "difference" and (target == "labels" or method == "local"):
            raise InputError("objective='difference' follows changes of the logits: not with labels or method='local'")
        self.model, self.logits, self.method = model, logits, method
        self.surrogate, self.learn, self.rank, self.capped = surrogate, learn, rank, capped
        self.surrogate_lr, self.updates_per_step, self.surrogate_every = surrogate_lr, updates_per_step, every
        self.warmup, self.target, self.objective, self.noise, self.seed = warmup, target, objective, noise, seed
        self.blocks = check_blocks(model, blocks)
        self.surrogates: dict[str, nn.Module] = {}
        self.added: dict[str, float] = {}
        self.steps = 0
        self._modules = list(self.blocks)
        self._executor = executor_of(executor, next(iter(model.parameters()), torch.empty(0)).device)
        self._optimizers: dict[str, torch.optim.Adam] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._restored: Mapping[str, Any] | None = None
        self._cuts: list[Cut] = []
        self._outputs: list[Any] = []
        self._ends: set[Any] = set()  # where the last pass left the model
        self._cutting, self._off = False, False
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._probe = True
        self._watches: dict[str, Stopwatch] = {}
        self._backpropagation: float | None = None
        self._entered: list[Any] = []
        self._handles: list[Any] = []
        if self._modules:
            self._attach()

    # -------------------------------------------------------------------------------------------------- forward hooks

    def _attach(self) -> None:
        known = dict(self.model.named_modules())
        self._handles = [
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._end, always_call=True),
        ]
        for name in self._modules:
            self._handles += [
                known[name].register_forward_pre_hook(partial(self._enter, name)),
                known[name].register_forward_hook(partial(self._cut, name)),
            ]

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._off:
            return
        self._cutting = torch.is_grad_enabled()
        self._cuts, self._outputs = [], []
        self._inputs = (args, kwargs) if self._cutting and self.objective == "difference" else None

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._cutting:
            self._ends = {t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor) and t.grad_fn is not None}
        self._cutting = False
        while self._entered:  # a block failed
            self._entered.pop().__exit__(None, None, None)

    def _enter(self, name: str, *_: Any) -> None:
        if self._cutting:
            context = self._executor.forward(name)
            context.__enter__()
            self._entered.append(context)

    def _cut(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        if not self._cutting:
            return None
        self._entered.pop().__exit__(None, None, None)
        again = sum(cut.name.partition("#")[0] == name for cut in self._cuts)
        cut, passed = cut_output(f"{name}#{again + 1}" if again else name, output, probe=self._probe)
        self._cuts.append(cut)
        if self.objective == "difference":
            self._outputs.append(passed)
        return passed

    # ------------------------------------------------------------------------------------------------------- backward

    def backward(
        self,
        loss: Tensor | None,
        logits: Tensor,
        *,
        error: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Add the gradient of every trainable parameter to its ``.grad``, and fit the surrogates.

        Parameters
        ----------
        loss : Tensor ()
            Any function of the logits, plus terms of parameters alone; None where ``error`` is given. Scaled, as by a
            ``GradScaler``, it scales all gradients.
        logits : Tensor (B, K)
            Of the last forward pass.
        error : Tensor (B, K), optional
            The derivative of a loss by the logits, in place of the loss.
        labels : Tensor (B,) of int, optional
            Classes, for the methods and targets that need them.

        Raises
        ------
        InputError
            If there was no forward pass with gradients since the last call; logits are not (B, K); a block
            passes by its cut, does not reach the logits or was changed in place; the loss uses hidden states; or labels
            are missing.
        """
        if (loss is None) == (error is None):
            raise InputError("give a loss or error=, one of the two")
        if not self.blocks:
            torch.autograd.backward(logits if loss is None else loss, error)
            return
        cuts = self._take(logits)
        if self._probe:
            self._prepare(cuts, logits, loss)
        watch = Stopwatch(logits.device)
        if loss is not None:
            error = self._error_of(loss, logits)
        elif not isinstance(error, Tensor) or error.shape != logits.shape:
            given = (
                f"the shape {tuple(error.shape)}" if isinstance(error, Tensor) else f"the type {type(error).__name__}"
            )
            raise InputError(f"error has {given}, the logits {tuple(logits.shape)}")
        assert error is not None
        error = error.detach()
        labels = self._checked_labels(labels, logits)
        watch.lap()
        torch.autograd.backward(logits if loss is None else loss, error if loss is None else None)
        watch.lap()
        fits = self.learn and self.steps % self.surrogate_every == 0
        jobs = [(cut.name, partial(self._job, cut, error, logits.detach(), labels, fits)) for cut in cuts]
        self._watches = {"": watch}
        self._executor.run(jobs)
        if fits and self.objective == "difference":
            self._fit_differences()
        self.steps += 1

    def _take(self, logits: Tensor) -> list[Cut]:
        """Return the cuts of the last forward pass, which this ends, checked."""
        cuts, self._cuts = self._cuts, []
        ends, self._ends = self._ends, set()
        if not self._handles:
            raise InputError("detached: make a new DirectFeedback to train this model again")
        if not cuts:
            raise InputError(
                "no forward pass with gradients since the last backward: run the model, then backward once"
            )
        if not isinstance(logits, Tensor) or logits.dim() != 2 or not logits.is_floating_point():
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(f"logits are {found}: (batch, classes) is needed, one row an example")
        if not logits.requires_grad:
            raise InputError("the logits require no gradient: pass them as the model returned them")
        if ends and ends.isdisjoint(walk(logits)[0]):
            raise InputError("these logits are not of the last forward pass: run backward after each pass")
        changed_in_place(cuts)
        for cut in cuts:
            if len(cut.root) != len(logits):
                raise InputError(
                    f"block {cut.name!r} returns {tuple(cut.root.shape)} for {len(logits)} rows of logits: its first "
                    "axis must be the batch"
                )
            shape = tuple(cut.root.shape[1:])
            if self._shapes.get(cut.name, shape) != shape:
                raise InputError(
                    f"block {cut.name!r} returns {shape} an example where its surrogate was made for "
                    f"{self._shapes[cut.name]}: bring inputs to one size"
                )
        return cuts

    def _error_of(self, loss: Tensor, logits: Tensor) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InputError("the loss must be one number that depends on the logits")
        (error,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
        if error is None:
            raise InputError("the loss does not depend on these logits: pass the logits it was computed from")
        return error

    def _checked_labels(self, labels: Tensor | None, logits: Tensor) -> Tensor | None:
        if self.method not in ("drtp", "local") and self.target != "labels":
            return None
        if not isinstance(labels, Tensor) or labels.shape != logits.shape[:1] or labels.is_floating_point():
            what = f"method={self.method!r}, target={self.target!r} need classes"
            raise InputError(f"{what}: give labels= a tensor ({len(logits)},) of int")
        if not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]:
            raise InputError(
                f"labels from {labels.min()} to {labels.max()}: classes count from 0 to {logits.shape[1] - 1}"
            )
        return labels

    def _job(self, cut: Cut, error: Tensor, logits: Tensor, labels: Tensor | None, fits: bool) -> None:
        """Train one block: feedback through its surrogate, its own backward pass, the surrogate's fit."""
        watch = self._watches[cut.name] = Stopwatch(logits.device)
        surrogate = self.surrogates[cut.name]
        h = cut.root.detach()
        again = fits and self.objective == "value"
        delta, told = self._feedback(surrogate, h, error, labels, keep=again)
        watch.lap()
        if cut.root.requires_grad and self.steps >= self.warmup:
            torch.autograd.backward(cut.root, delta)
        cut.release()
        watch.lap()
        if again:
            for i in range(self.updates_per_step):
                told = _told(surrogate, h) if i or told is None else told
                self._fit(cut.name, self._fit_loss(told, logits, labels))
        watch.lap()

    def _feedback(
        self, surrogate: nn.Module, h: Tensor, error: Tensor, labels: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return delta (B, *shape), and with ``keep`` the surrogate's logits with their graph."""
        if isinstance(surrogate, RandomFeedback):
            if self.method == "drtp":
                assert labels is not None
                error = -F.one_hot(labels, error.shape[1]).to(error) / len(error)
            return surrogate.feedback(error), None
        h = h.requires_grad_()
        with torch.enable_grad():
            told = _told(surrogate, h)
            if told.shape != error.shape:
                raise InputError(f"a surrogate returned {tuple(told.shape)}: {tuple(error.shape)}, one logit a class")
            if self.method == "local":
                assert labels is not None
                (delta,) = torch.autograd.grad(F.cross_entropy(told, labels), h, retain_graph=keep)
            else:
                (delta,) = torch.autograd.grad(told, h, error.to(told.dtype), retain_graph=keep)
        h.requires_grad_(False)
        return delta, told if keep else None

    def _fit_loss(self, told: Tensor, logits: Tensor, labels: Tensor | None) -> Tensor:
        if self.method == "local" or self.target == "labels":
            assert labels is not None
            return F.cross_entropy(told, labels)
        return (centred(told) - centred(logits)).square().mean()

    def _fit(self, name: str, loss: Tensor) -> None:
        """Make one Adam step of a surrogate; no gradient leaves it."""
        parameters = [p for p in self.surrogates[name].parameters() if p.requires_grad]
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        self._optimizers[name].step()
        self._optimizers[name].zero_grad()

    # ----------------------------------------------------------------------------------------------------- surrogates

    def _prepare(self, cuts: list[Cut], logits: Tensor, loss: Tensor | None) -> None:
        """Check the graph of the first pass, and make the surrogates now that shapes, parameters and K are known."""
        check_graph(self.model, cuts, logits, loss)
        if not self.surrogates:
            self._build(cuts, logits)
        self._probe = False

    def _build(self, cuts: list[Cut], logits: Tensor) -> None:
        own = {id(p) for p in self.model.parameters()}
        surrogates: dict[str, nn.Module] = {}
        for cut in cuts:
            shape, classes, name = tuple(cut.root.shape[1:]), logits.shape[1], cut.name
            size = sum(p.numel() for p in cut.parameters)
            seed = derive(self.seed, "surrogate", name)
            if callable(self.surrogate):
                made = self.surrogate(name, shape, classes)
                if not isinstance(made, nn.Module):
                    raise InputError(f"surrogate= returned {type(made).__name__} for {name!r}: an nn.Module is needed")
            elif self.surrogate == "nonlinear":
                rank = rank_within(SHARE * size if self.capped else math.inf, shape, classes, self.rank)
                made = nonlinear_surrogate(name, shape, classes, rank=rank, seed=seed)
            elif self.learn:
                made = seeded(seed, partial(LinearSurrogate, shape, classes))
            else:
                made = RandomFeedback(shape, classes, seed=seed, device=logits.device, dtype=cut.root.dtype)
            parameters = [p for p in made.parameters() if p.requires_grad]
            if any(id(p) in own for p in parameters):
                if self.learn:
                    raise InputError(
                        f"the surrogate of {name!r} shares parameters of the model: copy it, or learn=False"
                    )
            else:
                made.to(logits.device, torch.float32 if cut.root.dtype.itemsize < 4 else cut.root.dtype)
            if self.learn and not parameters:
                raise InputError(f"the surrogate of {name!r} has nothing to learn: learn=False")
            if self.learn:
                self._optimizers[name] = torch.optim.Adam(parameters, lr=self.surrogate_lr, fused=True)
            surrogates[name] = made
            self._shapes[name] = shape
            self.added[name] = sum(p.numel() for p in made.parameters() if id(p) not in own) / max(1, size)
        self.surrogates, self.blocks = surrogates, [cut.name for cut in cuts]
        if self._restored is not None:
            restored, self._restored = self._restored, None
            self.load_state_dict(restored)

    def state_dict(self) -> dict[str, Any]:
        """Return the surrogates, their optimizers and the number of steps; nothing of the model."""
        if self._restored is not None:  # taken up, and no backward pass since
            return copy.deepcopy(dict(self._restored))
        return {
            "steps": self.steps,
            "surrogates": {name: s.state_dict() for name, s in self.surrogates.items()},
            "optimizers": {name: o.state_dict() for name, o in self._optimizers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned; before the first backward pass it waits for the surrogates.

        Raises
        ------
        InputError
            If it is of other blocks.
        """
        state = copy.deepcopy(dict(state))  # optimizers keep the tensors they are given
        if not self.surrogates and state["surrogates"]:
            self._restored = state
            self.steps = state["steps"]
            return
        if state["surrogates"].keys() != self.surrogates.keys():
            raise InputError(
                f"the state is of the blocks {', '.join(state['surrogates'])}, not of {', '.join(self.surrogates)}"
            )
        self.steps = state["steps"]
        for name, surrogate in self.surrogates.items():
            surrogate.load_state_dict(state["surrogates"][name])
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])

    def synchronize(self, group: Any = None) -> None:
        """Average gradients and surrogates over the processes of a ``torch.distributed`` group.

        Call it after :meth:`backward`, inside the wrapper's ``no_sync()``: gradients come by one backward pass a block,
        where DistributedDataParallel expects a single one.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise InputError("torch.distributed is not initialised: call init_process_group first")
        world = dist.get_world_size(group)
        tensors = [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors += [p.data for s in self.surrogates.values() for p in s.parameters() if self.learn]
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
            tensor /= world

    # ---------------------------------------------------------------------------------------------------- differences

    @torch.no_grad()
    def _fit_differences(self) -> None:
        """Fit every surrogate to the change of the logits by a small change of its block's output."""
        for i, name in enumerate(self.blocks):
            h, surrogate = first_tensor(name, self._outputs[i]).detach(), self.surrogates[name]
            g = torch_generator(self.seed, "noise", self.steps, name, device=h.device)
            for _ in range(self.updates_per_step):
                size = self.noise * h.square().mean().sqrt()
                moved = h + size * torch.randn(h.shape, generator=g, device=h.device, dtype=h.dtype)
                change = centred(self._tail(i, moved) - self._tail(i, h))
                with torch.enable_grad():
                    told = _told(surrogate, moved) - _told(surrogate, h)
                    self._fit(name, (centred(told) - change).square().mean())

    def _tail(self, i: int, h: Tensor) -> Tensor:
        """Return the logits when the i-th block returns ``h`` and those before it what they returned.

        Dropout draws the same masks each time; buffers stay as they were.
        """
        assert self._inputs is not None
        args, kwargs = self._inputs
        replies = iter([*self._outputs[:i], with_first(self._outputs[i], h)])
        patched: dict[nn.Module, Callable[..., Any] | None] = {}

        def reply(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            told = next(replies, None)
            return forward(*args, **kwargs) if told is None else told

        for module in {self.model.get_submodule(name) for name in self._modules}:
            patched[module] = module.__dict__.get("forward")
            module.forward = partial(reply, module.forward)
        try:
            with self.switched_off(), no_trace(self.model, derive(self.seed, "tail", self.steps)):
                return self.logits(self.model(*args, **kwargs))
        finally:
            for module, forward in patched.items():
                del module.forward
                if forward is not None:
                    module.forward = forward

    # -------------------------------------------------------------------------------------------------------- reports

    def alignment(
        self, x: Any, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    ) -> dict[str, BlockAlignment]:
        """Return how the feedback to each block compares with backpropagation's, on one batch.

        Nothing changes by it: neither parameters, gradients, surrogates, buffers nor the global random state.

        Parameters
        ----------
        x : Tensor or mapping
            The model's input; a mapping holds keyword arguments.
        y : Tensor (B,)
            Labels, the second argument of ``loss``.
        loss : callable (logits, y) -> Tensor ()

        Returns
        -------
        dict from block to :class:`BlockAlignment`.
        """
        return alignment(self, x, y, loss)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Let forward passes inside the block be ordinary ones: nothing is cut, the last pass is kept."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def timing(self) -> BackwardTiming:
        """Return the seconds of the last backward pass, of every job and along the critical path.

        Raises
        ------
        InputError
            If there was none.
        """
        if not self._watches:
            raise InputError("nothing to time yet: call backward first")
        error, head = self._watches[""].laps()
        blocks = {}
        for name in self.blocks:
            surrogate, block, fit = self._watches[name].laps()
            blocks[name] = BlockTiming(surrogate, block, fit, self._watches[name].memory)
        return BackwardTiming(error, head, blocks, self._backpropagation)

    def detach(self) -> None:
        """Take all hooks off: the model is ordinary again. The surrogates stay readable."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._cuts, self._outputs, self._inputs = [], [], [], None
        self._executor.close()


def _told(surrogate: nn.Module, h: Tensor) -> Tensor:
    """Return a surrogate's logits; half precision is widened to the surrogate's own."""
    return surrogate(h.float() if h.dtype.itemsize < 4 else h)
