"""How many tokens conversations hold together on a GPU, where nobody says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from powerinfer._engine.devices import Devices
from powerinfer._engine.session import Model
from powerinfer._llama.conversations import pool_on, pool_on_gpu

GIB = 1 << 30
LLAMA = {"model_bytes": int(3.6 * GIB), "position_bytes": 1 << 19}  # of 7B in Q4_0


@pytest.mark.parametrize(
    ("n_ctx", "n_parallel", "gib", "expected"),
    [
        (1024, 64, 40, 60211),  # 85 % of the budget less 4.6 GiB, by half a MiB
        (1024, 8, 40, 8 * 1024),
        (4096, 64, 8, 2 * 4096),  # neurons give way to two conversations
        (4096, 1, 8, 4096),
        (4096, 2, 80, 2 * 4096),
    ],
)
def test_what_a_budget_holds(n_ctx: int, n_parallel: int, gib: int, expected: int) -> None:
    assert pool_on_gpu(n_ctx, n_parallel, budget_bytes=gib * GIB, **LLAMA) == expected


def test_of_a_file(relu_path: Path) -> None:
    def gpus(*budgets: int) -> Devices:
        return Devices(kind="cuda", indices=tuple(range(len(budgets))), budgets=budgets, automatic=False)

    assert pool_on(gpus(8 * GIB), relu_path, 256, 16, {}) == 16 * 256
    assert pool_on(gpus(GIB), relu_path, 256, 16, {}) == 2 * 256
    with Model(relu_path) as model:
        kv = model.kv_bytes(256, n_pool=512, type_k="f16", type_v="f16") // 2
        budget = int((GIB + model.info.n_weight_bytes + 5 * kv) / 0.85) + 2
    assert pool_on(gpus(budget), relu_path, 256, 16, {}) == 5 * 256
    assert pool_on(gpus(budget), relu_path, 256, 16, {"type_k": "f32", "type_v": "f32"}) < 5 * 256
    for other in (None, gpus(8 * GIB, 8 * GIB)):
        assert pool_on(other, relu_path, 256, 16, {}) == 2 * 256
    for options in ({"n_gpu_layers": 1}, {"draft_model": "mtp"}):
        assert pool_on(gpus(8 * GIB), relu_path, 256, 16, options) == 2 * 256
