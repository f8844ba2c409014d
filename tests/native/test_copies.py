"""Weights in memory of the model's own: copied (use_mmap=False), transposed, predictors in another format."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from powerinfer._engine.file import ModelFile
from powerinfer._engine.session import Model, Session
from powerinfer.errors import ArgumentError, OutOfMemoryError, UnsupportedError
from powerinfer.models.plan import Rates, make_plan
from powerinfer.models.quantize import choose_types, quantize_model
from tests import models
from tests.native.test_bad_models import good

WIDE = models.Spec(
    "wide", "llama", n_embd=256, n_ff=512, n_vocab=270, n_ctx=64, act="relu", predictor=(64, 32)
)
FAMILIES = {
    "llama": WIDE,
    "bamboo": replace(WIDE, family="bamboo", act="drelu"),
    "falcon": replace(WIDE, family="falcon", n_head_kv=1, two_norms=True),
    "opt": replace(WIDE, family="opt", tied=True),
    "qwen2": replace(WIDE, family="qwen2", act="silu", tied=True, predictor=()),
}
RATES = Rates(gpu_bytes_per_s=8e9, cpu_bytes_per_s=1e9, handover_us=5, layer_us=0, ffn_us=0)
BIG = replace(
    WIDE, name="big", n_embd=768, n_head=8, n_head_kv=8, n_ff=4096, n_layer=3, predictor=(64, 64, 64)
)


def write(path: Path, spec: models.Spec, kind: Type | None = None, sparse: bool = False) -> Path:
    if sparse:
        return models.write_sparse(path, spec, models.draw_predictor(spec), 0.0, kind=kind)
    return models.write_dense(path, spec, kind=kind)


def answers(model: Model, n_threads: int = 2) -> dict[str, Any]:
    """Logits, bytes and counts in every mode, of single tokens and of prompts."""
    out: dict[str, Any] = {}
    modes = ["dense"] + ["exact"] * (model.info.activation != "silu")
    modes += ["predicted"] * model.info.has_predictor
    for mode in modes:
        with Session(model, sparsity=mode, n_threads=n_threads, mask_prompts=True) as session:  # type: ignore[arg-type]
            for n in (1, 3, 40):
                session.drop()
                session.feed([(7 * i + 3) % 250 for i in range(n)], want_logits=True)
                rows = [session.logits(i).tobytes() for i in range(n)]
                counts = [(s.n_rows, s.ffn_bytes, s.bytes, s.n_predicted) for s in session.last_step]
                out[f"{mode} {n}"] = rows, counts, session.last_total.bytes
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sparse", [False, True], ids=["gguf", "powerinfer"])
@pytest.mark.parametrize("kind", [None, Type.F32, Type.BF16, Type.Q8_0, Type.Q4_0], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_copied_and_mapped_weights_give_the_same_bits(
    family: str, kind: Type | None, sparse: bool, tmp_path: Path
) -> None:
    spec = FAMILIES[family]
    if sparse and not spec.predictor:
        pytest.skip("no sparse twin")
    path = write(tmp_path / "m.gguf", spec, kind, sparse)
    with Model(path) as mapped, Model(path, use_mmap=False) as copied:
        expected, got = answers(mapped), answers(copied)
        for name, value in expected.items():
            assert got[name] == value, name
        # Each allocation may be rounded up to cache lines, and vectors stay apart.
        n_weights = mapped.info.n_weight_bytes
        assert 0.9 * n_weights < copied.info.n_copied_bytes < n_weights + 2048
        assert mapped.info.n_copied_bytes == mapped.info.n_transposed_bytes == copied.info.n_transposed_bytes
        assert mapped.info.n_layer_down_transposed == copied.info.n_layer_down_transposed
        assert mapped.info.can_skip_down == copied.info.can_skip_down


def test_sign_predictors_do_not_depend_on_where_weights_lie(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", WIDE)
    with Model(path, predictor="sign") as mapped, Model(path, predictor="sign", use_mmap=False) as copied:
        assert answers(copied) == answers(mapped)
        assert copied.info.n_sign_bytes == mapped.info.n_sign_bytes > 0


def test_a_split_file(tmp_path: Path) -> None:
    whole = write(tmp_path / "m.gguf", WIDE)
    meta = models.metadata(WIDE)
    writer = GGUFWriter(tmp_path / "s.gguf", "llama", split_max_tensors=7)
    for key, value in meta.items():
        if key != "general.architecture":
            add = {
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                str: writer.add_string,
            }
            add.get(type(value), writer.add_array)(key, value)  # type: ignore[operator]
    for name, tensor in models.file_tensors(WIDE, models.draw(WIDE)).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part = min(tmp_path.glob("s-00001-of-*.gguf"))
    with Model(whole) as mapped, Model(part, use_mmap=False) as copied:
        assert copied.file.info.n_parts > 2
        assert answers(copied) == answers(mapped)


def test_plans_do_not_depend_on_where_weights_lie(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", BIG, sparse=True)
    with Model(path) as mapped, Model(path, use_mmap=False) as copied:
        one, other = (
            make_plan(m, vram_budget=0.06, rates=RATES, n_batch=16, overhead_bytes=0)
            for m in (mapped, copied)
        )
        assert one.to_json() == other.to_json()


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_a_predictor_is_rewritten_as_quantize_writes_it(kind: str, use_mmap: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", WIDE, sparse=True)
    with ModelFile(path) as file:
        changes = choose_types(file, "F16", predictor_type=kind)
        quantize_model(file, tmp_path / "q.gguf", "F16", changes)
    with Model(tmp_path / "q.gguf") as written, Model(path, predictor_type=kind, use_mmap=use_mmap) as loaded:
        assert answers(loaded) == answers(written)
        assert loaded.info.n_copied_bytes > 0
        with Model(path) as other:
            as_it_is, rewritten = answers(other), answers(loaded)
    assert as_it_is["dense 40"] == rewritten["dense 40"]
    assert as_it_is["predicted 40"] != rewritten["predicted 40"]


def test_predictor_types_that_cannot_be(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", WIDE, sparse=True)
    with pytest.raises(ArgumentError, match="nosuch"):
        Model(path, predictor_type="nosuch")
    with pytest.raises(UnsupportedError, match="IQ2_XXS"):
        Model(path, predictor_type="IQ2_XXS")
    with pytest.raises(ArgumentError, match=r"rank 64, width 256.*Q4_K.*256"):
        Model(path, predictor_type="Q4_K")
    with pytest.raises(ArgumentError, match=r"Q8_0.*no fc1"):
        Model(write(tmp_path / "d.gguf", WIDE), predictor_type="Q8_0")


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    gc.collect()
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


def mapped_file_bytes(path: Path) -> int:
    """Memory of this process that shows this file."""
    with open("/proc/self/smaps") as file:
        lines, inside, total = list(file), False, 0
    for line in lines:
        if "-" in line.split()[0]:
            inside = line.rstrip().endswith(path.name)
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def memory_of_copies(path: Path) -> tuple[int, list[int], int]:
    """Bytes that are copied of a model; what the process' own memory grew by while it was open, after it,
    and after a load that stopped halfway; the file's memory that was mapped beside the copies."""
    Model(path, use_mmap=False).close()  # allocators have what they keep
    before = anonymous_bytes()
    model = Model(path, use_mmap=False)
    n_copied, found, mapped = model.info.n_copied_bytes, [anonymous_bytes()], mapped_file_bytes(path)
    model.close()
    found.append(anonymous_bytes())

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model(path, use_mmap=False, progress=stop)
    found.append(anonymous_bytes())
    return n_copied, [n - before for n in found], mapped


def test_copies_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "big.gguf", BIG)
    # AddressSanitizer, where it is there, holds what was freed to see later uses of it.
    at_once = ":quarantine_size_mb=0:thread_local_quarantine_size_kb=0"
    monkeypatch.setenv("ASAN_OPTIONS", os.environ.get("ASAN_OPTIONS", "") + at_once)
    # A process of its own: what other tests left, and when it is given back, is not counted.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        n_copied, (opened, closed, stopped), mapped = process.submit(memory_of_copies, path).result()
    assert n_copied > 32 << 20
    assert opened > 0.95 * n_copied
    assert mapped < n_copied // 4  # what was copied is not held a second time
    assert closed < n_copied // 8
    assert stopped < n_copied // 8


def test_progress_and_locked_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", WIDE, sparse=True)
    seen: list[tuple[int, int]] = []
    with Model(path, use_mmap=False, progress=lambda *at: seen.append(at)):
        assert seen == [(1, 2), (2, 2)]
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    code = (
        "import resource, sys; from powerinfer._engine.session import Model\n"
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]), {hard}))\n"
        "Model(sys.argv[1], use_mmap=False, use_mlock=True)\n"
        "locked = next(line for line in open('/proc/self/status') if line.startswith('VmLck'))\n"
        "print(int(locked.split()[1]) * 1024)\n"
    )
    enough = hard if hard != resource.RLIM_INFINITY else 64 << 20
    if soft == resource.RLIM_INFINITY or soft > 8 << 20:
        done = subprocess.run([sys.executable, "-c", code, path, str(enough)], capture_output=True, text=True)
        assert int(done.stdout) > 0.9 * path.stat().st_size, done.stderr


def test_more_than_there_is_memory(tmp_path: Path) -> None:
    """A file of holes, larger than any memory: refused before the first copy, with the figures."""
    spec = replace(
        WIDE, n_layer=1, n_embd=1 << 16, n_head=1, n_head_kv=1, head_dim=2, n_ff=1, n_vocab=3, tied=True
    )
    draft = good(spec=replace(spec, predictor=()))
    small = draft.tensors.pop("token_embd.weight")
    draft.tensors["token_embd.weight"] = replace(small, dims=(spec.n_embd, 1 << 24))
    path = draft.write(tmp_path / "holes.gguf")
    try:
        os.truncate(path, path.stat().st_size + (2 << 16 << 24))
    except OSError as error:
        pytest.skip(f"no files of holes here: {error}")
    with Model(path) as model:
        assert model.info.n_vocab == 1 << 24
    with pytest.raises(OutOfMemoryError, match=r"loading takes 2048\.\d\d GiB.*use_mmap"):
        Model(path, use_mmap=False)
