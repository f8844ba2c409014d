"""Arguments that users of llama-cpp-python may pass and that this version does not have.

None of them is silently ignored: a value that asks for nothing passes, others raise and name themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import UnsupportedError

# Name: the values that ask for nothing.
LATER_INIT: dict[str, tuple[Any, ...]] = {
    "n_ubatch": (None, 512),
    "n_threads_batch": (None,),
    "split_mode": (1,),
    "main_gpu": (0,),
    "tensor_split": (None,),
    "rpc_servers": (None,),
    "kv_overrides": (None,),
    "rope_scaling_type": (None, -1),
    "pooling_type": (None, -1),
    "rope_freq_base": (None, 0.0),
    "rope_freq_scale": (None, 0.0),
    "yarn_ext_factor": (-1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_beta_fast": (32.0,),
    "yarn_beta_slow": (1.0,),
    "yarn_orig_ctx": (0,),
    "offload_kqv": (True,),
    "flash_attn": (False,),
    "op_offload": (None,),
    "swa_full": (None,),
    "no_perf": (False,),
    "lora_base": (None,),
    "lora_path": (None,),
    "lora_scale": (1.0,),
    "numa": (None, False),
    "chat_handler": (None,),
    "draft_model": (None,),
    "tokenizer": (None,),
    "spm_infill": (False,),
}
LATER_COMPLETION: dict[str, tuple[Any, ...]] = {
    "suffix": (None,),
    "logprobs": (None,),
    "grammar": (None,),
    "tfs_z": (1.0,),
    "n": (None, 1),
    "best_of": (None, 1),
}
LATER_CHAT: dict[str, tuple[Any, ...]] = {
    "functions": (None,),
    "function_call": (None,),
    "tools": (None,),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "grammar": (None,),
    "tfs_z": (1.0,),
    "n": (None, 1),
}


def refuse(where: str, given: Mapping[str, Any], later: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises for arguments that would have to be ignored."""
    for name, value in given.items():
        if name not in later:
            raise TypeError(f"{where} got an unexpected keyword argument {name!r}")
        if value not in later[name]:
            raise UnsupportedError(f"{name}={value!r} is not supported in this version")
