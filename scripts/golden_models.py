"""Small random models (tests/specs.py) as transformers' classes: what the scripts that make goldens ask."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    ArceeConfig,
    ArceeForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import golden_recurrent

from tests import models


class SymmetricReluMlp(nn.Module):
    """Bamboo's FFN: relu on gate and up."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = torch.relu(self.gate_proj(x)), torch.relu(self.up_proj(x))
        out: torch.Tensor = self.down_proj(gate * up)
        return out


def rope_parameters(rope: models.Rope) -> dict[str, Any]:
    """The rope_parameters of a transformers config."""
    out: dict[str, Any] = {"rope_type": rope.kind or "default", "rope_theta": rope.base}
    if rope.kind:
        out |= {"factor": rope.factor, "original_max_position_embeddings": rope.n_ctx_orig}
    if rope.kind == "linear":
        del out["original_max_position_embeddings"]
    if rope.kind == "llama3":
        out |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    return out


def build(spec: models.Spec, weights: models.Tensors) -> Any:
    """The transformers model of a spec, in float32, with these weights."""
    common: dict[str, Any] = {
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.n_embd,
        "num_hidden_layers": spec.n_layer,
        "num_attention_heads": spec.n_head,
        "max_position_embeddings": spec.n_ctx,
        "tie_word_embeddings": spec.tied,
        "attn_implementation": "eager",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    gated: dict[str, Any] = common | {
        "intermediate_size": spec.n_ff,
        "num_key_value_heads": spec.n_head_kv,
        "head_dim": spec.d_head,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope_parameters(spec.rope),
        "hidden_act": spec.act if spec.act == "relu2" else "relu" if spec.relu else spec.act,
    }
    model: Any
    if spec.layers:
        return golden_recurrent.build(spec, weights, common, rope_parameters(spec.rope))
    if spec.family == "falcon":
        model = FalconForCausalLM(
            FalconConfig(
                **common,
                ffn_hidden_size=spec.n_ff,
                num_kv_heads=spec.n_head_kv,
                multi_query=not spec.two_norms,
                new_decoder_architecture=spec.two_norms,
                parallel_attn=True,
                bias=False,
                alibi=False,
                activation=spec.act,
                layer_norm_epsilon=1e-5,
                rope_parameters=rope_parameters(spec.rope),
            )
        )
    elif spec.family == "opt":
        model = OPTForCausalLM(
            OPTConfig(
                **common,
                ffn_dim=spec.n_ff,
                word_embed_proj_dim=spec.n_embd,
                do_layer_norm_before=True,
                activation_function=spec.act,
                dropout=0.0,
            )
        )
    elif spec.family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**gated))
    elif spec.family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**gated))
    elif spec.family == "qwen3moe":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **gated | {"experts_implementation": "eager"},
                num_experts=spec.n_expert,
                num_experts_per_tok=spec.n_used,
                moe_intermediate_size=spec.n_ff_expert,
                norm_topk_prob=True,
            )
        )
    elif spec.family == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(
                **gated | {"experts_implementation": "eager"},
                num_local_experts=spec.n_expert,
                num_experts_per_tok=spec.n_used,
                sliding_window=None,
            )
        )
    elif spec.family == "qwen2moe":
        model = Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **gated | {"experts_implementation": "eager"},
                num_experts=spec.n_expert,
                num_experts_per_tok=spec.n_used,
                moe_intermediate_size=spec.n_ff_expert,
                shared_expert_intermediate_size=spec.n_ff_shared,
                norm_topk_prob=False,
            )
        )
    elif spec.family == "olmoe":
        model = OlmoeForCausalLM(
            OlmoeConfig(
                **gated | {"experts_implementation": "eager"},
                num_experts=spec.n_expert,
                num_experts_per_tok=spec.n_used,
                norm_topk_prob=False,
            )
        )
    elif spec.family == "gpt-oss":
        del gated["hidden_act"]
        model = GptOssForCausalLM(
            GptOssConfig(
                **gated
                | {
                    "experts_implementation": "eager",
                    "intermediate_size": spec.n_ff_expert,
                    "num_local_experts": spec.n_expert,
                    "num_experts_per_tok": spec.n_used,
                    "sliding_window": spec.window,
                    "rope_parameters": rope_parameters(spec.rope) | {"truncate": False},
                }
            )
        )
    elif spec.family == "glm4moe":
        rotated = {"partial_rotary_factor": spec.d_rot / spec.d_head}
        model = Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **gated
                | {
                    "experts_implementation": "eager",
                    "n_routed_experts": spec.n_expert,
                    "num_experts_per_tok": spec.n_used,
                    "moe_intermediate_size": spec.n_ff_expert,
                    "n_shared_experts": spec.n_ff_shared // spec.n_ff_expert,
                    "first_k_dense_replace": spec.n_dense,
                    "num_nextn_predict_layers": 0,
                    "routed_scaling_factor": 1.5,
                    "norm_topk_prob": True,
                    "n_group": 1,
                    "topk_group": 1,
                    "attention_bias": True,
                    "use_qk_norm": True,
                    "rope_parameters": rope_parameters(spec.rope) | rotated,
                }
            )
        )
    elif spec.name == "olmo3":
        model = Olmo3ForCausalLM(
            Olmo3Config(
                **{k: v for k, v in gated.items() if k not in ("head_dim", "rope_parameters")},
                sliding_window=spec.window,
                rope_parameters={
                    "full_attention": rope_parameters(spec.rope),
                    "sliding_attention": rope_parameters(models.Rope(spec.window_base)),
                },
                layer_types=[
                    "full_attention" if i % 4 == 3 else "sliding_attention" for i in range(spec.n_layer)
                ],
            )
        )
    elif spec.family == "olmo2":
        model = Olmo2ForCausalLM(Olmo2Config(**{k: v for k, v in gated.items() if k != "head_dim"}))
    elif spec.family == "deepseek2":
        del gated["head_dim"]
        v3 = spec.q_rank > 0
        latent = gated | {
            "experts_implementation": "eager",
            "num_key_value_heads": spec.n_head,
            "q_lora_rank": spec.q_rank or None,
            "kv_lora_rank": spec.kv_rank,
            "qk_rope_head_dim": spec.d_rot,
            "qk_nope_head_dim": spec.d_head - spec.d_rot,
            "v_head_dim": spec.d_value,
            "n_routed_experts": spec.n_expert or 8,
            "num_experts_per_tok": spec.n_used or 2,
            "moe_intermediate_size": spec.n_ff_expert,
            "n_shared_experts": spec.n_ff_shared // (spec.n_ff_expert or 1),
            "first_k_dense_replace": spec.n_dense if spec.n_expert else spec.n_layer,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": v3,
            "n_group": spec.n_group,
            "topk_group": max(spec.n_group // 2, 1),
        }
        if v3:
            mscale = {"mscale": 1.0, "mscale_all_dim": 1.0}  # cos and sin as they are, scores scaled
            rope = rope_parameters(spec.rope) | mscale
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**latent | {"rope_parameters": rope}))
        else:
            method = {"topk_method": "group_limited_greedy"}
            model = DeepseekV2ForCausalLM(DeepseekV2Config(**latent | method))
    elif spec.family == "cohere2":
        del gated["rms_norm_eps"], gated["head_dim"]
        model = Cohere2ForCausalLM(
            Cohere2Config(
                **gated
                | {
                    "layer_norm_eps": 1e-5,
                    "sliding_window": spec.window,
                    "layer_types": [
                        "full_attention" if i % 4 == 3 else "sliding_attention" for i in range(spec.n_layer)
                    ],
                    "logit_scale": spec.logit_scale,
                }
            )
        )
    elif spec.family == "arcee":
        model = ArceeForCausalLM(ArceeConfig(**gated))
    elif spec.family == "nemotron":
        del gated["rms_norm_eps"]
        rotated = {"partial_rotary_factor": spec.d_rot / spec.d_head}
        model = NemotronForCausalLM(
            NemotronConfig(
                **gated | {"norm_eps": 1e-5, "rope_parameters": rope_parameters(spec.rope) | rotated}
            )
        )
    elif spec.family == "gemma":
        model = GemmaForCausalLM(GemmaConfig(**gated | {"hidden_act": "gelu_pytorch_tanh"}))
    elif spec.family == "gemma2":
        del gated["hidden_act"]
        model = Gemma2ForCausalLM(
            Gemma2Config(
                **gated
                | {
                    "hidden_activation": "gelu_pytorch_tanh",
                    "query_pre_attn_scalar": spec.d_head,
                    "sliding_window": spec.window,
                    "attn_logit_softcapping": spec.soft_cap,
                    "final_logit_softcapping": spec.soft_cap * 2,
                }
            )
        )
    elif spec.family == "gemma3":
        del gated["hidden_act"]
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                **gated
                | {
                    "hidden_activation": "gelu_pytorch_tanh",
                    "query_pre_attn_scalar": spec.d_head,
                    "sliding_window": spec.window,
                    "rope_parameters": {
                        "full_attention": rope_parameters(spec.rope),
                        "sliding_attention": rope_parameters(models.Rope(spec.window_base)),
                    },
                }
            )
        )
    elif spec.family == "llama4":
        full = [i % 4 == 3 for i in range(spec.n_layer)]
        model = Llama4ForCausalLM(
            Llama4TextConfig(
                **gated
                | {
                    "intermediate_size": spec.n_ff_expert,
                    "intermediate_size_mlp": spec.n_ff,
                    "num_local_experts": spec.n_expert,
                    "num_experts_per_tok": spec.n_used,
                    "interleave_moe_layer_step": spec.expert_step,
                    "no_rope_layers": [int(not one) for one in full],
                    "layer_types": ["full_attention" if one else "chunked_attention" for one in full],
                    "attention_chunk_size": spec.window,
                    "use_qk_norm": True,
                    "attn_temperature_tuning": True,
                    "floor_scale": 20,
                    "attn_scale": 0.5,
                }
            )
        )
    elif spec.family == "gemma4":
        del gated["hidden_act"]
        kinds = ["full_attention" if spec.is_full(i) else "sliding_attention" for i in range(spec.n_layer)]
        model = Gemma4ForCausalLM(
            Gemma4TextConfig(
                **gated
                | {
                    "hidden_activation": "gelu_pytorch_tanh",
                    "layer_types": kinds,
                    "global_head_dim": spec.head_full,
                    "num_global_key_value_heads": spec.n_head_kv_full or None,
                    "attention_k_eq_v": spec.n_head_kv_full > 0,
                    "num_kv_shared_layers": spec.n_shared,
                    "use_double_wide_mlp": True,
                    "hidden_size_per_layer_input": spec.n_embd_layer,
                    "vocab_size_per_layer_input": spec.n_vocab,
                    "sliding_window": spec.window,
                    "final_logit_softcapping": 15.0,
                    "rope_parameters": {
                        "full_attention": {
                            "rope_type": "proportional",
                            "partial_rotary_factor": 0.25,
                            "rope_theta": spec.rope.base,
                        },
                        "sliding_attention": rope_parameters(models.Rope(spec.window_base)),
                    },
                }
            )
        )
        weights = {
            name.removesuffix(".weight") if "scalar" in name else name: w for name, w in weights.items()
        }
    elif spec.family in ("mistral", "bamboo"):
        model = MistralForCausalLM(MistralConfig(**gated, sliding_window=None))
    else:
        model = LlamaForCausalLM(LlamaConfig(**gated))
    if spec.act == "drelu":
        for layer in model.model.layers:
            layer.mlp = SymmetricReluMlp(layer.mlp)
    special = {"gpt-oss": fuse_gpt_oss, "llama4": fuse_llama4}
    fuse = special.get(spec.family, fuse_experts)
    stacked = fuse(models.stacked(weights))
    if spec.family == "nemotron":  # it adds 1 to its norms' weights
        stacked = {n: w - 1 if n.endswith("norm.weight") else w for n, w in stacked.items()}
    state = {name: torch.from_numpy(value.astype(np.float32)) for name, value in stacked.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or [name for name in missing if not (spec.tied and name == "lm_head.weight")]:
        raise ValueError(f"{spec.name}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.float().eval()


def fuse_gpt_oss(weights: models.Tensors) -> models.Tensors:
    """gpt-oss's names: experts transposed, columns of gate and up in turn."""
    out: models.Tensors = {}
    for name, value in weights.items():
        if name.endswith(("experts.up_proj.weight", "experts.up_proj.bias")):
            continue
        stem, _, kind = name.rpartition(".")
        if ".experts." in name:
            if stem.endswith("gate_proj"):
                up = weights[name.replace("gate_proj", "up_proj")]
                stem = stem.replace("gate_proj", "gate_up_proj")
                value = np.stack([value, up], axis=2).reshape(len(value), -1, *value.shape[2:])
            name = stem if kind == "weight" else f"{stem}_bias"
            value = value.swapaxes(1, 2) if kind == "weight" else value
        out[name.removesuffix(".weight") if "sinks" in name else name.replace("mlp.gate", "mlp.router")] = (
            value
        )
    return out


def fuse_llama4(weights: models.Tensors) -> models.Tensors:
    """Llama 4's names: experts transposed, gate beside up."""
    fused = fuse_experts(weights)
    out = {name.replace("feed_forward.gate.", "feed_forward.router."): w for name, w in fused.items()}
    return {name: w.swapaxes(1, 2) if ".experts." in name else w for name, w in out.items()}


def fuse_experts(weights: models.Tensors) -> models.Tensors:
    """Gate and up of a layer's experts as transformers holds them, in one tensor."""
    published = {"block_sparse_moe": "mlp", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    for old, new in published.items():  # Mixtral's
        weights = {name.replace(old, new): w for name, w in weights.items()}
    weights = {name.replace("correction.bias", "e_score_correction_bias"): w for name, w in weights.items()}
    out = {name.removesuffix(".weight") if ".experts." in name else name: w for name, w in weights.items()}
    for name in [name for name in out if name.endswith(".experts.gate_proj")]:
        up = out.pop(name.replace("gate_proj", "up_proj"))
        out[name.replace("gate_proj", "gate_up_proj")] = np.concatenate([out.pop(name), up], axis=1)
    return out
