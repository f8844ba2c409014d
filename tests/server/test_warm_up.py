"""Steps that a GPU computes before the first request: of each kind, and none of them leaves a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import AsyncLlama, Llama
from powerinfer._engine.session import Model, Session
from powerinfer._engine.warm_up import warm_up
from powerinfer.cli import parse
from powerinfer.cli.serve import served_models
from tests import models
from tests.native.test_hybrid_mixed import opened

ON_DEVICE: dict[str, Any] = {"devices": "host", "vram_budget": 1, "n_ctx": 128, "verbose": False}


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"]))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens of a prompt, and of sequences that generate."""
    found: list[tuple[int, int]] = []
    feed, begin_part = Session.feed, Session.begin_part

    def fed(self: Session, ids: Any, **more: Any) -> list[int]:
        n_next = len(more["samplers"])
        found.append((len(ids) - n_next, n_next))
        return feed(self, ids, **more)

    def begun(self: Session, ids: Any, **more: Any) -> None:
        found.append((len(ids), 0))
        begin_part(self, ids, **more)

    monkeypatch.setattr(Session, "feed", fed)
    monkeypatch.setattr(Session, "begin_part", begun)
    return found


def test_each_kind_of_step(model: Model, steps: list[tuple[int, int]]) -> None:
    with model, opened(model) as s:
        assert s.info.n_part > 128 and warm_up(s, 9) == len(steps)
        # A prompt's last token is computed as a next one. Contexts have 128 tokens.
        prompts = [(128, 0), (127, 1), (63, 1), (31, 1), (15, 1)]
        assert steps == [*prompts, (16, 2), (56, 8), *((0, n) for n in range(1, 10))]


@pytest.mark.parametrize("n_parallel", [1, 20])
def test_sequences_are_empty_again(model: Model, n_parallel: int) -> None:
    with model, opened(model) as s, opened(model) as other:
        assert warm_up(s, n_parallel) > 5
        assert [s.length(q) for q in range(s.info.n_seq)] == [0] * s.info.n_seq
        assert s.info.n_blocks_free == s.info.n_blocks
        for one in (s, other):
            one.feed([5, 6, 7], seq=1)
        assert np.array_equal(s.logits(), other.logits())


def test_a_small_pool_and_little_time(tmp_path: Path, steps: list[tuple[int, int]]) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    with Llama(path, n_pool=256, n_seq=20, **ON_DEVICE) as llm:
        assert warm_up(llm.session, 20) == len(steps) and steps[-1] == (0, 3)
        n_part = steps[0][0]
        steps.clear()
        assert warm_up(llm.session, 20, 0) == 1 and steps == [(n_part, 0)]


@pytest.mark.parametrize("more", [{"share": 0.5}, {"count_neurons": True}])
def test_who_needs_none(model: Model, more: dict[str, Any], steps: list[tuple[int, int]]) -> None:
    """Where the CPU has a share prompts take long each time; and counts are those of what users read."""
    with model, opened(model, **more) as s, Session(model, n_seq=2) as alone:
        assert warm_up(s, 4) == warm_up(alone, 2) == 0 and not steps


def test_a_model_that_is_served(
    tmp_path: Path, steps: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.write_dense(tmp_path / "m.gguf", models.SPECS["llama-relu-gqa"])
    llm = AsyncLlama(path, n_parallel=2, **ON_DEVICE)
    llm.close()
    assert not steps
    args = parse(["serve", str(path), "-np", "2", "-c", "128"])
    monkeypatch.setattr("powerinfer.cli.serve.load_arguments", lambda args: ON_DEVICE)
    (served,) = served_models(args, [("a",)])
    assert served.open is not None
    served.open((), lambda done, total: None).close()
    assert (0, 2) in steps
