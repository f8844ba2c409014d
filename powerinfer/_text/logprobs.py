"""How likely tokens were: from rows of logits to the two shapes in which OpenAI's API tells it.

row = log_softmax(logits)                         # before anything changes the logits
entry = token_logprob(row, token, n_top=5)
chat_logprobs([entry], tokenizer)                 # {"content": [...]}
completion_logprobs([entry], [0], tokenizer)      # {"tokens": [...], "text_offset": [...], ...}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from ..types import ChatLogprobs, CompletionLogprobs

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Row = npt.NDArray[np.float32]

MAX_TOP = 100
NEVER = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


@dataclass(frozen=True)
class TokenLogprob:
    """One token of an answer."""

    token: int
    logprob: float | None
    """Natural logarithm of its probability before bias, penalties, grammar and sampling; None for the first
    token of a prompt."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first, with the same."""


def log_softmax(logits: Any, axis: int = -1) -> Row:
    """Logarithms of the probabilities that logits stand for; a new array."""
    values = np.asarray(logits, np.float32)
    highest = np.max(values, axis=axis, keepdims=True)
    shifted = values - np.where(np.isfinite(highest), highest, 0)
    with np.errstate(divide="ignore"):
        total = np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True, dtype=np.float64))
    result: Row = (shifted - total).astype(np.float32)
    return result


def token_logprob(row: Row, token: int, n_top: int) -> TokenLogprob:
    """What a row of log_softmax says about a token and the n_top likeliest."""
    n_top = min(n_top, row.size)
    best: npt.NDArray[np.intp] = np.empty(0, np.intp)
    if n_top:
        best = np.argpartition(row, row.size - n_top)[row.size - n_top :]
        best = best[np.lexsort((best, -row[best]))]
    top = tuple((int(i), max(float(row[i]), NEVER)) for i in best)
    return TokenLogprob(token, max(float(row[token]), NEVER), top)


def prompt_logprob(row: Row, token: int, n_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The same of a prompt's token as vLLM tells it: by token id, with ranks from 1 on."""
    entry = token_logprob(row, token, n_top)
    ranks = {likely: (i, logprob) for i, (likely, logprob) in enumerate(entry.top, 1)}
    ranks.setdefault(token, (1 + int(np.count_nonzero(row > row[token])), entry.logprob or 0.0))
    return {
        str(likely): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": tokenizer.piece(likely, special=True).decode("utf-8", "replace"),
        }
        for likely, (rank, logprob) in ranks.items()
    }


def check_n_top(name: str, value: Any) -> int:
    """How many likely tokens to tell. Raises ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOP:
        raise ArgumentError(f"{name} is {value!r}: it must be a number from 0 to {MAX_TOP}")
    return value


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> ChatLogprobs:
    """In the shape of chat completions. A token that is no whole character is told by its `bytes`."""

    def describe(token: int, logprob: float | None) -> Any:
        piece = tokenizer.piece(token, special=True)
        return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}

    content = [
        {**describe(e.token, e.logprob), "top_logprobs": [describe(*pair) for pair in e.top]} for e in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: Sequence[TokenLogprob], offsets: Sequence[int], tokenizer: Tokenizer
) -> CompletionLogprobs:
    """In the shape of text completions.

    offsets: where each token's text begins, in characters from the beginning of the prompt. Of two tokens
    with one text the likelier stands in `top_logprobs`.
    """

    def text(token: int) -> str:
        return tokenizer.piece(token, special=True).decode("utf-8", "replace")

    tops: list[dict[str, float] | None] = []
    for entry in entries:
        top: dict[str, float] = {}
        for token, logprob in entry.top:
            top.setdefault(text(token), logprob)
        if entry.logprob is not None and entry.top:
            top.setdefault(text(entry.token), entry.logprob)
        tops.append(None if entry.logprob is None else top)
    return {
        "tokens": [text(entry.token) for entry in entries],
        "text_offset": list(offsets),
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops,
    }
