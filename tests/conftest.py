"""What holds for all tests, and small model files for several of their folders."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

# numpy's products are small here, and its threads, while they wait, take CPUs from what others test.
# Read when numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from powerinfer import llama
from powerinfer._engine import machine
from powerinfer.cli import bench
from powerinfer.models import doctor
from powerinfer.models.plan import rates
from tests import models

# Tests want that a rate is measured, not which: a gigabyte that is touched for the first time takes a second.
bench.READ_BYTES = doctor._MEASURE_BYTES = rates._MEASURE_BYTES = 64 << 20

# Shells start what runs in the background with Ctrl-C ignored, which programs that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # a machine that only runs the tests of its GPU may not have it
    from hypothesis import HealthCheck, settings

    # A change is refused for what it does, not for what was drawn or for how busy the machine was: the same
    # examples every time. `make slow` draws others (--hypothesis-profile=drawn).
    calm = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", calm, derandomize=True)
    settings.register_profile("drawn", calm, print_blob=True)
    settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Some processes share the whole suite, file by file; what is asked for by name runs in this one."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        return min(machine.cores(), 4)
    config.option.dist = "no"
    return 0


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a seed, the same numbers are drawn in each run: a test that passed does not fail by chance."""
    start = random.Random(20)

    def seeded_random(seed: int | None = None) -> random.Random:
        return random.Random(start.getrandbits(64) if seed is None else seed)

    monkeypatch.setattr(llama, "Random", seeded_random)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`sampled(n)`: one of n cases of a test is enough each time; the others are slow ones.

    Steps of the golden ratio meet every value of every parameter, where each n-th case may miss some.
    """
    cases: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] * 0.6180339887 % 1 >= 1 / mark.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[test] += 1


@pytest.fixture(scope="session")
def relu_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ReLU Llama without predictors, 320 tokens (SentencePiece), trained for 256 positions."""
    return models.write_dense(tmp_path_factory.mktemp("models") / "relu.gguf", models.SPECS["llama-relu"])


@pytest.fixture(scope="session")
def sparse_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with predictors, as PowerInfer writes it."""
    spec = models.SPECS["llama-relu"]
    predictor = models.draw_predictor(spec)
    return models.write_sparse(tmp_path_factory.mktemp("models") / "sparse.gguf", spec, predictor, 0.0)
