"""`powerinfer info MODEL`: what a file holds, from its header alone; weights are not read."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .._engine.activations import SILENT
from .._engine.file import ModelFile, TensorInfo
from .._engine.session import Model, ModelInfo
from .._text.table import columns, facts, output_width
from .._text.terminal import one_line
from ..errors import FormatError, PowerInferError, UnsupportedError
from ..models.plan.engine import Rates, Settings, compute
from ..models.statistics import read_counts, summarise_all, summarise_all_experts
from .options import Parser, add_model

EXAMPLES = """
powerinfer info model.gguf
powerinfer info model.gguf --tensors --keys
powerinfer info -m demo --json
"""

FLOATS = ("F32", "F16", "BF16")


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="MODEL [options]")
    add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--keys", action="store_true", help="list every metadata key with its value")
    parser.add_argument("--json", action="store_true", help="print JSON")


def short(value: Any, limit: int = 60) -> str:
    """One line for a metadata value of any kind."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, (list, np.ndarray)):
        head = ", ".join(short(v, 16) for v in value[:4])
        return f"[{head}{', ...' if len(value) > 4 else ''}] ({len(value)})"
    text = str(value)[: 4 * limit].replace("\n", "\\n")
    line = one_line(text)
    return line if len(line) <= limit else line[: limit - 3] + "..."


def describe(file: ModelFile) -> tuple[ModelInfo | None, str, str]:
    """What the engine makes of the file; or, if it cannot run it, why; and why devices cannot, or ""."""
    try:
        with Model(file, load=False) as model:
            return model.info, "", devices_refuse(model)
    except PowerInferError as error:
        return None, str(error), ""


def devices_refuse(model: Model) -> str:
    """Why no part of the model can be on a device; "" if it can."""
    try:
        compute(model, Settings(budget_bytes=1 << 50), Rates())
    except UnsupportedError as error:
        return str(error)
    return ""


def main(args: argparse.Namespace) -> int:
    with ModelFile(args.model) as file:
        model, why_not, refused = describe(file)
        types: Counter[str] = Counter()
        for tensor in file.tensors:
            types[tensor.type] += tensor.n_bytes
        if args.json:
            print(json.dumps(as_json(args, file, model, why_not, refused, types), indent=2))
        else:
            show(args, file, model, why_not, refused, types)
    return 0


def as_json(
    args: argparse.Namespace,
    file: ModelFile,
    model: ModelInfo | None,
    why_not: str,
    refused: str,
    types: Counter[str],
) -> dict[str, Any]:
    """Everything as one object. JSON knows no infinity and no NaN: such numbers become null."""
    meta = file.metadata
    out: dict[str, Any] = {
        "path": str(file.path),
        "file": asdict(file.info),
        "name": short(meta["general.name"], 1000) if "general.name" in meta else None,
        "tokenizer": tokenizer_of(file) or None,
        "chat_template": "tokenizer.chat_template" in meta,
        "model": None if model is None else {**asdict(model), "can_skip_down": skips_down(file, model)},
        "cannot_run": why_not or None,
        "devices_refuse": refused or None,
        "experts": None if model is None or not model.n_expert else asdict(experts_of(file, model)),
        "bytes_by_type": dict(types.most_common()),
    }
    if model is not None:
        out["model"] = {k: None if _is_odd(v) else v for k, v in out["model"].items()}
        # What only loading brings about.
        for name in ("n_layer_down_transposed", "n_transposed_bytes", "n_copied_bytes"):
            del out["model"][name]
    if args.keys:
        out["keys"] = {
            key: {"type": meta.type_name(key), "value": short(value, 1000)} for key, value in meta.items()
        }
    if args.tensors:
        out["tensors"] = [asdict(tensor) for tensor in file.tensors]
    return out


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def show(
    args: argparse.Namespace,
    file: ModelFile,
    model: ModelInfo | None,
    why_not: str,
    refused: str,
    types: Counter[str],
) -> None:
    """Prints for people."""
    info, meta, width = file.info, file.metadata, output_width()
    kind = "PowerInfer GGUF" if info.is_powerinfer else "GGUF"
    parts = f" in {info.n_parts} parts" if info.n_parts > 1 else ""
    contents = f"{info.n_tensors} tensors, {len(meta)} keys"
    rows = [
        ("file", f"{kind} v{info.version}, {size(info.n_bytes)}{parts}, {contents}"),
        ("name", short(meta.get("general.name", "-"))),
        ("types", ", ".join(f"{name} {size(n)}" for name, n in types.most_common())),
    ]
    tokenizer = tokenizer_of(file)
    if tokenizer:
        rows.append(("tokenizer", tokenizer))
        rows.append(("chat template", "in the file" if "tokenizer.chat_template" in meta else "none"))
    if model is None:
        rows.append(("architecture", short(meta.get("general.architecture", "none"))))
        rows.append(("cannot run", one_line(why_not)))
    else:
        rows += model_facts(file, model)
        rows.append(("GPUs", one_line(refused) if refused else "can have parts of it (powerinfer plan)"))
    for line in facts(rows, width=width):
        print(line)
    if args.keys:
        print()
        keys = [["key", "type", "value"]]
        keys += [[short(name, 100), meta.type_name(name), short(meta[name])] for name in meta]
        print("\n".join(columns(keys, width=width)))
    if args.tensors:
        print()
        tensors = [["tensor", "type", "shape", "bytes"]]
        tensors += [
            [short(t.name, 100), t.type, " x ".join(map(str, t.shape)), f"{t.n_bytes:,}"]
            for t in file.tensors
        ]
        print("\n".join(columns(tensors, right=(3,), width=width)))


def size(n_bytes: int) -> str:
    """A number of bytes for people."""
    for unit, one in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if n_bytes >= one:
            return f"{n_bytes / one:,.1f} {unit}"
    return f"{n_bytes / 1024:,.1f} KiB"


def tokenizer_of(file: ModelFile) -> str:
    """Kind and size of the vocabulary; "" if there is none."""
    meta = file.metadata
    if "tokenizer.ggml.tokens" not in meta:
        return ""
    pre = f" ({short(meta['tokenizer.ggml.pre'])})" if "tokenizer.ggml.pre" in meta else ""
    n_tokens = meta.count("tokenizer.ggml.tokens")
    return f"{short(meta.get('tokenizer.ggml.model', '?'))}{pre}, {n_tokens:,} tokens"


def skips_down(file: ModelFile, model: ModelInfo) -> bool:
    """Whether silent neurons' rows of ffn_down need not be read; loading transposes it if it is of floats."""
    if model.can_skip_down or model.n_expert or model.activation not in SILENT:
        return model.can_skip_down
    return all(t.type in FLOATS for t in file.tensors if t.name.endswith(".ffn_down.weight"))


def model_facts(file: ModelFile, m: ModelInfo) -> list[tuple[str, str]]:
    """The rows for a model that the engine can run."""
    experts = experts_of(file, m) if m.n_expert else None
    active = f", of which a token uses {experts.n_active_parameters / 1e6:,.1f} M" if experts else ""
    rows = [
        ("architecture", f"{m.architecture}, {m.n_parameters / 1e6:,.1f} M parameters{active}"),
        (
            "shape",
            f"{m.n_layer} layers, width {m.n_embd}, {m.n_head} heads of {m.n_embd_head} "
            f"({m.n_head_kv} for K and V), FFN {m.n_ff}, context {m.n_ctx_train}",
        ),
        ("rope", m.rope),
    ]
    if m.n_next:
        rows.append(("drafts", "the file has a head for further tokens: --mtp"))
    if m.n_recurrent:
        rows.append(
            (
                "recurrent",
                f"{m.n_recurrent} of {m.n_layer} layers; a sequence's state has {size(m.n_state_bytes)}",
            )
        )
    if experts:
        each = f"{size(experts.expert_bytes)} each ({', '.join(experts.types)})"
        rows.append(
            (
                "experts",
                f"{m.n_expert}, of which a token uses {m.n_expert_used}, in {experts.n_layers} of "
                f"{m.n_layer} layers; {experts.n_neurons} neurons, {each}"
                + ", one more for all tokens"
                * experts.shared,
            )
        )
        rows.append(("router", router_of(file, m)))
        rest = experts.token_bytes - experts.token_expert_bytes
        rows.append(
            (
                "a token reads",
                f"{size(experts.token_bytes)}: {size(experts.token_expert_bytes)} of experts, "
                f"{size(rest)} of the rest",
            )
        )
    threshold = f" above {m.activation_threshold:g}" if m.activation_threshold else ""
    kind = "gated" if m.is_gated else "plain"
    named = f"{m.activation}{threshold}"
    if m.architecture == "bitnet" and "powerinfer.hidden_act" not in file.metadata:
        named += " (the file does not say; of models trained with relu2 powerinfer.hidden_act does)"
    rows.append(("FFN", f"{kind}, {named}; {sparsity_of(file, m)}"))
    if m.has_predictor:
        kind = "fc1 and fc2 in every layer" if m.predictor == "mlp" else "signs of the weights"
        each = " and up, layer by layer" if "powerinfer.sparse_thresholds" in file.metadata else ""
        rows.append(("predictor", f"{kind}, threshold {m.sparse_threshold:g}{each}"))
    statistics = statistics_of(file)
    if statistics:
        rows.append(("statistics", statistics))
    return rows


@dataclass(frozen=True)
class Experts:
    """What a mixture's experts take."""

    n_layers: int
    """That have experts."""
    n_neurons: int
    """Of an expert."""
    types: list[str]
    """Formats, of the one that takes most first."""
    expert_bytes: int
    """Of one expert."""
    shared: bool
    """There is one that all tokens use."""
    n_active_parameters: int
    """That a token's computation goes through, and the rows of the token embedding."""
    token_bytes: int
    """That a token reads, without K and V."""
    token_expert_bytes: int
    """Of those, of chosen experts."""


def experts_of(file: ModelFile, m: ModelInfo) -> Experts:
    """From names and sizes of tensors."""
    stacks = [t for t in file.tensors if t.is_of_experts]
    is_tied = all(t.name != "output.weight" for t in file.tensors)
    rest = [t for t in file.tensors if not t.is_of_experts]
    n_layers = sum(t.name.endswith(".ffn_gate_inp.weight") for t in file.tensors)
    n_bytes, n_weights = (sum(of(t) for t in stacks) for of in (lambda t: t.n_bytes, _n_weights))
    types: Counter[str] = Counter()
    for t in stacks:
        types[t.type] += t.n_bytes
    used = n_bytes * m.n_expert_used // m.n_expert
    read = sum(t.n_bytes for t in rest if is_tied or t.name != "token_embd.weight")
    first = next((t for t in stacks if "ffn_down" in t.name and len(t.shape) > 1), None)
    neurons = 0 if first is None else first.shape[-2 if "down_t" in first.name else -1]
    return Experts(
        n_layers=n_layers,
        n_neurons=neurons,
        types=[name for name, _ in types.most_common()],
        expert_bytes=n_bytes // max(1, n_layers * m.n_expert),
        shared=any("_shexp." in t.name for t in rest),
        n_active_parameters=m.n_parameters - n_weights + n_weights * m.n_expert_used // m.n_expert,
        token_bytes=used + read,
        token_expert_bytes=used,
    )


def _n_weights(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape)


def router_of(file: ModelFile, m: ModelInfo) -> str:
    """How experts are chosen, in words."""
    meta, words = file.metadata, [m.expert_gating]
    groups, used = (
        meta.get(f"{m.architecture}.{name}") for name in ("expert_group_count", "expert_group_used_count")
    )
    if isinstance(groups, int) and groups > 1:
        words.append(f"{used if used else groups} of {groups} groups")
    if any(t.name.endswith(".exp_probs_b.bias") for t in file.tensors):
        words.append("with a bias for the choice")
    if m.architecture == "smallthinker":
        words.append("by the layer's input, before attention")
    return ", ".join(words)


def sparsity_of(file: ModelFile, m: ModelInfo) -> str:
    """How the engine will compute the FFN, in words."""
    if m.architecture == "gemma3n":
        return "exact by default; up (and, of floats, down) rows of neurons whose gates are cut are skipped"
    if m.activation not in SILENT:
        return "dense: no neuron is ever silent"
    read = "up and down" if m.is_gated else "down"
    skip = f"silent neurons' {read} rows are skipped"
    if not skips_down(file, m):
        stored = "experts' down is" if m.n_expert else "down is quantised and"
        kept = f"{stored} not transposed, so all of it is read"
        skip = f"silent neurons' up rows are skipped; {kept}" if m.is_gated else kept
    mode = "predicted" if m.has_predictor else "exact"
    return f"{mode} by default; {skip}"


def statistics_of(file: ModelFile) -> str:
    """What the file says about how often each neuron was active; "" if it says nothing."""
    try:
        counts = read_counts(file)
    except FormatError as error:
        return f"none that can be used ({one_line(str(error))})"
    if counts is None:
        return ""
    if counts.unit == "experts":
        experts = summarise_all_experts(counts)
        shares = [experts.carried_10, experts.carried_25, experts.carried_50]
        carried = ", ".join(f"{share:.0%}" for share in shares)
        most = "the most used 10, 25 and 50 % of the experts"
        return f"over {counts.n_tokens:,} tokens: {most} have {carried} of the uses"
    model = summarise_all(counts)
    return (
        f"over {counts.n_tokens:,} tokens: {model.active:.1%} active; "
        f"{model.carry_80:.0%} of the neurons carry 80 %"
    )
