"""Byte-level vocabularies of folders, and the files beside them: the ids are those that the library of their
authors gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from powerinfer.errors import ArgumentError, FileError, FormatError, UnsupportedError
from powerinfer.models.convert.json_file import Settings
from powerinfer.models.convert.vocabulary import read_vocabulary
from tests.convert import folders
from tests.convert.tokenizer_folders import STRINGS, TEXT, bpe, converted, small_spm


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
