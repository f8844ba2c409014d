"""SentencePiece vocabularies of folders: what becomes of them gives the ids that its library gives."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from powerinfer._text.tokenizer import METASPACE_KEY, Tokenizer
from powerinfer.errors import FileError, PowerInferError, UnsupportedError
from powerinfer.models.convert.json_file import Settings
from powerinfer.models.convert.vocabulary import read_vocabulary
from tests.convert import folders
from tests.convert.tokenizer_folders import SPACE, STRINGS, TEXT, bpe, converted, small_spm


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


@pytest.mark.parametrize("is_legacy", [True, False])
def test_a_sentencepiece_vocabulary_written_as_bpe(spm: Path, tmp_path: Path, is_legacy: bool) -> None:
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
    if not is_legacy:
        whole |= {"normalizer": None, "pre_tokenizer": metaspace("first")}
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
    (tmp_path / "as_model").mkdir()
    shutil.copy(spm / "tokenizer.model", tmp_path / "as_model")
    folders.write_json(
        tmp_path / "as_model" / "tokenizer_config.json",
        {"tokenizer_class": "LlamaTokenizer", "legacy": is_legacy},
    )
    same, keys = converted(tmp_path / "as_model", 600)
    assert keys.get(METASPACE_KEY) == (None if is_legacy else "first")
    for text in (*STRINGS, "a</s>b", "</s> a </s>b", "<s>a"):
        if text:  # the library then adds a space to nothing
            expected = fast.encode(text, add_special_tokens=False).ids
            is_special = "s>" in text
            assert tokenizer.encode(text, add_bos=False, special=is_special) == expected, text
            assert same.encode(text, add_bos=False, special=is_special) == expected, text


def metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}


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


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_space_in_front(tmp_path: Path, scheme: str) -> None:
    added = {"added_tokens": [{"id": 264, "content": "<s>", "special": True} | dict.fromkeys(_FLAGS, False)]}
    spm_as_bpe(tmp_path, ["a bc", "b c", "a b", "ab c"], {"pre_tokenizer": metaspace(scheme), **added})
    tokenizer, _ = converted(tmp_path, 265)
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("abc", " abc", "  abc", "abc abc", "<s>abc", "<s> abc", "abc<s>abc", "<s><s>abc", " <s>abc"):
        expected = fast.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_bos=False, special=True) == expected, text


def test_a_file_that_says_something_else_of_spaces(tmp_path: Path) -> None:
    spm_as_bpe(tmp_path, ["a b"])
    _, keys = converted(tmp_path, 264)
    with pytest.raises(PowerInferError, match=r"metaspace' is 'last', not always or first"):
        Tokenizer.from_metadata(keys | {METASPACE_KEY: "last"})


def test_no_space_in_front(tmp_path: Path) -> None:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    old = {"type": "Metaspace", "replacement": SPACE, "add_prefix_space": False}
    for change in (
        {"pre_tokenizer": metaspace("never")},
        {"pre_tokenizer": old},
        {"pre_tokenizer": None, "normalizer": replace},
    ):
        spm_as_bpe(tmp_path, ["a b"], change)
        assert converted(tmp_path, 264)[1]["tokenizer.ggml.add_space_prefix"] is False
    spm_as_bpe(tmp_path, ["a b"], {"pre_tokenizer": None})
    with pytest.raises(UnsupportedError, match="spaces are not written"):
        converted(tmp_path, 264)


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
