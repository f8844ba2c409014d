"""Answers of gpt-oss: what is for the reader, however the text is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from powerinfer import Llama
from powerinfer._text.channels import ChannelParser, has_channels
from powerinfer._text.tool_calls import ToolCallParser, ToolFormat
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


def test_calls_are_looked_for_in_the_answer_alone() -> None:
    template = "{{ tools }} {{ messages }} <|channel|>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    form = ToolFormat.of(template)
    call = form.open + '{"name": "f", "arguments": {}}' + form.close
    parser = ChannelParser(ToolCallParser(form, tools))
    found = parser.push(f"<|channel|>analysis<|message|>{call}<|end|>{FINAL}{call}") + parser.finish()
    assert [item["function"]["name"] for item in found if not isinstance(item, str)] == ["f"]
    assert has_channels(template) and not has_channels("{{ messages }}")


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
