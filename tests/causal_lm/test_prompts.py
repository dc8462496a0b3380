import pytest

from fairtrial.causal_lm.prompts import following, prompt_texts
from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import InputError


def test_a_chat_template_gets_system_shots_and_question():
    tokenizer = tiny_causal_lm()[1]
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert prompt_texts(tokenizer, ["q", "r"], system="s", shots=[("a", "b")]) == [
        "<system>s<user>a<assistant>b<user>q<assistant>",
        "<system>s<user>a<assistant>b<user>r<assistant>",
    ]
    assert prompt_texts(tokenizer, ["q"], start="It is") == ["<user>q<assistant>It is"]
    assert following(tokenizer, ["w2"]) == ["w2"]
    assert following(tokenizer, ["w2"], start="It is") == [" w2"]


def test_without_a_template_questions_follow_each_other():
    tokenizer = tiny_causal_lm()[1]
    assert prompt_texts(tokenizer, ["w5"], system="w9", shots=[("w1", "w2"), ("w3", "w4")]) == [
        "w9\n\nw1 w2\n\nw3 w4\n\nw5"
    ]
    assert prompt_texts(tokenizer, ["w5"], start="It is") == ["w5 It is"]


def test_what_is_no_list_of_prompts_is_refused():
    tokenizer = tiny_causal_lm()[1]
    for prompts, word in (
        ("w1", "list of"),
        ([], "list of"),
        (["w1", " "], "prompt 1"),
        ([None], "prompt 0"),
        (None, "list of"),
    ):
        with pytest.raises(InputError, match=word):
            prompt_texts(tokenizer, prompts)
    assert prompt_texts(tokenizer, (text for text in ["w1", "w2"])) == ["w1", "w2"]


def test_a_start_token_stays_where_the_tokenizer_puts_one():
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_causal_lm()[1]
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    assert prompt_texts(tokenizer, ["w5"]) == ["w5"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    text = prompt_texts(tokenizer, ["w5 w6"])[0]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == tokenizer("w5 w6")["input_ids"]
