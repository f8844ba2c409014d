"""Reading the values of GGUF keys with the checks that the tokenizer needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import FormatError


class TokenizerError(FormatError):
    """The tokenizer keys of a file are missing, contradict each other, or name something not supported."""


def decode_all(strings: Sequence[bytes]) -> list[str]:
    """Each string as text; what is not UTF-8 as lone surrogates, so that different bytes stay different."""
    try:
        texts = b"\0".join(strings).decode().split("\0")  # many times faster than one by one
        if len(texts) == len(strings):
            return texts
    except UnicodeDecodeError:
        pass
    return [string.decode("utf-8", "surrogateescape") for string in strings]


def is_valid(texts: Iterable[str]) -> bool:
    """Whether none of the texts holds what is not UTF-8."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def get_string(meta: Mapping[str, Any], key: str) -> str | None:
    """The string of that key, or None."""
    value = meta.get(key)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"the key {key!r} has a value of type {type(value).__name__}, not a string")
    return value


def get_number(meta: Mapping[str, Any], key: str, default: Any) -> Any:
    """The integer or boolean of that key, as an int."""
    value = meta.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, np.integer, np.bool_)):
        raise TokenizerError(f"the key {key!r} has a value of type {type(value).__name__}, not an integer")
    return int(value)


def get_byte_strings(meta: Mapping[str, Any], key: str) -> list[bytes]:
    """The array of strings of that key, which must be there."""
    value = meta.get(key)
    if value is None:
        raise TokenizerError(f"the key {key!r} is missing")
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TokenizerError(f"the key {key!r} is not an array of strings")
    if set(map(type, value)) - {bytes}:
        raise TokenizerError(f"the key {key!r} is not an array of strings")
    return list(value)


def get_numbers(
    meta: Mapping[str, Any], key: str, count: int, kind: Any, *, default: Any
) -> np.ndarray[Any, Any]:
    """The first `count` numbers of the array of that key; all `default` where it is missing."""
    value = meta.get(key)
    if value is None:
        return np.full(count, default, kind)
    try:
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise TypeError
    except (TypeError, ValueError):
        raise TokenizerError(f"the key {key!r} is not an array of numbers") from None
    if len(array) < count:
        raise TokenizerError(f"the key {key!r} has {len(array)} entries for {count} tokens")
    return array[:count].astype(kind)
