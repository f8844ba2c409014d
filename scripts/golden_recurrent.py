"""The transformers models with recurrent layers, for make_goldens.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from tests import models


def build(spec: models.Spec, weights: models.Tensors, common: dict[str, Any], rope: dict[str, Any]) -> Any:
    """The model of a spec, in float32, with these weights."""
    options = common | {
        "num_key_value_heads": spec.n_head_kv,
        "intermediate_size": spec.n_ff,
        "rope_parameters": rope,
    }
    kinds = {"lfm2": {"r": "conv", "a": "full_attention"}}.get(
        spec.family, {"r": "linear_attention", "a": "full_attention"}
    )
    options["layer_types"] = [kinds.get(kind, "") for kind in spec.layers]
    model: Any
    if spec.family == "lfm2":
        model = Lfm2ForCausalLM(
            Lfm2Config(**options, norm_eps=1e-5, block_auto_adjust_ff_dim=False, conv_L_cache=spec.n_conv)
        )
    else:
        raise ValueError(f"no transformers model of {spec.family}")
    state = {name: torch.from_numpy(value.astype(np.float32)) for name, value in models.stacked(weights).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ValueError(f"{spec.name}: missing {missing}, unexpected {unexpected}")
    return model.float().eval()


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
