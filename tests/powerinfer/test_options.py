"""The options that are spelled out for editors are those that the methods take. What type checkers make of
them is in tests/typed_calls.py, which `mypy` reads."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from powerinfer import AsyncLlama, Llama, types
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


def holds(value: Any, kind: Any) -> None:
    """Keys that a type checker lets be read unasked are there, and all that are there are named."""
    assert kind.__required_keys__ <= value.keys() <= kind.__required_keys__ | kind.__optional_keys__


def test_results_have_the_keys_of_their_types() -> None:
    messages = [{"role": "user", "content": "Hello"}]
    told = {"max_tokens": 3, "temperature": 0, "prompt_logprobs": 1}
    with Llama.demo(n_ctx=256, verbose=False) as llm:
        whole = llm.create_completion("The", **told)
        holds(whole, types.Completion)
        holds(whole["choices"][0], types.CompletionChoice)
        end = llm.create_completion("The", max_tokens=3, temperature=0, stop=whole["choices"][0]["text"][-1])
        assert "stop_reason" in end["choices"][0]
        holds(end["choices"][0], types.CompletionChoice)
        chat = llm.create_chat_completion(messages, **told)
        holds(chat, types.ChatCompletion)
        holds(chat["choices"][0], types.ChatChoice)
        holds(chat["choices"][0]["message"], types.AssistantMessage)
        for chunk in llm.create_chat_completion(messages, max_tokens=3, stream=True):
            holds(chunk, types.ChatCompletionChunk)
            holds(chunk["choices"][0], types.ChatChunkChoice)
    assert {"role", "content"} == types.AssistantMessage.__required_keys__
