import numpy as np
import pytest
import torch

from fairtrial.errors import InputError
from fairtrial.lm.low_precision import read_tokens, token_batches
from fairtrial.lm.low_precision.trial import LowPrecisionParams, check, parts, tokens, trial
from fairtrial.testing import check_trial

TINY = dict(trial.presets["smoke"])


def test_the_trial_is_sound():
    check_trial(trial)


def test_tokens_held_out_are_not_trained_on():
    params = LowPrecisionParams(**TINY)
    data = tokens(None, params)
    ids = read_tokens_of_tiny()
    assert np.array_equal(data["train"], ids[: len(data["train"])])
    held = ids[len(data["train"]) :].tobytes()
    for fold in data["folds"]:
        assert fold.shape == (2, 16)
        assert all(row.numpy().astype(np.uint8).tobytes() in held for row in fold)


def read_tokens_of_tiny():
    from fairtrial.data.tiny import tiny_texts

    return read_tokens(tiny_texts(documents=8))


def test_users_give_files_of_texts_or_ids(tmp_path):
    ids = (np.arange(4000) % 300).astype(np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    (tmp_path / "text.txt").write_text("A sentence, and another. " * 60)
    for name, size in (("ids.bin", 300), ("text.txt", 256)):
        params = LowPrecisionParams(**{**TINY, "text": str(tmp_path / name)})
        check(params)
        assert tokens(None, params)["size"] == size
    widest = parts(LowPrecisionParams(**{**TINY, "widths": (64,)}))[1]
    assert widest.factors[2].values == (32, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": "no-such-text"}, "no such file"),
        ({"tokenizer": "no-such-tokenizer"}, "no such folder"),
        ({"heads": 3}, "heads of even length"),
        ({"rates": (0.0,)}, "positive learning rates"),
        ({"validation": 4000}, "less than one batch"),
    ],
)
def test_what_cannot_be_run_is_refused_before_any_work(change, message):
    with pytest.raises(InputError, match=message):
        check(LowPrecisionParams(**{**TINY, **change}))


# --------------------------------------------------------------------------------------------------------------- tokens


def test_ids_are_mapped_and_texts_become_bytes_or_tokens(tmp_path):
    np.arange(50, dtype=np.uint32).tofile(tmp_path / "a.bin")
    mapped = read_tokens(tmp_path / "a.bin", dtype="uint32")
    assert isinstance(mapped, np.memmap)
    assert mapped.tolist() == list(range(50))
    assert bytes(read_tokens(["é", "b"])) == "é\n\nb".encode()
    tokenizer = lambda text, **_: {"input_ids": [len(text), 7]}  # noqa: E731
    assert read_tokens(["abc"], tokenizer).tolist() == [3, 7]


def test_windows_are_runs_of_the_text_and_follow_the_seed():
    ids = np.arange(1000, dtype=np.uint16)
    one, two, other = (torch.stack([*token_batches(ids, batch=3, length=5, steps=4, seed=seed)]) for seed in (0, 0, 1))
    assert one.dtype == torch.int64
    assert (one.diff(dim=-1) == 1).all()
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    whole = next(token_batches(np.arange(4, dtype=np.uint8), batch=1, length=4, steps=1))
    assert whole.tolist() == [[0, 1, 2, 3]]


def test_a_stream_is_packed_in_its_order():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from (torch.tensor([0, 1, 2]), [3, 4, 5, 6], 7, np.arange(8, 30))

    batches = [*token_batches(Stream(), batch=2, length=4, steps=3)]
    assert torch.cat(batches).flatten().tolist() == list(range(24))
    with pytest.raises(InputError, match="ended after 3 of 4 batches"):
        [*token_batches(Stream(), batch=2, length=4, steps=4)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_batches(np.arange(9), batch=2, length=5, steps=1), "less than one batch"),
        (lambda: token_batches(np.arange(9), batch=1, length=5, steps=0), "steps=0"),
        (lambda: token_batches(np.arange(9), batch=1.0, length=5, steps=1), "batch=1.0"),
        (lambda: token_batches(np.ones(9), batch=1, length=5, steps=1), "whole numbers"),
        (lambda: next(token_batches([0.5], batch=1, length=1, steps=1)), "give ids"),
        (lambda: read_tokens("none.bin"), "no such file"),
        (lambda: read_tokens(["a"], dtype="int8"), "dtype='int8'"),
        (lambda: read_tokens([" "]), "no text"),
    ],
)
def test_what_are_no_tokens_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_a_file_of_half_an_id_is_refused(tmp_path):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match="another dtype"):
        read_tokens(tmp_path / "odd.bin")
