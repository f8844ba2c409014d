"""Check the tokenizer against published vocabularies and the ids that llama.cpp expects for them.

    python scripts/check_tokenizers.py [FOLDER]

FOLDER holds pairs of `ggml-vocab-NAME.gguf` and `ggml-vocab-NAME.gguf.inp` / `.out`: texts, and for each a
line of ids. llama.cpp keeps them in its folder `models`. Without FOLDER, pip fetches the source distribution
of llama-cpp-python, which contains that folder (80 MB, once), and it is unpacked to build/vocabularies.

Prints a table. Exit status 1 if an id differs, a vocabulary of a supported kind does not open, or none was
found.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from llama_cpp_source import fetch

from powerinfer import ModelFile
from powerinfer._text.tokenizer import Tokenizer, TokenizerError

DEFAULT_FOLDER = Path(__file__).parent.parent / "build" / "vocabularies"
SEPARATOR = "\n__ggml_vocab_test__\n"
SUPPORTED = ("llama", "gpt2")


@dataclass(frozen=True)
class Row:
    """The result for one vocabulary; `state` is "ok", "skipped" or what is wrong."""

    name: str
    kind: str
    n_tokens: int
    load_ms: float
    texts: int
    state: str


def check(path: Path) -> Row:
    """One vocabulary against its .inp and .out, and every text back from its ids."""
    with ModelFile(path) as file:
        metadata = dict(file.metadata)
    name = path.name.removeprefix("ggml-vocab-").removesuffix(".gguf")
    model = metadata.get("tokenizer.ggml.model", "none")
    kind = f"{model} {metadata.get('tokenizer.ggml.pre', '')}".strip()
    n_tokens = len(metadata.get("tokenizer.ggml.tokens", ()))

    def row(state: str, load_ms: float = 0.0, texts: int = 0) -> Row:
        return Row(name, kind, n_tokens, load_ms, texts, state)

    begin = time.perf_counter()
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except TokenizerError as error:
        return row(
            f"skipped: {error}" if model not in SUPPORTED or "pre-tokenizer" in str(error) else str(error)
        )
    load_ms = (time.perf_counter() - begin) * 1e3
    inputs, outputs = path.with_name(path.name + ".inp"), path.with_name(path.name + ".out")
    if not inputs.exists() or not outputs.exists():
        return row("ok, but it has no texts", load_ms)
    texts = inputs.read_bytes().decode().split(SEPARATOR)
    expected = [[int(word) for word in line.split()] for line in outputs.read_text().splitlines()]
    pairs = list(zip(texts, expected, strict=False))
    for text, ids in pairs:
        got = tokenizer.encode(text, add_bos=False, special=False)
        if got != ids:
            return row(f"{text!r} gives {got}, expected {ids}", load_ms, len(pairs))
        back = tokenizer.decode(got).decode("utf-8", "replace")
        if tokenizer.add_space_prefix:
            back = back.removeprefix(" ")
        if back != text:
            return row(f"{text!r} comes back as {back!r}", load_ms, len(pairs))
    return row("ok", load_ms, len(pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the tokenizer against published vocabularies.")
    parser.add_argument("folder", nargs="?", type=Path, help="with ggml-vocab-*.gguf, .inp and .out files")
    folder = parser.parse_args().folder
    if folder is None:
        folder = DEFAULT_FOLDER
        if not any(folder.glob("ggml-vocab-*.gguf")):
            fetch(folder, "models/ggml-vocab-*")
    rows = [check(path) for path in sorted(folder.glob("ggml-vocab-*.gguf"))]
    print(f"{'vocabulary':<16} {'kind':<22} {'tokens':>7} {'load ms':>8} {'texts':>6}  result")
    for row in rows:
        print(
            f"{row.name:<16} {row.kind:<22} {row.n_tokens:>7} {row.load_ms:>8.0f} {row.texts:>6}  {row.state}"
        )
    good = [row for row in rows if row.state.startswith("ok")]
    bad = [row for row in rows if not row.state.startswith(("ok", "skipped"))]
    print(f"{len(good)} ok, {len(rows) - len(good) - len(bad)} skipped, {len(bad)} wrong")
    return 1 if bad or not good else 0


if __name__ == "__main__":
    sys.exit(main())
