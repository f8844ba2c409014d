"""Drafts by a head of the model's file (NextN, MTP) and by a small model: they change nothing but the number
of steps."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, Llama, UnsupportedError
from powerinfer.async_llama import AsyncLlama
from tests import models, next_head

PROMPT = [int(t) for t in np.random.default_rng(2).integers(3, 291, 40)]
OTHER = [int(t) for t in np.random.default_rng(3).integers(3, 291, 30)]


def opened(path: Path, draft: Any = None, **options: Any) -> Llama:
    shape: dict[str, Any] = {"n_ctx": 128, "n_threads": 1, "seed": 1, "verbose": False, "vram_budget": 0}
    return Llama(path, **shape | {"draft_model": draft} | options)


def answer(llm: Llama, n: int = 40, prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    return list(islice(llm.generate(prompt, **{"temp": 0.0} | options), n))


def steps(llm: Llama) -> int:
    return llm._ctx.engine.totals["steps"]


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that is right of seven in ten tokens."""
    return next_head.write_planted(tmp_path_factory.mktemp("m") / "m.gguf", "glm4moe", 0.7)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with recurrent layers."""
    return next_head.write_planted(tmp_path_factory.mktemp("m") / "m.gguf", "qwen35", 0.7)


@pytest.mark.parametrize("name", next_head.NAMES)
def test_a_head_that_is_right(name: str, tmp_path: Path) -> None:
    path = next_head.write_planted(tmp_path / "m.gguf", name)
    plain, llm = opened(path), opened(path, "mtp", n_draft=3)
    assert answer(llm) == answer(plain)
    n_drafted, n_right = llm.drafted
    assert n_drafted == n_right >= 28 and steps(llm) <= 12 < steps(plain)


@pytest.mark.parametrize("name", ["deepseek2-v3", "qwen35"])
def test_a_head_that_knows_nothing(name: str, tmp_path: Path) -> None:
    """Random weights, of a model whose answer follows from all that stands before."""
    spec = models.SPECS[name]
    meta, tensors = next_head.with_head(spec)
    path = models.write(tmp_path / "m.gguf", meta | models.tokenizer(spec), tensors)
    plain, llm = opened(path), opened(path, "mtp", n_draft=4)
    for options in ({"temp": 0.0}, {"temp": 1.0, "top_k": 0, "seed": 5}):
        assert answer(llm, **options) == answer(plain, **options)
    n_drafted, n_right = llm.drafted
    assert n_drafted > 60 and n_right < n_drafted / 4


@pytest.mark.parametrize("options", [{"temp": 0.0}, {"temp": 0.8, "seed": 4}], ids=["greedy", "drawn"])
def test_a_head_that_is_right_at_times(glm: Path, qwen: Path, options: dict[str, Any]) -> None:
    for path in (glm, qwen):
        plain, llm = opened(path), opened(path, "mtp")
        assert answer(llm, **options) == answer(plain, **options)
        n_drafted, n_right = llm.drafted
        assert 0.2 < n_right / n_drafted < 0.95
        # It goes on where it was: a longer prompt, another one, and the first again.
        for prompt in (PROMPT + answer(plain, 9) + [7, 8], OTHER, PROMPT):
            assert answer(llm, 12, prompt, **options) == answer(plain, 12, prompt, **options)
        assert llm.drafted[1] > n_right


def test_other_uses_of_the_context(glm: Path, qwen: Path) -> None:
    """Tokens that are sent, streams that are left, states that are loaded, and a context that is full."""
    for path in (glm, qwen):
        plain, llm = opened(path, n_ctx=64), opened(path, "mtp", n_ctx=64)
        for one in (plain, llm):
            one.reset()
        taken = []
        for one in (plain, llm):
            stream = one.generate(PROMPT[:20], temp=0.0)
            given = [next(stream) for _ in range(5)]
            given.append(stream.send([9, 10, 11]))  # type: ignore[attr-defined]
            given += [next(stream) for _ in range(4)]
            stream.close()  # type: ignore[attr-defined]
            state = one.save_state()
            given += answer(one, 3, OTHER)
            one.load_state(state)
            given += list(islice(one.generate([*one.input_ids.tolist(), 12], temp=0.0, reset=True), 6))
            one.eval([5, 6])
            given.append(one.sample(temp=0.0))
            taken.append(given)
        assert taken[0] == taken[1]
        texts = [one(PROMPT, max_tokens=80, temperature=0.0)["choices"][0] for one in (plain, llm)]
        assert texts[0] == texts[1] and texts[0]["finish_reason"] == "length"  # the context is full
    plain, llm = (opened(glm, d, n_ctx=64, context_shift=True) for d in (None, "mtp"))
    assert answer(llm, 120) == answer(plain, 120)
    assert llm.drafted[1] > 60


@pytest.mark.parametrize("family", ["llama-relu", "qwen35", "gemma3"])
def test_a_small_model(family: str, tmp_path: Path) -> None:
    """One that is the model itself is right, whether it can forget its guesses or not."""
    spec = models.SPECS[family]
    path = models.write(
        tmp_path / "m.gguf",
        models.metadata(spec) | models.tokenizer(spec),
        models.file_tensors(spec, models.draw(spec)),
    )
    plain, llm = opened(path), opened(path, path, n_draft=5)
    for prompt in (PROMPT, OTHER, [*PROMPT, 5]):
        assert answer(llm, 30, prompt) == answer(plain, 30, prompt)
    n_drafted, n_right = llm.drafted
    assert n_drafted * 0.9 < n_right > 60 and steps(llm) < 40  # some are as good as equally likely
    for options in ({"temp": 1.0, "top_k": 0, "seed": 5},):  # where it is wrong
        assert answer(llm, 30, **options) == answer(plain, 30, **options)
    assert llm.drafted[1] < llm.drafted[0]


def test_several_sequences_at_once(glm: Path, qwen: Path) -> None:
    prompts = [PROMPT, [*PROMPT, 4, 5], OTHER, OTHER[:20] + PROMPT]
    how: dict[str, Any] = {"max_tokens": 25, "temperature": 0.0}

    async def ask(path: Path, draft: str) -> tuple[list[str], tuple[int, int]]:
        options: dict[str, Any] = {"n_threads": 1, "verbose": False, "vram_budget": 0, "n_draft": 2}
        async with AsyncLlama(path, n_parallel=3, n_ctx=128, draft_model=draft, **options) as llm:
            answers = await asyncio.gather(*(llm.create_completion(p, **how) for p in prompts))
            return [one["choices"][0]["text"] for one in answers], llm.llama.drafted

    for path, draft in ((glm, "mtp"), (qwen, "mtp"), (qwen, str(qwen))):
        texts, (n_drafted, n_right) = asyncio.run(ask(path, draft))
        plain = opened(path)
        assert texts == [plain(p, **how)["choices"][0]["text"] for p in prompts]
        assert n_right > 40 and (n_right < n_drafted) == (draft == "mtp")


def test_what_cannot_be(glm: Path, tmp_path: Path) -> None:
    plain = models.write_dense(tmp_path / "p.gguf", models.SPECS["qwen2"])
    with pytest.raises(UnsupportedError, match="no layer that guesses at further tokens"):
        opened(plain, "mtp")
    with pytest.raises(ArgumentError, match=r"cannot draft for m\.gguf: token"):
        opened(glm, plain)
    for n in (0, 16, True, 2.5):
        with pytest.raises(ArgumentError, match="n_draft"):
            opened(glm, "mtp", n_draft=n)
    llm = opened(plain)
    llm.draft_model = "mtp"
    with pytest.raises(ArgumentError, match="opened with"):
        answer(llm, 1)


def test_on_a_device(glm: Path, qwen: Path) -> None:
    """The model and its head lie on it."""
    for path in (glm, qwen):
        options: dict[str, Any] = {"devices": "host", "vram_budget": 0.25}
        plain, llm = opened(path), opened(path, "mtp", **options)
        assert llm.plan is not None and llm.plan.uses_device
        assert llm._drafter is not None and llm._drafter.session.info.n_device_bytes
        assert answer(llm) == answer(plain)
        n_drafted, n_right = llm.drafted
        assert 0.2 < n_right / n_drafted < 0.95
