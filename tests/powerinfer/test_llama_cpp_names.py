"""docs/llama-cpp-python.md says what each name of llama_cpp.Llama does here; this holds it to that."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powerinfer import AsyncLlama, Llama, LogitsProcessorList, PowerInferError, UnsupportedError
from powerinfer.compat.llama_speculative import LlamaPromptLookupDecoding

OpenLlama = Callable[..., Llama]

DOCUMENT = Path(__file__).parents[2] / "docs" / "llama-cpp-python.md"

# The arguments of llama_cpp.Llama() 0.3.36 in their order: a value that is not the default, the default,
# and what the first does.
ARGUMENTS: dict[str, tuple[Any, Any, str]] = {
    "model_path": (None, None, "works"),
    "n_gpu_layers": (-1, 0, "works"),
    "split_mode": (2, 1, "warns"),
    "main_gpu": (1, 0, "warns"),
    "tensor_split": ([0.5, 0.5], None, "warns"),
    "vocab_only": (True, False, "works"),
    "use_mmap": (False, True, "works"),
    "use_mlock": (False, False, "works"),  # True needs a limit on locked memory that a test cannot expect
    "kv_overrides": ({"llama.block_count": 1}, None, "raises"),
    "seed": (7, 4294967295, "works"),
    "n_ctx": (64, 512, "works"),
    "n_batch": (8, 512, "works"),
    "n_ubatch": (8, 512, "works"),
    "n_threads": (1, None, "works"),
    "n_threads_batch": (2, None, "warns"),
    "rope_scaling_type": (2, -1, "raises"),
    "pooling_type": (1, -1, "works"),
    "attention_type": (1, -1, "raises"),
    "rope_freq_base": (5e5, 0.0, "raises"),
    "rope_freq_scale": (0.5, 0.0, "raises"),
    "yarn_ext_factor": (1.0, -1.0, "raises"),
    "yarn_attn_factor": (2.0, 1.0, "raises"),
    "yarn_beta_fast": (1.0, 32.0, "raises"),
    "yarn_beta_slow": (2.0, 1.0, "raises"),
    "yarn_orig_ctx": (64, 0, "raises"),
    "logits_all": (True, False, "works"),
    "embedding": (True, False, "works"),
    "offload_kqv": (False, True, "warns"),
    "flash_attn": (True, False, "works"),
    "op_offload": (True, None, "warns"),
    "swa_full": (True, None, "warns"),
    "no_perf": (True, False, "works"),
    "last_n_tokens_size": (8, 64, "works"),
    "lora_base": ("x.gguf", None, "raises"),
    "lora_scale": (0.5, 1.0, "works"),
    "lora_path": (None, None, "works"),  # test_lora.py
    "numa": (True, False, "warns"),
    "chat_format": ("chatml", None, "works"),
    "chat_handler": (lambda **options: None, None, "works"),
    "draft_model": (LlamaPromptLookupDecoding(), None, "works"),
    "tokenizer": (object(), None, "raises"),
    "type_k": (0, None, "works"),
    "type_v": (0, None, "works"),
    "spm_infill": (True, False, "works"),
    "verbose": (False, True, "works"),
}

# Its public methods and properties.
METHODS = [
    "__call__",
    "__getstate__",
    "__setstate__",
    "close",
    "create_chat_completion",
    "create_chat_completion_openai_v1",
    "create_completion",
    "create_embedding",
    "ctx",
    "detokenize",
    "embed",
    "eval",
    "eval_logits",
    "eval_tokens",
    "from_pretrained",
    "generate",
    "load_state",
    "logits_to_logprobs",
    "longest_token_prefix",
    "model",
    "n_ctx",
    "n_embd",
    "n_vocab",
    "pooling_type",
    "reset",
    "sample",
    "save_state",
    "set_cache",
    "set_seed",
    "token_bos",
    "token_eos",
    "token_nl",
    "tokenize",
    "tokenizer",
]

# What its instances have beside these.
ATTRIBUTES = [
    *("cache", "chat_format", "chat_handler", "context_params", "draft_model", "input_ids", "kv_overrides"),
    *("last_n_tokens_size", "lora_base", "lora_path", "lora_scale", "metadata", "model_params", "model_path"),
    *("n_batch", "n_threads", "n_threads_batch", "n_tokens", "numa", "scores", "spm_infill", "tensor_split"),
    *("tokenizer_", "verbose"),
]


def documented(heading: str) -> dict[str, str]:
    """Name and word of each row of the table below a heading."""
    text = DOCUMENT.read_text("utf-8").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE))


def test_every_argument_is_documented() -> None:
    assert documented("Arguments of Llama()") == {name: word for name, (_, _, word) in ARGUMENTS.items()}


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "model_path"])
def test_arguments(llama: OpenLlama, name: str) -> None:
    value, default, word = ARGUMENTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "n_ctx=512 is more than the 256 tokens")  # of this model
        llama(**{name: default}).close()
        if word == "works":
            llama(**{name: value}).close()
    if word == "warns":
        with pytest.warns(UserWarning, match=name):
            llama(**{name: value}).close()
    if word == "raises":
        with pytest.raises(UnsupportedError, match=name):
            llama(**{name: value})


def test_warnings_name_the_line_that_asked(relu_path: Path) -> None:
    ways: list[Callable[[], Any]] = [
        lambda: Llama(relu_path, n_threads=1, numa=True, verbose=False),
        lambda: Llama.demo(n_ctx=64, numa=True, verbose=False),
        lambda: AsyncLlama.demo(n_ctx=64, numa=True, verbose=False),
        lambda: Llama(relu_path, n_threads=1, n_ctx=257, verbose=False),
    ]
    for way in ways:
        with pytest.warns(UserWarning) as seen:
            way().close()
        assert [one.filename for one in seen] == [__file__]


@pytest.mark.parametrize(
    ("heading", "names"), [("Methods and properties", METHODS), ("Attributes", ATTRIBUTES)]
)
def test_every_name_is_documented(llama: OpenLlama, heading: str, names: list[str]) -> None:
    words = documented(heading)
    assert sorted(words) == sorted(names)
    llm = llama()
    for name, word in words.items():
        assert hasattr(llm, name) == (word == "works"), name


def test_parameters_as_programs_read_them(relu_path: Path) -> None:
    options: dict[str, Any] = {"n_threads": 2, "n_ctx": 96, "n_batch": 8, "verbose": False}
    with Llama(relu_path, vram_budget=0, use_mmap=False, **options) as llm:
        given = llm.context_params
        assert (given.n_ctx, given.n_batch, given.n_ubatch) == (llm.n_ctx(), llm.n_batch, 8) == (96, 8, 8)
        assert given.n_threads == given.n_threads_batch == llm.n_threads == llm.n_threads_batch == 2
        assert given.n_seq_max == 1 and not given.embeddings
        assert (llm.model_params.n_gpu_layers, llm.model_params.use_mmap) == (0, False)
        assert (llm.lora_path, llm.lora_scale) == (None, 1.0)
    with Llama(relu_path, devices="host", vram_budget=1, **options) as llm:
        assert llm.plan is not None and llm.model_params.n_gpu_layers == len(llm.plan.layers)
    with Llama(relu_path, vocab_only=True, verbose=False) as llm:
        assert llm.model_params.vocab_only and llm.model_params.n_gpu_layers == 0


def test_the_example_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    exec(compile(code, str(DOCUMENT), "exec"), {})
    assert len(capsys.readouterr().out) > 20


def test_numbers_of_llama_cpp() -> None:
    import powerinfer

    assert powerinfer.LLAMA_POOLING_TYPE_MEAN == 1 and powerinfer.GGML_TYPE_Q8_0 == 8
    assert not hasattr(powerinfer, "LLAMA_NOTHING")


# -- modules


def test_a_chat_format_of_ones_own(relu_path: Path) -> None:
    from powerinfer.llama_chat_format import ChatFormatterResponse, register_chat_format

    seen: list[Any] = []

    @register_chat_format("of-a-test")
    def mine(messages: Any, **kwargs: Any) -> ChatFormatterResponse:
        seen.append(kwargs)
        stop = "ab" if len(messages) > 1 else None
        return ChatFormatterResponse(prompt="".join(f"[{m['content']}]" for m in messages), stop=stop)

    with Llama(relu_path, n_threads=1, verbose=False, chat_format="of-a-test", seed=1) as llm:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        ids = llm.chat_tokens(messages)
        assert ids == llm.tokenize("[x][y]", special=True)
        answer = llm.create_chat_completion(messages, max_tokens=8, temperature=0.0)
        text = llm("[x][y]", max_tokens=8, temperature=0.0, stop="ab")["choices"][0]["text"]
        assert answer["choices"][0]["message"]["content"] == text
        assert llm.chat_format == "of-a-test" and seen[0]["tools"] is None
        # Stops are those of this prompt alone.
        alone = llm.create_chat_completion(messages[:1], max_tokens=32, temperature=0.0)
        free = llm("[x]", max_tokens=32, temperature=0.0)["choices"][0]["text"]
        assert alone["choices"][0]["message"]["content"] == free

    @register_chat_format("wrong")
    def wrong(messages: Any, **kwargs: Any) -> str:
        return "x"

    llm = Llama(relu_path, n_threads=1, verbose=False, chat_format="wrong")
    with llm, pytest.raises(PowerInferError, match="gave str, not ChatFormatterResponse"):
        llm.create_chat_completion(messages)


def test_a_template_of_ones_own(relu_path: Path) -> None:
    from powerinfer.llama_chat_format import Jinja2ChatFormatter

    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"
    handler = Jinja2ChatFormatter(template, eos_token="ab", bos_token="<s>").to_chat_handler()
    messages = [{"role": "user", "content": "x"}]
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0}
    with Llama(relu_path, n_threads=1, verbose=False, chat_handler=handler) as llm:
        expected = llm("[x]ab", stop="ab", **options)["choices"][0]["text"]
        answer = llm.create_chat_completion(messages, **options)
        assert answer["choices"][0]["message"]["content"] == expected
        handlers: list[Any] = []  # that another thread would find meanwhile

        def look(_: object, logits: Any) -> Any:
            handlers.append(llm.chat_handler)
            return logits

        llm.create_chat_completion(messages, logits_processor=LogitsProcessorList([look]), **options)
        assert handlers and all(one is handler for one in handlers)
        stream = llm.create_chat_completion(messages, stream=True, **options)
        assert llm.chat_handler is handler and llm.chat_format != "Jinja2ChatFormatter"
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in stream) == expected
        llm.chat_handler = Jinja2ChatFormatter("{{ nothing.more }}", "", "").to_chat_handler()
        with pytest.raises(PowerInferError, match="'Jinja2ChatFormatter' failed"):
            llm.create_chat_completion(messages)
        assert llm.chat_handler is not None

    async def several() -> list[Any]:
        async with AsyncLlama(relu_path, n_threads=1, verbose=False, chat_handler=handler) as many:
            made = [many.create_chat_completion(messages, **options) for _ in range(3)]
            return await asyncio.gather(*made)

    answers = asyncio.run(several())
    assert [one["choices"][0]["message"]["content"] for one in answers] == [expected] * 3
    with pytest.raises(UnsupportedError, match="stop_token_ids"):
        Jinja2ChatFormatter("x", "", "", stop_token_ids=[1])


def test_a_handler_by_name(relu_path: Path) -> None:
    from powerinfer.llama_chat_format import register_chat_completion_handler

    @register_chat_completion_handler("by-name")
    def answer(llama: Llama, messages: Any, **options: Any) -> Any:
        return messages, options["max_tokens"]

    with Llama(relu_path, n_threads=1, verbose=False, chat_format="by-name") as llm:
        assert llm.create_chat_completion([], max_tokens=3) == ([], 3)


def test_modules_of_llama_cpp(capfd: pytest.CaptureFixture[str]) -> None:
    import powerinfer
    from powerinfer import llama_types, types
    from powerinfer.llama_tokenizer import LlamaHFTokenizer

    assert llama_types.CreateCompletionResponse is types.Completion
    assert all(hasattr(llama_types, name) for name in llama_types.__all__)
    assert powerinfer.ChatCompletionResponseChoice is types.ChatChoice
    with pytest.raises(AttributeError):
        _ = powerinfer.ChatCompletionOfNobody
    with pytest.raises(ImportError, match="for images"):
        exec("from powerinfer.llama_chat_format import Llava15ChatHandler")
    powerinfer.llama_log_set(print, None)
    assert capfd.readouterr() == ("", "")

    class Hf:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1] * add_special_tokens + [ord(c) for c in text]

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(chr(i) for i in ids if i > 1)

    tokenizer = LlamaHFTokenizer(Hf())
    assert tokenizer.tokenize(b"ab") == [1, 97, 98]
    assert tokenizer.detokenize([98, 99], prev_tokens=[97]) == b"bc"
