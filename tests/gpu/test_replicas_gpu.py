"""Replicas on two GPUs: each computes with its own, at the same time, what one alone does. Run only when
asked for.

    pytest tests/gpu/test_replicas_gpu.py
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import AsyncLlama
from powerinfer._engine.replicas import Replicas
from tests import models
from tests.native.hybrid import has_second_gpu


def test_two_replicas_answer_as_one(tmp_path: Path) -> None:
    if not has_second_gpu():
        pytest.skip("there is one GPU")
    # Large enough for a plan to expect more of a GPU than of the CPU.
    large = {"n_layer": 6, "n_embd": 512, "n_head": 8, "n_head_kv": 8, "n_ff": 2048, "predictor": ()}
    path = models.write_dense(tmp_path / "m.gguf", replace(models.SPECS["llama-relu"], **large))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 320, n).tolist() for n in (5, 9, 30, 70, 100, 12, 8, 40)]
    options: dict[str, Any] = {"n_ctx": 256, "n_parallel": 1, "n_threads": 2, "verbose": False}

    async def answers(llm: AsyncLlama) -> list[str]:
        many = (llm.create_completion(ids, max_tokens=40, temperature=0) for ids in prompts)
        return [result["choices"][0]["text"] for result in await asyncio.gather(*many)]

    async def main() -> None:
        async with AsyncLlama(path, vram_budget=1, **options) as one:
            want = await answers(one)
        async with AsyncLlama(path, vram_budget=1, replicas=2, **options) as two:
            assert await answers(two) == want
            assert isinstance(two.scheduler, Replicas)
            assert all(each.stats().n_generated_tokens > 40 for each in two.scheduler.all)
            assert [plan is not None and plan.uses_device for plan in two.plans] == [True, True]
            names = [each.engine.session for each in two.scheduler.all]
            assert names[0] is not names[1]

    asyncio.run(asyncio.wait_for(main(), 120))
