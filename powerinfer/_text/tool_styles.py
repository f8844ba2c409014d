"""How single calls are written: as JSON, as a name and arguments, in braces, in tags, or as in Python.

A style reads the text between a format's marks, and says in a grammar (lark, as llguidance has it) what a
call looks like.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"""The parameters of functions, by their names."""
Literal = Callable[[str], str]
"""A text in a grammar; a control token by its id."""
Calls = list[tuple[Any, Any]]
"""Names and arguments; empty for a text that is no calls."""

_NAME = re.compile(r"\s*([\w.-]+)\s*")
_SPACE, _BETWEEN = re.compile(r"\s*"), re.compile(r"[\s,;]*")
_MARK = re.compile(r"(<\|[^<>|]*\|>|<｜[^<>｜]*｜>|<\|\w+>|<\w+\|>|</?[\w:]+>|\[[A-Z_]+\])")
MAX_DEPTH = 64
"""Of a call's arguments."""


def marks(text: str) -> list[str]:
    """What of a text may be control tokens."""
    return _MARK.findall(text)


def _past(spaces: re.Pattern[str], text: str, at: int) -> int:
    """Behind these, where there are any."""
    found = spaces.match(text, at)
    return found.end() if found else at


def literals(text: str, literal: Literal) -> str:
    """A text in a grammar, part by part."""
    return " ".join(literal(part) for part in _MARK.split(text) if part)


@dataclass(frozen=True)
class JsonStyle:
    """{"name": ..., "arguments": {...}}"""

    name: str = "name"
    arguments: str = "arguments"

    @property
    def texts(self) -> tuple[str, ...]:
        return ("<|python_tag|>",)

    def read(self, body: str, schemas: Schemas) -> Calls:
        return read_json(body, self.name)

    def rule(self, i: int, name: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
        begin = f'{{"{self.name}": {json.dumps(name)}, "{self.arguments}": '
        return [f'call_{i}: {json.dumps(begin)} args_{i} "}}"', f"args_{i}: %json {json.dumps(schema)}"]


@dataclass(frozen=True)
class KeyedStyle:
    """{"the name": {...}}, one or a list of them."""

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    def read(self, body: str, schemas: Schemas) -> Calls:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return []
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, dict) and len(item) == 1 for item in items):
            return []
        return [pair for item in items for pair in item.items()]

    def rule(self, i: int, name: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
        begin = json.dumps(f"{{{json.dumps(name)}: ")
        return [f'call_{i}: {begin} args_{i} "}}"', f"args_{i}: %json {json.dumps(schema)}"]


@dataclass(frozen=True)
class BracedStyle:
    """call:name{key:value,...}, texts between marks, keys within as they are."""

    quote: str
    """The mark before and behind a text."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.quote,)

    def read(self, body: str, schemas: Schemas) -> Calls:
        found: Calls = []
        at = _past(_BETWEEN, body, 0)
        while at < len(body):
            named = _BRACED.match(body, at)
            if named is None:
                return []
            try:
                value, at = self._read(body, named.end() - 1, 0)
            except ValueError:
                return []
            found.append((named[1], value))
            at = _past(_BETWEEN, body, at)
        return found

    def _read(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        """A value and where it ends. Raises ValueError."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        if text.startswith(self.quote, at):
            end = text.index(self.quote, at + len(self.quote))
            return text[at + len(self.quote) : end], end + len(self.quote)
        if text.startswith('"', at):
            value, end = json.JSONDecoder().raw_decode(text, at)
            return value, end
        if text[at : at + 1] not in ("{", "["):
            plain = _PLAIN.match(text, at)
            if plain is None:
                raise ValueError("no value")
            return _value(plain[0].strip(), None), plain.end()
        is_object, close = text[at] == "{", "}" if text[at] == "{" else "]"
        values: list[Any] = []
        keys: list[Any] = []
        at = _past(_SPACE, text, at + 1)
        while not text.startswith(close, at):
            if is_object:
                key, at = self._read(text, at, depth + 1)
                keys.append(key if isinstance(key, str) else json.dumps(key))
                at = _past(_SPACE, text, at)
                if not text.startswith(":", at):
                    raise ValueError("a key without a value")
                at = _past(_SPACE, text, at + 1)
            value, at = self._read(text, at, depth + 1)
            values.append(value)
            at = _past(_SPACE, text, at)
            if text.startswith(",", at):
                at = _past(_SPACE, text, at + 1)
            elif not text.startswith(close, at):
                raise ValueError("neither a comma nor the end")
        return (dict(zip(keys, values, strict=True)) if is_object else values), at + 1

    def rule(self, i: int, name: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
        """Required arguments, in their order; others are left to models that are free to write them."""
        properties = schema.get("properties") or {}
        keys = [key for key in properties if key in (schema.get("required") or [])]
        quote = literals(self.quote, literal)
        lines = []
        for n, key in enumerate(keys):
            of = properties[key] if isinstance(properties[key], Mapping) else {}
            if "enum" in of and all(isinstance(v, str) for v in of["enum"]):
                value = f"{quote} ({' | '.join(json.dumps(v) for v in of['enum'])}) {quote}"
            elif of.get("type") == "string" and "enum" not in of:
                value = f"{quote} /[^<]*/ {quote}"
            else:
                value = f"%json {json.dumps(properties[key])}"
            lines.append(f"value_{i}_{n}: {value}")
        words = ' "," '.join(f"{json.dumps(key + ':')} value_{i}_{n}" for n, key in enumerate(keys))
        return [f'call_{i}: {json.dumps(f"call:{name}{{")} {words} "}}"', *lines]


_BRACED = re.compile(r"(?:call:)?([\w.-]+)\s*\{")
_PLAIN = re.compile(r'[^,:{}\[\]<>"]+')


@dataclass(frozen=True)
class NamedStyle:
    """A name, then its arguments as JSON."""

    before: str
    between: str
    behind: str = ""
    before_pattern: str = ""
    """What may stand before a name, where that is not `before` alone."""
    between_pattern: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.before, self.between, self.behind)

    def read(self, body: str, schemas: Schemas) -> Calls:
        # Spaces are skipped apart: two runs of them in one pattern would take the square of their length.
        before = re.compile(self.before_pattern or re.escape(self.before.strip()))
        between = re.compile(self.between_pattern or re.escape(self.between.strip()))
        behind = self.behind.strip()
        found: Calls = []
        at = _past(_SPACE, body, 0)
        while at < len(body):
            begin = before.match(body, at)
            named = _NAME.match(body, begin.end()) if begin else None
            begin = between.match(body, named.end()) if named else None
            if named is None or begin is None:
                return []
            try:
                value, at = json.JSONDecoder().raw_decode(body, _past(_SPACE, body, begin.end()))
            except (ValueError, RecursionError):
                return []
            if not isinstance(value, dict):
                return []
            found.append((named[1], value))
            at = _past(_SPACE, body, at)
            at = _past(_BETWEEN, body, at + len(behind) * body.startswith(behind, at))
        return found

    def rule(self, i: int, name: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
        parts = (literals(self.before + name + self.between, literal), f"args_{i}")
        behind = literals(self.behind, literal)
        return [f"call_{i}: {' '.join(parts)} {behind}", f"args_{i}: %json {json.dumps(schema)}"]


@dataclass(frozen=True)
class TagStyle:
    """A name, then each argument between tags: texts as they are, other values as JSON."""

    begin: tuple[str, str]
    """Around the name."""
    key: tuple[str, str]
    """Around an argument's name."""
    value: tuple[str, str]
    """Around its value."""
    end: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.begin, *self.key, *self.value, self.end)

    def _pattern(self, *parts: str) -> str:
        return r"\s*".join(re.escape(part.strip()) for part in parts if part.strip())

    def read(self, body: str, schemas: Schemas) -> Calls:
        name = r"([\w.-]+)"
        first = rf"\s*{self._pattern(self.begin[0])}{name}{self._pattern(self.begin[1])}\s*"
        key = rf"\s*{self._pattern(self.key[0])}([^<>\"]+?){self._pattern(self.key[1], self.value[0])}"
        pair = re.compile(rf"{key}(.*?){self._pattern(self.value[1])}\s*", re.DOTALL)
        found: Calls = []
        at, end = 0, len(body.rstrip())
        while at < end:
            named = re.compile(first).match(body, at)
            if named is None:
                return []
            at, arguments = named.end(), {}
            schema = schemas.get(named[1], {}).get("properties", {})
            while (one := pair.match(body, at)) is not None:
                arguments[one[1].strip()] = _value(one[2], schema.get(one[1].strip()))
                at = one.end()
            over = re.compile(rf"\s*{self._pattern(self.end)}\s*").match(body, at)
            if over is None:
                return []
            at = over.end()
            found.append((named[1], arguments))
        return found

    def rule(self, i: int, name: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
        lines, calls = [], []
        wanted = schema.get("required") or []
        for n, (key, of) in enumerate((schema.get("properties") or {}).items()):
            text = isinstance(of, Mapping) and of.get("type") == "string" and "enum" not in of
            plain = isinstance(of, Mapping) and "enum" in of and all(isinstance(v, str) for v in of["enum"])
            if plain:
                value = " | ".join(json.dumps(v) for v in of["enum"])
            else:
                value = "/[^<]*/" if text else f"%json {json.dumps(of)}"
            lines.append(f"value_{i}_{n}: {value}")
            before = literals(self.key[0] + key + self.key[1] + self.value[0], literal)
            one = f"{before} value_{i}_{n} {literals(self.value[1], literal)}"
            calls.append(one if key in wanted else f"({one})?")
        begin = literals(self.begin[0] + name + self.begin[1], literal)
        return [f"call_{i}: {begin} {' '.join(calls)} {literals(self.end, literal)}", *lines]


@dataclass(frozen=True)
class PythonStyle:
    """name(key=value, ...), by commas or line breaks."""

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    def read(self, body: str, schemas: Schemas) -> Calls:
        text = body.strip()
        if not text or len(text) > 1 << 20:
            return []
        try:
            tree = ast.parse(
                text if text.startswith("[") else "[" + ",".join(text.splitlines()) + "]", mode="eval"
            )
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
        if not isinstance(tree.body, ast.List):
            return []
        return list(self._calls(tree.body)) if all(map(_is_call, tree.body.elts)) else []

    def _calls(self, found: ast.List) -> Iterator[tuple[Any, Any]]:
        for call in found.elts:
            assert isinstance(call, ast.Call)
            yield ast.unparse(call.func), {word.arg: _python_value(word.value) for word in call.keywords}

    def rule(self, i: int, name: str, schema: Mapping[str, Any], literal: Literal) -> list[str]:
        """Required arguments, in their order; others are left to models that are free to write them."""
        properties = schema.get("properties") or {}
        keys = [key for key in properties if key in (schema.get("required") or [])]
        lines = [f"value_{i}_{n}: %json {json.dumps(properties[key])}" for n, key in enumerate(keys)]
        words = ' ", " '.join(f"{json.dumps(key + '=')} value_{i}_{n}" for n, key in enumerate(keys))
        return [f'call_{i}: {json.dumps(name + "(")} {words} ")"', *lines]


Style = JsonStyle | KeyedStyle | BracedStyle | NamedStyle | TagStyle | PythonStyle


def _is_call(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, (ast.Name, ast.Attribute))
        and not node.args
        and all(word.arg is not None and _is_value(word.value) for word in node.keywords)
    )


_NAMES = {"true": True, "false": False, "null": None}


def _is_value(node: ast.expr) -> bool:
    try:
        _python_value(node)
    except (ValueError, RecursionError):
        return False
    return True


def _python_value(node: ast.expr) -> Any:
    """A literal; JSON's three words, too. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys must be texts")
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise ValueError("not a value of JSON")
    return value


def _value(text: str, schema: Any) -> Any:
    """Of an argument between tags: as it is where it must be text."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if text.startswith("<![CDATA[") and text.endswith("]]>"):
        return text[9:-3]
    shown = text.removeprefix("\n").removesuffix("\n")
    if kinds == "string":
        return shown
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return shown


def read_json(body: str, key: str = "name") -> Calls:
    """JSON objects and lists of them, one after the other. key: of names."""
    body = body.strip().removeprefix("<|python_tag|>").removeprefix("```json").removesuffix("```")
    decoder, found, at = json.JSONDecoder(), [], 0
    nothing: Calls = []
    while at < len(body):
        if body[at].isspace() or body[at] in ",;":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return nothing
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, dict):
                return nothing
            if isinstance(item.get("function"), dict):
                item = item["function"]
            name = item.get(key, item.get("name"))
            found.append((name, item.get("arguments", item.get("parameters", {}))))
    return found
