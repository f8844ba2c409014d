"""Filling a gap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from powerinfer import Llama, UnsupportedError
from tests import models

OpenLlama = Callable[..., Llama]
PRE, SUF, MID = 300, 301, 302


@pytest.fixture
def fim_path(tmp_path: Path) -> Path:
    spec = models.SPECS["llama-relu"]
    meta = models.metadata(spec)
    for key, token in (("pre", PRE), ("suf", SUF), ("mid", MID)):
        meta[f"tokenizer.ggml.fim_{key}_token_id"] = token
    return models.write(tmp_path / "fim.gguf", meta, models.file_tensors(spec, models.draw(spec)))


def test_the_prompt(llama: OpenLlama, fim_path: Path) -> None:
    llm = llama(fim_path)

    def ids(text: str) -> list[int]:
        return llm.tokenizer.encode(text, add_bos=False, space_prefix=False)

    assert llm.detokenize(ids("the tree")) == b"the tree"
    result = llm("the tree", " and water", max_tokens=1)
    expected = [1, PRE, *ids("the tree"), SUF, *ids(" and water"), MID]
    assert llm.input_ids.tolist() == expected
    assert result["usage"]["prompt_tokens"] == len(expected)
    llm("the tree", suffix="", max_tokens=1)
    assert llm.input_ids.tolist() == [1, PRE, *ids("the tree"), SUF, MID]
    llm(ids("the"), suffix="x", max_tokens=1)
    assert llm.input_ids.tolist() == [1, PRE, *ids("the"), SUF, *ids("x"), MID]
    other = llama(fim_path, spm_infill=True)
    other("the tree", suffix=" and water", max_tokens=1)
    assert other.input_ids.tolist() == [1, SUF, *ids(" and water"), PRE, *ids("the tree"), MID]
    echoed = llm("the tree", suffix="x", max_tokens=2, echo=True, temperature=0.0)["choices"][0]["text"]
    assert echoed.startswith("the tree")


def test_models_without_marks(llama: OpenLlama) -> None:
    with pytest.raises(UnsupportedError, match="fill-in-the-middle"):
        llama()("the", suffix="x")
