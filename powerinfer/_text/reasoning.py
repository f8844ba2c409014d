"""Answers that begin with a thought: <think>what the model says to itself</think>the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .parts import Thought, held_back
from .tool_styles import marks as control_marks

if TYPE_CHECKING:
    from .channels import ChannelParser
    from .tokenizer import Tokenizer
    from .tool_calls import ToolCallParser

MARKS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("<|channel>thought", "<channel|>"),  # Gemma 4
)
"""What stands before and behind a thought, by families."""

THINK = ("on", "off", "low", "medium", "high")
"""Whether, or how much, a model thinks that can choose."""


def template_variables(think: str | None) -> dict[str, Any]:
    """What says so to chat templates, in the names of all families. think: one of THINK; None: as the
    template does."""
    if think is None:
        return {}
    if think in ("on", "off"):
        return {"enable_thinking": think == "on", "thinking": think == "on"}
    return {"reasoning_effort": think}


def thinks(template: str) -> tuple[str, str] | None:
    """The marks of the chat template of a model that thinks so; None: it does not."""
    return next((pair for pair in MARKS if pair[0] in template or pair[1] in template), None)


def has_begun(prompt: Sequence[int], tokenizer: Tokenizer, marks: tuple[str, str]) -> bool:
    """Whether the prompt ends with the beginning of a thought, which the answer goes on with."""
    end = b"".join(tokenizer.piece(token, True) for token in prompt[-16:])
    return end.rstrip().endswith(marks[0].encode())


def special(tokenizer: Tokenizer, marks: tuple[str, str]) -> frozenset[int]:
    """Tokens that are shown for this parser, in files that call them control tokens."""
    texts = [part for mark in marks for part in (mark, *control_marks(mark))]
    ids = (tokenizer.id_of(text) for text in texts)
    return frozenset(i for i in ids if i is not None and not tokenizer.is_eog(i))


class ReasoningParser:
    """Splits an answer while it comes; `rest` reads what follows the thought. Spaces around the thought are
    dropped; one that is not closed goes on to the end."""

    def __init__(
        self,
        rest: ToolCallParser | ChannelParser | None = None,
        *,
        begun: bool = False,
        marks: tuple[str, str] = MARKS[0],
    ) -> None:
        """begun: the prompt ended with the first mark."""
        self._rest = rest
        self._open, self._close = marks
        self._text = ""
        self._state = "inside" if begun else "before"
        self._is_first = True

    def push(self, text: str) -> list[Any]:
        """Adds text; what is certain by now."""
        self._text += text
        found: list[Any] = []
        if self._state == "before":
            begin = self._text.lstrip()
            if self._open.startswith(begin):  # and where nothing has come yet
                if begin != self._open:
                    return found
            elif not begin.startswith(self._open):
                self._state = "answer"
            if self._state == "before":
                self._text, self._state = begin[len(self._open) :], "inside"
        if self._state == "inside":
            if self._is_first:
                self._text = self._text.lstrip()
                self._is_first = not self._text
            at = self._text.find(self._close)
            end = at if at >= 0 else len(self._text) - held_back(self._text, self._close)
            shown = self._text[:end].rstrip()
            if shown:
                found.append(Thought(shown))
            if at < 0:
                self._text = self._text[len(shown) :]
                return found
            self._text, self._state = self._text[at + len(self._close) :], "between"
        if self._state == "between":
            self._text = self._text.lstrip()
            if not self._text:
                return found
            self._state = "answer"
        text, self._text = self._text, ""
        return found + self._answer(text)

    def finish(self, *, is_cut: bool = False) -> list[Any]:
        """The answer is over: what was held back. is_cut: it would have gone on."""
        text, self._text = self._text, ""
        found: list[Any] = []
        if self._state == "inside" and text.strip():
            found.append(Thought(text.rstrip()))
        elif self._state == "before":
            found = self._answer(text)
        return found if self._rest is None else found + self._rest.finish(is_cut=is_cut)

    def _answer(self, text: str) -> list[Any]:
        if not text:
            return []
        return [text] if self._rest is None else list(self._rest.push(text))
