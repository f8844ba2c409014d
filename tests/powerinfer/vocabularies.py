"""Small vocabularies for the tests of tokenizer, text and chat format, as mappings of GGUF keys."""

from __future__ import annotations

import json
import pathlib
from typing import Any

CASES: dict[str, Any] = json.loads(
    pathlib.Path(__file__).with_name("tokenizer_cases.json").read_text(encoding="utf-8")
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def spm(extra: dict[str, int] | None = None, **keys: Any) -> dict[str, Any]:
    """The trained SentencePiece vocabulary with `extra` tokens (text: type) and keys (without
    `tokenizer.ggml.`)."""
    case = CASES["spm"]
    meta = llama(
        [*case["tokens"], *(extra or {})],
        types=[*case["types"], *(extra or {}).values()],
        scores=[*case["scores"], *[-1000.0] * len(extra or {})],
    )
    return meta | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def llama(
    tokens: list[str], *, types: list[int] | None = None, scores: list[float] | None = None
) -> dict[str, Any]:
    """A vocabulary of kind "llama" with these tokens."""
    meta: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token.encode() for token in tokens],
    }
    if types is not None:
        meta["tokenizer.ggml.token_type"] = types
    if scores is not None:
        meta["tokenizer.ggml.scores"] = scores
    return meta


def bpe(extra: dict[str, int] | None = None, pre: str | None = "gpt-2", **keys: Any) -> dict[str, Any]:
    """The trained byte-level vocabulary with `extra` tokens (text: type) and keys (without
    `tokenizer.ggml.`)."""
    case = CASES["bpe"]
    meta: dict[str, Any] = {
        "general.architecture": "gpt2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [token.encode() for token in [*case["tokens"], *(extra or {})]],
        "tokenizer.ggml.token_type": [NORMAL] * len(case["tokens"]) + list((extra or {}).values()),
        "tokenizer.ggml.merges": [merge.encode() for merge in case["merges"]],
    }
    if pre is not None:
        meta["tokenizer.ggml.pre"] = pre
    return meta | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
