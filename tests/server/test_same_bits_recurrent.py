"""What test_same_bits.py checks, of models whose layers have states: a request gets the logits of running
alone, beside others and behind a prefix that another one's checkpoint holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from powerinfer._engine.embedding import hidden_states
from powerinfer._engine.engine import Engine
from powerinfer._engine.session import Model, Session
from tests import models
from tests.server.scheduling import choice
from tests.server.test_same_bits import logits_alone, prompt, reused_beside_others, scheduler, submit

NAMES = ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen35moe", "nemotron_h"))]


def write(folder: Path, name: str) -> Path:
    return models.write_dense(folder / "m.gguf", replace(models.SPECS[name], n_ctx=1024))


@pytest.mark.parametrize("name", NAMES)
def test_company_and_prefixes(tmp_path: Path, name: str) -> None:
    common = prompt(101, 7)
    prompts = [np.concatenate([common[:n], prompt(k, 10 + n + k)]) for n in (0, 43, 101) for k in (3, 60)]
    prompts += [common, common[:50], common[:48], common, prompt(5)]
    path = write(tmp_path, name)
    alone = logits_alone(path, prompts, "dense")
    with Model(path) as model:
        for part in (8, 128):
            assert reused_beside_others(model, prompts, alone, "dense", part) > 300
        with scheduler(model, "dense") as own:  # up to the checkpoint behind matrix products
            for ids, n_reused in ((common, 0), (common, 100), (np.concatenate([common, prompt(40)]), 100)):
                stream = own.submit(ids, choice(n_vocab=model.info.n_vocab), limit=1)
                list(stream)
                assert stream.n_reused == n_reused


def test_beginnings_that_many_share(tmp_path: Path) -> None:
    """The second prompt that begins like one before it leaves a checkpoint where they part."""
    common = prompt(203, 7)
    with Model(write(tmp_path, "lfm2")) as model, scheduler(model, "dense") as own:
        for i, n_reused in enumerate((0, 0, 203, 203)):
            ids = np.concatenate([common, prompt(60, i)])
            rows: list[bytes] = []
            stream = submit(own, ids, rows)
            list(stream)
            assert stream.n_reused == n_reused
            with Session(model, n_ctx=512, n_threads=2) as alone:
                alone.feed(ids)
                assert alone.logits().tobytes() == rows[0]


def test_texts_beside_others(tmp_path: Path) -> None:
    texts = [prompt(n, n) for n in (3, 50, 1, 20, 64, 12, 90)]
    with Model(write(tmp_path, "lfm2")) as model:
        with Session(model, n_ctx=512, n_threads=2) as session:
            alone = [hidden_states(Engine(session), [ids])[0] for ids in texts]
        with Session(model, n_ctx=512, n_seq=4, n_threads=2) as session:
            together = hidden_states(Engine(session, max_running=4), texts)
    for rows, other in zip(alone, together, strict=True):
        assert np.array_equal(rows, other), len(rows)
