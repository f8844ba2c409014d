"""Write docs/models.md: what works of each architecture, as the engine says of a small model of each.

    python scripts/models_table.py [--check]

Each variant that tests know is written to a file and opened: a plan says what devices compute, an adapter of
each matrix is added, and the table of families says what is converted. Names of models are below. --check
compares the page and writes nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from powerinfer import UnsupportedError
from powerinfer._engine.session import Model
from powerinfer.models.convert import hyper
from powerinfer.models.convert.conversion import convert
from powerinfer.models.convert.families import FAMILIES
from powerinfer.models.convert.families.reading import read_hyper
from powerinfer.models.convert.json_file import Settings
from powerinfer.models.plan import engine
from tests import checkpoints, models
from tests.convert import published, test_convert_mixtures

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
MODELS = {
    "llama": "Llama 1 to 3, Mistral, Mixtral, ReluLLaMA, ProSparse, TurboSparse-Mixtral, SmolLM, Yi",
    "bamboo": "Bamboo",
    "arcee": "AFM 4.5B",
    "nemotron": "Nemotron 3 and 4, Minitron",
    "falcon": "Falcon 7B and 40B, ReluFalcon",
    "opt": "OPT",
    "qwen2": "Qwen 1.5 to 2.5, QwQ",
    "qwen2moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen3": "Qwen3",
    "qwen3moe": "Qwen3-30B-A3B, 235B-A22B",
    "olmoe": "OLMoE",
    "smallthinker": "SmallThinker",
    "gpt-oss": "gpt-oss",
    "glm4moe": "GLM-4.5 to 4.7",
    "olmo2": "OLMo 2 and 3",
    "cohere2": "Command R7B, Command A",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 (text)",
    "gemma3n": "Gemma 3n (text)",
    "gemma4": "Gemma 4 (text)",
    "llama4": "Llama 4 (text)",
    "lfm2": "LFM2",
    "lfm2moe": "LFM2-8B-A1B",
    "qwen3next": "Qwen3-Next",
    "qwen35": "Qwen3.5 (text)",
    "qwen35moe": "Qwen3.5 mixtures (text)",
    "falcon-h1": "Falcon-H1",
    "granitehybrid": "Granite 4",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2",
    "nemotron_h_moe": "Nemotron 3 Nano",
    "phi3": "Phi-3 to Phi-4",
    "granite": "Granite 3",
    "starcoder2": "StarCoder 2",
    "glm4": "GLM-4-0414",
    "smollm3": "SmolLM3",
    "seed_oss": "Seed-OSS",
    "hunyuan-dense": "Hunyuan 0.5B to 7B",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "stablelm": "StableLM, StableLM 2 1.6B",
    "exaone4": "EXAONE 4",
    "mistral3": "Ministral 3",
    "internlm2": "InternLM 2",
    "command-r": "Command R",
    "gptneox": "GPT-NeoX, Pythia",
    "phi2": "Phi-1.5, Phi-2",
    "gpt2": "GPT-2",
    "bitnet": "BitNet b1.58",
    "deepseek2": "DeepSeek V2, V3, R1, Kimi K2, GLM 4.7 Flash",
    "dots1": "dots.llm1",
    "ernie4_5-moe": "ERNIE 4.5 21B-A3B",
    "granitemoe": "Granite 3 mixtures",
    "hunyuan-moe": "Hunyuan A13B",
    "minimax-m2": "MiniMax M2",
    "afmoe": "Trinity",
    "apertus": "Apertus",
}
TEXT = """# Models

What works of each architecture (`general.architecture` of a GGUF file). `scripts/models_table.py` writes this
page of what the engine says of a small random model of each variant; of these, tests compare the logits with
transformers' (of smallthinker and bamboo with a reference of ours). Published weights were not all run.

- **GPU**: *yes* is attention, recurrent blocks and feed-forwards or experts, beside the CPU's share; of
  models with *feed-forward* the CPU has the rest, those with *no* are the CPU's alone.
- **Zeros**: the activation as published leaves neurons silent, whose weights are not read. *if trained* is
  for checkpoints that were trained further with ReLU, which say so by `powerinfer.hidden_act`.
- **LoRA**: which matrices adapters may change; others are refused by name.
- **Convert**: `powerinfer convert` takes checkpoints of it (`model_type`).
- **MTP**: heads for guesses, which some files have, can draft.

| architecture | models | GPU | zeros | LoRA | convert | MTP |
|---|---|---|---|---|---|---|
"""


def architectures() -> dict[str, str]:
    """Rows of the engine's table, as they are written, by name."""
    text = (ROOT / "native/model/arch.c").read_text()
    rows = text[text.index("table[] = {") : text.index("\n};")]
    found = re.findall(r"\{\.name = \"([^\"]+)\"(.*?)\}(?=,\n    \{|,?$)", rows, re.DOTALL)
    return dict(found)


def files(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Architecture, variant and file of each small model."""
    for name, spec in models.SPECS.items():
        yield spec.arch, name, models.write_dense(folder / f"{name}.gguf", spec)
    for name, case in checkpoints.CASES.items():
        yield case.arch, name, checkpoints.write(folder / f"{name}.gguf", name)
    spec = models.SPECS["mistral"]
    meta = {k.replace("llama.", "internlm2.", 1): v for k, v in models.metadata(spec).items()}
    meta["general.architecture"] = "internlm2"
    tensors = models.file_tensors(spec, models.draw(spec))
    yield "internlm2", "internlm2", models.write(folder / "internlm2.gguf", meta, tensors)
    path = folder / "smallthinker.gguf"
    convert(test_convert_mixtures.small_thinker(folder / "hf", window=False), path)
    yield "smallthinker", "smallthinker", path


SLOW_CPU = engine.Rates(cpu_bytes_per_s=1e7, handover_us=0, layer_us=0, ffn_us=0)  # all is worth placing


def on_gpu(model: Model) -> str:
    settings = engine.Settings(n_ctx=64, budget_bytes=1 << 30, overhead_bytes=0, group=1)
    try:
        plan = engine.compute(model, settings, SLOW_CPU)
    except UnsupportedError:
        return "no"
    assert plan.bytes.attention
    return "yes" if plan.bytes.kv else "feed-forward"


def adapted(model: Model) -> str:
    """Which kinds of matrices take an adapter."""
    kinds = {"attention": ("attn_q", "attn_qkv", "attn_output"), "feed-forward": ("ffn_up", "ffn_down")}
    found = []
    shapes = {tensor.name: tensor.shape for tensor in model.file.tensors}
    for kind, names in kinds.items():
        works = False
        for i in range(model.info.n_layer):
            for name in (f"blk.{i}.{one}.weight" for one in names):
                if name in shapes and len(shapes[name]) == 2:
                    works = works or _adapts(model, name, shapes[name])
        found += [kind] * works
    return " and ".join(found) or "no"


def _adapts(model: Model, name: str, shape: Any) -> bool:
    a, b = np.zeros((1, shape[-1]), np.float32), np.zeros((shape[0], 1), np.float32)
    try:
        model.add_adapter(name, a, b, scale=1.0)
    except UnsupportedError:
        return False
    return True


def converted() -> dict[str, list[str]]:
    """model_types of checkpoints, by architecture."""
    out: dict[str, list[str]] = {}
    for family, names in hyper.FAMILIES.items():
        arch = family if family in hyper.OWN_LAYERS or family in ("falcon", "opt", "bamboo") else "llama"
        out.setdefault(arch, []).append(names[0])
    for row in FAMILIES:
        if isinstance(row.arch, str):
            out.setdefault(row.arch, []).append(row.names[0])
    for config in published.configs().values():
        known = read_hyper(Settings(config, "config.json"))
        if known.row is not None and config["model_type"] not in out.setdefault(known.arch, []):
            out[known.arch].append(config["model_type"])
    return out


def joined(each: dict[str, str]) -> str:
    """One word, or which variants have which."""
    kinds = list(dict.fromkeys(each.values()))
    if len(kinds) == 1:
        return kinds[0]
    return "; ".join(f"{kind} ({', '.join(n for n, k in each.items() if k == kind)})" for kind in kinds)


def page() -> str:
    rows, names = architectures(), converted()
    gpu: dict[str, dict[str, str]] = {}
    lora: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arch, variant, path in files(Path(folder)):
            with Model(path) as model:
                gpu.setdefault(arch, {})[variant] = on_gpu(model)
                lora.setdefault(arch, {})[variant] = adapted(model)
            path.unlink()
    lines = []
    for arch, row in rows.items():
        act = re.search(r"\.dense = PI_ACTIVATION_(\w+)", row)
        assert act is not None
        zeros = {"RELU": "yes", "RELU2": "yes", "DRELU": "yes", "CLAMPED": "no", "XIELU": "no"}
        cells = [
            arch,
            MODELS[arch],
            joined(gpu[arch]),
            "yes" if arch == "gemma3n" else zeros.get(act[1], "if trained"),  # which cuts gates
            joined(lora[arch]),
            ", ".join(names.get(arch, [])) or "no",
            "yes" if ".next_layers = true" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return TEXT + "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare the page")
    text = page()
    if parser.parse_args().check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
