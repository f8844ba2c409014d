"""Small random models of every architecture the engine runs, written as GGUF and PowerInfer files.

A model is a Spec (specs.py). Its weights are drawn from the spec's name in the layout in which a
checkpoint is published, and turned into the layout of a file by the steps that the converters take: q and
k rows reordered for the interleaved rotation, Falcon's fused projection regrouped, the down projection
transposed for a sparse file. Two-dimensional weights are rounded to F16 before anything uses them, so
a file holds the same numbers as the model that the goldens were computed with.

The drawing is exact: raw PCG64 words, integer sums and one double product, so every machine and every
numpy draws the same weights, and no weights need to be stored.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFValueType, GGUFWriter, quants

from tests.file_layout import Array as Array
from tests.file_layout import Tensors as Tensors
from tests.file_layout import file_tensors as file_tensors
from tests.file_layout import interleaved as interleaved
from tests.file_layout import llama3_divisors as llama3_divisors
from tests.file_layout import recurrent
from tests.file_layout import sparse_tensors as sparse_tensors
from tests.file_layout import stacked as stacked
from tests.specs import CONVERTED as CONVERTED
from tests.specs import SPECS as SPECS
from tests.specs import Rope as Rope
from tests.specs import Spec as Spec

Meta = dict[str, Any]

GOLDEN = Path(__file__).parent / "golden"
POSITIONS_BEFORE_ZERO = 2  # OPT's learned positions start at row 2


# ---- drawing -----------------------------------------------------------------------------------------------


def normal(label: str, *shape: int) -> Array:
    """Float64 values of mean 0 and variance 1, a bell of four 16-bit uniforms; the label is the seed."""
    raw = np.random.PCG64(zlib.crc32(label.encode())).random_raw(int(np.prod(shape)))
    parts = raw.astype("<u8").view("<u2").reshape(-1, 4).astype(np.int64)
    values: Array = (parts.sum(axis=1) - 2 * 65535) * (3.0**0.5 / 65536)
    return values.reshape(shape)


@functools.cache
def draw(spec: Spec) -> Tensors:
    """Weights under their published names, row-major as published: 2-D ones F16, 1-D ones F32.

    The result is shared by all callers: copy before you write.
    The scales keep every block's output near the size of the residual, attention neither flat nor
    one-hot, and logits at a standard deviation of about 2; norms and biases are far from 1 and 0.
    """
    if spec.layers:
        return recurrent().draw(spec)
    out: Tensors = {}
    gemma = spec.is_gemma
    posts = gemma and spec.family != "gemma"  # norms behind blocks
    d, ff, qw, kw = spec.n_embd, spec.n_ff, spec.n_head * spec.d_head, spec.n_head_kv * spec.d_head
    embd = 3 / d**0.5 if spec.tied else 1.0
    if gemma:  # multiplied by d**0.5; larger ones would outweigh what the blocks add, and repeat the token
        embd = 0.7 / d**0.5

    def matrix(name: str, rows: int, cols: int, std: float) -> None:
        out[name] = (normal(f"{spec.name}/{name}", rows, cols) * std).astype(np.float16)

    def linear(name: str, rows: int, cols: int, gain: float, bias: tuple[float, float] | None = None) -> None:
        matrix(f"{name}.weight", rows, cols, gain / cols**0.5)
        if bias is not None:
            vector(f"{name}.bias", rows, *bias)

    def vector(name: str, n: int, mean: float, std: float) -> None:
        out[name] = (mean + normal(f"{spec.name}/{name}", n) * std).astype(np.float32)

    def norm(name: str, n: int, *, bias: bool = False) -> None:
        plus_one = gemma and spec.family != "gemma4"
        vector(f"{name}.weight", n, 0.0 if plus_one else 1.0, 0.25)  # Gemma multiplies by 1 + weight
        if bias:
            vector(f"{name}.bias", n, 0.0, 0.15)

    if spec.family == "falcon":
        matrix("transformer.word_embeddings.weight", spec.n_vocab, d, embd)
        for i in range(spec.n_layer):
            p = f"transformer.h.{i}."
            for name in ("ln_attn", "ln_mlp") if spec.two_norms else ("input_layernorm",):
                norm(p + name, d, bias=True)
            linear(p + "self_attention.query_key_value", qw + 2 * kw, d, 1.0)
            linear(p + "self_attention.dense", d, qw, 1.0)
            linear(p + "mlp.dense_h_to_4h", ff, d, 1.0)
            linear(p + "mlp.dense_4h_to_h", d, ff, 1.5)
        norm("transformer.ln_f", d, bias=True)
    elif spec.family == "opt":
        matrix("model.decoder.embed_tokens.weight", spec.n_vocab, d, embd)
        matrix("model.decoder.embed_positions.weight", spec.n_ctx + POSITIONS_BEFORE_ZERO, d, 0.7)
        for i in range(spec.n_layer):
            p = f"model.decoder.layers.{i}."
            norm(p + "self_attn_layer_norm", d, bias=True)
            for name, gain in (("q", 1.0), ("k", 1.0), ("v", 1.0), ("out", 1.0)):
                linear(p + f"self_attn.{name}_proj", d, d, gain, (0.0, 0.15))
            norm(p + "final_layer_norm", d, bias=True)
            linear(p + "fc1", ff, d, 1.0, (-0.3, 0.3))
            linear(p + "fc2", d, ff, 2.0, (0.0, 0.15))
        norm("model.decoder.final_layer_norm", d, bias=True)
    else:
        gated, biased = spec.family not in ("arcee", "nemotron"), spec.family == "nemotron"
        oss, glm = spec.family == "gpt-oss", spec.family == "glm4moe"
        qkv_bias = (0.0, 0.3) if spec.family in ("qwen2", "qwen2moe", "gpt-oss", "glm4moe") else None
        bias = (0.0, 0.2) if oss else None
        mlp, gate_up_down = "mlp.", ("gate_proj", "up_proj", "down_proj")
        if spec.family == "mixtral":
            mlp, gate_up_down = "block_sparse_moe.", ("w1", "w3", "w2")
        if spec.family == "llama4":
            mlp = "feed_forward."
        matrix("model.embed_tokens.weight", spec.n_vocab, d, embd)
        for i in range(spec.n_layer):
            p = f"model.layers.{i}."
            if spec.family == "olmo2":
                norm(p + "post_feedforward_layernorm", d)
            else:
                norm(p + "input_layernorm", d, bias=biased)
            head, n_kv = spec.heads(i)
            qw, kw = spec.n_head * head, n_kv * head
            if spec.kv_rank:
                if spec.q_rank:
                    linear(p + "self_attn.q_a_proj", spec.q_rank, d, 1.0)
                    norm(p + "self_attn.q_a_layernorm", spec.q_rank)
                    linear(p + "self_attn.q_b_proj", qw, spec.q_rank, 1.0)
                else:
                    linear(p + "self_attn.q_proj", qw, d, 1.0)
                linear(p + "self_attn.kv_a_proj_with_mqa", spec.kv_rank + spec.d_rot, d, 1.0)
                norm(p + "self_attn.kv_a_layernorm", spec.kv_rank)
                per_head = spec.d_head - spec.d_rot + spec.d_value
                linear(p + "self_attn.kv_b_proj", spec.n_head * per_head, spec.kv_rank, 1.0)
                linear(p + "self_attn.o_proj", d, spec.n_head * spec.d_value, 1.0)
            else:
                linear(p + "self_attn.q_proj", qw, d, 1.0, qkv_bias)
                if not spec.borrows(i):
                    linear(p + "self_attn.k_proj", kw, d, 1.0, qkv_bias)
                    if not (spec.n_head_kv_full and spec.is_full(i)):
                        linear(p + "self_attn.v_proj", kw, d, 1.0, qkv_bias)
                if spec.family == "gemma4":  # whose scores are not scaled
                    for name in ("q_norm",) if spec.borrows(i) else ("q_norm", "k_norm"):
                        vector(p + f"self_attn.{name}.weight", head, head**-0.25, 0.1)
                    vector(p + "layer_scalar.weight", 1, 0.9, 0.1)
                linear(p + "self_attn.o_proj", d, qw, 1.0, bias)
            if oss:
                vector(p + "self_attn.sinks.weight", spec.n_head, 1.0, 1.0)
            if spec.family in ("qwen3", "qwen3moe", "glm4moe", "gemma3"):
                norm(p + "self_attn.q_norm", spec.d_head)
                norm(p + "self_attn.k_norm", spec.d_head)
            if spec.family in ("olmoe", "olmo2"):
                norm(p + "self_attn.q_norm", qw)
                norm(p + "self_attn.k_norm", kw)
            if spec.family != "cohere2":
                norm(p + "post_attention_layernorm", d, bias=biased)
            if posts:
                norm(p + "pre_feedforward_layernorm", d)
                norm(p + "post_feedforward_layernorm", d)
            n_expert = spec.n_expert if i >= spec.n_dense and (i + 1) % spec.expert_step == 0 else 0
            wide = 3.0 if oss else 1.0  # some gates and ups are beyond 7
            if n_expert:
                linear(p + mlp + "gate", n_expert, d, 1.0, (0.0, 0.05) if oss else None)
            names = [(f"{mlp}experts.{e}.", spec.n_ff_expert, 2.0) for e in range(n_expert)]
            if n_expert and spec.family == "deepseek2":
                names.append(("mlp.shared_experts.", spec.n_ff_shared, 1.0))
                if spec.q_rank:
                    vector(p + "mlp.gate.correction.bias", n_expert, 0.0, 0.002)
            elif n_expert and glm:
                vector(p + "mlp.gate.correction.bias", n_expert, 0.0, 0.002)
                names.append(("mlp.shared_experts.", spec.n_ff_shared, 1.0))
            elif n_expert and spec.n_ff_shared:
                names.append((f"{mlp}shared_expert.", spec.n_ff_shared, 2.0))
                if spec.family != "llama4":
                    linear(p + mlp + "shared_expert_gate", 1, d, 1.0)
            if spec.n_embd_layer:
                linear(p + "per_layer_input_gate", spec.n_embd_layer, d, 1.0)
                linear(p + "per_layer_projection", d, spec.n_embd_layer, 1.0)
                norm(p + "post_per_layer_input_norm", d)
            for name, width, gain in names or [(mlp, 2 * ff if spec.borrows(i) else ff, 2.0)]:
                if gated:
                    linear(p + name + gate_up_down[0], width, d, wide, bias)
                linear(p + name + gate_up_down[1], width, d, wide, bias)
                linear(p + name + gate_up_down[2], d, width, gain / wide**2, bias)
        norm("model.norm", d, bias=biased)
        if spec.n_embd_layer:
            n = spec.n_layer * spec.n_embd_layer
            matrix("model.embed_tokens_per_layer.weight", spec.n_vocab, n, spec.n_embd_layer**-0.5)
            linear("model.per_layer_model_projection", n, d, 1.0)
            norm("model.per_layer_projection_norm", spec.n_embd_layer)
    if not spec.tied:
        linear("lm_head", spec.n_vocab, d, 2.0)
    if spec.n_expert:
        separate_experts(spec, out)
    return out


def separate_experts(spec: Spec, weights: Tensors) -> None:
    """Keep a token's experts far from changing places, which would change an answer by a whole expert.

    Expert e is asked for by value e of the residual stream. A token's embedding holds there the steps of a
    ladder in an order of its own, and what blocks add to it is small.
    """
    n = spec.n_expert
    order = np.argsort(normal(f"{spec.name}/ladder", spec.n_vocab, n), axis=1, kind="stable")
    weights["model.embed_tokens.weight"][:, :n] = (order - (n - 1) / 2) * 0.5
    for name, value in weights.items():
        if name.rpartition(".")[0].endswith(("o_proj", "down_proj", ".w2")):
            value[:n] /= 32
        elif name.endswith("post_attention_layernorm.weight"):
            value[:n] = 1
        elif name.endswith(".gate.weight"):
            value /= 32
            value[:, :n] += np.eye(n, dtype=value.dtype)


def draw_predictor(spec: Spec) -> list[tuple[Array, Array]]:
    """One (fc1 [r, n_embd], fc2 [n_ff, r]) of F16 per layer, random: it knows nothing about the gate."""
    return [
        (
            (normal(f"{spec.name}/fc1/{i}", r, spec.n_embd) / spec.n_embd**0.5).astype(np.float16),
            (normal(f"{spec.name}/fc2/{i}", spec.n_ff, r) * (2 / r) ** 0.5).astype(np.float16),
        )
        for i, r in enumerate(spec.predictor)
    ]


def exact_predictor(spec: Spec, weights: Tensors) -> list[tuple[Array, Array]]:
    """A predictor whose score has the sign of the gate, for models with an RMSNorm before the FFN.

    The gate sees gate . (w * r / rms(r)); the predictor sees r alone. Dividing by the positive rms does not
    change a sign, so fc1 = [G; -G] with G = gate * w, and fc2 = [I, -I] undoes the relu: score = G . r.
    fc1 is F32, as the product of an F16 gate and an F32 norm has no F16 form.
    """
    eye = np.eye(spec.n_ff, dtype=np.float16)
    out = []
    for i in range(spec.n_layer):
        gate = weights[f"model.layers.{i}.mlp.gate_proj.weight"].astype(np.float32)
        folded = gate * weights[f"model.layers.{i}.post_attention_layernorm.weight"]
        out.append((np.concatenate([folded, -folded]), np.concatenate([eye, -eye], axis=1)))
    return out


# ---- files -------------------------------------------------------------------------------------------------


def metadata(spec: Spec) -> Meta:
    """Keys of the file, in the writers' order. ReLU models say so in `powerinfer.hidden_act`."""
    a = spec.arch
    meta: Meta = {"general.architecture": a, "general.name": spec.name}
    if spec.family == "falcon":
        meta["falcon.tensor_data_layout"] = "jploski"
    # OPT files count the two unused rows before position 0 as context.
    meta[f"{a}.context_length"] = spec.n_ctx + (POSITIONS_BEFORE_ZERO if a == "opt" else 0)
    meta[f"{a}.embedding_length"] = spec.n_embd
    meta[f"{a}.block_count"] = spec.n_layer
    meta[f"{a}.feed_forward_length"] = spec.n_ff
    meta[f"{a}.attention.head_count"] = spec.n_head
    if a == "falcon":
        meta["falcon.attention.head_count_kv"] = spec.n_head_kv
        meta["falcon.attention.layer_norm_epsilon"] = 1e-5
    elif a != "opt":  # an OPT file says nothing about kv heads, norms or rotation
        meta[f"{a}.rope.dimension_count"] = spec.d_rot or spec.d_head
        meta[f"{a}.attention.head_count_kv"] = spec.n_head_kv
        meta[f"{a}.attention.layer_norm_{'' if a in ('cohere2', 'nemotron') else 'rms_'}epsilon"] = 1e-5
        meta[f"{a}.rope.freq_base"] = spec.rope.base
        if spec.kv_rank:
            meta[f"{a}.attention.head_count_kv"] = 1
            meta[f"{a}.attention.kv_lora_rank"] = spec.kv_rank
            if spec.q_rank:
                meta[f"{a}.attention.q_lora_rank"] = spec.q_rank
                meta[f"{a}.rope.scaling.yarn_log_multiplier"] = 0.1
            meta[f"{a}.attention.key_length"] = spec.kv_rank + spec.d_rot
            meta[f"{a}.attention.value_length"] = spec.kv_rank
            meta[f"{a}.attention.key_length_mla"] = spec.d_head
            meta[f"{a}.attention.value_length_mla"] = spec.d_value
        elif spec.d_head * spec.n_head != spec.n_embd:
            meta[f"{a}.attention.key_length"] = spec.d_head
            meta[f"{a}.attention.value_length"] = spec.d_head
        if spec.rope.kind in ("linear", "yarn"):
            meta[f"{a}.rope.scaling.type"] = spec.rope.kind
            meta[f"{a}.rope.scaling.factor"] = spec.rope.factor
            meta[f"{a}.rope.scaling.original_context_length"] = spec.rope.n_ctx_orig
        if spec.window:
            meta[f"{a}.attention.sliding_window"] = spec.window
            if spec.family in ("gemma3", "gemma4", "olmo2"):
                meta[f"{a}.rope.freq_base_swa"] = spec.window_base
        if a == "llama4":
            meta["llama4.interleave_moe_layer_step"] = spec.expert_step
            meta["llama4.attention.temperature_length"] = 20
            meta["llama4.attention.temperature_scale"] = 0.5
        if a == "gemma4":
            layers = range(spec.n_layer)
            meta["gemma4.rope.dimension_count"] = spec.head_full
            meta["gemma4.rope.dimension_count_swa"] = spec.d_head
            for name in ("key", "value"):
                meta[f"gemma4.attention.{name}_length"] = spec.head_full
                meta[f"gemma4.attention.{name}_length_swa"] = spec.d_head
            meta["gemma4.attention.sliding_window_pattern"] = [not spec.is_full(i) for i in layers]
            meta["gemma4.attention.shared_kv_layers"] = spec.n_shared
            meta["gemma4.embedding_length_per_layer_input"] = spec.n_embd_layer
            meta["gemma4.final_logit_softcapping"] = 15.0
            if spec.n_shared:
                meta["gemma4.feed_forward_length"] = [spec.n_ff * (1 + spec.borrows(i)) for i in layers]
            if spec.n_head_kv_full:
                meta["gemma4.attention.head_count_kv"] = [spec.heads(i)[1] for i in layers]
        if a == "cohere2":
            meta["cohere2.logit_scale"] = spec.logit_scale
            meta["cohere2.rope.scaling.type"] = "none"
        if spec.soft_cap:
            meta[f"{a}.attn_logit_softcapping"] = spec.soft_cap
            meta[f"{a}.final_logit_softcapping"] = spec.soft_cap * 2
        if spec.n_expert:
            meta[f"{a}.expert_count"] = spec.n_expert
            meta[f"{a}.expert_used_count"] = spec.n_used
            if spec.n_ff_expert != spec.n_ff:
                meta[f"{a}.expert_feed_forward_length"] = spec.n_ff_expert
            if spec.n_ff_shared and spec.family not in ("glm4moe", "llama4", "deepseek2"):
                meta[f"{a}.expert_shared_feed_forward_length"] = spec.n_ff_shared
        if spec.family == "deepseek2" and spec.n_expert:
            meta["deepseek2.leading_dense_block_count"] = spec.n_dense
            meta["deepseek2.expert_shared_count"] = spec.n_ff_shared // spec.n_ff_expert
            meta["deepseek2.expert_weights_scale"] = 1.5
            meta["deepseek2.expert_group_count"] = spec.n_group
            meta["deepseek2.expert_group_used_count"] = max(spec.n_group // 2, 1)
            if spec.q_rank:
                meta["deepseek2.expert_gating_func"] = 2
                meta["deepseek2.expert_weights_norm"] = True
        if spec.family == "glm4moe":
            meta["glm4moe.leading_dense_block_count"] = spec.n_dense
            meta["glm4moe.expert_shared_count"] = 1
            meta["glm4moe.expert_gating_func"] = 2
            meta["glm4moe.expert_weights_scale"] = 1.5
            meta["glm4moe.expert_weights_norm"] = True
    if spec.layers:
        meta |= recurrent().metadata(spec)
        if spec.family.startswith("nemotron_h"):
            del meta[f"{a}.attention.layer_norm_rms_epsilon"]
    meta["general.file_type"] = 1
    if spec.relu:
        meta["powerinfer.hidden_act"] = spec.act
    meta.update(tokenizer(spec))
    return meta


def tokenizer(spec: Spec) -> Meta:
    """A small valid vocabulary of n_vocab tokens: bytes, the lower-case letters, then fillers.

    llama, arcee, mistral, mixtral, bamboo and Gemmas get a SentencePiece one with byte tokens, the others a
    byte-level BPE.
    """
    if (spec.arch in ("llama", "bamboo", "arcee") or spec.is_gemma) and spec.rope.kind != "llama3":
        tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
        kinds = [2, 3, 3] + [6] * 256
        pieces = ["\u2581", *"etaoinshrdlucmfwygpbvkxqjz"]
        tokens += pieces[: spec.n_vocab - len(tokens)]
        tokens += [f"\u2581w{i}" for i in range(spec.n_vocab - len(tokens))]
        kinds += [1] * (spec.n_vocab - len(kinds))
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(spec.n_vocab - 259)],
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]
    merges = ["t h", "i n", "e r", "a n", "\u0120 t", "r e", "o n", "e s"]
    tokens = letters + [merge.replace(" ", "") for merge in merges]
    tokens += [f"filler{i}" for i in range(spec.n_vocab - 1 - len(tokens))] + ["<|endoftext|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": {
            "llama": "llama-bpe",
            "falcon": "falcon",
            "opt": "gpt-2",
            "gpt-oss": "gpt-4o",
            "glm4moe": "glm4",
            "deepseek2": "deepseek-v3" if spec.q_rank else "deepseek-llm",
        }.get(spec.family, "qwen2"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (spec.n_vocab - 1) + [3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": spec.n_vocab - 1,
        "tokenizer.ggml.eos_token_id": spec.n_vocab - 1,
    }


def write(
    path: Path,
    meta: Mapping[str, Any],
    tensors: Mapping[str, Array],
    *,
    magic: bytes = b"GGUF",
    kind: GGMLQuantizationType | None = None,
    split: int = 0,
) -> Path:
    """Write a GGUF v3 file. Integers become u32, floats f32, lists i32/f32/string arrays by their first item,
    numpy arrays those of u32 or f32.

    Tensors keep their own F16 or F32; with `kind`, matrices (but routers) whose rows fill its blocks are
    stored as that. split: so many tensors in each of several files, whose names are made of `path`.
    """
    writer = GGUFWriter(
        path, str(meta["general.architecture"]), endianess=GGUFEndian.LITTLE, split_max_tensors=split
    )
    for key, value in meta.items():
        if key == "general.architecture":
            continue  # the writer has put it
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, np.uint64):
            writer.add_uint64(key, int(value))
        elif isinstance(value, np.ndarray):
            kind_of = {"u": GGUFValueType.UINT32, "f": GGUFValueType.FLOAT32}[value.dtype.kind]
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, sub_type=kind_of)
        else:
            writer.add_array(key, value)
    for name, value in tensors.items():
        if kind is not None and is_quantised(name, value) and value.shape[-1] % block_size(kind) == 0:
            writer.add_tensor(name, quants.quantize(value.astype(np.float32), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if magic != b"GGUF":
        with path.open("r+b") as file:
            file.write(magic)
    return path


def is_quantised(name: str, value: Array) -> bool:
    """Whether a tensor takes the format of a file's weights: matrices do, but for routers."""
    return value.ndim > 1 and "ffn_gate_inp" not in name and name.endswith(".weight")


def block_size(kind: GGMLQuantizationType) -> int:
    """Weights per block of a ggml type."""
    return int(GGML_QUANT_SIZES[kind][0])


def write_dense(path: Path, spec: Spec, *, kind: GGMLQuantizationType | None = None) -> Path:
    """The ordinary GGUF file of a spec."""
    return write(path, metadata(spec), file_tensors(spec, draw(spec)), kind=kind)


def dense_file(folder: Path, name: str) -> Path:
    """That of a spec by its name, in a folder that several tests share: written once."""
    path = folder / f"{name}.gguf"
    return path if path.exists() else write_dense(path, SPECS[name])


def write_sparse(
    path: Path,
    spec: Spec,
    predictor: Sequence[tuple[Array, Array]],
    threshold: float | None = None,
    *,
    kind: GGMLQuantizationType | None = None,
) -> Path:
    """The PowerInfer file of a spec; a threshold of None leaves the key out, which means 0."""
    meta = metadata(spec)
    meta.pop("powerinfer.hidden_act", None)  # the original's files have no such key: sparse means ReLU
    if threshold is not None:
        meta["powerinfer.sparse_threshold"] = float(threshold)
    tensors = sparse_tensors(file_tensors(spec, draw(spec)), predictor)
    if spec.family == "opt":
        tensors.pop("output.weight", None)
    return write(path, meta, tensors, magic=b"PWRI", kind=kind)


# ---- goldens -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Golden:
    """What a spec's model answers; `predictor` and `threshold` only for predicted ones.

    prompt [n] and greedy [64] are token ids; logits [len(rows), n_vocab] float32 are those of the positions
    `rows` of prompt + greedy. The first n_dense tokens use all neurons, whatever the predictor says.
    """

    spec: Spec
    prompt: Array
    greedy: Array
    logits: Array
    predictor: tuple[tuple[Array, Array], ...] = ()
    threshold: float = 0.0
    n_dense: int = 0

    @property
    def rows(self) -> slice:
        return slice(self.n_dense, self.n_dense + len(self.logits))

    def write(self, folder: Path) -> Path:
        """The model's file: sparse when this golden has a predictor, else dense."""
        if self.predictor:
            return write_sparse(
                folder / f"{self.spec.name}-sparse.gguf", self.spec, self.predictor, self.threshold
            )
        return write_dense(folder / f"{self.spec.name}.gguf", self.spec)


def checksum(weights: Mapping[str, Array]) -> int:
    """CRC-32 over names and bytes: a golden belongs to exactly these weights."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(np.ascontiguousarray(weights[name]).tobytes(), zlib.crc32(name.encode(), crc))
    return crc


@functools.cache
def golden(name: str, kind: str = "dense") -> Golden:
    """Load a golden and check that the drawn weights are those it was made from.

    kind: "dense" (all neurons; the logits are those of the prompt), "predicted" (all by the predictor;
    the prompt's logits), or "decode" (the prompt but its last token with all neurons; the logits from there).
    """
    spec = SPECS[name]
    path = GOLDEN / f"{name}{'' if kind == 'dense' else '-' + kind}.npz"
    with np.load(path, allow_pickle=False) as file:
        data = {key: file[key] for key in file.files}
    if int(data["checksum"]) != checksum(draw(spec)):
        raise ValueError(
            f"{path.name} was made from other weights than {name} has now: run scripts/make_goldens.py"
        )
    base = Golden(spec, data["prompt"], data["greedy"], data["logits"])
    if kind == "dense":
        return base
    return replace(
        base,
        predictor=tuple((data[f"fc1_{i}"], data[f"fc2_{i}"]) for i in range(spec.n_layer)),
        threshold=float(data["threshold"]),
        n_dense=len(base.prompt) - 1 if kind == "decode" else 0,
    )
