"""Which pre-tokenizer a tokenizer.json describes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from powerinfer._text.pretokenizer import PRE_TOKENIZERS
from powerinfer.errors import UnsupportedError
from powerinfer.models.convert.pre_names import _NEAR, recognise
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


_HF = folders._split
_BYTES = folders._byte_level(False)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = {"type": "Digits", "individual_digits": True}

# As the tokenizer.json of models describes it: steps, ignore_merges.
PUBLISHED: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "seed-coder": (
        [
            _HF(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
                r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            _BYTES,
        ],
        False,
    ),
    "qwen35": (
        [
            _HF(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
                r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            _BYTES,
        ],
        False,
    ),
    "exaone-moe": (
        [
            _HF(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
                r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
            ),
            _BYTES,
        ],
        False,
    ),
    "deepseek-v3": (
        [
            _HF(r"\p{N}{1,3}"),
            _HF("[一-龥\u3040-ゟ゠-ヿ]+"),
            _HF(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            _BYTES,
        ],
        False,
    ),
    "deepseek-coder": (
        [
            _HF("[\r\n]"),
            _HF(r"\s?\p{L}+"),
            _HF(r"\s?\p{P}+"),
            _HF("[一-龥ࠀ-一가-\ud7ff]+"),
            _DIGIT,
            _BYTES,
        ],
        False,
    ),
    "tekken": ([_HF(_TEKKEN), _BYTES], True),
    "refact": ([_DIGIT, folders._byte_level(True)], False),
    "command-r": ([_DIGIT, folders._byte_level(True)], False),
    "smollm": ([_DIGIT, folders._byte_level(True)], False),
    "superbpe": ([_HF(r"\p{N}+"), _HF(r"(?=(\d{3})+(?!\d))"), _BYTES], False),
    "granite-docling": ([folders._byte_level(True)], False),
    "dbrx": ([_HF(folders.LLAMA3_PATTERN), _BYTES], False),
    "lfm2": ([_HF(folders.LLAMA3_PATTERN), _BYTES], True),
    "hunyuan": ([_HF(folders.LLAMA3_PATTERN.replace("{1,3}", "")), _BYTES], False),
    "minimax-m2": ([_HF(folders.GPT4O_PATTERN), _BYTES], False),
    "llama4": ([_HF(folders.GPT4O_PATTERN), _BYTES], False),
    "bloom": ([_HF(" ?[^(\\s|[.,!?…。，、।۔،])]+"), _BYTES], False),
}


@pytest.mark.parametrize("pre", sorted(PUBLISHED))
def test_more_published_descriptions(pre: str) -> None:
    """The name that goes with the architecture, for what the models' own files describe."""
    steps, ignore_merges = PUBLISHED[pre]
    description = {"type": "Sequence", "pretokenizers": steps}
    assert recognise(description, ignore_merges=ignore_merges, first=pre, where="x") == pre


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


def test_a_scheme_that_takes_words_as_they_are() -> None:
    """That is a part of a scheme: one without does not come near."""
    split, bytes_ = _NEAR["tekken"]
    steps = [split | {"invert": False}, bytes_ | {"trim_offsets": True}]
    description = {"type": "Sequence", "pretokenizers": steps}
    assert recognise(description, ignore_merges=True, first="", where="x") == "tekken"
    with pytest.raises(UnsupportedError, match="none that the engine knows by name"):
        recognise(description, ignore_merges=False, first="", where="x")
