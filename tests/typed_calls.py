"""Calls as users write them, read by mypy alone: those that are wrong must be errors, or mypy complains of an
ignore that ignores nothing."""

from __future__ import annotations

from powerinfer import AsyncLlama, Llama


def completion(llm: Llama) -> str:
    answer = llm("a", max_tokens=5, temperature=0.7, top_p=0.9, seed=1, logit_bias={3: 1.0}, stop=["x"])
    llm.create_completion("a", stream=True, dry_multiplier=0.8, ignore_eos=True, echo=True, logprobs=2)
    llm("a", temprature=0.7)  # type: ignore[call-overload]
    llm("a", temperature="hot")  # type: ignore[call-overload]
    llm("a", stop=5)  # type: ignore[call-overload]
    llm.create_completion("a", top_pp=1.0)  # type: ignore[call-overload]
    return answer["choices"][0]["text"]


def chat(llm: Llama) -> str | None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = llm.create_chat_completion(messages, temperature=0.2, tools=[], top_k=3, n=2)
    for chunk in llm.create_chat_completion(messages, stream=True, response_format={"type": "json_object"}):
        print(chunk["choices"][0]["delta"].get("content"))
    llm.create_chat_completion(messages, tempreature=1)  # type: ignore[call-overload]
    llm.create_chat_completion(messages, seed="x")  # type: ignore[call-overload]
    return answer["choices"][0]["message"]["content"]


def tokens(llm: Llama) -> int:
    next(llm.generate([3], temp=0.0, repeat_penalty=1.1, mirostat_mode=2))
    next(llm.generate([3], repeat_penlty=1.1))  # type: ignore[call-arg]
    llm.sample(top_k="x")  # type: ignore[arg-type]
    return llm.sample(top_k=3, min_p=0.1)


def opened() -> None:
    Llama("model.gguf", n_ctx="auto", vram_budget=[8, 6], flash_attn=True, numa=False)
    Llama("model.gguf", n_gpu_layer=3)  # type: ignore[call-arg]
    Llama.demo(n_threads=2, context_shift=True)
    Llama.demo(n_thread=2)  # type: ignore[call-arg]
    Llama.from_pretrained("a/b", "*Q4_0.gguf", verbose=False, n_batch=64)
    Llama.from_pretrained("a/b", verbosity=1)  # type: ignore[call-arg]
    AsyncLlama("model.gguf", n_parallel=2, type_k="q8_0", vram_budget=8)
    AsyncLlama("model.gguf", n_paralel=2)  # type: ignore[call-arg]


async def many(llm: AsyncLlama) -> None:
    await llm.create_completion(["a", "b"], max_tokens=3, timeout_s=1.0, top_p=0.5)
    await llm.create_chat_completion([{"role": "user", "content": "a"}], max_tokens=3, min_p=0.1)
    await llm.create_completion("a", max_token=3)  # type: ignore[call-overload]
    await llm.create_chat_completion([], temperatur=1)  # type: ignore[call-overload]
