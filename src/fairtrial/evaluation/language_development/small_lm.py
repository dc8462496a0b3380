"""A small language model trained on a corpus from scratch: what a bench of that corpus is for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fairtrial.errors import InputError
from fairtrial.seeds import derive, torch_generator

_CONTEXT = 128  # tokens
_WARM_UP = 0.05  # share of the steps


def train_small_lm(
    utterances: Sequence[str],
    *,
    vocabulary: int = 2048,
    width: int = 128,
    layers: int = 4,
    epochs: float = 1.0,
    batch: int = 8,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Train a Llama-shaped model with tied embeddings and a byte-level BPE tokenizer on utterances.

    Parameters
    ----------
    utterances : texts; they are shuffled, put one after the other behind a start token each, and cut into windows.
    vocabulary : tokens of the tokenizer.
    width, layers : of the model; four heads.
    epochs : passes over the text; 0 returns the untrained model.
    batch : windows of 128 tokens a step.
    learning_rate : of AdamW, warmed up and then lowered to zero by a cosine.
    seed : of the weights and of the order of utterances.

    Returns
    -------
    model, tokenizer
        Of transformers; both have ``save_pretrained``.

    Raises
    ------
    InputError
        The text is shorter than one window.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(utterances, vocabulary)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.bos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "small lm"))
        model = LlamaForCausalLM(config)
    if epochs > 0:
        _train(model, tokenizer, utterances, epochs, batch, learning_rate, seed)
    return model.eval(), tokenizer


def _tokenizer(utterances: Sequence[str], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(utterances, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<s>")


def _train(
    model: Any, tokenizer: Any, utterances: Sequence[str], epochs: float, batch: int, learning_rate: float, seed: int
) -> None:
    encoded = tokenizer(list(utterances), add_special_tokens=False)["input_ids"]
    generator = torch_generator(seed, "small lm", "order")
    total = sum(map(len, encoded)) + len(encoded)
    steps = math.ceil(epochs * total / (batch * _CONTEXT))
    if total < _CONTEXT:
        raise InputError(f"the text has {total} tokens, fewer than one window of {_CONTEXT}: give more text")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    model.train()
    stream = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        while len(stream) < batch * _CONTEXT:  # the next pass over the utterances, in another order
            order = torch.randperm(len(encoded), generator=generator).tolist()
            flat = [token for i in order for token in (tokenizer.bos_token_id, *encoded[i])]
            stream = torch.cat([stream, torch.tensor(flat)])
        ids, stream = stream[: batch * _CONTEXT].view(batch, _CONTEXT), stream[batch * _CONTEXT :]
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _rate(step: int, steps: int) -> float:
    warm = max(1, round(_WARM_UP * steps))
    return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))
