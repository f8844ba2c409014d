"""Functions that a model may call: into prompts, out of answers, demanded by a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, Llama
from powerinfer._text.chat_format import ChatFormat, register_chat_format
from powerinfer._text.parts import CallPart
from powerinfer._text.tool_calls import ToolCallParser, ToolFormat, check_tools, chosen_tools
from powerinfer._text.tool_stream import ToolCallStream
from tests import models

OpenLlama = Callable[..., Llama]
MESSAGES = [{"role": "user", "content": "the tree"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {**parameters, "additionalProperties": False}},
    }


TOOLS = [
    tool("plant", kind={"enum": ["oak", "elm"]}),
    tool("water", litres={"type": "integer", "maximum": 9}),
]
PLANT = {"name": "plant", "arguments": {"kind": "oak"}}
WATER = {"name": "water", "arguments": {"litres": 3}}

TEMPLATES = {
    "hermes": "{{ tools | tojson }}<tool_call>",
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]",
    "mistral-args": "{{ tools }}[TOOL_CALLS]name[ARGS]{}",
    "llama-3": "{{ tools }} <|start_header_id|> parameters",
    "described": "{{ messages }}",
}
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
    "olmo-3": (
        "{{ tools }}<function_calls>",
        ["<function_calls>plant(kind='oak')\nwater(litres=3)</function_calls>"],
    ),
}


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
                assert whole(found) == ([before] if before else []) + [PLANT, WATER], text
        broken = answer.replace("plant", "nobody").replace("water", "nobody")
        parser = ToolCallParser(form, TOOLS)
        told = "".join(map(str, parser.push(broken) + parser.finish()))
        assert "".join(told.split()) == "".join(broken.split())


def whole(items: list[Any]) -> list[Any]:
    """As `joined`, of what a stream tells: arguments in parts behind a call."""
    out: list[Any] = []
    for item in items:
        if isinstance(item, CallPart):
            out[-1]["function"]["arguments"] += item.text
        else:
            out.append(item)
    return joined(out)


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


# What each family writes, and what it means: texts and names with arguments.
ANSWERS: list[tuple[str, str, list[Any]]] = [
    ("hermes", f"Well. <tool_call>\n{json.dumps(PLANT)}\n</tool_call>", ["Well. ", PLANT]),
    (
        "hermes",
        f"<tool_call>{json.dumps(PLANT)}</tool_call>\n<tool_call>\n{json.dumps(WATER)}\n</tool_call> Done",
        [PLANT, WATER, " Done"],
    ),
    ("hermes", f"<tool_call>\n{json.dumps(PLANT)}\n</tool_", [PLANT]),
    ("hermes", f"<tool_call>\n{json.dumps(PLANT)}", [PLANT]),
    ("hermes", "<tool_call>\n{broken</tool_call>!", ["<tool_call>\n{broken</tool_call>", "!"]),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None),  # type: ignore[list-item]
    ("hermes", "a < b <tool", ["a < b <tool"]),
    ("mistral", f"[TOOL_CALLS][{json.dumps(PLANT)}, {json.dumps(WATER)}]", [PLANT, WATER]),
    ("mistral", f"[TOOL_CALLS] [{json.dumps(PLANT)}]", [PLANT]),
    (
        "mistral-args",
        '[TOOL_CALLS]plant[ARGS]{"kind": "oak"}[TOOL_CALLS]water[ARGS]{"litres": 3}',
        [PLANT, WATER],
    ),
    ("mistral-args", '[TOOL_CALLS]plant[CALL_ID]Ab3dEf9gh[ARGS]{"kind": "oak"}', [PLANT]),
    ("llama-3", '{"name": "plant", "parameters": {"kind": "oak"}}', [PLANT]),
    ("llama-3", '<|python_tag|>{"name": "plant", "parameters": {"kind": "oak"}}', [PLANT]),
    (
        "llama-3",
        '{"name": "plant", "parameters": {"kind": "oak"}}; '
        '{"name": "water", "parameters": "{\\"litres\\": 3}"}',
        [PLANT, WATER],
    ),
    ("llama-3", "An {answer}", ["An {answer}"]),
    ("llama-3", '{"a": 1}', ['{"a": 1}']),
    ("llama-3", "{" * 3000, ["{" * 3000]),
    ("llama-3", "[" * 50 + "{", ["[" * 50 + "{"]),
]


def joined(items: list[Any]) -> list[Any]:
    """Neighbouring texts as one, calls as {"name", "arguments"}."""
    out: list[Any] = []
    for item in items:
        if not isinstance(item, str):
            made = item["function"]
            out.append({"name": made["name"], "arguments": json.loads(made["arguments"])})
        elif out and isinstance(out[-1], str):
            out[-1] += item
        else:
            out.append(item)
    return out


@pytest.mark.parametrize("family", TEMPLATES)
def test_families(family: str) -> None:
    assert ToolFormat.of(TEMPLATES[family]).name == family


@pytest.mark.parametrize(("family", "text", "meaning"), ANSWERS)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_calls_are_found(family: str, text: str, meaning: list[Any] | None, size: int) -> None:
    parser = ToolCallParser(ToolFormat.of(TEMPLATES[family]), TOOLS)
    found = []
    for begin in range(0, len(text), size):
        found += parser.push(text[begin : begin + size])
    found += parser.finish()
    wanted = [text] if meaning is None else meaning
    texts = joined(
        [
            w if isinstance(w, str) else {"function": {**w, "arguments": json.dumps(w["arguments"])}}
            for w in wanted
        ]
    )
    assert joined(found) == texts
    ids = [item["id"] for item in found if not isinstance(item, str)]
    assert len(set(ids)) == len(ids)
    if family == "mistral":
        assert all(len(i) == 9 and i.isalnum() for i in ids)


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    parser = ToolCallParser(ToolFormat.of(TEMPLATES["hermes"]), TOOLS)
    assert parser.push("a <tool") == ["a "] and parser.push("box>") == ["<toolbox>"]
    assert parser.push(f"<tool_call>{json.dumps(PLANT)}") == []
    assert len(parser.push("</tool_call>")) == 1 and parser.finish() == []
    parser = ToolCallParser(ToolFormat.of(TEMPLATES["llama-3"]), TOOLS)
    assert parser.push(" ") == [] and parser.push("Hi") == [" Hi"] and parser.push("{") == ["{"]


# -- with a model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "water"}}])
def test_demanded_calls(llama: OpenLlama, family: str, choice: Any) -> None:
    pytest.importorskip("llguidance")
    register_chat_format(f"test-{family}", ChatFormat(family, TEMPLATES[family] + "{{ messages }}"))
    llm = llama(chat_format=f"test-{family}", n_ctx=2048)
    for seed in range(4):
        options: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": seed, "temperature": 3.0}
        result = llm.create_chat_completion(MESSAGES, **options)["choices"][0]
        message = result["message"]
        assert result["finish_reason"] == "tool_calls" and message["content"] is None
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            assert call["type"] == "function"
            if call["function"]["name"] == "plant":
                assert choice == "required" and arguments["kind"] in ("oak", "elm")
            else:
                assert call["function"]["name"] == "water" and arguments["litres"] <= 9
        if choice != "required":
            assert len(message["tool_calls"]) == 1
        streamed: list[Any] = []
        for chunk in llm.create_chat_completion(MESSAGES, stream=True, **options):
            for call in chunk["choices"][0]["delta"].get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(streamed)
                    streamed.append(call["function"] | {})
                else:
                    assert call["index"] == len(streamed) - 1
                    streamed[-1]["arguments"] += call["function"]["arguments"]
        made = [(call["name"], json.loads(call["arguments"])) for call in streamed]
        whole = [call["function"] for call in message["tool_calls"]]
        assert made == [(call["name"], json.loads(call["arguments"])) for call in whole]


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


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral-args"])
def test_marks_that_are_control_tokens(llama: OpenLlama, family: str, tmp_path: Path) -> None:
    """They are shown to the parser, hidden from readers, and asked for by their ids."""
    pytest.importorskip("llguidance")
    spec = models.SPECS["llama-relu"]
    meta = models.metadata(spec)
    tokens, types = list(meta["tokenizer.ggml.tokens"]), list(meta["tokenizer.ggml.token_type"])
    marks = {310: "[TOOL_CALLS]", 311: "[ARGS]", 312: "<tool_call>", 313: "</tool_call>"}
    for i, mark in marks.items():
        tokens[i], types[i] = mark, 3
    meta |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    path = models.write(tmp_path / "marks.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    register_chat_format("test-marks", ChatFormat("marks", TEMPLATES[family] + "{{ messages }}"))
    llm = llama(path, chat_format="test-marks", n_ctx=2048)
    options: dict[str, Any] = {"tools": TOOLS[:1], "tool_choice": "required"}
    result = llm.create_chat_completion(MESSAGES, temperature=2.0, **options)
    assert result["choices"][0]["message"]["content"] is None
    assert len(result["choices"][0]["message"]["tool_calls"]) == 1
    answer = set(llm.input_ids[result["usage"]["prompt_tokens"] :].tolist())
    # The end mark of Hermes is the last token, which is never computed.
    assert answer & marks.keys() == {"hermes": {312}, "mistral": {310}, "mistral-args": {310, 311}}[family]


def scripted(llm: Llama, text: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """Makes a model with byte tokens say a text."""
    script = [3 + byte for byte in text.encode()] + [llm.token_eos()]
    start: dict[str, int] = {}

    def follow(ids: np.ndarray, scores: np.ndarray) -> None:
        at = len(ids) - start.setdefault("n", len(ids))
        scores[:] = -np.inf
        scores[script[at]] = 0.0

    return follow


def test_a_call_by_choice(llama: OpenLlama) -> None:
    llm = llama(chat_format="chatml", n_ctx=1024)
    text = f"Yes.\n<tool_call>\n{json.dumps(PLANT)}\n</tool_call>"
    for choice in (None, "auto"):
        result = llm.create_chat_completion(
            MESSAGES, tools=TOOLS, tool_choice=choice, logits_processor=scripted(llm, text)
        )["choices"][0]
        assert result["message"]["content"] == "Yes." and result["finish_reason"] == "tool_calls"
        assert result["message"]["tool_calls"][0]["function"]["name"] == "plant"
    for options in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        result = llm.create_chat_completion(MESSAGES, logits_processor=scripted(llm, text), **options)[
            "choices"
        ][0]
        assert result["message"] == {"role": "assistant", "content": text}
    result = llm.create_chat_completion(MESSAGES, tools=TOOLS, logits_processor=scripted(llm, "No."))[
        "choices"
    ][0]
    assert result["message"] == {"role": "assistant", "content": "No."} and result["finish_reason"] == "stop"


def test_functions(llama: OpenLlama) -> None:
    llm = llama(chat_format="chatml", n_ctx=1024)
    text = f"<tool_call>\n{json.dumps(PLANT)}\n</tool_call>"
    functions = [t["function"] for t in TOOLS]
    result = llm.create_chat_completion(MESSAGES, functions=functions, logits_processor=scripted(llm, text))[
        "choices"
    ][0]
    assert result["finish_reason"] == "function_call" and "tool_calls" not in result["message"]
    assert result["message"]["function_call"] == {"name": "plant", "arguments": '{"kind": "oak"}'}
    chunks = list(
        llm.create_chat_completion(
            MESSAGES, functions=functions, stream=True, logits_processor=scripted(llm, text)
        )
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert {"function_call": {"name": "plant", "arguments": '{"kind": "oak"}'}} in deltas
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


def prompt_of(llm: Llama, messages: list[Any], **options: Any) -> str:
    result = llm.create_chat_completion(messages, max_tokens=1, **options)
    ids = llm.input_ids.tolist()[: result["usage"]["prompt_tokens"]]
    return llm.detokenize(ids).decode()


CONVERSATION = [
    *MESSAGES,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "plant", "arguments": '{"kind": "oak"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "planted"},
]


def test_prompts_of_templates_without_tools(llama: OpenLlama) -> None:
    llm = llama(chat_format="chatml", n_ctx=2048)
    text = prompt_of(llm, CONVERSATION, tools=TOOLS)
    assert text.startswith("<|im_start|>system\nYou can call") and '"name": "water"' in text
    assert f"<|im_start|>assistant\n<tool_call>\n{json.dumps(PLANT)}\n</tool_call><|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\nplanted\n</tool_response><|im_end|>" in text
    assert "planted" in prompt_of(llm, CONVERSATION)
    with_system = prompt_of(llm, [{"role": "system", "content": "Be kind."}, *MESSAGES], tools=TOOLS)
    assert with_system.count("<|im_start|>system") == 1 and "Be kind.\n\nYou can call" in with_system


def test_prompts_of_templates_with_tools(llama: OpenLlama) -> None:
    template = (
        "{% for t in tools or [] %}T:{{ t.function.name }}\n{% endfor %}{% for m in messages %}{{ m.role }}:"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.kind }}{% endfor %}"
        "{{ m.content or '' }}\n{% endfor %}"
    )
    register_chat_format("test-tools", ChatFormat("test-tools", template))
    llm = llama(chat_format="test-tools")
    assert prompt_of(llm, CONVERSATION, tools=TOOLS) == (
        "T:plant\nT:water\nuser:the tree\nassistant:<tool_call>oak\ntool:planted\n"
    )
    assert prompt_of(llm, MESSAGES, tools=TOOLS, tool_choice="none") == "user:the tree\n"


def test_what_callers_may_not_give(llama: OpenLlama) -> None:
    bad: list[Any] = [
        "x",
        5,
        [5],
        [{}],
        [{"type": "x", "function": {"name": "a"}}],
        [{"function": {"name": ""}}],
    ]
    bad += [[{"function": {"name": 'a"b'}}], [{"function": {"name": "a", "parameters": []}}]]
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"properties": {"a": deep}}
    bad += [[{"function": {"name": "a", "parameters": deep}}], [{"function": {"name": "a", "strict": {1}}}]]
    for tools in bad:
        with pytest.raises(ArgumentError):
            check_tools(tools)
    for choice in ("always", {"function": {"name": "x"}}, {"type": "function"}, 5):
        with pytest.raises(ArgumentError, match="tool_choice"):
            chosen_tools(TOOLS, choice)
    llm = llama(chat_format="chatml")
    for options in (
        {"tools": TOOLS, "functions": []},
        {"tool_choice": "required"},
        {"function_call": {"name": "x"}},
    ):
        with pytest.raises(ArgumentError):
            llm.create_chat_completion(MESSAGES, **options)


def test_a_call_and_a_format_at_once(llama: OpenLlama) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(ArgumentError, match="demands a call"):
        llama(chat_format="chatml", n_ctx=1024).create_chat_completion(
            MESSAGES, tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}
        )


def test_one_call_at_most() -> None:
    form = ToolFormat.of(TEMPLATES["hermes"])
    call = f"<tool_call>{json.dumps(PLANT)}</tool_call>"
    for parts in ([f"Well. {call}\n{call} Done"], [*f"Well. {call}\n{call} Done"]):
        parser = ToolCallParser(form, TOOLS, one=True)
        found = [item for part in parts for item in parser.push(part)] + parser.finish()
        texts = [item for item in found if isinstance(item, str)]
        calls = [item for item in found if not isinstance(item, str)]
        assert "".join(texts) == "Well. " and len(calls) == 1
