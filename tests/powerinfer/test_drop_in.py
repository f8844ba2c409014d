"""What people do with llama-cpp-python, with the import changed: one test for each kind of program."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import powerinfer
from powerinfer import (
    ArgumentError,
    ClosedError,
    Llama,
    LlamaDiskCache,
    LlamaGrammar,
    LlamaRAMCache,
    LlamaTokenizer,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteriaList,
)
from powerinfer._engine.file import find_model
from powerinfer.compat.llama_speculative import LlamaPromptLookupDecoding

DEMO = str(find_model("demo"))
CHAT = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "Tell me a story."},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[Llama]:
    with Llama(model_path=DEMO, n_ctx=512, n_threads=2, seed=1337, verbose=False, embedding=True) as made:
        yield made


def test_ask_and_answer(llm: Llama) -> None:
    output = llm("Q: Name the planets in the solar system? A: ", max_tokens=32, stop=["Q:", "\n"], echo=True)
    assert output["object"] == "text_completion"
    assert output["choices"][0]["text"].startswith("Q: Name the planets in the solar system? A: ")
    usage = output["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_stream_of_text(llm: Llama) -> None:
    output: Any = llm.create_completion("Once upon a time", max_tokens=12, stream=True, temperature=0)
    text = "".join(chunk["choices"][0]["text"] for chunk in output)
    assert text == llm("Once upon a time", max_tokens=12, temperature=0)["choices"][0]["text"]


def test_chat(llm: Llama) -> None:
    answer = llm.create_chat_completion(messages=CHAT, max_tokens=24, temperature=0)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    parts: Any = llm.create_chat_completion(messages=CHAT, max_tokens=24, temperature=0, stream=True)
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == answer["choices"][0]["message"]["content"]


def test_default_temperatures() -> None:
    """0.2 for chats, 0.8 for texts, as there; here on the way to the sampler."""
    seen = []

    class Watched(Llama):
        def _generation(self, prompt: Any, options: Any, **hooks: Any) -> Any:
            seen.append(options.temperature)
            return super()._generation(prompt, options, **hooks)

    llm = Watched(DEMO, n_threads=2, verbose=False)
    llm.create_chat_completion(CHAT, max_tokens=1)
    llm.create_chat_completion(CHAT, max_tokens=1, temp=0.5)
    llm("x", max_tokens=1)
    assert seen == [0.2, 0.5, 0.8]


def test_json_mode(llm: Llama) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"team_name": {"type": "string", "maxLength": 12}},
        "required": ["team_name"],
    }
    answer = llm.create_chat_completion(
        messages=[{"role": "user", "content": "Who won the world series in 2020"}],
        response_format={"type": "json_object", "schema": {**schema, "additionalProperties": False}},
        temperature=0.7,
    )
    assert set(json.loads(answer["choices"][0]["message"]["content"] or "")) == {"team_name"}


def test_function_calling(llm: Llama) -> None:
    pytest.importorskip("llguidance")
    parameters = {
        "title": "UserDetail",
        "type": "object",
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 10},
            "age": {"title": "Age", "type": "integer", "maximum": 200, "minimum": 0},
        },
        "required": ["name", "age"],
    }
    tools = [{"type": "function", "function": {"name": "UserDetail", "parameters": parameters}}]
    answer = llm.create_chat_completion(
        messages=[{"role": "user", "content": "Extract Jason is 25 years old"}],
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "UserDetail"}},
    )
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (
        call["function"]["name"] == "UserDetail"
        and 0 <= json.loads(call["function"]["arguments"])["age"] <= 200
    )


def test_grammar(llm: Llama) -> None:
    pytest.importorskip("llguidance")
    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    for _ in range(3):
        assert llm("Is it? ", grammar=grammar, max_tokens=8)["choices"][0]["text"] in ("yes", "no")
    array = LlamaGrammar.from_json_schema(
        json.dumps({"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 3})
    )
    assert isinstance(json.loads(llm("List: ", grammar=array, max_tokens=64)["choices"][0]["text"]), list)
    from powerinfer.llama_grammar import LlamaGrammar as Same

    assert Same is LlamaGrammar


def test_speculative_decoding(llm: Llama) -> None:
    guessing = Llama(
        model_path=DEMO,
        n_ctx=512,
        n_threads=2,
        verbose=False,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=10),
    )
    prompt = "The cat sat. The cat sat. The cat"
    assert (
        guessing(prompt, max_tokens=24, temperature=0)["choices"][0]["text"]
        == llm(prompt, max_tokens=24, temperature=0)["choices"][0]["text"]
    )


def test_embeddings(llm: Llama) -> None:
    result = llm.create_embedding(["Hello, world!", "Goodbye, world!"])
    assert [len(np.shape(d["embedding"])) for d in result["data"]] == [2, 2]
    pooled = Llama(
        DEMO, embedding=True, pooling_type=powerinfer.LLAMA_POOLING_TYPE_MEAN, n_threads=2, verbose=False
    )
    vectors = np.array([d["embedding"] for d in pooled.create_embedding(["a cat", "a cat", "a sum"])["data"]])
    assert vectors.shape == (3, pooled.n_embd()) and np.array_equal(vectors[0], vectors[1])
    assert len(pooled.embed("Hello", normalize=True)) == pooled.n_embd()


def test_low_level_loop(llm: Llama) -> None:
    llm.reset()
    tokens = llm.tokenize(b"Once upon a time")
    llm.eval(tokens[:-1])
    llm.eval(tokens[-1:])  # as the create_ methods do, which matters where two tokens are equally likely
    text = b""
    for _ in range(8):
        token = llm.sample(top_k=40, top_p=0.95, temp=0.0, repeat_penalty=1.0)
        if token == llm.token_eos():
            break
        text += llm.detokenize([token], prev_tokens=tokens)
        tokens.append(token)
        llm.eval([token])
    assert (
        text.decode()
        == llm("Once upon a time", max_tokens=8, temperature=0, repeat_penalty=1.0)["choices"][0]["text"]
    )


def test_generate_with_hooks(llm: Llama) -> None:
    eos = llm.token_eos()

    def no_end(input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        scores[eos] = -np.inf
        return scores

    n_prompt = len(prompt := llm.tokenize(b"The sum of"))
    tokens = list(
        llm.generate(
            prompt,
            top_k=40,
            top_p=0.95,
            temp=1.0,
            repeat_penalty=1.1,
            logits_processor=LogitsProcessorList([no_end]),
            stopping_criteria=StoppingCriteriaList([lambda ids, logits: len(ids) >= n_prompt + 6]),
        )
    )
    assert len(tokens) == 6 and eos not in tokens


def test_tokens_sent_to_a_generator(llm: Llama) -> None:
    prompt, more = llm.tokenize(b"Once upon a"), llm.tokenize(b" big dog", add_bos=False)
    stream = llm.generate(prompt, temp=0.0, repeat_penalty=1.3)
    first = next(stream)
    second = stream.send(more)
    again = llm.generate([*prompt, first, *more], temp=0.0, repeat_penalty=1.3)
    assert next(again) == second
    with pytest.raises(ArgumentError):
        again.send([10**6])


def test_min_tokens(llm: Llama) -> None:
    eos = llm.token_eos()
    options: dict[str, Any] = {"logit_bias": {eos: 50.0}, "temperature": 0.0, "max_tokens": 9}
    for n in (0, 5):
        processors = LogitsProcessorList([MinTokensLogitsProcessor(n, eos)])
        assert llm("Once", logits_processor=processors, **options)["usage"]["completion_tokens"] == n


def test_logprobs_and_bias(llm: Llama) -> None:
    token = llm.tokenize(b" dog", add_bos=False)[-1]
    result = llm("I have a", max_tokens=1, logprobs=4, logit_bias={str(token): 100.0}, temperature=0)[
        "choices"
    ][0]  # type: ignore[dict-item]
    assert result["logprobs"] is not None
    assert result["logprobs"]["tokens"] == [llm.detokenize([token]).decode()] == [result["text"]]
    rows = Llama.logits_to_logprobs(llm.scores[-1:])
    assert np.exp(rows, dtype=np.float64).sum() == pytest.approx(1.0, abs=1e-5)


def test_state_and_cache(llm: Llama, tmp_path: Path) -> None:
    llm.reset()
    llm.eval(llm.tokenize(b"Once upon a"))
    saved = llm.save_state()
    first = llm.sample(temp=0.0)
    llm.reset()
    assert llm.n_tokens == 0 and len(llm.eval_tokens) == 0
    llm.load_state(saved)
    assert llm.sample(temp=0.0) == first
    assert list(llm.eval_tokens) == saved.input_ids.tolist() and len(llm.eval_logits) == 1
    llm.reset()  # what was fed ends with a token that the predictor had a part in
    plain = llm("Once upon a time there", max_tokens=6, temperature=0)["choices"][0]["text"]
    for cache in (LlamaRAMCache(capacity_bytes=2 << 26), LlamaDiskCache(str(tmp_path))):
        llm.set_cache(cache)
        for _ in range(2):
            llm.reset()
            assert llm("Once upon a time there", max_tokens=6, temperature=0)["choices"][0]["text"] == plain
        assert llm.timings.n_reused > 3 and cache.cache_size > 0
        llm.set_cache(None)


def test_pickle(llm: Llama) -> None:
    copy = pickle.loads(pickle.dumps(llm))
    assert copy.n_ctx() == llm.n_ctx() and copy.n_tokens == 0
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    assert copy("The", **options)["choices"][0]["text"] == llm("The", **options)["choices"][0]["text"]
    assert copy.embed("x") == llm.embed("x")  # the arguments came too
    copy.close()
    with pytest.raises(ClosedError):
        pickle.dumps(copy)


def test_tokenizer(llm: Llama) -> None:
    tokenizer = llm.tokenizer()
    assert isinstance(tokenizer, LlamaTokenizer)
    ids = tokenizer.encode("Hello there")
    assert ids == llm.tokenize(b"Hello there", special=True) and tokenizer.decode(ids) == "Hello there"
    assert tokenizer.detokenize(ids[2:], prev_tokens=ids[:2]) == llm.detokenize(ids[2:], prev_tokens=ids[:2])
    assert LlamaTokenizer(llm).encode("x") == LlamaTokenizer.from_ggml_file(DEMO).encode("x")
    with pytest.raises(TypeError, match="str has no tokenizer"):
        LlamaTokenizer("x")
    with pytest.raises(ArgumentError):
        tokenizer.decode([10**6])


def test_chat_handler() -> None:
    seen: dict[str, Any] = {}

    def handler(*, llama: Llama, messages: list[Any], **options: Any) -> Any:
        seen.update(options)
        return llama.create_completion(messages[-1]["content"], max_tokens=2, stream=options["stream"])

    llm = Llama(DEMO, chat_handler=handler, n_threads=2, verbose=False)
    assert llm.create_chat_completion(CHAT, temperature=0.5, max_tokens=3)["object"] == "text_completion"  # type: ignore[comparison-overlap]
    assert (
        seen["temperature"] == 0.5
        and seen["max_tokens"] == 3
        and seen["stop"] == []
        and seen["tools"] is None
    )


def test_results_of_the_openai_package(llm: Llama) -> None:
    pytest.importorskip("openai")
    answer = llm.create_chat_completion_openai_v1(messages=CHAT, max_tokens=4, logprobs=True, top_logprobs=1)
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
    chunks = llm.create_chat_completion_openai_v1(messages=CHAT, max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_prefixes() -> None:
    assert Llama.longest_token_prefix([1, 2, 3], [1, 2, 4]) == 2 == Llama.longest_token_prefix([1, 2], [1, 2])
    assert Llama.longest_token_prefix([], [1]) == 0
