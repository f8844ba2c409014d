"""Answers of gpt-oss: what is for the reader, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from powerinfer import Llama
from powerinfer._text.channels import ChannelParser, has_channels
from powerinfer._text.parts import Thought
from powerinfer._text.tool_calls import ToolCallParser, ToolFormat
from powerinfer._text.tool_stream import ToolCallStream, WholeAnswerParser
from tests import models

THOUGHT = "<|channel|>analysis<|message|>The user < I say <|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CASES = [
    (THOUGHT + FINAL + "Hello <b>!", "Hello <b>!"),
    ("<|channel|>final<|message|>Hi", "Hi"),
    ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
    (THOUGHT + "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}", ""),
    (THOUGHT + FINAL + "one<|end|>" + FINAL + "two", "onetwo"),
    ("no channels < at all <|", "no channels < at all <|"),
    ("<|start|>assistant<|message|>plain", "plain"),
    ("<|channel|>analysis<|message|>not at an end", ""),
    ("<|channel|>fin", ""),
    (" to=functions.f<|channel|>commentary json<|message|>{}", ""),
    (" to=functions.f", ""),
    (" to=function", " to=function"),  # not the beginning of a message
    ("to be, or", "to be, or"),
    (" ", " "),
    ("", ""),
]


@pytest.mark.parametrize("step", [1, 2, 5, 1000])
@pytest.mark.parametrize(("text", "expected"), CASES)
def test_the_final_channel_is_the_answer(text: str, expected: str, step: int) -> None:
    parser = ChannelParser()
    parts = [part for i in range(0, len(text), step) for part in parser.push(text[i : i + step])]
    parts += parser.finish()
    assert "".join(part for part in parts if isinstance(part, str)) == expected
    assert all(parts)


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    parser = ChannelParser()
    assert parser.push("<|channel|>final<|message|>a <") == ["a "]
    assert parser.push("b") == ["<b"]
    assert parser.push("<|en") == []
    assert parser.push("tity") == ["<|entity"]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def test_thoughts_are_told_apart() -> None:
    for step in (1, 3, 1000):
        text = THOUGHT + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + FINAL + "Done"
        parser = ChannelParser()
        found = [item for i in range(0, len(text), step) for item in parser.push(text[i : i + step])]
        found += parser.finish()
        thought = "".join(item.text for item in found if isinstance(item, Thought))
        assert thought == "The user < I say "
        assert "".join(item for item in found if isinstance(item, str)) == "I look.Done"


@pytest.mark.parametrize("step", [1, 4, 1000])
@pytest.mark.parametrize("kind", [ToolCallParser, ToolCallStream])
@pytest.mark.parametrize(
    ("text", "calls", "shown"),
    [
        (THOUGHT + CALL + '{"a": [1, "<|"]}', [("f", {"a": [1, "<|"]})], ""),
        (CALL + "{}<|end|>" + CALL + ' {"b": 2} ', [("f", {}), ("f", {"b": 2})], ""),
        (CALL, [("f", {})], ""),
        ("<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}", [("f", {})], ""),
        # The prompt ended with <|start|>assistant: an answer may begin within a head.
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [("f", {"a": 1})], ""),
        ("to=functions.f <|constrain|>json<|message|>{}<|end|>" + FINAL + "!", [("f", {})], "!"),
        (CALL.replace(".f ", ".g ") + "{}", [], "{}"),  # no such function: as other formats have it
        (CALL + '{"a"', [], '{"a"'),
        (CALL + "[]", [], "[]"),
        ('<|start|>assistant<|channel|>commentary to=browser.open<|message|>{"a": 1}', [], ""),
        (FINAL + '{"name": "f", "arguments": {}}', [], '{"name": "f", "arguments": {}}'),
    ],
)
def test_messages_to_functions_are_calls(
    text: str, calls: list[Any], shown: str, step: int, kind: type[ToolCallParser]
) -> None:
    template = "{{ tools }} {{ messages }} <|channel|>"
    parser = ChannelParser(kind(ToolFormat.of(template), TOOLS))
    found = [item for i in range(0, len(text), step) for item in parser.push(text[i : i + step])]
    found += parser.finish()
    made = [item["function"] for item in found if isinstance(item, dict)]
    assert [(call["name"], json.loads(call["arguments"])) for call in made] == calls
    assert "".join(item for item in found if isinstance(item, str)) == shown


@pytest.mark.parametrize("kind", [WholeAnswerParser, ToolCallStream])
def test_a_call_that_is_cut_off(kind: type[ToolCallParser]) -> None:
    for text, arguments, shown in (
        (CALL + '{"a"', ['{"a"'], ""),
        (CALL, [""], ""),
        (CALL + '{"a": 1}', ['{"a": 1}'], ""),
        (CALL.replace(".f ", ".g ") + '{"a"', [], '{"a"'),
    ):
        parser = ChannelParser(kind(ToolFormat.of("{{ tools }} <|channel|>"), TOOLS))
        found = parser.push(text) + parser.finish(is_cut=True)
        assert [item["function"]["arguments"] for item in found if isinstance(item, dict)] == arguments
        assert "".join(item for item in found if isinstance(item, str)) == shown


def test_one_call_at_most() -> None:
    parser = ChannelParser(ToolCallParser(ToolFormat.of("{{ tools }} <|channel|>"), TOOLS, one=True))
    found = parser.push(CALL + "{}<|end|>" + CALL + '{"b": 2}<|end|>') + parser.finish()
    assert [item["function"]["arguments"] for item in found] == ["{}"]


def test_calls_are_looked_for_in_the_answer_alone() -> None:
    """Where a template has channels and knows nothing of tools."""
    template = "{{ messages }} <|channel|>"
    form = ToolFormat.of(template)
    call = form.open + '{"name": "f", "arguments": {}}' + form.close
    parser = ChannelParser(ToolCallParser(form, TOOLS))
    found = parser.push(f"<|channel|>analysis<|message|>{call}<|end|>{FINAL}{call}") + parser.finish()
    assert [item["function"]["name"] for item in found if isinstance(item, dict)] == ["f"]
    assert has_channels(template) and not has_channels("{{ messages }}")


CONTROLS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """A small model whose vocabulary has the format's marks as control tokens, as published files do."""
    spec = models.SPECS["gpt-oss"]
    template = (
        "<|start|>system<|message|>{{ tools }}<|end|>{% for m in messages %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
        "{# <|channel|> #}"
    )
    meta = models.metadata(spec) | {"tokenizer.chat_template": template}
    tokens, kinds = list(meta["tokenizer.ggml.tokens"]), list(meta["tokenizer.ggml.token_type"])
    for i, text in enumerate(CONTROLS, len(tokens) - 1 - len(CONTROLS)):
        tokens[i], kinds[i] = text, 3
    merges = [m for m in meta["tokenizer.ggml.merges"] if m.replace(" ", "") in tokens]
    meta |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    meta["tokenizer.ggml.merges"] = merges
    meta["tokenizer.ggml.eos_token_id"] = tokens.index("<|return|>")
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    models.write(path, meta, models.file_tensors(spec, models.draw(spec)))
    with Llama(path, n_ctx=512, n_threads=1, verbose=False) as llm:
        yield llm


def made_to_say(
    llm: Llama, text: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Any, list[Any]]:
    """The whole answer, and the deltas of the same in parts, of a model that says just this."""
    ids = llm.tokenizer.encode(text, add_bos=False, special=True)
    monkeypatch.setattr(type(llm), "_generation", lambda *_, **__: iter(ids))
    asked: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, **options}
    whole = llm.create_chat_completion(**asked)["choices"][0]
    return whole, [part["choices"][0] for part in llm.create_chat_completion(stream=True, **asked)]


def test_marks_that_are_control_tokens(harmony: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<|channel|>analysis<|message|>th<|end|>" + FINAL + "yes<|return|>no"
    whole, parts = made_to_say(harmony, text, monkeypatch)
    assert whole["message"] == {"role": "assistant", "content": "yes", "reasoning_content": "th"}
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "stop"
    for name, said in (("content", "yes"), ("reasoning_content", "th")):
        assert "".join(part["delta"].get(name) or "" for part in parts) == said


def test_a_call_of_a_model_that_has_the_marks(harmony: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<|channel|>analysis<|message|>th<|end|>" + CALL + '{"a": 1}<|call|>more'
    whole, parts = made_to_say(harmony, text, monkeypatch, tools=TOOLS)
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert whole["message"]["content"] is None and whole["message"]["reasoning_content"] == "th"
    assert whole["finish_reason"] == parts[-1]["finish_reason"] == "tool_calls"
    told = [delta["function"] for part in parts for delta in part["delta"].get("tool_calls", ())]
    assert told[0]["name"] == "f" and "".join(one["arguments"] for one in told) == '{"a": 1}'
    assert not any(part["delta"].get("content") for part in parts)


def test_a_demanded_call(harmony: Llama) -> None:
    """The grammar writes it in a message to the function."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    whole = harmony.create_chat_completion(
        [{"role": "user", "content": "Hi"}],
        tools=tools,
        tool_choice="required",
        max_tokens=200,
        temperature=0.0,
    )["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "f" and isinstance(
        json.loads(call["function"]["arguments"])["a"], bool
    )
    assert whole["finish_reason"] == "tool_calls"


def test_a_chat_with_a_template_of_channels(tmp_path: Path) -> None:
    """A grammar lets the model write channels; whole and in parts the answer is what the last one holds."""
    spec = models.SPECS["gpt-oss"]
    template = (
        "<|start|>system<|message|>Date: {{ strftime_now('%Y-%m-%d') }}<|end|>{% for m in messages %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
        "{# <|channel|> #}"
    )
    meta = models.metadata(spec) | {"tokenizer.chat_template": template}
    path = models.write(tmp_path / "m.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    grammar = f'root ::= "<|channel|>analysis<|message|>th<|end|>" "{FINAL}" "yes"'
    options: Any = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, "temperature": 0.0}
    options["grammar"] = grammar
    with Llama(path, n_ctx=256, n_threads=1, verbose=False) as llm:
        whole = llm.create_chat_completion(**options)
        parts = [part["choices"][0]["delta"] for part in llm.create_chat_completion(stream=True, **options)]
    assert whole["choices"][0]["message"]["content"] == "yes"
    assert "".join(part.get("content") or "" for part in parts) == "yes"
    assert whole["choices"][0]["message"]["reasoning_content"] == "th"
