"""Vocabularies of folders: what becomes of them gives the ids that the libraries of their authors give."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from powerinfer._text.tokenizer import Tokenizer
from powerinfer.errors import ArgumentError, FileError, FormatError, PowerInferError, UnsupportedError
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


# ---- SentencePiece


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer.model of 600 pieces like Llama's."""
    library = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("spm")
    (folder / "corpus.txt").write_text("\n".join(TEXT), "utf-8")
    library.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return folder


def test_sentencepiece(spm: Path) -> None:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(spm / "tokenizer.model"))
    tokenizer, keys = converted(spm, 600)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert [text.decode() for text in keys["tokenizer.ggml.tokens"]] == [
        library.id_to_piece(i) for i in range(600)
    ]
    np.testing.assert_array_equal(
        keys["tokenizer.ggml.scores"], np.float32([library.get_score(i) for i in range(600)])
    )
    kinds = [
        2 if library.is_unknown(i) else 3 if library.is_control(i) else 6 if library.is_byte(i) else 1
        for i in range(600)
    ]
    np.testing.assert_array_equal(keys["tokenizer.ggml.token_type"], kinds)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.unk) == (1, 2, 0)
    for text in STRINGS:
        assert tokenizer.encode(text, add_bos=False, special=False) == library.encode(text), text


def test_a_sentencepiece_vocabulary_written_as_bpe(spm: Path, tmp_path: Path) -> None:
    """As the tokenizers library has Llama's: merges in the order of the scores, spaces by a normalizer."""
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(spm / "tokenizer.model"))
    vocab = {library.id_to_piece(i): i for i in range(600)}
    merges = []
    for piece, i in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab and i > 258:
                merges.append((-library.get_score(i), vocab[left], vocab[right], left, right))
    merges.sort()
    normalizer = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        ],
    }
    special = [{"id": i, "content": text, "special": True} for i, text in enumerate(("<unk>", "<s>", "</s>"))]
    whole = folders.tokenizer_json("gpt-2", vocab, [[left, right] for *_, left, right in merges], special)
    whole |= {"normalizer": normalizer, "pre_tokenizer": None, "decoder": None}
    whole["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    whole["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    folders.write_json(tmp_path / "tokenizer.json", whole)
    folders.write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer, keys = converted(tmp_path, 600)
    assert keys["tokenizer.ggml.model"] == "llama" and tokenizer.add_bos
    assert list(keys["tokenizer.ggml.token_type"][:5]) == [2, 3, 3, 6, 6]
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in STRINGS:
        if text:  # the library then adds a space to nothing
            expected = fast.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, add_bos=False, special=False) == expected, text


def spm_as_bpe(folder: Path, merges: Sequence[str], change: Mapping[str, Any] | None = None) -> None:
    """A tokenizer.json of three letters and their merges, with byte tokens."""
    texts = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), SPACE, "a", "b", "c", "ab", "bc", "abc"]
    whole = folders.tokenizer_json("gpt-2", {text: i for i, text in enumerate(texts)}, merges)
    whole["model"] |= {"byte_fallback": True, "unk_token": "<unk>"}
    whole |= {"pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first"}}
    folders.write_json(folder / "tokenizer.json", whole | dict(change or {}))


def test_scores_from_merges(tmp_path: Path) -> None:
    """The first of several merges that make a token says how early it is made."""
    spm_as_bpe(tmp_path, ["a bc", "b c", "a b", "ab c"])
    tokenizer, keys = converted(tmp_path, 264)
    assert list(keys["tokenizer.ggml.scores"][257:]) == [-4, -4, -4, -4, -2, -1, 0]
    assert "tokenizer.ggml.add_space_prefix" not in keys
    assert tokenizer.encode("abc", add_bos=False, special=False) == [257, 263]


def test_a_space_in_front(tmp_path: Path) -> None:
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    for change in ({"pre_tokenizer": metaspace}, {"pre_tokenizer": None, "normalizer": replace}):
        spm_as_bpe(tmp_path, ["a b"], change)
        assert converted(tmp_path, 264)[1]["tokenizer.ggml.add_space_prefix"] is False
    spm_as_bpe(tmp_path, ["a b"], {"pre_tokenizer": None})
    with pytest.raises(UnsupportedError, match="spaces are not written"):
        converted(tmp_path, 264)


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


def test_the_fields_of_sentencepiece(tmp_path: Path) -> None:
    small_spm(tmp_path, trainer=folders.field(40, 0) + folders.field(42, 1) + folders.field(41, -1))
    tokenizer, keys = converted(tmp_path, 264)
    assert keys["tokenizer.ggml.eos_token_id"] == 1
    assert "tokenizer.ggml.bos_token_id" not in keys and "tokenizer.ggml.add_space_prefix" not in keys
    assert tokenizer.encode("abab", add_bos=False, special=False) == [263, 262]
    small_spm(tmp_path, normalizer=folders.field(3, 0) + folders.field(2, b"table") + folders.field(4, 1))
    vocabulary = read_vocabulary(tmp_path, Settings({}, "x"), arch="llama", n_vocab=264)
    assert vocabulary.keys()["tokenizer.ggml.add_space_prefix"] is False
    assert [note.split()[2] for note in vocabulary.notes] == ["normalises", "removes"]


def test_added_tokens_of_sentencepiece(tmp_path: Path) -> None:
    small_spm(tmp_path)
    folders.write_json(tmp_path / "added_tokens.json", {"<|im_start|>": 264, "<tool>": 265})
    folders.write_json(
        tmp_path / "tokenizer_config.json",
        {
            "added_tokens_decoder": {
                "0": {"content": "<unk>", "special": True},
                "260": {"content": "renamed", "special": False},
                "266": {"content": "<end>", "special": True},
            },
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "<end>",
            "pad_token": None,
            "add_bos_token": True,
            "add_eos_token": False,
            "chat_template": "{{ bos_token }}{{ messages }}",
        },
    )
    # One that a tokenizer.json beside it knows, too.
    added = [{"id": 267, "content": "<more>", "special": True}]
    folders.write_json(tmp_path / "tokenizer.json", {"added_tokens": added})
    _, keys = converted(tmp_path, 270, config={"pad_token_id": 2, "unk_token_id": -1})
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert tokens[264:] == [b"<|im_start|>", b"<tool>", b"<end>", b"<more>", b"[PAD268]", b"[PAD269]"]
    assert list(types[264:]) == [3, 4, 3, 3, 5, 5]
    assert list(keys["tokenizer.ggml.scores"][264:]) == [-1000.0] * 4 + [-10000.0] * 2
    assert (tokens[260], types[260], types[0]) == (b"renamed", 4, 2)
    assert [keys[f"tokenizer.ggml.{n}_token_id"] for n in ("bos", "eos", "padding", "unknown")] == [
        1,
        266,
        2,
        0,
    ]
    assert keys["tokenizer.ggml.add_bos_token"] is True and keys["tokenizer.ggml.add_eos_token"] is False
    assert keys["tokenizer.chat_template"] == "{{ bos_token }}{{ messages }}"


def test_added_tokens_without_a_row(tmp_path: Path) -> None:
    """Llama 2 was published with a <pad> beyond its embedding."""
    small_spm(tmp_path)
    folders.write_json(tmp_path / "added_tokens.json", {"<pad>": 264})
    entry = {"content": "<more>", "special": True}
    folders.write_json(
        tmp_path / "tokenizer_config.json",
        {"added_tokens_decoder": {"264": {"content": "<pad>"}, "999": entry}, "pad_token": "<pad>"},
    )
    vocabulary = read_vocabulary(tmp_path, Settings({"pad_token_id": 0}, "x"), arch="llama", n_vocab=264)
    assert len(vocabulary.texts) == 264 and "<pad>" not in vocabulary.texts
    assert vocabulary.special["padding_token_id"] == 0
    assert vocabulary.notes == [
        "added tokens without a row in the embedding are left out: '<pad>' and 1 more"
    ]


def test_a_sidecar_that_was_not_downloaded(tmp_path: Path) -> None:
    """A link of Hugging Face's cache to nowhere is no missing file: what it says would be missed."""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        small_spm(tmp_path)
        (tmp_path / name).symlink_to(tmp_path / "blobs" / "hash")
        with pytest.raises(FileError, match=f"{name} cannot be read"):
            converted(tmp_path, 264)
        (tmp_path / name).unlink()


def test_spaces_in_added_tokens(tmp_path: Path) -> None:
    """They are looked for in the text as it is written, not as SentencePiece writes it."""
    small_spm(tmp_path)
    folders.write_json(tmp_path / "added_tokens.json", {f"{SPACE}{SPACE}": 264})
    tokenizer, keys = converted(tmp_path, 265)
    assert keys["tokenizer.ggml.tokens"][264] == b"  "
    assert 264 in tokenizer.encode("ab  ab", add_bos=False, special=False)


def test_which_file_names_a_special_token(tmp_path: Path) -> None:
    """tokenizer_config.json, then special_tokens_map.json, then config.json."""
    bpe(tmp_path)
    config = {"eos_token_id": 256}
    assert converted(tmp_path, 260, config=config)[1]["tokenizer.ggml.eos_token_id"] == 256
    folders.write_json(tmp_path / "special_tokens_map.json", {"eos_token": "<tool>"})
    assert converted(tmp_path, 260, config=config)[1]["tokenizer.ggml.eos_token_id"] == 258
    folders.write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|end|>"})
    assert converted(tmp_path, 260, config=config)[1]["tokenizer.ggml.eos_token_id"] == 257


@pytest.mark.parametrize("kind", [1, 3, 4, 9])
def test_other_kinds_of_sentencepiece(kind: int, tmp_path: Path) -> None:
    small_spm(tmp_path, trainer=folders.field(3, kind))
    with pytest.raises(UnsupportedError, match="needs a BPE one"):
        converted(tmp_path, 264)


def test_damaged_sentencepiece(tmp_path: Path) -> None:
    small_spm(tmp_path)
    path = tmp_path / "tokenizer.model"
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    damaged = [data[:n] for n in range(0, len(data), 40)]
    for _ in range(200):
        copy = bytearray(data)
        copy[rng.integers(len(copy))] = rng.integers(256)
        damaged.append(bytes(copy))
    damaged += [b"", b"\x0a", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b" * 50]
    n_errors = 0
    for copy in damaged:
        path.write_bytes(copy)
        try:
            converted(tmp_path, 264)
        except PowerInferError:
            n_errors += 1
    assert n_errors > 50


# ---- byte-level BPE


def train_bpe(pre: str, n_vocab: int) -> dict[str, Any]:
    """The published form of a tokenizer trained on a little text."""
    blank = folders.tokenizer_json(pre, {}, [])
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(blank))
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=n_vocab,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    whole: dict[str, Any] = json.loads(tokenizer.to_str())
    whole["model"]["ignore_merges"] = blank["model"]["ignore_merges"]
    return whole


@pytest.mark.parametrize(
    ("pre", "arch"),
    [
        ("llama-bpe", "llama"),
        ("qwen2", "qwen2"),
        ("qwen2", "qwen3"),
        ("falcon", "falcon"),
        ("starcoder", "llama"),
        ("gpt-2", "opt"),
        ("gpt-2", "llama"),
    ],
)
def test_tokenizer_json(pre: str, arch: str, tmp_path: Path) -> None:
    whole = train_bpe(pre, 700)
    folders.write_json(tmp_path / "tokenizer.json", whole)
    tokenizer, keys = converted(tmp_path, 700, arch=arch)
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == pre
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in STRINGS:
        expected = fast.encode(fast.normalizer.normalize_str(text) if fast.normalizer else text)
        # llama.cpp normalises no text, so one in another form than NFC has other tokens.
        if fast.normalizer is None or fast.normalizer.normalize_str(text) == text:
            assert tokenizer.encode(text, add_bos=False, special=True) == expected.ids, text
    marked = "<|im_start|>user\nhello<|endoftext|>"
    assert tokenizer.encode(marked, add_bos=False, special=True) == fast.encode(marked).ids


def test_merges_as_texts_and_as_pairs(tmp_path: Path) -> None:
    whole = train_bpe("gpt-2", 400)
    answers = []
    for pairs in (False, True):
        merges = [m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"]]
        whole["model"]["merges"] = [m.split(" ") for m in merges] if pairs else merges
        folders.write_json(tmp_path / "tokenizer.json", whole)
        answers.append(converted(tmp_path, 400)[1]["tokenizer.ggml.merges"])
    assert answers[0] == answers[1] and len(answers[0]) == 400 - 256 - 2


def test_vocab_json_and_merges(tmp_path: Path) -> None:
    """OPT's form: special tokens in the middle of the vocabulary, rows without tokens at its end."""
    whole = train_bpe("gpt-2", 500)
    vocab, merges = whole["model"]["vocab"], whole["model"]["merges"]
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(m if isinstance(m, str) else " ".join(m) for m in merges) + "\n",
        "utf-8",
    )
    folders.write_json(tmp_path / "vocab.json", vocab)
    folders.write_json(
        tmp_path / "special_tokens_map.json",
        {
            "bos_token": {"content": "<|endoftext|>"},
            "eos_token": "<|endoftext|>",
            "pad_token": "<|im_start|>",
        },
    )
    folders.write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": True})
    tokenizer, keys = converted(tmp_path, 512, arch="opt")
    assert keys["tokenizer.ggml.pre"] == "gpt-2" and tokenizer.add_bos
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 0, 1)
    assert list(keys["tokenizer.ggml.token_type"][[0, 1, 2, 499, 500, 511]]) == [3, 3, 1, 1, 5, 5]
    fast = tokenizers.ByteLevelBPETokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    for text in STRINGS:
        assert tokenizer.encode(text, add_bos=False, special=False) == fast.encode(text).ids, text
    lines = (tmp_path / "merges.txt").read_text("utf-8").split("\n")
    (tmp_path / "merges.txt").write_text("\r\n".join(lines[1:]), "utf-8")  # no version, other line ends
    assert converted(tmp_path, 512, arch="opt")[1]["tokenizer.ggml.merges"] == keys["tokenizer.ggml.merges"]
    folders.write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "CodeGenTokenizer"})
    with pytest.raises(UnsupportedError, match="CodeGenTokenizer cuts words is not known; --pre"):
        converted(tmp_path, 512, arch="opt")
    assert converted(tmp_path, 512, arch="opt", pre="starcoder")[1]["tokenizer.ggml.pre"] == "starcoder"
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(FileError, match=r"merges\.txt cannot be read"):
        converted(tmp_path, 512, pre="gpt-2")


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


def test_types_of_added_tokens(tmp_path: Path) -> None:
    """One that is spelt like a mark is one, whatever its entry says."""
    bpe(tmp_path)
    _, keys = converted(tmp_path, 262, config={"eos_token_id": [257, 258], "bos_token_id": 999})
    assert list(keys["tokenizer.ggml.token_type"][255:]) == [1, 1, 3, 4, 3, 5, 5]
    assert keys["tokenizer.ggml.eos_token_id"] == 257
    assert "tokenizer.ggml.bos_token_id" not in keys
    assert "tokenizer.ggml.scores" not in keys
    assert keys["tokenizer.ggml.merges"] == [b"i n"]


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_several_tokens_that_end_answers(where: str, tmp_path: Path) -> None:
    """As of GLM 4, whose answers end with the next role's mark."""
    marks = [(257, "<|endoftext|>"), (258, "<|user|>"), (259, "<|observation|>"), (260, "<|stop|>")]
    bpe(tmp_path, {"added_tokens": [{"id": i, "content": text, "special": True} for i, text in marks]})
    folders.write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    said = {"eos_token_id": [257, 258, 259, 5, 999, None]}  # 5 is an ordinary letter
    config = {}
    if where == "config.json":
        config = said
    else:
        folders.write_json(tmp_path / where, said)
    tokenizer, keys = converted(tmp_path, 261, config=config)
    assert tokenizer.eog == {257, 258, 259}
    assert keys["tokenizer.ggml.eos_token_id"] == 257


def test_more_tokens_that_end_answers_than_keys(tmp_path: Path) -> None:
    bpe(tmp_path, {"added_tokens": [{"id": 257 + i, "content": f"<|{i}|>"} for i in range(4)]})
    settings = Settings({"eos_token_id": [257, 258, 259, 260]}, "config.json")
    vocabulary = read_vocabulary(tmp_path, settings, arch="llama", n_vocab=261)
    assert any("<|3|>" in note for note in vocabulary.notes)


def template(*names: str) -> dict[str, Any]:
    single = [
        {"Sequence": {"id": "A", "type_id": 0}} if n == "A" else {"SpecialToken": {"id": n, "type_id": 0}}
        for n in names
    ]
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("post_processor", "said", "expected"),
    [
        (template("<|end|>", "A"), None, (True, False)),
        (template("A", "<|end|>"), None, (False, True)),
        (template("<|end|>", "A", "<|end|>"), None, (True, True)),
        (template("A"), None, (False, False)),
        (template("<|end|>"), None, (True, False)),
        (template("<tool>", "A"), None, (False, False)),
        (
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template("<|end|>", "A")]},
            None,
            (True, False),
        ),
        (template("<|end|>", "A"), False, (False, False)),
        (template("A"), True, (True, False)),
        (None, True, (True, None)),
        (None, None, (None, None)),
        ({"type": "ByteLevel"}, None, (None, None)),
        ({"type": "TemplateProcessing", "single": [5, {"SpecialToken": 3}]}, None, (False, False)),
        ({"type": "TemplateProcessing", "single": 7}, None, (None, None)),
        ([1], None, (None, None)),
    ],
)
def test_tokens_that_are_added(post_processor: Any, said: bool | None, expected: Any, tmp_path: Path) -> None:
    """tokenizer_config.json counts, then the template of tokenizer.json."""
    bpe(tmp_path, {"post_processor": post_processor})
    config = {"bos_token": "<|end|>", "eos_token": "<|end|>"}
    folders.write_json(
        tmp_path / "tokenizer_config.json", config | ({} if said is None else {"add_bos_token": said})
    )
    _, keys = converted(tmp_path, 260)
    assert tuple(keys.get(f"tokenizer.ggml.add_{kind}_token") for kind in ("bos", "eos")) == expected


def test_chat_templates(tmp_path: Path) -> None:
    bpe(tmp_path)
    several = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    folders.write_json(tmp_path / "tokenizer_config.json", {"chat_template": several})
    _, keys = converted(tmp_path, 260)
    assert keys["tokenizer.chat_template"] == "D"
    assert keys["tokenizer.chat_template.rag"] == "R"
    assert keys["tokenizer.chat_templates"] == ["rag"]
    (tmp_path / "chat_template.jinja").write_text("J")
    _, keys = converted(tmp_path, 260)
    assert keys["tokenizer.chat_template"] == "J" and "tokenizer.chat_templates" not in keys


def test_chat_templates_in_files_of_their_own(tmp_path: Path) -> None:
    """As transformers 5 saves several, and as folders of processors have one."""
    bpe(tmp_path)
    folders.write_json(tmp_path / "chat_template.json", {"chat_template": "P"})
    _, keys = converted(tmp_path, 260)
    assert keys["tokenizer.chat_template"] == "P"
    (tmp_path / "chat_template.jinja").write_text("J")
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(name[0])
    _, keys = converted(tmp_path, 260)
    assert keys["tokenizer.chat_template"] == "J"
    assert keys["tokenizer.chat_templates"] == ["rag", "tool_use"]
    assert keys["tokenizer.chat_template.tool_use"] == "t"


@pytest.mark.parametrize(
    ("change", "model", "says"),
    [
        ({"model": {"type": "Unigram"}}, None, "Unigram"),
        ({"model": {"type": "WordPiece"}}, None, "WordPiece"),
        ({"model": 5}, None, "model is 5"),
        (None, {"end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
        (None, {"vocab": {}}, "has no tokens"),
        (None, {"vocab": {"a": -1}}, "'a' has the number -1"),
        (None, {"vocab": {"a": "b"}}, "'a' has the number 'b'"),
        (None, {"vocab": {"a": 1 << 70}}, "beyond the 260 embedding rows"),
        (None, {"vocab": {"a": 0, "b": 0}}, "both 'a' and 'b'"),
        (None, {"vocab": [["a", 0]]}, "vocab is"),
        (None, {"merges": None}, "merges is None"),
        (None, {"merges": ["in"]}, "merge 0 is 'in'"),
        (None, {"merges": [["i", "n", "g"]]}, "merge 0"),
        (None, {"merges": [["i", "a b"]]}, "without spaces"),
        (None, {"merges": [["i", 5]]}, "merge 0"),
        (None, {"merges": ["x y"]}, "needs the token"),
        (None, {"ignore_merges": "yes"}, "ignore_merges is 'yes'"),
        ({"added_tokens": 3}, None, "added_tokens is 3"),
        ({"added_tokens": [{"id": -1, "content": "x"}]}, None, "id is -1"),
        ({"added_tokens": [{"content": "x"}]}, None, "has no id"),
        ({"added_tokens": [{"id": 259, "content": ["x"]}]}, None, "content is ['x']"),
        ({"added_tokens": [{"id": 259, "content": "in"}]}, None, "the same text"),
        ({"normalizer": {"type": "Lowercase"}}, None, "changes the text (Lowercase)"),
        ({"pre_tokenizer": None}, None, "has no pre_tokenizer"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None, '{"type": "Whitespace"} is none'),
        ({"pre_tokenizer": {"type": "Nonsense"}}, None, '{"type": "Nonsense"} is none'),
        ({"pre_tokenizer": {"type": "Split", "pattern": 5}}, None, "cannot be made"),
        ({"pre_tokenizer": folders._split("(") | {}}, None, "cannot be made"),
    ],
)
def test_tokenizer_json_that_cannot_be(change: Any, model: Any, says: str, tmp_path: Path) -> None:
    bpe(tmp_path, change, model)
    with pytest.raises((FormatError, UnsupportedError)) as caught:
        converted(tmp_path, 260)
    assert says in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token is 5"),
        ("tokenizer_config.json", {"bos_token": {"content": 5}}, "content is 5"),
        ("tokenizer_config.json", {"add_bos_token": 1}, "add_bos_token is 1"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template is 5"),
        ("tokenizer_config.json", {"chat_template": [5]}, "chat_template is [5]"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "'x' is not the number"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"²": {}}}, "'²' is not the number"),
        ("tokenizer_config.json", [], "does not hold a JSON object"),
        ("added_tokens.json", {"x": "y"}, "x is 'y'"),
        ("added_tokens.json", {"x": -1}, "x is -1"),
        ("special_tokens_map.json", {"eos_token": [1]}, "eos_token is [1]"),
    ],
)
def test_sidecars_that_cannot_be(name: str, value: Any, says: str, tmp_path: Path) -> None:
    bpe(tmp_path)
    folders.write_json(tmp_path / name, value)
    with pytest.raises(FormatError) as caught:
        converted(tmp_path, 260)
    assert says in str(caught.value), str(caught.value)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="has no tokenizer"):
        converted(tmp_path, 260)


def test_a_tokenizer_model_that_is_something_else(tmp_path: Path) -> None:
    """Llama 3 came with a file of that name in another format, beside a tokenizer.json."""
    bpe(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    assert converted(tmp_path, 260)[1]["tokenizer.ggml.model"] == "gpt2"


# ---- notes, and names given by hand


def test_names_given_by_hand(tmp_path: Path) -> None:
    bpe(tmp_path, {"pre_tokenizer": None, "normalizer": {"type": "Lowercase"}})
    assert converted(tmp_path, 260, pre="tekken")[1]["tokenizer.ggml.pre"] == "tekken"
    with pytest.raises(UnsupportedError, match=r"'nonsense' is not known; these are: a\.x-4\.0, afmoe"):
        converted(tmp_path, 260, pre="nonsense")
    (tmp_path / "tokenizer.json").unlink()
    small_spm(tmp_path)
    with pytest.raises(ArgumentError, match="has no pre-tokenizer"):
        converted(tmp_path, 264, pre="tekken")


def test_normalisation_is_noted(tmp_path: Path) -> None:
    for normalizer, n_notes in (({"type": "NFC"}, 1), (None, 0)):
        bpe(tmp_path, {"normalizer": normalizer})
        vocabulary = read_vocabulary(tmp_path, Settings({}, "x"), arch="qwen2", n_vocab=260)
        assert [note for note in vocabulary.notes if "normalises" in note] == vocabulary.notes
        assert len(vocabulary.notes) == n_notes
