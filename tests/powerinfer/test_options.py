"""The options that are spelled out for editors are those that the methods take. What type checkers make of
them is in tests/typed_calls.py, which `mypy` reads."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from powerinfer import AsyncLlama, Llama
from powerinfer._engine.sampling import SAMPLING_NAMES
from powerinfer._llama import options
from powerinfer._llama.completions import _HOOKS, _LENGTH
from powerinfer.compat.arguments import LATER_GENERATING, LATER_INIT, NO_EFFECT_INIT, ROPE_INIT


def names(kind: Any) -> set[str]:
    return set(kind.__annotations__)


def own(function: Any) -> set[str]:
    """Parameters that a function itself has."""
    code = inspect.unwrap(function).__code__
    return set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - {"self", "cls"}


def test_names() -> None:
    assert names(options.SamplingOptions) == SAMPLING_NAMES | {"temp"} | set(LATER_GENERATING)
    assert names(options.GenerationOptions) == names(options.SamplingOptions) | {*_HOOKS, *_LENGTH}
    assert names(options.OtherLlamaOptions) == {*LATER_INIT, *ROPE_INIT, *NO_EFFECT_INIT}
    init = own(Llama.__init__)
    assert names(options.LlamaOptions) == (init | names(options.OtherLlamaOptions)) - {"model_path"}
    beside = {"prompt", "suffix", "max_tokens", "stream"}
    mine = own(Llama.create_completion) - beside
    assert names(options.CompletionOptions) == mine | names(options.GenerationOptions)
    mine = own(Llama.create_chat_completion) - {"messages", "stream"}
    assert names(options.ChatOptions) == mine | names(options.GenerationOptions)
    single = {"n_ctx", "n_pool", "n_seq", "logits_all", "vocab_only", "embedding"}
    assert names(options.AsyncLlamaOptions) == names(options.LlamaOptions) - single


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (Llama.create_completion, options.CompletionOptions),
        (Llama.__call__, options.CompletionOptions),
        (Llama.create_chat_completion, options.ChatOptions),
        (Llama.generate, options.SamplingOptions),
        (Llama.sample, options.SamplingOptions),
        (Llama, options.LlamaOptions),
        (Llama.demo, options.LlamaOptions),
        (Llama.from_pretrained, options.LlamaOptions),
        (AsyncLlama, options.AsyncLlamaOptions),
        (AsyncLlama.create_completion, options.AsyncCompletionOptions),
        (AsyncLlama.create_chat_completion, options.AsyncChatOptions),
    ],
)
def test_help_shows_them(function: Any, wanted: Any) -> None:
    shown = inspect.signature(function).parameters
    assert names(wanted) <= set(shown)
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    text = str(inspect.signature(function))
    assert "..." in text and "Ellipsis" not in text and ": '" not in text
