"""Which pre-tokenizer a tokenizer.json describes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from powerinfer._text.pretokenizer import PRE_TOKENIZERS
from powerinfer.errors import UnsupportedError
from powerinfer.models.convert.pre_names import recognise
from tests.convert import folders


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted({PRE_TOKENIZERS[n]: n for n in sorted(PRE_TOKENIZERS)}.values()))
def test_every_scheme_is_recognised_as_itself(name: str) -> None:
    """Also where llama.cpp's patterns and not a published file describe it."""
    scheme = PRE_TOKENIZERS[name]
    blank = tokenizers.Tokenizer(tokenizers.models.BPE())
    blank.pre_tokenizer = scheme.build()
    description = json.loads(blank.to_str())["pre_tokenizer"]
    found = recognise(description, ignore_merges=scheme.ignore_merges, first="", where="x")
    assert PRE_TOKENIZERS[found].patterns == scheme.patterns
    assert PRE_TOKENIZERS[found].ignore_merges == scheme.ignore_merges
    assert recognise(description, ignore_merges=scheme.ignore_merges, first=name, where="x") == name


@pytest.mark.parametrize("pre", sorted(folders.PRE_TOKENIZERS))
def test_published_descriptions(pre: str) -> None:
    description, _, ignore_merges = folders.PRE_TOKENIZERS[pre]
    first = "llama-bpe" if pre == "gpt-2" else pre
    assert recognise(description, ignore_merges=ignore_merges, first=first, where="x") in (
        pre,
        "a.x-4.0",
        "gpt-2",
    )


@pytest.mark.parametrize(
    "change",
    [("{1,3}", "{1,2}"), (r"\p{L}+", r"\p{L}*"), (r"[\r\n]*", ""), (r"\s+(?!\S)|", ""), ("'ll|", "")],
)
def test_a_changed_pattern_is_not_taken_for_another(change: tuple[str, str]) -> None:
    pattern = folders.LLAMA3_PATTERN.replace(*change)
    assert pattern != folders.LLAMA3_PATTERN
    steps = [folders._split(pattern), folders._byte_level(False)]
    with pytest.raises(UnsupportedError, match="--pre NAME"):
        recognise(
            {"type": "Sequence", "pretokenizers": steps}, ignore_merges=True, first="llama-bpe", where="x"
        )


@pytest.mark.parametrize(
    "description",
    [
        {"type": "FixedLength", "length": 0},  # makes the library abort
        {"type": "Sequence", "pretokenizers": [folders._split(".")] * 3000},  # takes it minutes
        {"type": "Sequence", "pretokenizers": {"type": "Whitespace"}},
        {"type": ["Split"]},
        [],
    ],
)
def test_steps_that_are_not_tried_out(description: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers.Tokenizer, "from_str", lambda _: pytest.fail("it was tried out"))
    with pytest.raises(UnsupportedError, match="none that the engine knows"):
        recognise(description, ignore_merges=False, first="", where="x")
