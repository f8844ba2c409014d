"""Checkpoints of mixtures: SmallThinker and TurboSparse-Mixtral, which transformers has not; configs.

Files are computed by the float64 reference, which reads the file, and compared with the forward pass over the
published weights (forward.py), which knows nothing of files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from powerinfer._engine.session import Model
from powerinfer.cli import main
from powerinfer.errors import FormatError, UnsupportedError
from powerinfer.models.convert.check import check
from powerinfer.models.convert.conversion import convert, open_source
from powerinfer.models.convert.families.reading import read_hyper
from powerinfer.models.convert.forward import SourceModel
from powerinfer.models.convert.hyper import Hyper
from powerinfer.models.convert.json_file import Settings
from tests import models, reference
from tests.convert import folders, gguf_raw

PROMPT = [3, 250, 17, 40, 99, 120, 7, 201, 64, 33, 5, 180]
WINDOW = 5
BASE = models.SPECS["qwen3moe"]
MIXTRAL = models.SPECS["mixtral"]


def small_thinker(folder: Path, *, window: bool = True, **changes: Any) -> Path:
    """A folder of 5 layers, as SmallThinker's are published."""
    spec = replace(BASE, name="smallthinker", n_layer=5)
    published = {"mlp.gate.": "block_sparse_moe.primary_router.", "mlp.experts.": "block_sparse_moe.experts."}
    published |= {"gate_proj.": "gate.", "up_proj.": "up.", "down_proj.": "down."}
    weights = {}
    for name, value in models.draw(spec).items():
        for old, new in published.items():
            name = name.replace(old, new)
        if "self_attn.q_norm" not in name and "self_attn.k_norm" not in name:
            weights[name] = value
    layout = [int(i % 4 != 0) for i in range(5)]
    config = {
        "architectures": ["SmallThinkerForCausalLM"],
        "model_type": "smallthinker",
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.n_embd,
        "num_hidden_layers": 5,
        "num_attention_heads": spec.n_head,
        "num_key_value_heads": spec.n_head_kv,
        "head_dim": spec.d_head,
        "max_position_embeddings": spec.n_ctx,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1.5e6,
        "rope_layout": layout if window else [1] * 5,
        "sliding_window_layout": layout if window else [0] * 5,
        "sliding_window_size": WINDOW,
        "moe_ffn_hidden_size": spec.n_ff_expert,
        "moe_num_primary_experts": spec.n_expert,
        "moe_num_active_primary_experts": spec.n_used,
        "moe_primary_router_apply_softmax": False,
        "tie_word_embeddings": False,
    }
    folders.write_folder(folder, BASE, weights=weights)
    folders.write_json(folder / "config.json", config | changes)
    return folder


def turbo_sparse(folder: Path, *, with_predictors: bool = True) -> Path:
    weights = dict(models.draw(MIXTRAL))
    for name in [name for name in weights if name.endswith(".w1.weight") and with_predictors]:
        stem = name.removesuffix("w1.weight") + "predictor."
        weights[stem + "fc1.weight"] = np.zeros((16, MIXTRAL.n_embd), np.float16)
        weights[stem + "fc2.weight"] = np.zeros((MIXTRAL.n_ff, 16), np.float16)
    folders.write_folder(folder, MIXTRAL, weights=weights, form="shards")
    changed = {"architectures": ["TurboSparseMixtralForCausalLM"], "model_type": "turbosparsemixtral"}
    folders.write_json(folder / "config.json", folders.config(MIXTRAL) | changed | {"hidden_act": "relu"})
    return folder


def keys_of(path: Path) -> dict[str, Any]:
    pairs = gguf_raw.read(path).keys.items()
    return {key: value.decode() if isinstance(value, bytes) else value for key, (_, value) in pairs}


def same_answers(folder: Path, path: Path) -> None:
    source = open_source(folder)
    (rows,) = SourceModel(source.checkpoint, source.hyper).logits([PROMPT])
    assert reference.relative_error(rows, reference.forward(reference.load(path), PROMPT)) < 1e-5


@pytest.mark.parametrize(
    ("window", "changes"),
    [(True, {}), (False, {}), (True, {"moe_primary_router_apply_softmax": True})],
)
def test_smallthinker(window: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    folder, out = small_thinker(tmp_path / "hf", window=window, **changes), tmp_path / "out.gguf"
    convert(folder, out, type="F16")
    file, meta = gguf_raw.read(out), keys_of(out)
    assert meta["general.architecture"] == "smallthinker"
    assert meta["smallthinker.expert_gating_func"] == (1 if changes else 2)
    assert meta.get("smallthinker.attention.sliding_window") == (WINDOW if window else None)
    assert meta["smallthinker.expert_feed_forward_length"] == BASE.n_ff_expert
    assert "powerinfer.hidden_act" not in meta
    n, ff, d = BASE.n_expert, BASE.n_ff_expert, BASE.n_embd
    assert file.tensors["blk.4.ffn_down_exps.weight"].ne == (ff, d, n)
    assert file.tensors["blk.4.ffn_gate_exps.weight"].ne == (d, ff, n)
    assert file.tensors["blk.4.ffn_gate_inp.weight"].type == "F32"
    same_answers(folder, out)
    assert check(open_source(folder), out, type="F16", n_threads=1).passed


def test_down_of_experts_by_neuron(tmp_path: Path) -> None:
    folder = small_thinker(tmp_path / "hf")
    convert(folder, tmp_path / "plain.gguf", type="F16")
    convert(folder, tmp_path / "turned.gguf", type="F16", transpose_down=True)
    plain, turned = (reference.load(tmp_path / f"{name}.gguf") for name in ("plain", "turned"))
    for i in range(5):
        np.testing.assert_array_equal(
            turned[f"blk.{i}.ffn_down_t_exps.weight"],
            plain[f"blk.{i}.ffn_down_exps.weight"].swapaxes(1, 2),
        )
        assert turned.get(f"blk.{i}.ffn_down_exps.weight") is None
    with Model(tmp_path / "turned.gguf") as model:
        assert model.info.can_skip_down
    for type in ("F16", "Q8_0"):
        convert(folder, tmp_path / "turned.gguf", type=type, transpose_down=True)
        done = check(open_source(folder), tmp_path / "turned.gguf", type=type, n_threads=1)
        assert done.passed and done.mode == "exact"


def test_turbosparse_mixtral(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """dReLU in `llama` with experts; its predictors are left out, which is said."""
    folder, out = turbo_sparse(tmp_path / "hf"), tmp_path / "out.gguf"
    done = convert(folder, out, type="F16")
    meta = keys_of(out)
    assert meta["general.architecture"] == "llama" and meta["powerinfer.hidden_act"] == "drelu"
    assert len(done.left_out) == 2 * MIXTRAL.n_expert * MIXTRAL.n_layer
    assert [note for note in done.notes if "predictors of the experts are left out" in note]
    same_answers(folder, out)
    assert main(["convert", str(folder), "-o", str(out), "--check"]) == 0
    plain = turbo_sparse(tmp_path / "plain", with_predictors=False)
    assert not convert(plain, out).left_out


def test_predictors_in_other_mixtures_are_unknown_tensors(tmp_path: Path) -> None:
    folder = turbo_sparse(tmp_path / "hf")
    folders.write_json(folder / "config.json", folders.config(MIXTRAL))
    with pytest.raises(FormatError, match=r"experts\.0\.predictor"):
        convert(folder, tmp_path / "out.gguf")


def test_predictors_given_for_experts_are_refused(tmp_path: Path) -> None:
    folder = small_thinker(tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="no predictors of experts"):
        convert(folder, tmp_path / "out.gguf", predictors=tmp_path)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0"])
def test_quantised_experts(type: str, tmp_path: Path) -> None:
    """Rows of 64 and 96 divide into blocks; routers stay floats."""
    spec = models.SPECS["qwen2moe"]
    folder = folders.write_folder(tmp_path / "hf", spec)
    done = convert(folder, tmp_path / "out.gguf", type=type)
    file = gguf_raw.read(tmp_path / "out.gguf")
    assert done.fallbacks == ()
    kinds = {name.partition(".ffn_")[2]: raw.type for name, raw in file.tensors.items() if ".ffn_" in name}
    assert kinds["gate_inp.weight"] == kinds["gate_inp_shexp.weight"] == "F32"
    assert kinds["gate_exps.weight"] == kinds["down_shexp.weight"] == type
    assert len(file.tensors["blk.0.ffn_gate_inp_shexp.weight"].ne) == 1
    assert check(open_source(folder), tmp_path / "out.gguf", type=type, n_threads=1).passed


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    weights = dict(models.draw(MIXTRAL))
    del weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    folder = folders.write_folder(tmp_path / "hf", MIXTRAL, weights=weights)
    with pytest.raises(FormatError, match=r"no tensor model\.layers\.1\.block_sparse_moe\.experts\.3\.w2"):
        convert(folder, tmp_path / "out.gguf")


def test_counts_of_experts_become_keys(tmp_path: Path) -> None:
    from powerinfer._engine.counts import Counts
    from powerinfer.models.statistics import write_activation_dir

    counts = np.arange(MIXTRAL.n_layer * MIXTRAL.n_expert, dtype=np.uint64).reshape(MIXTRAL.n_layer, -1)
    write_activation_dir(tmp_path / "act", Counts(counts=counts, n_tokens=40, unit="experts"))
    folder = folders.write_folder(tmp_path / "hf", MIXTRAL)
    convert(folder, tmp_path / "out.gguf", activation=tmp_path / "act")
    meta = keys_of(tmp_path / "out.gguf")
    assert list(meta["powerinfer.expert.counts"]) == counts.ravel().tolist()


# ---- config.json as published

MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_MOE_27B = {
    **{key: value for key, value in QWEN3_30B.items() if key not in ("head_dim", "attention_bias")},
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
}
OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "attention_bias": False,
    "clip_qkv": None,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}


def read(config: dict[str, Any]) -> Hyper:
    return read_hyper(Settings(config, "config.json"))


@pytest.mark.parametrize(
    ("config", "expected", "experts"),
    [
        (
            MIXTRAL_8X7B,
            {"family": "llama", "arch": "llama", "d_head": 128, "act": "silu", "notes": ()},
            {
                "n": 8,
                "n_used": 2,
                "n_ff": 14336,
                "is_normed": True,
                "n_ff_shared": 0,
                "has_predictors": False,
            },
        ),
        (
            MIXTRAL_8X7B
            | {"architectures": ["TurboSparseMixtralForCausalLM"], "model_type": "turbosparsemixtral"}
            | {"hidden_act": "relu"},
            {"family": "llama", "arch": "llama", "act": "drelu"},
            {"n": 8, "has_predictors": True},
        ),
        (
            QWEN3_30B,
            {"arch": "qwen3moe", "d_head": 128, "n_ff": 6144, "qkv_bias": False, "notes": ()},
            {"n": 128, "n_used": 8, "n_ff": 768, "is_normed": True, "is_sigmoid": False},
        ),
        (QWEN3_30B | {"norm_topk_prob": False}, {}, {"is_normed": False}),
        (  # as transformers 5.24 saves it
            {"num_local_experts" if k == "num_experts" else k: v for k, v in QWEN3_30B.items()},
            {"arch": "qwen3moe"},
            {"n": 128, "n_used": 8},
        ),
        (
            QWEN_MOE_27B,
            {"arch": "qwen2moe", "d_head": 128, "qkv_bias": True, "output_bias": False},
            {"n": 60, "n_used": 4, "n_ff": 1408, "n_ff_shared": 5632, "is_normed": False},
        ),
        (
            OLMOE,
            {"arch": "olmoe", "d_head": 128, "qkv_bias": False, "norm_eps": 1e-5},
            {"n": 64, "n_used": 8, "n_ff": 1024, "is_normed": False},
        ),
    ],
)
def test_published(config: dict[str, Any], expected: dict[str, Any], experts: dict[str, Any]) -> None:
    hyper = read(config)
    assert {name: getattr(hyper, name) for name in expected} == expected
    assert {name: getattr(hyper.experts, name) for name in experts} == experts


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (QWEN3_30B | {"decoder_sparse_step": 2}, UnsupportedError, "decoder_sparse_step"),
        (QWEN3_30B | {"mlp_only_layers": [3]}, UnsupportedError, "mlp_only_layers"),
        (QWEN3_30B | {"num_experts": 0}, FormatError, "num_experts"),
        (QWEN3_30B | {"num_experts": 1 << 20}, FormatError, "num_experts"),
        (QWEN3_30B | {"num_experts_per_tok": 129}, FormatError, "num_experts_per_tok"),
        (QWEN3_30B | {"moe_intermediate_size": -1}, FormatError, "moe_intermediate_size"),
        (OLMOE | {"clip_qkv": 8.0}, UnsupportedError, "clip_qkv"),
        ({**QWEN_MOE_27B, "shared_expert_intermediate_size": 0}, FormatError, "shared_expert"),
    ],
)
def test_what_is_refused(config: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        read(config)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_layout": [1, 1, 1, 1, 0]}, "each fourth"),
        ({"sliding_window_layout": [0] * 5}, "each fourth"),
        ({"rope_layout": "all"}, "rope_layout"),
        ({"moe_layer_layout": [1, 1, 0, 1, 1]}, "moe_layer_layout"),
        ({"moe_enable_early_router": False}, "early_router"),
        ({"moe_shared_primary_experts": 1}, "moe_shared_primary_experts"),
    ],
)
def test_other_smallthinkers_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = small_thinker(tmp_path / "hf", **changes)
    with pytest.raises((UnsupportedError, FormatError), match=says):
        convert(folder, tmp_path / "out.gguf")
