"""Mixtures of experts: against the float64 reference, alone and together, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, FormatError, UnsupportedError
from powerinfer._engine.session import Model, Session
from tests import models, reference
from tests.native.test_logits import feed_all

SPEC = models.SPECS["qwen3moe"]
TOKENS = (np.arange(3, 60) * 17 % SPEC.n_vocab).tolist()


def write(path: Path, *, meta: dict[str, Any] | None = None, tensors: models.Tensors | None = None) -> Path:
    """The spec's file with some keys (None: without it) and tensors replaced."""
    keys = models.metadata(SPEC) | (meta or {})
    values = models.file_tensors(SPEC, models.draw(SPEC)) | (tensors or {})
    return models.write(path, {key: v for key, v in keys.items() if v is not None}, values)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("experts") / "m.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model(path) as m:
        yield m


@pytest.mark.parametrize("chunk", [1, 7])
def test_any_router_gives_the_reference_s_answer(chunk: int, tmp_path: Path) -> None:
    """Routers drawn at random, so that the context decides; only sums of floats differ."""
    routers = {
        f"blk.{i}.ffn_gate_inp.weight": models.normal(f"router/{i}", SPEC.n_expert, SPEC.n_embd).astype(
            np.float32
        )
        / 4
        for i in range(SPEC.n_layer)
    }
    file = write(tmp_path / "m.gguf", tensors=routers)
    expected = reference.forward(reference.load(file), TOKENS)
    with Model(file) as m, Session(m, n_threads=2, type_k="f32", type_v="f32") as s:
        assert reference.relative_error(feed_all(s, TOKENS, chunk), expected) < 1e-5


def test_equal_experts_are_taken_in_their_order(tmp_path: Path) -> None:
    """A router of zeros ranks all alike: the first n_used are used, each with the same weight."""
    routers = {
        f"blk.{i}.ffn_gate_inp.weight": np.zeros((SPEC.n_expert, SPEC.n_embd), np.float32)
        for i in range(SPEC.n_layer)
    }
    file = write(tmp_path / "m.gguf", tensors=routers)
    expected = reference.forward(reference.load(file), TOKENS[:9])
    with Model(file) as m, Session(m, n_threads=2, type_k="f32", type_v="f32") as s:
        assert reference.relative_error(feed_all(s, TOKENS[:9], 1), expected) < 1e-5


def same_bits_alone(s: Session, alone: Session) -> bool:
    """Generated tokens of three sequences, some of which share experts; prompts of other lengths."""
    for seq, n in enumerate((40, 24, 3)):
        s.feed(TOKENS[:n], seq=seq)
    for token in TOKENS[:5]:
        s.feed([token] * 3, seq=[0, 1, 2], want_logits=True)
        last = [s.logits(i).copy() for i in range(3)]
    same = []
    for seq, n in enumerate((40, 24, 3)):
        alone.drop()
        alone.feed(TOKENS[:n])
        for token in TOKENS[:5]:
            alone.feed([token])
        same.append(np.array_equal(alone.logits(), last[seq]))
    return all(same)


def test_bits_do_not_depend_on_other_sequences(model: Model) -> None:
    with Session(model, n_threads=2, n_seq=3) as s, Session(model, n_threads=2) as alone:
        assert same_bits_alone(s, alone)


def test_bits_do_not_depend_on_how_a_prompt_is_cut(model: Model) -> None:
    with Session(model, n_threads=2) as whole, Session(model, n_threads=2, n_batch=16) as cut:
        whole.feed(TOKENS)
        cut.feed(TOKENS)
        assert np.array_equal(whole.logits(), cut.logits())


def test_a_copied_model_gives_the_same_bits(path: Path, model: Model) -> None:
    with (
        Model(path, use_mmap=False) as copied,
        Session(model, n_threads=2) as one,
        Session(copied, n_threads=2) as other,
    ):
        one.feed(TOKENS)
        other.feed(TOKENS)
        assert np.array_equal(one.logits(), other.logits())


def test_a_saved_sequence_goes_on_with_the_same_bits(model: Model) -> None:
    with Session(model, n_threads=2) as one, Session(model, n_threads=2) as other:
        one.feed(TOKENS)
        other.load(one.save())
        one.feed(TOKENS[:1])
        other.feed(TOKENS[:1])
        assert np.array_equal(one.logits(), other.logits())


def test_a_shifted_context_goes_on(model: Model) -> None:
    with Session(model, n_threads=2) as s:
        s.feed(TOKENS)
        s.shift(4, 16)
        s.feed(TOKENS[:1])
        assert s.length() == len(TOKENS) - 15
        assert np.isfinite(s.logits()).all()


def test_a_token_reads_its_experts_alone(model: Model) -> None:
    with Session(model, n_threads=2) as s:
        s.feed(TOKENS[:1])
        expert = 2 * 3 * SPEC.n_ff_expert * SPEC.n_embd  # F16
        router = 4 * SPEC.n_expert * SPEC.n_embd
        assert [step.ffn_bytes for step in s.last_step] == [SPEC.n_used * expert + router] * SPEC.n_layer


def test_what_experts_cannot_do_is_refused(path: Path, model: Model) -> None:
    with pytest.raises(ArgumentError, match='"predicted" is not possible: the model has experts'):
        Session(model, sparsity="predicted")
    with pytest.raises(ArgumentError, match='"exact" needs a ReLU model'):
        Session(model, sparsity="exact")
    with (
        pytest.raises(ArgumentError, match="sign predictor"),
        Model(path, predictor="sign", activation="relu"),
    ):
        pass
    a, b = np.ones((2, SPEC.n_embd), np.float32), np.ones((SPEC.n_ff, 2), np.float32)
    with Model(path) as m, pytest.raises(ArgumentError, match=r"blk\.0\.ffn_up\.weight"):
        m.add_adapter("blk.0.ffn_up.weight", a, b)


A = "qwen3moe."
UP = "blk.1.ffn_up_exps.weight"
BAD: list[tuple[dict[str, Any], models.Tensors, type[Exception], str]] = [
    ({A + "expert_count": 0}, {}, FormatError, "expert_count"),
    ({A + "expert_count": None}, {}, FormatError, "expert_count"),
    ({A + "expert_count": 2**31}, {}, FormatError, "expert_count"),
    ({A + "expert_count": 7}, {}, FormatError, "ffn_gate_inp"),
    ({A + "expert_used_count": 0}, {}, FormatError, "expert_used_count"),
    ({A + "expert_used_count": 9}, {}, FormatError, "expert_used_count"),
    ({A + "expert_used_count": None}, {}, FormatError, "expert_used_count"),
    ({A + "expert_feed_forward_length": 95}, {}, FormatError, "ffn_gate_exps"),
    ({A + "expert_feed_forward_length": 2**32 - 1}, {}, FormatError, "expert_feed_forward_length"),
    ({}, {UP: np.zeros((8, 96, 32), np.float16)}, FormatError, UP),
    ({}, {UP: np.zeros((7, 96, 64), np.float16)}, FormatError, UP),
    ({}, {UP: np.zeros((8 * 96, 64), np.float16)}, FormatError, UP),
    ({}, {"blk.1.ffn_up.weight": np.zeros((96, 64), np.float16)}, UnsupportedError, "blk.1.ffn_up.weight"),
]


@pytest.mark.parametrize(("meta", "tensors", "error", "words"), BAD)
def test_bad_files_are_refused_by_name(
    meta: dict[str, Any], tensors: models.Tensors, error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words), Model(write(tmp_path / "m.gguf", meta=meta, tensors=tensors)):
        pass
