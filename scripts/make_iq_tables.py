"""Writes vendor/core/te_iq_tables.h: the code books of the IQ formats, taken from the `gguf` package.

    python scripts/make_iq_tables.py           writes the file
    python scripts/make_iq_tables.py --check   exits 1 if the file differs from what would be written

A code book has one entry per index: eight numbers of two bits (IQ1, IQ2) or four of three bits in nibbles
(IQ3), lowest first, each an index into the format's list of values. `gguf` keeps the same bits as hexadecimal
text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants

OUTPUT = Path(__file__).resolve().parents[1] / "vendor" / "core" / "te_iq_tables.h"
BOOKS = {
    "iq1": quants.IQ1_S,
    "iq2_xxs": quants.IQ2_XXS,
    "iq2_xs": quants.IQ2_XS,
    "iq2_s": quants.IQ2_S,
    "iq3_xxs": quants.IQ3_XXS,
    "iq3_s": quants.IQ3_S,
}
PER_LINE = 14


def table(name: str, book: Any) -> str:
    """One C array of uint16_t, preceded by the array of values that it indexes."""
    assert book.grid_hex is not None
    entries = np.frombuffer(bytes.fromhex(book.grid_hex.decode("ascii")), dtype="<u2")
    assert len(entries) == book.grid_shape[0]
    width = 16 // book.grid_shape[1]
    assert all(
        int(entry) >> at & ((1 << width) - 1) < len(book.grid_map)
        for entry in entries
        for at in range(0, 16, width)
    )
    words = [f"0x{entry:04x}," for entry in entries]
    lines = ["    " + " ".join(words[i : i + PER_LINE]) for i in range(0, len(words), PER_LINE)]
    values = ", ".join(str(int(value)) for value in book.grid_map)
    return (
        f"static const int8_t {name}_value[{len(book.grid_map)}] = {{{values}}};\n"
        f"static const uint16_t {name}_book[{len(entries)}] = {{\n" + "\n".join(lines) + "\n};\n"
    )


def header() -> str:
    """The whole file."""
    tables = "\n".join(table(name, book) for name, book in BOOKS.items())
    return f"""/* te_iq_tables.h - code books of the IQ formats. scripts/make_iq_tables.py writes this file.
 *
 * An entry of NAME_book holds indices into NAME_value, lowest bits first: eight of two bits (iq1, iq2), or
 * four of four bits (iq3). */
#ifndef TE_IQ_TABLES_H
#define TE_IQ_TABLES_H

#include <stdint.h>

/* clang-format off */
{tables}/* clang-format on */

#endif
"""


def main() -> int:
    """Writes or checks the file; returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes the code books of the IQ formats as a C header.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the file is not up to date"
    )
    arguments = parser.parse_args()
    text = header()
    if arguments.check:
        if OUTPUT.read_text(encoding="ascii") != text:
            print(f"{OUTPUT.name} is not what scripts/make_iq_tables.py writes", file=sys.stderr)
            return 1
        return 0
    OUTPUT.write_text(text, encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
