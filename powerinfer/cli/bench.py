"""`powerinfer bench MODEL`: tokens per second of prompts (pp) and decoding (tg), beside the memory's rate."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .._engine import machine
from .._engine.devices import choose_devices
from .._engine.file import ModelFile, find_model
from .._engine.session import Model, Session, Sparsity, pool_size
from .._engine.types import SPARSITY
from .._llama.loader import Loader, summary
from .._text.table import columns, output_width, paragraph
from .._text.terminal import Bar, harmless
from ..bench import (
    DIGEST_TOKENS,
    Result,
    cases,
    describe,
    logits_digest,
    measure,
    numbers,
    resident_pages,
)
from ..errors import ArgumentError
from .llama_cpp import add_bench
from .options import Parser, add_model, add_predictor, devices, vram_budget

if TYPE_CHECKING:
    from ..bench.drafts import DraftResult

EXAMPLES = """
powerinfer bench model.gguf
powerinfer bench model.gguf --sparsity predicted,dense -p 0 -n 64
powerinfer bench model.gguf -t 4,8,16 -d 0,2048
powerinfer bench -m model.gguf -p 0 -np 1,8
powerinfer bench model.gguf --vram-budget 8
powerinfer bench model.gguf --mtp --draft-max 1,3,5 --draft-right own,0,50,70,90
"""

READ_BYTES = 2 << 30  # more than any last-level cache


def on_or_off(text: str) -> bool:
    """A switch as llama-bench has it."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor 1")
    return text == "1"


def add_arguments(parser: Parser) -> None:
    parser.open_with(EXAMPLES, usage="MODEL [options]")

    def add_list(*flags: str, default: str = "", **how: Any) -> None:
        shown = f" (default {default})" if default else ""
        how["help"] += shown
        parser.add_argument(*flags, action="append", **how)

    parser.epilog = (
        "N,... is a list: every combination is measured. The read rate of the memory is measured between\n"
        "tokens of a decode test, by the same threads; share is the median of tokens beside the rates\n"
        "before and after them, with half of the distance between the quartiles.\n"
        "hits: of a mixture's chosen experts those that were on the GPU; by -n 400 they have settled."
    )
    add_model(parser)
    add_list("-p", "--n-prompt", metavar="N,...", help="tokens of a prompt; 0: none", default="512")
    add_list("-n", "--n-gen", metavar="N,...", help="decoded tokens; 0: none", default="32")
    add_list("-pg", dest="both", metavar="PP,TG", help="a prompt and decoding after it, in one time")
    add_list("-d", "--depth", metavar="N,...", help="tokens that are in the context before", default="0")
    add_list("-np", "--n-sequences", metavar="N,...", help="sequences decoded together", default="1")
    add_list(
        "-t", "--n-threads", metavar="N,...", help="threads", default="physical cores, beside a GPU one fewer"
    )
    add_list("--sparsity", metavar="MODE,...", help=f"{', '.join(SPARSITY)}", default="auto")
    parser.add_argument(
        "-r", "--repetitions", type=int, metavar="N", default=3, help="runs of each test (default 3)"
    )
    parser.add_argument("--no-warmup", action="store_true", help="time the first run too")
    parser.add_argument(
        "-b",
        "--n-batch",
        type=int,
        metavar="N",
        help="prompt tokens at a time (default: as `Llama`)",
    )
    add_predictor(parser)
    parser.add_argument(
        "--predictor-type", metavar="TYPE", help="rewrites fc1 and fc2 in a weight format while loading"
    )
    parser.add_argument(
        "--no-mmap",
        dest="use_mmap",
        action="store_false",
        help="copy the weights into memory of huge pages",
    )
    parser.add_argument(
        "-mmp", "--mmap", dest="use_mmap", type=on_or_off, default=True, help=argparse.SUPPRESS
    )
    add_bench(parser)
    parser.add_argument(
        "--vram-budget",
        type=vram_budget,
        metavar="GIB",
        help="GPU memory to use, 8,8 of two GPUs (default: the CPU computes)",
    )
    parser.add_argument("--devices", type=devices, metavar="NAMES", help='the GPUs to use: "cuda:1"')
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="replaces the file's predictor threshold"
    )
    drafts = parser.add_argument_group(
        "drafts", "answers of -n tokens to a prompt of -p, with drafts and without"
    )
    drafts.add_argument("--mtp", action="store_true", help="of the head that the file has for them")
    drafts.add_argument("-md", "--draft-model", "--model-draft", metavar="MODEL", help="of a small model")
    drafts.add_argument(
        "--draft-max", action="append", metavar="N,...", help="tokens guessed at a time (default 3)"
    )
    drafts.add_argument(
        "--draft-right",
        metavar="P,...",
        default="own",
        help="make so many percent of the guesses right, while the draft computes what it does; own: leave "
        "them as they are (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each result")


def main(args: argparse.Namespace) -> int:
    if args.repetitions < 1:
        raise ArgumentError(f"repetitions is {args.repetitions}, at least 1 is needed")
    wanted = cases(
        args.n_prompt or ["512"],
        args.n_gen or ["32"],
        args.both or [],
        args.depth or ["0"],
        args.n_sequences or ["1"],
    )
    if args.n_batch is not None:
        numbers("-b", [str(args.n_batch)], least=1)
    if args.mtp or args.draft_model is not None:
        return bench_drafts(args)
    asked = _modes(args.sparsity or ["auto"])
    path, n_bytes = find_model(args.model), machine.sample_bytes(READ_BYTES)
    n_ctx = max(DIGEST_TOKENS, *(case.n_positions for case in wanted))
    sizes: dict[str, Any] = {
        "n_ctx": n_ctx,
        "n_seq": max(case.n_seq for case in wanted),
        "n_batch": args.n_batch or 0,
    }
    sizes["n_pool"] = max(n_ctx, *(pool_size(case.n_seq, case.n_positions) for case in wanted))
    on_cpu = args.vram_budget is None and args.devices is None
    chosen = None if on_cpu else choose_devices(args.vram_budget, args.devices)
    # Beside a device as many as a session takes by itself, which leaves a core to the driver.
    usual = machine.cores() if chosen is None else 0
    threads = numbers("-t", args.n_threads, least=1) if args.n_threads else [usual]
    results: list[Result] = []
    start = time.perf_counter()
    digests: dict[tuple[int, str], str] = {}
    with (
        ModelFile(path) as file,
        Bar(f"loading {args.model}") as bar,
        Model(
            file,
            predictor=args.predictor,
            predictor_type=args.predictor_type,
            use_mmap=args.use_mmap,
            progress=bar,
        ) as model,
        Bar("measuring", after=0) as progress,
    ):
        about = {"command": _command(args), "load_s": time.perf_counter() - start}
        about |= describe(model)
        about |= {"use_mmap": args.use_mmap, "predictor_type": args.predictor_type}
        per_case = len(asked) * (args.repetitions + (not args.no_warmup))
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            progress(done, len(threads) * len(wanted) * per_case)

        # A plan is made for a mode: with devices, each mode has a session of its own.
        turns = [(n, modes) for n in threads for modes in ([[m] for m in asked] if chosen else [asked])]
        for asked_threads, together in turns:
            loader = Loader(
                model,
                devices=chosen,
                n_threads=asked_threads,
                sparsity=together[0],
                type_k=None,
                type_v=None,
                **sizes,
            )
            with loader.open() as session:
                n_threads = session.info.n_threads
                about["n_batch"] = session.info.n_batch
                if loader.plan is not None:
                    about["plan"] = summary(loader.plan)
                    about["budgets"] = list(loader.plan.budgets)
                if args.threshold is not None:
                    session.set_threshold(args.threshold)
                modes = digest_modes(session, together, n_threads, digests)
                resident, huge = resident_pages()
                about |= {"resident_bytes": resident, "resident_huge_bytes": huge}
                for case in wanted:
                    progress.say(f"{case.name}, {_threads(n_threads)}")
                    found = measure(
                        session,
                        case,
                        modes,
                        repetitions=args.repetitions,
                        warm_up=not args.no_warmup,
                        ceiling_bytes=0 if loader.plan is not None else n_bytes,
                        tick=tick,
                    )
                    results += found
                    for result in found if args.json else ():
                        digest = digests[n_threads, result.sparsity]
                        print(json.dumps({**about, "logits": digest, **asdict(result)}), flush=True)
    if not args.json:
        show(about, results, digests)
    return 0


def digest_modes(
    session: Session, asked: Sequence[Sparsity], n_threads: int, digests: dict[tuple[int, str], str]
) -> list[Sparsity]:
    """The modes that these become and that have no digest yet; now they have."""
    modes: list[Sparsity] = []
    for mode in asked:
        session.set_sparsity(mode)
        name: Any = session.info.sparsity
        if name not in modes and (n_threads, name) not in digests:
            modes.append(name)
            digests[n_threads, name] = logits_digest(session)
    return modes


def bench_drafts(args: argparse.Namespace) -> int:
    """Answers with drafts, beside answers without."""
    from .. import Llama
    from ..bench.drafts import measure_drafts

    if args.mtp and args.draft_model is not None:
        raise ArgumentError("--mtp and --draft-model: one of them can guess")
    for name, lists in (("-pg", args.both), ("-d", args.depth), ("-np", args.n_sequences)):
        if lists:
            raise ArgumentError(f"{name} is not measured with drafts")
    n_prompt, n_gen, n_threads, modes = (
        numbers("-p", args.n_prompt or ["512"], least=1),
        numbers("-n", args.n_gen or ["128"], least=1),
        numbers("-t", args.n_threads or ["0"]),
        _modes(args.sparsity or ["auto"]),
    )
    if max(len(n_prompt), len(n_gen), len(n_threads), len(modes)) > 1:
        raise ArgumentError("with drafts -p, -n, -t and --sparsity take one value each")
    drafts = numbers("--draft-max", args.draft_max or ["3"], least=1)
    rights = _rights(args.draft_right)
    on_cpu = args.vram_budget is None and args.devices is None
    with (
        Bar("measuring", after=0) as progress,
        Llama(
            args.model,
            n_ctx=n_prompt[0] + n_gen[0] + 32,
            n_threads=n_threads[0] or None,
            n_batch=args.n_batch,
            sparsity=modes[0],
            predictor=args.predictor,
            predictor_type=args.predictor_type,
            use_mmap=args.use_mmap,
            vram_budget=0 if on_cpu else args.vram_budget,
            devices=args.devices,
            threshold=args.threshold,
            draft_model="mtp" if args.mtp else args.draft_model,
            verbose=False,
            progress=progress,
        ) as llm,
    ):
        done, total = 0, (1 + len(drafts) * len(rights)) * args.repetitions

        def tick() -> None:
            nonlocal done
            done += 1
            progress(done, total)

        found = measure_drafts(
            llm,
            n_prompt=n_prompt[0],
            n_gen=n_gen[0],
            drafts=drafts,
            rights=rights,
            repetitions=args.repetitions,
            tick=tick,
        )
        plan = None if llm.plan is None else summary(llm.plan)
    name = f"pp{n_prompt[0]}+tg{n_gen[0]}"
    if args.json:
        for result in found:
            print(json.dumps({"model": args.model, "test": name, "plan": plan, **asdict(result)}))
        return 0
    if plan is not None:
        print(paragraph(plan, width=_text_width()))
    show_drafts(name, found)
    return 0


def show_drafts(name: str, found: Sequence[DraftResult]) -> None:
    """Prints a line for each result; the first is the one without drafts."""
    rows = [[name, "right", "tokens/s", "gain", "tokens/step", "accepted"]]
    for r in found:
        right = "" if not r.n_draft else "own" if r.right is None else f"{r.right:.0%}"
        rows.append(
            [
                f"draft {r.n_draft}" if r.n_draft else "no draft",
                right,
                f"{r.tokens_per_s:.2f} ± {r.spread:.2f}",
                f"{r.tokens_per_s / found[0].tokens_per_s:.2f}",
                f"{r.tokens_per_step:.2f}",
                "" if r.accepted is None else f"{r.accepted:.0%}",
            ]
        )
    print(*columns(rows, right=range(1, 6)), sep="\n")


def _rights(text: str) -> list[float | None]:
    """Of --draft-right. Raises ArgumentError."""
    out: list[float | None] = []
    for word in text.split(","):
        if word.strip() == "own":
            out.append(None)
            continue
        value = numbers("--draft-right", [word])[0]
        if value > 100:
            raise ArgumentError(f"--draft-right {word}: it must be in 0..100, or own")
        out.append(value / 100)
    return list(dict.fromkeys(out))


def _modes(texts: Sequence[str]) -> list[Sparsity]:
    """The modes of comma-separated lists. Raises ArgumentError."""
    out: list[Any] = []
    for text in texts:
        for word in text.split(","):
            if word not in SPARSITY:
                raise ArgumentError(f"--sparsity {text}: {word!r} is none of {', '.join(SPARSITY)}")
            out.append(word)
    return list(dict.fromkeys(out))


def _command(args: argparse.Namespace) -> str:
    """What to type to measure the same again."""
    words = ["powerinfer", "bench", args.model]
    for flag, texts in (
        ("-p", args.n_prompt),
        ("-n", args.n_gen),
        ("-pg", args.both),
        ("-d", args.depth),
        ("-np", args.n_sequences),
        ("-t", args.n_threads),
        ("--sparsity", args.sparsity),
    ):
        for text in texts or ():
            words += [flag, text]
    words += ["-r", str(args.repetitions), *(["-b", str(args.n_batch)] if args.n_batch else [])]
    words += ["--predictor", args.predictor]
    words += ["--predictor-type", args.predictor_type] if args.predictor_type else []
    words += [] if args.use_mmap else ["--no-mmap"]
    words += ["--threshold", str(args.threshold)] if args.threshold is not None else []
    if args.vram_budget is not None:
        each = args.vram_budget if isinstance(args.vram_budget, list) else [args.vram_budget]
        words += ["--vram-budget", ",".join(f"{gib:g}" for gib in each)]
    words += ["--devices", ",".join(args.devices)] if args.devices else []
    words += ["--no-warmup"] if args.no_warmup else []
    return shlex.join(words)


def show(about: dict[str, Any], results: Sequence[Result], digests: dict[tuple[int, str], str]) -> None:
    """Prints the results for people, in lines of at most 80 characters if the names are not too long."""
    size = about["model_bytes"]
    types = ", ".join(
        f"{type} {n / size:.0%}" for type, n in about["model_types"].items() if n > 0.005 * size
    )
    width = _text_width()

    def say(text: str) -> None:
        print(paragraph(text, width=width))

    say(harmless(f"{about['model']}: {about['architecture']}, {_bytes(size)} ({types})"))
    say(f"{about['cpu']}, {about['isa']}")
    say(f"{about['version']} {about['commit']}".strip() + f", {about['build']}")
    if "plan" in about:
        say(about["plan"])
    if about["resident_bytes"]:
        share = about["resident_huge_bytes"] / about["resident_bytes"]
        say(
            f"loaded in {about['load_s']:.2f} s; {_bytes(about['resident_bytes'])} in memory, "
            f"{share:.0%} of it in huge pages"
        )
    for n_threads in dict.fromkeys(result.threads for result in results):
        shown = [f"{mode} {digest[:8]}" for (n, mode), digest in digests.items() if n == n_threads]
        say(f"logits ({_threads(n_threads)}): {', '.join(shown)}")
    for n_threads in dict.fromkeys(result.threads for result in results):
        rows = [result for result in results if result.threads == n_threads]
        for table in (_prompt_table, _decode_table):
            is_decode = table is _decode_table
            chosen = [result for result in rows if (result.n_prompt == 0) == is_decode]
            if chosen:
                print()
                print(*table(_threads(n_threads), chosen), sep="\n")
    if size <= 2 * (machine.cache_bytes() or 32 << 20) and "plan" not in about:
        print()
        say("The model may fit in the processor's cache: its share of the memory's rate then says little.")


def _text_width() -> int:
    return min(output_width() or 80, 80)


def _bytes(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 1 << 30 else f"{n / 2**20:.1f} MiB"


def _threads(n: int) -> str:
    return f"{n} thread" + "s" * (n > 1)


def _prompt_table(head: str, results: Sequence[Result]) -> list[str]:
    rows = [[head, "mode", "tokens/s", "GFLOP/s"]]
    for r in results:
        flop = "" if r.gflop_per_s is None else f"{r.gflop_per_s:.0f}"
        rows.append([r.test, r.sparsity, f"{r.tokens_per_s:.2f} ± {r.spread:.2f}", flop])
    return list(columns(rows, right=range(2, 4), width=output_width()))


def _decode_table(head: str, results: Sequence[Result]) -> list[str]:
    def share(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}%}"

    def speed(r: Result) -> str:
        digits = 2 if r.tokens_per_s < 100 else 1
        return f"{r.tokens_per_s:.{digits}f} ± {r.spread:.{digits}f}"

    hits = any(r.hit_rate for r in results)
    rows = [[head, "mode", "tokens/s", "MB/token", "GB/s", "ceiling", "share", "hits" if hits else "active"]]
    rows += [
        [
            r.test,
            r.sparsity,
            speed(r),
            f"{r.bytes_per_token / 1e6:.1f}",
            f"{r.read_gb_s or 0:.1f}",
            "" if r.ceiling_gb_s is None else f"{r.ceiling_gb_s:.1f}",
            share(r.share, 0) + ("" if r.share_spread is None else f" ±{100 * r.share_spread:.0f}"),
            share(r.hit_rate if hits else r.active),
        ]
        for r in results
    ]
    return list(columns(rows, right=range(2, 8), width=output_width()))
