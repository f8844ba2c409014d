"""A plan needs no device: numbers that describe one are enough, and give the plan that a session with the
opened device follows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from powerinfer import Llama
from powerinfer.models.plan import Plan, Settings, as_table, make_plan
from powerinfer.models.plan.rates import HOST_RATES
from tests import models
from tests.core import capi

SIZES: dict[str, Any] = {"n_ctx": 128, "n_batch": 16}
# Plans in a process of its own, with a CUDA backend beside the engine: the maps show what is loaded.
PROGRAM = """
import json, sys
from pathlib import Path
from powerinfer import DeviceError
from powerinfer._engine.machine import device_facts
from powerinfer.models.plan import Settings, find_rates, make_plan
from powerinfer.models.plan.rates import HOST_RATES
from tests.plan.test_descriptions import document

def loaded():
    maps = Path("/proc/self/maps").read_text()
    return [name for name in ("libpowerinfer_cuda", "libcuda") if name in maps]

path, *budgets = sys.argv[1:]
settings = Settings(n_ctx=128, n_batch=16, overhead_bytes=0, group=1)
found = []
for rates in (HOST_RATES, find_rates(gpu="RTX 4090", cpu_gbps=40)):
    plan = make_plan(path, vram_budget=[float(n) for n in budgets], settings=settings, rates=rates)
    found.append(document(plan))
assert loaded() == [], loaded()
try:
    device_facts("cuda")
    sys.exit("the copy of the engine is no backend")
except DeviceError:
    assert loaded()[0] == "libpowerinfer_cuda"
print(json.dumps(found[0]))
"""


def document(plan: Plan) -> Any:
    """All that a plan says, neuron by neuron."""
    neurons = [[layer.hot.tolist(), layer.pcie.tolist()] for layer in plan.layers]
    return json.loads(json.dumps([as_table(plan), neurons]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("n_devices", [1, 2])
def test_a_plan_without_a_device_is_that_with_one(tmp_path: Path, n_devices: int) -> None:
    path = tmp_path / "m.gguf"
    models.write_dense(path, models.SPECS["llama-relu-gqa"])
    settings = Settings(overhead_bytes=0, group=1, **SIZES)
    whole = make_plan(path, vram_budget=1, settings=settings, rates=HOST_RATES)
    gib = [(whole.min_bytes + whole.full_bytes) / 2 / 2**30] * n_devices
    with Llama(path, vram_budget=gib, devices=["host"] * n_devices, verbose=False, **SIZES) as llm:
        assert llm.plan is not None and llm.plan.uses_device and llm.info().session.n_device_bytes > 0
        opened = document(llm.plan)
    library = shutil.copy(capi.library_path(), tmp_path / "libte_testing.so")
    shutil.copy(capi.library_path(), tmp_path / "libpowerinfer_cuda.so")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), *map(repr, gib)],
        env=os.environ | {"POWERINFER_LIBRARY": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == opened
