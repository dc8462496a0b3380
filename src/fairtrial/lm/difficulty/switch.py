"""AdaSwitch: which effort a prompt gets, so that a budget of tokens buys the most right answers.

With accuracy curves a_k(s), non-increasing in the score s, and mean costs c_k, level k(s) = argmax_k a_k(s) - price c_k
is the best policy of its cost; the price is found by bisection on the scores of the log.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.layout import find_blocks
from fairtrial.causal_lm.likelihood import cache_name
from fairtrial.causal_lm.prompts import prompt_texts
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.difficulty.probe import DifficultyProbe
from fairtrial.lm.difficulty.replaying import check_log

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Effort:
    """One way to answer.

    Parameters
    ----------
    name
        What it is called in logs.
    max_new_tokens
        Of each answer.
    num_return_sequences
        Answers drawn; of several the commonest, as ``read`` reads them, is returned.
    system
        An instruction before the prompt. The probe has read the prompt without it, so the prompt is read once more.
    tokens
        What an answer costs; ``None`` = what the log says, or without a log ``max_new_tokens * num_return_sequences``.
    sampling
        Whether to sample; several answers are always sampled.
    read
        What part of a text is the answer; ``None`` = its last line.
    """

    name: str
    max_new_tokens: int = 256
    num_return_sequences: int = 1
    system: str | None = None
    tokens: float | None = None
    sampling: bool = False
    read: Callable[[str], str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"an effort's name is {self.name!r}: give a text")
        for count in (self.max_new_tokens, self.num_return_sequences):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise InputError(
                    f"effort {self.name!r}: max_new_tokens and num_return_sequences must be whole numbers, at least 1"
                )
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise InputError(f"effort {self.name!r}: tokens={self.tokens} must be positive")

    @property
    def worst_cost(self) -> float:
        """Tokens an answer costs at most."""
        return self.tokens if self.tokens is not None else self.max_new_tokens * self.num_return_sequences


@dataclass(frozen=True)
class Answer:
    """What was spent on a prompt and what came of it: ``tokens`` counts generated ones, over all levels tried."""

    text: str
    level: str
    score: float
    tokens: int
    texts: tuple[str, ...] = ()
    escalated: bool = False


class AdaSwitch:
    """Chooses an effort a prompt by how hard it looks to the model.

    Parameters
    ----------
    probe
        A fitted :class:`~fairtrial.lm.difficulty.probe.DifficultyProbe`; it needs a model to answer, but not to choose.
    levels
        Efforts, cheapest first.
    budget_tokens
        Mean cost a prompt, in the units of the levels' costs.
    escalate
        After an answer whose mean token log-probability lies below this, go one level up, once; ``None`` = never.

    Attributes
    ----------
    costs_ : (K,) mean cost of each level.
    price_ : what a token costs in accuracy; ``nan`` without a log.

    Examples
    --------
    >>> import numpy as np, pandas as pd
    >>> probe = DifficultyProbe.from_states(np.arange(4.0)[:, None], [0, 0, 1, 1])
    >>> log = pd.DataFrame({"score": [0.0, 0, 1, 1], "level": ["direct", "think"] * 2, "correct": [1, 1, 0, 1],
    ...                     "tokens": [1, 9, 1, 9], "prompt": list("aabb")})
    >>> switch = AdaSwitch(probe, [Effort("direct"), Effort("think")], budget_tokens=5).fit(log)
    >>> switch.choose([0.0, 1.0]).tolist()
    ['direct', 'think']
    """

    def __init__(
        self, probe: DifficultyProbe, levels: Sequence[Effort], *, budget_tokens: float, escalate: float | None = None
    ) -> None:
        names = [level.name for level in levels]
        if len(names) < 2 or len(set(names)) < len(names):
            raise InputError(f"levels {names}: give at least two efforts of different names")
        if not 0 < budget_tokens < math.inf:
            raise InputError(f"budget_tokens={budget_tokens}: give a positive number")
        self.probe = probe
        self.levels = list(levels)
        self.budget_tokens = budget_tokens
        self.escalate = escalate
        self.costs_ = np.array([level.worst_cost for level in levels], float)
        self.price_ = math.nan
        self._curves: list[Any] | None = None

    # -------------------------------------------------------------------------------------------------------------- fit

    def fit(self, log: pd.DataFrame) -> AdaSwitch:
        """Learn accuracy and cost of each level from logged answers.

        Parameters
        ----------
        log
            A row an answer: ``prompt``, ``level`` (a name), ``correct`` (0 to 1) and ``tokens``; every prompt at every
            level. ``score`` saves the pass of the model that the probe would make.

        Raises
        ------
        InputError
            A level the log lacks, or a prompt at some levels only; costs that are not positive; a budget below the
            cheapest level's cost.
        """
        from sklearn.isotonic import IsotonicRegression

        correct, tokens, scores = self.read_log(log)
        self.costs_ = tokens.mean(0)
        self._check_costs()
        self._curves = []
        for k, level in enumerate(self.levels):
            falling = IsotonicRegression(increasing=False, out_of_bounds="clip").fit(scores, correct[:, k])
            rising = IsotonicRegression(increasing=True, out_of_bounds="clip").fit(scores, correct[:, k])
            errors = [float(np.square(m.predict(scores) - correct[:, k]).sum()) for m in (falling, rising)]
            if errors[1] < errors[0] - 1e-9:
                warnings.warn(
                    f"level {level.name!r} is more often right on prompts that look harder: the score may not measure "
                    "difficulty here; its accuracy is taken not to rise",
                    UserWarning,
                    stacklevel=2,
                )
            self._curves.append(falling)
        self._bisect(scores)
        return self

    def read_log(self, log: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return correctness (n, K), tokens (n, K) and scores (n,) of the log's prompts."""
        log = check_log(log)
        names = [level.name for level in self.levels]
        if unknown := set(log["level"]) - set(names):
            raise UnknownNameError("level", sorted(map(str, unknown))[0], names)
        if missing := [name for name in names if name not in set(log["level"])]:
            raise InputError(f"log: no answer at level {missing[0]!r}")
        if (own := log["prompt"].isin(self.probe.reference_prompts_)).any():
            warnings.warn(
                f"{log.loc[own, 'prompt'].nunique()} prompts of the log are references of the probe and left out",
                UserWarning,
                stacklevel=3,
            )
            log = log[~own]
        wide = log.pivot_table(
            index="prompt", columns="level", values=["correct", "tokens"], aggfunc="mean", sort=False
        )
        if wide.isna().any(axis=None):
            prompt = wide.index[wide.isna().any(axis=1)][0]
            raise InputError(f"log: prompt {prompt!r} was not answered at every level")
        if "score" in log:
            scores = log.groupby("prompt", sort=False)["score"].first().loc[wide.index].to_numpy(float)
        else:
            scores = self.probe.predict([*wide.index])
        return wide["correct"][names].to_numpy(float), wide["tokens"][names].to_numpy(float), scores

    def _check_costs(self) -> None:
        if (np.diff(self.costs_) <= 0).any():
            told = ", ".join(f"{level.name} {cost:g}" for level, cost in zip(self.levels, self.costs_, strict=True))
            raise InputError(f"levels cost {told}: order them from the cheapest up")
        if not self.budget_tokens >= self.costs_[0]:
            raise InputError(
                f"budget_tokens={self.budget_tokens:g} is below the cheapest level, {self.levels[0].name!r}, "
                f"{self.costs_[0]:g} tokens: raise the budget"
            )

    def _bisect(self, scores: np.ndarray) -> None:
        """Find the price at which the log's scores cost the budget, and where a tie at that price is broken."""
        accuracy = self._accuracy(scores)

        def chosen(price: float) -> np.ndarray:
            return _best(accuracy, self.costs_, price)

        def cost(price: float) -> float:
            return float(self.costs_[chosen(price)].mean())

        low, high = 0.0, 1.0 / np.diff(self.costs_).min()  # at 1 a token saved even a sure answer is not bought
        if cost(low) <= self.budget_tokens:
            self.price_, self._dearer, self._from = 0.0, 0.0, math.inf
            return
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if cost(middle) > self.budget_tokens else (low, middle)
        self.price_, self._dearer = high, low
        # Many scores share a step of the curves and turn dearer at one price: the hardest do, while the budget lasts.
        cheap, dear = self.costs_[chosen(high)], self.costs_[chosen(low)]
        tied = np.flatnonzero(cheap != dear)
        order = tied[np.argsort(-scores[tied], kind="stable")]
        spent = cheap.mean() + np.cumsum(dear[order] - cheap[order]) / len(scores)
        count = int((spent <= self.budget_tokens + 1e-9).sum())
        self._from = scores[order[count - 1]] if count else math.inf
        while count and self._from in scores[order[count:]]:  # equal scores cannot be told apart
            count -= 1
            self._from = scores[order[count - 1]] if count else math.inf

    def _without_log(self, scores: np.ndarray) -> np.ndarray:
        """Give the hardest share of prompts like the probe's own the dearer of the two levels around the budget."""
        self._check_costs()
        k = int(np.searchsorted(self.costs_, self.budget_tokens, side="right")) - 1
        if k + 1 == len(self.costs_) or self.budget_tokens == self.costs_[k]:
            return np.full(len(scores), k)
        share = (self.budget_tokens - self.costs_[k]) / (self.costs_[k + 1] - self.costs_[k])
        return np.where(scores > np.quantile(self.probe.pool_scores_, 1 - share), k + 1, k)

    # ----------------------------------------------------------------------------------------------------------- choice

    def _accuracy(self, scores: np.ndarray) -> np.ndarray:
        """Return the foretold accuracy of each level, (n, K)."""
        assert self._curves is not None
        return np.stack([curve.predict(scores) for curve in self._curves], axis=1)

    def choose_index(self, scores: Any) -> np.ndarray:
        """Return the level of each score, (n,) of 0..K-1."""
        s = np.asarray(scores, float)
        if not np.isfinite(s).all():
            raise InputError("scores are not finite")
        if self._curves is None:
            return self._without_log(s)
        accuracy = self._accuracy(s)
        cheap, dear = (_best(accuracy, self.costs_, price) for price in (self.price_, self._dearer))
        return np.where((cheap != dear) & (s >= self._from), dear, cheap)

    def choose(self, scores: Any) -> np.ndarray:
        """Return the names of the levels that scores get, (n,)."""
        return np.array([level.name for level in self.levels])[self.choose_index(scores)]

    # ---------------------------------------------------------------------------------------------------------- answers

    def generate(self, prompt: str, *, seed: int = 0) -> Answer:
        """Answer one prompt at the effort its score asks for.

        The pass that the probe makes fills the cache that generation goes on from, as far as the level's own prompt is
        the same.
        """
        probe = self.probe
        if probe.model is None:
            raise InputError("the probe has no model: it can choose, not answer")
        (ids,) = probe.token_ids([prompt])
        states, cache = read_prompt(probe, ids)
        score = float(probe.predict(states[None], [len(ids)])[0])
        k = int(self.choose_index([score])[0])
        texts, tokens, confidence = self._answer(prompt, ids, cache, self.levels[k], seed)
        escalated = self.escalate is not None and confidence < self.escalate and k + 1 < len(self.levels)
        if escalated:
            k += 1
            _, cache = read_prompt(probe, ids)
            texts, more, _ = self._answer(prompt, ids, cache, self.levels[k], seed)
            tokens += more
        return Answer(
            _commonest(texts, self.levels[k].read), self.levels[k].name, score, tokens, tuple(texts), escalated
        )

    def _answer(
        self, prompt: str, ids: list[int], cache: Any, level: Effort, seed: int
    ) -> tuple[list[str], int, float]:
        """Return texts, tokens generated and the mean log-probability of a token."""
        model, tokenizer = self.probe.model, self.probe.tokenizer
        own = ids
        if level.system:
            (text,) = prompt_texts(tokenizer, [prompt], system=level.system)
            own = tokenizer(text, add_special_tokens=False)["input_ids"]
        shared = min(
            next((i for i, (a, b) in enumerate(zip(ids, own, strict=False)) if a != b), len(ids)), len(own) - 1
        )
        if shared < len(ids):  # generate wants at least one token to read
            cache.crop(shared - len(ids))
        device = model.get_input_embeddings().weight.device
        n = level.num_return_sequences
        sample = level.sampling or n > 1
        inputs = torch.tensor([own], device=device)
        if n > 1:
            cache.batch_repeat_interleave(n)
            inputs = inputs.repeat(n, 1)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), evaluation_mode(model):
            torch.manual_seed(seed)
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                **{cache_name(model): cache},
                max_new_tokens=level.max_new_tokens,
                do_sample=sample,
                output_logits=True,
                return_dict_in_generate=True,
                pad_token_id=_pad(tokenizer, model),
            )
        new = out.sequences[:, len(own) :]  # (n, T)
        logs = torch.stack(out.logits, 1).float().log_softmax(-1).gather(2, new[..., None])[..., 0]  # (n, T)
        real = new != _pad(tokenizer, model)
        real |= real.flip(1).cumsum(1).flip(1) > 0  # a pad token inside the text is text
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        return texts, int(real.sum()), float(logs[real].mean()) if bool(real.any()) else 0.0


def read_prompt(probe: DifficultyProbe, ids: Sequence[int]) -> tuple[torch.Tensor, Any]:
    """Read one prompt: return the states (L, d) the probe wants and the cache to go on from."""
    from transformers import DynamicCache

    model = probe.model
    _, blocks = find_blocks(model, probe.spec)
    kept: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(block: Any, args: tuple, output: Any) -> None:
            kept[layer] = (output[0] if isinstance(output, tuple) else output)[0, -1]

        return hook

    hooks = [blocks[layer].register_forward_hook(keep(layer)) for layer in probe.layers_]
    cache = DynamicCache(config=model.config)
    try:
        with torch.inference_mode(), evaluation_mode(model):
            row = torch.tensor([list(ids)], device=model.get_input_embeddings().weight.device)
            model(row, **{cache_name(model): cache}, use_cache=True, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([kept[layer].float().cpu() for layer in probe.layers_]), cache


def _best(accuracy: np.ndarray, costs: np.ndarray, price: float) -> np.ndarray:
    """Return argmax_k accuracy - price cost, the cheapest of equals, (n,)."""
    value = accuracy - price * costs
    return (value >= value.max(1, keepdims=True) - 1e-12).argmax(1)


def _commonest(texts: Sequence[str], read: Callable[[str], str] | None) -> str:
    """Return the first text whose answer is the commonest one."""
    answers = [(read or _last_line)(text) for text in texts]
    winner = Counter(answers).most_common(1)[0][0]
    return texts[answers.index(winner)]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].casefold() if lines else ""


def _pad(tokenizer: Any, model: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, model.config.eos_token_id):
        if isinstance(token, int):
            return token
    return 0
