"""Check chat templates against published ones: the text of conversations, and calls of functions.

    python scripts/check_templates.py [FOLDER] [--only NAME]

FOLDER holds templates, NAME.jinja. llama.cpp keeps a collection in its folder `models/templates`; without
FOLDER it is fetched into build/templates.

Of each template:
- conversations with and without a system message, tools, and a call with its answer give the text that
  transformers makes of them;
- calls that the template writes, as an earlier answer of the assistant, are found in that text as an
  answer, however it is cut: the template says how its model writes calls.

Prints a line for each. Exit status 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llama_cpp_source import fetch
from transformers.utils.chat_template_utils import _compile_jinja_template as compile_theirs

from powerinfer._engine.chat_options import is_about_tools
from powerinfer._text.channels import ChannelParser, has_channels
from powerinfer._text.chat_format import ChatFormat, ChatFormatError
from powerinfer._text.reasoning import ReasoningParser, thinks
from powerinfer._text.tool_calls import ToolCallParser, ToolFormat

DEFAULT_FOLDER = Path(__file__).parent.parent / "build" / "templates"

NO_CALLS = {
    # architectures that the engine does not run, or calls that their templates do not write
    "Kimi-K3": "written in tags of its own",
    "MiniMax-M3": "written in tags of its own",
    "deepseek-ai-DeepSeek-V3.2": "written in tags of its own",
    "deepseek-ai-DeepSeek-V4": "written in tags of its own",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "written in tags of its own",
    "muse-glimmer": "written in tags of its own",
    "tencent-Hy3": "written in tags of its own",
    "upstage-Solar-Open-100B": "written in marks of its own",
    "GigaChat3-10B-A1.8B": "messages of a role of their own",
    "GigaChat3.1-10B-A1.8B": "messages of a role of their own",
    "meetkai-functionary-medium-v3.1": "tags by function",
    "meetkai-functionary-medium-v3.2": "it takes arguments as text alone",
    "LFM2-8B-A1B": "it leaves earlier calls out",
    "LFM2.5-Instruct": "it leaves earlier calls out",
    "ibm-granite-granite-3.3-2B-Instruct": "it leaves earlier calls out",
    "LFM2.5-8B-A1B": "its texts are between quotes that are not escaped",
}
ENDS = re.compile(
    r"(\s|<EOS>|</s>|\[e~\[|\[/?[A-Z_]+\]|<\|(user|observation|tool_response|calls?|return)>?\|?>?"
    r"|<\|?(im_end|eot_id|eom_id|end|end_of_text|endoftext|END_OF_TURN_TOKEN|assistant_end)\|>"
    r"|<(turn|end_of_turn)\|?>|<\|end▁of▁sentence\|>)+$"
)

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "a city"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}
    for name, parameters in (("get_weather", PARAMETERS), ("send", TEXT))
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Köln "am" Rhein', "days": 3}),
    ("send", {"text": "a <b> & 'c'\nline {1}"}),
]
USER = {"role": "user", "content": "Hello?"}


def calling(calls: Sequence[tuple[str, Any]], content: str = "") -> dict[str, Any]:
    """A message of the assistant with calls."""
    written = [
        {"id": f"abcdefg{i:02d}", "type": "function", "function": {"name": name, "arguments": json.dumps(of)}}
        for i, (name, of) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": written}


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "a question": ([USER], None),
    "a system message": (
        [{"role": "system", "content": "Be kind."}, USER, {"role": "assistant", "content": "Hi!"}, USER],
        None,
    ),
    "tools": ([USER], TOOLS),
    "a call and its answer": (
        [
            USER,
            calling(CALLS[:1]),
            {"role": "tool", "tool_call_id": "abcdefg00", "name": "get_weather", "content": '{"t": 3}'},
        ],
        TOOLS,
    ),
}


def ours(template: str, messages: list[Any], tools: list[Any] | None, begin: bool = True) -> str:
    """As create_chat_completion() makes it."""
    if tools or any(map(is_about_tools, messages)):
        messages, tools = ToolFormat.of(template).prepare(messages, tools or [])
    return ChatFormat("published", template).render(
        messages, add_generation_prompt=begin, tools=tools, bos="<BOS>", eos="<EOS>"
    )


def theirs(template: str, messages: list[Any], tools: list[Any] | None) -> str:
    """As transformers makes it, which says that arguments of calls are to be mappings."""
    messages = json.loads(json.dumps(messages))
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    marks = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
    text: str = compile_theirs(template).render(
        messages=messages, tools=tools, add_generation_prompt=True, **marks
    )
    return text


def n_common(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def texts(template: str) -> Iterator[str]:
    """What is wrong with the text of conversations."""
    form = ToolFormat.of(template)
    for name, (messages, tools) in CONVERSATIONS.items():
        if tools and (form.described or form.in_system):
            continue  # a message of ours says what there is
        try:
            expected = theirs(template, messages, tools)
        except Exception:  # a template may refuse what it likes
            continue
        try:
            got = ours(template, messages, tools)
        except ChatFormatError as error:
            yield f"{name}: {error}"
            continue
        clock = re.compile(r"\d\d:\d\d(:\d\d)?")
        if clock.sub("", got) != clock.sub("", expected):
            at = n_common(got, expected)
            yield f"{name}: {got[max(at - 40, 0) : at + 60]!r}, not {expected[max(at - 40, 0) : at + 60]!r}"


def parsed(template: str, text: str, step: int) -> list[tuple[str, Any]]:
    """The calls in an answer that comes in pieces."""
    parser: Any = ToolCallParser(ToolFormat.of(template), TOOLS)
    marks = thinks(template)
    if has_channels(template):
        parser = ChannelParser(parser)
    elif marks is not None:
        parser = ReasoningParser(parser, marks=marks)
    found = [item for i in range(0, len(text), step) for item in parser.push(text[i : i + step])]
    found += parser.finish()
    calls = [item["function"] for item in found if isinstance(item, dict)]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def calls(template: str) -> Iterator[str]:
    """What is wrong with calls."""
    for n, content in ((1, ""), (1, "I look."), (2, ""), (2, "I look.")):
        try:
            before = ours(template, [USER], TOOLS)
            text = ours(template, [USER, calling(CALLS[:n], content)], TOOLS, begin=False)
        except ChatFormatError:
            continue  # Llama 3.1 takes one call at a time
        at = n_common(before, text)
        mark = max(text.rfind("<", 0, at), text.rfind("[", 0, at))
        if mark >= 0 and not re.search(r"[>\]]", text[mark:at]):
            at = mark  # what both begin with ended within a mark
        answer = ENDS.sub("", text[at:])
        for step in (1, 7, len(answer) + 1):
            got = parsed(template, answer, step)
            shown = [call for call in CALLS[:n] if call[0] in answer]  # gpt-oss's shows one of several
            if got != shown or not got:
                yield f"{n} calls after {content!r}, by {step}: {answer!r} gives {got}"
                break


def main() -> int:
    parser = argparse.ArgumentParser(description="Check chat templates against published ones.")
    parser.add_argument("folder", nargs="?", type=Path, help="with NAME.jinja files")
    parser.add_argument("--only", default="", metavar="NAME", help="templates with this in their names")
    args = parser.parse_args()
    folder = args.folder
    if folder is None:
        folder = DEFAULT_FOLDER
        if not any(folder.glob("*.jinja")):
            fetch(folder, "models/templates/*.jinja")
    n, n_wrong = 0, 0
    for path in sorted(folder.glob("*.jinja")):
        if args.only not in path.name:
            continue
        template = path.read_text()
        wrong = list(texts(template))
        told = "ok"
        if path.stem in NO_CALLS:
            told = f"ok, but for calls: {NO_CALLS[path.stem]}"
        else:
            wrong += calls(template)
        n, n_wrong = n + 1, n_wrong + bool(wrong)
        print(f"{path.stem:<52} {ToolFormat.of(template).name:<14} {'WRONG' if wrong else told}")
        for line in wrong:
            print(f"    {line}")
    print(f"{n} templates, {n_wrong} wrong")
    return 1 if n_wrong or not n else 0


if __name__ == "__main__":
    sys.exit(main())
