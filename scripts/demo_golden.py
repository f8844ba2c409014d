"""Reference logits of the demo model's file, by transformers in float32.

    python scripts/demo_golden.py --tokenizer FOLDER/tokenizer.model --model demo.gguf --out demo.npz

The weights are what `gguf`, the package, reads from the file, and the prompts' tokens are SentencePiece's: no
code of this package takes part. For each prompt i the result has `ids_i`; `logits_i` after the last of them,
with every neuron; and the greedy answer `greedy_i` with its end token.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from demo_tokenizer import IM_END, Message, Tokenizer
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

TALKS: list[list[Message]] = [
    [("user", "What are hot and cold neurons?")],
    [("user", "Tell me a story about a fox and a lighthouse.")],
    [("system", "You are a helpful assistant."), ("user", "What is 7 + 5?")],
]
N_GREEDY = 96
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down_t": "mlp.down_proj",
}


def read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Keys and dequantised tensors of a PowerInfer file: a GGUF file but for its first four bytes."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as copy:
        shutil.copyfile(path, copy.name)
        copy.write(b"GGUF")
        copy.flush()
        reader = gguf.GGUFReader(copy.name)
        keys = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
        tensors = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32, copy=True)
            for t in reader.tensors
        }
    return keys, tensors


def halves(rows: NDArray[np.float32], n_head: int) -> NDArray[np.float32]:
    """Rows from the order of a GGUF file (RoPE pairs side by side) to Hugging Face's (first halves first)."""
    n_rows, n_columns = rows.shape
    pairs = rows.reshape(n_head, n_rows // n_head // 2, 2, n_columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def build(keys: dict[str, Any], tensors: dict[str, NDArray[np.float32]]) -> Any:
    """The file's model, without its predictors."""
    n_head, n_head_kv = keys["llama.attention.head_count"], keys["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=len(tensors["token_embd.weight"]),
        hidden_size=keys["llama.embedding_length"],
        intermediate_size=keys["llama.feed_forward_length"],
        num_hidden_layers=keys["llama.block_count"],
        num_attention_heads=n_head,
        num_key_value_heads=n_head_kv,
        max_position_embeddings=keys["llama.context_length"],
        rms_norm_eps=keys["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": keys["llama.rope.freq_base"]},
        hidden_act="relu",
        tie_word_embeddings=False,
    )
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors["output.weight"],
    }
    for i in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            value = tensors[f"blk.{i}.{ours}.weight"]
            if ours in ("attn_q", "attn_k"):
                value = halves(value, n_head if ours == "attn_q" else n_head_kv)
            state[f"model.layers.{i}.{theirs}.weight"] = value.T if ours == "ffn_down_t" else value
    model: Any = LlamaForCausalLM(config)
    model.eval()
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in state.items()})
    return model


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Write reference logits of the demo model.")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.model")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="the GGUF file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .npz file to write")
    args = parser.parse_args()
    tokenizer = Tokenizer(args.tokenizer.read_bytes())
    model = build(*read(args.model))
    arrays: dict[str, Any] = {}
    for i, messages in enumerate(TALKS):
        ids = tokenizer.prompt(messages)
        logits = model(torch.tensor([ids])).logits[0, -1]
        greedy = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=N_GREEDY,
            do_sample=False,
            eos_token_id=IM_END,
            pad_token_id=IM_END,
        )[0, len(ids) :]
        arrays[f"ids_{i}"] = np.array(ids, np.int32)
        arrays[f"logits_{i}"] = logits.numpy()
        arrays[f"greedy_{i}"] = greedy.numpy().astype(np.int32)
        print(tokenizer.decode(greedy.tolist()))
    np.savez_compressed(args.out, **arrays)


if __name__ == "__main__":
    main()
