"""LoRA adapters as PEFT saves them: a converted model with a converted adapter answers as the model whose
published weights were changed as PEFT would merge them, W + scale * B A."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.lora import add_adapters
from powerinfer._engine.session import Model, Session
from powerinfer.cli import main
from powerinfer.errors import PowerInferError, UnsupportedError
from powerinfer.models.convert.adapter import convert_adapter
from powerinfer.models.convert.conversion import convert
from tests import models, reference
from tests.convert import folders, gguf_raw, published

IDS = [5, 17, 260, 43, 291, 7, 8, 5, 90, 11]
RANK, ALPHA = 3, 6.0
# Sums of float32 in another order, widened by layers.
TOLERANCE = 1e-4
CONV1D = ("c_attn", "c_proj", "c_fc")
"""Layers of transformers that keep columns for rows."""


def weights_of(name: str) -> dict[str, Any]:
    if name in published.configs():
        return published.weights(name)
    spec = models.SPECS[name]
    return dict(folders.published(spec, models.draw(spec)))


def write_model(folder: Path, name: str, tensors: dict[str, Any]) -> Path:
    if name in published.configs():
        return published.write_folder(folder, name, change=lambda _: tensors)
    return folders.write_folder(folder, models.SPECS[name], weights=tensors)


def pairs_of(tensors: dict[str, Any], wanted: tuple[str, ...], seed: int = 3) -> dict[str, Any]:
    """A and B of the modules whose names end with these, by their names in PEFT's file."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(wanted) or value.ndim != 2:
            continue
        rows, cols = value.shape[::-1] if module.endswith(CONV1D) else value.shape
        a = rng.normal(0, cols**-0.5, (RANK, cols)).astype(np.float32)
        b = rng.normal(0, 0.5, (rows, RANK)).astype(np.float32)
        prefix = f"base_model.model.{module}."
        if "embed" in module:
            out |= {f"{prefix}lora_embedding_A": np.ascontiguousarray(b.T) / 4}
            out |= {f"{prefix}lora_embedding_B": np.ascontiguousarray(a.T)}
        else:
            out |= {f"{prefix}lora_A.weight": a, f"{prefix}lora_B.weight": b}
    assert out
    return out


def merged(tensors: dict[str, Any], pairs: dict[str, Any], scale: Any) -> dict[str, Any]:
    """As PEFT's merge does. scale: of a module's name."""
    out = dict(tensors)
    for name, a in pairs.items():
        if not name.endswith(("lora_A.weight", "lora_embedding_A")):
            continue
        module = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        b = pairs[name.replace("_A", "_B")].astype(np.float64)
        delta = scale(module) * (b @ a)
        weight = out[f"{module}.weight"].astype(np.float64)
        turned = "embed" in module or module.endswith(CONV1D)
        out[f"{module}.weight"] = (weight + (delta.T if turned else delta)).astype(np.float32)
    return out


def write_adapter(folder: Path, pairs: dict[str, Any], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folders.write_safetensors(folder / "adapter_model.safetensors", pairs)
    usual = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False}
    folders.write_json(folder / "adapter_config.json", usual | config)
    return folder


def logits(path: Path, adapter: Path | None = None) -> Any:
    with Model(path) as model:
        if adapter:
            add_adapters(model, [(adapter, 1.0)])
        options: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "n_threads": 1, "n_batch": 1}
        with Session(model, n_ctx=32, **options) as session:
            session.feed(IDS, want_logits=True)
            return np.stack([session.logits(i).copy() for i in range(len(IDS))])


def check(
    tmp_path: Path, name: str, wanted: tuple[str, ...], scale: Any = lambda _: ALPHA / RANK, **config: Any
) -> None:
    tensors = {one: np.asarray(value, np.float32) for one, value in weights_of(name).items()}
    pairs = pairs_of(tensors, wanted)
    base = write_model(tmp_path / "base", name, tensors)
    convert(base, tmp_path / "base.gguf", type="F32")
    other = write_model(tmp_path / "merged", name, merged(tensors, pairs, scale))
    convert(other, tmp_path / "merged.gguf", type="F32")
    adapter = write_adapter(tmp_path / "lora", pairs, **config)
    done = convert_adapter(adapter, tmp_path / "lora.gguf", base=base)
    assert done.ranks == (RANK,) and done.n_matrices >= len(pairs) // 2
    expected, plain = logits(tmp_path / "merged.gguf"), logits(tmp_path / "base.gguf")
    assert reference.relative_error(plain, expected) > 0.02
    assert reference.relative_error(logits(tmp_path / "base.gguf", done.path), expected) < TOLERANCE


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FFN = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("mistral", (*ATTENTION, *FFN)),  # q and k in another order
        ("qwen3", ("q_proj", "embed_tokens", "lm_head")),
        ("falcon-40b", ("query_key_value", "self_attention.dense", "dense_h_to_4h")),
        ("granite", (*ATTENTION, "embed_tokens", "lm_head")),
        ("gptneox", ("query_key_value", "attention.dense", "dense_4h_to_h")),
        ("gpt2", CONV1D),
        ("phi3", ("qkv_proj", "gate_up_proj", "down_proj", "o_proj")),
        ("falcon-h1", ("self_attn.q_proj", "self_attn.k_proj", "feed_forward.down_proj")),
        ("dots1", ATTENTION),
    ],
)
def test_answers(name: str, wanted: tuple[str, ...], tmp_path: Path) -> None:
    check(tmp_path, name, wanted)


def test_strengths_of_modules(tmp_path: Path) -> None:
    """A pattern is a name's end; rsLoRA divides by the root of the rank."""

    def scale(module: str) -> float:
        return (1.5 if "layers.1.self_attn" in module else ALPHA) / RANK**0.5

    pattern = {r"layers\.1\.self_attn\..*": 1.5}
    check(tmp_path, "qwen3", ATTENTION, scale, use_rslora=True, alpha_pattern=pattern)


def adapter(tmp_path: Path, change: Any = None, **config: Any) -> tuple[Path, Path]:
    tensors = weights_of("granite")
    pairs = pairs_of(tensors, ("layers.0.self_attn.q_proj",))
    base = write_model(tmp_path / "base", "granite", tensors)
    (base / "model.safetensors").unlink()  # its config.json is enough
    return write_adapter(tmp_path / "lora", change(pairs) if change else pairs, **config), base


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed before"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "experts"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"lora_alpha": 0}, "changes nothing"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"alpha_pattern": {"(": 2}}, "no regular expression"),
    ],
)
def test_what_is_not_converted(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder, base = adapter(tmp_path, **config)
    with pytest.raises(PowerInferError, match=says):
        convert_adapter(folder, tmp_path / "out.gguf", base=base)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: {}, "no tensors"),
        (lambda w: {Q + "A.weight": w[Q + "A.weight"]}, "not a pair"),
        (lambda w: w | {Q + "B.weight": w[Q + "B.weight"][:, :2]}, "have shapes"),
        (lambda w: w | {Q + "B.weight": w[Q + "B.weight"][:-1]}, "must have 64"),
        (lambda w: w | {Q + "B.weight": w[Q + "B.weight"][0]}, "not a matrix"),
        (lambda w: w | {Q + "A.weight": w[Q + "A.weight"] * np.float32(np.nan)}, "no numbers"),
        (lambda w: w | {"base_model.model.x.bias": w[Q + "A.weight"]}, "no part of a LoRA pair"),
        (lambda w: w | {"base_model.model.x.weight": w[Q + "A.weight"]}, "nothing to compare it with"),
        (lambda w: {k.replace("layers.0", "layers.9"): v for k, v in w.items()}, "has not"),
        (lambda w: {k.replace("self_attn.q_proj", "input_layernorm"): v for k, v in w.items()}, "adapted"),
        (lambda w: {k.replace("self_attn", "mlp.experts.3"): v for k, v in w.items()}, "experts"),
    ],
)
def test_tensors_that_are_no_adapter(change: Any, says: str, tmp_path: Path) -> None:
    folder, base = adapter(tmp_path, change)
    with pytest.raises(PowerInferError, match=says):
        convert_adapter(folder, tmp_path / "out.gguf", base=base)
    assert not (tmp_path / "out.gguf").exists()


EMBEDDING = "base_model.model.model.embed_tokens"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (EMBEDDING + ".base_layer.weight", lambda w: w, None),
        (EMBEDDING + ".weight", lambda w: w, None),
        (EMBEDDING + ".weight", lambda w: w.astype(np.float16), None),
        ("base_model.model.lm_head.base_layer.weight", lambda w: w, None),  # tied: the base has none
        (EMBEDDING + ".weight", lambda w: w + np.float32(1e-6), "of its own"),
        (EMBEDDING + ".weight", lambda w: (w * np.float32(1.01)).astype(np.float16), "of its own"),
        (EMBEDDING + ".base_layer.weight", lambda w: np.concatenate([w, w[:2]]), "of its own"),
        ("base_model.model.model.norms.weight", lambda w: w, "not in"),
    ],
)
def test_copies_of_the_base_s_matrices(name: str, change: Any, says: str | None, tmp_path: Path) -> None:
    """PEFT saves the embedding and the head whole where it adapts them."""
    tensors = {one: np.asarray(value, np.float32) for one, value in weights_of("granite").items()}
    tensors.pop("lm_head.weight", None)
    base = write_model(tmp_path / "base", "granite", tensors)
    pairs = pairs_of(tensors, ("q_proj", "embed_tokens"))
    out = tmp_path / "out.gguf"
    convert_adapter(write_adapter(tmp_path / "plain", pairs), tmp_path / "plain.gguf", base=base)
    folder = write_adapter(tmp_path / "lora", pairs | {name: change(tensors["model.embed_tokens.weight"])})
    if says:
        with pytest.raises(UnsupportedError, match=says):
            convert_adapter(folder, out, base=base)
        assert not out.exists()
    else:
        convert_adapter(folder, out, base=base)
        plain, made = gguf_raw.read(tmp_path / "plain.gguf"), gguf_raw.read(out)
        assert made.tensors == plain.tensors


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, base = adapter(tmp_path)
    out = tmp_path / "out.gguf"
    assert main(["convert", str(folder), "--base", str(base), "-o", str(out), "--type", "f16"]) == 0
    assert "1 matrices, by ranks of 3, alpha 6" in capsys.readouterr().out
    keys = {name: value for name, (_, value) in gguf_raw.read(out).keys.items()}
    assert keys["general.architecture"] == b"granite" and keys["adapter.lora.alpha"] == ALPHA
    for more, says in (
        ([], "--base names"),
        (["--base", str(base), "--check"], "--check is for models"),
        (["--base", str(base), "--type", "q8_0"], "must be one of F32"),
    ):
        assert main(["convert", str(folder), "-o", str(out), *more]) != 0
        assert says in capsys.readouterr().err
    assert main(["convert", str(base), "-o", str(out), "--base", str(base)]) != 0
    assert "no adapter_config.json" in capsys.readouterr().err
