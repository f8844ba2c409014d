"""Mixtures on devices as files have them: against what transformers computed, in formats of blocks, with
adapters, and in exactly the bytes that plans promise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from powerinfer import ArgumentError, FormatError
from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.cli.plan_text import layer_rows
from powerinfer.models.plan import engine, from_json, make_plan
from powerinfer.models.plan.rates import HOST_RATES
from powerinfer.models.quantize import choose_types, quantize_model
from tests import models, reference, rounding
from tests.native.hybrid import ADAPTED, ADAPTED_FFN, adapt
from tests.native.test_hybrid_mixtures import (
    DEVICES,
    F32,
    N_CTX,
    SPLITS,
    decoded,
    opened,
    place,
    settings,
    write_device,
)
from tests.native.test_mixtures import N_LAYER, N_SHARED, SPEC, TOKENS, write

GOLDENS = ("mixtral", "qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "glm4moe", "deepseek2-v3", "llama4")


def on_cpu(model: Model) -> np.ndarray[Any, Any]:
    with Session(model, n_ctx=N_CTX, n_threads=2, sparsity="dense", **F32) as s:
        return decoded(s)


@pytest.mark.parametrize("name", GOLDENS)
def test_goldens(name: str, tmp_path: Path) -> None:
    golden = models.golden(name)
    with Model(golden.write(tmp_path)) as m:
        for split in ("all", "some", "mixed"):
            with opened(m, place(m, split, 64)) as s:
                rows = []
                for token in golden.prompt:
                    s.feed([int(token)])
                    rows.append(s.logits().copy())
            assert reference.relative_error(np.stack(rows), golden.logits) < 1e-3, split


def drive_chunks(folder: Path, device: str) -> None:
    """llama4: attention in chunks of 24, whose borders lie within steps; layers without rotation, whose
    queries grow with the position; experts whose input is weighted. Of a GPU a few tokens together, and
    prompts, are rounded to F16: a token in ten may choose another expert."""
    path = models.write_dense(folder / "m.gguf", models.SPECS["llama4"])
    tokens = [int(t) for t in np.random.default_rng(5).integers(3, 290, 100)]
    expected = reference.forward(reference.load(path), tokens)
    close = 2e-2 if device != "host" or rounding.BF16 else 2e-3
    with Model(path) as m:
        for i, split in enumerate(("all", "none", "some", "mixed")):
            n_batch = 64 if i % 2 else 128
            with opened(m, place(m, split, n_batch), n_batch, 1 + i % 3, device=device) as s:
                for k, token in enumerate(tokens):
                    s.feed([token])
                    assert reference.relative_error(s.logits(), expected[k]) < 1e-5, (split, k)
                for step in (5, 7, 41, 100):
                    s.drop()
                    errors = []
                    for k in range(0, 100, step):
                        ids = tokens[k : k + step]
                        s.feed(ids, want_logits=True)
                        errors += [
                            reference.relative_error(s.logits(j), expected[k + j]) for j in range(len(ids))
                        ]
                    assert np.quantile(errors, 0.9) < (1e-5 if step < 16 and device == "host" else close), (
                        split,
                        step,
                    )


def test_chunks(tmp_path: Path) -> None:
    drive_chunks(tmp_path, "host")


# Of activations as bytes: 127 steps to the largest of 32, in some five products of a layer.
STEP = 32**0.5 / 127 / 12**0.5


@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q2_K"])
def test_experts_whose_down_has_another_format(mixture: str, tmp_path: Path) -> None:
    """As llama.cpp's files have it: gate and up of one format, down of another."""
    spec = replace(models.SPECS["qwen3moe"], n_embd=256, n_ff_expert=256)
    plain, path = models.write_dense(tmp_path / "plain.gguf", spec), tmp_path / "m.gguf"
    with ModelFile(plain) as source:
        quantize_model(source, path, mixture, choose_types(source, mixture))
    with Model(path) as m:
        kinds = {t.name: t.type for t in m.file.tensors}
        assert kinds["blk.1.ffn_up_exps.weight"] != kinds["blk.1.ffn_down_exps.weight"]
        want = on_cpu(m)
        for split in ("all", "some", "none"):
            with opened(m, place(m, split, 64)) as s:
                got = decoded(s)
                errors = [reference.relative_error(a, b) for a, b in zip(got, want, strict=True)]
                assert np.median(errors) < STEP * (5 * m.info.n_layer + 1) ** 0.5, split
                s.drop()
                s.feed(TOKENS)
                assert reference.relative_error(s.logits(), want[-1]) < 0.2, split


def mxfp4(folder: Path) -> Path:
    """gpt-oss as it is published: experts of MXFP4 whose rows are blocks of 32, here three and five."""
    spec = replace(models.SPECS["gpt-oss"], n_embd=160)
    tensors = models.file_tensors(spec, models.draw(spec))
    return models.write(
        folder / "mxfp4.gguf", models.metadata(spec), tensors, kind=GGMLQuantizationType.MXFP4
    )


def test_experts_of_mxfp4(tmp_path: Path) -> None:
    path = mxfp4(tmp_path)
    expected = reference.forward(reference.load(path), TOKENS)
    with Model(path) as m:
        assert {t.type for t in m.file.tensors if "_exps.weight" in t.name} == {"MXFP4"}
        want = on_cpu(m)
        for split in SPLITS:
            with opened(m, place(m, split, 16), 16) as s:
                got = decoded(s)
                assert reference.relative_error(got, expected) < STEP * (5 * m.info.n_layer + 1) ** 0.5
                errors = [reference.relative_error(a, b) for a, b in zip(got, want, strict=True)]
                assert np.median(errors) < 1e-4, split  # a sum's last bit may tip a byte


@pytest.mark.parametrize(("name", "names"), [("olmoe", ADAPTED), ("glm4moe", ADAPTED_FFN)])
def test_adapters(name: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """As on the CPU they add to q and k before norms over all heads, and to layers without experts."""
    with Model(write(tmp_path / "m.gguf", name)) as m:
        before = on_cpu(m)
        assert adapt(m, names=names)
        want = on_cpu(m)
        assert reference.relative_error(before, want) > 1e-2
        with opened(m, place(m, "some", 64)) as s:
            assert reference.relative_error(decoded(s), want) < 1e-5


@pytest.mark.parametrize("name", [*DEVICES, "mxfp4"])
def test_a_layer_takes_what_the_plan_says(name: str, tmp_path: Path) -> None:
    """To the byte: whatever layers and experts lie there, a session takes the plan's bytes but for what is
    the same for all (of work space the stand-in needs less than kernels do)."""
    path = mxfp4(tmp_path) if name == "mxfp4" else write_device(tmp_path / "m.gguf", name)
    asked, left = settings(8), set()
    with Model(path) as m:
        n, dense = m.info.n_layer, m.info.n_layer_dense
        for k in range(n + 1):
            on = [layer < k for layer in range(n)]
            hot = [SPLITS["some"] if here and i >= dense else () for i, here in enumerate(on)]
            placement: dict[str, Any] = {
                "on_device": on,
                "hot": [np.array(ids[: k + 1], np.int32) for ids in hot],
                "head_on_device": True,
            }
            promised = engine.restore(m, asked, HOST_RATES, **placement)
            native = engine.native_plan(m, asked, HOST_RATES, **placement)
            assert promised.bytes.staging == 0
            with opened(m, native, 8) as s:
                s.feed(TOKENS[:8])
                left.add(promised.bytes.total - s.info.n_device_bytes)
    assert len(left) == 1 and min(left) >= 0


def test_a_plan_of_layers_without_experts(tmp_path: Path) -> None:
    """They are placed as a whole, beside attention, which a plan's shares and files know; counts are of
    experts."""
    with Model(write(tmp_path / "m.gguf", "glm4moe")) as m:
        assert m.info.n_layer_dense == 2 and m.info.n_placed == m.info.n_expert == 8
        whole = make_plan(m, vram_budget=16, settings=settings(64), rates=HOST_RATES)
        plan = make_plan(m, vram_budget=whole.full_bytes / 2**30, settings=settings(64), rates=HOST_RATES)
        assert [len(layer.hot) for layer in plan.layers] == [0, 0, 8, 8, 8]
        assert plan.hot_share == 1 and [plan.share(i) for i in range(N_LAYER)] == [1] * N_LAYER
        # Gate, up and down instead of those of the expert of all tokens, in F16, and the router.
        more = 3 * 64 * (SPEC.n_ff_expert - N_SHARED) * 2 - SPEC.n_expert * 64 * 4
        assert plan.layers[0].attention_bytes - plan.layers[2].attention_bytes == more
        assert plan.layers[0].ffn_bytes == 256  # a list of nothing
        assert [row[3] for row in layer_rows(plan, every=True)[1:]] == ["100%"] * N_LAYER
        again = from_json(plan.to_json())
        assert again.to_json() == plan.to_json()
        again.check(m)
        for n, problem, words in (
            (5, FormatError, "5 of its model's 5 layers"),
            (1, ArgumentError, "differs in"),
        ):
            with pytest.raises(problem, match=words):
                from_json(plan.to_json().replace('"n_layer_dense": 2', f'"n_layer_dense": {n}')).check(m)
        with (
            opened(m, plan.native(m), count_neurons=True) as s,
            Session(m, n_ctx=N_CTX, count_neurons=True, **F32) as cpu,
        ):
            for one in (s, cpu):
                for token in TOKENS:
                    one.feed([token])
            counts = s.neuron_counts().counts
            assert np.array_equal(counts, cpu.neuron_counts().counts)
            assert counts.sum(axis=1).tolist() == [0, 0] + [3 * len(TOKENS)] * 3
        some = engine.compute(
            m,
            settings(64, [(plan.min_bytes + plan.full_bytes) // 2]),
            HOST_RATES,
            counts.astype(np.uint32),
            70,
        )
        assert 0 < sum(len(layer.hot) for layer in some.layers) < 24
