"""The tokenizer of a checkpoint's folder as the keys of a file.

Three forms are read: tokenizer.model (SentencePiece), tokenizer.json (byte-level BPE, or SentencePiece's BPE
as the tokenizers library writes it), vocab.json with merges.txt (byte-level BPE).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..._text.merging import scores_of_merges
from ..._text.tokenizer import METASPACE_KEY, Tokenizer
from ...errors import ArgumentError, FileError, FormatError, UnsupportedError
from .files import read_text
from .json_file import Settings, read_json
from .pre_names import check_name, recognise
from .sentencepiece_file import NORMALISES, is_sentencepiece, read_sentencepiece
from .special_tokens import AddedToken, Sidecars, added_by_template

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_SPACE = "\u2581"
_ADDED_SCORE = -1000.0
_PADDING_SCORE = -10000.0

# What a scheme is most often called where several names mean the same, by architecture.
_USUAL_PRE = {
    "falcon": "falcon",
    "opt": "gpt-2",
    "qwen2": "qwen2",
    "qwen3": "qwen2",
    "qwen2moe": "qwen2",
    "qwen3moe": "qwen2",
    "smallthinker": "qwen2",
    "olmoe": "olmo",
    "glm4moe": "glm4",
    "gpt-oss": "gpt-4o",
    "llama4": "llama4",
    "deepseek2": "deepseek-v3",
    "command-r": "command-r",
    "cohere2": "command-r",
    "starcoder2": "starcoder",
    "granite": "refact",
    "granitehybrid": "granite-docling",
    "gpt2": "gpt-2",
    "gptneox": "olmo",
    "phi2": "phi-2",
    "olmo2": "dbrx",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "stablelm": "stablelm2",
    "hunyuan-dense": "hunyuan-dense",
    "qwen3next": "qwen2",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "seed_oss": "seed-coder",
    "mistral3": "tekken",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "falcon-h1": "falcon-h1",
}
# By the class of a tokenizer without a tokenizer.json.
_PRE_BY_CLASS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2", "GPT2TokenizerFast": "gpt-2"}


@dataclass
class Vocabulary:
    """A tokenizer, as far as a file describes it."""

    model: str
    """"llama" or "gpt2"."""
    texts: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    pre: str = ""
    add_space_prefix: bool = True
    metaspace: str = ""
    """As the key METASPACE_KEY."""
    special: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def keys(self) -> dict[str, Any]:
        """The keys and values of a file, in the writers' order."""
        p = "tokenizer.ggml."
        out: dict[str, Any] = {p + "model": self.model}
        if self.pre:
            out[p + "pre"] = self.pre
        out[p + "tokens"] = [text.encode() for text in self.texts]
        if self.scores:
            out[p + "scores"] = np.array(self.scores, np.float32)
        out[p + "token_type"] = np.array(self.types, np.int32)
        if self.model == "gpt2":
            out[p + "merges"] = [merge.encode() for merge in self.merges]
        out.update({p + name: number for name, number in self.special.items()})
        out.update({f"{p}add_{kind}_token": value for kind, value in self.adds.items()})
        if self.model == "llama" and not self.add_space_prefix:
            out[p + "add_space_prefix"] = False
        elif self.model == "llama" and self.metaspace:
            out[METASPACE_KEY] = self.metaspace
        named = [name for name in self.templates if name]
        if named:
            out["tokenizer.chat_templates"] = named
        for name, template in self.templates.items():
            out["tokenizer.chat_template" + (f".{name}" if name else "")] = template
        return out


def read_vocabulary(folder: Path, config: Settings, *, arch: str, n_vocab: int, pre: str = "") -> Vocabulary:
    """The tokenizer of a folder, filled up to n_vocab tokens.

    pre: the name of the pre-tokenizer, where it is not recognised. Raises FileError, FormatError,
    UnsupportedError.
    """
    sidecars = Sidecars(folder, config)
    model, whole, parts = folder / "tokenizer.model", folder / "tokenizer.json", folder / "vocab.json"
    if model.is_file() and (is_sentencepiece(model) or not whole.is_file()):
        vocabulary, where = _from_sentencepiece(model, sidecars, n_vocab), model
    elif whole.is_file():
        vocabulary, where = _from_tokenizer_json(whole, sidecars, arch, n_vocab, pre), whole
    elif parts.is_file():
        vocabulary, where = _from_vocab_json(parts, sidecars, n_vocab, pre), parts
    else:
        raise FileError(
            f"{folder} has no tokenizer: tokenizer.model, tokenizer.json or vocab.json is expected"
        )
    if pre and vocabulary.model == "llama":
        raise ArgumentError(f"{where} is SentencePiece's kind: it has no pre-tokenizer that could be named")
    ids = {text: i for i, text in enumerate(vocabulary.texts)}
    vocabulary.special.update(sidecars.special_ids(ids, n_vocab))
    for kind in ("bos", "eos"):
        adds = sidecars.adds(kind)
        if adds is not None:
            vocabulary.adds[kind] = adds
    vocabulary.templates = sidecars.chat_templates()
    # What the engine's own tokenizer does not take must not be written.
    keys = vocabulary.keys()
    try:
        tokenizer = Tokenizer.from_metadata({"general.architecture": arch, **keys})
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    _add_ends(vocabulary, tokenizer, sidecars.end_ids(len(vocabulary.texts)))
    return vocabulary


def _add_ends(vocabulary: Vocabulary, tokenizer: Tokenizer, ends: list[int]) -> None:
    """Keys for tokens that end an answer and are not known to, as GLM's <|user|> and <|observation|>."""
    more = [i for i in ends if not tokenizer.is_eog(i) and vocabulary.types[i] in (CONTROL, USER_DEFINED)]
    for key, number in zip(("eot_token_id", "eom_token_id"), more, strict=False):
        vocabulary.special[key] = number
    if more[2:]:
        names = ", ".join(vocabulary.texts[i] for i in more[2:])
        vocabulary.notes.append(f"answers also end with {names}, for which files have no key")


# ---- SentencePiece -----------------------------------------------------------------------------------------


def _from_sentencepiece(path: Path, sidecars: Sidecars, n_vocab: int) -> Vocabulary:
    model = read_sentencepiece(path)
    table = _Table(str(path), n_vocab)
    for i, (text, kind) in enumerate(zip(model.pieces, model.types, strict=True)):
        table.put(i, text, kind, model.scores[i])
    for added in sidecars.added_tokens():
        table.add(added)
    vocabulary = table.vocabulary("llama")
    keys = {
        "unk": "unknown_token_id",
        "bos": "bos_token_id",
        "eos": "eos_token_id",
        "pad": "padding_token_id",
    }
    vocabulary.special = {keys[kind]: number for kind, number in model.ids.items()}
    vocabulary.add_space_prefix = sidecars.tokenizer_config.flag("add_prefix_space", model.add_dummy_prefix)
    name = sidecars.tokenizer_config.text("tokenizer_class") or ""
    if name.startswith("Llama") and not sidecars.tokenizer_config.flag("legacy", True):
        vocabulary.metaspace = "first"  # what transformers makes of it
    vocabulary.notes += model.notes
    return vocabulary


# ---- tokenizer.json ----------------------------------------------------------------------------------------


def _from_tokenizer_json(path: Path, sidecars: Sidecars, arch: str, n_vocab: int, pre: str) -> Vocabulary:
    whole = sidecars.tokenizer
    model = whole.object("model")
    if model.text("type", default="BPE") != "BPE":
        raise UnsupportedError(f"{path} is a {model.text('type'):.60} tokenizer; the engine has BPE only")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.text(name):
            raise UnsupportedError(f"{path}: the tokenizer has a {name}, which the engine does not know")
    table = _Table(str(path), n_vocab)
    for text, number in _numbers(model, "vocab").items():
        table.put(number, text, NORMAL)
    merges = _merges(model)
    for added in sidecars.added_tokens():
        table.add(added)
    if model.flag("byte_fallback", False):
        vocabulary = _like_sentencepiece(table, merges, whole)
    else:
        vocabulary = table.vocabulary("gpt2")
        vocabulary.merges = merges
        usual = _USUAL_PRE.get(arch, "llama-bpe")
        vocabulary.pre = check_name(pre) if pre else _recognise_pre(whole, model, usual)
        if whole.object("normalizer").text("type"):
            vocabulary.notes.append(NORMALISES)
    special = sidecars.special_ids({text: i for i, text in enumerate(vocabulary.texts)}, n_vocab)
    texts = {
        kind: vocabulary.texts[special[f"{kind}_token_id"]] if f"{kind}_token_id" in special else None
        for kind in ("bos", "eos")
    }
    vocabulary.adds = added_by_template(whole.values.get("post_processor"), texts)
    return vocabulary


def _recognise_pre(whole: Settings, model: Settings, usual: str) -> str:
    normalizer = whole.object("normalizer")
    if normalizer.text("type", default="NFC") != "NFC":
        raise UnsupportedError(
            f"{normalizer.where} changes the text ({normalizer.text('type'):.60}), the engine does not; "
            "--pre NAME converts it all the same"
        )
    return recognise(
        whole.values.get("pre_tokenizer"),
        ignore_merges=model.flag("ignore_merges", False),
        first=usual,
        where=whole.where,
    )


def _like_sentencepiece(table: _Table, merges: Sequence[str], whole: Settings) -> Vocabulary:
    """A SentencePiece vocabulary that was written as BPE: the place of a merge says the token's score."""
    vocabulary = table.vocabulary("llama")
    scores = scores_of_merges(vocabulary.texts, merges)
    unknown = whole.object("model").text("unk_token")
    for i, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True)):
        if text == unknown:
            vocabulary.types[i] = UNKNOWN
            vocabulary.special["unknown_token_id"] = i
        elif kind == NORMAL and re.fullmatch("<0x[0-9A-F]{2}>", text):
            vocabulary.types[i] = BYTE
        elif kind == NORMAL:
            vocabulary.scores[i] = scores[i]
    shown = json.dumps(
        [whole.values.get("normalizer"), whole.values.get("pre_tokenizer")], ensure_ascii=False
    )
    if _SPACE not in shown:
        raise UnsupportedError(
            f"{whole.where}: spaces are not written {_SPACE}; the engine has no such tokenizer"
        )
    prepends = '"Prepend"' in shown or '"Metaspace"' in shown
    never = ('"prepend_scheme": "never"', '"add_prefix_space": false')
    vocabulary.add_space_prefix = prepends and not any(word in shown for word in never)
    if '"Prepend"' not in shown:
        vocabulary.metaspace = "first" if '"prepend_scheme": "first"' in shown else "always"
    return vocabulary


def _merges(model: Settings) -> list[str]:
    """As "left right"; a file has either texts like that or pairs."""
    entries = model.values.get("merges")
    if not isinstance(entries, list):
        raise model.wrong("merges", "a list")
    out = []
    for i, entry in enumerate(entries):
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if (
            not isinstance(parts, list)
            or len(parts) != 2
            or not all(isinstance(part, str) and part and " " not in part for part in parts)
        ):
            raise FormatError(f"{model.where}: merge {i} is {entry!r:.80}, not two tokens without spaces")
        out.append(f"{parts[0]} {parts[1]}")
    return out


# ---- vocab.json and merges.txt -----------------------------------------------------------------------------


def _from_vocab_json(path: Path, sidecars: Sidecars, n_vocab: int, pre: str) -> Vocabulary:
    values = read_json(path)
    if not isinstance(values, dict):
        raise FormatError(f"{path} does not hold a JSON object")
    table = _Table(str(path), n_vocab)
    for text, number in _numbers(Settings({"vocab": values}, str(path)), "vocab").items():
        table.put(number, text, NORMAL)
    for added in sidecars.added_tokens():
        table.add(added)
    table.mark_control(sidecars.special_texts())
    vocabulary = table.vocabulary("gpt2")
    merges = path.with_name("merges.txt")
    lines = read_text(merges).split("\n")
    if lines[0].startswith("#version"):
        del lines[0]
    vocabulary.merges = _merges(Settings({"merges": [line for line in lines if line.strip()]}, str(merges)))
    name = sidecars.tokenizer_config.text("tokenizer_class", default="GPT2Tokenizer")
    if not pre and name not in _PRE_BY_CLASS:
        raise UnsupportedError(
            f"{sidecars.tokenizer_config.where}: how a {name:.60} cuts words is not known; --pre NAME says it"
        )
    vocabulary.pre = check_name(pre) if pre else _PRE_BY_CLASS[name]
    return vocabulary


def _numbers(settings: Settings, name: str) -> Mapping[str, int]:
    values = settings.object(name).values
    if not values:
        raise FormatError(f"{settings.where} has no tokens")
    for text, number in values.items():
        if type(number) is not int or number < 0:
            raise FormatError(f"{settings.where}: the token {text!r:.80} has the number {number!r:.40}")
    return values


class _Table:
    """Tokens by their number, until all are known."""

    def __init__(self, where: str, n_vocab: int) -> None:
        self._where = where
        self._n_vocab = n_vocab
        self._tokens: dict[int, tuple[str, int, float]] = {}
        self._beyond: dict[int, str] = {}

    def put(self, number: int, text: str, kind: int, score: float = 0.0) -> None:
        if number >= self._n_vocab:
            raise FormatError(
                f"{self._where}: token {number} ({text!r:.60}) is beyond the {self._n_vocab} embedding rows"
            )
        if number in self._tokens and self._tokens[number][0] != text:
            raise FormatError(
                f"{self._where}: token {number} is both {self._tokens[number][0]!r:.80} and {text!r:.80}"
            )
        self._tokens[number] = (text, kind, score)

    def add(self, added: AddedToken) -> None:
        """An added token; where it stands for one of the vocabulary, only its kind changes.

        One without a row in the embedding can be neither read nor written: such ones were added for training
        (as <pad> to Llama 2), and are left out.
        """
        if added.id >= self._n_vocab:
            self._beyond[added.id] = added.text
            return
        if added.id not in self._tokens:
            self.put(added.id, added.text, UNUSED, _ADDED_SCORE)
        _, kind, score = self._tokens[added.id]
        if kind not in (UNKNOWN, BYTE):
            # The text may be another: a reserved place to which a later training gave a name.
            kind = CONTROL if added.is_special else USER_DEFINED
            self._tokens[added.id] = (added.text, kind, score)

    def mark_control(self, texts: Iterable[str]) -> None:
        wanted = set(texts)
        for number, (text, _, score) in self._tokens.items():
            if text in wanted:
                self._tokens[number] = (text, CONTROL, score)

    def vocabulary(self, model: str) -> Vocabulary:
        """All n_vocab tokens; those that nobody names are padding, which no text becomes."""
        texts, types, scores = [], [], []
        n_padding = 0
        for i in range(self._n_vocab):
            text, kind, score = self._tokens.get(i, (f"[PAD{i}]", UNUSED, _PADDING_SCORE))
            n_padding += i not in self._tokens
            if kind == USER_DEFINED and model == "llama":
                text = text.replace(_SPACE, " ")
            texts.append(text)
            types.append(kind)
            scores.append(score)
        out = Vocabulary(model, texts, types, scores if model == "llama" else [])
        if n_padding:
            out.notes.append(f"{n_padding} of the {self._n_vocab} rows of the embedding have no token")
        if self._beyond:
            text, more = next(iter(self._beyond.values())), len(self._beyond) - 1
            shown = f"{text!r:.60}" + (f" and {more} more" if more else "")
            out.notes.append(f"added tokens without a row in the embedding are left out: {shown}")
        return out
