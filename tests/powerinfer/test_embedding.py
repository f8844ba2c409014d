"""Vectors of texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import powerinfer
from powerinfer import ArgumentError, Llama, UnsupportedError
from powerinfer._engine.embedding import pool, pooling_number
from tests import models

OpenLlama = Callable[..., Llama]
TEXTS = ["the tree", "a much longer text about the water and the house", "x"]


def test_pooling(llama: OpenLlama) -> None:
    tokens = llama(embedding=True)
    assert tokens.pooling_type() == powerinfer.LLAMA_POOLING_TYPE_NONE
    rows = [np.array(value) for value in tokens.embed(TEXTS)]
    assert [row.shape for row in rows] == [(len(tokens.tokenize(text)), 64) for text in TEXTS]
    for kind, number, reference in (
        ("mean", 1, [row.mean(0) for row in rows]),
        ("cls", 2, [row[0] for row in rows]),
        ("last", 3, [row[-1] for row in rows]),
    ):
        llm = llama(embedding=True, pooling_type=kind)
        assert llm.pooling_type() == number
        vectors = np.array(llm.embed(TEXTS))
        assert vectors.shape == (3, 64)
        assert np.allclose(vectors, reference, rtol=1e-6, atol=1e-6)  # one float32 rounding
        assert np.array_equal(llm.embed(TEXTS[1]), vectors[1])
        assert np.array_equal(tokens.embed(TEXTS[1], pooling=number), vectors[1])
        unit = np.array(llm.embed(TEXTS, normalize=True))
        assert np.allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
        assert np.allclose(unit, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), atol=1e-6)
    assert np.allclose(np.linalg.norm(tokens.embed(TEXTS[1], normalize=True), axis=1), 1, atol=1e-6)


def test_the_files_own_pooling(llama: OpenLlama, tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    for value, expected in ((1, 1), (4, 0), (77, 0)):
        meta = {**models.metadata(spec), "llama.pooling_type": value}
        path = models.write(tmp_path / f"{value}.gguf", meta, models.file_tensors(spec, models.draw(spec)))
        assert llama(path, embedding=True).pooling_type() == expected
        assert llama(path, embedding=True, pooling_type="last").pooling_type() == 3


def test_create_embedding(llama: OpenLlama) -> None:
    llm = llama(embedding=True, pooling_type=1)
    result = llm.create_embedding(TEXTS, model="mine")
    n = sum(len(llm.tokenize(text)) for text in TEXTS)
    assert result["usage"] == {"prompt_tokens": n, "total_tokens": n}
    assert result["object"] == "list" and result["model"] == "mine"
    assert [(d["object"], d["index"]) for d in result["data"]] == [("embedding", i) for i in range(3)]
    assert [d["embedding"] for d in result["data"]] == llm.embed(TEXTS)
    one = llm.create_embedding(TEXTS[0])
    assert len(one["data"]) == 1 and one["model"] == llm.model_path
    assert one["data"][0]["embedding"] == llm.embed(TEXTS[0])
    assert llm.embed(TEXTS, return_count=True) == (llm.embed(TEXTS), n)
    assert llm.embed([]) == []


def test_long_texts_and_the_context(llama: OpenLlama) -> None:
    llm = llama(embedding=True, pooling_type="last", n_ctx=8, n_batch=3)
    text = "the tree and the water and the house"
    assert len(llm.tokenize(text)) > 8
    vector, n = llm.embed(text, return_count=True)
    assert n == 8 and len(vector) == 64
    with pytest.raises(ArgumentError, match="n_ctx is 8"):
        llm.embed(text, truncate=False)
    assert llm.n_tokens == 0
    llm("the", max_tokens=2)  # texts can be written too


def test_refusals(llama: OpenLlama) -> None:
    with pytest.raises(ArgumentError, match="embedding=True"):
        llama().embed("x")
    bad: list[Any] = ["best", 9, True, -2]
    for value in bad:
        with pytest.raises(ArgumentError, match="pooling_type"):
            llama(pooling_type=value)
    with pytest.raises(UnsupportedError, match="rerank"):
        pooling_number(4)
    with pytest.raises(ArgumentError, match="text"):
        llama(embedding=True).embed([5])
    assert pool(np.zeros((0, 4), np.float32), 1).shape == (4,)
