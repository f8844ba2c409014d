"""Models whose layers differ, beyond their logits: windows and chunks whose K and V are given back, layers
that read what others hold, sizes that differ, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import FormatError, UnsupportedError
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine
from tests import models
from tests.native.hybrid import both

SMALL, LARGE = models.SPECS["gemma4"], models.SPECS["gemma4-large"]
N = 256
IDS = [int(t) for t in np.arange(3, 3 + N) * 29 % 290]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(models.write_dense(tmp_path_factory.mktemp("m") / "m.gguf", SMALL)) as model:
        yield model


def feed(session: Session, ids: list[int], seq: int = 0) -> bytes:
    for at in range(0, len(ids), 16):
        session.feed(ids[at : at + 16], seq=seq)
    return session.logits().tobytes()


def test_what_is_held(model: Model) -> None:
    """Of six layers four hold K and V, three of them those of a window."""
    near, full = (sum((2 * 2 * n_kv * size,)) for size, n_kv in (SMALL.heads(0), SMALL.heads(2)))
    with Session(model, n_ctx=N, n_batch=16, n_threads=2) as session:
        assert session.info.n_window == 24 + 64
        assert session.info.n_kv_bytes == 64 * (3 * 3 * near + 4 * full)
        feed(session, IDS[:200])
        assert len(session.save()) == 48 + 3 * (200 - 64) * near + 200 * full


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma4", "gemma4-large", "gpt-oss", "olmo3", "cohere2", "llama4"]
)
def test_as_where_all_is_held(name: str, tmp_path: Path) -> None:
    """Two sequences, a shift and a saved state give the bits of a session that gives nothing back."""
    with Model(models.write_dense(tmp_path / "m.gguf", models.SPECS[name])) as model:
        same_answers(model)


def same_answers(model: Model) -> None:
    answers = []
    for n_batch in (16, N):
        with Session(model, n_ctx=N, n_pool=2 * N, n_seq=2, n_batch=n_batch, n_threads=2) as session:
            out = [feed(session, IDS[:200]), feed(session, IDS[50:170], seq=1)]
            session.copy(1, 0, 190)
            out += [feed(session, IDS[:30], seq=1), feed(session, IDS[:5])]
            session.shift(8, 100)
            out.append(feed(session, IDS[:40]))
            session.load(session.save(seq=1), seq=0)
            out += [feed(session, IDS[9:12]), feed(session, IDS[9:12], seq=1)]
            assert out[-1] == out[-2]
            answers.append(out)
    assert answers[0] == answers[1]


def test_devices_refuse_it(model: Model) -> None:
    asked = engine.Settings(budget_bytes=1 << 34, n_ctx=N, overhead_bytes=0)
    with pytest.raises(UnsupportedError, match=r"layer 0 has another number of neurons.*the CPU"):
        engine.compute(model, asked, engine.Rates())


def test_devices_refuse_what_stands_between_neurons_and_a_scale(tmp_path: Path) -> None:
    """Embeddings per layer come behind the feed-forward, and a scale multiplies what they leave."""
    spec = replace(SMALL, name="gemma4-unshared", n_shared=0)
    with Model(models.write_dense(tmp_path / "m.gguf", spec)) as model:
        asked = engine.Settings(budget_bytes=1 << 34, n_ctx=N, overhead_bytes=0)
        with pytest.raises(UnsupportedError, match=r"layer 0 has embeddings per layer.*the CPU"):
            engine.compute(model, asked, engine.Rates())


@pytest.mark.parametrize("split", ["all", "some", "mixed"])
def test_heads_too_wide_for_devices(split: str, tmp_path: Path) -> None:
    """The CPU computes the attention of such layers, a device what follows; the others are the device's."""
    spec = replace(LARGE, name="gemma4-wide", head_full=288, n_layer=3)
    with Model(models.write_dense(tmp_path / "m.gguf", spec)) as model:
        assert both(model, split, "dense", 64, 2) < 1
        asked = engine.Settings(budget_bytes=1 << 34, n_ctx=N, overhead_bytes=0)
        layers = engine.compute(model, asked, engine.Rates(cpu_bytes_per_s=1e6)).layers
        assert [layer.kv_bytes > 0 for layer in layers] == [True, True, False]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.sliding_window_pattern", None, "has no key gemma4.attention.sliding_window_pattern"),
        ("attention.sliding_window_pattern", [True] * 5, "an array of 6"),
        ("attention.shared_kv_layers", 6, "shared_kv_layers"),
        ("attention.shared_kv_layers", 4, "no layer before 2 of its kind has them"),
        ("attention.shared_kv_layers", 1, "attn_k"),
        ("attention.head_count_kv", [2, 2, 2, 3, 2, 2], "4 heads cannot share 3"),
        ("attention.key_length_swa", 16, "key length 16 and value length 32"),
        ("feed_forward_length", [128] * 6, "ffn_"),
        ("embedding_length_per_layer_input", 16, "per_layer_token_embd"),
    ],
)
def test_bad_files(key: str, value: Any, says: str, tmp_path: Path) -> None:
    meta = models.metadata(SMALL)
    del meta[f"gemma4.{key}"]
    if value is not None:
        meta[f"gemma4.{key}"] = value
    path = models.write(tmp_path / "m.gguf", meta, models.file_tensors(SMALL, models.draw(SMALL)))
    with pytest.raises((FormatError, UnsupportedError), match=says):
        Model(path)
