"""Mixtures of experts on a GPU, against the float64 reference. Run only when asked for: without a GPU, or in
a build without the CUDA backend, they fail.

    pytest tests/gpu/test_mixtures_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import engine
from powerinfer.models.quantize import choose_types, quantize_model
from tests import models, reference
from tests.native.hybrid import has_second_gpu
from tests.native.test_hybrid_mixture_files import GOLDENS, STEP, drive_chunks, mxfp4
from tests.native.test_hybrid_mixtures import (
    DEVICES,
    F32,
    IN_PLACE,
    N_CTX,
    N_LAYER,
    SLOW,
    SPLITS,
    decoded,
    opened,
    place,
    settings,
    write_device,
)
from tests.native.test_mixtures import SPEC, TOKENS, write


@pytest.mark.parametrize("name", DEVICES)
def test_every_split_gives_the_reference_s_answer(name: str, tmp_path: Path) -> None:
    """Sums of floats for single tokens. A few together, and prompts, are multiplied in F16: 11 bits before
    each of some five products in a layer. The median leaves out tokens for which that chooses another
    expert."""
    path = write_device(tmp_path / "m.gguf", name)
    expected = reference.forward(reference.load(path), TOKENS)
    rounded = 2.0**-11 * (5 * N_LAYER + 1) ** 0.5 * 8
    with Model(path) as m:
        for i, split in enumerate(SPLITS):
            n_batch = 64 if i % 2 else 16
            with opened(m, place(m, split, n_batch), n_batch, 1 + i % 3, device="cuda") as s:
                assert reference.relative_error(decoded(s), expected) < 1e-5, split
                s.drop()
                errors = []
                for k in range(0, 70, 7):
                    s.feed(TOKENS[k : k + 7], want_logits=True)
                    errors += [reference.relative_error(s.logits(j), expected[k + j]) for j in range(7)]
                assert np.median(errors) < rounded, split
                s.drop()
                s.feed(TOKENS, want_logits=True)
                errors = [reference.relative_error(s.logits(j), row) for j, row in enumerate(expected)]
                assert np.median(errors) < rounded, split


@pytest.mark.parametrize("by_neuron", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantised_experts(kind: str, by_neuron: bool, tmp_path: Path) -> None:
    """Beside the CPU's answer: both round activations to 8 bits before products, 127 steps to the largest of
    32."""
    plain, path = write(tmp_path / "plain.gguf", "smallthinker"), tmp_path / "m.gguf"
    with ModelFile(plain) as source:
        types = choose_types(source, kind, pure=True, down_by_neuron=by_neuron)
        quantize_model(source, path, kind, types)
    with Model(path) as m, Session(m, n_ctx=N_CTX, n_threads=2, sparsity="dense", **F32) as cpu:
        want = decoded(cpu)
        for split in ("all", "some", "none"):
            with opened(m, place(m, split, 64), device="cuda") as s:
                got = decoded(s)
                errors = [reference.relative_error(a, b) for a, b in zip(got, want, strict=True)]
                assert np.median(errors) < STEP * (5 * N_LAYER + 1) ** 0.5, split


def test_experts_of_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published: rows of three and five blocks."""
    path = mxfp4(tmp_path)
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m:
        for split in ("all", "some", "none"):
            with opened(m, place(m, split, 64), device="cuda") as s:
                errors = [reference.relative_error(a, b) for a, b in zip(decoded(s), expected, strict=True)]
                assert np.median(errors) < STEP * (5 * m.info.n_layer + 1) ** 0.5, split
                for n in (7, 70):
                    s.drop()
                    errors = []
                    for k in range(0, 70, n):
                        s.feed(TOKENS[k : k + n], want_logits=True)
                        errors += [reference.relative_error(s.logits(j), expected[k + j]) for j in range(n)]
                    assert np.median(errors) < STEP * (5 * m.info.n_layer + 1) ** 0.5, (split, n)


def test_chunks(tmp_path: Path) -> None:
    drive_chunks(tmp_path, "cuda")


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name: str, tmp_path: Path) -> None:
    golden = models.golden(name)
    with Model(golden.write(tmp_path)) as m:
        for split in ("all", "some"):
            with opened(m, place(m, split, 64), device="cuda") as s:
                rows = []
                for token in golden.prompt:
                    s.feed([int(token)])
                    rows.append(s.logits().copy())
            assert reference.relative_error(np.stack(rows), golden.logits) < 1e-3, split


@pytest.mark.parametrize("name", ["smallthinker", "smallthinker by neuron", "gpt-oss"])
def test_experts_move_while_tokens_are_computed(name: str, tmp_path: Path) -> None:
    path = write_device(tmp_path / "m.gguf", name)
    tokens = (TOKENS[:2] * 120)[:N_CTX]
    expected = reference.forward(reference.load(path), tokens)
    worst = [np.array([0, 1], np.int32)] * N_LAYER
    with Model(path) as m:
        plan = engine.native_plan(
            m, settings(64), engine.Rates(), on_device=[True] * N_LAYER, hot=worst, head_on_device=True
        )
        with opened(m, plan, device="cuda") as s:
            for k, token in enumerate(tokens):
                s.feed([token])
                assert reference.relative_error(s.logits(), expected[k]) < 1e-5
            moved = s.experts()
        assert sum(layer.n_copies for layer in moved) >= N_LAYER


@pytest.mark.parametrize("name", ["qwen2moe", "SiLU and a shared expert by neuron"])
def test_the_same_bits_with_frozen_experts(name: str, tmp_path: Path) -> None:
    with Model(write_device(tmp_path / "m.gguf", name)) as m:
        runs: list[Any] = []
        for _ in range(2):
            with opened(m, place(m, "some", 64), device="cuda", live_experts=False) as s:
                s.feed(TOKENS[:40])
                rows = [s.logits().copy()]
                for token in TOKENS[40:]:
                    s.feed([token])
                    rows.append(s.logits().copy())
                runs.append(np.stack(rows))
        assert np.array_equal(*runs)


@pytest.mark.parametrize(
    "name", ["qwen2moe", "smallthinker", "smallthinker by neuron", "groups", "glm4moe", "gpt-oss"]
)
def test_steps_of_many_sequences(name: str, tmp_path: Path) -> None:
    """Products in F16 for 9 to 64 tokens: rounded as those of a few. Steps of resident models are recorded;
    a repeat of the same gives the same bits."""
    n_seq = 40
    many: dict[str, Any] = {"n_seq": n_seq, "n_pool": 64 * n_seq}
    path = write_device(tmp_path / "m.gguf", name)
    widths = (40, 9, 17, 40, 33, 9)
    rng = np.random.default_rng(5)
    steps = [(rng.permutation(n_seq)[:n].tolist(), rng.integers(3, 200, n).tolist()) for n in widths]
    fed: list[list[int]] = [[] for _ in range(n_seq)]
    rounded = 2.0**-11 * (5 * N_LAYER + 1) ** 0.5 * 8
    for order, ids in steps:
        for q, token in zip(order, ids, strict=True):
            fed[q].append(token)
    loaded = reference.load(path)
    want = [reference.forward(loaded, tokens) for tokens in fed]
    with Model(path) as m:
        for split in ("all", "some"):
            plan, runs = place(m, split, 64, **many), []
            with opened(m, plan, device="cuda", live_experts=False, **many) as s:
                for _ in range(3):
                    rows: list[list[Any]] = [[] for _ in range(n_seq)]
                    for q in range(n_seq):
                        s.drop(q)
                    for order, ids in steps:
                        s.feed(ids, seq=order, want_logits=True)
                        for i, q in enumerate(order):
                            rows[q].append(s.logits(i).copy())
                    runs.append(np.concatenate([np.stack(r) for r in rows]))
            errors = [
                reference.relative_error(a, b) for a, b in zip(runs[0], np.concatenate(want), strict=True)
            ]
            assert np.median(errors) < rounded, split
            assert np.array_equal(runs[0], runs[1]), split
            assert np.array_equal(runs[0], runs[2]), split


RARE = {  # experts that lie where the file's counts say that nobody uses them
    "powerinfer.expert.counts": np.ones(N_LAYER * SPEC.n_expert, np.uint32),
    "powerinfer.expert.tokens": 1000,
}


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_a_short_prompt_brings_the_experts_that_it_wants(kind: str, tmp_path: Path) -> None:
    """Its answer has the bits of all experts, which come where the file is not mapped."""
    path = write(tmp_path / "m.gguf", "smallthinker", more=RARE)
    if kind != "F16":
        with ModelFile(path) as source:
            quantize_model(source, tmp_path / "q.gguf", kind, choose_types(source, kind, pure=True))
        path = tmp_path / "q.gguf"
    with Model(path) as m:
        for split in ("none", "one", "some"):
            for ids in (TOKENS[:9], [5] * 12, TOKENS[:30], [7] * 60):
                rows = []
                for pinned in (True, True, False):
                    plan = place(m, split, 64)
                    with opened(m, plan, device="cuda", pin_weights=pinned, live_experts=False) as s:
                        for _ in range(3):
                            s.drop()
                            s.feed(ids)
                            rows.append(s.logits().copy())
                assert np.isfinite(rows[0]).all()
                assert all(np.array_equal(rows[0], row) for row in rows), (split, len(ids))


@pytest.mark.parametrize("share", IN_PLACE)
@pytest.mark.parametrize("name", ["smallthinker", "qwen2moe", "groups"])
def test_missing_experts_are_shared_with_the_bus(name: str, share: float, tmp_path: Path) -> None:
    """The GPU reads some of them in host memory: the reference's answer, the same bits each time."""
    path = write(tmp_path / "m.gguf", name)
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m:
        for split in ("none", "one", "some", "mixed"):
            plan, runs = place(m, split, 64, rates=IN_PLACE[share]), []
            for _ in range(2):
                with opened(m, plan, device="cuda", live_experts=False) as s:
                    runs.append(decoded(s))
                    n = sum(layer.n_zero_copy for layer in s.experts())
                    assert n > 0 or split != "none"
            assert reference.relative_error(runs[0], expected) < 1e-5, split
            assert np.array_equal(*runs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_quantised_experts_in_host_memory(kind: str, tmp_path: Path) -> None:
    """Where the GPU reads all that are missing, it gives what it gives where none are, but for the order of
    sums, which may round activations otherwise. (Rows that are no whole blocks become another format.)"""
    step = 32**0.5 / 127 / 12**0.5
    plain, path = write(tmp_path / "plain.gguf", "smallthinker"), tmp_path / "m.gguf"
    with ModelFile(plain) as source:
        quantize_model(source, path, kind, choose_types(source, kind, pure=True))
    with Model(path) as m:
        rows = []
        for split in ("all", "none", "some"):
            plan = place(m, split, 64, rates=IN_PLACE[1e9])
            with opened(m, plan, device="cuda", live_experts=False) as s:
                rows.append(decoded(s))
        for other in rows[1:]:
            errors = [reference.relative_error(a, b) for a, b in zip(other, rows[0], strict=True)]
            assert np.median(errors) < step * (5 * N_LAYER + 1) ** 0.5


def test_experts_move_while_others_are_read_in_place(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "smallthinker")
    tokens = (TOKENS[:2] * 120)[:N_CTX]
    expected = reference.forward(reference.load(path), tokens)
    worst = [np.array([0, 1], np.int32)] * N_LAYER
    with Model(path) as m:
        plan = engine.native_plan(
            m, settings(64), IN_PLACE[1.0], on_device=[True] * N_LAYER, hot=worst, head_on_device=True
        )
        with opened(m, plan, device="cuda") as s:
            for k, token in enumerate(tokens):
                s.feed([token])
                assert reference.relative_error(s.logits(), expected[k]) < 1e-5
            moved = s.experts()
        assert sum(layer.n_copies for layer in moved) >= N_LAYER
        assert sum(layer.n_zero_copy for layer in moved) > 0


@pytest.mark.parametrize("name", ["smallthinker by neuron", "olmoe", "glm4moe", "gpt-oss"])
def test_two_gpus(name: str, tmp_path: Path) -> None:
    if not has_second_gpu():
        pytest.skip("one GPU")
    path = write_device(tmp_path / "m.gguf", name)
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m:
        for split in ("all", "some"):
            with opened(m, place(m, split, 64, [0, 0, 0, 1, 1]), device=["cuda:0", "cuda:1"]) as s:
                assert reference.relative_error(decoded(s), expected) < 1e-5, split


@pytest.mark.parametrize("name", ["qwen2moe", "olmoe", "glm4moe", "gpt-oss"])
def test_a_budget_is_held(name: str, tmp_path: Path) -> None:
    """What the plan promises is more than the session takes, whatever part of the experts it holds."""
    with Model(write(tmp_path / "m.gguf", name)) as m:
        whole = engine.compute(m, settings(64, overhead_bytes=640 << 20), SLOW)
        for part in (0.0, 0.5, 1.0):
            budget = whole.min_bytes + int(part * (whole.full_bytes - whole.min_bytes))
            asked = settings(64, [budget], overhead_bytes=640 << 20)
            plan = engine.compute(m, asked, SLOW)
            native = engine.native_plan(
                m,
                asked,
                SLOW,
                on_device=[layer.on_device for layer in plan.layers],
                hot=[layer.hot for layer in plan.layers],
                head_on_device=plan.head_on_device,
            )
            with opened(m, native, device="cuda") as s:
                for k in range(3):
                    s.feed(TOKENS[: 20 + k])
                    s.feed([TOKENS[k]])
                assert s.info.n_device_bytes <= budget
