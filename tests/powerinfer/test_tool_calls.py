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
from powerinfer._text.tool_calls import ToolCallParser, ToolFormat, check_tools, chosen_tools
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


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off(llama: OpenLlama, stream: bool) -> None:
    llm = llama(chat_format="chatml", n_ctx=1024)
    call = f"<tool_call>\n{json.dumps(PLANT)}\n</tool_call>"
    told = []
    for text in (
        call[: call.index("ak")],
        call[: call.index("tool_call>", 20) - 2],
        call[: call.index("pl") + 2],
    ):
        n = len(llm.tokenizer.encode(text, add_bos=False, space_prefix=False))
        hook = {"logits_processor": scripted(llm, text), "max_tokens": n, "tools": TOOLS}
        if stream:
            chunks = list(llm.create_chat_completion(MESSAGES, stream=True, **hook))
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            calls = [one["function"] for delta in deltas for one in delta.get("tool_calls", [])]
            arguments = "".join(one["arguments"] for one in calls) if calls else None
            content = "".join(delta.get("content") or "" for delta in deltas) or None
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            choice = llm.create_chat_completion(MESSAGES, **hook)["choices"][0]
            found = choice["message"].get("tool_calls")
            arguments = found[0]["function"]["arguments"] if found else None
            content, reason = choice["message"]["content"], choice["finish_reason"]
        told.append((arguments, content, reason))
    assert told == [
        ('{"kind": "o', None, "length"),
        ('{"kind": "oak"}', None, "length"),
        (None, '<tool_call>\n{"name": "pl', "length"),
    ]


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
