"""What a scheduler, the metrics and the view of the engine say of a mixture's experts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import AsyncLlama
from powerinfer._engine.expert_stats import ExpertWatch
from powerinfer._engine.session import Model, Session
from tests import models
from tests.native.test_mixtures import write


@pytest.mark.parametrize("on_device", [True, False])
def test_what_a_mixture_s_experts_do(on_device: bool, tmp_path: Path) -> None:
    """The view of the engine and the metrics, beside what the session itself says."""
    from powerinfer.server.live import engine_view
    from powerinfer.server.metrics import Metrics
    from powerinfer.server.models import Models, of_one
    from powerinfer.server.schemas import EngineView

    path = write(tmp_path / "m.gguf", "mixtral")
    options: dict[str, Any] = (
        {"devices": "host", "vram_budget": 8.9 / 1024} if on_device else {"vram_budget": 0}
    )
    ids = np.arange(3, 20).tolist()

    async def main() -> None:
        async with AsyncLlama(
            path, n_ctx=64, n_batch=16, n_parallel=2, n_threads=1, verbose=False, **options
        ) as llm:
            info = llm.llama.info()
            before = engine_view(llm, info, "m")["experts"]
            assert before["routes"] == {"device": 0, "streamed": 0, "zero_copy": 0, "cpu": 0}
            assert before["hit_rate"] == 0
            await llm.create_completion(ids, max_tokens=8, temperature=0)
            layers = llm.llama.experts()
            for _ in range(1000):  # the scheduler looks after the last step, beside its answer's way to us
                view, text = engine_view(llm, info, "m"), Metrics().text(Models([of_one(llm, ("m",))]))
                if sum(view["experts"]["routes"].values()) == sum(layer.n_routes for layer in layers):
                    break
                await asyncio.sleep(0.01)
        experts = view["experts"]
        EngineView.model_validate(view)
        n_expert, n_used = info.model.n_expert, info.model.n_expert_used
        assert (experts["n_expert"], experts["n_used"]) == (n_expert, n_used)
        uses = np.stack([layer.uses for layer in layers]).astype(float)
        assert uses.sum() == sum(experts["routes"].values()) > 20 * n_used
        for row, layer, shown in zip(uses, layers, experts["layers"], strict=True):
            assert shown["on_device"] == "".join(str(int(here)) for here in layer.resident)
            assert abs(sum(shown["used"]) - 1000 * n_used) <= n_expert / 2
            # Fewer tokens than a half-life, whose weights are alike.
            assert np.abs(np.array(shown["used"]) / 1000 - row / row.sum() * n_used).max() < 0.1
        there = sum(layer.resident.sum() for layer in layers)
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        for where, n in experts["routes"].items():
            assert int(values[f'powerinfer_expert_routes_total{{where="{where}"}}']) == n
        assert int(values["powerinfer_expert_copies_total"]) == experts["copies"]
        assert int(values["powerinfer_expert_copied_bytes_total"]) == experts["copied_bytes"]
        if on_device:
            assert 0 < there < uses.size and 0 < experts["hit_rate"] < 1 and experts["routes"]["streamed"]
            assert 0 < view["layers"][0]["on_device"] < 1
        else:
            assert not there and experts["routes"]["cpu"] == uses.sum() and view["vram"] is None

    asyncio.run(asyncio.wait_for(main(), 120))


def test_uses_of_experts_are_of_late_and_outlive_a_session(tmp_path: Path) -> None:
    """A session that takes another's place begins at 0; what is counted goes on."""
    with Model(models.write_dense(tmp_path / "m.gguf", models.SPECS["qwen3moe"])) as m:
        n_used = m.info.n_expert_used
        with Session(m, n_threads=1) as first, Session(m, n_threads=1) as second:
            watch = ExpertWatch(first)
            assert not watch.stats.recent.any() and watch.stats.hit_rate == 0
            first.feed([3, 4, 5], want_logits=True)
            watch.look(first)
            one = watch.stats
            for _ in range(64):
                second.feed([7])
            watch.look(second)
            two = watch.stats
            for _ in range(2):
                watch.look(second)
            assert (watch.stats.n_cpu, one.n_cpu) == (two.n_cpu, 3 * n_used * m.info.n_layer)
            counted = second.experts()[0]
            assert two.n_cpu == one.n_cpu + sum(y.n_routes for y in second.experts())
        assert np.allclose(two.recent.sum(axis=1), n_used)
        old = 3 * one.recent[0] * 0.5 ** (counted.n_routes / n_used / 128)
        mixed = (old + counted.uses) / (old.sum() / n_used + counted.n_routes / n_used)
        assert np.allclose(two.recent[0], mixed)
