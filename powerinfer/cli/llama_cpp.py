"""Options of llama.cpp that are no options here: what they ask for is always done, or is done by another one,
which they then name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

Options = Sequence[tuple[tuple[str, ...], int, str]]
"""Names of an option, how many words follow it, and what to do instead."""

_BUDGET = "--vram-budget GIB says how much of a model a GPU holds"
_DRAFT = "a model that drafts gets a part of --vram-budget by itself"
_FILE = "what the model's file says is used"
_HUB = "-hf OWNER/REPO:NAME.gguf names a file of a repository"
_INSTEAD: Options = (
    (("-ncmoe", "--n-cpu-moe"), 1, f"{_BUDGET}; experts beyond it stay with the CPU by themselves"),
    (("-cmoe", "--cpu-moe"), 0, f"{_BUDGET}; a small one leaves the experts to the CPU"),
    (("-ot", "--override-tensor"), 1, f"{_BUDGET}, and `powerinfer plan` shows what goes there"),
    (("-sm", "--split-mode"), 1, "--vram-budget 8,8 deals the layers out to two GPUs"),
    (("-ts", "--tensor-split"), 1, "--vram-budget 8,6 says how much of each GPU"),
    (("-mg", "--main-gpu"), 1, "--devices cuda:1 names the GPU"),
    (("-tb", "--threads-batch"), 1, "-t is for prompts, too"),
    (("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft"), 1, _DRAFT),
    (("-cd", "--ctx-size-draft"), 1, _DRAFT),
    (("-devd", "--device-draft"), 1, _DRAFT),
    (("--rope-freq-base", "--rope-freq-scale", "--rope-scaling", "--rope-scale"), 1, _FILE),
    (("--override-kv",), 1, f"{_FILE}; --activation, --threshold and --predictor replace what matters"),
    (("-hff", "--hf-file"), 1, _HUB),
    (("-mu", "--model-url"), 1, _HUB),
    (("-hft", "--hf-token"), 1, "the environment's HF_TOKEN is used"),
    (("--chat-template",), 1, "--chat-format NAME or --chat-template-file FILE replaces the file's template"),
)
_INSTEAD_OF_BENCH: Options = (
    (("-ngl", "--n-gpu-layers", "--gpu-layers"), 1, f"{_BUDGET}; 0, the default, is the CPU"),
    (("-ub", "--ubatch-size"), 1, "-b says how many tokens of a prompt are computed at a time"),
    (("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), 1, "K and V are measured in f16"),
    (("-nkvo", "--no-kv-offload"), 1, f"{_BUDGET}, K and V among it"),
    (("-C", "--cpu-mask"), 1, "`taskset` chooses the cores"),
    (("-o", "--output"), 1, "--json prints a line of JSON for each result, a table is the default"),
)
_INSTEAD_OF_QUANTIZE: Options = (
    (("--imatrix", "--include-weights", "--exclude-weights"), 1, "weights are rounded for their own sake"),
    (("--leave-output-tensor",), 0, "--output-tensor-type F16 keeps the output matrix"),
    (("--tensor-type", "--tensor-type-file"), 1, "TYPE, --output-tensor-type and the others here say it"),
    (("--keep-split",), 0, "the result is one file"),
)
_INSTEAD_OF_SERVERS: Options = (
    (("--reasoning-format",), 1, "thoughts are always an answer's reasoning_content"),
    (("--reasoning-budget",), 1, "a request's reasoning_effort says how much is thought (none: off)"),
    (("--chat-template-kwargs",), 1, "a request's chat_template_kwargs has them"),
    (("-cram", "--cache-ram", "--slot-save-path"), 1, "--kv-tokens says how much of conversations is kept"),
    (("--api-prefix",), 1, "a proxy in front of the server can add one"),
    (("--sleep-idle-seconds",), 1, "--idle-unload TIME does that"),
)
_ALWAYS = (
    *("--jinja", "--mmap", "--warmup", "--no-warmup", "--perf", "--no-perf", "--no-context-shift"),
    *("-kvu", "--kv-unified", "--log-disable"),
)
_ALWAYS_OF_SERVERS = (
    *("-cb", "--cont-batching", "--metrics", "--slots", "--props", "--embedding", "--embeddings"),
    *("--rerank", "--reranking", "--cache-prompt"),
)
_ALWAYS_OF_TERMINALS = ("--no-display-prompt", "--simple-io", "-co", "--color")


class _Instead(argparse.Action):
    """An option that is known from elsewhere, and refused with what does the same here."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, instead: str, **more: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more)
        self._instead = instead

    def __call__(self, parser: argparse.ArgumentParser, *words: Any) -> NoReturn:
        parser.error(f"{'/'.join(self.option_strings)} is not an option here: {self._instead}")


class Nothing(argparse.Action):
    """An option that asks for what is always done."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **more)

    def __call__(self, *words: Any) -> None:
        pass


def add_instead(parser: argparse._ActionsContainer, options: Options = _INSTEAD) -> None:
    """Options of llama.cpp that are refused, each with a sentence."""
    for flags, n, text in options:
        parser.add_argument(*flags, action=_Instead, nargs=n, instead=text)


def add_always(parser: argparse._ActionsContainer, *, is_server: bool) -> None:
    """Options that are taken and change nothing."""
    more = _ALWAYS_OF_SERVERS if is_server else _ALWAYS_OF_TERMINALS
    parser.add_argument("-fa", "--flash-attn", *_ALWAYS, *more, nargs=0, action=Nothing)
    if is_server:
        add_instead(parser, _INSTEAD_OF_SERVERS)


def add_bench(parser: argparse._ActionsContainer) -> None:
    """Options of llama-bench."""
    parser.add_argument("-fa", "--flash-attn", nargs=0, action=Nothing)
    add_instead(parser, _INSTEAD_OF_BENCH)
    add_instead(parser, [one for one in _INSTEAD if one[0][0] in ("-ncmoe", "-ot", "-sm", "-ts", "-mg")])


def add_quantize(parser: argparse._ActionsContainer) -> None:
    """Options of llama-quantize, and the number of threads behind the type."""
    parser.add_argument("n_threads_last", nargs="?", type=int, help=argparse.SUPPRESS)
    add_instead(parser, _INSTEAD_OF_QUANTIZE)


def llama_cpp_words(words: Sequence[str]) -> list[str]:
    """The arguments as argparse can read them: -fa may have a value that says on, off or auto."""
    out: list[str] = []
    for word in words:
        if out and out[-1] in ("-fa", "--flash-attn") and word in ("on", "off", "auto", "0", "1"):
            continue
        out.append(word)
    return out
