"""Embeddings on their way out: a thousand vectors are millions of numbers to write."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from starlette.responses import Response

from .problems import Problem, encode

MAX_NUMBERS = 4 << 20
"""Of one answer as text, each of which takes fifty bytes on its way; base64 takes a tenth."""


def check_size(n_texts: int, n_embd: int, encoding_format: str | None) -> None:
    if n_texts * n_embd > MAX_NUMBERS and encoding_format != "base64":
        raise Problem(
            400,
            f"{n_texts} vectors of {n_embd} numbers are too long an answer: ask for encoding_format "
            f"'base64', or for at most {MAX_NUMBERS // n_embd} texts",
            param="input",
            code="invalid_value",
        )


def vector_response(result: dict[str, Any], encoding_format: str | None) -> Response:
    """Of an answer in OpenAI's shape. For a thread: vector by vector, so that others run in between."""
    items = []
    for item in result["data"]:
        if encoding_format == "base64":
            vector = np.asarray(item["embedding"], "<f4")
            item["embedding"] = base64.b64encode(vector.tobytes()).decode("ascii")
        items.append(encode(item))
        item["embedding"] = None
    head = encode({name: value for name, value in result.items() if name != "data"})
    return Response(b'{"data":[' + b",".join(items) + b"]," + head[1:], media_type="application/json")


def native_response(result: dict[str, Any]) -> Response:
    """The same in llama-server's shape, which has a list of vectors for each text: of its tokens where they
    are not pooled."""
    parts = []
    for item in result["data"]:
        vectors = item["embedding"]
        several = bool(vectors) and isinstance(vectors[0], list)
        parts.append(encode({"index": item["index"], "embedding": vectors if several else [vectors]}))
        item["embedding"] = None
    return Response(b"[" + b",".join(parts) + b"]", media_type="application/json")
