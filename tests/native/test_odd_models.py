"""Models of unusual shape and type that are valid all the same: the engine against the float64 reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from powerinfer._engine.session import Model, Session
from powerinfer.errors import UnsupportedError
from tests import models, reference, rounding
from tests.native.test_bad_models import good

# K and V in F16 round to 2^-11; activations of the block formats to 1/254 of the largest of 32.
TOLERANCE = {"float": 1e-2 if rounding.BF16 else 2e-3, "block": 3e-2}
LLAMA = models.Spec("odd", "llama", n_layer=1, n_embd=64, n_ff=96, n_vocab=270, n_ctx=64)
RELU = replace(LLAMA, act="relu")

SHAPES = {
    "head of 80": replace(LLAMA, n_embd=160, n_head=2, n_head_kv=1, head_dim=80),
    "one kv head": replace(LLAMA, n_layer=2, n_head=8, n_head_kv=1),
    "one head of 2": replace(LLAMA, n_head=1, n_head_kv=1, head_dim=2),
    "heads wider than n_embd": replace(LLAMA, n_embd=32, n_head=4, n_head_kv=2, head_dim=40),
    "n_vocab 3": replace(LLAMA, n_vocab=3),
    "n_ff 1": replace(RELU, n_ff=1),
    "n_ff 32": replace(RELU, n_ff=32),
    "odd sizes": replace(RELU, n_embd=33, n_head=3, n_head_kv=1, head_dim=22, n_ff=37, n_vocab=271),
    "n_embd 2": replace(LLAMA, n_embd=2, n_head=1, n_head_kv=1, n_ff=3),
    "odd bamboo": replace(LLAMA, family="bamboo", act="drelu", n_head_kv=2, n_ff=41),
    "odd falcon": replace(RELU, family="falcon", n_embd=48, n_head=6, n_head_kv=3, n_ff=50, two_norms=True),
    "odd opt": replace(RELU, family="opt", n_embd=36, n_head=2, n_head_kv=2, n_ff=50, tied=True),
}


def without_tokenizer(spec: models.Spec) -> models.Meta:
    return {key: v for key, v in models.metadata(spec).items() if not key.startswith("tokenizer.")}


def write(path: Path, spec: models.Spec, kind: Type | None = None, keys: models.Meta | None = None) -> Path:
    tensors = models.file_tensors(spec, models.draw(spec))
    return models.write(path, without_tokenizer(spec) | (keys or {}), tensors, kind=kind)


def logits(path: Path, ids: list[int], n_batch: int = 512, **options: Any) -> np.ndarray[Any, Any]:
    n_threads = 3 if n_batch == 1 else 2
    with Model(path) as model, Session(model, n_batch=n_batch, n_threads=n_threads, **options) as s:
        s.feed(ids, want_logits=True)
        return np.stack([s.logits(i).copy() for i in range(len(ids))])


def ids_of(spec: models.Spec, n: int = 20) -> list[int]:
    return [int(t) for t in np.random.default_rng(5).integers(0, spec.n_vocab, n)]


@pytest.mark.parametrize("n_batch", [1, 512])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str, n_batch: int, tmp_path: Path) -> None:
    spec = SHAPES[name]
    path = write(tmp_path / "m.gguf", spec)
    expected = reference.forward(reference.load(path), ids_of(spec))
    got = logits(path, ids_of(spec), n_batch)
    assert reference.relative_error(got, expected) < TOLERANCE["float"]
    if spec.relu:
        dense = logits(path, ids_of(spec), n_batch, sparsity="dense")
        assert got.tobytes() == dense.tobytes()


@pytest.mark.parametrize("n_batch", [1, 512])
@pytest.mark.parametrize(
    "kind", [Type.F32, Type.BF16, Type.Q4_0, Type.Q8_0, Type.Q4_1, Type.Q5_0], ids=lambda k: k.name
)
@pytest.mark.parametrize("family", ["llama", "opt", "falcon"])
def test_everything_of_one_type(family: str, kind: Type, n_batch: int, tmp_path: Path) -> None:
    """Embeddings, positions and the fused projection too. A quantised ffn_down stays as it is."""
    spec = replace(RELU, family=family, tied=family == "opt")
    path = write(tmp_path / "m.gguf", spec, kind)
    expected = reference.forward(reference.load(path), ids_of(spec))
    got = logits(path, ids_of(spec), n_batch, sparsity="exact")
    assert (
        reference.relative_error(got, expected)
        < TOLERANCE["float" if kind in (Type.F32, Type.BF16) else "block"]
    )
    assert got.tobytes() == logits(path, ids_of(spec), n_batch, sparsity="dense").tobytes()
    with Model(path) as model:
        assert model.info.can_skip_down == (kind in (Type.F32, Type.BF16))


def k_rows(kind: Type, rows: int, cols: int, seed: int) -> bytes:
    """Random blocks with scales that keep weights near 0.1: gguf reads the K formats, but writes none."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * cols // 256, GGML_QUANT_SIZES[kind][1]), np.uint8)
    scales = slice(0, 4) if kind == Type.Q4_K else slice(-2, None)  # d and dmin, or d
    halves = (rng.uniform(0.5, 1.0, (len(blocks), 2)) * 1e-4).astype(np.float16)
    blocks[:, scales] = halves.view(np.uint8)[:, : len(range(*scales.indices(blocks.shape[1])))]
    return blocks.tobytes()


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q6_K], ids=lambda k: k.name)
def test_k_formats(kind: Type, tmp_path: Path) -> None:
    spec = replace(RELU, n_embd=256, n_ff=256)
    draft = good(spec=spec)
    for seed, (name, one) in enumerate(draft.tensors.items()):
        if len(one.dims) == 2:
            draft.tensors[name] = replace(
                one, data=k_rows(kind, one.dims[1], one.dims[0], seed), kind=kind.value
            )
    path = draft.write(tmp_path / "m.gguf")
    expected = reference.forward(reference.load(path), ids_of(spec))
    for n_batch in (1, 512):
        got = logits(path, ids_of(spec), n_batch, sparsity="exact")
        assert reference.relative_error(got, expected) < TOLERANCE["block"]
        assert got.tobytes() == logits(path, ids_of(spec), n_batch, sparsity="dense").tobytes()


@pytest.mark.parametrize("n_batch", [1, 512])
def test_a_threshold_above_zero(n_batch: int, tmp_path: Path) -> None:
    """FATReLU: what does not exceed the threshold is silent, and counts as such."""
    path = write(tmp_path / "m.gguf", RELU, keys={"powerinfer.hidden_act_threshold": 0.3})
    model, trace = reference.load(path), reference.Trace()
    ids = ids_of(RELU)
    expected = reference.forward(model, ids, trace=trace)
    assert (
        reference.relative_error(
            expected, reference.forward(reference.load(write(tmp_path / "0", RELU)), ids)
        )
        > 0.05
    )
    got = logits(path, ids, n_batch, sparsity="exact")
    assert reference.relative_error(got, expected) < TOLERANCE["float"]
    with Model(path) as m, Session(m) as s:
        for token in ids[:4]:
            s.feed([token])
        gated = trace.layers[0].gated[3].sum()
        assert abs(s.last_step[0].n_active - gated) <= 2  # rounding may decide for a neuron at the threshold


def test_biases_of_a_llama_file(tmp_path: Path) -> None:
    """Some llama files have biases in the attention; they must not be overlooked."""
    tensors = models.file_tensors(LLAMA, models.draw(LLAMA))
    for name, n in (("attn_q", 64), ("attn_k", 64), ("attn_v", 64), ("ffn_down", 64)):
        tensors[f"blk.0.{name}.bias"] = (models.normal(name, n) * 0.5).astype(np.float32)
    path = models.write(tmp_path / "m.gguf", without_tokenizer(LLAMA), tensors)
    expected = reference.forward(reference.load(path), ids_of(LLAMA))
    assert reference.relative_error(logits(path, ids_of(LLAMA)), expected) < TOLERANCE["float"]


def test_a_rope_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    """As llama.cpp takes it: old files have rope.scale_linear, others only a factor."""
    typed: models.Meta = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    ways = (typed, {"llama.rope.scaling.factor": 4.0}, {"llama.rope.scale_linear": 4.0})
    answers = [
        logits(write(tmp_path / str(i), LLAMA, keys=way), ids_of(LLAMA)).tobytes()
        for i, way in enumerate(ways)
    ]
    assert (
        answers[0]
        == answers[1]
        == answers[2]
        != logits(write(tmp_path / "x", LLAMA), ids_of(LLAMA)).tobytes()
    )


@pytest.mark.parametrize("name", ["olmo2", "gemma3"])
def test_without_windows_all_layers_rotate_alike(name: str, tmp_path: Path) -> None:
    """A RoPE of layers with a window is theirs only where there is a window."""
    spec = models.SPECS[name]
    keys = {key: value for key, value in without_tokenizer(spec).items() if "sliding_window" not in key}
    keys |= {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": 4.0}
    path = models.write(tmp_path / "m.gguf", keys, models.file_tensors(spec, models.draw(spec)))
    expected = reference.forward(reference.load(path), ids_of(spec))
    assert reference.relative_error(logits(path, ids_of(spec), 1), expected) < TOLERANCE["float"]


def test_embeddings_per_layer_wider_than_the_model(tmp_path: Path) -> None:
    """Products of them have more columns than any other."""
    spec = replace(models.SPECS["gemma4"], n_embd_layer=1024)
    path = write(tmp_path / "m.gguf", spec)
    expected = reference.forward(reference.load(path), ids_of(spec))
    assert reference.relative_error(logits(path, ids_of(spec), 1), expected) < TOLERANCE["float"]


def test_embeddings_per_layer_that_are_no_whole_blocks(tmp_path: Path) -> None:
    spec = replace(models.SPECS["gemma4"], n_embd_layer=16)
    with pytest.raises(UnsupportedError, match=r"16 values of each layer in blocks of 32 \(Q8_0\)"):
        Model(write(tmp_path / "m.gguf", spec, Type.Q8_0))
