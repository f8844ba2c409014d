"""Functions that a model may call: into the prompt, and out of the answer.

Each family of models writes calls in its own way; `ToolFormat.of` tells the family by the chat template.
Where a template knows nothing of tools, they are described in the system message and called as Hermes does.

    form = ToolFormat.of(chat_format.template)
    prompt = chat_format.encode(*form.prepare(messages, tools), ...)   # messages, and tools for the template
    grammar = form.grammar(tools, tokenizer)        # only where a call is demanded
    parser = ToolCallParser(form, tools)            # text in, text and calls out
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ArgumentError
from ..types import ToolCall
from .grammar import LlamaGrammar, closed, need_llguidance
from .parts import held_back
from .tokenizer import Tokenizer
from .tool_styles import (
    MAX_DEPTH,
    BracedStyle,
    JsonStyle,
    KeyedStyle,
    NamedStyle,
    PythonStyle,
    Style,
    TagStyle,
    literals,
    marks,
)

Tool = Mapping[str, Any]
Message = Mapping[str, Any]

MAX_CALLS = 8
"""Most calls of one answer that a grammar allows."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls."""

    name: str
    open: str
    """What stands before a call; "" where an answer that begins with "{" is one."""
    close: str = ""
    """What stands after it; "": the end of the answer."""
    style: Style = field(default_factory=JsonStyle)
    """How a call is written."""
    is_list: bool = False
    """All calls stand in one list."""
    is_group: bool = False
    """All calls stand between one pair of marks."""
    line: str = ""
    """Between marks and calls."""
    separator: str | None = None
    """Between calls; None: there is only one."""
    described: bool = False
    """The template knows nothing of tools."""
    in_system: bool = False
    """The template takes tools as text, from the system message."""

    @classmethod
    def of(cls, template: str) -> ToolFormat:
        """The family of a chat template."""
        if not re.search(r"\btools\b", template):
            return _DESCRIBED
        found = (form for texts, form in _FORMATS if all(text in template for text in texts))
        return next(found, _LLAMA_3)

    def special(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Control tokens that are part of a call's text."""
        texts = [self.open, self.close, "[ARGS]", "[CALL_ID]"]
        texts += [mark for text in (self.open, self.close, *self.style.texts) for mark in marks(text)]
        ids = (tokenizer.id_of(text) for text in texts if text)
        return frozenset(i for i in ids if i is not None and not tokenizer.is_eog(i))

    # -- into the prompt

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[Tool] | None]:
        """Messages and tools as the template takes them: arguments of earlier calls as mappings, not text."""
        if self.described:
            return _described(messages, tools), None
        prepared = [_with_mappings(message) for message in messages]
        if self.in_system and tools:
            return _in_system(prepared, tools), None
        return prepared, list(tools) or None

    # -- a call that must come

    def grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer, *, one: bool = False) -> LlamaGrammar:
        """What an answer of nothing but calls looks like. one: of a single call."""
        lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]

        def literal(text: str) -> str:
            return _literal(text, tokenizer)

        for i, tool in enumerate(tools):
            function = tool["function"]
            schema = {**(function.get("parameters") or {"type": "object"})}
            schema.setdefault("type", "object")
            lines += self.style.rule(i, function["name"], closed(schema), literal)
        begin, end = (literals(text, literal) for text in (self.open + self.line, self.line + self.close))
        end = end if self.close else ""
        more = ""
        if self.separator is not None and not one:
            more = f" ({json.dumps(self.separator) if self.separator else ''} wrapped){{0,{MAX_CALLS - 1}}}"
        wrapped, start = f"{begin} call {end}", f"wrapped{more}"
        if self.is_list:
            wrapped, start = "call", f'{begin} "[" {start} "]" {end}'
        elif self.is_group:
            wrapped, start = "call", f"{begin} {start} {end}"
        lark = "\n".join([f"start: {start}", f"wrapped: {wrapped}", *lines])
        return LlamaGrammar.unchecked(need_llguidance().LLMatcher.grammar_from_lark(lark))

    # -- out of the answer

    def new_id(self) -> str:
        """Mistral's templates insist on nine letters and digits."""
        if self.name.startswith("mistral"):
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def call(self, name: str, arguments: str) -> ToolCall:
        return {
            "id": self.new_id(),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


_HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", separator="\n", line="\n")
_DESCRIBED = replace(_HERMES, name="described", described=True)
_LLAMA_3 = ToolFormat("llama-3", "", style=JsonStyle(arguments="parameters"))
# channels.py finds its calls.
_HARMONY = ToolFormat(
    "harmony", "", style=NamedStyle("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>")
)
_LFM2 = ToolFormat(
    "lfm2", "<|tool_call_start|>", "<|tool_call_end|>", style=PythonStyle(), is_list=True, separator=", "
)
_IN_TAGS = TagStyle(("<function=", ">\n"), ("<parameter=", ">\n"), ("", "\n</parameter>\n"), "</function>")

# What a template has in it that belongs to a format; the first that fits is meant.
_FORMATS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (
        ("[TOOL_CALLS]", "[ARGS]"),
        ToolFormat(
            "mistral-args",
            "[TOOL_CALLS]",
            style=NamedStyle(
                "",
                "[ARGS]",
                before_pattern=r"(?:\[TOOL_CALLS\])?",
                between_pattern=r"(?:\[CALL_ID\]\s*\w*\s*)?\[ARGS\]",  # Mistral Small 3.2 numbers them
            ),
            separator="",
        ),
    ),
    (("[TOOL_CALLS]",), ToolFormat("mistral", "[TOOL_CALLS]", is_list=True, separator=", ")),
    (
        ("<arg_key>",),  # GLM 4.5 and later
        replace(
            _HERMES,
            name="glm-4.5",
            line="",
            style=TagStyle(("", "\n"), ("<arg_key>", "</arg_key>\n"), ("<arg_value>", "</arg_value>\n")),
        ),
    ),
    (
        ("<seed:tool_call>",),
        ToolFormat(
            "seed", "<seed:tool_call>", "</seed:tool_call>", style=_IN_TAGS, separator="\n", line="\n"
        ),
    ),
    (("<tool_call>", "<function="), replace(_HERMES, name="qwen3-coder", style=_IN_TAGS)),
    (
        ("<minimax:tool_call>",),
        ToolFormat(
            "minimax",
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            style=TagStyle(
                ('<invoke name="', '">\n'), ('<parameter name="', '">'), ("", "</parameter>\n"), "</invoke>"
            ),
            is_group=True,
            separator="\n",
            line="\n",
        ),
    ),
    (
        ("<|tool_calls_section_begin|>",),  # Kimi K2
        ToolFormat(
            "kimi",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            style=NamedStyle(
                "<|tool_call_begin|>functions.",
                ":0<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                before_pattern=r"<\|tool_call_begin\|>\s*(?:functions\.)?",
                between_pattern=r"(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            ),
            is_group=True,
            separator="",
        ),
    ),
    (
        ("<｜tool▁calls▁begin｜>", "```json"),  # DeepSeek V3 and R1
        ToolFormat(
            "deepseek",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            style=NamedStyle(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"
            ),
            is_group=True,
            separator="\n",
        ),
    ),
    (
        ("<｜tool▁calls▁begin｜>",),  # DeepSeek V3.1
        ToolFormat(
            "deepseek-v3.1",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            style=NamedStyle("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            is_group=True,
            separator="",
        ),
    ),
    (
        ("<|tool_call>", '<|"|>'),  # Gemma 4
        ToolFormat("gemma-4", "<|tool_call>", "<tool_call|>", style=BracedStyle('<|"|>'), separator=""),
    ),
    (
        ("<start_function_call>",),  # FunctionGemma
        ToolFormat(
            "function-gemma",
            "<start_function_call>",
            "<end_function_call>",
            style=BracedStyle("<escape>"),
            separator="",
        ),
    ),
    (
        ("<|tools_prefix|>",),  # Apertus
        ToolFormat(
            "apertus",
            "<|tools_prefix|>",
            "<|tools_suffix|>",
            style=KeyedStyle(),
            is_list=True,
            separator=", ",
        ),
    ),
    (("<|tool_call_start|>",), _LFM2),
    (("<|tool_list_start|>",), _LFM2),  # templates that write no calls
    (("'List of tools: ['",), _LFM2),
    (('"List of tools: ["',), _LFM2),
    (
        ('<function name="', '<param name="'),  # MiniCPM 5
        ToolFormat(
            "minicpm-5",
            '<function name="',
            "</function>",
            style=TagStyle(("", '">'), ('<param name="', '">'), ("", "</param>")),
            separator="\n",
        ),
    ),
    (
        ("<function_calls>",),  # OLMo 3
        ToolFormat(
            "olmo-3",
            "<function_calls>",
            "</function_calls>",
            style=PythonStyle(),
            is_group=True,
            separator="\n",
        ),
    ),
    (
        ("<|START_ACTION|>",),  # Command R7B and A
        ToolFormat(
            "command-r7b",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            style=JsonStyle("tool_name", "parameters"),
            is_list=True,
            separator=", ",
        ),
    ),
    (
        ("Action:", "tool_name"),  # Command R
        ToolFormat(
            "command-r",
            "Action: ```json\n",
            "```",
            style=JsonStyle("tool_name", "parameters"),
            is_list=True,
            separator=", ",
        ),
    ),
    (("<TOOLCALL>",), ToolFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", is_list=True, separator=", ")),
    (("<tool_calls>",), ToolFormat("hunyuan", "<tool_calls>", "</tool_calls>", is_list=True, separator=", ")),
    (("<tool_call>",), _HERMES),
    (
        ("<|tool|>", "<|/tool|>"),  # Phi-4-mini
        ToolFormat("phi-4", "<|tool_call|>", "<|/tool_call|>", is_list=True, separator=", ", in_system=True),
    ),
    (("<|tool_call|>",), ToolFormat("granite", "<|tool_call|>", is_list=True, separator=", ")),
    ((" functools[",), ToolFormat("functools", " functools", is_list=True, separator=", ")),
    (("<|channel|>",), _HARMONY),
    (("<|observation|>",), ToolFormat("glm-4", "", style=NamedStyle("", "\n"))),
)


class ToolCallParser:
    """Finds calls in an answer while it comes. A call that is not well formed stays text."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], *, one: bool = False) -> None:
        """one: nothing is told after the first call."""
        self._form = form
        self._tools = tools
        self._one = one
        self._is_over = False
        self._names = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._text = ""
        self._inside = False
        self._begun = False
        self._after_call = False

    @property
    def in_channels(self) -> bool:
        """Calls are messages to functions; none are in the answer's text."""
        return self._form is _HARMONY

    def called(self, name: str, arguments: str, *, is_cut: bool = False) -> list[str | ToolCall]:
        """The call of a message to a function; its text where it is none. is_cut: as in finish()."""
        call = self._checked(name, arguments.strip() or ("" if is_cut else "{}"))
        if call is None and is_cut and name in self._names:
            call = self._form.call(name, arguments)
        return self._told([call] if call is not None else [arguments])

    def push(self, text: str) -> list[str | ToolCall]:
        """Adds text; what is certain by now."""
        self._text += text
        return self._told(self._certain())

    def finish(self, *, is_cut: bool = False) -> list[str | ToolCall]:
        """The answer is over: what was held back. is_cut: it would have gone on."""
        return self._told(self._rest(is_cut))

    def _told(self, found: Iterable[str | ToolCall]) -> list[str | ToolCall]:
        told = []
        for item in found:
            if not self._is_over:
                told.append(item)
                self._is_over = self._one and not isinstance(item, str)
        return told

    def _rest(self, is_cut: bool) -> list[str | ToolCall]:
        text, self._text = self._text, ""
        if self._inside:  # the mark at the end may be cut short, or missing
            body = text[: len(text) - held_back(text, self._form.close)]
            text = self._form.open + text
            calls: list[str | ToolCall] = [*self._calls(body)]
            if not calls and is_cut:
                calls = [*self._begun_calls(text)]
            return calls or ([text] if text else [])
        return [text] if text and not (self._after_call and text.isspace()) else []

    def _begun_calls(self, text: str) -> list[ToolCall]:
        """The calls in a text that ends within one."""
        return []

    def _certain(self) -> Iterator[str | ToolCall]:
        form = self._form
        if not form.open:
            yield from self._bare()
            return
        while True:
            if not self._inside:
                at = self._text.find(form.open)
                if at < 0:
                    n = len(self._text) - held_back(self._text, form.open)
                    if self._after_call and not self._text[:n].strip():
                        return  # nothing but space may stand between two calls
                    shown, self._text = self._text[:n], self._text[n:]
                    if shown:
                        self._after_call = False
                        yield shown
                    return
                if self._text[:at].strip():
                    yield self._text[:at]
                self._text, self._inside = self._text[at + len(form.open) :], True
            at = self._text.find(form.close) if form.close else -1
            if at < 0:
                return
            body, self._text = self._text[:at], self._text[at + len(form.close) :]
            self._inside, self._after_call = False, True
            calls: list[str | ToolCall] = [*self._calls(body)]
            yield from calls or [form.open + body + form.close]

    def _bare(self) -> Iterator[str | ToolCall]:
        """An answer that begins with "{", or with a name and a line break, may be a call as a whole."""
        if self._inside:
            return
        if not self._begun:
            begin = self._text.lstrip()
            starts: tuple[str, ...] = ("{", "<|python_tag|>")
            if isinstance(self._form.style, NamedStyle):
                starts = tuple(f"{name}\n" for name in self._names)
            if not begin or any(start.startswith(begin) and start != begin for start in starts):
                return
            self._inside = begin.startswith(starts)
            self._begun = True
        if not self._inside:
            shown, self._text = self._text, ""
            if shown:
                yield shown

    def _calls(self, body: str) -> Iterator[ToolCall]:
        """The calls in a text that holds nothing else; none if there is one that cannot be."""
        found = [self._checked(*pair) for pair in self._form.style.read(body, self._names)]
        if all(call is not None for call in found):
            yield from (call for call in found if call is not None)

    def _checked(self, name: Any, arguments: Any) -> ToolCall | None:
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return None
        if name not in self._names or not isinstance(arguments, dict):
            return None
        return self._form.call(name, json.dumps(arguments, ensure_ascii=False))


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """A text in a grammar; a control token is asked for by its id."""
    token = tokenizer.id_of(text)
    return f"<[{token}]>" if token is not None and tokenizer.is_control(token) else json.dumps(text)


# -- what callers give


def check_tools(tools: Any) -> list[Tool]:
    """Raises ArgumentError unless these are tools as OpenAI's API has them."""
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise ArgumentError("tools must be a list")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
            raise ArgumentError(f"tool {i} is not {{'type': 'function', 'function': {{...}}}}")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]{1,128}", name, re.ASCII):
            raise ArgumentError(f"tool {i} has the name {name!r}; names are letters, digits, '_', '-', '.'")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ArgumentError(f"the parameters of {name} are not a JSON schema")
        try:
            depth = _depth(json.loads(json.dumps(function)))
        except (TypeError, ValueError, RecursionError):
            raise ArgumentError(f"the description of {name} is not JSON") from None
        if depth > MAX_DEPTH:
            raise ArgumentError(f"the description of {name} is nested deeper than {MAX_DEPTH}")
    return [{"type": "function", **tool} for tool in tools]


def _depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, parts), default=0)


def chosen_tools(tools: Sequence[Tool], choice: Any) -> tuple[list[Tool], bool]:
    """The tools that `tool_choice` leaves, and whether one must be called. Raises ArgumentError."""
    if choice == "none" or not tools:
        if choice not in (None, "none", "auto"):
            raise ArgumentError("tool_choice demands a call, but there are no tools")
        return [], False
    if choice in (None, "auto"):
        return list(tools), False
    if choice == "required":
        return list(tools), True
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    left = [tool for tool in tools if tool["function"]["name"] == name]
    if name is None or not left:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise ArgumentError(f"tool_choice is {choice!r}; the tools are {names}")
    return left, True


def tools_of_functions(functions: Any) -> list[Tool]:
    """The tools that the older argument `functions` means."""
    if isinstance(functions, (str, bytes)) or not isinstance(functions, Sequence):
        raise ArgumentError("functions must be a list")
    return check_tools([{"type": "function", "function": function} for function in functions])


# -- messages


def _with_mappings(message: Message) -> Message:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, (list, tuple)):
        return message
    return {**message, "tool_calls": [_with_mapping(call) for call in calls]}


def _with_mapping(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _in_system(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """With the functions' descriptions as `tools` of the system message."""
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    first = messages[0] if messages and messages[0].get("role") == "system" else None
    system = {**(first or {"role": "system", "content": ""}), "tools": listed}
    return [system, *(messages[1:] if first is not None else messages)]


def _described(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """A conversation with tools, for templates that know only system, user and assistant."""
    written: list[Message] = []
    for message in map(_with_text, messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role in ("tool", "function"):
            answer = f"<tool_response>\n{message.get('content')}\n</tool_response>"
            written.append({"role": "user", "content": answer})
        elif role == "assistant" and (message.get("tool_calls") or message.get("function_call")):
            calls = message.get("tool_calls") or [{"function": message["function_call"]}]
            if not isinstance(calls, (list, tuple)):
                raise ArgumentError("'tool_calls' of a message is not a list")
            texts = [_call_text(_with_mapping(call)) for call in calls]
            content = "\n".join([*([message["content"]] if message.get("content") else []), *texts])
            written.append({"role": "assistant", "content": content})
        else:
            written.append(message)
    if tools:
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        system = (
            f"You can call these functions:\n{listed}\n"
            "To call one, write nothing but\n<tool_call>\n"
            '{"name": "its name", "arguments": {...}}\n</tool_call>'
        )
        if written and written[0].get("role") == "system":
            written[0] = {**written[0], "content": f"{written[0].get('content')}\n\n{system}"}
        else:
            written.insert(0, {"role": "system", "content": system})
    return written


def _with_text(message: Message) -> Message:
    """With its content as one text, where it is a list of texts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return {**message, "content": "\n".join(map(str, texts))}
    if content is not None and not isinstance(content, str):
        raise ArgumentError("a message's content is neither text nor a list of texts")
    return message


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ArgumentError("a tool call of a message has no 'function'")
    made = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>"
