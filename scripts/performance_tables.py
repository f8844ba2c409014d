"""Turns raw measurements into the tables of docs/performance.md and docs/performance/*.md.

    scripts/bench_cpu.sh models docs/performance/2-core-xeon     # writes the raw results
    python scripts/performance_tables.py                         # writes the pages' tables
    python scripts/performance_tables.py --check                 # says whether the pages have them

A GPU's are those that scripts/bench_gpu.py writes as gpu.json.

In a page a table stands between `<!-- table: NAME FOLDER -->` and `<!-- end -->`; FOLDER is one of
docs/performance, or a dot where a table compares machines. performance_pictures.py draws the pictures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ROOT / "docs" / "performance"
PAGES = [ROOT / "docs" / "performance.md", *sorted(FOLDERS.glob("*.md"))]
MACHINES = {"16-core-xeon": "16 cores, Intel", "2-core-xeon": "2 cores, Intel", "2-core-epyc": "2 cores, AMD"}
_TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_KERNELS = re.compile(r"(\S+) +(\S+) +(\d+) threads: read +([\d.]+) GB/s(.*)")
_KERNEL = re.compile(r"\| (\S+) +([\d.]+) \( *(\d+) %\)")

Row = dict[str, Any]


def load(folder: Path, part: str) -> list[Row]:
    """The results of one part, in their order; none if it was not measured."""
    path = folder / f"{part}.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table: the first two columns to the left, numbers to the right; nothing without rows."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def weights(row: Row) -> str:
    """What most of a model's bytes are: "Q4_0"; in a mixture, its name from the file's."""
    name = re.search(r"-(F16|BF16|Q\d\w*?)(?:\.powerinfer)?\.gguf$", row["model"])
    return name[1] if name else next(iter(row["model_types"]))


def percent(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def share(row: Row) -> str:
    """Of the ceiling, with half of the distance between the quartiles where that was measured."""
    spread = row.get("share_spread")
    return percent(row["share"]) + ("" if spread is None else f" ± {100 * spread:.0f}")


def speed(row: Row) -> str:
    return f"{row['tokens_per_s']:.2f} ± {row['spread']:.2f}"


# ---- tables


def machine_table(folder: Path) -> str:
    rows = [
        row
        for part in ("decode", "sparse", "copied", "prompt", "isa", "threads", "mixtures-many")
        for row in load(folder, part)
    ]
    rows += [
        report["powerinfer"] | {"threads": report["threads"], "ceilings_gb_s": []}
        for part in ("peers", "mixtures")
        for report in load(folder, part)
    ]
    if not rows:
        return ""
    first = rows[0]
    commits = ", ".join(dict.fromkeys(row["commit"] or row["version"] for row in rows))
    facts = [
        ("processor", f"{first['cpu']}, {first['n_cores']} cores, {first['memory_bytes'] / 2**30:.0f} GiB"),
        ("system", f"{first['os']}; transparent huge pages: {first['huge_pages']}"),
        ("built with", first["build"]),
        ("commit", commits + (" (+: with changes that were not committed yet)" if "+" in commits else "")),
    ]
    ceilings = [c for row in rows if row["threads"] == first["threads"] for c in row["ceilings_gb_s"]]
    if ceilings:
        facts.append(
            (
                "memory",
                f"{min(ceilings):.1f} to {max(ceilings):.1f} GB/s read by {first['threads']} threads, "
                f"in {len(ceilings)} measurements between the others",
            )
        )
    for peak in load(folder, "peak"):
        sets = ", ".join(
            f"{name.replace('_', ' ')} {rate}" for name, rate in peak.items() if name != "threads"
        )
        facts.append(("multiplying units", f"GFLOP/s on {peak['threads']} threads: {sets}"))
    return markdown(["", ""], facts)


def decode_table(folder: Path, part: str = "decode") -> str:
    head = ["weights", "mode", "tokens/s", "MB/token", "GB/s", "ceiling", "share", "active", "of dense"]
    rows, dense = [], {}
    for row in load(folder, part):
        if row["sparsity"] == "dense":
            dense[row["model"]] = row["median"]
        gain = row["median"] / dense[row["model"]] if row["model"] in dense else None
        rows.append(
            [
                weights(row),
                row["sparsity"],
                speed(row),
                f"{row['bytes_per_token'] / 1e6:.0f}",
                f"{row['read_gb_s']:.1f}",
                f"{row['ceiling_gb_s']:.1f}",
                share(row),
                percent(row["active"], 1),
                "" if gain is None else f"{gain:.2f}",
            ]
        )
    return markdown(head, rows)


def sparse_table(folder: Path) -> str:
    return decode_table(folder, "sparse")


def copied_table(folder: Path) -> str:
    """Weights in memory of the model's own (--no-mmap)."""
    return decode_table(folder, "copied")


def whole_table(folder: Path) -> str:
    """Models with all their layers."""
    return decode_table(folder, "whole")


def depth_table(folder: Path) -> str:
    rows = [
        [
            *(weights(row), row["sparsity"], f"{row['depth']:,}", speed(row)),
            *(f"{row['bytes_per_token'] / 1e6:.0f}", f"{row['read_gb_s']:.1f}", share(row)),
        ]
        for row in load(folder, "depth")
    ]
    head = ["weights", "mode", "tokens before", "tokens/s", "MB/token", "GB/s", "share"]
    return markdown(head, rows)


def many_table(folder: Path, part: str = "many") -> str:
    """Sequences decoded together beside one, in the same run."""
    rows, alone = [], {}
    for row in load(folder, part):
        name = f"{row['model'].removesuffix('.gguf')}, {row['sparsity']}"
        what = (name, *row.get("budgets", ()))
        if row["n_seq"] == 1:
            alone[what] = row["median"]
        gain = row["median"] / alone[what] if what in alone else None
        budgets = " and ".join(f"{n / 2**30:g}" for n in row.get("budgets", ())) or "none"
        mb = f"{row['bytes_per_token'] / 1e6:.0f}"
        shown = "" if gain is None else f"{gain:.2f}"
        rows.append([name, budgets, str(row["n_seq"]), speed(row), mb, percent(row["active"], 1), shown])
    head = ["model, mode", "GiB of GPU memory", "sequences", "tokens/s", "MB/token", "active"]
    return markdown([*head, "of one sequence"], rows)


def mixtures_many_table(folder: Path) -> str:
    return many_table(folder, "mixtures-many")


def widths_table(folder: Path) -> str:
    """Tokens per second by the number of sequences, a line for each file and instruction set."""
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for row in load(folder, "widths"):
        of_file = rates.setdefault((re.sub(r"\.gguf$", "", row["model"]), row["isa"]), {})
        of_file[row["n_seq"]] = row["median"]
    counts = sorted({n for of_file in rates.values() for n in of_file})
    rows = [
        [name, isa, *(f"{of_file[n]:.0f}" if n in of_file else "" for n in counts)]
        for (name, isa), of_file in rates.items()
    ]
    return markdown(["model", "set", *map(str, counts)], rows)


def mixtures_table(folder: Path) -> str:
    """Mixtures of experts beside the peer."""
    rows = []
    for report in load(folder, "mixtures"):
        about = report["powerinfer"]
        model = re.sub(r"(\.powerinfer)?\.gguf$", "", about["model"])
        for row in report["results"]:
            for peer in row["peers"].values():
                mb = row["bytes_per_token"] / 1e6
                rows.append(
                    [
                        *(model, f"{row['test']}, {row['mode']}", about["isa"]),
                        *(f"{row['powerinfer']['tokens_per_s']:.0f}", f"{peer['tokens_per_s']:.0f}"),
                        f"**{peer['ratio']:.2f}**",
                        *((f"{mb:.0f}", share(row)) if row["test"].startswith("tg") else ("", "")),
                    ]
                )
    head = ["model", "test", "set", "powerinfer", "llama.cpp", "ratio", "MB/token", "share of the read rate"]
    return markdown(head, rows)


def prompt_table(folder: Path) -> str:
    rows = [
        [weights(row), row["test"], speed(row), f"{row['gflop_per_s']:.0f}"] for row in load(folder, "prompt")
    ]
    return markdown(["weights", "prompt", "tokens/s", "GFLOP/s"], rows)


def isa_table(folder: Path) -> str:
    of: dict[tuple[str, str], dict[str, Row]] = {}
    for row in load(folder, "isa"):
        of.setdefault((row["isa"], weights(row)), {})["pp" if row["n_prompt"] else "tg"] = row
    rows = [
        [
            *(isa, type, speed(found["pp"]), f"{found['pp']['gflop_per_s']:.0f}"),
            *(speed(found["tg"]), share(found["tg"])),
        ]
        for (isa, type), found in of.items()
        if len(found) == 2
    ]
    return markdown(
        ["set", "weights", "prompt of 512, tokens/s", "GFLOP/s", "decode, tokens/s", "share"], rows
    )


def peers_table(folder: Path) -> str:
    rows = []
    for report in load(folder, "peers"):
        about, predictor = report["powerinfer"], report.get("predictor_type")
        for row in report["results"]:
            mode = row["mode"]
            if predictor and mode == "predicted":
                mode += f" by {predictor}"
            if report["threads"] != about["n_cores"]:
                mode += f", {report['threads']} thread" + "s" * (report["threads"] > 1)
            if "--no-mmap" in report["command"]:
                mode += ", memory of its own"
            for name, peer in report["peers"].items():
                theirs = row["peers"].get(name)
                failed = peer["failures"].get(row["test"], "").partition(":")[0]
                rows.append(
                    [
                        f"{name} ({about['isa']} here)",
                        f"{weights(about)}, {row['test']}, {mode}",
                        f"{row['powerinfer']['tokens_per_s']:.2f}",
                        f"{theirs['tokens_per_s']:.2f}" if theirs else failed,
                        f"**{theirs['ratio']:.2f}**" if theirs else "",
                        share(row),
                    ]
                )
    head = [
        "build of the peer",
        "test",
        "powerinfer",
        "llama-cpp-python",
        "ratio",
        "our share of the ceiling",
    ]
    return markdown(head, rows)


Pair = tuple[float, float, float]
"""Our tokens/s, the peer's, and the median of the ratios within a round."""


def beside(folder: Path, test: str) -> dict[tuple[str, str], Pair]:
    """For weights and mode, with all cores: beside the peer's build for the same processor."""
    found: dict[tuple[str, str], Pair] = {}
    for report in load(folder, "peers"):
        about = report["powerinfer"]
        plain = not report.get("predictor_type") and "--no-mmap" not in report["command"]
        if not plain or report["threads"] != about["n_cores"] or "avx512" not in report["peers"]:
            continue
        for row in report["results"]:
            peer = row["peers"].get("avx512")
            if row["test"].startswith(test) and peer:
                pair = (row["powerinfer"]["tokens_per_s"], peer["tokens_per_s"], peer["ratio"])
                found.setdefault((weights(about), row["mode"]), pair)
    return found


def beside_table(folders: Path, test: str) -> str:
    """A ratio for each machine, and tokens/s of the first."""
    machines = [beside(folders / name, test) for name in MACHINES]
    first, *_ = MACHINES.values()
    head = [
        "weights",
        "mode",
        f"llama.cpp, {first}",
        "powerinfer",
        *(f"ratio, {m}" for m in MACHINES.values()),
    ]
    rows = [
        [
            *key,
            f"{theirs:.0f}",
            f"{ours:.0f}",
            *(f"**{m[key][2]:.1f}**" if key in m else "" for m in machines),
        ]
        for key, (ours, theirs, _) in machines[0].items()
    ]
    return markdown(head, rows)


def beside_decode_table(folders: Path) -> str:
    return beside_table(folders, "tg")


def beside_prompt_table(folders: Path) -> str:
    return beside_table(folders, "pp")


def together_table(folders: Path) -> str:
    """What eight sequences together decode, over one alone."""
    head = ["weights", "mode", *(f"{m}: 1, 8" for m in MACHINES.values())]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for name in MACHINES:
        rows = {
            (weights(row), row["sparsity"], row["n_seq"]): row["median"]
            for row in load(folders / name, "many")
        }
        for kind, mode, n_seq in rows:
            if n_seq == 8:
                one, eight = rows[kind, mode, 1], rows[kind, mode, 8]
                cell = f"{one:.0f}, {eight:.0f} (**{eight / one:.1f}**)"
                found.setdefault((kind, mode), {})[name] = cell
    return markdown(
        head, [[*key, *(cells.get(name, "") for name in MACHINES)] for key, cells in found.items()]
    )


def gpu_table(folder: Path) -> str:
    """What a GPU's budget gives, without the figures of how."""
    rows = [
        [
            *(row_title(row), row["sparsity"], f"{row['budget']:g} GiB"),
            *(percent(row["plan"]["hot_share"]), f"{row['tokens_per_s']:.0f}"),
        ]
        for row in load_gpu(folder)["rows"].values()
    ]
    return markdown(["model", "mode", "GPU memory allowed", "neurons there", "tokens/s"], rows)


def peer_versions_table(folder: Path) -> str:
    found: dict[str, Row] = {}
    for report in load(folder, "peers") + load(folder, "mixtures"):
        found |= report["peers"]
    rows = [
        (name, f"{peer['version']}; {' '.join(peer['system_info'].split())}") for name, peer in found.items()
    ]
    return markdown(["build", "llama-cpp-python"], [(name, text.replace("|", ",")) for name, text in rows])


def threads_table(folder: Path) -> str:
    rows = [
        [
            *(weights(row), row["sparsity"], str(row["threads"]), speed(row)),
            *(f"{row['read_gb_s']:.1f}", f"{row['ceiling_gb_s']:.1f}", share(row)),
        ]
        for row in load(folder, "threads")
    ]
    return markdown(["weights", "mode", "threads", "tokens/s", "GB/s", "ceiling", "share"], rows)


def kernels_table(folder: Path) -> str:
    path = folder / "kernels.txt"
    names = ("dot", "axpy", "listed", "joined", "exact")
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        found = _KERNELS.match(line)
        if found:
            kernels = {name: f"{rate} ({share} %)" for name, rate, share in _KERNEL.findall(found[5])}
            rows.append([found[1], found[2], found[4], *(kernels.get(name, "") for name in names)])
    return markdown(["set", "weights", "read, GB/s", *names], rows)


def llama_table(folder: Path) -> str:
    rows = [
        [
            *(row["model"], f"{min(row['open_s']):.2f} s", f"{row['token_ms']:.2f}"),
            *(f"{row['engine_ms']:.2f}", f"{row['added_ms']:.3f}", percent(row["share_at_100_per_s"], 1)),
        ]
        for row in load(folder, "llama")
    ]
    head = ["model", "opens in", "ms per token", "of that the engine", "`Llama` adds", "at 100 tokens/s"]
    return markdown(head, rows)


def load_gpu(folder: Path) -> Row:
    """What scripts/bench_gpu.py wrote."""
    found: Row = json.loads((folder / "gpu.json").read_text(encoding="utf-8"))
    return found


def gpu_machine_table(folder: Path) -> str:
    report = load_gpu(folder)
    measured = [rates for row in report["rows"].values() for rates in row["ceilings"].values()]

    def between(name: str, digits: int = 0) -> str:
        low, high = min(r[name] for r in measured), max(r[name] for r in measured)
        return f"{low:,.{digits}f} to {high:,.{digits}f} GB/s"

    facts = [
        ("GPU", report["gpu"]),
        ("processor", f"{report['cpu']}, {measured[0]['threads']} threads, {report['isa']}"),
        ("commit", ", ".join(dict.fromkeys(commit_of(row, report) for row in report["rows"].values()))),
        ("the GPU reads its memory", f"{between('gpu')}, in {len(measured)} measurements between the others"),
        ("the processor reads its own", between("cpu")),
        ("PCIe, copying", between("copy", 1)),
        ("PCIe, read by the GPU", between("in_place", 1)),
    ]
    return markdown(["", ""], [fact for fact in facts if fact[1]])


def commit_of(row: Row, report: Row) -> str:
    """Of which code a row is, and of which day if that is known."""
    commit = row.get("commit", report.get("commit", ""))
    return f"{commit} ({row['date']})" if row.get("date") else f"{commit}"


def gpu_decode_table(folder: Path) -> str:
    rows, report = [], load_gpu(folder)
    for row in report["rows"].values():
        plan, model = row["plan"], row_title(row)
        cpu = [row["ceilings"][when]["cpu"] for when in ("before", "after")]
        goal = f"{row['goal_here']:.0f}" if row.get("goal_here") else ""
        rows.append(
            [
                *(model, row["sparsity"], f"{row['gpu_counted_gib']:.2f} of {row['budget']:g}"),
                *(percent(plan["hot_share"]), percent(row["active_gpu"] / row["active"])),
                *(f"{row['tokens_per_s']:.1f}", f"{row['best_tokens_per_s']:.1f}"),
                *(goal, f"{cpu[0]:.0f}, {cpu[1]:.0f}"),
                *(f"{plan['expected_tokens_per_s']:.1f}", f"{row['mb_per_token']:.0f}"),
                *(f"{row['mb_per_token'] / row['ms']:.0f}", percent(row["share_if_all_on_gpu"])),
                commit_of(row, report),
            ]
        )
    head = ["model", "mode", "GiB", "neurons there", "of the computed", "tokens/s", "best"]
    head += ["goal here", "CPU reads", "planned"]
    return markdown([*head, "MB/token", "GB/s", "of the GPU's rate", "commit"], rows)


def gpu_prompt_table(folder: Path) -> str:
    rows = [
        [row_title(row), f"{row['budget']:g} GiB", tokens, f"{rate:,.0f}", percent(row["plan"]["hot_share"])]
        for row in load_gpu(folder)["rows"].values()
        for tokens, rate in row["prompt_tokens_per_s"].items()
    ]
    return markdown(["model", "budget", "tokens", "tokens/s", "neurons on the GPU"], rows)


def row_title(row: Row) -> str:
    """A model's name without what other columns say."""
    layers = f", {row['layers']} layers" if row["layers"] else ""
    several = f", {row['n_seq']} sequences" if row.get("n_seq", 1) > 1 else ""
    chunk = row["plan"].get("n_batch") or min(max(row["prompts"]), 2048)
    return f"{row['shape']} {row['type']}{layers}{several}" + (f", chunks of {chunk}" if chunk > 512 else "")


def commands(folder: Path) -> Iterator[str]:
    """What was run, each once."""
    seen = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            command = re.sub(r"\S*/(?=[^/\s]+)", "", row.get("command", "")).replace(
                "bench_peers.py", "scripts/bench_peers.py"
            )
            set_by = row.get("isa") or row.get("powerinfer", {}).get("isa", "")
            if command and (command, set_by) not in seen:
                seen.append((command, set_by))
                yield f"POWERINFER_ISA={set_by} {command}"


def commands_table(folder: Path) -> str:
    found = list(commands(folder))
    return "\n".join(["```sh", *found, "```"]) + "\n" if found else ""


TABLES: dict[str, Callable[[Path], str]] = {
    "machine": machine_table,
    "decode": decode_table,
    "sparse": sparse_table,
    "copied": copied_table,
    "whole": whole_table,
    "depth": depth_table,
    "many": many_table,
    "mixtures": mixtures_table,
    "mixtures-many": mixtures_many_table,
    "widths": widths_table,
    "prompt": prompt_table,
    "isa": isa_table,
    "peers": peers_table,
    "beside-decode": beside_decode_table,
    "beside-prompt": beside_prompt_table,
    "together": together_table,
    "gpu": gpu_table,
    "peer-versions": peer_versions_table,
    "threads": threads_table,
    "kernels": kernels_table,
    "llama": llama_table,
    "gpu-machine": gpu_machine_table,
    "gpu-decode": gpu_decode_table,
    "gpu-prompt": gpu_prompt_table,
    "commands": commands_table,
}


def filled(page: str, folders: Path = FOLDERS) -> str:
    """The page with its tables made anew."""

    def table(found: re.Match[str]) -> str:
        return found[1] + TABLES[found[2]](folders / found[3]) + found[4]

    return _TABLE.sub(table, page)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--check", action="store_true", help="change nothing; 1 if a page is not up to date")
    a = p.parse_args()
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        new = filled(page)
        if a.check and new != page:
            return 1
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
