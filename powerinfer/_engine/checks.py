"""What callers give, checked for its type where it comes in: one sentence, and the package's own error."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from .arrays import as_int32


def whole(name: str, value: Any) -> int:
    """A whole number; numpy's are some, True and 1.0 are none."""
    if isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name} is {value!r}, it must be a whole number")
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name} is {_short(value)}, it must be a whole number") from None


def optional_whole(name: str, value: Any) -> int | None:
    """The same, or None."""
    return None if value is None else whole(name, value)


def at_least(name: str, value: Any, least: int) -> None:
    """A whole number that is large enough."""
    if whole(name, value) < least:
        raise ArgumentError(f"{name} is {value}, it must be at least {least}")


def real(name: str, value: Any) -> float:
    """A number that is one."""
    if isinstance(value, (str, bytes, bool)) or value is None:
        raise ArgumentTypeError(f"{name} is {_short(value)}, it must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{name} is {_short(value)}, it must be a number") from None
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if math.isnan(number):
        raise ArgumentTypeError(f"{name} is nan, it must be a number")
    return number


def text(name: str, value: Any) -> str | bytes:
    """Text, or its bytes in UTF-8."""
    if not isinstance(value, (str, bytes)):
        raise ArgumentTypeError(f"{name} is {_short(value)}, it must be text (str or bytes)")
    return value


def token_ids(name: str, value: Any) -> list[int]:
    """Token ids."""
    kind = type(value).__name__
    if not _is_list(value):
        raise ArgumentTypeError(f"{name} is {kind}, it must be a list of token ids")
    values = value if isinstance(value, (np.ndarray, list, tuple)) else list(value)
    if any(isinstance(one, (str, bytes)) for one in values):
        raise ArgumentTypeError(f"{name} is a list of texts, it must be a list of token ids")
    if any(isinstance(one, (bool, float, np.floating, np.bool_)) for one in values):
        raise ArgumentTypeError(f"{name} holds numbers that are not whole, it must be a list of token ids")
    ids: list[int] = as_int32(name, values).tolist()
    return ids


def prompt(value: Any) -> str | bytes | list[int]:
    """Text or token ids."""
    if isinstance(value, (str, bytes)):
        return value
    if isinstance(value, (list, tuple)) and any(isinstance(one, (str, bytes, list, tuple)) for one in value):
        raise ArgumentTypeError(
            "the prompt is a list of prompts: give one at a time, or use AsyncLlama for many at once"
        )
    if not _is_list(value):
        raise ArgumentTypeError(f"the prompt is {type(value).__name__}, it must be text or token ids")
    return token_ids("the prompt", value)


def are_several(value: Any) -> bool:
    """Whether these are several texts, each of which may be token ids, and not one."""
    if not _is_list(value) or not isinstance(value, Collection):
        return False
    return not isinstance(next(iter(value), 0), (int, np.integer))


def _is_list(value: Any) -> bool:
    """Whether it may be a list of token ids; arrays without dimensions are none."""
    no_lists = (str, bytes, bytearray, memoryview, Mapping, Set)
    return isinstance(value, Iterable) and not isinstance(value, no_lists) and getattr(value, "ndim", 1) > 0


def stops(value: Any) -> list[str]:
    """Strings that end an answer: one, several, or None. Empty ones end nothing; clients send them always."""
    found = [] if value is None else [value] if isinstance(value, str) else value
    if isinstance(found, (bytes, bytearray, dict)) or not isinstance(found, Sequence):
        raise ArgumentTypeError(f"stop is {_short(value)}, it must be a text or a list of texts")
    for one in found:
        if not isinstance(one, str):
            raise ArgumentTypeError(f"stop holds {_short(one)}, it must hold texts alone")
    return [one for one in found if one]


def hooks(name: str, value: Any) -> None:
    """Functions: one, several, or None."""
    each: Sequence[Callable[..., Any]] = value if isinstance(value, (list, tuple)) else [value]
    if value is not None and not all(callable(one) for one in each):
        raise ArgumentTypeError(f"{name} is {_short(value)}, it must be a function or a list of functions")


def hook(name: str, value: Any) -> None:
    """A function, or None."""
    if value is not None and not callable(value):
        raise ArgumentTypeError(f"{name} is {_short(value)}, it must be a function")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
