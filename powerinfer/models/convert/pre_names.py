"""Finding the name of a byte-level tokenizer's pre-tokenizer: how it cuts text into words before merging.

tokenizer.json describes it as a tree of steps, and the same cuts can be described in many ways. So it is
recognised by what it does: it and the schemes that the engine knows by name cut the same text, which has
every sequence of three kinds of characters in it.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import tokenizers

from ..._text.pretokenizer import PRE_TOKENIZERS, PreTokenizer
from ...errors import FormatError, UnsupportedError

# One of each kind that a known scheme treats differently: letters by case and script, marks, digits, signs,
# punctuation, white space.
_KINDS = "aZéЖß中あ한क्٣7²½'.,!(-_$^`@。、€😀 \t\n\r\u00a0\u3000"
_WORDS = (
    "it's IT'S I'm we'Re they'LL he'd 'T don't 'Tis l'été",
    "x'sx x'tx x'rex x'vex x'mx x'llx x'dx x'Sx x'Tx x'rEx x'Vex x'Mx x'lLx x'Dx x'ſx x'zx",
    "1 12 123 1234 12345 123456 1234567 3.14 0x1F 2²3½ ١٢٣٤",
    "HelloWorld helloWORLD XMLParser iPhone ÉtéÀ naïve ΑΒγδ ЖизньЖИЗНЬ",
    "#include <stdio.h>\r\n\tint main() { return 0; }  \n\n\n   \t x",
    "https://example.org/a/b?c=d&e=f   ...!!!???  «quoted» “quoted” —dash–dash",
    "中文和English混排。日本語のテキスト、한국어 텍스트 हिन्दी पाठ ไทย ქართული Ελληνικά",
    "🚀🚀 👩‍👩‍👧 e\u0301 \u200b\u200d\ufeff x\u00a0y",
)

_CASED = r"""[^\r\n\p{L}\p{N}]?%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    f"{_CASED % f'{_UPPER}*{_LOWER}+'}|{_CASED % f'{_UPPER}+{_LOWER}*'}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")

# Descriptions whose scheme, llama.cpp's, differs from them inside single characters: Falcon looks for digits
# among the characters that stand for bytes, and finds some in the bytes of a letter such as \u0672; gpt-4o's
# contractions are of ASCII letters, where the description's also take a long s, and its letters and Tekken's
# have a case in ASCII alone; East Asia has no white space in DeepSeek's.
_NEAR = {
    "gpt-4o": [
        {"type": "Split", "pattern": {"Regex": _GPT4O}, "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
    "tekken": [
        {"type": "Split", "pattern": {"Regex": _TEKKEN}, "behavior": "Isolated"},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
    "deepseek-coder": [
        *(
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
            for pattern in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+")
        ),
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "ByteLevel", "add_prefix_space": False},
        {"type": "Digits", "individual_digits": False},
        {"type": "Split", "pattern": {"Regex": "[0-9][0-9][0-9]"}, "behavior": "Isolated"},
    ],
}
_DEFAULTS = (("trim_offsets", True), ("use_regex", True), ("invert", False))

# The library has other steps, but no byte-level tokenizer uses them, and some abort on bad values.
_STEPS = ("Sequence", "Split", "ByteLevel", "Digits", "Punctuation")
_MOST_STEPS = 32


def _is_plain(description: Any) -> bool:
    """Whether it consists of a few steps of the usual kinds, and so can be tried out."""
    todo, n = [description], 0
    while todo:
        step = todo.pop()
        n += 1
        if n > _MOST_STEPS or not isinstance(step, dict) or step.get("type") not in _STEPS:
            return False
        inner = step.get("pretokenizers", [])
        todo += inner if isinstance(inner, list) else [inner]
    return True


def _near(description: Any) -> str | None:
    """The name of a description in _NEAR."""
    steps = description.get("pretokenizers") if isinstance(description, dict) else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return None
    plain = [{k: v for k, v in step.items() if (k, v) not in _DEFAULTS} for step in steps]
    return next((name for name, known in _NEAR.items() if known == plain), None)


@functools.cache
def _probe() -> str:
    """A text with every three kinds in a row: a de Bruijn sequence, then words."""
    n, order = len(_KINDS), 3
    word, out = [0] * (n * order), []

    def extend(t: int, p: int) -> None:
        if t > order:
            if order % p == 0:
                out.extend(word[1 : p + 1])
            return
        word[t] = word[t - p]
        extend(t + 1, p)
        for i in range(word[t - p] + 1, n):
            word[t] = i
            extend(t + 1, t)

    extend(1, 1)
    return "".join(_KINDS[i] for i in out) + "\n".join(_WORDS)


def _cuts(pre_tokenizer: tokenizers.pre_tokenizers.PreTokenizer) -> bytes:
    """Where the probe is cut."""
    return np.array([span for _, span in pre_tokenizer.pre_tokenize_str(_probe())], np.int32).tobytes()


@functools.cache
def _cuts_of(scheme: PreTokenizer) -> bytes:
    return _cuts(scheme.build())


@functools.lru_cache(32)
def _cuts_of_json(description: str) -> bytes:
    """Of a pre_tokenizer of a tokenizer.json. Raises what the library raises."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    whole = {"version": "1.0", "pre_tokenizer": json.loads(description), "added_tokens": [], "model": model}
    return _cuts(tokenizers.Tokenizer.from_str(json.dumps(whole)).pre_tokenizer)


def recognise(description: Any, *, ignore_merges: bool, first: str, where: str) -> str:
    """The name that the engine knows a `pre_tokenizer` of a tokenizer.json by.

    ignore_merges: of its BPE model, which belongs to a scheme. first: the name to prefer where several mean
    the same. Raises FormatError if it is none that the tokenizers library knows, UnsupportedError for one
    without a name.
    """
    if description is None:
        raise UnsupportedError(f"{where} has no pre_tokenizer; --pre NAME says which one the model has")
    near = _near(description)
    if near is not None and PRE_TOKENIZERS[near].ignore_merges == ignore_merges:
        return first if PRE_TOKENIZERS.get(first) is PRE_TOKENIZERS[near] else near
    shown = json.dumps(description, ensure_ascii=False)
    unknown = UnsupportedError(
        f"{where}: the pre_tokenizer {shown:.300} is none that the engine knows by name; "
        "--pre NAME says which one comes near enough"
    )
    if not _is_plain(description):
        raise unknown
    try:
        cuts = _cuts_of_json(json.dumps(description))
    except Exception as error:  # the library raises its errors as plain Exception
        raise FormatError(f"{where}: the pre_tokenizer cannot be made: {error!s:.200}") from None
    names = sorted(PRE_TOKENIZERS, key=lambda name: name != first)
    for name in names:
        scheme = PRE_TOKENIZERS[name]
        if scheme.ignore_merges == ignore_merges and _cuts_of(scheme) == cuts:
            return name
    raise unknown


def check_name(name: str) -> str:
    """The name, if the engine knows it. Raises UnsupportedError."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"the pre-tokenizer {name!r} is not known; these are: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return name
