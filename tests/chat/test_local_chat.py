from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from fairtrial.chat import ChatError, LocalChat, Usage
from fairtrial.data.tiny import VOCABULARY, tiny_causal_lm
from fairtrial.errors import InputError

PROMPTS = ["w3 w5 w8", "w2", "w9 w4 w7 w7 w1 w30", "w11 w12", "w40 w41 w42 w43 w44"]


class Grade(BaseModel):
    score: int


@pytest.fixture(scope="module")
def tiny():
    return tiny_causal_lm()


def alone(tiny, prompt, tokens):
    """The likeliest continuation, one forward pass a token."""
    model, tokenizer = tiny
    ids = tokenizer(prompt)["input_ids"]
    said: list[int] = []
    with torch.inference_mode():
        while len(said) < tokens and model.config.eos_token_id not in said:
            said.append(int(model(torch.tensor([ids + said])).logits[0, -1].argmax()))
    return tokenizer.decode(said, skip_special_tokens=True)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_replies_are_the_likeliest_continuations_whatever_the_batch(tiny, batch_size):
    replies = LocalChat(tiny, batch_size=batch_size).complete_many(PROMPTS, max_tokens=6)
    assert [reply.text for reply in replies] == [alone(tiny, prompt, 6) for prompt in PROMPTS]
    assert [reply.prompt_tokens for reply in replies] == [3, 1, 6, 2, 5]


@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_sample_does_not_depend_on_its_batch_nor_on_global_state(tiny, batch_size):
    state = torch.random.get_rng_state()
    chat = LocalChat(tiny, batch_size=batch_size)
    samples = [reply.text for reply in chat.complete_many(PROMPTS, max_tokens=6, temperature=1.0, seed=3)]
    singly = [chat.complete(prompt, max_tokens=6, temperature=1.0, seed=3).text for prompt in PROMPTS]
    assert samples == singly
    assert torch.equal(state, torch.random.get_rng_state())
    assert samples != [reply.text for reply in chat.complete_many(PROMPTS, max_tokens=6, temperature=1.0, seed=4)]


def test_samples_follow_the_softmax(tiny):
    model, tokenizer = tiny
    temperature, draws = 0.1, 3000
    replies = LocalChat(tiny, batch_size=1000).complete_many(
        ["w3 w5"] * draws, max_tokens=1, temperature=temperature, seed=0
    )
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer("w3 w5")["input_ids"]])).logits[0, -1]
    probability = torch.softmax(logits / temperature, dim=0).numpy()
    seen = np.bincount([int(reply.text[1:]) for reply in replies], minlength=VOCABULARY)
    chi_square = ((seen - draws * probability) ** 2 / (draws * probability)).sum()
    assert abs(chi_square - (VOCABULARY - 1)) < 5 * np.sqrt(2 * (VOCABULARY - 1))


def test_the_end_token_ends_a_reply_and_is_counted(tiny):
    model, tokenizer = tiny_causal_lm()
    first, second = (int(word[1:]) for word in alone(tiny, PROMPTS[0], 2).split())
    model.generation_config.eos_token_id = [second, 63]
    reply = LocalChat((model, tokenizer)).complete(PROMPTS[0], max_tokens=9)
    assert reply.completion_tokens == (1 if first == second else 2)
    assert reply.finish == "stop"
    assert LocalChat(tiny).complete(PROMPTS[0], max_tokens=1).finish == "length"


def test_a_chat_template_is_used(tiny):
    model, tokenizer = tiny_causal_lm()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} w60 {% endfor %}{{ 'w61' if add_generation_prompt }}"
    )
    messages = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
    reply = LocalChat((model, tokenizer)).complete(messages, max_tokens=5)
    assert reply.text == alone(tiny, "w1 w2 w60 w3 w60 w61", 5)
    assert LocalChat(tiny).complete(messages, max_tokens=5).text == alone(tiny, "w1 w2 w3", 5)


def test_replies_are_kept_and_the_weights_are_in_the_key(tmp_path):
    model, tokenizer = tiny_causal_lm()
    chat = LocalChat((model, tokenizer), cache=tmp_path)
    first = chat.complete_many(PROMPTS, max_tokens=4)
    again = LocalChat(tiny_causal_lm(), cache=tmp_path)
    assert [reply.text for reply in again.complete_many(PROMPTS, max_tokens=4)] == [reply.text for reply in first]
    assert again.usage == Usage(cached=5)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert not LocalChat((model, tokenizer), cache=tmp_path).complete(PROMPTS[0], max_tokens=4).cached


def test_an_interrupted_call_keeps_the_batches_that_came(tiny, tmp_path):
    def interrupt(done, _):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalChat(tiny, cache=tmp_path, batch_size=1).complete_many(PROMPTS, max_tokens=2, progress=interrupt)
    again = LocalChat(tiny, cache=tmp_path)
    again.complete_many(PROMPTS, max_tokens=2)
    assert (again.usage.cached, again.usage.requests) == (3, 2)


def test_a_prompt_beyond_the_window_costs_the_others_nothing(tiny):
    chat = LocalChat(tiny)
    long, short = chat.complete_many(["w1 " * 510, "w1"], max_tokens=4)
    assert isinstance(long, ChatError)
    assert "510 tokens of prompt and 4 of reply exceed the window, 512" in str(long)
    assert short.text
    assert chat.usage == Usage(requests=1, prompt_tokens=1, completion_tokens=4, failed=1)


def test_a_model_that_cannot_write_an_object_is_asked_twice(tiny):
    chat = LocalChat(tiny)
    [reply] = chat.complete_many(["w3"], schema=Grade, max_tokens=3)
    assert isinstance(reply, ChatError)
    assert reply.raw
    assert "it was cut at max_tokens" in str(reply)
    assert chat.usage.requests == 2


def test_a_folder_is_loaded(tiny, tmp_path):
    for part in tiny:
        part.save_pretrained(tmp_path / "model")
    chat = LocalChat(tmp_path / "model", dtype=torch.float64)
    assert chat.model.dtype == torch.float64
    assert chat.complete(PROMPTS[0], max_tokens=6).text == alone(tiny, PROMPTS[0], 6)


@pytest.mark.gpu
def test_replies_are_the_same_on_a_gpu(tiny):
    model, tokenizer = tiny_causal_lm()
    there = LocalChat((model.to("cuda"), tokenizer))
    for temperature in (0.0, 1.0):
        here = LocalChat(tiny).complete_many(PROMPTS, max_tokens=6, temperature=temperature)
        assert there.complete_many(PROMPTS, max_tokens=6, temperature=temperature) == here


def test_bad_input_is_named(tiny, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        LocalChat(tmp_path / "nowhere")
    with pytest.raises(InputError, match="batch_size"):
        LocalChat(tiny, batch_size=0)
    with pytest.raises(InputError, match="no tokens"):
        LocalChat(tiny).complete("")
    with pytest.raises(InputError, match="reads text"):
        LocalChat(tiny).complete([{"role": "user", "content": [{"type": "image_url"}]}])
