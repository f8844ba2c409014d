"""Adapters: the answers of a model whose weights were changed, and what files may not say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer import ArgumentError, FormatError, Llama, LlamaRAMCache, UnsupportedError
from powerinfer._engine.session import Model, Session
from tests import models, reference

OpenLlama = Callable[..., Llama]
PROMPT = [1, 17, 260, 43, 291, 300, 8, 5, 90, 11]
ATTENTION = ["attn_q", "attn_k", "attn_v", "attn_output"]
FFN = ["ffn_gate", "ffn_up", "ffn_down"]
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


def draw(spec: models.Spec, names: list[str], rank: int) -> dict[str, np.ndarray]:
    """Pairs for these matrices of all layers, large enough to change what a model says."""
    random = np.random.default_rng(7)
    shapes = {name: value.shape for name, value in models.file_tensors(spec, models.draw(spec)).items()}
    pairs = {}
    for layer in range(spec.n_layer):
        for name in names:
            base = f"blk.{layer}.{name}.weight"
            rows, cols = shapes[base]
            pairs[base + ".lora_a"] = random.normal(0, cols**-0.5, (rank, cols)).astype(np.float32)
            pairs[base + ".lora_b"] = random.normal(0, 0.5, (rows, rank)).astype(np.float32)
    return pairs


def draw_own(spec: models.Spec, names: list[str], rank: int) -> dict[str, np.ndarray]:
    """Pairs for the embedding, as llama.cpp's converter stores them (A turned), and the output matrix."""
    random = np.random.default_rng(9)
    pairs = {}
    for name in names:
        a = random.normal(0, 1, (rank, spec.n_embd) if name == OUTPUT else (spec.n_vocab, rank))
        b = random.normal(0, 0.3, (spec.n_vocab if name == OUTPUT else spec.n_embd, rank))
        pairs |= {name + ".lora_a": a.astype(np.float32), name + ".lora_b": b.astype(np.float32)}
    return pairs


def write(path: Path, spec: models.Spec, pairs: dict[str, np.ndarray], **changes: Any) -> Path:
    meta = {
        "general.architecture": spec.arch,
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 6.0,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return models.write(path, {k: v for k, v in meta.items() if v is not None}, pairs)


def merged(path: Path, spec: models.Spec, pairs: dict[str, np.ndarray], scale: float) -> Path:
    """A model whose weights are changed in float32 instead."""
    tensors = {name: np.array(value) for name, value in models.file_tensors(spec, models.draw(spec)).items()}
    for name in {name.rsplit(".", 1)[0] for name in pairs}:
        added = pairs[name + ".lora_b"].astype(np.float64) @ pairs[name + ".lora_a"]
        tensors[name] = (tensors[name].astype(np.float64) + scale * added).astype(np.float32)
    return models.write(path, models.metadata(spec), tensors)


def logits(llm: Llama, chunks: list[list[int]]) -> np.ndarray:
    llm.reset()
    for chunk in chunks:
        llm.eval(chunk)
    return llm.scores.copy()


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["llama-relu", "qwen2", "opt", "falcon-7b", "falcon-40b"])
@pytest.mark.parametrize("rank", [1, 3, 40])
def test_against_changed_weights(llama: OpenLlama, tmp_path: Path, name: str, rank: int) -> None:
    spec = models.SPECS[name]
    attention = ["attn_qkv", "attn_output"] if spec.family == "falcon" else ATTENTION
    pairs = draw(spec, attention + (FFN if spec.family in ("llama", "qwen2") else FFN[1:]), rank)
    base = models.write_dense(tmp_path / "base.gguf", spec)
    adapter = write(tmp_path / "lora.gguf", spec, pairs)
    other = merged(tmp_path / "merged.gguf", spec, pairs, 0.5 * 6.0 / rank)
    for n_threads in (1, 2):
        options: dict[str, Any] = {"logits_all": True, "n_threads": n_threads}
        adapted = llama(base, lora_path=adapter, lora_scale=0.5, **options)
        reference, plain = llama(other, **options), llama(base, **options)
        for chunks in ([PROMPT], [[token] for token in PROMPT]):
            expected, shown = logits(reference, chunks), logits(adapted, chunks)
            change = expected - logits(plain, chunks)
            # One token: float32 in another order. A prompt: where kernels take weights and
            # activations of 8 bits, an error of 2^-9 in each of some dozen products on the way.
            assert rms(shown - expected) < (1e-3 if len(chunks) > 1 else 0.05) * rms(change)
            assert rms(change) > 0.3


def test_several_at_once(llama: OpenLlama, tmp_path: Path) -> None:
    """Of different ranks and scales, of the same matrices and of others, the embedding among them."""
    spec = models.SPECS["llama-relu"]
    first = draw(spec, ["attn_q", "attn_v"], 3) | draw_own(spec, [EMBEDDING], 2)
    second = {name: value + 0.25 for name, value in draw(spec, ["attn_v", "ffn_up"], 5).items()}
    second |= {name: 2 * value for name, value in draw_own(spec, [EMBEDDING], 2).items()}
    base = models.write_dense(tmp_path / "base.gguf", spec)
    files = [
        write(tmp_path / f"{i}.gguf", spec, p, adapter__lora__alpha=0.0)
        for i, p in enumerate((first, second))
    ]
    tensors = {name: np.array(value) for name, value in models.file_tensors(spec, models.draw(spec)).items()}
    for pairs, scale in ((first, 0.5), (second, -0.75)):
        for name in {name.rsplit(".", 1)[0] for name in pairs}:
            a, b = (pairs[name + part].astype(np.float64) for part in (".lora_a", ".lora_b"))
            added = a @ b.T if name == EMBEDDING else b @ a
            tensors[name] = (tensors[name] + scale * added).astype(np.float32)
    other = models.write(tmp_path / "merged.gguf", models.metadata(spec), tensors)
    options: dict[str, Any] = {"logits_all": True, "n_threads": 1}
    chunks = [[token] for token in PROMPT]
    expected = logits(llama(other, **options), chunks)
    shown = logits(llama(base, lora_path=files, lora_scale=[0.5, -0.75], **options), chunks)
    change = expected - logits(llama(base, **options), chunks)
    assert rms(shown - expected) < 1e-3 * rms(change) and rms(change) > 0.3
    with pytest.raises(ArgumentError, match="2 paths in lora_path and 1 in lora_scale"):
        llama(base, lora_path=files, lora_scale=[0.5])


@pytest.mark.parametrize("name", ["llama-relu", "qwen2", "opt", "falcon-7b"])
@pytest.mark.parametrize(
    "names", [[EMBEDDING], [OUTPUT], [EMBEDDING, OUTPUT]], ids=["embd", "output", "both"]
)
def test_embedding_and_output(llama: OpenLlama, tmp_path: Path, name: str, names: list[str]) -> None:
    """In float64: row t of A, times B, is added to the embedding of token t. A tied output matrix stays."""
    spec = models.SPECS[name]
    base = models.write_dense(tmp_path / "base.gguf", spec)
    model = reference.load(base)
    if model.get(OUTPUT) is None and OUTPUT in names:
        with pytest.raises(FormatError, match="does not have"):
            llama(base, lora_path=write(tmp_path / "lora.gguf", spec, draw_own(spec, names, 3)))
        return
    pairs = draw_own(spec, names, 3)
    tensors = {OUTPUT: model[EMBEDDING], **model.tensors}
    for which in names:
        a, b = (pairs[which + part].astype(np.float64) for part in (".lora_a", ".lora_b"))
        tensors[which] = tensors[which] + 0.5 * 6.0 / 3 * (a @ b.T if which == EMBEDDING else b @ a)
    expected = reference.forward(reference.Model(model.meta, tensors, model.sparse), np.array(PROMPT))
    adapter = write(tmp_path / "lora.gguf", spec, pairs)
    places: list[dict[str, Any]] = [
        {"n_threads": 1},
        {"n_threads": 2},
        {"vram_budget": 1, "devices": ["host"]},
    ]
    for place in places:
        llm = llama(base, lora_path=adapter, lora_scale=0.5, logits_all=True, **place)
        assert reference.relative_error(logits(llm, [[token] for token in PROMPT]), expected) < 1e-3
        assert reference.relative_error(logits(llm, [PROMPT]), expected) < 2e-2


def test_modes(
    llama: OpenLlama, tmp_path: Path, sparse_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of the feed-forward: no predictors any more, and exact and dense give the same bits. Of attention:
    nothing changes."""
    spec = models.SPECS["llama-relu"]
    ffn = write(tmp_path / "ffn.gguf", spec, draw(spec, FFN, 4))
    rows = {}
    for sparsity in ("auto", "exact", "dense"):
        llm = llama(sparse_path, lora_path=ffn, sparsity=sparsity, logits_all=True)
        assert llm.info().sparsity == ("exact" if sparsity == "auto" else sparsity)
        rows[sparsity] = np.concatenate([logits(llm, [PROMPT]), logits(llm, [[token] for token in PROMPT])])
    assert np.array_equal(rows["exact"], rows["dense"]) and np.array_equal(rows["auto"], rows["exact"])
    with pytest.raises(ArgumentError, match="no longer fit"):
        llama(sparse_path, lora_path=ffn, sparsity="predicted")
    with pytest.raises(ArgumentError, match="no longer fit"):
        llm.set_sparsity("predicted")
    capfd.readouterr()
    llama(sparse_path, lora_path=ffn, verbose=True)
    assert "no longer fit" in capfd.readouterr().err
    attention = write(tmp_path / "attention.gguf", spec, draw(spec, ATTENTION, 4))
    assert llama(sparse_path, lora_path=attention).info().sparsity == "predicted"


def test_the_same_bits_again(llama: OpenLlama, tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    adapter = write(tmp_path / "lora.gguf", spec, draw(spec, ATTENTION + FFN, 4))
    options: dict[str, Any] = {"lora_path": adapter, "logits_all": True, "n_threads": 2}
    first = logits(llama(**options), [PROMPT])
    for _ in range(3):
        assert np.array_equal(logits(llama(**options), [PROMPT]), first)


def test_states_of_another_strength(llama: OpenLlama, tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    adapter = write(tmp_path / "lora.gguf", spec, draw(spec, ATTENTION, 4))
    cache = LlamaRAMCache()
    with_it = {"lora_path": adapter}
    for n_reused, options in (
        (0, {}),
        (0, with_it),
        (0, {**with_it, "lora_scale": 0.5}),
        (9, {}),
        (9, with_it),
    ):
        llm = llama(**options)
        llm.set_cache(cache)
        llm(PROMPT, max_tokens=2)
        assert llm.timings.n_reused == n_reused


def test_files_that_are_refused(llama: OpenLlama, tmp_path: Path, relu_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    good = draw(spec, ["attn_q"], 2)
    a, b = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
    nan = good[a].copy()
    nan[0, 0] = np.nan
    one = {"blk.0.ffn_norm.weight": np.ones(64, np.float32)}
    cases: list[tuple[Any, str, dict[str, np.ndarray], dict[str, Any]]] = [
        (FormatError, "no LoRA", good, {"general__type": "model"}),
        (FormatError, "no LoRA", good, {"adapter__type": "other"}),
        (FormatError, "qwen2", good, {"general__architecture": "qwen2"}),
        (FormatError, "alpha", good, {"adapter__lora__alpha": float("nan")}),
        (FormatError, "shapes", {**good, a: good[a][:, :-1]}, {}),
        (FormatError, "shapes", {**good, b: good[b][:-1]}, {}),
        (FormatError, "no numbers", {**good, a: nan}, {}),
        (FormatError, "too large", {**good, a: good[a] * 1e38}, {"adapter__lora__alpha": 1e6}),
        (FormatError, "blk.7.attn_q", {name.replace("blk.1", "blk.7"): v for name, v in good.items()}, {}),
        (UnsupportedError, "no part of a LoRA pair", {a: good[a]}, {}),
        (UnsupportedError, "no part of a LoRA pair", {**good, **one}, {}),
        (
            FormatError,
            "output.weight has shapes",
            {f"output.weight.lora_{k[-1]}": good[k] for k in (a, b)},
            {},
        ),
        (FormatError, "shapes", {name: v.T.copy() for name, v in draw_own(spec, [EMBEDDING], 2).items()}, {}),
        (
            UnsupportedError,
            "position_embd",
            {f"position_embd.weight.lora_{k[-1]}": good[k] for k in (a, b)},
            {},
        ),
        (UnsupportedError, "activated", good, {"adapter__alora__invocation_tokens": [1, 2]}),
    ]
    for i, (kind, message, pairs, changes) in enumerate(cases):
        path = write(tmp_path / f"{i}.gguf", spec, pairs, **changes)
        with pytest.raises(kind, match=message):
            llama(lora_path=path)
    with pytest.raises(ArgumentError, match="lora_scale"):
        llama(lora_path=write(tmp_path / "good.gguf", spec, good), lora_scale=float("inf"))
    with pytest.raises(FormatError, match="no LoRA"):
        llama(lora_path=relu_path)
    llama(lora_path=write(tmp_path / "noalpha.gguf", spec, good, adapter__lora__alpha=None))


def test_the_engine_checks_too(relu_path: Path) -> None:
    model = Model(relu_path)
    a, b = np.ones((2, 64), np.float32), np.ones((64, 2), np.float32)
    name = "blk.0.attn_q.weight"
    for bad in ("blk.0.attn_q.weigh", "blk.9.attn_q.weight", "attn_q.weight", "output_norm.weight"):
        with pytest.raises((ArgumentError, UnsupportedError)):
            model.add_adapter(bad, a, b)
    for first, second in ((a[:, :5], b), (a, b[:5]), (a[:1], b), (a[0], b), (a[:0], b[:, :0])):
        with pytest.raises(ArgumentError):
            model.add_adapter(name, first, second)
    model.add_adapter(name, a, b)
    with pytest.raises(ArgumentError, match="already"):
        model.add_adapter(name, a, b)
    with Session(model), pytest.raises(ArgumentError, match="sessions"):
        model.add_adapter("blk.1.attn_q.weight", a, b)
    with pytest.raises(ArgumentError, match="loaded"):
        Model(relu_path, load=False).add_adapter(name, a, b)


@pytest.mark.parametrize("names", [ATTENTION, FFN], ids=["attention", "ffn"])
def test_devices(llama: OpenLlama, tmp_path: Path, sparse_path: Path, names: list[str]) -> None:
    spec = models.SPECS["llama-relu"]
    adapter = write(tmp_path / "lora.gguf", spec, draw(spec, names, 4))
    for path in (None, sparse_path):
        given: dict[str, Any] = {"lora_path": adapter, "logits_all": True}
        args = () if path is None else (path,)
        llm = llama(*args, vram_budget=1, devices=["host"], **given)
        assert llm.plan is not None and llm.plan.uses_device
        alone = llama(*args, **given)
        assert llm.info().sparsity == alone.info().sparsity
        expected = logits(alone, [[token] for token in PROMPT])
        assert rms(logits(llm, [[token] for token in PROMPT]) - expected) < 1e-3 * rms(expected)


def test_embeddings(llama: OpenLlama, tmp_path: Path) -> None:
    """Those of the adapted model, as of one whose weights were changed."""
    spec = models.SPECS["llama-relu"]
    pairs = draw(spec, ATTENTION + FFN, 3)
    adapter = write(tmp_path / "lora.gguf", spec, pairs)
    base = models.write_dense(tmp_path / "base.gguf", spec)
    other = merged(tmp_path / "merged.gguf", spec, pairs, 2.0)
    options: dict[str, Any] = {"embedding": True, "pooling_type": "mean"}
    texts = ["a red house", "b"]
    adapted = llama(base, lora_path=adapter, **options).create_embedding(texts)
    changed = llama(other, **options).create_embedding(texts)
    plain = llama(base, **options).create_embedding(texts)
    assert adapted["usage"] == changed["usage"]
    for a, c, p in zip(adapted["data"], changed["data"], plain["data"], strict=True):
        shown, expected = np.array(a["embedding"]), np.array(c["embedding"])
        assert rms(shown - expected) < 0.05 * rms(expected - np.array(p["embedding"]))
