"""The demo model as a Hugging Face folder: config, tokenizer and float16 weights in shards.

The layout is that of `LlamaForCausalLM` with `hidden_act` "relu": transformers can load it, and
`powerinfer convert` makes a GGUF file of it, as of any other folder of its kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from demo_model import Shape
from demo_tokenizer import BOS, CHAT_TEMPLATE, EOS, IM_END, SPECIAL, UNK
from numpy.typing import NDArray

SHARD_BYTES = 14 << 20
Weights = Mapping[str, NDArray[np.float16]]


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: Weights) -> None:
    """A safetensors file: the header's length (u64), the header (JSON, padded to 8 bytes), the data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": "F16",
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value, "<f2").tobytes())


def _shards(weights: Weights) -> list[dict[str, NDArray[np.float16]]]:
    """The weights in their order, in parts of at most SHARD_BYTES."""
    parts: list[dict[str, NDArray[np.float16]]] = [{}]
    n_bytes = 0
    for name, value in weights.items():
        if parts[-1] and n_bytes + value.nbytes > SHARD_BYTES:
            parts.append({})
            n_bytes = 0
        parts[-1][name] = value
        n_bytes += value.nbytes
    return parts


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.n_vocab,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.n_head_kv,
        "head_dim": shape.head_dim,
        "hidden_act": "relu",
        "max_position_embeddings": shape.n_ctx,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        "torch_dtype": "float16",
    }


def _tokenizer_config() -> dict[str, Any]:
    special = {
        str(i): {
            "content": piece,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for i, piece in enumerate(SPECIAL)
    }
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "unk_token": SPECIAL[UNK],
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[IM_END],
        "pad_token": SPECIAL[EOS],
        "added_tokens_decoder": special,
        "chat_template": CHAT_TEMPLATE,
    }


def write_folder(path: Path, shape: Shape, tokenizer: bytes, weights: Weights) -> None:
    """Write the folder `path`. `tokenizer`: a serialised SentencePiece model; `weights` by their names."""
    path.mkdir(parents=True, exist_ok=True)
    _json(path / "config.json", _config(shape))
    _json(path / "tokenizer_config.json", _tokenizer_config())
    (path / "tokenizer.model").write_bytes(tokenizer)
    parts = _shards(weights)
    places: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        _write_safetensors(path / file, part)
        places |= dict.fromkeys(part, file)
    total = sum(value.nbytes for value in weights.values())
    _json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})
