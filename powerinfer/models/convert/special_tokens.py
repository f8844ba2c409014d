"""What the files beside a vocabulary say: special tokens, where they are added, the chat template."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import FormatError
from .files import read_text
from .json_file import Settings, read_object_if_any

# Names in Hugging Face's files and in a GGUF key ("seperator" is how the key is written).
_KINDS = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "cls": "cls",
    "mask": "mask",
}


_MAX_ID = 1 << 24


@dataclass(frozen=True)
class AddedToken:
    """A token that is no part of the trained vocabulary, or is special in it."""

    id: int
    text: str
    is_special: bool


class Sidecars:
    """tokenizer.json, tokenizer_config.json and the like; missing ones are empty."""

    def __init__(self, folder: Path, config: Settings) -> None:
        """Raises FileError, FormatError."""
        self.folder = folder
        self.config = config
        self.tokenizer = read_object_if_any(folder / "tokenizer.json")
        self.tokenizer_config = read_object_if_any(folder / "tokenizer_config.json")
        self.tokens_map = read_object_if_any(folder / "special_tokens_map.json")
        self.added = read_object_if_any(folder / "added_tokens.json")
        self.generation = read_object_if_any(folder / "generation_config.json")

    def added_tokens(self) -> Iterator[AddedToken]:
        """Those of added_tokens.json, tokenizer.json and tokenizer_config.json; a later one replaces an
        earlier one."""
        for text in self.added.values:
            yield AddedToken(self.added.integer(text, high=_MAX_ID), text, looks_special(text))
        for entry in self.tokenizer.objects("added_tokens"):
            text = entry.text("content")
            is_special = entry.flag("special", False) or looks_special(text)
            yield AddedToken(entry.integer("id", high=_MAX_ID), text, is_special)
        decoder = self.tokenizer_config.object("added_tokens_decoder")
        for number in decoder.values:
            if not number.isdecimal() or len(number) > 8:
                raise FormatError(f"{decoder.where}: {number!r:.80} is not the number of a token")
            entry = decoder.object(number)
            text = entry.text("content")
            yield AddedToken(int(number), text, entry.flag("special", False) or looks_special(text))

    def special_texts(self) -> Iterator[str]:
        """The texts of all tokens that are named as special."""
        for settings in (self.tokenizer_config, self.tokens_map):
            for kind in _KINDS:
                text = _token_text(settings, f"{kind}_token")
                if text:
                    yield text

    def special_ids(self, ids: Mapping[str, int], n_vocab: int) -> dict[str, int]:
        """Token ids by the names of their GGUF keys, such as "bos_token_id".

        By text, as the tokenizer's files say; else by number, as config.json does.
        """
        out = {}
        for kind, key in _KINDS.items():
            found = None
            for settings in (self.tokenizer_config, self.tokens_map):
                text = _token_text(settings, f"{kind}_token")
                if found is None and text:
                    found = ids.get(text)
            name = f"{kind}_token_id"
            if found is None and name in self.config:
                value = self.config.values[name]
                if isinstance(value, list) and value:
                    value = value[0]
                # -1 and the like are ways of saying "none".
                if type(value) is int and 0 <= value < n_vocab:
                    found = value
            if found is not None:
                out[f"{key}_token_id"] = found
        return out

    def end_ids(self, n_vocab: int) -> list[int]:
        """Tokens that end an answer, of which there may be several."""
        out: list[int] = []
        for settings in (self.generation, self.config):
            value = settings.values.get("eos_token_id")
            for one in value if isinstance(value, list) else [value]:
                if type(one) is int and 0 <= one < n_vocab and one not in out:
                    out.append(one)
        return out

    def adds(self, kind: str) -> bool | None:
        """Whether the "bos" or "eos" token is to be added to a text; None: nothing is said."""
        name = f"add_{kind}_token"
        return self.tokenizer_config.flag(name, False) if name in self.tokenizer_config else None

    def chat_templates(self) -> dict[str, str]:
        """By name; "" is the default one. Raises FileError, FormatError."""
        # transformers 5 writes files, of which the named ones have a folder; before it was a key.
        more = sorted((self.folder / "additional_chat_templates").glob("*.jinja"))
        out = {path.stem: read_text(path) for path in more}
        path = self.folder / "chat_template.jinja"
        if os.path.lexists(path):
            return {"": read_text(path)} | out
        settings = self.tokenizer_config
        if settings.values.get("chat_template") is None:
            settings = read_object_if_any(self.folder / "chat_template.json")  # of processors
        if not isinstance(settings.values.get("chat_template"), list):
            text = settings.text("chat_template")
            return ({"": text} if text else {}) | out
        for entry in settings.objects("chat_template"):
            name = entry.text("name", default="default")
            out["" if name == "default" else name] = entry.text("template")
        return out


def looks_special(text: str) -> bool:
    """Whether a token is a mark by its spelling, also where it is not said to be."""
    return (
        (text.startswith("<|") and text.endswith("|>"))
        or (text.startswith("<｜") and text.endswith("｜>"))
        or (text.startswith("<unused") and text.endswith(">"))
        or text in ("<pad>", "<mask>", "[PAD]")
    )


def added_by_template(post_processor: Any, texts: Mapping[str, str | None]) -> dict[str, bool]:
    """Whether the template of a tokenizer.json puts the "bos" token first and the "eos" token last.

    texts: of those two. Empty if there is no template.
    """
    steps = [post_processor]
    if isinstance(post_processor, dict) and isinstance(post_processor.get("processors"), list):
        steps = post_processor["processors"]
    for step in steps:
        if not isinstance(step, dict) or step.get("type") != "TemplateProcessing":
            continue
        single = step.get("single")
        if not isinstance(single, list) or not single:
            continue
        names = [
            item["SpecialToken"].get("id")
            if isinstance(item, dict) and isinstance(item.get("SpecialToken"), dict)
            else None
            for item in single
        ]
        return {
            "bos": names[0] is not None and names[0] == texts["bos"],
            "eos": names[-1] is not None and len(names) > 1 and names[-1] == texts["eos"],
        }
    return {}


def _token_text(settings: Settings, name: str) -> str | None:
    """A special token's text: given as such, or in an object."""
    value = settings.values.get(name)
    if isinstance(value, dict):
        return settings.object(name).text("content")
    return settings.text(name) or None
