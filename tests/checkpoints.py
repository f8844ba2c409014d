"""Small random checkpoints of transformers' classes, and the files that llama.cpp's converter makes of them.

A case (tests/checkpoint_cases.py) names a class and its configuration. scripts/golden_checkpoints.py makes
the model and keeps the names and shapes of its weights beside its logits; each weight is drawn from its
name, so no weights are stored and the tests need no transformers. Names of tensors in a file are those of
gguf's own tables.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.checkpoint_cases import CASES, COMMON, LONG, N_CTX, N_VOCAB, Case
from tests.models import GOLDEN, Array, Tensors, llama3_divisors, normal
from tests.specs import Rope, Spec

__all__ = ["CASES", "N_VOCAB"]

OTHER_NAMES = {
    "self_attn.attn_sub_norm": "self_attn.inner_attn_ln",
    "mlp.ffn_sub_norm": "mlp.ffn_layernorm",
    "e_score_correction_bias": "e_score_correction.bias",
    "mlp.gate.moe_statics": "mlp.moe_statics",
    "mlp.expert_bias": "mlp.expert_bias.bias",
    "block_sparse_moe.router": "block_sparse_moe.router.layer",
    "block_sparse_moe.experts": "mlp.experts",
    "correct_output_scale": "correct_output_scale.weight",
}
"""Those that gguf knows otherwise."""
BUFFERS = ("e_score_correction_bias", "layer_scalar")
"""Weights that are no parameters in transformers."""


def config_of(case: Case) -> dict[str, Any]:
    """The arguments of the configuration class."""
    eps = {} if case.layer_norm else {"rms_norm_eps": 1e-5}
    names = set(COMMON)
    if case.model == "GPT2":
        names = {"vocab_size", "tie_word_embeddings"}
    if case.model == "GPTNeoX":
        names -= {"num_key_value_heads"}
    own = {k: v for k, v in case.config.items() if case.model != "GPT2" or k != "num_key_value_heads"}
    eps |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    plain = (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} if case.model != "GPT2" else {}
    )
    return {name: COMMON[name] for name in names} | eps | plain | own


def draw(label: str, name: str, shape: tuple[int, ...]) -> Array:
    """A weight by its published name: matrices F16, vectors F32. Norms and biases are far from 1 and 0."""
    bell = normal(f"{label}/{name}", *shape)
    stem = name.rsplit(".", 1)
    is_norm = any(word in name for word in ("norm", "ln_", "layernorm"))
    if len(shape) == 1:
        if (is_norm and stem[-1] == "weight") or stem[-1].endswith(("scale", "layer_scalar")):
            if "q_norm" in name and CASES[label].model in (
                "Gemma4",
                "Gemma3n",
            ):  # whose scores are not scaled
                return np.asarray((1 + 0.25 * bell) / shape[0] ** 0.5, np.float32)
            return np.asarray(1 + 0.25 * bell, np.float32)
        return np.asarray(0.15 * bell, np.float32)
    if any(word in name for word in ("embed_tokens", "embed_in", "wte")):
        case = CASES[label]
        small = case.value("tie_word_embeddings") or case.scaled
        return np.asarray(bell * (1.5 / shape[1] ** 0.5 if small else 1), np.float16)
    if "wpe" in name:
        return np.asarray(0.7 * bell, np.float16)
    turned = "c_attn" in name or "c_proj" in name or "c_fc" in name
    cols = shape[0] if turned and label == "gpt2" else shape[-1]
    loud = ("down_proj", "4h_to_h", "mlp.c_proj", "fc2", "lm_head", "embed_out", "output_linear")
    gains = dict.fromkeys(loud, 2.0) | {"router.proj": 8.0, "modality_router": 12.0}
    gain = next((by for word, by in gains.items() if word in name), 1.0)
    return np.asarray(bell * gain / cols**0.5, np.float16)


@dataclass(frozen=True)
class Golden:
    """What transformers said."""

    shapes: dict[str, tuple[int, ...]]
    prompt: Array
    logits: Array
    """[n_prompt, n_vocab]"""
    greedy: Array


@functools.cache
def golden(name: str) -> Golden:
    with np.load(GOLDEN / f"checkpoint-{name}.npz") as f:
        shapes = dict(
            zip(
                f["names"].tolist(),
                (tuple(map(int, s.split(","))) for s in f["shapes"].tolist()),
                strict=True,
            )
        )
        return Golden(shapes, f["prompt"], f["logits"], f["greedy"])


def interleaved(value: Array, n_head: int) -> Array:
    """Rows of two halves of each head in turn."""
    return np.ascontiguousarray(value.reshape(n_head, 2, -1, *value.shape[1:]).swapaxes(1, 2)).reshape(
        value.shape
    )


def file_tensors(name: str) -> Tensors:
    """The tensors of the file."""
    case = CASES[name]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[case.table], case.value("num_hidden_layers"))
    out: Tensors = {}
    together: dict[str, list[Array]] = {}
    for published, shape in golden(name).shapes.items():
        if ".act_fn." in published:  # in keys
            continue
        value = draw(name, published, shape)
        if "altup_" in published:  # of streams, stored together
            together.setdefault(f"{published.split('.')[1]}.weight", []).append(value)
            continue
        if case.permuted and "self_attn.q_proj" in published:
            value = interleaved(value, case.value("num_attention_heads"))
        if case.permuted and "self_attn.k_proj" in published:
            value = interleaved(value, case.value("num_key_value_heads"))
        changed = case.change(case, published, value) if case.change else {}
        for one, what in (changed or {published: value}).items():
            for old, known in OTHER_NAMES.items():
                one = one.replace(old, known)
            new = table.get_name(one, try_suffixes=(".weight", ".bias", ".scale"))
            assert new, f"gguf has no name for {one}"
            out[new] = what[0] if new.endswith(".bias") and what.ndim > 1 else what
    for published, values in together.items():
        out[str(table.get_name(f"model.{published}", try_suffixes=(".weight",)))] = np.stack(values)
    if case.arch == "phi3":
        out["rope_factors_short.weight"], out["rope_factors_long.weight"] = (
            np.array(f, np.float32) for f in LONG
        )
    if case.arch == "apertus":
        rope = case.config["rope_parameters"]
        spec = Spec("", "llama", rope=Rope(10000.0, "llama3", rope["factor"], 64))
        out["rope_freqs.weight"] = llama3_divisors(spec)
    if case.arch == "gemma4":  # of full layers a quarter is rotated
        n_rot = case.value("global_head_dim") // 2
        out["rope_freqs.weight"] = np.array([1] * (n_rot // 4) + [1e30] * (n_rot - n_rot // 4), np.float32)
    return out


def file_keys(name: str) -> dict[str, Any]:
    """The keys of the file, without the architecture in front."""
    case = CASES[name]
    head = case.config.get("head_dim", 0)
    keys: dict[str, Any] = {
        "block_count": case.value("num_hidden_layers"),
        "context_length": N_CTX,
        "embedding_length": 64,
        "feed_forward_length": 160,
        "attention.head_count": 4,
        "attention.layer_norm_epsilon" if case.layer_norm else "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if case.model not in ("GPTNeoX", "GPT2"):
        keys["attention.head_count_kv"] = case.value("num_key_value_heads")
    if head:
        keys |= {"attention.key_length": head, "attention.value_length": head}
    for alpha in ("alpha_p", "alpha_n") if case.arch == "apertus" else ():
        layers = [f"model.layers.{i}.mlp.act_fn.{alpha}" for i in range(case.value("num_hidden_layers"))]
        keys[f"xielu.{alpha}"] = [float(draw(name, layer, (1,))[0]) for layer in layers]
    return keys | case.keys


def write(path: Path, name: str, **more: Any) -> Path:
    """The file of a case. more: tensors instead of its own."""
    arch = CASES[name].arch
    w = gguf.GGUFWriter(path, arch)
    for key, value in file_keys(name).items():
        add: Any = {
            bool: w.add_bool,
            int: w.add_uint32,
            float: w.add_float32,
            str: w.add_string,
            list: w.add_array,
        }[type(value)]
        add(f"{arch}.{key}", value)
    for tensor, value in (file_tensors(name) | more).items():
        w.add_tensor(tensor, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
