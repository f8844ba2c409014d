"""Running the chat template of a file.

Templates come from files and are not trusted. They run in Jinja's immutable sandbox: no private attributes,
no changes to the messages, ranges and repetitions of at most 100 000, results and sums of texts of at most
8 Mi characters. Each turn of a loop and each call of a macro, block, filter or test looks at the time, of
which a template has ten seconds of its processor. What is not bounded are the time and memory of a single
filter, method or operation that is made to waste them: a replacement of every letter by a long text, say, or
a comparison of lists that hold the same list twice, and that the same, and so on.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from ..errors import PowerInferError

MAX_OUTPUT = 1 << 23  # characters
MAX_REPEAT = jinja2.sandbox.MAX_RANGE
MAX_SECONDS = 10.0  # of the thread's own time on a processor, so that a busy machine makes nothing fail
_PADDING = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs"])


class ChatFormatError(PowerInferError, ValueError):
    """Messages that are not a conversation, a format that is not known, or a template that does not work."""


def render_template(name: str, template: str, **variables: Any) -> str:
    """The text that a chat template makes of its variables.

    name: the template's, for messages. Raises ChatFormatError where the template is broken, fails, or says
    so.
    """
    pieces, length = [], 0
    _thread.ends_s = time.monotonic() + MAX_SECONDS, time.thread_time() + MAX_SECONDS
    try:
        for piece in _compile(template).generate(**variables):
            length += len(piece)
            if length > MAX_OUTPUT:
                raise ChatFormatError(f"its text is longer than {MAX_OUTPUT} characters")
            pieces.append(piece)
    except jinja2.TemplateSyntaxError as error:
        raise ChatFormatError(
            f"the chat template {name!r} is broken: {error.message} (line {error.lineno})"
        ) from error
    except Exception as error:  # a template can raise what Python code can
        raise ChatFormatError(
            f"the chat template {name!r} failed: {str(error) or type(error).__name__}"
        ) from error
    return "".join(pieces)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the answers for training: here its content
    alone."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_thread = threading.local()
"""ends_s: where the time of the template that runs in it ends, at the earliest, and of the processor."""


def _look_at_the_time() -> bool:
    """True, so that it can stand in a condition."""
    earliest_s, end_s = _thread.ends_s
    if time.monotonic() > earliest_s and time.thread_time() > end_s:  # the second takes a call of the system
        raise ChatFormatError(f"it runs for more than {MAX_SECONDS:g} seconds")
    return True


def _join(*parts: Any) -> str:
    """What `~` makes."""
    texts = list(map(str, parts))
    _check_sum(sum(map(len, texts)))
    return "".join(texts)


def _add(left: Any, right: Any) -> Any:
    """What `+` makes."""
    if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        _check_sum(len(left) + len(right))
    return left + right


def _check_sum(length: int) -> None:
    if length > MAX_OUTPUT:
        raise ChatFormatError(f"a sum of {length} characters or items is too long (at most {MAX_OUTPUT})")


class _Bounds(jinja2.visitor.NodeTransformer):
    """Puts calls of the above into a template."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self._watched(node)
        if node.test is not None:  # turns for which it is false have no body
            node.test = jinja2.nodes.And(_call("look_at_the_time", []), node.test).set_lineno(node.lineno)
        return node

    def visit_Block(self, node: jinja2.nodes.Block) -> jinja2.nodes.Node:
        return self._watched(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._watched(node)

    def _watched(self, node: jinja2.nodes.For | jinja2.nodes.Block | jinja2.nodes.Macro) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call("look_at_the_time", [])).set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call("join", node.nodes).set_lineno(node.lineno)

    def visit_Add(self, node: jinja2.nodes.Add) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _call("add", [node.left, node.right]).set_lineno(node.lineno)


def _call(name: str, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
    """Of a method of the environment."""
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), arguments, [], None, None)


class _Code(jinja2.compiler.CodeGenerator):
    """Calls of these are written as they are: they need not be asked whether they are safe, which takes ten
    times as long."""

    def visit_Call(
        self, node: jinja2.nodes.Call, frame: jinja2.compiler.Frame, forward_caller: bool = False
    ) -> None:
        if not isinstance(node.node, jinja2.nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.visit(node.node, frame)
        self.write("(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**", "%"])
    code_generator_class = _Code
    look_at_the_time = staticmethod(_look_at_the_time)
    join = staticmethod(_join)
    add = staticmethod(_add)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _PADDING)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and re.search(r"\d{4}", value.__self__):
            raise ChatFormatError("a format has a width that is too large")
        return wrapped

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise ChatFormatError("formatting with % is not supported")
        if operator == "*" and any(isinstance(side, (str, bytes, list, tuple)) for side in (left, right)):
            size = left * len(right) if isinstance(left, int) else len(left) * right
            if size > MAX_REPEAT:
                raise ChatFormatError(f"a repetition of {size} is too long (at most {MAX_REPEAT})")
        if operator in ("*", "**") and any(
            isinstance(side, int) and abs(side) > 1 << 64 for side in (left, right)
        ):
            raise ChatFormatError("a number is too large")
        if operator == "**" and isinstance(right, (int, float)) and right > 64:
            raise ChatFormatError("a number is too large")
        return super().call_binop(context, operator, left, right)


def _watched(function: Any) -> Any:
    """A filter or test that looks at the time first: `map` and `select` call it for each item."""

    @wraps(function)  # and with the marks that say what else it is given
    def call(*args: Any, **kwargs: Any) -> Any:
        _look_at_the_time()
        return function(*args, **kwargs)

    return call


def _raise_exception(message: str) -> NoReturn:
    raise ChatFormatError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _check_width(width: Any) -> None:
    if isinstance(width, int) and width > 1000:
        raise ChatFormatError(f"an indentation of {width} is too large")


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_width(width)
    return jinja2.filters.do_indent(s, width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes < and > for HTML, which no model has seen."""
    _check_width(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters.update(tojson=_tojson, indent=_indent)
    for name in ("center", "format"):  # they make strings of any length
        del environment.filters[name]
    for functions in (environment.filters, environment.tests):
        functions.update({name: _watched(function) for name, function in functions.items()})
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(template)
