"""Folders with small vocabularies, and what the converter makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from powerinfer._text.tokenizer import Tokenizer
from powerinfer.models.convert.json_file import Settings
from powerinfer.models.convert.vocabulary import read_vocabulary
from tests.convert import folders

ROOT = Path(__file__).parents[2]
TEXT = [(ROOT / name).read_text("utf-8") for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
STRINGS = (
    "Hello, world!",
    "  two  spaces, a\ttab\nand a line\n\n  after  ",
    "it's IT'S we'Re they'LL I'd",
    "12 123 1234 12345678 3.14 0x1F",
    "Das größte Äpfelchen, naïve café, 中文和English混排。",
    "emoji 🚀👩‍👩‍👧 and e\u0301 \u200b marks",
    "def f(x):\n    return x ** 2  # a comment\r\n",
    "",
    " ",
    "a",
    "neurons neuron's (neurons) [neurons] {neurons}",
    *TEXT[0].split("\n\n")[:12],
)
SPACE = "\u2581"


def converted(folder: Path, n_vocab: int, *, arch: str = "llama", config: Any = None, pre: str = "") -> Any:
    """The engine's tokenizer over the keys, and the keys."""
    settings = Settings(config or {}, "config.json")
    vocabulary = read_vocabulary(folder, settings, arch=arch, n_vocab=n_vocab, pre=pre)
    keys = vocabulary.keys()
    return Tokenizer.from_metadata(keys), keys


def small_spm(folder: Path, *, tokens: Any = None, trainer: bytes = b"", normalizer: bytes = b"") -> None:
    """A tokenizer.model written field by field: 3 special tokens, 256 bytes, some letters."""
    texts = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        SPACE,
        "a",
        "b",
        "ab",
        SPACE + "ab",
    ]
    texts += tokens or []
    types = [2, 3, 3, *[6] * 256] + [1] * (len(texts) - 259)
    scores = [0.0] * 259 + [-float(i) for i in range(len(texts) - 259)]
    data = folders.sentencepiece(texts, scores, types, trainer=trainer)
    (folder / "tokenizer.model").write_bytes(data + folders.field(3, normalizer))


def bpe(
    folder: Path, change: Mapping[str, Any] | None = None, model: Mapping[str, Any] | None = None
) -> None:
    """A tokenizer.json of the 256 bytes, a merge and three added tokens, with these values changed."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)} | {"in": 256}
    added = [
        {"id": 257, "content": "<|end|>", "special": True},
        {"id": 258, "content": "<tool>", "special": False},
        {"id": 259, "content": "<|fim_prefix|>", "special": False},
    ]
    whole = folders.tokenizer_json("qwen2", vocab, ["i n"], added)
    whole["model"].update(model or {})
    folders.write_json(folder / "tokenizer.json", {**whole, **(change or {})})
