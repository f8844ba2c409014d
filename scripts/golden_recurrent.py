"""The transformers models with recurrent layers, for make_goldens.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

from tests import models
from tests.recurrent import GRANITE


def build(spec: models.Spec, weights: models.Tensors, common: dict[str, Any], rope: dict[str, Any]) -> Any:
    """The model of a spec, in float32, with these weights."""
    options = common | {
        "num_key_value_heads": spec.n_head_kv,
        "intermediate_size": spec.n_ff,
        "rope_parameters": rope,
    }
    kinds = {"r": "conv" if spec.family in ("lfm2", "lfm2moe") else "linear_attention", "a": "full_attention"}
    options["layer_types"] = [kinds.get(kind, "") for kind in spec.layers]
    model: Any
    if spec.family == "lfm2":
        model = Lfm2ForCausalLM(
            Lfm2Config(**options, norm_eps=1e-5, block_auto_adjust_ff_dim=False, conv_L_cache=spec.n_conv)
        )
    elif spec.family == "lfm2moe":
        model = Lfm2MoeForCausalLM(
            Lfm2MoeConfig(
                **options,
                norm_eps=1e-5,
                conv_L_cache=spec.n_conv,
                num_experts=spec.n_expert,
                num_experts_per_tok=spec.n_used,
                moe_intermediate_size=spec.n_ff_expert,
                num_dense_layers=spec.n_dense,
                use_expert_bias=True,
                norm_topk_prob=True,
                experts_implementation="eager",
            )
        )
    elif spec.family in ("qwen3next", "qwen35", "qwen35moe"):
        options |= {
            "rms_norm_eps": 1e-5,
            "head_dim": spec.d_head,
            "linear_num_value_heads": spec.n_ssm_head,
            "linear_num_key_heads": spec.n_ssm_group,
            "linear_key_head_dim": spec.n_state,
            "linear_value_head_dim": spec.d_ssm,
            "linear_conv_kernel_dim": spec.n_conv,
            "rope_parameters": rope | {"partial_rotary_factor": spec.d_rot / spec.d_head},
        }
        if spec.n_expert:
            options |= {
                "num_experts": spec.n_expert,
                "num_experts_per_tok": spec.n_used,
                "moe_intermediate_size": spec.n_ff_expert,
                "shared_expert_intermediate_size": spec.n_ff_shared,
                "norm_topk_prob": True,
                "experts_implementation": "eager",
            }
        if spec.family == "qwen3next":
            model = Qwen3NextForCausalLM(Qwen3NextConfig(**options))
        elif spec.family == "qwen35":
            model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**options))
        else:
            model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**options))
    elif spec.family == "falcon-h1":
        del options["layer_types"]
        model = FalconH1ForCausalLM(
            FalconH1Config(
                **options,
                rms_norm_eps=1e-5,
                head_dim=spec.d_head,
                mamba_d_ssm=spec.n_ssm_head * spec.d_ssm,
                mamba_n_heads=spec.n_ssm_head,
                mamba_d_head=spec.d_ssm,
                mamba_n_groups=spec.n_ssm_group,
                mamba_d_state=spec.n_state,
                mamba_d_conv=spec.n_conv,
                mamba_rms_norm=False,
            )
        )
    elif spec.family == "granitehybrid":
        model = GraniteMoeHybridForCausalLM(
            GraniteMoeHybridConfig(
                **options | {"intermediate_size": spec.n_ff_expert},
                rms_norm_eps=1e-5,
                num_local_experts=spec.n_expert,
                num_experts_per_tok=spec.n_used,
                shared_intermediate_size=spec.n_ff_shared,
                position_embedding_type="nope",
                embedding_multiplier=GRANITE["embedding_scale"],
                residual_multiplier=GRANITE["residual_scale"],
                attention_multiplier=GRANITE["attention.scale"],
                logits_scaling=GRANITE["logit_scale"],
                mamba_n_heads=spec.n_ssm_head,
                mamba_d_head=spec.d_ssm,
                mamba_n_groups=spec.n_ssm_group,
                mamba_d_state=spec.n_state,
                mamba_d_conv=spec.n_conv,
                experts_implementation="eager",
            )
        )
    elif spec.family in ("nemotron_h", "nemotron_h_moe"):
        del options["layer_types"]
        kinds = {"r": "mamba", "a": "attention", "f": "moe" if spec.n_expert else "mlp"}
        if spec.n_expert:
            options |= {
                "n_routed_experts": spec.n_expert,
                "num_experts_per_tok": spec.n_used,
                "moe_intermediate_size": spec.n_ff_expert,
                "moe_shared_expert_intermediate_size": spec.n_ff_shared,
                "norm_topk_prob": True,
                "routed_scaling_factor": 1.5,
                "n_group": 1,
                "topk_group": 1,
                "experts_implementation": "eager",
            }
        model = NemotronHForCausalLM(
            NemotronHConfig(
                **options,
                layers_block_type=[kinds[kind] for kind in spec.layers],
                layer_norm_epsilon=1e-5,
                head_dim=spec.d_head,
                mlp_hidden_act="relu2",
                mamba_num_heads=spec.n_ssm_head,
                mamba_head_dim=spec.d_ssm,
                n_groups=spec.n_ssm_group,
                ssm_state_size=spec.n_state,
                conv_kernel=spec.n_conv,
            )
        )
    else:
        raise ValueError(f"no transformers model of {spec.family}")
    state = {name: torch.from_numpy(value.astype(np.float32)) for name, value in fused(spec, weights).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ValueError(f"{spec.name}: missing {missing}, unexpected {unexpected}")
    return model.float().eval()


def fused(spec: models.Spec, weights: models.Tensors) -> models.Tensors:
    """Weights by transformers' names: gate and up of a layer's experts in one tensor."""
    out: models.Tensors = {}
    for name, value in models.stacked(weights).items():
        name = name.replace("experts.w2", "experts.down_proj")
        if spec.family.startswith("nemotron_h"):
            name = name.replace("model.embed_tokens", "model.embeddings")
        if ".experts." not in name:
            out[name] = value
        elif "experts.w1" in name or "experts.gate_proj" in name:
            up = models.stacked(weights)[name.replace("w1", "w3").replace("gate_proj", "up_proj")]
            name = name.replace("w1.weight", "gate_up_proj").replace("gate_proj.weight", "gate_up_proj")
            out[name] = np.concatenate([value, up], axis=1)
        elif "down_proj" in name or spec.family == "nemotron_h_moe":
            out[name.removesuffix(".weight")] = value
    for name in [name for name in out if "shared_mlp" in name or "block_sparse_moe.gate" in name]:
        value = out.pop(name)
        if "gate_proj" in name:  # Granite's, gate and up together
            up = weights[name.replace("gate_proj", "up_proj")]
            out[name.replace("gate_proj", "input_linear")] = np.concatenate([value, up])
        elif "up_proj" not in name:
            out[name.replace("down_proj", "output_linear").replace("moe.gate", "moe.router")] = value
    return out


def select(cache: Any, rows: torch.Tensor) -> None:
    """Keeps these rows of a batch; transformers knows how for layers that attend."""
    for layer in cache.layers:
        if hasattr(layer, "batch_select_indices"):
            layer.batch_select_indices(rows)
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, {})
            for i, value in states.items() if isinstance(states, dict) else enumerate(states):
                if value is not None:
                    states[i] = value[rows]
