"""The largest logits as a GPU finds them; choices by them are those by rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from powerinfer._engine.session import Model, Session
from tests import models
from tests.gpu.test_hybrid_devices_gpu import cuda_library
from tests.native import hybrid, largest
from tests.native.test_largest import FEW, pair, step


@pytest.mark.parametrize("n_cols", [7, 700, 1023, 32000, 151936])
@pytest.mark.parametrize("n", [1, 40, 128])
def test_what_a_gpu_finds(n_cols: int, n: int) -> None:
    largest.check(cuda_library(), "pi_device_cuda", n_cols, n)


def test_choices_are_those_by_rows(tmp_path: Path) -> None:
    with Model(hybrid.write(tmp_path, models.SPECS["llama-relu-gqa"], "dense")) as model:
        plan = hybrid.place(model, "all", "dense")
        with Session(model, plan=plan, device="cuda", **hybrid.options("dense")) as s:
            pairs = [pair(model, o, i) for i, o in enumerate(list(FEW.values())[:4])]
            for k in range(9):
                got = step(s, k, [a for a, _ in pairs])
                assert got == [b.sample(s.logits(i)) for i, (_, b) in enumerate(pairs)]
            hidden = [s.logits(i).copy() for i in range(4)]
            for q in range(4):
                s.cut(8, seq=q)
            step(s, 8, [], n=4)
            assert np.array_equal(hidden, [s.logits(i) for i in range(4)])
