"""Answers of a given form: GBNF grammars and JSON schemas, enforced by llguidance (`powerinfer[grammar]`).

    grammar = LlamaGrammar.from_json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    constraint = grammar.constraint(tokenizer)  # one for each answer
    while not constraint.is_complete:
        constraint.mask(logits)                 # what the grammar forbids becomes -inf, in place
        token = choose(logits)
        if tokenizer.is_eog(token):             # allowed where the grammar may end
            break
        constraint.accept(token)

A `LlamaGrammar` is text and may be shared; a `Constraint` belongs to one answer and one thread at a time.
Making one compiles the grammar: milliseconds, for large schemas more.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._extras import how
from ..errors import ArgumentError, UnsupportedError
from .tokenizer import Tokenizer

Logits = npt.NDArray[np.float32]

# Between the parts of JSON: nothing, one space, or a line break and an indentation. Without a bound a model
# can fill an answer with spaces.
_JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,20}", "coerce_one_of": True}

_vocabularies: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


class LlamaGrammar:
    """A form that an answer must have. Needs llguidance (the extra powerinfer[grammar]).

    grammar = LlamaGrammar.from_regex("yes|no")
    llm("Is the sky blue? ", grammar=grammar)["choices"][0]["text"]

    Errors in a grammar are raised here, not when an answer is made: each method raises ArgumentError for
    one that is not valid, and UnsupportedError if llguidance is not installed. A grammar may be shared.
    """

    def __init__(self, text: str) -> None:
        """text: a grammar in llguidance's notation; the from_... methods make one of others.

        Raises ArgumentError, UnsupportedError if llguidance is not installed.
        """
        self.text = text
        is_error, messages = need_llguidance().LLMatcher.validate_grammar_with_warnings(text)
        if is_error:
            raise ArgumentError(f"the grammar is not valid: {_one_line(messages[0])}")

    @classmethod
    def unchecked(cls, text: str) -> LlamaGrammar:
        """The same without compiling it: errors are raised when an answer is made."""
        made = object.__new__(cls)
        made.text = text
        return made

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF, llama.cpp's notation, whose first rule is `root`. Lark is recognised too.

        verbose has no effect in these methods; llama-cpp-python has it.
        """
        del verbose  # nothing is printed
        return cls(of_gbnf(grammar))

    @classmethod
    def from_file(cls, file: str | os.PathLike[str], verbose: bool = True) -> LlamaGrammar:
        """A grammar from a UTF-8 file with GBNF. Raises also what opening the file raises."""
        try:
            text = Path(file).read_text("utf-8")
        except UnicodeDecodeError:
            raise ArgumentError(f"the grammar {os.fspath(file)} is not UTF-8") from None
        return cls.from_string(text, verbose)

    @classmethod
    def from_json_schema(
        cls, json_schema: str | Mapping[str, Any] | bool, verbose: bool = True
    ) -> LlamaGrammar:
        """JSON that a schema accepts. The schema is a dict, or text with JSON."""
        del verbose
        return cls(_of_schema(json_schema))

    @classmethod
    def from_lark(cls, lark: str) -> LlamaGrammar:
        """A grammar in llguidance's Lark, in which `%json {...}` means JSON of a schema."""
        return cls(need_llguidance().LLMatcher.grammar_from_lark(lark))

    @classmethod
    def from_regex(cls, regex: str) -> LlamaGrammar:
        """Text that a regular expression matches as a whole."""
        return cls(need_llguidance().LLMatcher.grammar_from_regex(regex))

    def constraint(self, tokenizer: Tokenizer) -> Constraint:
        """What holds one answer to this grammar."""
        return Constraint(self, tokenizer)


class Constraint:
    """The state of one answer that follows a grammar."""

    def __init__(self, grammar: LlamaGrammar, tokenizer: Tokenizer) -> None:
        """Raises ArgumentError for a grammar that is not valid, or too large."""
        self._matcher = need_llguidance().LLMatcher(vocabulary(tokenizer), grammar.text, log_level=0)
        self._tokenizer = tokenizer
        self._ended = False
        self._check("the grammar is not valid")

    is_ready = True
    """mask() does not wait for anything."""

    def close(self) -> None:
        """Nothing: others have something to free."""

    def _check(self, what: str = "the grammar failed") -> None:
        if self._matcher.is_error():
            raise ArgumentError(self._problem(what))

    def _problem(self, what: str) -> str:
        """What llguidance says, without the state of its parser that stands below."""
        said = _one_line(self._matcher.get_error().partition("\n")[0])
        if "max is" not in said:
            return f"{what}: {said}"
        return f"the grammar has too many alternatives at one place, of anyOf say: {said}"

    def mask(self, logits: Logits) -> None:
        """Sets the logits [n_vocab] of tokens that may not come next to -inf, in place.

        End tokens may come where the answer may end. Raises ArgumentError where the grammar grows beyond its
        limits.
        """
        allowed = self.allowed(logits.size)
        logits[~allowed] = -np.inf

    def allowed(self, n_vocab: int) -> npt.NDArray[np.bool_]:
        """Which of n_vocab tokens may come next."""
        return allowed_of_bits(self.bits(), n_vocab, self._tokenizer.n_vocab)

    def bits(self) -> bytes:
        """The same as llguidance has it, one bit a token."""
        bits: bytes = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token: int) -> None:
        """Tells that this token came. Raises ArgumentError if it may not."""
        if self._tokenizer.is_eog(token) and self._matcher.is_accepting():
            self._ended = True
        elif self._ended or not self._matcher.consume_token(token):
            raise ArgumentError(self._problem(f"token {token} does not fit the grammar"))

    @property
    def is_complete(self) -> bool:
        """Whether nothing more can follow but the end."""
        return self._ended or bool(self._matcher.is_stopped())

    def copy(self) -> Constraint:
        """Another answer that begins as this one does."""
        other = object.__new__(Constraint)
        other._matcher, other._tokenizer = self._matcher.deep_copy(), self._tokenizer
        other._ended = self._ended
        return other


def allowed_of_bits(bits: bytes, n_vocab: int, n_known: int) -> npt.NDArray[np.bool_]:
    """Which of n_vocab tokens may come next, of which the tokenizer has the first n_known."""
    allowed = np.zeros(n_vocab, np.bool_)
    flags = np.unpackbits(np.frombuffer(bits, np.uint8), count=min(n_vocab, n_known), bitorder="little")
    allowed[: flags.size] = flags
    return allowed


def of_gbnf(grammar: str) -> str:
    """GBNF or Lark in llguidance's notation, not compiled yet. Raises ArgumentError."""
    llguidance = need_llguidance()
    try:
        lark = import_module("llguidance.gbnf_to_lark").any_to_lark(grammar)
    except Exception as error:  # the converter raises Exception itself
        raise ArgumentError(f"the grammar is not valid: {_one_line(error)}") from None
    return str(llguidance.LLMatcher.grammar_from_lark(lark))


def grammar_of_format(response_format: Mapping[str, Any] | None) -> LlamaGrammar | None:
    """The grammar that OpenAI's `response_format` asks for, not compiled yet; None for plain text.

    {"type": "json_object"}, with llama-cpp-python's optional "schema",
    {"type": "json_schema", "json_schema": {"schema": {...}}} (as llama-server has it also without the inner
    mapping), and beyond OpenAI's {"type": "regex", "regex": "..."}, {"type": "choice", "choice": ["..."]}
    and {"type": "grammar", "grammar": "..."}. Raises ArgumentError for others.
    """
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise ArgumentError("response_format is not a mapping with a 'type'")
    kind = response_format.get("type")
    if kind == "text":
        return None
    schema: Any
    if kind == "json_object":
        schema = response_format.get("schema") or {"type": "object"}
    elif kind == "json_schema":
        described = response_format.get("json_schema", response_format)
        if not isinstance(described, Mapping) or "schema" not in described:
            raise ArgumentError("response_format has no 'json_schema' with a 'schema'")
        schema = described["schema"]
    elif kind in ("regex", "grammar"):
        text = response_format.get(kind)
        if not isinstance(text, str):
            raise ArgumentError(f"response_format has no text {kind!r}")
        if kind == "grammar":
            return LlamaGrammar.unchecked(of_gbnf(text))
        return LlamaGrammar.unchecked(need_llguidance().LLMatcher.grammar_from_regex(text))
    elif kind == "choice":
        texts = response_format.get("choice")
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
            raise ArgumentError("response_format has no 'choice': a list of texts that are not empty")
        lark = f"start: {' | '.join(json.dumps(text) for text in texts)}"
        return LlamaGrammar.unchecked(need_llguidance().LLMatcher.grammar_from_lark(lark))
    else:
        raise ArgumentError(
            f"response_format has the type {kind!r}; known are 'text', 'json_object', 'json_schema', "
            "'regex', 'choice' and 'grammar'"
        )
    return LlamaGrammar.unchecked(_of_schema(schema))


def _of_schema(schema: Any) -> str:
    if not isinstance(schema, (str, Mapping, bool)):
        raise ArgumentError(f"a JSON schema is a mapping or text, not {type(schema).__name__}")
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        return str(need_llguidance().LLMatcher.grammar_from_json_schema(json.dumps(closed(schema))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"the JSON schema is not valid: {_one_line(error)}") from None


def closed(schema: Any) -> Any:
    """A schema for generating: as llama.cpp reads it, an object with `properties` has no others unless
    `additionalProperties` says so. Without that a model can go on inventing more.
    """
    made = _closed(schema)
    return {"x-guidance": _JSON_OPTIONS, **made} if isinstance(made, dict) else made


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in ("items", "prefixItems", "anyOf", "oneOf"):
        if key in made:
            made[key] = _closed(made[key])
    for key in ("properties", "$defs", "definitions"):
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _closed(value) for name, value in made[key].items()}
    if "properties" in made and not _MORE_PROPERTIES & made.keys():
        made["additionalProperties"] = False
    return made


# What says itself which other properties there are.
_MORE_PROPERTIES = {"additionalProperties", "patternProperties", "unevaluatedProperties"} | {
    *("allOf", "anyOf", "oneOf", "$ref", "if")
}


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:300] or "no reason is given"


def need_llguidance() -> Any:
    """The module. Raises UnsupportedError if it is not installed."""
    try:
        return import_module("llguidance")
    except ImportError:
        raise UnsupportedError(f"grammars and JSON schemas need llguidance: {how('grammar')}") from None


class _Words:
    """A vocabulary as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ends = sorted(tokenizer.eog)
        if not ends:
            raise UnsupportedError("a grammar needs a vocabulary with an end token, and this one has none")
        self.eos_token_id = tokenizer.eos if tokenizer.eos in tokenizer.eog else ends[0]
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = [i for i in range(tokenizer.n_vocab) if tokenizer.is_control(i)]
        self.tokens = [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
        for i in self.special_token_ids:
            self.tokens[i] = tokenizer.text(i)
        self._tokenizer = weakref.ref(tokenizer)

    def __call__(self, text: bytes) -> list[int]:
        tokenizer = self._tokenizer()
        return [] if tokenizer is None else tokenizer.encode(text, add_bos=False, space_prefix=False)


def vocabulary(tokenizer: Tokenizer) -> Any:
    """As llguidance has it; made once."""
    found = _vocabularies.get(tokenizer)
    if found is None:
        llguidance = need_llguidance()
        found = _vocabularies[tokenizer] = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Words(tokenizer)),
            n_vocab=tokenizer.n_vocab,
            eos_token=sorted(tokenizer.eog),
        )
    return found
