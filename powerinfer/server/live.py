"""The view of the engine that the page draws: speeds, memory, and what each layer computes and where."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._engine.expert_stats import ExpertStats
from .._engine.report import LlamaInfo
from .._engine.session import LayerStep
from ..async_llama import AsyncLlama


def engine_view(llm: AsyncLlama, info: LlamaInfo, name: str) -> dict[str, Any]:
    """See schemas.EngineView. info: as it was when the model was opened."""
    stats = llm.stats()
    model, session = info.model, info.session
    assert model is not None and session is not None
    plan = llm.llama.plan
    if plan is not None and not plan.uses_device:
        plan = None
    layers = []
    for i in range(model.n_layer):
        there = plan is not None and plan.layers[i].on_device
        hot = plan.share(i) if plan is not None else 0.0
        where = "device" if there and hot == 1 else "both" if there or hot else "cpu"
        step = stats.layers[i] if i < len(stats.layers) else None
        layers.append(
            {"computed": _computed(step, model.n_neurons), "on_device": round(hot, 4), "where": where}
        )
    vram = None
    if plan is not None:
        vram = {
            "budget_bytes": sum(own.budget_bytes for own in llm.plans if own is not None),
            "used_bytes": sum(own.bytes.total for own in llm.plans if own is not None),
            "device": plan.rates.gpu,
        }
    return {
        "model": name,
        "n_ctx": session.n_ctx,
        "n_layer": model.n_layer,
        "n_ff": model.n_neurons,
        "tokens_per_second": round(stats.tokens_per_s, 3),
        "prompt_tokens_per_second": round(stats.prompt_tokens_per_s, 3),
        "replicas": stats.n_replicas,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_used": round(stats.kv_used, 4),
        "vram": vram,
        "layers": layers,
        "experts": None if stats.experts is None else _experts(stats.experts, model.n_expert_used),
    }


def _experts(experts: ExpertStats, n_used: int) -> dict[str, Any]:
    layers = zip(experts.recent, experts.resident, strict=True)
    return {
        "n_expert": experts.resident.shape[1],
        "n_used": n_used,
        "hit_rate": round(experts.hit_rate, 4),
        "routes": {
            "device": experts.n_device,
            "streamed": experts.n_streamed,
            "zero_copy": experts.n_zero_copy,
            "cpu": experts.n_cpu,
        },
        "copies": experts.n_copies,
        "copied_bytes": experts.copied_bytes,
        "layers": [
            {
                "used": np.rint(1000 * recent).astype(int).tolist(),
                "on_device": "".join("1" if here else "0" for here in resident),
            }
            for recent, resident in layers
        ],
    }


def _computed(step: LayerStep | None, n_neurons: int) -> float | None:
    """Neurons computed per token, as a share; all of them where the step was computed densely; None: of no
    token, as in the last layer while a prompt is read."""
    if step is None or not step.n_tokens:
        return None
    if not step.n_sparse:
        return 1.0
    return round(min(step.n_computed / (step.n_sparse * n_neurons), 1.0), 4)
