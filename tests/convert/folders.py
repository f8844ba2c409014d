"""Folders as Hugging Face publishes them, of the small random models of tests/models.py.

Weights stand under their published names in their published layout; the safetensors files are written here,
by the format's description. Vocabularies are those that models.tokenizer gives a spec, in the form in which
such a tokenizer is published.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer.models.convert.torch_file import write_torch
from tests import models

TYPES = {"<f4": "F32", "<f2": "F16", "<f8": "F64", "<i8": "I64", "<i4": "I32", "|u1": "U8", "|b1": "BOOL"}
SENTENCEPIECE = ("llama", "mistral", "mixtral", "bamboo")


def bf16(array: Any) -> Any:
    """The upper halves of float32 values, which must be bf16 already."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def write_safetensors(
    path: Path, tensors: Mapping[str, Any], *, types: Mapping[str, str] | None = None
) -> None:
    """types: of tensors whose arrays do not say it (BF16 as uint16)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        dtype = (types or {}).get(name) or TYPES[np.asarray(array).dtype.str]
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(np.shape(array)), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def config(spec: models.Spec) -> dict[str, Any]:
    """config.json as it was published with models of the family."""
    rope: dict[str, Any] | None = None
    if spec.rope.kind:
        rope = {"rope_type": spec.rope.kind, "factor": spec.rope.factor}
        rope["original_max_position_embeddings"] = spec.rope.n_ctx_orig
        if spec.rope.kind == "llama3":
            rope |= {"low_freq_factor": spec.rope.low, "high_freq_factor": spec.rope.high}
    out: dict[str, Any] = {
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.n_embd,
        "num_hidden_layers": spec.n_layer,
        "num_attention_heads": spec.n_head,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "float16",
        "transformers_version": "4.37.0",
    }
    if spec.family == "falcon":
        return out | {
            "model_type": "falcon",
            "architectures": ["FalconForCausalLM"],
            "alibi": False,
            "bias": False,
            "parallel_attn": True,
            "multi_query": True,
            "new_decoder_architecture": spec.two_norms,
            "num_kv_heads": spec.n_head_kv if spec.two_norms else spec.n_head,
            "activation": spec.act,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": spec.n_ctx,
        }
    if spec.family == "opt":
        return out | {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "ffn_dim": spec.n_ff,
            "max_position_embeddings": spec.n_ctx,
            "word_embed_proj_dim": spec.n_embd,
            "do_layer_norm_before": True,
            "activation_function": "relu",
        }
    name = {
        "llama": "Llama",
        "mistral": "Mistral",
        "mixtral": "Mixtral",
        "bamboo": "Bamboo",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "qwen2moe": "Qwen2Moe",
        "qwen3moe": "Qwen3Moe",
        "olmoe": "Olmoe",
        "glm4moe": "Glm4Moe",
        "gpt-oss": "GptOss",
    }
    types = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "glm4moe": "glm4_moe", "gpt-oss": "gpt_oss"}
    if spec.family == "glm4moe":
        out |= {
            "n_routed_experts": spec.n_expert,
            "num_experts_per_tok": spec.n_used,
            "moe_intermediate_size": spec.n_ff_expert,
            "n_shared_experts": spec.n_ff_shared // spec.n_ff_expert,
            "first_k_dense_replace": spec.n_dense,
            "num_nextn_predict_layers": 1,
            "routed_scaling_factor": 1.5,
            "n_group": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "partial_rotary_factor": spec.d_rot / spec.d_head,
        }
    elif spec.family == "gpt-oss":
        out |= {"num_local_experts": spec.n_expert, "num_experts_per_tok": spec.n_used}
        out |= {"sliding_window": spec.window, "swiglu_limit": 7.0}
        assert rope is not None
        rope["truncate"] = False
    elif spec.family == "mixtral":
        out |= {"num_local_experts": spec.n_expert, "num_experts_per_tok": spec.n_used}
    elif spec.n_expert:
        out |= {"num_experts": spec.n_expert, "num_experts_per_tok": spec.n_used}
        out |= {"norm_topk_prob": spec.family == "qwen3moe"}
        if spec.family != "olmoe":
            out |= {
                "moe_intermediate_size": spec.n_ff_expert,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        if spec.n_ff_shared:
            out |= {"shared_expert_intermediate_size": spec.n_ff_shared}
    out |= {
        "model_type": types.get(spec.family, spec.family),
        "architectures": [name[spec.family] + "ForCausalLM"],
        "intermediate_size": spec.n_ff,
        "num_key_value_heads": spec.n_head_kv,
        "max_position_embeddings": spec.n_ctx,
        "rms_norm_eps": 1e-5,
        "rope_theta": spec.rope.base,
        "rope_scaling": rope,
        "hidden_act": {"drelu": "dReLU", "clamped": "silu"}.get(spec.act, spec.act),
    }
    if spec.head_dim:
        out["head_dim"] = spec.head_dim
    return out


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), "utf-8")


def write_folder(
    folder: Path, spec: models.Spec, *, form: str = "safetensors", weights: Mapping[str, Any] | None = None
) -> Path:
    """form: "safetensors", "shards" (of safetensors, with an index), "bin" or "bin-shards"."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config(spec))
    tensors = dict(published(spec, models.draw(spec)) if weights is None else weights)
    write_weights(folder, tensors, form)
    write_tokenizer(folder, spec)
    return folder


def published(spec: models.Spec, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Under the names of checkpoints, where models.draw has others: gpt-oss's experts, which are transposed,
    columns of gate and up in turn, and single tensors without .weight."""
    if spec.family != "gpt-oss":
        return {
            k.replace("gate.correction.bias", "gate.e_score_correction_bias"): v for k, v in weights.items()
        }
    out, experts = {}, {}
    for name, value in weights.items():
        before, _, rest = name.partition(".experts.")
        if rest:
            experts.setdefault((before, rest.partition(".")[2]), []).append(value)
        else:
            out[name.replace("mlp.gate.", "mlp.router.").replace("sinks.weight", "sinks")] = value
    for before in {before for before, _ in experts}:
        parts = {rest: np.stack(values) for (one, rest), values in experts.items() if one == before}
        both = np.stack([parts["gate_proj.weight"], parts["up_proj.weight"]], axis=2)
        bias = np.stack([parts["gate_proj.bias"], parts["up_proj.bias"]], axis=2)
        both = both.reshape(spec.n_expert, -1, spec.n_embd)
        out[f"{before}.experts.gate_up_proj"] = np.ascontiguousarray(both.swapaxes(1, 2))
        out[f"{before}.experts.gate_up_proj_bias"] = bias.reshape(spec.n_expert, -1)
        down = parts["down_proj.weight"].swapaxes(1, 2)
        out[f"{before}.experts.down_proj"] = np.ascontiguousarray(down)
        out[f"{before}.experts.down_proj_bias"] = parts["down_proj.bias"]
    return out


def write_weights(folder: Path, tensors: Mapping[str, Any], form: str) -> None:
    names = list(tensors)
    if form == "safetensors":
        write_safetensors(folder / "model.safetensors", tensors)
    elif form == "bin":
        write_torch(folder / "pytorch_model.bin", tensors)
    else:
        stem, suffix = ("model", ".safetensors") if form == "shards" else ("pytorch_model", ".bin")
        parts = [names[i::3] for i in range(3)]
        placed = {}
        for i, part in enumerate(parts):
            path = folder / f"{stem}-{i + 1:05}-of-00003{suffix}"
            write = write_safetensors if form == "shards" else write_torch
            write(path, {name: tensors[name] for name in part})
            placed |= dict.fromkeys(part, path.name)
        write_json(folder / f"{stem}{suffix}.index.json", {"metadata": {}, "weight_map": placed})


def write_predictors(
    folder: Path, predictor: Iterable[tuple[Any, Any]], threshold: float | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, (fc1, fc2) in enumerate(predictor):
        write_torch(folder / f"model_{i}.pt", {"fc1.weight": fc1, "fc2.weight": fc2})
    if threshold is not None:
        write_json(folder / "config.json", {"sparse_threshold": threshold})
    return folder


# ---- vocabularies ------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: Any) -> bytes:
    """One field of a protocol buffer."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value & (1 << 64) - 1)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], *, trainer: bytes = b""
) -> bytes:
    """A tokenizer.model of BPE with byte tokens, which changes nothing in the text."""
    pieces = b""
    for token, score, kind in zip(tokens, scores, types, strict=True):
        entry = field(1, token) + field(2, float(score)) + (field(3, kind) if kind != 1 else b"")
        pieces += field(1, entry)
    normalizer = field(1, "identity") + field(3, 1) + field(4, 0) + field(5, 1)
    usual = field(3, 2) + field(35, 1) + field(40, 0) + field(41, 1) + field(42, 2) + field(43, -1)
    return pieces + field(2, usual + trainer) + field(3, normalizer)


LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_CASED = r"""[^\r\n\p{L}\p{N}]?%s(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O_PATTERN = (
    f"{_CASED % f'{_UPPER}*{_LOWER}+'}|{_CASED % f'{_UPPER}+{_LOWER}*'}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# As published with the models: scheme name, pre_tokenizer, normalizer, ignore_merges.
PRE_TOKENIZERS: dict[str, tuple[Any, Any, bool]] = {
    "llama-bpe": (
        {"type": "Sequence", "pretokenizers": [_split(LLAMA3_PATTERN), _byte_level(False)]},
        None,
        True,
    ),
    "glm4": (
        {"type": "Sequence", "pretokenizers": [_split(LLAMA3_PATTERN), _byte_level(False)]},
        None,
        True,
    ),
    "gpt-4o": (
        {"type": "Sequence", "pretokenizers": [_split(GPT4O_PATTERN), _byte_level(False)]},
        None,
        False,
    ),
    "qwen2": (
        {
            "type": "Sequence",
            "pretokenizers": [_split(LLAMA3_PATTERN.replace("{1,3}", "")), _byte_level(False)],
        },
        {"type": "NFC"},
        False,
    ),
    "falcon": (
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Punctuation", "behavior": "Contiguous"},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
                {"type": "Digits", "individual_digits": False},
                _split("[0-9][0-9][0-9]"),
            ],
        },
        None,
        False,
    ),
    "gpt-2": (_byte_level(True), None, False),
    "starcoder": (
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
        },
        None,
        False,
    ),
}


def tokenizer_json(
    pre: str, vocab: Mapping[str, int], merges: Sequence[Any], added: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """A byte-level tokenizer.json. merges: texts or pairs; added: at least id, content and special."""
    pre_tokenizer, normalizer, ignore_merges = PRE_TOKENIZERS[pre]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**flags, **token} for token in added],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": dict(vocab),
            "merges": list(merges),
        },
    }


def write_tokenizer(folder: Path, spec: models.Spec) -> None:
    """The tokenizer of a spec as it is published: SentencePiece, tokenizer.json, or OPT's two files."""
    meta = models.tokenizer(spec)
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    if meta["tokenizer.ggml.model"] == "llama":
        data = sentencepiece(tokens, meta["tokenizer.ggml.scores"], types)
        (folder / "tokenizer.model").write_bytes(data)
        write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
        return
    end = tokens[-1]
    vocab = {token: i for i, token in enumerate(tokens)}
    write_json(folder / "tokenizer_config.json", {"bos_token": end, "eos_token": end})
    if spec.family == "opt":
        write_json(folder / "vocab.json", vocab)
        (folder / "merges.txt").write_text(
            "\n".join(["#version: 0.2", *meta["tokenizer.ggml.merges"], ""]), "utf-8"
        )
        return
    added = [{"id": len(tokens) - 1, "content": end, "special": True}]
    del vocab[end]
    pre = meta["tokenizer.ggml.pre"]
    write_json(folder / "tokenizer.json", tokenizer_json(pre, vocab, meta["tokenizer.ggml.merges"], added))
