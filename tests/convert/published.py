"""Checkpoints of the families that are rows of the converter's table, as transformers writes them.

config.json is kept in tests/golden/configs.json.xz, by scripts/golden_configs.py; weights are drawn.
"""

from __future__ import annotations

import functools
import json
import lzma
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests import checkpoints, models, next_head
from tests.convert import folders

CONFIGS = models.GOLDEN / "configs.json.xz"
SPECS = [name for name in models.SPECS if name not in models.CONVERTED]
NAMES = [*SPECS, *checkpoints.CASES]


@functools.cache
def configs() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(lzma.decompress(CONFIGS.read_bytes()))
    return content


def with_head(name: str) -> dict[str, Any]:
    """Of a spec, with the head for further tokens of tests/next_head.py as the family publishes it: one more
    layer, or mtp.*, whose norms have 1 less."""
    spec = models.SPECS[name]
    n, minus = spec.n_layer, float(spec.arch.startswith("qwen"))
    out = weights(name) if name in SPECS else {}
    for one, value in models.draw(next_head.longer(spec)).items():
        one = one.replace("gate.correction.bias", "gate.e_score_correction_bias")
        out[one] = value
    names = {
        "eh_proj": ("eh_proj", "fc"),
        "enorm": ("enorm", "pre_fc_norm_embedding"),
        "hnorm": ("hnorm", "pre_fc_norm_hidden"),
        "shared_head_norm": ("shared_head.norm", "norm"),
        "embed_tokens": ("embed_tokens", ""),
        "shared_head_head": ("shared_head.head", ""),
    }
    tensors = next_head.with_head(spec, own_output=not minus)[1]
    for new, (layer, mtp) in names.items():
        value = tensors.get(f"blk.{n}.nextn.{new}.weight")
        if value is not None:
            value = value - np.float32(minus) if value.ndim == 1 else value
            out[f"mtp.{mtp}.weight" if minus else f"model.layers.{n}.{layer}.weight"] = value
    return {one.replace(f"model.layers.{n}.", "mtp.layers.0.") if minus else one: v for one, v in out.items()}


def weights(name: str) -> dict[str, Any]:
    """Of a spec, or of a case of tests/checkpoints.py."""
    if name not in SPECS:
        shapes = checkpoints.golden(name).shapes
        drawn = {published: checkpoints.draw(name, published, shape) for published, shape in shapes.items()}
        drawn = _saved(name, drawn)
        if name == "apertus":  # what is no parameter in transformers
            for i in range(2):
                drawn[f"model.layers.{i}.mlp.act_fn.beta"] = np.float32(0.5)
                drawn[f"model.layers.{i}.mlp.act_fn.eps"] = np.float32(-1e-6)
        if name.startswith("gptneox"):  # saved under another name than transformers has it
            drawn["embed_out.weight"] = drawn.pop("lm_head.weight")
        return drawn
    spec = models.SPECS[name]
    fuse = {"llama4": _llama4, "granitehybrid": _granite}.get(spec.family)
    drawn = models.draw(spec)
    out = fuse(drawn) if fuse else dict(drawn)
    renamed = {}
    for one, value in out.items():
        one = one.replace("gate.correction.bias", "gate.e_score_correction_bias")
        if spec.family == "nemotron" and one.endswith("norm.weight"):
            value = value - 1  # the model adds it
        if spec.family == "gemma4" and "layer_scalar" in one:
            one = one.removesuffix(".weight")
        if spec.family.startswith("nemotron_h"):
            one = one.replace("model.embed_tokens", "backbone.embeddings").replace("model.", "backbone.")
        renamed[one] = value
    return renamed


def _saved(name: str, drawn: dict[str, Any]) -> dict[str, Any]:
    """Experts of mixtures, which transformers has in one tensor and saves apart, under older names."""
    if name not in ("glm4_moe_lite", "dots1", "ernie4_5-moe", "hunyuan-moe", "minimax-m2", "afmoe"):
        renamed = {one.replace("moe.router.weight", "moe.router.layer.weight"): v for one, v in drawn.items()}
        return {
            one.replace("moe.experts.gate_up_proj", "moe.input_linear.weight").replace(
                "moe.experts.down_proj", "moe.output_linear.weight"
            ): value
            for one, value in renamed.items()
        }
    out: dict[str, Any] = {}
    for one, value in drawn.items():
        stem, _, last = one.rpartition(".")
        old = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
        if name == "minimax-m2":
            stem = stem.replace("mlp", "block_sparse_moe")
            one = one.replace("mlp.", "block_sparse_moe.")
            old = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        if last not in ("gate_up_proj", "down_proj") or not stem.endswith("experts"):
            out[one] = value
            continue
        for e, matrix in enumerate(value):
            parts = {"down_proj": matrix}
            if last == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
            for part, rows in parts.items():
                out[f"{stem}.{e}.{old[part]}.weight"] = rows
    if name == "ernie4_5-moe":
        out = {one.replace("mlp.gate.moe_statics", "mlp.moe_statics"): value for one, value in out.items()}
    return out


def _experts(drawn: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """Tensors without experts, and those of experts, [n, rows, columns]."""
    out = {name: value for name, value in drawn.items() if ".experts." not in name}
    stacks: dict[tuple[str, str], list[Any]] = {}
    for name, value in drawn.items():
        before, found, rest = name.partition(".experts.")
        if found:
            stacks.setdefault((before, rest.split(".")[1]), []).append(value)
    return out, {key: np.stack(values) for key, values in stacks.items()}


def _llama4(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Experts have columns for rows, gate's beside up's."""
    out, experts = _experts(
        {name.replace("feed_forward.gate.", "feed_forward.router."): v for name, v in drawn.items()}
    )
    for block, kind in experts:
        if kind == "gate_proj":
            both = np.concatenate([experts[block, "gate_proj"], experts[block, "up_proj"]], axis=1)
            out[f"{block}.experts.gate_up_proj"] = np.ascontiguousarray(both.swapaxes(1, 2))
            down = experts[block, "down_proj"].swapaxes(1, 2)
            out[f"{block}.experts.down_proj"] = np.ascontiguousarray(down)
    return out


def _granite(drawn: Mapping[str, Any]) -> dict[str, Any]:
    """Gate's rows, then up's, in one tensor, and the shared ones so, too."""
    out, experts = _experts(drawn)
    for block, kind in experts:
        if kind == "gate_proj":
            both = np.concatenate([experts[block, "gate_proj"], experts[block, "up_proj"]], axis=1)
            out[f"{block}.input_linear.weight"] = both
            out[f"{block}.output_linear.weight"] = experts[block, "down_proj"]
    for name in [name for name in out if "shared_mlp.gate_proj" in name]:
        both = np.concatenate([out.pop(name), out.pop(name.replace("gate_proj", "up_proj"))])
        out[name.replace("gate_proj", "input_linear")] = both
        down = out.pop(name.replace("gate_proj", "down_proj"))
        out[name.replace("gate_proj", "output_linear")] = down
    return {name.replace("moe.gate.", "moe.router.layer."): value for name, value in out.items()}


def write_folder(folder: Path, name: str, *, change: Any = None, **values: Any) -> Path:
    """change: what else becomes of the weights. values: of the config, instead of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = configs()[name] | values
    folders.write_json(folder / "config.json", config)
    tensors = weights(name)
    folders.write_safetensors(folder / "model.safetensors", change(tensors) if change else tensors)
    folders.write_tokenizer(folder, replace(models.SPECS["qwen2"], n_vocab=config["vocab_size"]))
    return folder
