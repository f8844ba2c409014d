"""The answer of a checkpoint whose family is a row of the table: that of transformers, where it is installed.

Matrices are rounded as they are published, which may not be along the rows of a file: that is good for the
size of what rounding does, not for its last digit.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import UnsupportedError
from .families.reading import ACTS
from .hyper import Hyper
from .rounding import rounded

Array = npt.NDArray[np.float32]

# Floats in files, whatever the format of the matrices.
_FLOATS = re.compile(r"(router|\.gate|norm|conv|conv1d|shared_expert_gate)(\.layer)?\.weight$")


def require_transformers(hyper: Hyper) -> None:
    """Raises UnsupportedError where the check of this family cannot be made."""
    if hyper.row is None:
        return
    try:
        importlib.import_module("torch")
        importlib.import_module("transformers")
    except ImportError:
        raise UnsupportedError(
            f"the check of {hyper.arch} asks transformers: pip install torch transformers"
        ) from None


def transformers_logits(
    folder: str,
    hyper: Hyper,
    prompts: Sequence[Sequence[int]],
    *,
    type: str,
    progress: Callable[[int, int], object] | None = None,
) -> list[Array]:
    """Of each prompt the logits [n_tokens, n_vocab] of all its tokens, with matrices rounded to `type`.

    Nothing that a checkpoint brings along is executed. Raises UnsupportedError.
    """
    require_transformers(hyper)
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    kind = "dtype" if int(transformers.__version__.partition(".")[0]) >= 5 else "torch_dtype"
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        for part in (config, getattr(config, "text_config", config)):
            for name in ACTS:
                if hasattr(part, name) and name in hyper.config:
                    setattr(part, name, hyper.config.values[name])
        loader = transformers.AutoModelForCausalLM
        if config.architectures and config.architectures[0].endswith("ForConditionalGeneration"):
            loader = transformers.AutoModelForImageTextToText
        model = loader.from_pretrained(
            folder, config=config, attn_implementation="eager", **{kind: torch.float32}
        ).eval()
    except Exception as error:  # of many kinds
        raise UnsupportedError(f"{folder}: transformers cannot open it: {error!s:.300}") from None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _round(name, weight, type)
        out = []
        for i, prompt in enumerate(prompts):
            logits: Any = model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0]
            out.append(np.asarray(logits.numpy(), np.float32))
            if progress is not None:
                progress(i + 1, len(prompts))
    return out


def _round(name: str, weight: Any, type: str) -> None:
    if type == "F32" or weight.ndim < 2 or _FLOATS.search(name):
        return
    values = weight.numpy()
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    values[...] = rounded(flat, type).reshape(values.shape)
