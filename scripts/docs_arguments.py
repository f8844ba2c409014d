"""An extension of griffe for the API reference: docstrings as Markdown.

Paragraphs of Python become code, and what is said of arguments a list:

    n_ctx: most tokens of prompt and answer together; None or 0: what the model was
        trained with.
"""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Any

import griffe

_ARGUMENT = re.compile(r"^(\*{0,2}[a-z_]\w*(?:, \w+)*): (?=\S)", re.MULTILINE)
_INDEXED = re.compile(r"(?<![`\w])([\w.]+(?:\[[^\]\n]*\])+)")


class Arguments(griffe.Extension):
    """Writes docstrings as Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    return "\n\n".join(_paragraph(paragraph) for paragraph in text.split("\n\n"))


def _paragraph(text: str) -> str:
    code = textwrap.dedent(text).strip()
    if _is_code(code):
        return f"```python\n{code}\n```"
    return _ARGUMENT.sub(r"\n- `\1`: ", _INDEXED.sub(r"`\1`", text)).lstrip("\n")


def _is_code(text: str) -> bool:
    if not re.search(r"[=(]", text):
        return False
    try:
        compile(text, "docstring", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return False
    return True
