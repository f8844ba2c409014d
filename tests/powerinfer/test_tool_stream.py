"""Calls in streamed answers: whatever the parts, they join to what ToolCallParser finds in the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from powerinfer._text.parts import CallPart
from powerinfer._text.tool_calls import _FORMATS, ToolFormat
from powerinfer._text.tool_stream import ToolCallStream
from tests.powerinfer.test_tool_calls import ANSWERS, PLANT, TEMPLATES, TOOLS, WATER, joined


def whole(items: list[Any]) -> list[Any]:
    """Calls with their parts put together."""
    out: list[Any] = []
    for item in items:
        if isinstance(item, CallPart):
            out[-1]["function"]["arguments"] += item.text
        else:
            out.append(item if isinstance(item, str) else {**item, "function": dict(item["function"])})
    return out


def run(family: str, text: str, size: int, **options: Any) -> list[Any]:
    parser = ToolCallStream(ToolFormat.of(TEMPLATES[family]), TOOLS, **options)
    found: list[Any] = []
    for begin in range(0, len(text), size):
        found += parser.push(text[begin : begin + size])
    return found + parser.finish()


NESTED = {"name": "plant", "arguments": {"kind": 'a "}" ]\\', "more": [{"b": "</tool_call"}, "ü"]}}
MORE: list[tuple[str, str, list[Any]]] = [
    ("hermes", f"<tool_call>\n{json.dumps(NESTED)}\n</tool_call>\n\nBye", [NESTED, "\n\nBye"]),
    ("hermes", f"<tool_call>{json.dumps(PLANT)}\n{json.dumps(WATER)}</tool_call>", [PLANT, WATER]),
    ("hermes", f'<tool_call>{{"type": "function", {json.dumps(PLANT)[1:]}</tool_call>', [PLANT]),
    ("mistral", f"Well.[TOOL_CALLS][{json.dumps(NESTED)},{json.dumps(PLANT)} ]", ["Well.", NESTED, PLANT]),
    ("llama-3", json.dumps(PLANT).replace("arguments", "parameters") + " and more", [PLANT, "and more"]),
]


@pytest.mark.parametrize(("family", "text", "meaning"), ANSWERS + MORE)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_parts_join(family: str, text: str, meaning: list[Any] | None, size: int) -> None:
    found = whole(run(family, text, size))
    wanted = [text] if meaning is None else meaning
    as_calls = [
        w if isinstance(w, str) else {"function": {**w, "arguments": json.dumps(w["arguments"])}}
        for w in wanted
    ]
    if (family, text, meaning) in MORE[-1:] and size == 10_000:
        assert joined(found) in (joined(as_calls), [text])  # at once it is seen not to be a call
    else:
        assert joined(found) == joined(as_calls)
    ids = [item["id"] for item in found if not isinstance(item, str)]
    assert len(set(ids)) == len(ids)


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallStream(ToolFormat.of(TEMPLATES["hermes"]), TOOLS)
    assert parser.push('<tool_call>{"name": "plant", "argum') == []
    (call, begin) = parser.push('ents": {"ki')
    assert call["function"] == {"name": "plant", "arguments": ""} and begin == CallPart('{"ki')
    assert parser.push('nd": "o') == [CallPart('nd": "o')]
    assert parser.push('ak"}}') == [CallPart('ak"}')]
    assert parser.push("</tool_call>") == [] and parser.finish() == []


@pytest.mark.parametrize("size", [1, 1000])
def test_one_call_at_most(size: int) -> None:
    call = f"<tool_call>{json.dumps(PLANT)}</tool_call>"
    found = whole(run("hermes", f"Well. {call}\n{call} Done", size, one=True))
    assert joined(found) == ["Well. ", PLANT]


def test_a_call_that_is_cut_off() -> None:
    text = '<tool_call>{"name": "plant", "arguments": {"kind": "o'
    (call,) = whole(run("hermes", text, 1))
    assert call["function"]["arguments"] == '{"kind": "o'


def test_many_spaces_take_no_time() -> None:
    run("hermes", "<tool_call>" + " " * 20_000 + "{" + "\n" * 20_000, 50)
    for n in (100, 200_000):  # whose square is hours
        for family in ("mistral-args", "kimi", "glm-4"):
            style = next(form.style for _, form in _FORMATS if form.name == family)
            begin = "<|tool_call_begin|>" if family == "kimi" else ""
            for body in (begin + "\n" * n + "x", begin + "f" + "\n" * n + "x"):
                assert style.read(body, {"f": {}}) == []
