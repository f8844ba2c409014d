"""How many tokens the conversations of one session hold together, where nobody says it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .._engine.devices import Devices
from .._engine.model import Model

_SHARE = 0.85  # of a budget; the rest is for what a step works in
_BESIDE_BYTES = 1 << 30  # a GPU's context, and prompts


def pool_on_gpu(
    n_ctx: int, n_parallel: int, *, budget_bytes: int, model_bytes: int, position_bytes: int
) -> int:
    """n_ctx for each of n_parallel, or as much as the budget holds beside the whole model; for two of them in
    any case, which takes neurons' places where it must."""
    room = int(_SHARE * budget_bytes) - _BESIDE_BYTES - model_bytes
    return min(n_ctx * n_parallel, max(n_ctx * min(n_parallel, 2), room // max(position_bytes, 1)))


def pool_on(
    devices: Devices | None,
    path: str | os.PathLike[str],
    n_ctx: int,
    n_parallel: int,
    options: Mapping[str, Any],
) -> int:
    """The same of a file on these devices, with Llama's options. Of several devices each has a part of the
    model: then it is for two of n_parallel."""
    is_one = devices is not None and devices.kind == "cuda" and len(devices.indices) == 1
    is_whole = (options.get("n_gpu_layers") or 0) <= 0 and options.get("draft_model") is None
    if devices is None or not (is_one and is_whole) or n_parallel <= 2:
        return n_ctx * min(n_parallel, 2)
    types: dict[str, Any] = {name: options.get(name) or "f16" for name in ("type_k", "type_v")}
    with Model(path) as model:
        one, two = (model.kv_bytes(n_ctx, n_pool=n * n_ctx, **types) for n in (1, 2))
        return pool_on_gpu(
            n_ctx,
            n_parallel,
            budget_bytes=devices.budgets[0],
            model_bytes=model.info.n_weight_bytes,
            position_bytes=-(-(two - one) // n_ctx),
        )
