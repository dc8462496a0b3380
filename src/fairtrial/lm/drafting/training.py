"""Training a block drafter, and how many tokens it gets accepted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fairtrial.errors import InputError
from fairtrial.lm.drafting.drafter import BlockDrafter
from fairtrial.lm.drafting.loss import DPACELoss
from fairtrial.lm.drafting.written import Written, blocks_of, features_of, write
from fairtrial.options import checked_count, checked_number


@dataclass(frozen=True, eq=False)
class Step:
    """One step of training: its number, the loss, and the expected accepted length of its blocks."""

    number: int
    loss: float
    expected_length: float


class DrafterTrainer:
    """Trains a drafter on what its target writes.

    Parameters
    ----------
    target
        A causal language model of transformers; it is not changed.
    drafter
        Of :meth:`~fairtrial.lm.drafting.drafter.BlockDrafter.for_target`, trained in place.
    loss
        A :class:`~fairtrial.lm.drafting.loss.DPACELoss`.
    tokenizer
        Of the target.
    anchors
        Blocks a text in each step.
    batch_size
        Texts a step.
    lr
        Peak learning rate of AdamW, after a tenth of warm-up; it falls to zero as a cosine.
    seed
        Of texts and anchors.

    Attributes
    ----------
    history : list of :class:`Step`.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm, tiny_texts
    >>> model, tokenizer = tiny_causal_lm(layers=4)
    >>> drafter = BlockDrafter.for_target(model, block_size=4)
    >>> trainer = DrafterTrainer(model, drafter, tokenizer=tokenizer, anchors=4, batch_size=2)
    >>> trainer.fit(tiny_texts(documents=4), steps=3, prompt_tokens=8, new_tokens=16).history[-1].number
    3
    """

    def __init__(
        self,
        target: Any,
        drafter: BlockDrafter,
        loss: DPACELoss | None = None,
        *,
        tokenizer: Any = None,
        anchors: int = 64,
        batch_size: int = 4,
        lr: float = 1e-3,
        seed: int = 0,
    ) -> None:
        for name, count in (("anchors", anchors), ("batch_size", batch_size)):
            checked_count(count, name)
        checked_number(lr, "lr", above=0)
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.loss = loss or DPACELoss()
        self.anchors, self.batch_size, self.lr, self.seed = anchors, batch_size, lr, seed
        self.history: list[Step] = []

    def fit(
        self,
        texts: Sequence[str],
        *,
        steps: int = 2000,
        prompt_tokens: int = 32,
        new_tokens: int = 64,
        progress: Callable[[Step], None] | None = None,
    ) -> DrafterTrainer:
        """Let the target go on after the first tokens of texts, then train on that; see :func:`written.write`."""
        if self.tokenizer is None:
            raise InputError("give the target's tokenizer=, or train on Written texts by fit_written")
        written = write(self.target, self.tokenizer, texts, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        return self.fit_written(written, steps=steps, progress=progress)

    def fit_written(
        self,
        written: Written,
        features: torch.Tensor | None = None,
        *,
        steps: int,
        progress: Callable[[Step], None] | None = None,
    ) -> DrafterTrainer:
        """Train on texts of the target, and its features in them (S, T, 3 d), which are read if left out.

        A drafter that was given a number of tokens as its vocabulary gets the commonest of these texts.
        """
        checked_count(steps, "steps")
        if not len(written):
            raise InputError("written: no text to train on")
        if features is None:
            features = features_of(self.target, written, self.drafter.config.layers)
        self._choose_vocabulary(written)
        drafter, device = self.drafter, self.drafter.device
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=self.lr, weight_decay=0.01)
        warm = max(1, steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                (step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm)))
            ),
        )
        rng = torch.Generator().manual_seed(self.seed)
        drafter.train()
        for step in range(1, steps + 1):
            rows = torch.randperm(len(written), generator=rng)[: self.batch_size]
            batch = written[rows]
            anchors = self._anchors(batch, rng)
            wanted, there = blocks_of(
                batch, anchors, drafter.config.block_size, drafter.token_ids, drafter.config.vocab_size
            )
            logits = drafter(features[rows].to(device), batch.tokens.to(device), anchors.to(device))
            loss = self.loss(logits.flatten(0, 1), wanted.flatten(0, 1).to(device), there.flatten(0, 1).to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            assert self.loss.last is not None
            told = Step(step, float(loss.detach()), self.loss.last.expected_length)
            if not math.isfinite(told.loss):
                raise InputError(f"the loss is {told.loss} at step {step}: lower lr={self.lr}")
            self.history.append(told)
            if progress:
                progress(told)
        drafter.eval()
        return self

    def _anchors(self, batch: Written, rng: torch.Generator) -> torch.Tensor:
        """Draw anchors (S, A) among the written tokens that have one after them."""
        first = batch.prompt
        width = (batch.stop - 1 - first).clamp_min(1)
        draw = torch.rand(len(batch), self.anchors, generator=rng)
        return first + (draw * width[:, None]).long()

    def _choose_vocabulary(self, written: Written) -> None:
        size = self.drafter.config.draft_vocab
        ids = self.drafter.token_ids
        if size is None or not torch.equal(ids.cpu(), torch.arange(len(ids))):
            return
        used = torch.cat([row[: int(stop)] for row, stop in zip(written.tokens, written.stop, strict=True)])
        counts = torch.bincount(used, minlength=self.drafter.config.vocab_size)
        self.drafter.set_vocabulary(self.target, counts.argsort(descending=True, stable=True)[:size].sort().values)


@torch.inference_mode()
def accepted_lengths(
    drafter: BlockDrafter, written: Written, features: torch.Tensor, *, batch: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what greedy speculative decoding of these texts would have accepted, without decoding them again.

    The texts are what the target emits greedily, so the blocks that decoding would propose and how much of each it
    would accept follow from them.

    Returns
    -------
    lengths : (n,) int64, tokens accepted in each verification, without the target's own.
    right : (B,) float, how often a block's position j was right, over all anchors of the texts.
    """
    checked_count(batch, "batch")
    B = drafter.config.block_size
    drafter.eval()
    lengths, right, total = [], torch.zeros(B), torch.zeros(B)
    for start in range(0, len(written), batch):
        part = written[start : start + batch]
        T = part.tokens.shape[1]
        anchors = torch.arange(part.prompt, T - 1).expand(len(part), -1)
        wanted, there = blocks_of(part, anchors, B, drafter.token_ids, drafter.config.vocab_size)
        logits = drafter(
            features[start : start + batch].to(drafter.device),
            part.tokens.to(drafter.device),
            anchors.to(drafter.device),
        )
        hit = (logits.argmax(-1).cpu() == wanted) & there  # (S, A, B)
        right += hit.sum((0, 1))
        total += there.sum((0, 1))
        accepted = hit.long().cumprod(-1).sum(-1)  # (S, A)
        for row, stop in zip(accepted, part.stop.tolist(), strict=True):
            at = part.prompt
            while at < stop - 1:
                lengths.append(int(row[at - part.prompt]))
                at += lengths[-1] + 1
    return torch.tensor(lengths), right / total.clamp_min(1)
