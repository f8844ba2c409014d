"""Thoughts before an answer: what the parser makes of texts, and chats of models that think."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from powerinfer import Llama
from powerinfer._text.chat_format import ChatFormat, register_chat_format
from powerinfer._text.parts import CallPart, Thought
from powerinfer._text.reasoning import MARKS, ReasoningParser, thinks
from powerinfer._text.tool_calls import ToolFormat
from powerinfer._text.tool_stream import ToolCallStream
from powerinfer._text.tool_styles import marks as control_marks
from tests import models
from tests.powerinfer.test_tool_calls import PLANT, TEMPLATES, TOOLS


def split(items: list[Any]) -> tuple[str, str]:
    thought = "".join(item.text for item in items if isinstance(item, Thought))
    return thought, "".join(item for item in items if isinstance(item, str))


CASES = [
    ("<think>a b</think>c", ("a b", "c")),
    ("\n <think>\n a\n b \n</think>\n\n c \n", ("a\n b", "c \n")),
    ("<think></think>c", ("", "c")),
    ("<think>\n\n</think>\n\nc", ("", "c")),
    ("<think>a </thinka> b", ("a </thinka> b", "")),
    ("<think>a </thi", ("a </thi", "")),
    ("<thin", ("", "<thin")),
    ("<thing>a</think>", ("", "<thing>a</think>")),
    ("Well <think>a</think>", ("", "Well <think>a</think>")),
    (" plain ", ("", " plain ")),
    ("", ("", "")),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_thoughts_are_split_off(text: str, wanted: tuple[str, str], size: int) -> None:
    parser = ReasoningParser()
    found = [item for i in range(0, len(text), size) for item in parser.push(text[i : i + size])]
    assert split(found + parser.finish()) == wanted
    if text.lstrip().startswith("<think>"):
        text = text.lstrip()[7:]
        parser = ReasoningParser(begun=True)
        found = [item for i in range(0, len(text), size) for item in parser.push(text[i : i + size])]
        assert split(found + parser.finish()) == wanted


@pytest.mark.parametrize("marks", MARKS)
def test_marks_of_families(marks: tuple[str, str], tmp_path: Path) -> None:
    """Found in templates and in answers, also as control tokens, which readers do not see."""
    template = f"{{{{ messages[0].content }}}}{{% if false %}}{marks[0]}{marks[1]}{{% endif %}}"
    assert thinks(template) == marks
    for size in (1, 1000):
        parser, text = ReasoningParser(marks=marks), f"{marks[0]}\na < b{marks[1][:3]}{marks[1]}\nc"
        found = [item for i in range(0, len(text), size) for item in parser.push(text[i : i + size])]
        assert split(found + parser.finish()) == (f"a < b{marks[1][:3]}", "c")
    spec = models.SPECS["llama-relu"]
    meta = models.metadata(spec)
    tokens, types = list(meta["tokenizer.ggml.tokens"]), list(meta["tokenizer.ggml.token_type"])
    controls = [part for mark in marks for part in control_marks(mark)]
    for i, mark in enumerate(controls):
        tokens[310 + i], types[310 + i] = mark, 3
    meta |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    path = models.write(tmp_path / "marks.gguf", meta, models.file_tensors(spec, models.draw(spec)))
    register_chat_format("test-marks", ChatFormat("marks", template))
    with Llama(path, chat_format="test-marks", n_threads=1, verbose=False) as llm:
        ids: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, controls))})", f"{marks[0]}so{marks[1]}yes"):
            at = controls.index(part) + 310 if part in controls else 0
            ids += [at] if at else [3 + byte for byte in part.encode()]
        answer = llm.create_chat_completion(
            [{"role": "user", "content": "Hi"}], logits_processor=says_ids(llm, ids)
        )
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == ("so", "yes")


def test_thoughts_come_as_they_are_made() -> None:
    parser = ReasoningParser()
    assert parser.push("<think>") == [] and parser.push("\nA") == [Thought("A")]
    assert parser.push(" b ") == [Thought(" b")] and parser.push("c<") == [Thought(" c")]
    assert parser.push("/think>") == [] and parser.finish() == []
    parser = ReasoningParser()
    assert parser.push("<think>a</thi") == [Thought("a")] and parser.push("nk>\n") == []
    assert parser.push("b") == ["b"] and parser.finish() == []


def test_calls_after_a_thought() -> None:
    inner = ToolCallStream(ToolFormat.of(TEMPLATES["hermes"]), TOOLS)
    parser = ReasoningParser(inner)
    text = f"<think>{json.dumps(PLANT)}</think>\n<tool_call>{json.dumps(PLANT)}</tool_call>"
    found = [item for c in text for item in parser.push(c)] + parser.finish()
    assert split(found) == (json.dumps(PLANT), "")
    assert [item["function"]["name"] for item in found if isinstance(item, dict)] == ["plant"]
    assert json.loads("".join(i.text for i in found if isinstance(i, CallPart))) == PLANT["arguments"]


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %} <think>\n\n</think>\n\n"
    "{% elif open %} <think>\n{% endif %}"
)


def says(llm: Llama, text: str) -> Any:
    """A logits processor with which the model says just this."""
    return says_ids(llm, llm.tokenizer.encode(text, add_bos=False, space_prefix=False))


def says_ids(llm: Llama, tokens: list[int]) -> Any:
    ids = [*tokens, llm.token_eos()]
    begin: list[int] = []

    def force(input_ids: Any, scores: Any) -> Any:
        begin.append(len(input_ids))
        scores[:] = -1e9
        scores[ids[len(input_ids) - begin[0]]] = 0
        return scores

    return force


def test_chats_of_a_model_that_thinks() -> None:
    assert thinks(TEMPLATE) and not thinks("[assistant]")
    register_chat_format("test-thinks", ChatFormat("thinks", TEMPLATE))
    messages = [{"role": "user", "content": "Hi"}]
    with Llama.demo(chat_format="test-thinks", n_ctx=256, n_threads=1, verbose=False) as llm:
        for text, variables, wanted in (
            ("<think>Hm, well</think> Hello", {}, ("Hm, well", "Hello")),
            ("Hm, well</think> Hello", {"open": True}, ("Hm, well", "Hello")),
            ("Hello </think>", {"enable_thinking": False}, (None, "Hello </think>")),
            ("Hello", {}, (None, "Hello")),
        ):
            options: Any = {"chat_template_kwargs": variables, "logprobs": True}
            result = llm.create_chat_completion(messages, logits_processor=says(llm, text), **options)
            (choice,) = result["choices"]
            message = choice["message"]
            assert (message.get("reasoning_content"), message["content"]) == wanted
            told = "".join(entry["token"] for entry in choice["logprobs"]["content"])
            assert told.startswith(text)  # of thoughts, too
            options |= {"logits_processor": says(llm, text), "stream": True}
            deltas = [part["choices"][0]["delta"] for part in llm.create_chat_completion(messages, **options)]
            streamed = ["".join(d.get(name, "") for d in deltas) for name in ("reasoning_content", "content")]
            assert streamed == [wanted[0] or "", wanted[1]]
            assert not any("reasoning_content" in d and "content" in d for d in deltas)


@pytest.mark.parametrize("mark", ["<think>", "<|channel|>"])
def test_the_template_that_is_used_says_whether_a_model_thinks(mark: str) -> None:
    """Conversations with tools may have another one."""
    plain = TEMPLATE.split("{% if enable_thinking")[0]
    marked = plain + f"{{% if false %}}{mark}{{% endif %}}"
    text = {
        "<think>": "<think>Hm</think>Hi",
        "<|channel|>": "<|channel|>analysis<|message|>Hm<|end|><|start|>a<|channel|>final<|message|>Hi",
    }[mark]
    for name, formats in (("for-tools", (plain, marked)), ("for-others", (marked, plain))):
        register_chat_format(f"test-{name}", ChatFormat(name, formats[0], with_tools=formats[1]))
        with Llama.demo(chat_format=f"test-{name}", n_ctx=512, n_threads=1, verbose=False) as llm:
            for tools in (None, TOOLS):
                options: Any = {"tools": tools, "logits_processor": says(llm, text)}
                result = llm.create_chat_completion([{"role": "user", "content": "Hi"}], **options)
                message = result["choices"][0]["message"]
                split_off = (name == "for-tools") == (tools is not None)
                wanted = ("Hm", "Hi") if split_off else (None, text)
                assert (message.get("reasoning_content"), message["content"]) == wanted


def test_a_grammar_leaves_no_room_for_thoughts() -> None:
    pytest.importorskip("llguidance", reason="the extra powerinfer[grammar] is not installed")
    register_chat_format("test-thinks", ChatFormat("thinks", TEMPLATE))
    with Llama.demo(chat_format="test-thinks", n_ctx=256, n_threads=1, verbose=False) as llm:
        result = llm.create_chat_completion(
            [{"role": "user", "content": "Hi"}],
            chat_template_kwargs={"open": True},
            response_format={"type": "choice", "choice": ["yes"]},
        )
    assert result["choices"][0]["message"] == {"role": "assistant", "content": "yes"}
