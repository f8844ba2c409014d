"""What plans promise is what sessions take. The stand-in allocates what a GPU's session allocates but for the
work space of kernels: the bytes used are the plan's without that, but for a few that rounding up takes."""

from __future__ import annotations

import ctypes
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import Settings, engine, make_plan
from powerinfer.models.plan.rates import HOST_RATES
from tests import models
from tests.core import capi
from tests.plan.drafts import write_model

SMALL_BATCH, PARTS, SPLITS = 8, 384, 32  # native/device/space.h
TOGETHER, FEW, PARTS_OF_ONE, PART_BEGIN = 64, 256, 8, 4  # vendor/cuda/prompt_attention.cuh
SLACK = 8 << 10  # of a device: some twenty buffers and two lists a layer, each rounded up to 256 bytes
SIZES: dict[str, Any] = {"n_ctx": 100, "n_pool": 256, "n_seq": 2}


class Shape(ctypes.Structure):
    """pi_space_shape."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in ("n_tok", "n_embd", "n_ff", "n_head", "n_embd_head", "n_inner")
        ),
        *(
            (name, ctypes.c_uint64)
            for name in ("sign_words", "adapter_rank", "n_expert", "n_used", "n_ff_expert")
        ),
        *((name, ctypes.c_bool) for name in ("gated", "predicted", "by_output")),
        *((name, ctypes.c_uint64) for name in ("mapped_bytes", "matrix_bytes")),
    ]


def space(name: str, shape: Shape) -> int:
    ask = getattr(ctypes.CDLL(str(capi.library_path())), name)
    ask.argtypes, ask.restype = (ctypes.POINTER(Shape),), ctypes.c_uint64
    return int(ask(ctypes.byref(shape)))


def converted(model: Model) -> int:
    """F16 of the largest matrix of another format that prompts are multiplied with."""
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output.weight")
    return max(
        [0]
        + [
            2 * math.prod(t.shape)
            for t in model.file.tensors
            if t.type != "F16" and len(t.shape) == 2 and any(name in t.name for name in names)
        ]
    )


def attention(n_batch: int, n_head: int, d: int) -> int:
    """Floats of work space that a session counts for it."""
    return space("pi_space_attention", Shape(n_tok=n_batch, n_head=n_head, n_embd_head=d))


def kernels(model: Model, n_batch: int) -> int:
    """Work space that the stand-in does not need, for a model without adapters: gate, up, their product and
    inputs in F16, marks and signs, partial sums, inputs of a few tokens in two forms, a converted matrix, and
    a driver's tables."""
    i, few = model.info, min(n_batch, SMALL_BATCH)
    widest = max(i.n_embd, i.n_head * i.n_embd_head)
    tiled = -(-n_batch // 32) * 32 if n_batch > few else n_batch
    words = n_batch * i.n_ff * (2 if i.is_gated else 1)
    words += (tiled * (i.n_ff + widest + 512)) // 2
    words += min(tiled, 256) * (i.n_embd + 256) // 2 + 513 if n_batch > few else 0
    words += few * i.n_embd * PARTS + attention(n_batch, i.n_head, i.n_embd_head)
    words += 12 * (max(widest, i.n_ff) + i.n_embd + 512)
    if i.predictor != "none":
        words += n_batch * (i.n_ff // 32 + 1 + (2 * (i.n_embd // 64) if i.predictor == "sign" else 0))
    tables = (model.file.path.stat().st_size + i.n_copied_bytes) // 512
    return 4 * words + tables + (converted(model) if n_batch > SMALL_BATCH else 0)


@pytest.mark.parametrize(
    ("name", "predictor", "kind"),
    [
        ("llama-relu-gqa", "mlp", None),
        ("falcon-40b", "sign", None),
        ("opt", "sign", None),
        ("bamboo", None, Kind.Q8_0),
        ("qwen3", None, None),
        ("deepseek2-dense", None, Kind.Q8_0),
    ],
)
def test_bytes_that_are_used(name: str, predictor: Any, kind: Kind | None, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    path = tmp_path / "m.gguf"
    if predictor:
        models.write_sparse(path, spec, models.draw_predictor(spec))
    else:
        models.write_dense(path, spec, kind=kind)
    rng = np.random.default_rng(7)
    with Model(path, predictor=predictor or "auto") as model:
        for n_batch in (4, 8, 9, 64):
            counting = bool(rng.integers(2))
            settings = Settings(n_batch=n_batch, overhead_bytes=0, group=1, count_neurons=counting, **SIZES)
            whole = engine.compute(model, settings, HOST_RATES)
            room = whole.full_bytes - whole.min_bytes
            gib = [(whole.min_bytes + int(room * rng.random())) / 2**30 for _ in range(rng.integers(1, 4))]
            plan = make_plan(model, vram_budget=gib, settings=settings, rates=HOST_RATES)
            with Session(
                model,
                plan=plan.native(model),
                device=["host"] * len(gib),
                n_batch=n_batch,
                count_neurons=counting,
                **SIZES,
            ) as session:
                session.feed(list(range(3, 80)))
                session.feed([5, 6, 7], seq=1, want_logits=True)
                used = session.info.n_device_bytes
            n_used = sum(device.scratch_bytes > 0 for device in plan.devices)
            promised = plan.bytes.total - n_used * kernels(model, n_batch)
            # Buffers of a prompt's cold weights are counted as if all of the largest layer's were cold.
            assert promised - plan.bytes.staging - n_used * SLACK < used <= promised


def test_a_large_head_lies_beside_the_layers(tmp_path: Path) -> None:
    """Layers and head are one allocation, which nothing smaller that comes between takes room from."""
    path = write_model(tmp_path / "m.gguf", n_vocab=20_000, ranks=[32] * 3)
    with Model(path) as model:
        settings = Settings(n_batch=16, overhead_bytes=0, group=1, **SIZES)
        whole = engine.compute(model, settings, HOST_RATES)
        plan = make_plan(model, vram_budget=whole.full_bytes / 2**30, settings=settings, rates=HOST_RATES)
        held = plan.bytes.total - plan.bytes.scratch - plan.bytes.staging
        assert plan.head_on_device and plan.bytes.head > held / 2
        with Session(model, plan=plan.native(model), device="host", n_batch=16, **SIZES) as s:
            used = s.info.n_device_bytes
            assert held < used < held + plan.bytes.head / 2
        # Rows of logits take more than the buffers in whose place they are made.
        promised = plan.bytes.total - plan.bytes.staging - kernels(model, 16)
        assert promised - SLACK < used <= promised


def test_tables_of_what_loading_moves(tmp_path: Path) -> None:
    """A driver's tables of the host memory that kernels read: of the file, and of what loading moves, the
    same whether it has been done, and for copies of all weights instead of the file."""
    path = tmp_path / "m.gguf"
    models.write_dense(path, models.SPECS["llama-relu-gqa"])
    settings = Settings(n_batch=16, **SIZES)
    found, moved = [], []
    for load, use_mmap in ((False, True), (True, True), (False, False), (True, False)):
        with Model(path, load=load, use_mmap=use_mmap) as model:
            moved.append(model.info.n_copied_bytes)
            found.append(engine.compute(model, settings, HOST_RATES).full_bytes)
    assert len(set(found)) == 1
    assert moved[0] == 0 and moved[1] > 300 * 512


@pytest.mark.parametrize(
    ("kind", "stride", "readable"),
    [
        (Kind.F16, 4096, True),
        (Kind.F16, 4104, False),  # not 16 bytes at a time
        (Kind.Q8_0, 34 * 3, True),  # in planes: from any even address
        (Kind.Q8_0, 34 * 3 + 1, False),
        (Kind.Q5_0, 22 * 8, False),  # no kernel for its rows of a file
        (Kind.I32, 4096, False),  # no weights
    ],
)
def test_rows_that_kernels_read_in_host_memory(kind: Kind, stride: int, readable: bool) -> None:
    ask = ctypes.CDLL(str(capi.library_path())).pi_space_reads_rows
    ask.argtypes, ask.restype = (ctypes.c_int32, ctypes.c_uint64), ctypes.c_bool
    assert ask(kind, stride) == readable


def prompt_floats(n_tok: int, n_head: int, d: int, n_parts: int) -> int:
    """What prompt_attention_floats (vendor/cuda/prefill_attention.cu) asks for: q in F16, in rows of whole
    64, 128 or 256 values, and of each part its sums."""
    row = next(wide for wide in (64, 128, 256) if wide >= d)
    return n_tok * n_head * (row // 2 + n_parts * (d + PART_BEGIN))


@pytest.mark.parametrize("d", [2, 16, 32, 36, 64, 80, 128, 192, 256])
def test_attention_of_prompts_finds_its_work_space(d: int) -> None:
    """Whatever the chunk's length and the number of a GPU's multiprocessors, which say how many parts share
    positions: as many as find room, and no more than so many in all."""
    for n_batch in (9, 16, 64, 65, 100, 128, 256, 257, 300, 512, 2048, 4096):
        room = attention(n_batch, 3, d)
        for n_tok in {9, 16, 63, 64, 65, 85, 100, 128, 170, 255, 256, 257, n_batch}:
            if n_tok > n_batch:
                continue
            shared = max(PARTS_OF_ONE * TOGETHER // max(n_tok, TOGETHER), 1) if n_tok <= FEW else 0
            assert prompt_floats(n_tok, 3, d, shared) <= room, (n_batch, n_tok)
            splits = 2 * SPLITS if n_tok == 1 else SPLITS
            assert min(n_tok, SMALL_BATCH) * 3 * splits * (d + 2) <= room


def test_constants_of_attention_are_the_kernels() -> None:
    text = (Path(__file__).parents[2] / "vendor/cuda/prompt_attention.cuh").read_text()
    header = (Path(__file__).parents[2] / "vendor/cuda/te_cuda.h").read_text()
    wide = re.search(r"TE_CUDA_WIDE_TOK = (\d+)", header)
    assert wide and int(wide[1]) == TOGETHER
    for line in (
        f"FEW_TOK = {FEW}, MOST_PARTS = {PARTS_OF_ONE}, MOST_ROWS = MOST_PARTS * TE_CUDA_WIDE_TOK",
        f"PART_BEGIN = {PART_BEGIN};",
    ):
        assert line in text, line
