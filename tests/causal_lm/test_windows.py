from __future__ import annotations

import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fairtrial.causal_lm.windows import read_texts, windows
from fairtrial.errors import InputError

TEXTS = ["abc def ghij abc", "j i", "hij abc deff gab cde " * 8]


@pytest.fixture
def with_start(tokenizer):
    """The tokenizer, putting <s> before every text."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def test_merged_windows_are_the_packed_stream(tokenizer):
    cut = windows(tokenizer, TEXTS, 8)
    stream = [t for text in (TEXTS[0] + "\n\n", TEXTS[1] + "\n\n", TEXTS[2]) for t in tokenizer(text)["input_ids"]]
    n = len(stream) // 8
    assert cut.ids.dtype == torch.int64
    assert cut.ids.tolist() == [stream[8 * i : 8 * i + 8] for i in range(n)]


def test_a_merged_window_belongs_to_the_document_it_begins_in(tokenizer):
    cut = windows(tokenizer, TEXTS, 3)
    owners = [
        i
        for i, text in enumerate([TEXTS[0] + "\n\n", TEXTS[1] + "\n\n", TEXTS[2]])
        for _ in tokenizer(text)["input_ids"]
    ]
    assert cut.documents.tolist() == owners[::3][: len(cut.ids)]


def test_unmerged_windows_hold_one_document_each(tokenizer):
    cut = windows(tokenizer, TEXTS, 5, merge=False)
    lengths = [len(tokenizer(text)["input_ids"]) for text in TEXTS]
    assert torch.bincount(cut.documents, minlength=3).tolist() == [length // 5 for length in lengths]
    for row, document in zip(cut.ids, cut.documents, strict=True):
        assert tokenizer.decode(row) in TEXTS[document]


def test_every_window_begins_as_the_tokenizer_begins_a_text(tokenizer, with_start):
    plain, cut = windows(tokenizer, TEXTS, 7), windows(with_start, TEXTS, 8)
    assert (cut.ids[:, 0] == 0).all()
    assert torch.equal(cut.ids[:, 1:], plain.ids)
    assert torch.equal(cut.documents, plain.documents)


def test_a_text_of_exactly_one_window_is_one_window(tokenizer):
    n = len(tokenizer(TEXTS[0])["input_ids"])
    assert windows(tokenizer, TEXTS[:1], n).ids.shape == (1, n)


def test_files_and_folders_are_read_in_the_order_of_their_names(tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text("über alles", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    (tmp_path / "c.md").write_text("not read")
    assert read_texts(tmp_path) == ["one", "two", "über alles"]
    assert read_texts(tmp_path / "a.jsonl") == ["one", "two"]
    assert read_texts(str(tmp_path / "b.txt")) == ["über alles"]
    assert read_texts(("one", " ", "two")) == ["one", "two"]
    (tmp_path / "d.txt").write_text(TEXTS[2])
    assert torch.equal(windows(tokenizer, tmp_path / "d.txt", 4).ids, windows(tokenizer, TEXTS[2:], 4).ids)


def test_lines_end_at_newlines_alone_and_a_byte_order_mark_is_no_text(tmp_path):
    texts = ["one\u2028two", "three\x85four\u2029five"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert read_texts(tmp_path / "a.jsonl") == texts
    (tmp_path / "b.txt").write_text("\ufeffplain", encoding="utf-8")
    assert read_texts(tmp_path / "b.txt") == ["plain"]


# ---------------------------------------------------------------- bad input


def test_calibration_shorter_than_one_window_is_refused(tokenizer):
    with pytest.raises(InputError, match=r"together have \d+ tokens, less than one window of 500"):
        windows(tokenizer, TEXTS, 500)
    with pytest.raises(InputError, match="longest of the texts has"):
        windows(tokenizer, TEXTS[:2], 20, merge=False)


@pytest.mark.parametrize("window", [0, 1])
def test_a_window_without_a_prediction_is_refused(tokenizer, window):
    with pytest.raises(InputError, match="leaves no room"):
        windows(tokenizer, TEXTS, window)


def test_a_window_of_the_start_token_alone_is_refused(with_start):
    assert windows(with_start, TEXTS, 2).ids.shape[1] == 2
    with pytest.raises(InputError, match="take at least 3"):
        windows(with_start, TEXTS, 1)


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_empty_texts_are_refused(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    for source in (tmp_path, tmp_path / "a.txt", [], [" "]):
        with pytest.raises(InputError, match="no text in it"):
            read_texts(source)


def test_bytes_that_are_not_utf8_name_the_place(tmp_path):
    (tmp_path / "a.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(InputError, match=r"a\.txt: not UTF-8 at byte 1"):
        read_texts(tmp_path / "a.txt")


@pytest.mark.parametrize("line", ['{"txt": "x"}', "plain", '["text"]', json.dumps({"text": 3})])
def test_a_line_without_text_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line)
    with pytest.raises(InputError, match=r"a\.jsonl, line 2"):
        read_texts(tmp_path / "a.jsonl")


def test_what_is_no_text_file_is_refused(tmp_path):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    for source in (tmp_path / "a.pdf", tmp_path / "none", "The text itself."):
        with pytest.raises(InputError, match=r"not a \.txt or \.jsonl file"):
            read_texts(source)
    with pytest.raises(InputError, match="text 1 is a int"):
        read_texts(["a", 1])
