"""What was said so far and how answers are sampled; a plain object that can be saved as JSON."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._engine.sampling import Sampler, Sampling
from .._llama.options import RANGES, in_range
from ..errors import ArgumentError, FileError, FormatError

FORMAT = "powerinfer-chat-1"
ROLES = ("user", "assistant")

# Settings that /set knows, with their types.
SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "typical_p": float,
    "repeat_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "mirostat_mode": int,
    "mirostat_tau": float,
    "mirostat_eta": float,
    "top_n_sigma": float,
    "xtc_probability": float,
    "xtc_threshold": float,
    "dynatemp_range": float,
    "dynatemp_exponent": float,
    "dry_multiplier": float,
    "dry_base": float,
    "dry_allowed_length": int,
    "dry_penalty_last_n": int,
    "max_tokens": int,
    "seed": int,
}


@dataclass
class Conversation:
    """Turns in order, user and assistant by turns, and an optional system message in front of them."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    n_forgotten: int = 0
    """Turns at the beginning that the model is no longer shown; they are saved with the others."""

    def messages(self, question: str) -> list[dict[str, str]]:
        """The conversation with a new question, in the shape that create_chat_completion takes."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns[self.n_forgotten :], {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Appends a question and its answer."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def take_back(self) -> str:
        """Removes the last question and its answer; returns the question. Raises ArgumentError."""
        if not self.turns:
            raise ArgumentError("there is no question yet")
        question = self.turns[-2]["content"]
        del self.turns[-2:]
        self.n_forgotten = min(self.n_forgotten, len(self.turns))
        return question

    def forget_half(self) -> bool:
        """No longer shows the model the older half of what it is shown; False if that is nothing."""
        n_exchanges = (len(self.turns) - self.n_forgotten) // 2
        self.n_forgotten += 2 * ((n_exchanges + 1) // 2)
        return n_exchanges > 0

    def reset(self) -> None:
        """Forgets the turns; the system message and the settings stay."""
        self.turns.clear()
        self.n_forgotten = 0

    def set(self, name: str, text: str) -> None:
        """Changes a setting; "default" takes it back. Raises ArgumentError with a sentence for people."""
        if name not in SETTINGS:
            raise ArgumentError(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}")
        if text == "default":
            self.settings.pop(name, None)
            return
        try:
            value = SETTINGS[name](text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or abs(value) >= 2**63 or (name != "seed" and abs(value) >= 2**31):
            kind = "a whole number" if SETTINGS[name] is int else "a number"
            raise ArgumentError(f"{name} must be {kind}, not {text[:40]!r}")
        least, most = RANGES.get(name, (-math.inf, math.inf))
        if not least <= value <= most:
            raise ArgumentError(f"{name} is {value}, it must be {in_range(least, most)}")
        self.settings[name] = value

    def check(self, n_vocab: int) -> None:
        """Raises ArgumentError for settings that no answer could be sampled with."""
        options = {k: v for k, v in self.settings.items() if k not in ("max_tokens", "seed")}
        Sampler(Sampling(**options), n_vocab).close()

    def save(self, path: Path) -> None:
        """Writes JSON; the file appears under its name only when it is complete.

        Raises ArgumentError if something else stands there, FileError if it cannot be written.
        """
        if path.exists():
            try:
                Conversation.load(path)
            except FormatError:
                raise ArgumentError(
                    f"{path} exists and is not a saved conversation: choose another name"
                ) from None
        data = {"format": FORMAT, "system": self.system, "turns": self.turns, "settings": self.settings}
        part = path.with_name(path.name + ".part")
        try:
            part.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise FileError(f"{path} cannot be written: {error.strerror}") from error
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Reads what save wrote. Raises FormatError for anything else, OSError if it cannot be read."""
        if path.exists() and not path.is_file():  # a device may have no end
            raise FormatError(f"{path} is no file")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{path} is not a saved conversation: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise FormatError(f"{path} is not a saved conversation: it does not say {FORMAT!r}")
        system, turns, settings = data.get("system"), data.get("turns"), data.get("settings")
        if not (system is None or _is_text(system)) or not isinstance(settings, dict):
            raise FormatError(f"{path}: the system message or the settings are not what they must be")
        if not isinstance(turns, list) or not all(_is_turn(t, i) for i, t in enumerate(turns)):
            raise FormatError(f"{path}: turns must be of user and assistant by turns, each with text")
        if len(turns) % 2:
            raise FormatError(f"{path}: the last question has no answer")
        new = cls(system, [{"role": t["role"], "content": t["content"]} for t in turns])
        try:
            for name, value in settings.items():
                new.set(name, str(value))
        except ValueError as error:
            raise FormatError(f"{path}: {error}") from error
        return new


def _is_text(value: Any) -> bool:
    """Whether a value is a string that UTF-8 can hold (JSON can name halves of surrogate pairs)."""
    return isinstance(value, str) and value == value.encode("utf-8", "replace").decode("utf-8")


def _is_turn(turn: Any, index: int) -> bool:
    return isinstance(turn, dict) and turn.get("role") == ROLES[index % 2] and _is_text(turn.get("content"))
