"""What has to be the same for a measurement to be repeated: the code, the file, and how its pages lie."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from .. import __version__
from .._engine import machine
from .._engine.file import ModelFile
from .._engine.session import Model

_SAMPLE_BYTES = 4096
_SMALLEST_MAPPING = 16 << 20  # of those that hold weights: libraries are smaller
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ")
_HUGE = ("AnonHugePages", "FilePmdMapped", "ShmemPmdMapped")


def describe(model: Model) -> dict[str, Any]:
    """The code, the machine and the model."""
    system, file, info = machine.machine_info(), model.file, model.info
    types: Counter[str] = Counter()
    for tensor in file.tensors:
        types[tensor.type] += tensor.n_bytes
    return {
        "version": __version__,
        "commit": commit(),
        "build": machine.build_info(),
        "cpu": machine.cpu_name(),
        "n_cores": system.n_cores,
        "memory_bytes": system.memory_bytes,
        "os": system.os,
        "huge_pages": system.huge_pages,
        "isa": machine.isa(),
        "model": file.path.name,
        "model_digest": file_digest(file),
        "model_bytes": file.info.n_bytes,
        "model_types": dict(types.most_common()),
        "architecture": info.architecture,
        "activation": info.activation,
        "predictor": info.predictor,
        "n_parameters": info.n_parameters,
        "n_layer": info.n_layer,
        "n_embd": info.n_embd,
        "n_ff": info.n_ff,
        "n_head": info.n_head,
        "n_head_kv": info.n_head_kv,
        "n_vocab": info.n_vocab,
        "n_expert": info.n_expert,
        "n_expert_used": info.n_expert_used,
        "expert_bytes": expert_bytes(model),
    }


def expert_bytes(model: Model) -> int:
    """Of the experts that a token uses, where all of an expert is read; 0: the model has none."""
    info = model.info
    total = sum(tensor.n_bytes for tensor in model.file.tensors if tensor.is_of_experts)
    return total * info.n_expert_used // info.n_expert if info.n_expert else 0


def commit() -> str:
    """The commit of the checkout that this package lies in, with "+" if files differ from it; else ""."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not (root / "native" / "powerinfer.h").exists():
        return ""

    def git(*words: str) -> str:
        line = ["git", "--no-optional-locks", "-C", str(root), *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found + "+" * bool(found and changed)


def file_digest(file: ModelFile) -> str:
    """Of the keys, the list of tensors and the first 4 KiB of each: tells models apart, and reads little."""
    digest = hashlib.sha256()
    for key, data in file.raw_metadata():
        digest.update(key.encode("utf-8", "replace") + b"\0" + data)
    for tensor in file.tensors:
        digest.update(f"{tensor.name} {tensor.type} {tensor.shape}".encode("utf-8", "replace"))
        digest.update(file.raw(tensor.name)[:_SAMPLE_BYTES].tobytes())
    return digest.hexdigest()[:16]


def resident_pages(smaps: str | None = None) -> tuple[int, int]:
    """Bytes of this process that lie in memory in mappings large enough to hold weights, and how many of them
    in huge pages; 0, 0 where the system does not tell. smaps: the text to read in place of the system's."""
    if smaps is None:
        try:
            smaps = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return 0, 0
    resident = huge = 0
    counts = False
    for line in smaps.splitlines():
        head = _HEAD.match(line)
        if head:
            size = int(head[2], 16) - int(head[1], 16)
            counts = size >= _SMALLEST_MAPPING and "x" not in head[3]
        elif counts:
            name, _, rest = line.partition(":")
            if name == "Rss":
                resident += int(rest.split()[0]) << 10
            elif name in _HUGE:
                huge += int(rest.split()[0]) << 10
    return resident, huge
