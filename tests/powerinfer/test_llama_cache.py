"""Caches of prompts: what they find, what they drop, and what a damaged file does."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, FileError, Llama, LlamaCache, LlamaDiskCache, LlamaRAMCache, LlamaState
from powerinfer._engine.context import ContextState
from powerinfer.compat import llama_cache
from powerinfer.compat.llama_cache import BaseLlamaCache

OpenLlama = Callable[..., Llama]
PROMPT = "the tree and the water and the house"


def state(ids: list[int], size: int = 100, model: str = "m") -> LlamaState:
    context = ContextState(np.array(ids, np.int32), bytes(size), np.ones((1, 4), np.float32))
    return LlamaState(context, None, model)


@pytest.fixture(params=["ram", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> BaseLlamaCache:
    return LlamaRAMCache() if request.param == "ram" else LlamaDiskCache(tmp_path / "cache")


def test_what_is_found(cache: BaseLlamaCache) -> None:
    assert [1, 2] not in cache
    with pytest.raises(KeyError):
        cache[[1, 2]]
    cache[[1, 2, 3]] = state([1, 2, 3])
    cache[[1, 5]] = state([1, 5], model="other")
    assert [1, 2, 9] in cache and [7] not in cache
    assert cache[[1, 2, 9]].input_ids.tolist() == [1, 2, 3]
    assert cache[[1, 5, 9]].input_ids.tolist() == [1, 5]
    assert cache.lookup([1, 5, 9], "m").input_ids.tolist() == [1, 2, 3]
    with pytest.raises(KeyError):
        cache.lookup([1, 5, 9], "nobody's")
    found = cache[[1, 2]]
    assert found.llama_state == bytes(100) and found.model == "m" and found.llama_state_size == 100
    assert np.array_equal(found.context.rows, np.ones((1, 4), np.float32))


def test_a_longer_entry_replaces_its_beginning(cache: BaseLlamaCache) -> None:
    cache[[1, 2]] = state([1, 2])
    small = cache.cache_size
    cache[[1, 2, 3]] = state([1, 2, 3])
    assert 0 < cache.cache_size < 2 * small
    cache[[1, 2]] = state([1, 2], model="other")
    assert cache.lookup([1, 2], "m").n_tokens == 3


def test_the_capacity(tmp_path: Path) -> None:
    for cache in (LlamaRAMCache(1000), LlamaDiskCache(tmp_path, 1000)):
        for i in range(10):
            cache[[i]] = state([i], 250)
            if isinstance(cache, LlamaDiskCache):
                for path in tmp_path.iterdir():  # the clock of a file system may be coarse
                    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns - 10**9))
            assert cache.cache_size <= 1000
            assert cache[[0]].n_tokens == 1 if i < 2 else True
        assert [9] in cache and [3] not in cache
        cache[[77]] = state([77], 2000)
        assert [77] not in cache and [9] in cache
    with pytest.raises(ArgumentError):
        LlamaRAMCache(-1)
    assert LlamaCache is LlamaRAMCache


def test_what_was_used_last_stays() -> None:
    cache = LlamaRAMCache(1000)
    for i in range(3):
        cache[[i]] = state([i], 250)
    assert cache[[0]].n_tokens == 1
    cache[[3]] = state([3], 250)
    assert [0] in cache and [1] not in cache


def test_damaged_files(tmp_path: Path) -> None:
    """Any byte that is changed or missing: the entry is gone, and nothing else happens."""
    cache = LlamaDiskCache(tmp_path)
    cache[[1, 2, 3]] = state([1, 2, 3], 20)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for i in range(0, len(data), 3):
        for broken in (data[:i], data[:i] + bytes([data[i] ^ 0x41]) + data[i + 1 :]):
            path.write_bytes(broken)
            try:
                found = cache[[1, 2, 3]]
            except KeyError:
                continue
            raise AssertionError(f"byte {i}: {found}")
    path.write_bytes(data + b"x")
    assert [1, 2, 3] in cache  # looks at the key alone
    with pytest.raises(KeyError):
        cache[[1, 2, 3]]
    assert not path.exists() and [1, 2, 3] not in cache
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "empty.pistate").write_bytes(b"")
    cache[[1, 2, 3]] = state([1, 2, 3])
    assert cache[[1, 2, 3]].n_tokens == 3 and (tmp_path / "notes.txt").exists()


def test_files_are_private_and_whole(tmp_path: Path) -> None:
    cache = LlamaDiskCache(tmp_path / "c")
    cache[[1]] = state([1])
    (path,) = cache.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600 and cache.folder.stat().st_mode & 0o077 == 0
    old, new = cache.folder / ".a.tmp", cache.folder / ".b.tmp"
    for leftover in (old, new):
        leftover.write_bytes(b"x")
    os.utime(old, (0, 0))
    again = LlamaDiskCache(cache.folder)
    assert not old.exists() and new.exists() and [1] in again


def test_llama(llama: OpenLlama, cache: BaseLlamaCache, bpe_path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0}
    plain = llama()(PROMPT, **options)["choices"][0]["text"]
    for i in range(3):
        llm = llama()
        llm.set_cache(cache)
        if i < 2:
            text = llm(PROMPT, **options)["choices"][0]["text"]
        else:
            text = "".join(c["choices"][0]["text"] for c in llm(PROMPT, stream=True, **options))
        assert text == plain
        n_prompt = len(llm.tokenize(PROMPT))
        assert llm.timings.n_reused == (0 if i == 0 else n_prompt - 1)
    llm = llama()
    llm.set_cache(cache)
    llm("the tree and the cat", **options)
    assert 0 < llm.timings.n_reused < len(llm.tokenize("the tree and the cat"))
    other = llama(bpe_path)  # of another model nothing is taken
    other.set_cache(cache)
    assert (
        other(PROMPT, **options)["choices"][0]["text"]
        == llama(bpe_path)(PROMPT, **options)["choices"][0]["text"]
    )
    assert other.timings.n_reused == 0
    llm.set_cache(None)
    size = cache.cache_size
    llm("something else", **options)
    assert cache.cache_size == size


def test_a_cache_does_not_touch_random_choices(llama: OpenLlama) -> None:
    cache = LlamaRAMCache()
    options: dict[str, Any] = {"max_tokens": 10, "temperature": 3.0, "top_k": 0, "min_p": 0.0}
    first = llama(seed=5)
    first.set_cache(cache)
    first(PROMPT, **options)
    second, third = llama(), llama()
    second.set_cache(cache)
    for _ in range(2):
        assert (
            second(PROMPT, **options)["choices"][0]["text"] == third(PROMPT, **options)["choices"][0]["text"]
        )


def test_a_saved_state_knows_its_model(llama: OpenLlama, tmp_path: Path) -> None:
    from tests import models

    llm = llama()
    llm.eval([1, 5, 6])
    saved = llm.save_state()
    again = llama()
    again.load_state(saved)
    assert again.input_ids.tolist() == saved.input_ids.tolist() == [1, 5, 6]
    spec = models.SPECS["llama-relu"]
    weights = {name: value * 2 for name, value in models.draw(spec).items()}
    path = models.write(tmp_path / "twice.gguf", models.metadata(spec), models.file_tensors(spec, weights))
    with pytest.raises(ValueError, match="another model"):
        llama(path).load_state(saved)


def test_files_that_somebody_else_has_put_there(tmp_path: Path) -> None:
    cache = LlamaDiskCache(tmp_path)
    cache[[1, 2]] = state([1, 2])
    (tmp_path / "deep.pistate").write_bytes(b"PIstate1" + (4000).to_bytes(4, "little") + b"[" * 4000)
    os.mkfifo(tmp_path / "pipe.pistate")
    assert cache[[1, 2]].input_ids.tolist() == [1, 2]


def test_a_disk_that_refuses_is_a_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileError, match=r"the cache .*file cannot be written: File exists"):
        LlamaDiskCache(tmp_path / "file")
    cache = LlamaDiskCache(tmp_path / "c")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(llama_cache.os, "replace", full)
    with Llama.demo(n_ctx=64, verbose=False) as llm:
        llm.set_cache(cache)
        with pytest.raises(FileError, match=r"the cache .*\.pistate cannot be written: No space left"):
            llm("a", max_tokens=2)
    assert not list(cache.folder.iterdir())
