"""Writes what the fuzzer of the GGUF reader starts from: small files, good and nearly good, and a dictionary.

    python -m tests.fuzz.make_seeds OUTPUT_FOLDER

makes OUTPUT_FOLDER/seeds/ with one file per seed, and OUTPUT_FOLDER/gguf.dict.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import gguf as gguf_package

from tests.core.gguf_bytes import F32, STRING, U8, U16, U32, Tensor, array, every_value, gguf, header, pair

WORDS = [
    b"GGUF",
    b"PWRI",
    b"general.alignment",
    b"general.architecture",
    b"split.count",
    b"split.no",
    b"split.tensors.count",
    *(struct.pack("<I", value) for value in (2, 3, 8, 12, 13, 31, 64, 2**31, 2**32 - 1)),
    *(
        struct.pack("<Q", value)
        for value in (0, 1, 2, 32, 65535, 65536, 2**31, 2**32, 2**60, 2**62, 2**63, 2**64 - 1, 2**64 - 32)
    ),
]


def seeds() -> dict[str, bytes]:
    """Name to content."""
    sizes = gguf_package.GGML_QUANT_SIZES
    one_of_each = [
        Tensor(name=kind.name, dims=(block, 1), kind=int(kind), data=bytes(n_bytes))
        for kind, (block, n_bytes) in sizes.items()
        if kind != gguf_package.GGMLQuantizationType.Q8_1
    ]
    a = Tensor(name="a", dims=(8,), data=bytes(32))
    b = Tensor(name="b", dims=(2, 2, 2, 2), data=bytes(64))
    return {
        "nothing": header(),
        "powerinfer": gguf([pair("powerinfer.sparse_threshold", F32, 0.5)], [a], magic=b"PWRI"),
        "version2": gguf([pair("x", U8, 1)], [a], version=2),
        "values": gguf(every_value()),
        "types": gguf([], one_of_each),
        "both": gguf(every_value(), [a, b]),
        "aligned": gguf([pair("general.alignment", U32, 8)], [a, b], alignment=8),
        "strings": gguf([array("tokens", STRING, [f"t{i}" for i in range(40)])]),
        "split": gguf(
            [pair("split.no", U16, 0), pair("split.count", U16, 1), pair("split.tensors.count", 5, 1)], [a]
        ),
        "tied": gguf([], [a, Tensor(name="b", dims=(8,), offset=0, data=b"")]),
        "old": gguf([pair("x", U8, 1)], version=1),
        "cut": gguf(every_value(), [a, b])[:-40],
    }


def main(output: Path) -> None:
    """Writes the files."""
    folder = output / "seeds"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds().items():
        (folder / name).write_bytes(data)
    lines = ['"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in WORDS]
    (output / "gguf.dict").write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.fuzz.make_seeds OUTPUT_FOLDER")
    main(Path(sys.argv[1]))
