"""From a conversation to the prompt that a model was trained on.

A `ChatFormat` is a Jinja template and the strings that end an answer. The template comes from the file
(`tokenizer.chat_template`), or from the formats known here by name, which are short descriptions of how each
turn is written, turned into templates of the same kind.

The text of a message is not trusted either: `<|im_end|>` written by a user must not end his turn.
`ChatFormat.encode` keeps such text text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .chat_template import ChatFormatError, render_template
from .tokenizer import Tokenizer

__all__ = [
    "ChatFormat",
    "ChatFormatError",
    "begins_with_bos",
    "chat_format_names",
    "choose_chat_format",
    "get_chat_format",
    "register_chat_format",
]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD  # private use, plane 16


@dataclass(frozen=True)
class ChatFormat:
    """How the turns of a conversation are written.

    name: for messages to the user. template: a Jinja template with the variables that chat templates have
    (`messages`, `add_generation_prompt`, `tools`, `bos_token`, `eos_token`). stop: strings that end an
    answer; tokens that end one are the tokenizer's to know. roles: the roles that may be used. with_tools:
    the template for conversations with tools, where that is another.
    """

    name: str
    template: str
    stop: tuple[str, ...] = ()
    roles: tuple[str, ...] = _ROLES
    with_tools: str = ""

    def for_tools(self) -> ChatFormat:
        """The format of conversations with tools."""
        return replace(self, template=self.with_tools) if self.with_tools else self

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        bos: str = "",
        eos: str = "",
        **variables: Any,
    ) -> str:
        """The conversation as one text.

        messages: mappings with `role` and `content`, the content a string or a list of `{"type": "text"}`
        parts. add_generation_prompt: end with the beginning of the answer. bos, eos: texts of those tokens.
        variables: more for the template (`enable_thinking=False`). Raises ChatFormatError.
        """
        given = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        return self._checked(messages, bos_token=bos, eos_token=eos, **given, **variables)[0]

    def _checked(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> tuple[str, Sequence[str]]:
        checked = [self._check(i, message) for i, message in enumerate(messages)]
        if not checked:
            raise ChatFormatError("a conversation needs at least one message")
        return self._write(checked, **variables)

    def _write(self, messages: list[dict[str, Any]], **variables: Any) -> tuple[str, Sequence[str]]:
        """The text, and what ends the answer to it."""
        try:
            return render_template(self.name, self.template, messages=messages, **variables), self.stop
        except ChatFormatError:
            # Templates without a turn of the system (Gemma 2, the first Mistrals) refuse it. What it says
            # belongs to the first turn of the user there.
            merged = _system_in_user(messages)
            if merged is None:
                raise
            try:
                return render_template(self.name, self.template, messages=merged, **variables), self.stop
            except ChatFormatError:
                pass  # it is something else
            raise

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        safe: bool = True,
        continue_final: bool = False,
        stops: list[str] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The conversation as token ids, with one BOS token at the beginning if the model wants one.

        Control tokens that the template writes become those tokens. safe: text in `messages`, `tools` and
        `variables` that looks like a control token stays text; all other text is tokenised as without `safe`.
        Not covered: a control token of which one part comes from the template and the other from a message
        next to it.

        continue_final: end within the last message, which is the assistant's, so that the answer goes on
        with it. stops: texts that end the answer are added there.
        """
        bos = "" if tokenizer.bos is None else tokenizer.text(tokenizer.bos).decode("utf-8", "replace")
        eos = "" if tokenizer.eos is None else tokenizer.text(tokenizer.eos).decode("utf-8", "replace")
        marks: dict[str, str] = {}
        if safe:
            # The template sees one private character in the place of each control token. Everything else in
            # the message, which a template may strip, split or compare, stays as it is.
            guard = _Guard(tokenizer, [messages, tools, variables])
            messages, tools, marks = guard.replace(list(messages)), guard.replace(tools), guard.marks
            variables = guard.replace(variables)
        cut = ""
        if continue_final:
            messages, cut = _with_cut(messages)
            add_generation_prompt = False
        given = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        text, ends = self._checked(messages, bos_token=bos, eos_token=eos, **given, **variables)
        if stops is not None:
            stops += ends
        if cut:
            text, found, _ = text.rpartition(cut)
            if not found:
                raise ChatFormatError(
                    f"the format {self.name!r} does not show the last message: it cannot go on"
                )
        ids = tokenizer.encode(text, add_bos=False, special=True, plain=marks)
        if tokenizer.add_bos and tokenizer.bos is not None and not begins_with_bos(text, tokenizer):
            ids.insert(0, tokenizer.bos)
        return ids

    def _check(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        where = f"message {index}"
        if not isinstance(message, Mapping):
            raise ChatFormatError(
                f"{where} is not a mapping with 'role' and 'content' but {type(message).__name__}"
            )
        role = message.get("role")
        if role not in self.roles:
            known = ", ".join(map(repr, self.roles))
            raise ChatFormatError(f"{where} has the role {role!r}; the format {self.name!r} knows {known}")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = "\n".join(self._text_of_part(where, part) for part in content)
        elif content is None and not (
            role == "assistant" and (message.get("tool_calls") or message.get("function_call"))
        ):
            raise ChatFormatError(f"{where} has no content")
        elif content is not None and not isinstance(content, str):
            raise ChatFormatError(f"{where} has a content of type {type(content).__name__}, not a string")
        checked = {**message, "content": content}
        thought = message.get("reasoning_content")
        # Some templates know thoughts by another name. gpt-oss's takes one text or the other beside calls.
        if (
            thought
            and "reasoning_content" not in self.template
            and not (content and message.get("tool_calls"))
        ):
            checked = {"thinking": thought, "reasoning": thought, **checked}
        return checked

    @staticmethod
    def _text_of_part(where: str, part: Any) -> str:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatFormatError(
                f"{where} has a part of type {kind!r}; only parts of type 'text' are supported, no images"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise ChatFormatError(
                f"{where} has a part of type 'text' whose text is {type(text).__name__}, not a string"
            )
        return text


def begins_with_bos(prompt: str, tokenizer: Tokenizer) -> bool:
    """Whether a rendered prompt writes the BOS token itself, so that none must be added when it is
    tokenised."""
    return tokenizer.bos is not None and prompt.encode("utf-8", "replace").startswith(
        tokenizer.text(tokenizer.bos)
    )


def _system_in_user(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with what the system says at the beginning of the first turn, where both are texts."""
    if len(messages) < 2 or [message["role"] for message in messages[:2]] != ["system", "user"]:
        return None
    first, turn = messages[:2]
    content = "\n\n".join(text for text in (first["content"], turn["content"]) if text)
    return [{**turn, "content": content}, *map(dict, messages[2:])]


def _with_cut(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The messages with a mark at the end of the last one's text, and that mark."""
    last = messages[-1] if messages else {}
    content = last.get("content") if isinstance(last, Mapping) and last.get("role") == "assistant" else None
    if isinstance(content, (list, tuple)):
        content = "\n".join(ChatFormat._text_of_part("the last message", part) for part in content)
    if not isinstance(content, str):
        raise ChatFormatError("the last message is no text of the assistant: there is nothing to go on with")
    used = set().union(*_strings(messages))
    cut = next(c for c in map(chr, range(_LAST_MARK, _FIRST_MARK, -1)) if c not in used)
    return [*messages[:-1], {**last, "content": content + cut}], cut


class _Guard:
    """Replaces the texts of control tokens in messages by private characters that the messages do not
    hold."""

    def __init__(self, tokenizer: Tokenizer, values: Any) -> None:
        used = {c for text in _strings(values) for c in text if ord(c) >= _FIRST_MARK}
        self._free = (chr(c) for c in range(_FIRST_MARK, _LAST_MARK + 1) if chr(c) not in used)
        self._controls = tokenizer.control_texts
        self._mark_of: dict[str, str] = {}
        self.marks: dict[str, str] = {}

    def replace(self, value: Any) -> Any:
        if isinstance(value, str):
            for control in self._controls:
                if control in value:
                    mark = self._mark_of.get(control)
                    if mark is None:
                        mark = self._mark_of[control] = next(self._free)
                        self.marks[mark] = control
                    value = value.replace(control, mark)
            return value
        if isinstance(value, Mapping):
            return {self.replace(key): self.replace(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.replace(item) for item in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


# -- formats known by name


def _turns(
    *,
    user: str,
    assistant: str,
    prompt: str,
    system: str,
    begin: str = "",
    default_system: str = "",
    system_in_user: bool = False,
) -> str:
    """A template from the way each turn is written.

    `{content}`, `{bos}` and `{eos}` stand for themselves. system_in_user: the system turn is written inside
    of the next user turn, where that has `{system}`. default_system: for conversations without a system
    message.
    """

    def code(pattern: str) -> str:
        names = {
            "content": "message.content",
            "bos": "bos_token",
            "eos": "eos_token",
            "system": "state.system",
        }
        terms = []
        for i, part in enumerate(pattern.replace("{", "}").split("}")):
            if part:
                terms.append(names[part] if i % 2 else json.dumps(part, ensure_ascii=False))
        return " ~ ".join(terms) or "''"

    lines = ["{% set state = namespace(system='') %}", "{{ " + code(begin) + " }}"]
    write_system = "{% set state.system = " + code(system) + " %}"
    if not system_in_user:
        write_system += "{{ state.system }}"
    if default_system:
        lines += [
            "{% if messages[0].role != 'system' %}{% set message = {'content': "
            + json.dumps(default_system)
            + "} %}",
            write_system + "{% endif %}",
        ]
    lines += [
        "{% for message in messages %}",
        "{% if message.role == 'system' %}" + write_system,
        "{% elif message.role == 'user' %}{{ " + code(user) + " }}{% set state.system = '' %}",
        "{% else %}{{ " + code(assistant) + " }}{% endif %}",
        "{% endfor %}",
        "{% if add_generation_prompt %}{{ " + code(prompt) + " }}{% endif %}",
    ]
    return "".join(lines)


_FORMATS: dict[str, ChatFormat] = {}


def register_chat_format(name: str, chat_format: ChatFormat) -> None:
    """Make a format known by a name, which replaces an earlier one of that name."""
    _FORMATS[name] = chat_format


def chat_format_names() -> list[str]:
    """The names that `get_chat_format` knows."""
    return sorted(_FORMATS)


def get_chat_format(name: str) -> ChatFormat:
    """The format of that name. Raises ChatFormatError."""
    if name not in _FORMATS:
        raise ChatFormatError(
            f"the chat format {name!r} is not known; known are {', '.join(chat_format_names())}"
        )
    return _FORMATS[name]


def choose_chat_format(
    meta: Mapping[str, Any], *, name: str | None = None, tokenizer: Tokenizer | None = None
) -> tuple[ChatFormat, str | None]:
    """The format for a model, and a sentence for the user where it had to be guessed.

    meta: the GGUF keys of the file. name: the user's choice, which comes before the template of the file.
    Without either: by the marks that the vocabulary has, then by the architecture.
    """
    if name is not None:
        return get_chat_format(name), None
    template = meta.get("tokenizer.chat_template")
    if isinstance(template, str) and template.strip():
        with_tools = meta.get("tokenizer.chat_template.tool_use")
        with_tools = with_tools if isinstance(with_tools, str) and with_tools.strip() else ""
        return ChatFormat("of the file", template, with_tools=with_tools), None
    architecture = str(meta.get("general.architecture", ""))
    for mark, by_mark in _BY_MARK.items():
        if tokenizer is not None and tokenizer.id_of(mark) is not None:
            name, reason = by_mark, f"its vocabulary has {mark!r}"
            break
    else:
        name, reason = _BY_ARCHITECTURE.get(architecture, "plain"), f"its architecture is {architecture!r}"
    notice = f"the file has no chat template; using the format {name!r} because {reason}"
    return get_chat_format(name), f"{notice} (chat_format, or --chat-format, chooses another)"


_BY_MARK = {"<|start_header_id|>": "llama-3", "<|im_start|>": "chatml", "<start_of_turn>": "gemma"}
_BY_ARCHITECTURE = {
    "llama": "llama-2",
    "bamboo": "bamboo",
    "falcon": "plain",
    "opt": "plain",
    "qwen2": "chatml",
    "qwen3": "chatml",
    "gemma": "gemma",
    "phi3": "phi-3",
}


def _add(names: str, *stop: str, **turns: Any) -> None:
    chat_format = ChatFormat(names.split()[0], _turns(**turns), stop, ("system", "user", "assistant"))
    for name in names.split():
        register_chat_format(name, chat_format)


_add(
    "llama-2",
    user="{bos}[INST] {system}{content} [/INST]",
    assistant=" {content} {eos}",
    prompt="",
    system="<<SYS>>\n{content}\n<</SYS>>\n\n",
    system_in_user=True,
)
_add(
    "llama-3",
    "<|eot_id|>",
    begin="{bos}",
    user="<|start_header_id|>user<|end_header_id|>\n\n{content}<|eot_id|>",
    assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{content}<|eot_id|>",
    prompt="<|start_header_id|>assistant<|end_header_id|>\n\n",
    system="<|start_header_id|>system<|end_header_id|>\n\n{content}<|eot_id|>",
)
_CHATML: dict[str, str] = {
    "user": "<|im_start|>user\n{content}<|im_end|>\n",
    "assistant": "<|im_start|>assistant\n{content}<|im_end|>\n",
    "prompt": "<|im_start|>assistant\n",
    "system": "<|im_start|>system\n{content}<|im_end|>\n",
}
_add("chatml chatml-function-calling", "<|im_end|>", **_CHATML)  # tools are described to all formats
_add("qwen", "<|im_end|>", **_CHATML, default_system="You are a helpful assistant.")
_add(
    # Bamboo-DPO was tuned on this one and on chatml, and its vocabulary has no marks for the second.
    "vicuna bamboo",
    "USER:",
    user="USER: {content} ",
    assistant="ASSISTANT: {content}{eos}",
    prompt="ASSISTANT:",
    system="{content} ",
    default_system="A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
)
_add(
    "alpaca",
    "### Instruction:",
    user="### Instruction:\n{content}\n\n",
    assistant="### Response:\n{content}\n\n",
    prompt="### Response:\n",
    system="{content}\n\n",
    default_system="Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.",
)
_add(
    "mistral-instruct",
    begin="{bos}",
    user="[INST] {system}{content} [/INST]",
    assistant=" {content}{eos}",
    prompt="",
    system="{content}\n\n",
    system_in_user=True,
)
_add(
    "zephyr",
    user="<|user|>\n{content}{eos}\n",
    assistant="<|assistant|>\n{content}{eos}\n",
    prompt="<|assistant|>\n",
    system="<|system|>\n{content}{eos}\n",
)
_add(
    "phi-3",
    "<|end|>",
    begin="{bos}",
    user="<|user|>\n{content}<|end|>\n",
    assistant="<|assistant|>\n{content}<|end|>\n",
    prompt="<|assistant|>\n",
    system="<|system|>\n{content}<|end|>\n",
)
_add(
    "gemma",
    "<end_of_turn>",
    begin="{bos}",
    user="<start_of_turn>user\n{system}{content}<end_of_turn>\n",
    assistant="<start_of_turn>model\n{content}<end_of_turn>\n",
    prompt="<start_of_turn>model\n",
    system="{content}\n\n",
    system_in_user=True,
)
_add(
    "plain falcon",
    "\nUser:",
    user="User: {content}\n",
    assistant="Assistant: {content}\n",
    prompt="Assistant:",
    system="{content}\n",
)
_add(
    "openchat",
    "<|end_of_turn|>",
    begin="{bos}",
    user="GPT4 Correct User: {content}<|end_of_turn|>",
    assistant="GPT4 Correct Assistant: {content}<|end_of_turn|>",
    prompt="GPT4 Correct Assistant:",
    system="{content}<|end_of_turn|>",
)
_add(
    "redpajama-incite",
    "<human>",
    user="<human>: {content}\n",
    assistant="<bot>: {content}\n",
    prompt="<bot>:",
    system="{content}\n",
)
_add(
    "baichuan-2",
    user="<reserved_106>{content}",
    assistant="<reserved_107>{content}",
    prompt="<reserved_107>",
    system="{content}",
)
_add(
    "baichuan",
    user="<reserved_102>{content}",
    assistant="<reserved_103>{content}",
    prompt="<reserved_103>",
    system="{content}",
)
_add(
    "phind",
    "### User Message",
    user="### User Message\n{content}\n\n",
    assistant="### Assistant\n{content}\n\n",
    prompt="### Assistant\n",
    system="### System Prompt\n{content}\n\n",
    default_system="You are an intelligent programming assistant.",
)
_add(
    "intel",
    "### User:",
    user="### User:\n{content}\n",
    assistant="### Assistant:\n{content}\n",
    prompt="### Assistant:\n",
    system="### System:\n{content}\n",
)
_add(
    "saiga",
    user="<s>user\n{content}</s>",
    assistant="<s>bot\n{content}</s>",
    prompt="<s>bot\n",
    system="<s>system\n{content}</s>",
)
