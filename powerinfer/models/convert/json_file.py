"""JSON files of a checkpoint's folder. They come from anybody, so every value is checked where it is used."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import FormatError
from .files import read_file


def parse_json(data: bytes, what: str) -> Any:
    """The value that UTF-8 text describes. Raises FormatError: not JSON, a name twice in an object."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise FormatError(f"{what} has the name {name!r:.100} twice")
        return out

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
        if b"\\ud" in data or b"\\uD" in data:  # the halves of a character may stand alone: not text
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON: {error!s:.200}") from None


def read_json(path: Path) -> Any:
    """The value in a file. Raises FileError, FormatError."""
    return parse_json(read_file(path), str(path))


def read_object(path: str | os.PathLike[str]) -> Settings:
    """The object in a file. Raises FileError, FormatError."""
    value = read_json(Path(path))
    if not isinstance(value, dict):
        raise FormatError(f"{path} does not hold a JSON object")
    return Settings(value, str(path))


def read_object_if_any(path: Path) -> Settings:
    """The same; an empty object where there is no such file."""
    return read_object(path) if os.path.lexists(path) else Settings({}, str(path))


class Settings:
    """Values of a JSON object by their names, each checked when it is asked for.

    Several names are alternatives: the first that has a value other than null counts. All methods raise
    FormatError with the file, the name and the value.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def wrong(self, name: str, must: str) -> FormatError:
        """The error for a value that is not what it must be."""
        return FormatError(f"{self.where}: {name} is {self.values.get(name)!r:.80}, must be {must}")

    def _find(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self), None)

    def integer(self, *names: str, default: int | None = None, low: int = 0, high: int) -> int:
        """A whole number in low..high; `default` where there is none, or an error if that is None."""
        name = self._find(names)
        if name is None:
            if default is None:
                raise FormatError(f"{self.where} has no {names[0]}")
            return default
        value = self.values[name]
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"a whole number in {low}..{high}")
        return value

    def number(self, *names: str, default: float | None = None, low: float = -math.inf) -> float:
        """A finite number of at least `low`; `default` where there is none, or an error if that is None."""
        name = self._find(names)
        if name is None:
            if default is None:
                raise FormatError(f"{self.where} has no {names[0]}")
            return default
        value = self.values[name]
        if type(value) not in (int, float) or not abs(value) < 1e30 or not value >= low:
            raise self.wrong(name, "a number" + (f" of at least {low:g}" if low > -math.inf else ""))
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many numbers; empty where there is none."""
        values = self.values.get(name)
        if values is None:
            return ()
        if not isinstance(values, list) or len(values) != count:
            raise self.wrong(name, f"a list of {count} numbers")
        items = Settings({f"{name}[{i}]": value for i, value in enumerate(values)}, self.where)
        return tuple(items.number(item) for item in items.values)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def text(self, *names: str, default: str = "") -> str:
        name = self._find(names)
        if name is None:
            return default
        if not isinstance(self.values[name], str):
            raise self.wrong(name, "a text")
        return str(self.values[name])

    def texts(self, name: str) -> list[str]:
        """A list of texts; empty where there is none."""
        return self._list(name, str, "texts")

    def object(self, name: str) -> Settings:
        """An object within the object; an empty one where there is none."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Settings(value, f"{self.where}: {name}")

    def objects(self, name: str) -> list[Settings]:
        """A list of objects; empty where there is none."""
        found = self._list(name, dict, "objects")
        return [Settings(item, f"{self.where}: {name}[{i}]") for i, item in enumerate(found)]

    def _list(self, name: str, kind: type, what: str) -> list[Any]:
        values = self.values.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(one, kind) for one in values):
            raise self.wrong(name, f"a list of {what}")
        return values
