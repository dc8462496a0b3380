from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from fairtrial.chat.cache import ReplyCache
from fairtrial.chat.replies import Answer


def test_what_is_read_while_others_write_is_whole(tmp_path):
    request, answers = {"prompt": "long"}, [Answer(letter * 200_000) for letter in "abcd"]
    ReplyCache(tmp_path).put(request, answers[0])

    def work(answer):
        for _ in range(10):
            ReplyCache(tmp_path).put(request, answer)
            assert ReplyCache(tmp_path).get(request) in answers

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, answers))
    assert [file.suffix for file in tmp_path.rglob("*.*")] == [".json"]


def test_what_a_killed_writer_leaves_is_no_reply(tmp_path):
    cache, request = ReplyCache(tmp_path), {"prompt": "p"}
    cache.put(request, Answer("whole"))
    [file] = tmp_path.rglob("*.json")
    (file.parent / "cut.part").write_text('{"request": {')
    assert cache.get(request) == Answer("whole")
    for text in ("", "[]", '{"answer": 3}', '{"answer": {"words": "x"}}', file.read_text()[:-9]):
        file.write_text(text)
        assert cache.get(request) is None


def test_the_order_of_a_requests_parts_does_not_matter(tmp_path):
    cache = ReplyCache(tmp_path / "new" / "folder")
    cache.put({"a": 1, "b": [1, 2]}, Answer("x", 1, 2, "length"))
    assert cache.get({"b": [1, 2], "a": 1}) == Answer("x", 1, 2, "length")
    assert cache.get({"a": 1, "b": [2, 1]}) is None
