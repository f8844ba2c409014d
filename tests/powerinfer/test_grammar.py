"""Answers of a given form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, Llama, LlamaGrammar, UnsupportedError
from powerinfer._text.grammar import closed, grammar_of_format

pytest.importorskip("llguidance")

OpenLlama = Callable[..., Llama]
MESSAGES = [{"role": "user", "content": "the tree"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
HOT: dict[str, Any] = {"temperature": 5.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0}


@pytest.mark.parametrize("which", ["relu", "bpe"])
def test_a_text_follows_its_grammar(llama: OpenLlama, which: str, relu_path: Path, bpe_path: Path) -> None:
    llm = llama({"relu": relu_path, "bpe": bpe_path}[which])
    for grammar in (LlamaGrammar.from_string(r'root ::= ("yes" | "no") " "? [a-c]{2,4} "."'),):
        for seed in range(10):
            result = llm("the", grammar=grammar, seed=seed, max_tokens=40, **HOT)["choices"][0]
            assert re.fullmatch(r"(yes|no) ?[a-c]{2,4}\.", result["text"]), result
            assert result["finish_reason"] == "stop"
    parts = [c["choices"][0]["text"] for c in llm("the", grammar=grammar, seed=9, stream=True, **HOT)]
    assert "".join(parts) == result["text"]


@pytest.mark.parametrize("notation", ["regex", "lark"])
def test_what_may_end_and_what_must(llama: OpenLlama, notation: str) -> None:
    llm = llama()
    tokenizer = llm.tokenizer
    by_regex = notation == "regex"
    grammar = LlamaGrammar.from_regex("a{2,3}") if by_regex else LlamaGrammar.from_lark("start: /a{2,3}/")
    constraint = grammar.constraint(tokenizer)
    (a,) = tokenizer.encode("a", add_bos=False, space_prefix=False)
    eos = llm.token_eos()
    for n, may_end in ((1, False), (2, True)):
        constraint.accept(a)
        allowed = constraint.allowed(320)
        assert not constraint.is_complete and allowed[a]
        assert allowed[eos] == may_end, n
    other = constraint.copy()
    constraint.accept(a)
    assert constraint.is_complete and not other.is_complete
    assert np.flatnonzero(constraint.allowed(320)).tolist() == sorted(tokenizer.eog)
    other.accept(eos)
    assert other.is_complete
    with pytest.raises(ArgumentError, match="does not fit"):
        other.accept(a)
    with pytest.raises(ArgumentError, match="does not fit"):
        LlamaGrammar.from_regex("a").constraint(tokenizer).accept(eos)


def test_a_mask_covers_padding_beyond_the_vocabulary(llama: OpenLlama) -> None:
    constraint = LlamaGrammar.from_regex(".*").constraint(llama().tokenizer)
    logits = np.zeros(400, np.float32)
    constraint.mask(logits)
    assert np.isneginf(logits[320:]).all() and np.isfinite(logits[:320]).any()
    assert np.isneginf(logits[1])  # <s> is no text


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        {"type": "json_schema", "schema": SCHEMA},
    ],
)
def test_response_format(llama: OpenLlama, response_format: dict[str, Any]) -> None:
    llm = llama(chat_format="chatml")
    for seed in range(5):
        result = llm.create_chat_completion(
            MESSAGES, response_format=response_format, seed=seed, max_tokens=150, **HOT
        )["choices"][0]
        value = json.loads(result["message"]["content"] or "")
        assert set(value) == {"name", "n"} and isinstance(value["n"], int) and len(value["name"]) <= 6
        assert result["finish_reason"] == "stop"


def test_any_json_object(llama: OpenLlama) -> None:
    """The bias makes the model end what it began."""
    llm = llama(chat_format="chatml")
    close = llm.tokenize("}", add_bos=False)[-1]
    result = llm.create_chat_completion(
        MESSAGES, response_format={"type": "json_object"}, max_tokens=60, logit_bias={close: 50.0}
    )["choices"][0]
    assert json.loads(result["message"]["content"] or "") == {}


def test_generate_and_sample(llama: OpenLlama) -> None:
    llm = llama()
    grammar = LlamaGrammar.from_string('root ::= "tree" "s"*')
    prompt = llm.tokenize("the")
    tokens = list(islice(llm.generate(prompt, grammar=LlamaGrammar.from_regex("trees"), temp=2.0), 50))
    assert llm.detokenize(tokens, prev_tokens=prompt) == b"trees"
    constraint = grammar.constraint(llm.tokenizer)
    llm.eval(prompt)
    before = llm.scores[-1].copy()
    first = llm.sample(grammar=constraint, temp=0.0)
    assert b"tree".startswith(llm.detokenize([first], prev_tokens=prompt))
    assert np.array_equal(llm.scores[-1], before)  # what was computed stays
    assert first == llm.sample(grammar=grammar, temp=0.0) == llm.sample(grammar='root ::= "tree"', temp=0.0)


def test_a_grammar_from_a_file(tmp_path: Path, llama: OpenLlama) -> None:
    path = tmp_path / "g.gbnf"
    path.write_text("# numbers\nroot ::= digit{3}\ndigit ::= [0-9]\n")
    text = llama()("the", grammar=LlamaGrammar.from_file(path), max_tokens=20)["choices"][0]["text"]
    assert re.fullmatch("[0-9]{3}", text)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="UTF-8"):
        LlamaGrammar.from_file(path)


def test_objects_have_no_other_properties() -> None:
    """As llama.cpp reads schemas; what says something else about them is left alone."""
    inner = {"properties": {"x": {"type": "array", "items": {"properties": {}}}}}
    made = closed({"properties": {"a": inner}, "$defs": {"d": inner}, "anyOf": [inner], "type": "object"})
    shut = {
        "properties": {"x": {"type": "array", "items": {"properties": {}, "additionalProperties": False}}},
        "additionalProperties": False,
    }
    del made["x-guidance"]
    assert made == {"properties": {"a": shut}, "$defs": {"d": shut}, "anyOf": [shut], "type": "object"}
    kept = {"properties": {}, "additionalProperties": True, "x-guidance": {}}
    assert closed(kept) == kept and closed(True) is True
    LlamaGrammar.from_json_schema({"oneOf": [{"type": "integer"}, {"const": "a"}]})


@pytest.mark.parametrize(
    "text",
    ["root = x", "root ::= nosuch", "", 'a ::= "b"', "root ::= (((", 'root ::= "a', "\\", "root ::= ["],
)
def test_bad_grammars(text: str) -> None:
    with pytest.raises(ArgumentError, match="grammar is not valid"):
        LlamaGrammar.from_string(text)


@pytest.mark.parametrize(
    "schema",
    ["{", '{"type": "nosuch"}', {"properties": 5}, 7, {"$ref": "http://127.0.0.1:1/x"}, {"type": {1}}],
)
def test_bad_schemas(schema: Any) -> None:
    with pytest.raises(ArgumentError):
        LlamaGrammar.from_json_schema(schema)


@pytest.mark.parametrize(
    "response_format",
    ["json", {}, {"type": "x"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}],
)
def test_bad_response_formats(response_format: Any) -> None:
    with pytest.raises(ArgumentError, match="response_format"):
        grammar_of_format(response_format)
    assert grammar_of_format(None) is grammar_of_format({"type": "text"}) is None


def test_two_forms_at_once(llama: OpenLlama) -> None:
    with pytest.raises(ArgumentError, match="both"):
        llama().create_chat_completion(
            MESSAGES, grammar='root ::= "a"', response_format={"type": "json_object"}
        )


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match=r"powerinfer\[grammar\]"):
        LlamaGrammar.from_string('root ::= "a"')


def test_too_many_alternatives(llama: OpenLlama) -> None:
    """What llguidance cannot follow is told as that, not as a token that does not fit."""
    objects = [
        {"type": "object", "properties": {f"p{i}": {"type": "integer"}}, "required": [f"p{i}"]}
        for i in range(3000)
    ]
    tokenizer = llama().tokenizer
    constraint = LlamaGrammar.from_json_schema({"anyOf": objects}).constraint(tokenizer)
    with pytest.raises(ArgumentError, match=r"too many alternatives .* 3000 items") as caught:
        for token in tokenizer.encode('{"p7": 1}', add_bos=False, space_prefix=False):
            constraint.accept(token)
    assert "state" not in str(caught.value) and "does not fit" not in str(caught.value)
