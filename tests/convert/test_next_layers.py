"""Layers that guess at further tokens (NextN, MTP), of checkpoints that have one or several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from powerinfer._engine.session import Model
from powerinfer.models.convert.check import check
from powerinfer.models.convert.conversion import convert, open_source
from tests import models, next_head, reference
from tests.convert import folders, published
from tests.convert.test_families import refused


@pytest.mark.parametrize("name", ["deepseek2-v3", "qwen35", "qwen35moe", "qwen3next", "glm4moe"])
def test_a_head_for_further_tokens(name: str, tmp_path: Path) -> None:
    """It becomes what tests/next_head.py writes, by the names that llama.cpp has."""
    spec, weights = models.SPECS[name], published.with_head(name)
    if name == "glm4moe":
        folder = folders.write_folder(tmp_path / "hf", spec, weights=weights)
    else:
        folder = published.write_folder(tmp_path / "hf", name, change=lambda _: weights)
    done = convert(folder, tmp_path / "out.gguf")
    assert done.left_out == () and any("--mtp" in note for note in done.notes)
    if name == "glm4moe":  # of the others transformers is asked
        assert check(open_source(folder), tmp_path / "out.gguf", type="F16").passed
    has_own = name in ("deepseek2-v3", "glm4moe")
    path = next_head.write(tmp_path / "expected.gguf", spec, own_output=has_own)
    actual, expected = reference.load(tmp_path / "out.gguf"), reference.load(path)
    assert set(actual.tensors) == set(expected.tensors)
    for tensor, value in expected.tensors.items():
        np.testing.assert_allclose(actual[tensor], value, rtol=1e-6, atol=2e-7)
    keys = ("block_count", "nextn_predict_layers", "attention.recurrent_layers")
    for key in keys[: 3 if name.startswith("qwen") else 2]:
        np.testing.assert_array_equal(actual.key(key), expected.key(key))
    with Model(tmp_path / "out.gguf") as model, Model(tmp_path / "out.gguf", next_head=True) as head:
        assert (model.info.n_next, model.info.n_layer, head.info.n_layer) == (1, spec.n_layer, 1)
    if has_own:  # published heads have the model's own embeddings and output once more
        head_of = f"model.layers.{spec.n_layer}."
        copies = {
            f"{head_of}embed_tokens.weight": weights["model.embed_tokens.weight"],
            f"{head_of}shared_head.head.weight": weights["lm_head.weight"],
        }
        folders.write_weights(folder, weights | copies, "safetensors")
        done = convert(folder, tmp_path / "out.gguf")
        assert set(done.left_out) == set(copies)
        shorter = set(reference.load(tmp_path / "out.gguf").tensors)
        own = {f"blk.{spec.n_layer}.nextn.{one}.weight" for one in ("embed_tokens", "shared_head_head")}
        assert set(expected.tensors) - shorter == own
    done = convert(folder, tmp_path / "out.gguf", next_head=False)
    assert done.left_out and "nextn_predict_layers" not in str(reference.load(tmp_path / "out.gguf").meta)


@pytest.mark.parametrize("name", ["deepseek2-v3", "glm4moe"])
def test_several_heads_for_further_tokens(name: str, tmp_path: Path) -> None:
    spec, weights = models.SPECS[name], published.with_head(name)
    n = spec.n_layer
    of = f"model.layers.{n}."
    second = {
        one.replace(of, f"model.layers.{n + 1}."): w for one, w in weights.items() if one.startswith(of)
    }
    second[f"model.layers.{n + 1}.eh_proj.weight"] = -weights[f"{of}eh_proj.weight"]
    if name == "glm4moe":
        folder = folders.write_folder(tmp_path / "hf", spec, weights=weights | second)
    else:
        folder = published.write_folder(tmp_path / "hf", name, change=lambda _: weights | second)
    done = convert(folder, tmp_path / "out.gguf")
    assert done.left_out == () and any("of 2 such layers the first" in note for note in done.notes)
    file = reference.load(tmp_path / "out.gguf")
    assert (file.key("block_count"), file.key("nextn_predict_layers")) == (n + 2, 2)
    for one, value in file.tensors.items():
        if one.startswith(f"blk.{n}."):
            sign = -1 if one.endswith("eh_proj.weight") else 1
            np.testing.assert_array_equal(file[one.replace(f"blk.{n}.", f"blk.{n + 1}.")], sign * value)
    with Model(tmp_path / "out.gguf") as model, Model(tmp_path / "out.gguf", next_head=True) as head:
        assert (model.info.n_next, model.info.n_layer, head.info.n_layer) == (2, n, 1)


def test_a_second_head_where_one_is_known(tmp_path: Path) -> None:
    weights = published.with_head("qwen35")
    weights["mtp.layers.1.self_attn.q_proj.weight"] = weights["mtp.layers.0.self_attn.q_proj.weight"]
    folder = published.write_folder(tmp_path / "hf", "qwen35", change=lambda _: weights)
    refused(folder, tmp_path / "out.gguf", r"mtp\.layers\.1\.self_attn.*--no-mtp leaves them out")
    assert convert(folder, tmp_path / "out.gguf", next_head=False).hyper.n_next == 0


def test_a_head_that_the_engine_would_not_open(tmp_path: Path) -> None:
    weights = published.with_head("qwen35")
    del weights["mtp.layers.0.self_attn.q_proj.weight"]
    folder = published.write_folder(tmp_path / "hf", "qwen35", change=lambda _: weights)
    refused(folder, tmp_path / "out.gguf", r"--no-mtp leaves it out.*blk\.4\.attn_q")
    assert convert(folder, tmp_path / "out.gguf", next_head=False).hyper.n_next == 0


def test_the_layers_that_guess_are_left_out(tmp_path: Path) -> None:
    extra = "model.layers.3.self_attn.o_proj.weight"
    folder = published.write_folder(
        tmp_path / "hf", "deepseek2-v3", change=lambda w: w | {extra: np.ones((2, 2), np.float32)}
    )
    assert convert(folder, tmp_path / "out.gguf").left_out == (extra,)
