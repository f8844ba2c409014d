"""Runs the same model in llama-cpp-python and in this package, turn by turn, and prints how they compare.

    pip install llama-cpp-python
    python scripts/bench_peers.py model.gguf -p 512 -n 32 -r 3
    python scripts/bench_peers.py model.powerinfer.gguf --peer-model model.gguf --sparsity exact,predicted

Each program lives in a process of its own, loads the model once and waits, without using the processor, while
the others take their turns: a machine whose speed changes does so for all of them. Both compute random tokens
with the same number of threads, prompts in batches of -b tokens, decoding a token at a time after 4 others,
and neither samples. A ratio is the median over the rounds of the ratio within a round.

llama.cpp cannot read PowerInfer's format: --peer-model names the plain twin of such a file (make_model.py
--format both). It is built while it is installed, for the processor that it is built on; other builds, for
comparing one instruction set, can be kept beside it and named with --peer-path:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" \\
        pip install --no-binary llama-cpp-python --target avx2 llama-cpp-python
    POWERINFER_ISA=avx2 python scripts/bench_peers.py model.gguf --peer-path avx2

On a GPU the peer is llama-bench, of a build of llama.cpp with CUDA, which measures everything before the
others begin; give it what it needs, once for each way in which it shall run, and ours a budget:

    python scripts/bench_peers.py model.gguf --vram-budget 40 --peer-bench build/bin/llama-bench \\
        --peer-arguments=" -ngl 99 -fa 0" --peer-arguments=" -ngl 99 -fa 1"

Of a mixture of experts (make_mixture.py) the bytes of the experts that a token uses are told besides. What
llama.cpp can do depends on flash attention (--peer-option flash_attn=true).

A program that crashes is started again for the tests that it has not failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

CONTEXT = 4  # tokens before those whose decoding is timed
READ_BYTES = 2 << 30
INSTALL = "pip install llama-cpp-python"


class Failed(Exception):
    """A program could not do what it was asked."""


# ---- in the processes that measure: a line of JSON in, a line of JSON out


class Peer:
    """llama-cpp-python."""

    def __init__(self, how: dict[str, Any]) -> None:
        if how["path"]:
            sys.path.insert(0, how["path"])
        try:
            self._api = import_module("llama_cpp")
        except ImportError as error:
            raise Failed(f"llama-cpp-python is not there ({error}): {INSTALL}") from error
        options = {"n_batch": how["n_batch"], "n_ubatch": how["n_batch"], "n_ctx": how["n_ctx"]}
        options |= {"n_threads": how["n_threads"], "n_threads_batch": how["n_threads"]}
        self._llm = self._api.Llama(how["model"], verbose=False, **options, **how["options"])

    def about(self) -> dict[str, Any]:
        info = self._api.llama_print_system_info()
        return {"version": self._api.__version__, "system_info": info.decode("utf-8", "replace").strip()}

    def _eval(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        self._llm.eval(tokens)
        self._api.llama_synchronize(self._llm.ctx)
        return time.perf_counter() - start

    def run(self, n_prompt: int, n_gen: int, **_: Any) -> dict[str, Any]:
        import numpy as np

        rng = np.random.default_rng(1)

        def tokens(n: int) -> list[int]:
            return [int(token) for token in rng.integers(0, self._llm.n_vocab(), n)]

        self._llm.reset()
        if n_prompt:
            return {"seconds": self._eval(tokens(n_prompt))}
        for token in tokens(CONTEXT):  # one by one, so that what ails prompts does not hinder decoding
            self._eval([token])
        return {"seconds": sum(self._eval([token]) for token in tokens(n_gen))}


class Bench:
    """llama-bench, which makes all rounds of all tests when it is started."""

    def __init__(self, how: dict[str, Any]) -> None:
        words = {"-m": how["model"], "-t": how["n_threads"], "-b": how["n_batch"], "-ub": how["n_batch"]}
        words |= {"-p": how["n_prompt"], "-n": how["n_gen"], "-r": how["rounds"] + 1, "-o": "json"}
        command = [how["path"], *(str(word) for pair in words.items() for word in pair), *how["arguments"]]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            found = json.loads(done.stdout)
        except OSError as error:
            raise Failed(str(error)) from error
        except ValueError as error:
            said = done.stderr.strip().splitlines()
            raise Failed(f"ended with code {done.returncode}: {said[-1][:200] if said else ''}") from error
        self._first = found[0]
        self._left = {(each["n_prompt"], each["n_gen"]): each["samples_ns"] for each in found}

    def about(self) -> dict[str, Any]:
        where = " ".join(str(self._first.get(key) or "") for key in ("backends", "gpu_info", "cpu_info"))
        return {"version": str(self._first.get("build_commit")), "system_info": where.strip()}

    def run(self, n_prompt: int, n_gen: int, **_: Any) -> dict[str, Any]:
        return {"seconds": self._left[n_prompt, n_gen].pop(0) / 1e9}


class Ours:
    """This package."""

    def __init__(self, how: dict[str, Any]) -> None:
        from powerinfer import bench
        from powerinfer._engine import machine
        from powerinfer._engine.devices import choose_devices
        from powerinfer._engine.session import Model
        from powerinfer._llama.loader import Loader, summary

        self._bench = bench
        self._n_bytes = machine.sample_bytes(READ_BYTES)
        self._model = Model(how["model"], use_mmap=how["use_mmap"], predictor_type=how["predictor_type"])
        budget, sizes = how["vram_budget"], {key: how[key] for key in ("n_ctx", "n_batch", "n_threads")}
        loader = Loader(
            self._model,
            devices=None if budget is None else choose_devices(budget, how["devices"]),
            sparsity=how["sparsity"],
            type_k=None,
            type_v=None,
            **sizes,
        )
        self._session = loader.open()
        self._plan = None if loader.plan is None else summary(loader.plan)

    def about(self) -> dict[str, Any]:
        return self._bench.describe(self._model) | {"plan": self._plan}

    def run(self, n_prompt: int, n_gen: int, **how: Any) -> dict[str, Any]:
        case = self._bench.Case(n_prompt=n_prompt, n_gen=n_gen, depth=0 if n_prompt else CONTEXT)
        (result,) = self._bench.measure(
            self._session,
            case,
            [how["mode"]],
            repetitions=1,
            warm_up=False,
            ceiling_bytes=self._n_bytes if how["with_ceiling"] else 0,
        )
        return asdict(result) | {"seconds": result.seconds[0]}


def serve(kind: str) -> None:
    """Answers requests until stdin ends. What libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    program: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if program is None:
                program = {"peer": Peer, "bench": Bench, "ours": Ours}[kind](request)
                answer = program.about()
            else:
                answer = program.run(**request)
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        out.write(json.dumps(answer) + "\n")
        out.flush()


# ---- in the process that asks


@dataclass
class Program:
    """One process that measures, started when it is needed."""

    name: str
    kind: str
    how: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """What went wrong, by test."""
    _process: subprocess.Popen[str] | None = None
    _errors: IO[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises Failed."""
        self.start()
        return self._exchange(request)

    def start(self) -> None:
        """Loads the model, unless it is loaded. Raises Failed."""
        if self._process is not None:
            return
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", self.kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        try:
            self.about = self._exchange(self.how)
        except Failed:
            self.stop()
            raise

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _last_words(self) -> str:
        """How the process ended; it will be started again if it is asked again."""
        assert self._process is not None and self._errors is not None
        code = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self.stop()
        return how + (f": {said[-1][:200]}" if said else "")

    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        if self._process is None:
            return 0.0
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return 0.0
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.close()
                self._process.wait(20)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        self._process = None
        if self._errors is not None:
            self._errors.close()


@dataclass(frozen=True)
class Test:
    n_prompt: int
    n_gen: int
    mode: str

    @property
    def name(self) -> str:
        return f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"


@dataclass
class Idle:
    """Processor time of programs that were waiting."""

    seconds: float = 0.0
    of: float = 0.0

    @property
    def share(self) -> float:
        return self.seconds / self.of if self.of else 0.0


def compare(
    ours: Program, peers: Sequence[Program], tests: Sequence[Test], rounds: int, *, with_ceiling: bool
) -> tuple[list[dict[str, Any]], Idle]:
    """All tests in every program, in turns, after a round that does not count."""
    programs = [*peers, ours]
    found: dict[tuple[str, Test], list[dict[str, Any]]] = {}
    idle = Idle()
    for number in range(-1, rounds):
        for test in tests:
            for program in programs:
                # A mode is ours alone: the peers take part where the test is first met.
                key = test if program is ours else Test(test.n_prompt, test.n_gen, "")
                if test.name in program.failures or (program is not ours and not _is_first(test, tests)):
                    continue
                if sys.stderr.isatty():
                    print(
                        f"\r\033[K{number + 1}/{rounds} {test.name} {program.name}", end="", file=sys.stderr
                    )
                others = [other for other in programs if other is not program]
                before, start = [other.cpu_seconds() for other in others], time.perf_counter()
                try:
                    request: dict[str, Any] = {"n_prompt": test.n_prompt, "n_gen": test.n_gen}
                    if program is ours:
                        request |= {"mode": test.mode, "with_ceiling": with_ceiling}
                    answer = program.ask(request)
                except Failed as error:
                    if program is ours:
                        raise
                    program.failures[test.name] = str(error)
                    continue
                # A program that has just finished may spin for some milliseconds.
                idle.of += len(others) * (time.perf_counter() - start)
                idle.seconds += sum(o.cpu_seconds() - b for o, b in zip(others, before, strict=True))
                if number >= 0:
                    found.setdefault((program.name, key), []).append(answer)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return [_result(ours, peers, test, found) for test in tests], idle


def _is_first(test: Test, tests: Sequence[Test]) -> bool:
    return test == next(t for t in tests if t.name == test.name)


def _result(
    ours: Program, peers: Sequence[Program], test: Test, found: dict[tuple[str, Test], list[dict[str, Any]]]
) -> dict[str, Any]:
    n = test.n_prompt or test.n_gen

    def speeds(name: str, key: Test) -> list[float]:
        return [n / answer["seconds"] for answer in found.get((name, key), [])]

    mine = speeds(ours.name, test)
    answers = found[ours.name, test]
    shares = [answer["share"] for answer in answers if answer["share"] is not None]
    result: dict[str, Any] = {"test": test.name, "mode": test.mode, "powerinfer": _summary(mine)}
    result |= {
        key: answers[-1][key]
        for key in ("bytes_per_token", "read_gb_s", "ceiling_gb_s", "active", "computed")
    }
    result["share"] = statistics.median(shares) if shares else None
    spreads = [answer["share_spread"] for answer in answers if answer["share_spread"] is not None]
    result["share_spread"] = statistics.median(spreads) if spreads else None
    result["peers"] = {}
    for peer in peers:
        theirs = speeds(peer.name, Test(test.n_prompt, test.n_gen, ""))
        if theirs:
            ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
            result["peers"][peer.name] = {**_summary(theirs), "ratio": ratio}
    return result


def _summary(speeds: list[float]) -> dict[str, Any]:
    spread = statistics.stdev(speeds) if len(speeds) > 1 else 0.0
    return {"tokens_per_s": statistics.median(speeds), "spread": spread, "samples": speeds}


def show(report: dict[str, Any]) -> None:
    """Prints a report for people, within 80 characters a line where names allow it."""
    from powerinfer._text.table import columns, facts, paragraph

    about = report["powerinfer"]
    lines = [("machine", f"{about['cpu']}, {report['threads']} threads")]
    lines += [("powerinfer", f"{about['version']} {about['commit']}, {about['isa']}, {about['model']}")]
    lines += [("", about["plan"])] if about["plan"] else []
    for name, peer in report["peers"].items():
        lines.append((name, f"{peer['program']} {peer['version']}, {peer['model']}"))
        if peer["built_with"]:
            lines.append(("", f"CMAKE_ARGS={peer['built_with']}"))
        lines.append(("", peer["system_info"]))
    print(*facts(lines, width=80), sep="\n")
    if about["n_expert"]:
        experts = about["expert_bytes"] / 1e6
        read = [r["bytes_per_token"] / 1e6 for r in report["results"] if r["test"].startswith("tg")]
        text = f"{experts:.0f} MB of experts ({about['n_expert_used']} of {about['n_expert']})"
        if read:
            text += f" of the {read[0]:.0f} MB that are read"
        print(f"\na decoded token uses {text}")
    rows = [["test", "mode", "powerinfer", "of ceiling", "peer", "peer's", "ratio"]]
    for r in report["results"]:
        ours = r["powerinfer"]
        share = "" if r["share"] is None else f"{r['share']:.0%}"
        speed = f"{ours['tokens_per_s']:.2f} ± {ours['spread']:.2f}"
        head = [r["test"], r["mode"], speed, share]
        for name, theirs in r["peers"].items():
            speed = f"{theirs['tokens_per_s']:.2f} ± {theirs['spread']:.2f}"
            rows.append([*head, name, speed, f"{theirs['ratio']:.2f}"])
            head = ["", "", "", ""]
        if not r["peers"]:
            rows.append([*head, "", "", ""])
    print("\ntokens/s, median of the rounds ± standard deviation\n")
    print(*columns(rows, right=(2, 3, 5, 6)), sep="\n")
    for name, peer in report["peers"].items():
        for test, why in peer["failures"].items():
            print(paragraph(f"{name} failed in {test}: {why}", width=80))
    if report["idle_cpu"] > 0.02:
        print(
            paragraph(
                f"Waiting programs used {report['idle_cpu']:.0%} of a core: figures are too low.", width=80
            )
        )


def _peers(a: argparse.Namespace, how: dict[str, Any]) -> list[Program]:
    """The peers that were asked for. Raises Failed for bad options."""
    peers = []
    if a.peer_bench:
        how = {**how, "model": str(a.peer_model or a.model), "path": a.peer_bench, "options": {}}
        how |= {"n_prompt": a.n_prompt, "n_gen": a.n_gen, "rounds": a.rounds}
        for text in a.peer_arguments or [""]:
            words = shlex.split(text)
            peers.append(Program(shlex.join(["llama-bench", *words]), "bench", how | {"arguments": words}))
        if not a.peer_path:
            return peers
    for path in a.peer_path or [""]:
        name = Path(path).name if path else "llama.cpp"
        own = {**how, "model": str(a.peer_model or a.model), "path": path, "options": _options(a.peer_option)}
        peers.append(Program(name, "peer", own))
    return peers


def _start(peer: Program, tests: Sequence[Test]) -> None:
    """Starts it, or notes that it cannot take part. Raises Failed if it is not installed."""
    try:
        peer.start()
    except Failed as error:
        if INSTALL in str(error):
            raise
        peer.failures |= {test.name: str(error) for test in tests}


def _options(texts: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, a value being JSON or text."""
    out: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise Failed(f"--peer-option {text}: KEY=VALUE is needed")
        try:
            out[key] = json.loads(value)
        except ValueError:
            out[key] = value
    return out


def run(a: argparse.Namespace) -> dict[str, Any]:
    """Measures everything. Raises Failed, and PowerInferError for a model that cannot be read."""
    from powerinfer._engine.file import ModelFile
    from powerinfer._engine.machine import cores
    from powerinfer.bench import numbers

    with ModelFile(a.model) as file:
        is_powerinfer = file.info.is_powerinfer
    if is_powerinfer and not a.peer_model:
        raise Failed(
            f"{a.model} is in PowerInfer's format, which llama.cpp cannot read: name its plain twin with "
            "--peer-model"
        )
    modes = (a.sparsity or ("dense,exact,predicted" if is_powerinfer else "dense")).split(",")
    prompts, gens = numbers("-p", [a.n_prompt]), numbers("-n", [a.n_gen])
    # A prompt is computed with all neurons in every mode.
    tests = [Test(n, 0, modes[0]) for n in prompts if n]
    tests += [Test(0, n, mode) for n in gens if n for mode in modes]
    if not tests or a.rounds < 1:
        raise Failed("nothing to measure: no -p or -n above 0, or no rounds")
    threads = a.threads or cores()
    how = {"n_batch": a.n_batch, "n_threads": threads}
    how["n_ctx"] = -(-max(max(prompts), max(gens) + CONTEXT + 1) // 256) * 256
    own = {"model": str(a.model), "use_mmap": a.use_mmap, "predictor_type": a.predictor_type}
    own |= {"vram_budget": a.vram_budget, "devices": a.devices, "sparsity": modes[0]}
    if a.vram_budget is not None and len(modes) > 1:
        raise Failed("a plan is for one mode: name it with --sparsity")
    ours = Program("powerinfer", "ours", how | own)
    peers = _peers(a, how)
    try:
        for peer in peers:
            _start(peer, tests)
        results, idle = compare(
            ours, peers, tests, a.rounds, with_ceiling=not a.no_ceiling and a.vram_budget is None
        )
    finally:
        for program in [ours, *peers]:
            program.stop()
    return {
        "command": shlex.join(["python", "scripts/bench_peers.py", *sys.argv[1:]]),
        "environment": {
            key: value
            for key, value in os.environ.items()
            if key.startswith(("POWERINFER_ISA", "OMP_", "GGML_"))
        },
        "threads": threads,
        "rounds": a.rounds,
        "predictor_type": a.predictor_type,
        "powerinfer": ours.about,
        "peers": {
            peer.name: {
                "program": "llama-bench" if peer.kind == "bench" else "llama-cpp-python",
                "version": peer.about.get("version", ""),
                "system_info": peer.about.get("system_info", ""),
                "model": Path(peer.how["model"]).name,
                "built_with": a.peer_built_with or os.environ.get("CMAKE_ARGS", ""),
                "options": peer.how["options"],
                "arguments": peer.how.get("arguments", []),
                "failures": peer.failures,
            }
            for peer in peers
        },
        "idle_cpu": idle.share,
        "results": results,
    }


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        serve(sys.argv[2])
        return 0
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("model", type=Path, metavar="MODEL", help="a GGUF file that both read")
    p.add_argument("--peer-model", type=Path, metavar="FILE", help="what the peer reads instead")
    p.add_argument(
        "--peer-path",
        action="append",
        metavar="DIR",
        help="where llama-cpp-python is installed, if not in this Python; may be given several times",
    )
    p.add_argument("--peer-option", action="append", default=[], metavar="KEY=VALUE", help="for its Llama()")
    p.add_argument("--peer-bench", metavar="PROGRAM", help="a llama-bench that is measured instead")
    p.add_argument(
        "--peer-arguments",
        action="append",
        metavar="TEXT",
        help="for it (--peer-arguments=' -fa 1'); given several times, it is measured in several ways",
    )
    p.add_argument(
        "--peer-built-with",
        default="",
        metavar="TEXT",
        help="the CMAKE_ARGS it was installed with, for the record (--peer-built-with=-DX=ON; default: the "
        "environment's)",
    )
    p.add_argument("-p", "--n-prompt", default="512", metavar="N,...", help="prompt tokens (default 512)")
    p.add_argument("-n", "--n-gen", default="32", metavar="N,...", help="decoded tokens (default 32)")
    p.add_argument("-r", "--rounds", type=int, default=3, metavar="N", help="default 3")
    p.add_argument("-t", "--threads", type=int, metavar="N", help="default: physical cores")
    p.add_argument("-b", "--n-batch", type=int, default=512, metavar="N", help="default 512")
    p.add_argument(
        "--sparsity", default="", metavar="MODE,...", help="ours: dense, exact, predicted (default dense)"
    )
    p.add_argument("--vram-budget", type=float, metavar="GIB", help="ours: GPU memory (default: the CPU)")
    p.add_argument("--devices", metavar="NAMES", help="ours: as in `powerinfer bench`")
    p.add_argument("--no-mmap", dest="use_mmap", action="store_false", help="copy our weights into memory")
    p.add_argument(
        "--predictor-type", metavar="TYPE", help="rewrites our fc1 and fc2 in a weight format while loading"
    )
    p.add_argument("--no-ceiling", action="store_true", help="do not measure the memory's read rate")
    p.add_argument("--json", action="store_true", help="print one line of JSON")
    a = p.parse_args()
    from powerinfer.errors import PowerInferError

    try:
        report = run(a)
    except (Failed, PowerInferError) as error:
        print(f"bench_peers.py: {error}", file=sys.stderr)
        return 1
    if a.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
