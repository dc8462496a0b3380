import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.sentences import SentenceEncoder

TEXTS = ["four words", "one", "several more words of another sentence than these"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", *sorted({word for text in TEXTS for word in text.split()})]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    BertModel(
        BertConfig(
            vocab_size=len(words), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
    ).save_pretrained(folder)
    return folder


def test_an_embedding_has_length_one_and_does_not_depend_on_its_batch(folder):
    together = SentenceEncoder(folder)(TEXTS)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    alone = np.concatenate([SentenceEncoder(folder, batch_size=1)([text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-6)


def test_a_long_sentence_is_cut(folder):
    cut = SentenceEncoder(folder, max_length=2)(["several more words", "several more"])
    np.testing.assert_allclose(cut[0], cut[1], atol=1e-6)


def test_no_texts_give_no_rows(folder):
    assert SentenceEncoder(folder)([]).shape == (0, 8)


def test_one_string_is_refused(folder):
    with pytest.raises(InputError, match="list of strings"):
        SentenceEncoder(folder)("one")


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(InputError, match=str(tmp_path)):
        SentenceEncoder(tmp_path)
