"""Opens a file many times, each time with one to three facts of its header changed: numbers of keys, names,
types and sizes of tensors. Each must open and compute, or be refused by a sentence.

    python -m tests.fuzz.headers MODEL.gguf SEED N      prints each seed before it is tried

What crashes here crashes alone, with `python -m tests.fuzz.headers MODEL.gguf SEED 1`.
"""

from __future__ import annotations

import os
import random
import resource
import struct
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer import PowerInferError
from powerinfer._engine.session import Model, Session
from powerinfer.models.plan import Settings, find_rates, make_plan

# Of GGUF's value types, as struct has them; 8 is a text, 9 an array.
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
WIDTHS = {kind: struct.calcsize(code) for kind, code in CODES.items()}
MEMORY = 4 << 30  # no file makes the engine ask for more


@dataclass
class Header:
    """Where the facts of a file stand."""

    numbers: list[tuple[int, int]]
    """Offsets and types, of keys and of the first elements of arrays."""
    sizes: list[int]
    """Offsets of tensors' dimensions, u64."""
    types: list[int]
    """Of tensors' types, u32."""
    names: list[tuple[int, int]]
    """Offsets and lengths, of tensors."""
    keys: list[tuple[int, int]]


def read_header(data: bytes) -> Header:
    out = Header([], [], [], [], [])
    at = 24

    def text() -> tuple[int, int]:
        nonlocal at
        (n,) = struct.unpack_from("<Q", data, at)
        begin, at = at + 8, at + 8 + n
        return begin, n

    def value(kind: int, keep: bool) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            inner, n = struct.unpack_from("<IQ", data, at)
            out.numbers.append((at + 4, 10))  # how many
            at += 12
            for i in range(n):
                value(inner, keep and i < 8)
        else:
            if keep:
                out.numbers.append((at, kind))
            at += WIDTHS[kind]

    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    for _ in range(n_keys):
        begin, n = text()
        is_own = not data[begin : begin + n].startswith((b"general.", b"tokenizer."))
        (kind,) = struct.unpack_from("<I", data, at)
        at += 4
        if is_own:
            out.keys.append((begin, n))
        value(kind, is_own)
    for _ in range(n_tensors):
        out.names.append(text())
        (n_dims,) = struct.unpack_from("<I", data, at)
        out.sizes += [at + 4 + 8 * i for i in range(n_dims)]
        at += 4 + 8 * n_dims
        out.types.append(at)
        at += 12
    return out


def changed(data: bytes, header: Header, seed: int) -> bytes:
    draw, out = random.Random(seed), bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        what = draw.choice(("number",) * 6 + ("size",) * 3 + ("type", "name", "swap", "key"))
        if what == "number":
            at, kind = draw.choice(header.numbers)
            write_number(out, at, kind, draw)
        elif what == "size":
            write_number(out, draw.choice(header.sizes), 10, draw)
        elif what == "type":
            struct.pack_into(
                "<I", out, draw.choice(header.types), draw.choice((0, 1, 2, 8, 14, 30, 39, 1000))
            )
        elif what == "swap":
            (a, n), (b, m) = draw.sample(header.names, 2)
            if n == m:
                out[a : a + n], out[b : b + n] = out[b : b + n], out[a : a + n]
        else:
            at, n = draw.choice(header.names if what == "name" else header.keys)
            out[at + draw.randrange(n)] = draw.choice(b"a_.0123x")
    return bytes(out)


def write_number(out: bytearray, at: int, kind: int, draw: random.Random) -> None:
    code = "<" + CODES[kind]
    (before,) = struct.unpack_from(code, out, at)
    if kind in (6, 12):
        value: Any = draw.choice((0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"), before * 2))
        struct.pack_into(code, out, at, value)
        return
    near = (0, 1, 2, 3, before - 1, before + 1, before * 2, before // 2, before + 64)
    far = (-1, 255, 4097, (1 << 20) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 63) - 1)
    value = draw.choice(near if draw.random() < 0.6 else far)
    width = 8 * WIDTHS[kind]
    value &= (1 << width) - 1
    if code[1].islower() and value >= 1 << (width - 1):
        value -= 1 << width
    struct.pack_into(code, out, at, value)


def use(path: Path, done: Counter[str]) -> None:
    """What a user does with a file, on the CPU and beside the stand-in. Raises PowerInferError."""
    options: dict[str, Any] = {"n_ctx": 64, "n_batch": 32, "n_threads": 1}
    with Model(path) as model:
        done["opened"] += 1
        token = min(7, model.info.n_vocab - 1)
        with Session(model, **options) as session:
            session.feed([token] * 20)
            session.feed([token])
        done["computed"] += 1
        if model.info.n_next:
            with Model(path, next_head=True) as head, Session(head, **options) as session:
                session.feed([token] * 20, hidden=np.ones((20, head.info.n_embd), np.float32))
            done["guessed"] += 1
        rates = find_rates(gpu_gbps=1000, cpu_gbps=10, pcie_gbps=20)
        plan = make_plan(model, vram_budget=1, settings=Settings(n_ctx=64, n_batch=32), rates=rates)
        with Session(model, plan=plan.native(model), device="host", **options) as session:
            session.feed([token] * 20)
            session.feed([token])
        done["beside a device"] += 1


def main() -> None:
    path, seed, n = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # which reserves terabytes
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    data = path.read_bytes()
    header = read_header(data)
    out, done = path.with_suffix(f".{seed}.gguf"), Counter[str]()
    for i in range(seed, seed + n):
        print(i, flush=True)
        out.write_bytes(changed(data, header, i))
        try:
            use(out, done)
        except PowerInferError as error:
            assert 10 < len(str(error)) < 1000 and "\n" not in str(error), error
    print(*(f"{name} {n}" for name, n in done.items()), flush=True)


if __name__ == "__main__":
    main()
