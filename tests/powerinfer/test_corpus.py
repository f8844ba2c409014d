"""Texts as tokens: which files, in which order, with what in front."""

from __future__ import annotations

import io
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer.errors import ArgumentError, FileError, FormatError
from powerinfer.models.corpus import encode_corpus, read_corpus, read_texts
from tests import models


def test_files_are_one_text_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"one\n")
    (tmp_path / "b").write_bytes(b"two \xff\r\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"three")))
    with pytest.warns(UserWarning, match="not UTF-8"):
        assert read_texts([tmp_path / "a", "-", str(tmp_path / "b")]) == b"one\nthreetwo \xff"
        assert read_texts([tmp_path / "b", tmp_path / "a"]) == b"two \xff\r\none"
    (tmp_path / "c").write_bytes(b"end\n\n")
    assert read_texts([tmp_path / "c"]) == b"end\n"


@pytest.mark.parametrize(
    ("text", "byte"),
    [
        ("schön".encode("latin1"), "byte 3 is 0xf6"),
        ("a".encode("utf-16-le"), None),
        ("ab".encode("utf-16"), "byte 0 is"),
    ],
)
def test_a_text_that_is_not_utf8_warns(text: bytes, byte: str | None, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read_texts([tmp_path / "a"]) == text
    assert [f"a is not UTF-8 ({byte}" in str(each.message) for each in caught] == [True] * (byte is not None)


@pytest.mark.parametrize("name", ["nowhere.txt", ".", "a\0b"])
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_texts([tmp_path / name])


def test_tokens_and_what_begins_a_text(relu_path: Path, bpe_path: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the rain</s>")
    with ModelFile(relu_path) as file:
        corpus = read_corpus(file, [tmp_path / "text"])
        assert corpus.bos == 1 and 1 not in corpus.tokens and 2 not in corpus.tokens
        assert corpus.tokens.dtype == np.int32
        assert corpus.with_bos.tolist() == [1, *corpus.tokens.tolist()]
        special = read_corpus(file, [tmp_path / "text"], special=True)
        assert special.tokens.tolist()[-1] == 2
        for nothing in ("", b""):
            with pytest.raises(ArgumentError, match="empty"):
                encode_corpus(file, nothing)
    with ModelFile(bpe_path) as file:
        corpus = encode_corpus(file, b"the rain \xff")
        assert corpus.bos is None
        np.testing.assert_array_equal(corpus.with_bos, corpus.tokens)


def test_no_eos_is_put_behind_a_text(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    meta = models.metadata(spec) | {"tokenizer.ggml.add_eos_token": True}
    with ModelFile(models.write(tmp_path / "m.gguf", meta, {})) as file:
        assert 2 not in encode_corpus(file, "the rain").with_bos


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    path = models.write(tmp_path / "m.gguf", {"general.architecture": "llama"}, {})
    with ModelFile(path) as file, pytest.raises(FormatError, match="no tokenizer"):
        encode_corpus(file, "the rain")
