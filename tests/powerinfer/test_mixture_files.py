"""Files of mixtures in all that makes and measures models: formats, adapters, parts, perplexity."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from powerinfer import UnsupportedError
from powerinfer._engine.file import ModelFile, TensorInfo
from powerinfer._engine.lora import add_adapters
from powerinfer._engine.session import Model, Session
from powerinfer.bench.setup import expert_bytes
from powerinfer.cli import main
from powerinfer.models.perplexity import perplexity
from powerinfer.models.quantize import MIXTURES, choose_types, quantize_model
from tests import models, reference
from tests.native import test_mixtures

TOKENS = (np.arange(3, 43) * 17 % 291).astype(np.int32)
NAMES = ("mixtral", "qwen2moe", "qwen3moe", "olmoe")

# What llama.cpp gives the matrices of a mixture of eight experts of 32 layers (src/llama-quant.cpp) in the
# first layer, where that is not the format of most.
EIGHT = {
    "Q2_K": {"attn_output": "Q5_K", "ffn_down_exps": "Q3_K"},
    "Q3_K_S": {"attn_output": "Q5_K"},
    "Q3_K_M": {"attn_output": "Q5_K", "ffn_down_exps": "Q5_K"},
    "Q3_K_L": {"ffn_down_exps": "Q5_K"},
    "Q4_0": {},
    "Q4_K_S": {"attn_output": "Q5_K", "ffn_down_exps": "Q5_K"},
    "Q4_K_M": {"attn_output": "Q5_K", "ffn_down_exps": "Q6_K"},
    "Q5_K_M": {"ffn_down_exps": "Q6_K"},
    "IQ4_NL": {"attn_output": "Q5_K", "ffn_down_exps": "Q5_K"},
    "Q6_K": {},
}


def dense(folder: Path, name: str, spec: models.Spec | None = None) -> Path:
    return models.write_dense(folder / f"{name}.gguf", spec or models.SPECS[name])


@pytest.mark.parametrize("mixture", EIGHT)
def test_formats_of_eight_experts_are_llama_cpp_s(mixture: str) -> None:
    shapes = {
        "attn_q": (4096, 4096),
        "attn_k": (1024, 4096),
        "attn_v": (1024, 4096),
        "attn_output": (4096, 4096),
        "ffn_gate_inp": (8, 4096),
        "ffn_gate_exps": (8, 14336, 4096),
        "ffn_up_exps": (8, 14336, 4096),
        "ffn_down_exps": (8, 4096, 14336),
    }
    tensors = [
        TensorInfo(name=f"blk.0.{name}.weight", type="F16", shape=shape, n_bytes=2 * math.prod(shape))
        for name, shape in shapes.items()
    ]
    metadata = {"general.architecture": "llama", "llama.block_count": 32, "llama.expert_count": 8}
    metadata |= {"llama.attention.head_count": 32, "llama.attention.head_count_kv": 8}
    source: Any = SimpleNamespace(path="x", tensors=tensors, metadata=metadata)
    most = MIXTURES[mixture][1]
    expected = dict.fromkeys(shapes, most) | {"attn_k": "Q8_0", "attn_v": "Q8_0", "ffn_gate_inp": "F16"}
    expected |= EIGHT[mixture]
    found = {c.tensor.name.split(".")[2]: c.type for c in choose_types(source, mixture)}
    assert found == expected
    pure = {c.tensor.name.split(".")[2]: c.type for c in choose_types(source, mixture, pure=True)}
    assert pure == dict.fromkeys(shapes, most) | {"ffn_gate_inp": "F16"}


def test_shared_experts_have_the_formats_of_experts() -> None:
    shapes = {"ffn_gate_shexp": (512, 256), "ffn_down_shexp": (256, 512), "ffn_gate_inp_shexp": (256,)}
    tensors = [
        TensorInfo(name=f"blk.0.{name}.weight", type="F32", shape=shape, n_bytes=4 * math.prod(shape))
        for name, shape in shapes.items()
    ]
    metadata = {"general.architecture": "qwen2moe", "qwen2moe.block_count": 24, "qwen2moe.expert_count": 60}
    source: Any = SimpleNamespace(path="x", tensors=tensors, metadata=metadata)
    assert [c.type for c in choose_types(source, "Q4_K_M")] == ["Q4_K", "Q6_K", "F32"]


@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q2_K", "MXFP4_MOE"])
def test_experts_in_tensors_of_their_own_are_treated_as_stacked_ones(mixture: str, tmp_path: Path) -> None:
    """As files of the first converters have them: formats, and the bytes that a token reads."""
    path = test_mixtures.write(tmp_path / "m.gguf", "mixtral")
    found, n_bytes = [], []
    for how in ("same", "separate"):
        other = test_mixtures.stored_otherwise(path, how)
        with ModelFile(other) as file:
            chosen = choose_types(file, mixture)
        found.append({re.sub(r"_exps|\.\d+(?=\.weight)", "", c.tensor.name): c.type for c in chosen})
        with Model(other) as model:
            n_bytes.append(expert_bytes(model))
    assert found[0] == found[1] and n_bytes[0] == n_bytes[1] > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q5_K_M", "Q6_K", "Q3_K_M", "IQ4_NL", "Q8_0", "Q4_0", "BF16"])
def test_a_quantised_mixture_runs(
    name: str, mixture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of 64, 96 and 160 are no multiples of 256: other formats take their place, which is said. The
    engine's logits are those of the reference on the same file."""
    path, out = dense(tmp_path, name), tmp_path / "out.gguf"
    assert main(["quantize", str(path), str(out), mixture]) == 0
    other = {"Q4_K_M": ("Q4_K", "Q5_0"), "Q5_K_M": ("Q5_K", "Q5_1"), "Q3_K_M": ("Q3_K", "Q4_0")}
    wanted, instead = other.get(mixture, ("", ""))
    said = " ".join(capsys.readouterr().out.split())
    assert not instead or f"{instead} instead of {wanted}" in said
    with ModelFile(out) as file:
        kinds = {t.name: t.type for t in file.tensors}
    assert {kind for tensor, kind in kinds.items() if "ffn_gate_inp" in tensor} == {"F32"}
    expected = reference.forward(reference.load(out), TOKENS)
    with Model(out) as model, Session(model, n_threads=2, type_k="f32", type_v="f32") as session:
        rows = []
        for token in TOKENS:
            session.feed([int(token)])
            rows.append(session.logits().copy())
    # These models' experts stand far apart, so that activations rounded to 8 bits choose the same.
    assert reference.relative_error(np.stack(rows), expected) < (1e-4 if mixture == "BF16" else 3e-2)


def test_pieces_of_a_stack_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dense(tmp_path, "mixtral")
    with ModelFile(path) as source:
        changes = choose_types(source, "Q4_0")
        quantize_model(source, tmp_path / "a.gguf", "Q4_0", changes, n_threads=1)
        monkeypatch.setattr("powerinfer.models.rewrite.PIECE_BYTES", 5000)
        quantize_model(source, tmp_path / "b.gguf", "Q4_0", changes, n_threads=3)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


# ---- adapters


def adapter(path: Path, spec: models.Spec, shapes: dict[str, tuple[int, int]], rank: int = 3) -> Path:
    random, pairs = np.random.default_rng(5), {}
    for name, (rows, cols) in shapes.items():
        pairs[f"{name}.lora_a"] = random.normal(0, cols**-0.5, (rank, cols)).astype(np.float32)
        pairs[f"{name}.lora_b"] = random.normal(0, 0.3, (rows, rank)).astype(np.float32)
    meta = {"general.architecture": spec.arch, "general.type": "adapter", "adapter.type": "lora"}
    return models.write(path, meta | {"adapter.lora.alpha": float(rank)}, pairs)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_of_attention_work(name: str, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    path = dense(tmp_path, name)
    before = reference.load(path)
    shapes = {
        f"blk.{i}.attn_{part}.weight": before[f"blk.{i}.attn_{part}.weight"].shape
        for i in range(spec.n_layer)
        for part in ("q", "k", "v", "output")
    }
    file = adapter(tmp_path / "lora.gguf", spec, shapes)
    pairs = reference.load(file)
    tensors = dict(before.tensors)
    for key in shapes:
        tensors[key] = tensors[key] + pairs[f"{key}.lora_b"] @ pairs[f"{key}.lora_a"]
    expected = reference.forward(reference.Model(before.meta, tensors, before.sparse), TOKENS)
    with Model(path) as model:
        assert add_adapters(model, [(file, 1.0)]) is None
        with Session(model, n_threads=2, type_k="f32", type_v="f32") as session:
            rows = []
            for token in TOKENS:
                session.feed([int(token)])
                rows.append(session.logits().copy())
    assert reference.relative_error(np.stack(rows), expected) < 1e-4
    assert reference.relative_error(expected, reference.forward(before, TOKENS)) > 0.05


@pytest.mark.parametrize("tensor", ["ffn_up_exps", "ffn_gate_inp", "ffn_down_shexp"])
def test_adapters_of_experts_are_refused_by_name(tensor: str, tmp_path: Path) -> None:
    spec = models.SPECS["qwen2moe"]
    path = dense(tmp_path, "qwen2moe")
    with Model(path) as model:
        rows, cols = reference.load(path)[f"blk.0.{tensor}.weight"].shape[-2:]
        file = adapter(tmp_path / "lora.gguf", spec, {f"blk.0.{tensor}.weight": (rows, cols)})
        with pytest.raises(UnsupportedError, match=rf"blk\.0\.{tensor}\.weight"):
            add_adapters(model, [(file, 1.0)])


def test_stacked_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them: one more dimension."""
    spec = models.SPECS["mixtral"]
    name = "blk.1.ffn_gate_exps.weight"
    pairs = {
        f"{name}.lora_a": np.ones((spec.n_expert, 2, spec.n_embd), np.float32),
        f"{name}.lora_b": np.ones((spec.n_expert, spec.n_ff, 2), np.float32),
    }
    meta = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    file = models.write(tmp_path / "lora.gguf", meta, pairs)
    with (
        Model(dense(tmp_path, "mixtral")) as model,
        pytest.raises(
            UnsupportedError, match=r"blk\.1\.ffn_gate_exps\.weight: adapters of a mixture's experts"
        ),
    ):
        add_adapters(model, [(file, 1.0)])


# ---- parts, and what is measured


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe"])
def test_a_split_mixture_is_the_same_model(name: str, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    whole = dense(tmp_path, name)
    tensors = models.file_tensors(spec, models.draw(spec))
    models.write(tmp_path / "part.gguf", models.metadata(spec), tensors, split=7)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) == -(-len(tensors) // 7)
    logits = []
    for path in (whole, parts[0]):
        with Model(path) as model, Session(model, n_threads=1) as session:
            session.feed(TOKENS)
            logits.append(session.logits().copy())
    assert np.array_equal(*logits)
    assert main(["quantize", str(parts[0]), str(tmp_path / "q.gguf"), "Q8_0"]) == 0
    with Model(tmp_path / "q.gguf") as model:
        assert model.info.n_expert == spec.n_expert


@pytest.mark.parametrize("name", NAMES)
def test_perplexity_is_that_of_the_reference(name: str, tmp_path: Path) -> None:
    path = dense(tmp_path, name)
    with Model(path) as model, Session(model, n_threads=1, n_ctx=20) as session:
        found = perplexity(session, TOKENS, n_ctx=20)
    source, losses = reference.load(path), []
    for at in range(0, len(TOKENS) - 19, 20):
        window = TOKENS[at : at + 20]
        logits = reference.forward(source, window)
        logp = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        logp -= logits.max(axis=1, keepdims=True)
        losses += [-logp[i, window[i + 1]] for i in range(10, 19)]
    assert math.log(found.value) == pytest.approx(np.mean(losses), rel=2e-3)
    assert found.ffn_rows == 1  # of those of the experts that a token uses


def test_what_info_says_of_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = replace(models.SPECS["mixtral"], n_layer=1)
    path = dense(tmp_path, "one", spec)
    assert main(["info", str(path)]) == 0
    out = capsys.readouterr().out
    n = sum(math.prod(value.shape) for value in models.file_tensors(spec, models.draw(spec)).values())
    assert f"{n / 1e6:,.1f} M parameters" in out and "8, of which a token uses 2" in out
