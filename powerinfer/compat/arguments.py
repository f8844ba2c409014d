"""Arguments that users of llama-cpp-python may pass and that this version does not have.

None of them is silently ignored: a value that asks for nothing passes, others raise or warn, and name
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .._engine.checks import real
from .._engine.warn import warn
from ..errors import FormatError, UnsupportedError

# Name: the values that ask for nothing. Others would change answers, so they raise.
LATER_INIT: dict[str, tuple[Any, ...]] = {
    "rpc_servers": (None,),
    "kv_overrides": (None, {}),
    "rope_scaling_type": (None, -1),
    "attention_type": (None, -1, 0),
    "yarn_ext_factor": (-1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_beta_fast": (32.0,),
    "yarn_beta_slow": (1.0,),
    "yarn_orig_ctx": (0,),
    "lora_base": (None,),
    "tokenizer": (None,),
}
# The same, but the file's own value asks for nothing, too: refuse_other_rope() reads it.
ROPE_INIT: dict[str, tuple[Any, ...]] = {"rope_freq_base": (None, 0.0), "rope_freq_scale": (None, 0.0)}
# The same of arguments that are about speed alone: others warn.
NO_EFFECT_INIT: dict[str, tuple[Any, ...]] = {
    "n_threads_batch": (None,),
    "split_mode": (1,),
    "main_gpu": (0,),
    "tensor_split": (None,),
    "offload_kqv": (True,),
    "flash_attn": (None, False, True),  # attention is always computed in one pass
    "op_offload": (None,),
    "swa_full": (None,),
    "no_perf": (None, False, True),  # times are taken, never printed
    "numa": (None, False, 0),
}
LATER_GENERATING: dict[str, tuple[Any, ...]] = {"tfs_z": (1.0,)}


def refuse(
    where: str,
    given: Mapping[str, Any],
    later: Mapping[str, tuple[Any, ...]],
    no_effect: Mapping[str, tuple[Any, ...]] | None = None,
) -> None:
    """Raises for arguments that would have to be ignored, and warns where that changes no answer."""
    no_effect = no_effect or {}
    for name, value in given.items():
        if name not in later and name not in no_effect:
            raise TypeError(f"{where} got an unexpected keyword argument {name!r}")
        if name in later and value not in later[name]:
            raise UnsupportedError(f"{name}={value!r} is not supported in this version")
        if name in no_effect and value not in no_effect[name]:
            warn(f"{name}={value!r} has no effect")


def without_settled(given: Mapping[str, Any], n_threads: int | None) -> dict[str, Any]:
    """Arguments without those of RoPE, which the file decides, and a number of threads that is n_threads."""
    same = n_threads is not None and given.get("n_threads_batch") == n_threads
    left_out = {*ROPE_INIT, "n_threads_batch"} if same else {*ROPE_INIT}
    return {name: value for name, value in given.items() if name not in left_out}


def refuse_other_rope(given: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Raises where the RoPE of the arguments is not that of the file with these keys."""
    for name, nothing in ROPE_INIT.items():
        value = given.get(name)
        if value in nothing:
            continue
        own = _file_rope(name, meta)
        if not math.isclose(real(name, value), own, rel_tol=1e-6):  # files have 32 bits of it
            raise UnsupportedError(
                f"{name}={value!r} is not supported in this version: the file's {own:g} is used"
            )


def _file_rope(name: str, meta: Mapping[str, Any]) -> float:
    arch = meta.get("general.architecture")
    if name == "rope_freq_base":
        return _number(meta, f"{arch}.rope.freq_base", 10000.0)
    factor = _number(meta, f"{arch}.rope.scale_linear", 1.0)
    factor = _number(meta, f"{arch}.rope.scaling.factor", factor)
    return 1 / (factor or 1.0)  # 0 is what some converters write for "no scaling"


def _number(meta: Mapping[str, Any], key: str, default: float) -> float:
    value = meta.get(key, default)
    if not isinstance(value, (int, float, np.number)):
        raise FormatError(f"the key {key!r} has a value of type {type(value).__name__}, not a number")
    return float(value)


_NUMBERS = {
    "LLAMA_DEFAULT_SEED": 0xFFFFFFFF,
    "LLAMA_POOLING_TYPE_UNSPECIFIED": -1,
    "LLAMA_POOLING_TYPE_NONE": 0,
    "LLAMA_POOLING_TYPE_MEAN": 1,
    "LLAMA_POOLING_TYPE_CLS": 2,
    "LLAMA_POOLING_TYPE_LAST": 3,
    "LLAMA_POOLING_TYPE_RANK": 4,
    "LLAMA_SPLIT_MODE_NONE": 0,
    "LLAMA_SPLIT_MODE_LAYER": 1,
    "LLAMA_SPLIT_MODE_ROW": 2,
    "GGML_TYPE_F32": 0,
    "GGML_TYPE_F16": 1,
    "GGML_TYPE_Q8_0": 8,
}


def llama_log_set(callback: Any = None, user_data: Any = None) -> None:
    """Of llama.cpp, whose messages it takes or silences. Here there are none: the engine never prints, and a
    Llama does with verbose=True alone. So this has no effect, whatever it is given."""


def number(name: str) -> int:
    """llama.cpp's number of that name. Raises AttributeError."""
    if name not in _NUMBERS:
        raise AttributeError(f"module 'powerinfer' has no attribute {name!r}")
    return _NUMBERS[name]
