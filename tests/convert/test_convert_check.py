"""The check of a conversion: its own forward pass is right, it passes what is right, and sees what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from powerinfer._engine.file import ModelFile
from powerinfer.errors import ArgumentError
from powerinfer.models.convert.check import check
from powerinfer.models.convert.conversion import convert, open_source
from powerinfer.models.convert.forward import SourceModel
from powerinfer.models.convert.rounding import rounded
from powerinfer.models.rewrite import rewrite
from tests import models, reference
from tests.convert import folders


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", models.CONVERTED)
def test_the_forward_pass(name: str, tmp_path: Path) -> None:
    """transformers' logits, of two prompts at once, to what float32 sums allow."""
    golden = models.golden(name)
    source = open_source(folders.write_folder(tmp_path / "hf", golden.spec))
    prompts = [golden.prompt[:7].tolist(), golden.prompt.tolist()]
    short, whole = SourceModel(source.checkpoint, source.hyper).logits(prompts)
    assert reference.relative_error(whole, golden.logits) < 1e-5
    assert reference.relative_error(short, golden.logits[:7]) < 1e-5


def test_the_forward_pass_with_a_threshold(tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu-gqa"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    config = folders.config(spec) | {"hidden_act": "fatrelu", "hidden_act_param": 0.5}
    folders.write_json(folder / "config.json", config)
    convert(folder, tmp_path / "out.gguf", type="F32")
    prompt = models.golden("llama-relu-gqa").prompt
    expected = reference.forward(reference.load(tmp_path / "out.gguf"), prompt)
    source = open_source(folder)
    (actual,) = SourceModel(source.checkpoint, source.hyper).logits([prompt.tolist()])
    assert reference.relative_error(actual, expected) < 1e-4


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_rounding(kind: str) -> None:
    """As gguf's own conversion there and back."""
    weights = np.random.default_rng(1).standard_normal((64, 96)).astype(np.float32)
    type = GGMLQuantizationType[kind]
    expected = quants.dequantize(quants.quantize(weights, type), type)
    np.testing.assert_array_equal(rounded(weights, kind), expected)
    np.testing.assert_array_equal(rounded(weights.T, kind, transposed=True), expected.T)
    assert rounded(weights, "F32") is weights
    odd = weights[:, :30]
    in_f16 = kind if kind in ("F16", "BF16") else "F16"  # rows that do not divide into blocks
    np.testing.assert_array_equal(rounded(odd, kind), rounded(odd, in_f16))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "F16") for name in models.CONVERTED]
    + [
        (name, kind)
        for name in ("llama-relu", "falcon-40b", "opt")
        for kind in ("F32", "BF16", "Q8_0", "Q4_0")
    ],
)
def test_what_is_right_passes(name: str, kind: str, tmp_path: Path) -> None:
    spec = models.SPECS[name]
    folder = folders.write_folder(tmp_path / "hf", spec)
    given = None
    if spec.predictor:  # which the check lets all neurons through: it is about the weights
        given = folders.write_predictors(tmp_path / "predictors", models.draw_predictor(spec), 1e20)
    convert(folder, tmp_path / "out.gguf", type=kind, predictors=given)
    seen: list[tuple[int, int]] = []
    result = check(
        open_source(folder),
        tmp_path / "out.gguf",
        type=kind,
        n_threads=1,
        progress=lambda *args: seen.append(args),
    )
    assert result.passed
    assert result.mode == ("exact" if spec.relu else "dense")
    assert len(result.prompts) == 3 and all(prompt.n_tokens > 8 for prompt in result.prompts)
    if kind in ("F32", "F16"):  # the weights are F16 already
        for prompt in result.prompts:
            assert prompt.distance < 1e-4 and prompt.same_top == 1 and abs(prompt.kl) < 1e-6
    assert seen[-1][0] == seen[-1][1] and [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        ("blk.0.attn_q.weight", lambda a: a.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(a.shape)),
        ("blk.1.ffn_down_t.weight", lambda a: a[::-1]),
        ("blk.1.attn_v.weight", lambda a: -a),
    ],
)
def test_what_is_wrong_is_seen(tensor: str, change: Any, kind: str, tmp_path: Path) -> None:
    """One tensor of one layer in another order, in a file of any format."""
    spec = models.SPECS["llama-relu"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    good, bad = tmp_path / "good.gguf", tmp_path / "bad.gguf"
    convert(folder, good, type=kind, transpose_down=True)
    with ModelFile(good) as file:
        weights = change(file.dequantize(tensor))
        rewrite(file, bad, replace_tensors={tensor: (kind, np.ascontiguousarray(weights))})
    source = open_source(folder)
    assert check(source, good, type=kind, n_threads=1).passed
    result = check(source, bad, type=kind, n_threads=1)
    assert not result.passed
    assert all(prompt.unexplained > prompt.bound for prompt in result.prompts)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.filterwarnings("error")
def test_answers_that_are_no_numbers(kind: str, tmp_path: Path) -> None:
    """Neither the file's nor the checkpoint's: that is no agreement, and no bound."""
    spec = models.SPECS["llama-relu"]
    weights = dict(models.draw(spec)) | {"model.norm.weight": np.full(spec.n_embd, 3e38, np.float32)}
    weights["lm_head.weight"] = weights["lm_head.weight"] * np.float16(100)
    folder = folders.write_folder(tmp_path / "hf", spec, weights=weights)
    convert(folder, tmp_path / "out.gguf", type=kind)
    assert not check(open_source(folder), tmp_path / "out.gguf", type=kind, n_threads=1).passed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.freq_base", 10500.0),
        ("llama.attention.layer_norm_rms_epsilon", 1e-2),
        ("powerinfer.hidden_act", "silu"),
        ("powerinfer.hidden_act_threshold", 0.05),
    ],
)
def test_wrong_keys_are_seen(key: str, value: Any, tmp_path: Path) -> None:
    spec = models.SPECS["llama-relu"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    convert(folder, tmp_path / "good.gguf")
    with ModelFile(tmp_path / "good.gguf") as file:
        rewrite(file, tmp_path / "bad.gguf", keys={key: value})
    source = open_source(folder)
    assert check(source, tmp_path / "good.gguf", type="F16", n_threads=1).passed
    if value == "silu":
        with pytest.raises(ArgumentError, match="exact"):  # a mode that the engine has for ReLU models only
            check(source, tmp_path / "bad.gguf", type="F16", n_threads=1)
    else:
        assert not check(source, tmp_path / "bad.gguf", type="F16", n_threads=1).passed
