import json
import resource
import threading
from pathlib import Path

import pytest

from locomo.errors import VerdictCacheError
from locomo.judging.cache import StoredVerdict, VerdictCache, verdict_key
from locomo.judging.verdict import Verdict

CONTENT = {"endpoint": "e", "prompt": "p", "model": "m", "question": "q", "gold": "g", "prediction": "a", "run": 1}


def stored(name: str, reply: str = "said “so”\n") -> StoredVerdict:
    return StoredVerdict(name, Verdict.WRONG, "judge-2026-01-01", reply)


def test_verdicts_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "run" / "verdicts.jsonl"
    with VerdictCache(path) as cache:
        assert cache.get("a") is None
        cache.put(stored("a"))
        cache.put(stored("b"))
        assert cache.get("a") == stored("a")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["key"] for line in lines] == ["a", "b"]
    assert lines[0]["verdict"] == "wrong"
    with VerdictCache(path) as cache:
        assert len(cache) == 2
        assert cache.get("b") == stored("b")


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    with VerdictCache(path) as cache:
        cache.put(stored("a"))
        cache.put(stored("b"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        with VerdictCache(path) as cache:
            assert (len(cache), cache.get("a"), cache.get("b")) == (1, stored("a"), None)
            cache.put(stored("b"))
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line", ['{"key": "b"', "[]", '{"key": "b", "verdict": "maybe", "model": "m", "reply": ""}', '{"verdict": "wrong"}']
)
def test_damage_before_the_last_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "verdicts.jsonl"
    with VerdictCache(path) as cache:
        cache.put(stored("a"))
    content = path.read_text() + line + "\n"
    path.write_text(content + content.splitlines()[0] + "\n")
    with pytest.raises(VerdictCacheError, match="line 2, is no verdict"):
        VerdictCache(path)


def test_one_user_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    with VerdictCache(path), pytest.raises(VerdictCacheError, match="in use by another process"):
        VerdictCache(path)
    VerdictCache(path).close()


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerdictCacheError, match="cannot open"):
        VerdictCache(tmp_path)


def test_a_full_disk_keeps_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with VerdictCache(path) as cache:
        cache.put(stored("a"))
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))  # ten bytes of the next line still go in
        try:
            with pytest.raises(VerdictCacheError, match="File too large; 1 verdicts are kept"):
                cache.put(stored("b"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.stat().st_size == size
        cache.put(stored("c"))
    with VerdictCache(path) as cache:
        assert [cache.get(name) is not None for name in "abc"] == [True, False, True]


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    with VerdictCache(path) as cache:

        def put(thread: int) -> None:
            for number in range(25):
                cache.put(stored(f"{thread}/{number}", "x" * 10_000))

        threads = [threading.Thread(target=put, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with VerdictCache(path) as cache:
        assert len(cache) == 100


def test_the_key_is_of_everything_that_a_verdict_depends_on() -> None:
    other = {"run": 2} | {name: "other" for name in CONTENT if name != "run"}
    keys = {verdict_key(**CONTENT)} | {verdict_key(**CONTENT | {name: other[name]}) for name in CONTENT}  # type: ignore[arg-type]
    assert len(keys) == 1 + len(CONTENT)
    # sha256sum of ["e", "p", "m", "q", "g", "a", 1]
    assert verdict_key(**CONTENT) == "cfc5b97c991449eb280afa1d54e1e10081747ddd7b2fc067efb61c0466366b3e"  # type: ignore[arg-type]
    moved = CONTENT | {"question": "qg", "gold": ""}
    assert verdict_key(**moved) != verdict_key(**CONTENT)  # type: ignore[arg-type]
    assert len(verdict_key(**CONTENT | {"prediction": "\ud83d"})) == 64  # type: ignore[arg-type]
