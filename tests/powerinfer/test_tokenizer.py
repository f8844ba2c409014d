"""The tokenizer against the sentencepiece and tokenizers libraries (stored ids) and against slow, plain
versions."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import BYTE, CASES, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, bpe, llama, spm

from powerinfer._text import merging
from powerinfer._text.pretokenizer import PRE_BY_ARCHITECTURE, PRE_TOKENIZERS
from powerinfer._text.tokenizer import Tokenizer, TokenizerError
from powerinfer.errors import PowerInferError


def plain(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    return tokenizer.encode(text, add_bos=False, special=False)


def parsed(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    return tokenizer.encode(text, add_bos=False, special=True)


# -- against other programs


@pytest.mark.parametrize(("text", "ids"), CASES["spm"]["cases"])
def test_spm_gives_the_ids_of_sentencepiece(text: str, ids: list[int]) -> None:
    assert plain(Tokenizer(spm()), text) == ids


def test_merges_of_gemma4_are_sentencepieces_scores() -> None:
    """A file with SentencePiece's vocabulary and its merges in order gives the same ids."""
    meta = spm()
    texts = [token.decode() for token in meta["tokenizer.ggml.tokens"]]
    score = dict(zip(texts, meta.pop("tokenizer.ggml.scores"), strict=True))
    merges = [
        f"{text[:i]} {text[i:]}"
        for text in sorted(texts, key=lambda text: -score[text])
        for i in range(1, len(text))
        if text[:i] in score and text[i:] in score
    ]
    meta |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [m.encode() for m in merges]}
    assert not Tokenizer(meta).add_space_prefix
    tokenizer = Tokenizer(meta | {"tokenizer.ggml.add_space_prefix": True})
    for text, ids in CASES["spm"]["cases"]:
        assert plain(tokenizer, text) == ids
        assert tokenizer.decode(ids) == Tokenizer(spm()).decode(ids)


@pytest.mark.parametrize(("text", "ids"), CASES["bpe"]["cases"])
def test_bpe_gives_the_ids_of_the_tokenizers_library(text: str, ids: list[int]) -> None:
    assert plain(Tokenizer(bpe()), text) == ids


# -- against plain versions of the same rules


def slow_spm(tokens: list[str], scores: list[float], text: str) -> list[str]:
    """Search the whole text for the best pair, join it, begin again."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        best: tuple[float, int] | None = None
        for i in range(len(symbols) - 1):
            joined = symbols[i] + symbols[i + 1]
            if joined in tokens and (best is None or scores[tokens.index(joined)] > best[0]):
                best = scores[tokens.index(joined)], i
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = ["".join(symbols[best[1] : best[1] + 2])]
    output = []
    for symbol in symbols:
        output += [symbol] if symbol in tokens else [f"<0x{b:02X}>" for b in symbol.encode()]
    return output


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(40))
def test_spm_joins_the_best_pair_first_and_the_left_one_of_equals(seed: int) -> None:
    """Random vocabularies with many equal scores, gaps (a token whose parts are none), spaces inside of
    tokens."""
    rng = random.Random(seed)
    letters = "abc▁é"
    words = {"".join(rng.choices(letters, k=rng.choice([1, 2, 2, 3, 3, 4, 5]))) for _ in range(60)}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *sorted(words)]
    scores = [float(rng.choice([0, -1, -2, -3])) for _ in tokens]
    tokenizer = Tokenizer(
        llama(tokens, scores=scores, types=[2, 3, 3] + [BYTE] * 256 + [NORMAL] * len(words))
    )
    for _ in range(20):
        text = "".join(rng.choices("abc é", k=rng.randint(1, 90)))
        got = [tokens[i] for i in plain(tokenizer, text)]
        assert got == slow_spm(tokens, scores, text), text


def slow_bpe(merges: list[tuple[str, str]], symbols: list[str]) -> list[str]:
    while True:
        ranks = [
            (merges.index(pair), i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in merges
        ]
        if not ranks:
            return symbols
        _, i = min(ranks)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@pytest.mark.parametrize("seed", range(20))
def test_bpe_applies_the_first_merge_first(seed: int) -> None:
    rng = random.Random(seed)
    tokens, merges = list("abcd"), []
    for _ in range(30):
        left, right = rng.choice(tokens), rng.choice(tokens)
        if left + right not in tokens:
            tokens.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [t.encode() for t in tokens],
            "tokenizer.ggml.merges": [f"{a} {b}".encode() for a, b in merges],
        }
    )
    for _ in range(20):
        word = "".join(rng.choices("abcd", k=rng.randint(1, 60)))
        assert [tokens[i] for i in plain(tokenizer, word)] == slow_bpe(merges, list(word)), word


# -- the schemes that cut words; by hand, and the same as llama.cpp's


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "Hello World's 12345", "Hello| World|'s| 12345"),
        ("gpt-2", "it'S  two\n\n x", "it|'|S| | two|\n\n| x"),
        ("gpt-2", "a=1 ~2!? ", "a|=|1| ~|2|!?| "),
        ("falcon", "World's 12345 a-b `c` 50%", "World|'|s| |123|45| a|-|b| |`|c|`| 50|%"),
        ("falcon", "don't", "don|'|t"),
        ("llama-bpe", "Hello World's 12345 it'S", "Hello| World|'s| |123|45| it|'S"),
        ("llama-bpe", "end!\n\n  next\t\tx", "end|!\n\n| | next|\t|\tx"),
        ("llama-bpe", "(foo)\r\n", "(foo|)\r\n"),
        ("qwen2", "pi 314 it'LL", "pi| |3|1|4| it|'LL"),
        ("starcoder", "x12 34", "x|1|2| |3|4"),
        ("command-r", "x12 34", "x|1|2| |3|4"),
        ("refact", "don't 7", "don|'t| |7"),
        ("mpt", "don't 77", "don|'t| 77"),
        ("deepseek-llm", "ab 中文12 x\ny", "ab| |中文|12| x|\n|y"),
        ("deepseek-coder", "ab 中文12 x!\ny", "ab| |中文|1|2| x|!|\n|y"),
        ("deepseek-v3", "ab 中文1234 x.y\n", "ab| |中文|123|4| x|.y|\n"),
        ("default", "don't 1234 a+b", "don|'|t| |123|4| a|+|b"),
        ("tekken", "helloWorld HTTPServer 12", "hello|World| HTTPServer| |1|2"),
        ("gpt-4o", "helloWorld's 1234", "hello|World's| |123|4"),
        ("minimax-m2", "helloWorld's 1234", "hello|World's| |123|4"),
        ("granite-docling", "don't 77", "don|'t| 77"),
        ("superbpe", "on the 1234567 of it", "on the |1|234|567| of it"),
        ("seed-coder", "pi 31 it'LL!\n\nx", "pi| |3|1| it|'LL|!|\n\n|x"),
        ("bailingmoe", "pi 31!\n\nx \n\n y", "pi| |3|1|!\n\n|x| \n\n| y"),
        ("exaone-moe", "one two 31!/x\n\n", "one two| |3|1|!/|x|\n\n"),
        ("kimi-k2", "中文ab helloWorld's 1234/\n", "中文|ab| hello|World's| |123|4|/\n"),
        ("kimi-k2", "Ñandú ÑANDÚab", "Ñandú| ÑANDÚab"),
        ("afmoe", "1234567 x.y 中文한국 ab12", "1|234|567| x|.y| |中文한국| ab|12"),
        ("tiny_aya", "1234567 ab12 1234x", "1|234|567| ab|12| |123|4|x"),
        ("youtu", "한국어中文 helloWorld 12、x", "한국어|中文| hello|World| |1|2|、|x"),
        ("jais2", "a" + " " * 7 + "b", "a|" + " " * 4 + "|" + " " * 2 + "| b"),
        ("laguna", "ab 12\n\ncd", "ab| |1|2|\n\n|cd"),
    ],
)
def test_words(pre: str, text: str, words: str) -> None:
    steps = PRE_TOKENIZERS[pre].build()
    got = [text[begin:end] for _, (begin, end) in steps.pre_tokenize_str(text)]
    assert "|".join(got) == words


def test_every_scheme_keeps_every_character() -> None:
    text = "Ab'ſ 12 ١٢ ½\u00a0\u3000\t\r\n中文 한국 e\u0301 🚀!? _x_ \u2028 ÀΩя"
    for pre in PRE_TOKENIZERS:
        tokenizer = Tokenizer(bpe(pre=pre))
        assert tokenizer.decode(plain(tokenizer, text)).decode() == text, pre


def test_a_word_that_is_a_token_is_taken_whole_where_merges_are_ignored() -> None:
    extra = {"Ġqzx": NORMAL}  # no merge makes it
    whole = len(CASES["bpe"]["tokens"])
    assert plain(Tokenizer(bpe(extra, pre="llama-bpe")), " qzx") == [whole]
    assert whole not in plain(Tokenizer(bpe(extra, pre="qwen2")), " qzx")


def test_scheme_by_architecture_with_a_notice() -> None:
    for architecture, pre in [*PRE_BY_ARCHITECTURE.items(), ("no-such", "default")]:
        tokenizer = Tokenizer(bpe(pre=None) | {"general.architecture": architecture})
        assert tokenizer.pre == pre
        assert tokenizer.notice is not None and repr(pre) in tokenizer.notice
    assert Tokenizer(bpe(pre="falcon")).notice is None


# -- added tokens


def test_control_tokens_are_matched_on_request_and_user_defined_ones_always() -> None:
    for make in (spm, bpe):
        meta = make({"<|im_start|>": CONTROL, "<tool>": USER_DEFINED, "<gone>": UNUSED})
        tokenizer = Tokenizer(meta)
        start, tool = tokenizer.id_of("<|im_start|>"), tokenizer.id_of("<tool>")
        text = "a<|im_start|>b<tool>c"
        assert parsed(tokenizer, text).count(start) == 1
        assert start not in plain(tokenizer, text)
        assert plain(tokenizer, text).count(tool) == parsed(tokenizer, text).count(tool) == 1
        assert tokenizer.id_of("<gone>") not in parsed(tokenizer, "<gone>")
        # A SentencePiece vocabulary puts a space also after a special token.
        assert tokenizer.decode(plain(tokenizer, text)).replace(b" ", b"") == text.encode()


def test_the_longer_token_wins_even_where_it_begins_later() -> None:
    tokenizer = Tokenizer(bpe({"<ab": USER_DEFINED, "b>cd": USER_DEFINED, "ab": USER_DEFINED}))
    n = len(CASES["bpe"]["tokens"])
    assert plain(tokenizer, "<ab>cd")[-1] == n + 1  # '<', 'a', 'b>cd'
    assert plain(tokenizer, "<ab>c")[0] == n
    assert plain(tokenizer, "abab") == [n + 2, n + 2]


def test_a_space_comes_before_text_that_follows_a_special_token() -> None:
    tokenizer = Tokenizer(spm())
    a = plain(tokenizer, "a")
    assert parsed(tokenizer, "<s>a</s>a") == [1, *a, 2, *a]
    assert tokenizer.encode("a", add_bos=True, special=False) == [1, *a]
    without = Tokenizer(spm(add_space_prefix=False))
    assert plain(without, "a") != a and plain(without, " a") == a


def test_phi3_drops_white_space_after_its_marks() -> None:
    extra = {"<|end|>": CONTROL, "<|endoftext|>": CONTROL}
    phi = Tokenizer(spm(extra) | {"general.name": "Phi-3 mini"})
    other = Tokenizer(spm(extra) | {"general.name": "mini"})
    assert parsed(phi, "<|end|>\n a") == parsed(phi, "<|end|>a") != parsed(other, "<|end|>\n a")
    assert parsed(phi, "<|endoftext|>\n a") == parsed(other, "<|endoftext|>\n a")


def test_begin_and_end_tokens() -> None:
    def ends(meta: dict[str, Any]) -> tuple[int | None, int | None]:
        ids = Tokenizer(meta).encode("a", add_bos=True, special=False)
        body = plain(Tokenizer(meta), "a")
        return (ids[0] if ids[: len(body)] != body else None), (
            ids[-1] if ids[-len(body) :] != body else None
        )

    assert ends(spm()) == (1, None)
    assert ends(spm(add_bos_token=False)) == (None, None)
    assert ends(spm(add_eos_token=True)) == (1, 2)
    assert ends(spm(bos_token_id=2, eos_token_id=1, add_eos_token=np.bool_(True))) == (2, 1)
    assert ends(bpe()) == (None, None)
    assert ends(bpe(pre="llama-bpe", bos_token_id=7)) == (7, None)
    assert ends(bpe(add_bos_token=True, bos_token_id=3)) == (3, None)
    assert Tokenizer(spm()).encode("", add_bos=True, special=False) == [1]
    assert plain(Tokenizer(spm()), "") == []


def test_special_ids() -> None:
    tokenizer = Tokenizer(spm())
    assert (tokenizer.bos, tokenizer.eos, tokenizer.unk, tokenizer.pad) == (1, 2, 0, None)
    assert tokenizer.nl == tokenizer.id_of("<0x0A>")
    tokenizer = Tokenizer(bpe(eos_token_id=5, padding_token_id=6, unknown_token_id=7))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.unk, tokenizer.eot) == (11, 5, 6, 7, None)
    assert tokenizer.nl == tokenizer.id_of("Ċ")
    # What converters write for a token that a model does not have.
    assert Tokenizer(spm(padding_token_id=2**32 - 1)).pad is None


def test_end_of_generation() -> None:
    extra = {"<|im_end|>": NORMAL, "<|endoftext|>": CONTROL, "<|other|>": CONTROL, "<|fim_pad|>": CONTROL}
    tokenizer = Tokenizer(bpe(extra, eos_token_id=5))
    ends = {5} | {tokenizer.id_of(text) for text in ("<|im_end|>", "<|endoftext|>", "<|fim_pad|>")}
    assert {i for i in range(tokenizer.n_vocab) if tokenizer.is_eog(i)} == ends
    assert tokenizer.eot == tokenizer.id_of("<|im_end|>")
    # Known by its text to be control, so it is no text.
    assert tokenizer.is_control(tokenizer.eot) and tokenizer.piece(tokenizer.eot) == b""
    assert Tokenizer(spm(eot_token_id=9)).eot == 9 and Tokenizer(spm(eot_token_id=9)).is_eog(9)


# -- ids to text


def test_pieces() -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁a", "<0x41>", "▁u▁", "gone", "<0xZZ>"]
    types = [UNKNOWN, CONTROL, CONTROL, NORMAL, BYTE, USER_DEFINED, UNUSED, BYTE]
    tokenizer = Tokenizer(llama(tokens, types=types))
    assert [tokenizer.piece(i) for i in range(8)] == [
        b"",
        b"",
        b"",
        b" a",
        b"A",
        "▁u▁".encode(),
        b"",
        b"<0xZZ>",
    ]
    assert [tokenizer.piece(i, special=True) for i in range(3)] == [b"<unk>", b"<s>", b"</s>"]
    for wrong in (-1, 8):
        with pytest.raises(IndexError, match="vocabulary of 8"):
            tokenizer.piece(wrong)
    # A token that is not written in byte characters stands for itself.
    assert Tokenizer(bpe({"\u200d x": NORMAL})).piece(len(CASES["bpe"]["tokens"])) == "\u200d x".encode()


def test_decode_drops_the_space_that_encode_put_before_the_text() -> None:
    tokenizer = Tokenizer(spm())
    for text in ("Hello", " Hello", "  a", "the dog"):
        ids = tokenizer.encode(text, add_bos=True, special=False)
        assert tokenizer.decode(ids) == text.encode()
        assert tokenizer.decode(ids[1:]) == b" " + text.encode()  # a part from the middle keeps its space
        assert tokenizer.decode(ids, special=True) == b"<s> " + text.encode()
    tokenizer = Tokenizer(bpe(add_bos_token=True, bos_token_id=3))
    assert tokenizer.decode(tokenizer.encode(" x", add_bos=True, special=False))[-2:] == b" x"


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_text_survives(text: str) -> None:
    assume_space = b"" if not text else b" "
    for tokenizer, before in ((SPM, assume_space), (BPE, b"")):
        expected = before + text.encode()
        if tokenizer is SPM:
            expected = expected.replace("▁".encode(), b" ")
        assert tokenizer.decode(plain(tokenizer, text)) == expected


SPM = Tokenizer(spm())
BPE = Tokenizer(bpe())


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [b"a", b" ", b"\xff", b"\xe2\x82", b"\xe2", b"\xf0\x9f\xa6", b"\xc3\xa9", b"\x80", b"<s>"]
        )
    )
)
def test_bytes_that_are_not_utf8(parts: list[bytes]) -> None:
    data = b"".join(parts)
    for special in (False, True):
        ids = SPM.encode(data, add_bos=False, special=special)
        if not special and data:
            # A first byte that announces more than follows takes the mark of a space with it.
            assert SPM.decode(ids).replace("▁".encode(), b" ") == b" " + data
        BPE.encode(data, add_bos=False, special=special)


def test_long_texts() -> None:
    """Which are cut another way, so that other threads run meanwhile."""
    text = "a dog and\n two  cats, "
    for meta in (spm(), bpe()):
        tokenizer = Tokenizer.from_metadata(meta)
        ids = plain(tokenizer, text * 9000)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(merging, "_LONG", 1 << 30)
            assert plain(tokenizer, text * 9000) == ids
        assert tokenizer.decode(ids).strip() == (text * 9000).strip().encode()


def test_another_process_has_the_same() -> None:
    for meta in (spm(), bpe()):
        tokenizer = Tokenizer.from_metadata(meta)
        other = pickle.loads(pickle.dumps(tokenizer))
        for text in ("a dog and\n two  cats", "\u00fc\u4e16"):
            assert other.encode(text, add_bos=True) == tokenizer.encode(text, add_bos=True)


def test_bytes_that_are_not_utf8_by_hand() -> None:
    def byte(*values: int) -> list[int | None]:
        return [SPM.id_of(f"<0x{value:02X}>") for value in values]

    space = SPM.id_of("▁")
    # A cut character takes as many bytes as its first one announces, here also the letter after it.
    assert plain(SPM, b"\xe2\x82a") == [space, *byte(0xE2, 0x82, 0x61)]
    assert plain(SPM, b"\xff\x80") == [space, *byte(0xFF, 0x80)]
    assert plain(BPE, b"\xff\xe2\x82") == plain(BPE, "\ufffd\ufffd\ufffd")
    assert plain(BPE, "\ud800") == plain(BPE, "\ufffd\ufffd\ufffd")  # a lone surrogate in a Python string


# -- bad metadata


def without(meta: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in meta.items() if k != f"tokenizer.ggml.{key}"}


BAD = {
    "no model": ({}, "'tokenizer.ggml.model' is missing"),
    "bert": (spm(model="bert"), "'bert' is not supported"),
    "t5": (spm(model="t5"), "'t5' is not supported"),
    "model is a number": (spm(model=3), "'tokenizer.ggml.model' has a value of type int"),
    "no tokens": (without(spm(), "tokens"), "'tokenizer.ggml.tokens' is missing"),
    "tokens are numbers": (spm(tokens=[1, 2]), "not an array of strings"),
    "tokens are a string": (spm(tokens=b"abc"), "not an array of strings"),
    "empty": (spm(tokens=[]), "is empty"),
    "twice the same": (spm(tokens=[b"x", b"y", b"x"]), "tokens 0 and 2 have the same text b'x'"),
    "few scores": (spm(scores=[1.0]), "'tokenizer.ggml.scores' has 1 entries"),
    "scores are strings": (spm(scores=["1"] * 460), "'tokenizer.ggml.scores' is not an array of numbers"),
    "score is NaN": (spm(scores=[0.0] * 459 + [float("nan")]), "score of token 459 is not a number"),
    "few types": (spm(token_type=np.ones(3, np.int32)), "'tokenizer.ggml.token_type' has 3 entries"),
    "types in two dimensions": (
        spm(token_type=np.ones((460, 2))),
        "'tokenizer.ggml.token_type' is not an array",
    ),
    "bos too large": (
        spm(bos_token_id=460),
        "'tokenizer.ggml.bos_token_id' is 460, but there are 460 tokens",
    ),
    "eos negative": (spm(eos_token_id=-1), "'tokenizer.ggml.eos_token_id' is -1"),
    "eot too large": (bpe(eot_token_id=10**9), "'tokenizer.ggml.eot_token_id' is 1000000000"),
    "bos is a string": (spm(bos_token_id="1"), "'tokenizer.ggml.bos_token_id' has a value of type str"),
    "add_bos is a string": (
        spm(add_bos_token="yes"),
        "'tokenizer.ggml.add_bos_token' has a value of type str",
    ),
    "unknown pre": (bpe(pre="no-such"), "pre-tokenizer 'no-such'"),
    "no merges": (without(bpe(), "merges"), "'tokenizer.ggml.merges' is missing"),
    "merge of one": (bpe(merges=[b"a b", b"ab"]), "merge 1 is b'ab'"),
    "merge of three": (bpe(merges=[b"a b c"]), "merge 0 is b'a b c'"),
    "merge of no token": (bpe(merges=[b"a zz"]), "merge 0 .* needs the token 'zz', which does not exist"),
    "merge to no token": (bpe(merges=[b"z z"]), "merge 0 .* needs the token 'zz', which does not exist"),
    "merge is not UTF-8": (bpe(merges=[b"\xff a"]), "merge 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_metadata(name: str) -> None:
    meta, message = BAD[name]
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_metadata(meta)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, PowerInferError)


def test_odd_metadata_that_works() -> None:
    # Empty texts get a name, bytes that are not UTF-8 stay, and a merge that comes again does not count.
    tokenizer = Tokenizer(llama(["<unk>", "<s>", "</s>", "", "a"]))
    assert tokenizer.text(3) == b"[EMPTY_3]"
    meta = bpe()
    meta["tokenizer.ggml.tokens"] = [*meta["tokenizer.ggml.tokens"], b"\xff\xfe", b"\xff\xfd"]
    meta["tokenizer.ggml.token_type"] = [*meta["tokenizer.ggml.token_type"], NORMAL, USER_DEFINED]
    meta["tokenizer.ggml.merges"] = meta["tokenizer.ggml.merges"] + meta["tokenizer.ggml.merges"][:3]
    tokenizer = Tokenizer(meta)
    assert tokenizer.piece(tokenizer.n_vocab - 2) == b"\xff\xfe"
    assert plain(tokenizer, b"a\xff\xfd") == [*plain(tokenizer, "a"), tokenizer.n_vocab - 1]
    for text, ids in CASES["bpe"]["cases"]:
        assert plain(tokenizer, text) == ids


def test_a_byte_without_a_token_is_left_out_and_joins_nothing() -> None:
    tokens = ["a", "b", "ab"]
    meta = bpe(
        tokens=[t.encode() for t in tokens],
        token_type=[1, 1, 1],
        merges=[b"a b"],
        bos_token_id=0,
        eos_token_id=0,
    )
    tokenizer = Tokenizer(meta)
    assert plain(tokenizer, "ab") == [2]
    assert plain(tokenizer, "azb") == [0, 1]
    assert plain(tokenizer, "z") == []
