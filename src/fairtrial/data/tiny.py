"""A random language model and texts of made-up words: what smoke runs and tests use instead of a sample.

The model has learned nothing; it has the shape of a Llama with grouped queries, so that all code paths run in
milliseconds.
"""

from __future__ import annotations

from typing import Any

from fairtrial.seeds import generator

VOCABULARY = 64  # words


def tiny_causal_lm(*, seed: int = 0, layers: int = 2) -> tuple[Any, Any]:
    """Return a random Llama (d 32, hidden 64, 4 query and 2 key-value heads) and a tokenizer of 64 words.

    >>> model, tokenizer = tiny_causal_lm()
    >>> tokenizer("w3 w5")["input_ids"], model.config.num_hidden_layers
    ([3, 5], 2)
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.eval(), PreTrainedTokenizerFast(tokenizer_object=words)


def tiny_texts(*, documents: int = 24, words: int = 200, seed: int = 0) -> list[str]:
    """Return documents of words drawn from a Zipf law, each with its own favourites.

    >>> len(tiny_texts()), tiny_texts()[0].split()[0][0]
    (24, 'w')
    """
    rng = generator(seed, "tiny_texts")
    weights = 1 / (1 + rng.permuted([[*range(VOCABULARY)]] * documents, axis=1))  # (documents, words)
    weights /= weights.sum(axis=1, keepdims=True)
    return [" ".join(f"w{i}" for i in rng.choice(VOCABULARY, size=words, p=row)) for row in weights]
