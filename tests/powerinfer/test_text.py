"""Streams of text: however tokens cut it, the parts joined are the text, cut before the stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import CONTROL, USER_DEFINED, bpe, llama, spm

from powerinfer._text.text import TextStream
from powerinfer._text.tokenizer import Tokenizer

# One token per byte, so that text can be cut anywhere.
BYTES = Tokenizer(
    llama(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))], types=[2, 3, 3] + [6] * 256)
)


def stream(data: bytes, stop: list[str]) -> tuple[list[str], TextStream]:
    text = TextStream(BYTES, stop)
    return [*(text.push(3 + b) for b in data), text.finish()], text


def first_completed(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The plain version: lengthen the text by one character until it ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(
    st.text(alphabet="abé中🚀\n", max_size=40),
    st.lists(st.text(alphabet="abé中🚀\n", min_size=1, max_size=4), max_size=3),
)
def test_a_stop_string_ends_the_text_wherever_it_was_cut(text: str, stops: list[str]) -> None:
    parts, result = stream(text.encode(), stops)
    expected, stopped = first_completed(text, stops)
    assert "".join(parts) == expected
    assert result.stopped == stopped
    assert result.n_emitted == len(expected)


@pytest.mark.parametrize("seed", range(30))
def test_whole_tokens_give_the_same_as_bytes(seed: int) -> None:
    """A token may hold the whole stop string and text after it."""
    rng = random.Random(seed)
    tokenizer = Tokenizer(bpe())
    text = "".join(rng.choices(["the dog", " a row is", "\n", "rest", "é", "中", "USER", ":", "🚀"], k=30))
    stops = rng.sample(["ow", "USER:", "\nUS", "st\n", "é中", "the dog a"], 3)
    by_token = TextStream(tokenizer, stops)
    parts = [by_token.push(i) for i in tokenizer.encode(text, add_bos=False, special=False)] + [
        by_token.finish()
    ]
    expected, stopped = first_completed(text, stops)
    assert ("".join(parts), by_token.stopped) == (expected, stopped)


def test_characters_are_given_out_whole() -> None:
    parts, _ = stream("é中🚀".encode(), [])
    assert parts == ["", "é", "", "", "中", "", "", "", "🚀", ""]


def test_bytes_that_are_no_text_become_replacement_characters_once_that_is_certain() -> None:
    assert stream(b"a\xffb", [])[0] == ["a", "\ufffd", "b", ""]
    assert stream(b"\xe4\xb8a", [])[0] == ["", "", "\ufffda", ""]
    assert stream(b"\xf0\x9f", [])[0] == ["", "", "\ufffd"]
    assert "".join(stream(b"\xed\xa0\x80", [])[0]) == "\ufffd" * 3  # a surrogate


def test_text_is_held_back_only_while_it_may_be_a_stop_string() -> None:
    assert stream(b"ab#a##c###d", ["###"])[0] == ["a", "b", "", "#a", "", "", "##c", "", "", "", "", ""]
    assert stream(b"ab##", ["###"])[0] == ["a", "b", "", "", "##"]
    # The end of a false beginning can be the beginning of a true one.
    assert "".join(stream(b"xaabaac", ["aabaac"])[0]) == "x"
    assert "".join(stream(b"aabaabaac", ["aabaac"])[0]) == "aab"


def test_of_two_stop_strings_in_one_token_the_first_completed_counts() -> None:
    tokenizer = Tokenizer(bpe({"a##b##": USER_DEFINED}))
    for stop, shown, stopped in (
        (["b", "##"], "a", "##"),
        (["##", "b"], "a", "##"),
        (["a##b", "#"], "a", "#"),
        (["#b", "##b"], "a", "##b"),
        (["x", "##"], "a", "##"),
    ):
        text = TextStream(tokenizer, stop)
        assert text.push(tokenizer.n_vocab - 1) + text.finish() == shown
        assert text.stopped == stopped


def test_nothing_comes_after_the_end() -> None:
    text = TextStream(BYTES, ["b"])
    assert [text.push(3 + b) for b in b"abc"] == ["a", "", ""]
    assert text.finish() == "" and text.push(3 + 97) == "" and text.stopped == "b"
    text = TextStream(BYTES)
    assert text.push(3 + 97) == "a" and text.finish() == "" and text.push(3 + 97) == ""


def test_positions_count_held_back_text() -> None:
    text = TextStream(BYTES, ["##"])
    positions = []
    for b in "é#a##".encode():
        positions.append(text.position)
        text.push(3 + b)
    assert positions == [0, 0, 1, 2, 3, 4]
    assert text.position == text.n_emitted == 3


def test_control_tokens_are_no_text() -> None:
    tokenizer = Tokenizer(spm({"<|mark|>": CONTROL}))
    ids = tokenizer.encode("a<|mark|>b", add_bos=False, special=True)
    shown, hidden = TextStream(tokenizer, special=True), TextStream(tokenizer, ["<|mark|>"])
    assert "".join(map(shown.push, ids)) + shown.finish() == " a<|mark|> b"
    assert "".join(map(hidden.push, ids)) + hidden.finish() == " a b"
    assert hidden.stopped is None


def test_the_space_before_a_text_is_dropped_where_nothing_comes_before_it() -> None:
    tokenizer = Tokenizer(spm())
    ids = tokenizer.encode("a dog", add_bos=False, special=False)
    prompt = tokenizer.encode("The", add_bos=True, special=False)
    for before, expected in (([], " a dog"), ([1], "a dog"), (prompt, " a dog")):
        text = TextStream(tokenizer, prompt=before)
        assert "".join(map(text.push, ids)) + text.finish() == expected


@pytest.mark.parametrize("stop", [[""], ["a", ""], [b"a"], [1]])
def test_bad_stop_strings(stop: list[object]) -> None:
    with pytest.raises(ValueError, match="stop strings must be"):
        TextStream(BYTES, stop)  # type: ignore[arg-type]
