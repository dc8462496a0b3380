"""Chat with a causal language model on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.loading import load
from fairtrial.chat.base import Chat
from fairtrial.chat.replies import Answer, ChatError, Request
from fairtrial.errors import InputError
from fairtrial.options import checked_count
from fairtrial.seeds import derive


class LocalChat(Chat):
    """Chat with a causal language model of transformers, in batches padded at the left.

    A conversation is written with the tokenizer's chat template; without one, as its contents with blank lines between.
    A reply does not depend on what shares its batch, but for rounding: a sample's noise comes from its own seed.

    Parameters
    ----------
    model
        What :func:`fairtrial.causal_lm.loading.load` reads, a folder or a GGUF file, or (model, tokenizer).
    device, dtype
        As in ``load``, for a path; a model given as such stays where and what it is.
    cache
        A folder for replies; ``None`` = none are kept. The key holds a digest of the weights.
    batch_size
        Conversations at a time.

    Raises
    ------
    InputError
        The model cannot be loaded.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> chat = LocalChat(tiny_causal_lm())
    >>> reply = chat.complete("w3 w5", max_tokens=4)
    >>> reply.prompt_tokens, len(reply.text.split())
    (2, 4)
    """

    def __init__(
        self,
        model: str | Path | tuple[Any, Any],
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        cache: str | Path | None = None,
        batch_size: int = 8,
    ) -> None:
        self.batch_size = checked_count(batch_size, "batch_size")
        super().__init__(cache)
        self.model, self.tokenizer = model if isinstance(model, tuple) else load(model, device=device, dtype=dtype)

    def probe(self) -> None:
        """Return at once: a model that is loaded can be asked."""

    @cached_property
    def _fingerprint(self) -> str:
        """Digest of what the model and its tokenizer are."""
        digest = hashlib.sha256()
        config = {name: value for name, value in self.model.config.to_dict().items() if name != "_name_or_path"}
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        digest.update(json.dumps([config, self.tokenizer.chat_template, vocabulary], default=str).encode())
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def _identity(self) -> Mapping[str, Any]:
        return {"local": self._fingerprint}

    def _ask(self, requests: Sequence[Request]) -> Generator[tuple[Request, Answer | ChatError]]:
        window = getattr(self.model.config, "max_position_embeddings", None)
        prompts: list[tuple[Request, list[int]]] = []
        for request in requests:
            ids = self._token_ids(request.messages)
            if window is not None and len(ids) + request.max_tokens > window:
                reason = f"{len(ids)} tokens of prompt and {request.max_tokens} of reply exceed the window, {window}"
                yield request, ChatError(f"{reason}: shorten the prompt, or give a smaller max_tokens")
            else:
                prompts.append((request, ids))
        prompts.sort(key=lambda prompt: len(prompt[1]))  # little padding
        for at in range(0, len(prompts), self.batch_size):
            batch = prompts[at : at + self.batch_size]
            answers = self._generate([request for request, _ in batch], [ids for _, ids in batch])
            for (request, _), answer in zip(batch, answers, strict=True):
                self._keep(request, answer)
                yield request, answer

    def _token_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        if any(not isinstance(message["content"], str) for message in messages):
            raise InputError("a local language model reads text: give messages whose content is text")
        if self.tokenizer.chat_template is None:
            ids = self.tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
        else:  # the template writes the special tokens
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise InputError("a prompt has no tokens: give some text")
        return ids

    @torch.inference_mode()
    def _generate(self, requests: list[Request], prompts: list[list[int]]) -> list[Answer]:
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [self.tokenizer.eos_token_id if ends is None else ends]
        ends = [token for token in ends if token is not None]
        width, limit, temperature = max(map(len, prompts)), requests[0].max_tokens, requests[0].temperature
        padding = next(iter(ends), 0)  # never seen: the mask hides it
        ids = torch.tensor([[padding] * (width - len(row)) + row for row in prompts])  # (B, T)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        noise = [_Gumbel(temperature, [_noise_seed(request) for request in requests])] if temperature > 0 else []
        with evaluation_mode(self.model):
            output = self.model.generate(
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                logits_processor=LogitsProcessorList(noise),
                generation_config=GenerationConfig(
                    do_sample=False,  # the greatest logit, or the greatest noisy one
                    repetition_penalty=1.0,
                    max_new_tokens=limit,
                    eos_token_id=ends or None,
                    pad_token_id=padding,
                ),
            )
        answers = []
        for row, prompt in zip(output[:, width:].tolist(), prompts, strict=True):  # (B, <= max_tokens)
            end = next((at for at, token in enumerate(row) if token in ends), None)
            said = row if end is None else row[: end + 1]
            text = self.tokenizer.decode(said, skip_special_tokens=True)
            answers.append(Answer(text, len(prompt), len(said), "length" if end is None else "stop"))
        return answers


class _Gumbel(LogitsProcessor):
    """Makes the greatest logit a sample: argmax(logits / temperature + Gumbel noise) has the softmax's distribution.

    Each row has a generator of its own, which sampling with one for the batch would not.
    """

    def __init__(self, temperature: float, seeds: list[int]) -> None:
        self.temperature = temperature
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        uniform = torch.stack([torch.rand(scores.shape[1], generator=one) for one in self.generators])  # (B, V)
        noise = -torch.log(-torch.log(uniform.clamp(min=1e-30)))
        return scores.float() / self.temperature + noise.to(scores.device)


def _noise_seed(request: Request) -> int:
    return derive(request.seed or 0, "chat", request.draw, request.conversation)
