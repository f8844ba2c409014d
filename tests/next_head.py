"""Files whose last layer guesses at further tokens (NextN, MTP), and what that layer answers, in float64.

The head reads the model's final hidden state at a position beside the token that follows there, joins both
and is an ordinary layer from there on: as one it is computed by tests/reference.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests import models, reference
from tests.models import Meta, Tensors

Array = npt.NDArray[Any]
NAMES = ("deepseek2-v3", "glm4moe", "qwen35", "qwen35moe", "qwen3next")
"""Specs of the architectures whose published files have one."""


def with_head(spec: models.Spec, *, own_output: bool = False) -> tuple[Meta, Tensors]:
    """The keys and tensors of a spec's file with a head behind its layers. own_output: it has embeddings and
    an output matrix of its own, as DeepSeek's do."""
    meta, tensors = models.metadata(spec), models.file_tensors(spec, models.draw(longer(spec)))
    n, d = spec.n_layer, spec.n_embd
    meta |= {f"{spec.arch}.block_count": n + 1, f"{spec.arch}.nextn_predict_layers": 1}
    recurrent = f"{spec.arch}.attention.recurrent_layers"
    if recurrent in meta:
        meta[recurrent] = [*meta[recurrent], False]
    head = f"blk.{n}."
    rng = np.random.default_rng(5)
    tensors[f"{head}nextn.eh_proj.weight"] = rng.normal(0, d**-0.5, (d, 2 * d)).astype(np.float16)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        tensors[f"{head}nextn.{name}.weight"] = rng.uniform(0.5, 1.5, d).astype(np.float32)
    if own_output:
        shape = spec.n_vocab, d
        tensors[f"{head}nextn.embed_tokens.weight"] = rng.normal(0, 1, shape).astype(np.float16)
        tensors[f"{head}nextn.shared_head_head.weight"] = rng.normal(0, 0.2, shape).astype(np.float16)
    return meta, tensors


def longer(spec: models.Spec) -> models.Spec:
    """The spec with one layer more, which attends: the head's."""
    return replace(spec, n_layer=spec.n_layer + 1, layers=spec.layers and spec.layers + "a")


def write(path: Path, spec: models.Spec | str, **options: Any) -> Path:
    """The file of with_head()."""
    return models.write(path, *with_head(models.SPECS[spec] if isinstance(spec, str) else spec, **options))


def planted(spec: models.Spec, right: float = 1.0) -> tuple[Meta, Tensors]:
    """A file whose model says after each token the same other one, whatever was before (blocks give zeros),
    and whose head knows of so many of the tokens what the model will say, and is wrong of the others."""
    meta, tensors = with_head(spec)
    for name in tensors:
        if re.search(r"(attn_output|ffn_down|ffn_down_exps|ffn_down_shexp|ssm_out)\.weight$", name):
            tensors[name] = np.zeros_like(tensors[name])
    n, d, p = spec.n_vocab, spec.n_embd, f"blk.{spec.n_layer}.nextn."
    follows = 3 + np.roll(np.arange(n - 3), -7)  # no end of the text
    embeddings = np.random.default_rng(8).normal(0, 1, (n, d)).astype(np.float16)
    output = np.zeros((n, d), np.float16)
    output[follows] = embeddings[3:]
    guesses = output.copy()
    wrong = 3 + np.flatnonzero(np.random.default_rng(9).random(n - 3) >= right)
    guesses[wrong] = np.roll(output[wrong], 1, axis=0)
    tensors |= {"token_embd.weight": embeddings, "output.weight": output}
    tensors["output_norm.weight"] = np.ones(d, np.float32)
    tensors[f"{p}eh_proj.weight"] = np.concatenate([np.eye(d), np.zeros((d, d))], axis=1).astype(np.float16)
    tensors |= {
        f"{p}{name}.weight": np.ones(d, np.float32) for name in ("enorm", "hnorm", "shared_head_norm")
    }
    tensors[f"{p}shared_head_head.weight"] = guesses
    return meta, tensors


def write_planted(path: Path, spec: models.Spec | str, right: float = 1.0) -> Path:
    """The file of planted(), with a tokenizer."""
    spec = models.SPECS[spec] if isinstance(spec, str) else spec
    meta, tensors = planted(spec, right)
    return models.write(path, meta | models.tokenizer(spec), tensors)


def last_hidden(model: reference.Model, tokens: Array) -> Array:
    """The model's final normed hidden states: logits, with the identity for an output matrix."""
    return reference.forward(trunk(model, np.eye(len(model["output_norm.weight"]))), tokens)


def trunk(model: reference.Model, output: Array | None = None) -> reference.Model:
    """The model without its head; output: replaces its output matrix."""
    n = int(model.key("block_count")) - 1
    meta = model.meta | {f"{model.arch}.block_count": n, f"{model.arch}.nextn_predict_layers": 0}
    tensors = {name: value for name, value in model.tensors.items() if not name.startswith(f"blk.{n}.")}
    return replace(
        model, meta=meta, tensors=tensors if output is None else tensors | {"output.weight": output}
    )


def logits(model: reference.Model, hidden: Array, following: Array) -> Array:
    """What the head says [n, n_vocab] of what comes after `following`, the tokens behind those of hidden."""
    n, eps = int(model.key("block_count")) - 1, float(model.key("attention.layer_norm_rms_epsilon"))
    p = f"blk.{n}."
    own = {name.removeprefix(p): value for name, value in model.tensors.items() if name.startswith(p)}
    embeddings = own.get("nextn.embed_tokens.weight", model["token_embd.weight"])[following]
    joined = [
        reference.rms_norm(embeddings, own["nextn.enorm.weight"], eps),
        reference.rms_norm(hidden, own["nextn.hnorm.weight"], eps),
    ]
    x = np.concatenate(joined, axis=1) @ own["nextn.eh_proj.weight"].T
    output = own.get("nextn.shared_head_head.weight", model.get("output.weight"))
    tensors = {f"blk.0.{name}": value for name, value in own.items()}
    tensors |= {"token_embd.weight": x, "output_norm.weight": own["nextn.shared_head_norm.weight"]}
    tensors["output.weight"] = model["token_embd.weight"] if output is None else output
    meta = model.meta | {
        f"{model.arch}.{name}": value
        for name, value in (
            ("block_count", 1),
            ("nextn_predict_layers", 0),
            ("leading_dense_block_count", 0),
        )
    }
    return reference.forward(replace(model, meta=meta, tensors=tensors), np.arange(len(x)))
