"""How the families of models write calls: found in answers, written by templates, demanded by a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from powerinfer import Llama
from powerinfer._text.chat_format import ChatFormat, register_chat_format
from powerinfer._text.tool_calls import ToolCallParser, ToolFormat
from powerinfer._text.tool_stream import ToolCallStream
from tests.powerinfer.test_tool_calls import MESSAGES, PLANT, TOOLS, WATER, joined, tool
from tests.powerinfer.test_tool_stream import whole

OpenLlama = Callable[..., Llama]

# Of each other format what tells it from templates, and what a model writes: text, a call, and two calls.
P, W = json.dumps(PLANT), json.dumps(WATER)
IN_TAGS = "<function=%s>\n<parameter=%s>\n%s\n</parameter>\n</function>"
GLM = "<tool_call>%s\n<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
MINIMAX = '<invoke name="%s">\n<parameter name="%s">%s</parameter>\n</invoke>'
KIMI = "<|tool_call_begin|>functions.%s:%d<|tool_call_argument_begin|>%s<|tool_call_end|>"
DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
DEEPSEEK31 = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
COHERE = '{"tool_call_id": "0", "tool_name": "plant", "parameters": {"kind": "oak"}}'
COHERE_2 = '{"tool_name": "water", "parameters": {"litres": 3}}'
OTHERS: dict[str, tuple[str, list[str]]] = {
    "granite": ("{{ tools }}<|tool_call|>", [f"<|tool_call|>[{P}, {W}]"]),
    "phi-4": ("{{ messages[0]['tools'] }}<|tool|><|/tool|>", [f"<|tool_call|>[{P}, {W}]<|/tool_call|>"]),
    "functools": ("{{ tools }} functools[...]", [f" functools[{P}, {W}]"]),
    "hunyuan": ("{{ tools }}<tool_calls>", [f"<tool_calls>[{P}, {W}]</tool_calls>"]),
    "nemotron": ("{{ tools }}<TOOLCALL>", [f"<TOOLCALL>[{P}, {W}]</TOOLCALL>"]),
    "command-r7b": (
        "{{ tools }}<|START_ACTION|>",
        [
            f"<|START_ACTION|>[\n{COHERE},\n{COHERE_2}\n]<|END_ACTION|>",
        ],
    ),
    "command-r": (
        '{{ tools }} Action: "tool_name"',
        [f'Action: ```json\n[\n{COHERE},{{"tool_name": "water", "parameters": {{"litres": 3}}}}]\n```'],
    ),
    "glm-4.5": (
        "{{ tools }}<tool_call>{name}<arg_key>",
        [GLM % ("plant", "kind", "oak") + "\n" + GLM % ("water", "litres", "3")],
    ),
    "qwen3-coder": (
        "{{ tools }}<tool_call><function=name>",
        [
            f"<tool_call>\n{IN_TAGS % ('plant', 'kind', 'oak')}\n</tool_call>\n"
            f"<tool_call>\n{IN_TAGS % ('water', 'litres', '3')}\n</tool_call>",
        ],
    ),
    "seed": (
        "{{ tools }}<seed:tool_call><function=name>",
        [
            "".join(
                f"<seed:tool_call><function={n}><parameter={k}>{v}</parameter></function></seed:tool_call>"
                for n, k, v in (("plant", "kind", "oak"), ("water", "litres", "3"))
            )
        ],
    ),
    "minimax": (
        "{{ tools }}<minimax:tool_call>",
        [
            f"<minimax:tool_call>\n{MINIMAX % ('plant', 'kind', 'oak')}\n"
            f"{MINIMAX % ('water', 'litres', '3')}\n</minimax:tool_call>"
        ],
    ),
    "kimi": (
        "{{ tools }}<|tool_calls_section_begin|>",
        [
            "<|tool_calls_section_begin|>"
            + KIMI % ("plant", 0, '{"kind": "oak"}')
            + KIMI % ("water", 1, '{"litres": 3}')
            + "<|tool_calls_section_end|>"
        ],
    ),
    **{
        name: (
            f"{{{{ tools }}}}<｜tool▁calls▁begin｜>{mark}",
            [
                "<｜tool▁calls▁begin｜>"
                + form % ("plant", '{"kind": "oak"}')
                + "\n"
                + form % ("water", '{"litres": 3}')
                + "<｜tool▁calls▁end｜>"
            ],
        )
        for name, form, mark in (("deepseek", DEEPSEEK, "```json"), ("deepseek-v3.1", DEEPSEEK31, ""))
    },
    "gemma-4": (
        '{{ tools }}<|tool_call>call:<|"|><tool_call|>',
        [
            '<|tool_call>call:plant{kind:<|"|>oak<|"|>}<tool_call|><|tool_call>call:water{litres:3}<tool_call|>',
            '<|tool_call>call:plant{"kind": "oak"}<tool_call|>\n<|tool_call>call:water{ litres: 3}',
        ],
    ),
    "function-gemma": (
        "{{ tools }}<start_function_call>",
        [
            "<start_function_call>call:plant{kind:<escape>oak<escape>}<end_function_call>"
            "<start_function_call>call:water{litres:3}<end_function_call>"
        ],
    ),
    "apertus": (
        "{{ tools }}<|tools_prefix|>",
        ['<|tools_prefix|>[{"plant": {"kind": "oak"}}, {"water": {"litres": 3}}]<|tools_suffix|>'],
    ),
    "lfm2": (
        "{{ tools }}<|tool_call_start|>",
        ['<|tool_call_start|>[plant(kind="oak"), water(litres=3)]<|tool_call_end|>'],
    ),
    "minicpm-5": (
        """{{ tools }}{{ '<function name="' ~ n ~ '"><param name="' ~ k }}""",
        [
            '<function name="plant"><param name="kind">oak</param></function>\n'
            '<function name="water"><param name="litres">3</param></function>',
            '<function name="plant"><param name="kind"><![CDATA[oak]]></param></function>'
            '<function name="water"><param name="litres">3</param></function>',
        ],
    ),
    "olmo-3": (
        "{{ tools }}<function_calls>",
        ["<function_calls>plant(kind='oak')\nwater(litres=3)</function_calls>"],
    ),
}


@pytest.mark.parametrize("begin", ["List of tools: <|tool_list_start|>[", "List of tools: ["])
def test_templates_of_lfm2_that_write_no_calls(begin: str) -> None:
    template = f'{{% if tools %}}{{% set system = system + "{begin}" %}}{{% endif %}}'
    assert ToolFormat.of(template).name == "lfm2"


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.parametrize("size", [1, 10_000])
def test_calls_in_other_formats(family: str, size: int) -> None:
    template, answers = OTHERS[family]
    form = ToolFormat.of(template)
    assert form.name == family
    for answer in answers:
        for before in ("", "Well.\n"):
            text = before + answer
            for make in (ToolCallParser, ToolCallStream):
                parser, found = make(form, TOOLS), list[Any]()
                for begin in range(0, len(text), size):
                    found += parser.push(text[begin : begin + size])
                found += parser.finish()
                assert joined(whole(found)) == ([before] if before else []) + [PLANT, WATER], text
        broken = answer.replace("plant", "nobody").replace("water", "nobody")
        parser = ToolCallParser(form, TOOLS)
        told = "".join(map(str, parser.push(broken) + parser.finish()))
        assert "".join(told.split()) == "".join(broken.split())


def test_a_name_and_a_line_break_begin_a_call() -> None:
    form = ToolFormat.of("{{ tools }}<|observation|>")
    for text, meaning in (
        ('\nplant\n{"kind": "oak"}', [PLANT]),
        ("plants grow", ["plants grow"]),
        ("plant\nthem", ["plant\nthem"]),
    ):
        parser, found = ToolCallParser(form, TOOLS), list[Any]()
        for c in text:
            found += parser.push(c)
        assert joined(found + parser.finish()) == meaning


def test_values_between_tags() -> None:
    tools = [
        tool(
            "f",
            s={"type": "string"},
            d={"type": "string"},
            n={"type": "number"},
            o={"type": "object"},
            b={"type": "boolean"},
        )
    ]
    text = "<tool_call>\n<function=f>\n"
    for key, value in (("s", "12\nx < y"), ("d", "12"), ("n", "1.5"), ("o", '{"a": [1]}'), ("b", "true")):
        text += f"<parameter={key}>\n{value}\n</parameter>\n"
    parser = ToolCallParser(ToolFormat.of(OTHERS["qwen3-coder"][0]), tools)
    (call,) = parser.push(text + "</function>\n</tool_call>")
    assert not isinstance(call, str)
    expected = {"s": "12\nx < y", "d": "12", "n": 1.5, "o": {"a": [1]}, "b": True}
    assert json.loads(call["function"]["arguments"]) == expected


@pytest.mark.parametrize("quote", ['<|"|>', "<escape>"])
def test_values_in_braces(quote: str) -> None:
    template = f"{{{{ tools }}}}<|tool_call>{quote}<start_function_call>"
    form, q = ToolFormat.of(template), quote
    kinds = {
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"type": "array"},
    }
    tools = [tool("f", s={"type": "string"}, **kinds)]
    for body, meaning in (
        (f's:{q}a, b: {{c}} "x" <y>{q},n:-1.5,b:true', {"s": 'a, b: {c} "x" <y>', "n": -1.5, "b": True}),
        (f"o:{{x:{{y:[1,{q}2{q},null]}},{q}a b{q}:{{}}}}", {"o": {"x": {"y": [1, "2", None]}, "a b": {}}}),
        ("", {}),
        (f"s:{q}{q},l:[],b:false", {"s": "", "l": [], "b": False}),
        ("s:oak tree", {"s": "oak tree"}),
    ):
        text = f"{form.open}call:f{{{body}}}{form.close}"
        parser = ToolCallParser(form, tools)
        assert joined(parser.push(text) + parser.finish()) == [{"name": "f", "arguments": meaning}]
    for body in ("s", "s:", f"s:{q}a", "s:1 2]", "o:{{}}", ":1", "l:[1", "l:" + "[" * 9999, "s:1}{", "[1]"):
        text = f"{form.open}call:f{{{body}}}{form.close}"
        parser = ToolCallParser(form, tools)
        assert joined(parser.push(text) + parser.finish()) == [text]


BRACED = """{%- macro said(v) -%}
{%- if v is string -%}QUOTE{{ v }}QUOTE
{%- elif v is boolean -%}{{ 'true' if v else 'false' }}
{%- elif v is mapping -%}{ {%- for k, x in v | dictsort -%}
{{ k }}:{{ said(x) }}{{ ',' if not loop.last }}{%- endfor -%} }
{%- elif v is sequence -%}[{%- for x in v -%}{{ said(x) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}
{%- for m in messages if m.tool_calls -%}{%- for c in m.tool_calls -%}
OPENcall:{{ c.function.name }}{{ said(c.function.arguments) }}CLOSE
{%- endfor -%}{%- endfor -%}{# tools #}"""
LISTED = """{%- for m in messages if m.tool_calls -%}<|tools_prefix|>[
{%- for c in m.tool_calls -%}{ {{- c.function.name | tojson }}: {{ c.function.arguments | tojson -}} }
{{- ', ' if not loop.last }}{%- endfor -%}]<|tools_suffix|>{%- endfor -%}{# tools #}"""


@pytest.mark.parametrize("family", ["gemma-4", "function-gemma", "apertus"])
def test_calls_as_templates_write_them(family: str) -> None:
    """Into a prompt, by a template that writes earlier calls as the published one does, and back."""
    marks = {"gemma-4": ("<|tool_call>", "<tool_call|>", '<|"|>')}
    marks["function-gemma"] = ("<start_function_call>", "<end_function_call>", "<escape>")
    template = LISTED
    if family in marks:
        template = BRACED
        for name, mark in zip(("OPEN", "CLOSE", "QUOTE"), marks[family], strict=True):
            template = template.replace(name, mark)
    form = ToolFormat.of(template)
    assert form.name == family
    arguments = {"s": "a, b: {c}", "n": 1.5, "b": True, "o": {"x": [1, "2"]}, "l": []}
    calls = [
        {"id": str(i), "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
        for i, (name, given) in enumerate((("f", arguments), ("g", {})))
    ]
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [tool("f", **{key: {} for key in arguments}), tool("g")]
    prepared, listed = form.prepare(messages, tools)
    text = ChatFormat("test", template).render(prepared, tools=listed)
    parser = ToolCallParser(form, tools)
    assert joined(parser.push(text) + parser.finish()) == [
        {"name": "f", "arguments": arguments},
        {"name": "g", "arguments": {}},
    ]


@pytest.mark.parametrize(
    "body",
    ['{"f": {}, "g": {}}', '[{"f": 1}]', "[{}]", '["f"]', "f", '{"f": {}} {"f": {}}', "[" * 9999],
)
def test_what_is_no_call_by_its_name(body: str) -> None:
    form = ToolFormat.of(OTHERS["apertus"][0])
    parser, text = ToolCallParser(form, [tool("f"), tool("g")]), f"{form.open}{body}{form.close}"
    assert joined(parser.push(text) + parser.finish()) == [text]


@pytest.mark.parametrize(
    "body",
    ["f(1)", "f(**x)", "f(a=g())", "[1]", "import os", "f(a=b'x')", "f(a={1: 2})", "f(a=" + "[" * 500, "x"],
)
def test_what_is_no_call_in_python(body: str) -> None:
    parser = ToolCallParser(ToolFormat.of("{{ tools }}<|tool_call_start|>"), [tool("f", a={})])
    text = f"<|tool_call_start|>[{body}]<|tool_call_end|>"
    assert joined(parser.push(text) + parser.finish()) == [text]


def test_tools_in_the_system_message() -> None:
    """Phi-4-mini's template takes them from there."""
    form = ToolFormat.of(OTHERS["phi-4"][0])
    messages, tools = form.prepare([{"role": "user", "content": "x"}], TOOLS)
    assert tools is None and json.loads(messages[0]["tools"])[0]["name"] == "plant"
    messages, _ = form.prepare([{"role": "system", "content": "y"}], TOOLS)
    assert messages[0]["content"] == "y" and "water" in messages[0]["tools"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "family",
    # Their marks have SentencePiece's space in them, which the model here cannot write.
    [family for family in OTHERS if not family.startswith("deepseek")],
)
def test_demanded_calls_in_other_formats(llama: OpenLlama, family: str) -> None:
    pytest.importorskip("llguidance")
    register_chat_format(f"test-{family}", ChatFormat(family, OTHERS[family][0] + "{{ messages }}"))
    llm = llama(chat_format=f"test-{family}", n_ctx=2048)
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "temperature": 3.0}
    message = llm.create_chat_completion(MESSAGES, seed=1, **options)["choices"][0]["message"]
    assert message["content"] is None
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.get("kind") in ("oak", "elm") or arguments["litres"] <= 9
