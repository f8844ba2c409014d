"""The arrows of the house, read from the #include and import lines.

    cli, chat, scripts -> llama -> models -> _engine -> _native -> native/ -> vendor/cpu -> vendor/core

Each rule is a function from a file's path and text to what is wrong with it, so rules are tested too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
C_SUFFIXES = {".c", ".cpp", ".cu", ".h", ".hpp", ".cuh"}

# What only te_os may include: there another operating system is one more file.
OS_HEADERS = re.compile(
    r"^((sys|linux|asm)/|(pthread|threads|sched|dlfcn|unistd|fcntl|signal|time|poll|windows)\.h$)"
)
OS_FILES = re.compile(r"^vendor/core/te_os\w*\.[ch]$")
# The kernel must be asked before the AMX registers may be used, and on 64-bit ARM for what the processor has:
# that is te_cpu's.
OS_EXCEPTIONS = {"vendor/cpu/te_cpu.c": {"sys/auxv.h", "sys/syscall.h", "unistd.h"}}
ENVIRONMENT_FILES = {"vendor/cpu/te_cpu.c"}
INTRINSICS = re.compile(
    r"\b(_mm\d*_\w+|__m(64|128|256|512)\w*|_tile_\w+|v(ld|st)\d\w*_\w\d+|immintrin\.h|arm_neon\.h)\b"
)
VOICES = re.compile(
    r"\b(printf|vprintf|puts|putchar|fprintf|vfprintf|fputs|fputc|perror|abort|exit|_exit|_Exit|quick_exit)\s*\("
)
DEVICE_FILES = re.compile(r"^native/device/(handover\w*\.[ch]|cuda/)")


def without_comments(text: str) -> str:
    """C text with comments and the contents of string literals gone; lines stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'

    def blank(found: re.Match[str]) -> str:
        return '""' if found[0].startswith('"') else "\n" * found[0].count("\n") or " "

    return re.sub(pattern, blank, text, flags=re.DOTALL)


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE)


def layer(path: str) -> int:
    """0 vendor/core, 1 vendor/cpu and vendor/cuda, 2 native."""
    return 0 if path.startswith("vendor/core/") else 1 if path.startswith("vendor/") else 2


def arrows_go_down(path: str, text: str) -> Iterator[str]:
    here = Path(path).parent
    for name in includes(text):
        candidates = [ROOT / here / name, ROOT / "vendor" / name, ROOT / "native" / name]
        for target in candidates:
            resolved = target.resolve()
            if resolved.is_file() and resolved.is_relative_to(ROOT):
                if layer(str(resolved.relative_to(ROOT))) > layer(path):
                    yield f"includes {name}, which is a layer above"
                break


def vendor_knows_no_model(path: str, text: str) -> Iterator[str]:
    if path.startswith("vendor/"):
        for word in sorted(set(re.findall(r"\bpi_\w+|\bPI_\w+", without_comments(text)))):
            yield f"names {word}"


def native_has_no_intrinsics(path: str, text: str) -> Iterator[str]:
    if path.startswith("native/"):
        for found in INTRINSICS.finditer(without_comments(text) + "\n".join(includes(text))):
            yield f"uses {found[0]}"


def only_te_os_knows_the_system(path: str, text: str) -> Iterator[str]:
    if not OS_FILES.match(path):
        for name in includes(text):
            if OS_HEADERS.match(name) and name not in OS_EXCEPTIONS.get(path, set()):
                yield f"includes {name}"


def the_engine_only_returns(path: str, text: str) -> Iterator[str]:
    for found in VOICES.finditer(without_comments(text)):
        yield f"calls {found[1]}"


def the_environment_is_read_in_one_place(path: str, text: str) -> Iterator[str]:
    if path not in ENVIRONMENT_FILES and re.search(
        r"\b(secure_)?getenv\s*\(|\benviron\b", without_comments(text)
    ):
        yield "reads the environment"


def devices_meet_in_the_handover(path: str, text: str) -> Iterator[str]:
    code = without_comments(text)
    if path.startswith("native/") and not DEVICE_FILES.match(path):
        names = "\n".join(includes(text))
        on_host = re.search(r"\bte_op_\w+", code) or "te_ops.h" in names
        on_cuda = re.search(r"\b(te_cuda_\w+|cuda[A-Z]\w+)", code) or "te_cuda" in names
        if on_host and on_cuda:
            yield "works on the CPU and on CUDA"


# The rooms of native/, each with those that it may include. What lies in native/ itself is everybody's.
NATIVE_ROOMS: dict[str, set[str]] = {
    "model": set(),
    "sample": set(),
    "kv": {"model"},
    "device": {"model"},
    "state": {"model", "kv"},
    "plan": {"model", "kv", "device", "state"},
    "blocks": {"model", "kv", "state"},
    "hybrid": {"model", "kv", "device", "state", "plan", "blocks"},
    "step": {"model", "kv", "device", "state", "plan", "blocks", "hybrid", "sample"},
}


def room(path: str) -> str:
    found = re.match(r"native/(\w+)/", path)
    return found[1] if found else ""


def rooms_have_one_way_arrows(path: str, text: str) -> Iterator[str]:
    here = room(path)
    if here and here not in NATIVE_ROOMS:
        yield "lies in a room that NATIVE_ROOMS does not have"
    for target in sorted(included(path, text)) if here else []:
        if room(target) not in {"", here, *NATIVE_ROOMS.get(here, set())}:
            yield f"includes {target}, a room that {here} may not know"


def plans_ask_no_device(path: str, text: str) -> Iterator[str]:
    """Sizes are answered by space.h: whoever plans can neither open a device nor load its library."""
    if room(path) == "plan" or path.startswith("native/device/space."):
        for target in sorted(included(path, text)):
            if room(target) == "device" and target != "native/device/space.h":
                yield f"includes {target}, while plans need no device"


def nothing_is_left_open(path: str, text: str) -> Iterator[str]:
    for found in re.finditer(r"\b(TODO|FIXME|XXX)\b", text):
        yield f"says {found[0]}"


C_RULES: list[Callable[[str, str], Iterator[str]]] = [
    arrows_go_down,
    vendor_knows_no_model,
    native_has_no_intrinsics,
    only_te_os_knows_the_system,
    the_engine_only_returns,
    the_environment_is_read_in_one_place,
    devices_meet_in_the_handover,
    rooms_have_one_way_arrows,
    plans_ask_no_device,
    nothing_is_left_open,
]


@cache  # several rules ask for the same files
def imports(text: str) -> frozenset[str]:
    """Modules that a Python file imports, anywhere in it; relative ones with their dots."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found.add(base)
            inside = base if base.endswith(".") else f"{base}."
            found.update(f"{inside}{alias.name}" for alias in node.names)
    return frozenset(found)


def only_native_knows_cffi(path: str, text: str) -> Iterator[str]:
    if path != "powerinfer/_engine/_native.py":
        for name in sorted(imports(text) & {"cffi", "ctypes"}):
            yield f"imports {name}"


# What only an extra installs, and the one file that imports it, when it is used.
EXTRAS = {"torch": "powerinfer/models/predictor/train.py"}


def the_package_needs_no_training_library(path: str, text: str) -> Iterator[str]:
    if path.startswith("powerinfer/"):
        libraries = {"torch", "transformers", "gguf", "scipy"}
        for name in sorted({name.split(".")[0] for name in imports(text)} & libraries):
            at_once = re.search(rf"^(import|from) {name}\b", text, re.MULTILINE)
            if path != EXTRAS.get(name) or at_once:
                yield f"imports {name}"


SURFACES = "cli|chat|server|bench|integrations"


def surfaces_do_not_reach_the_engine(path: str, text: str) -> Iterator[str]:
    if re.match(rf"(scripts/|powerinfer/({SURFACES})(/|\.py))", path):
        for name in sorted(imports(text)):
            if name.split(".")[-1] == "_native":
                yield f"imports {name}"


# The rooms of the package, from the ground up, each with those that it may import. The ground is everybody's.
GROUND = {"powerinfer/errors.py", "powerinfer/types.py", "powerinfer/_extras.py"}
_LOWER = {"_text", "hub", "_engine"}
_USED = {*_LOWER, "compat", "models", "_llama"}
PYTHON_ROOMS: dict[str, set[str]] = {
    "ground": set(),
    "_text": set(),
    "hub": {"_text"},
    "_engine": {"_text", "hub"},
    "models": _LOWER,
    "compat": {*_LOWER, "models"},
    "_llama": {*_LOWER, "compat", "models"},
    "bench": _USED,
    "chat": _USED,
    "server": _USED,
    "integrations": {*_USED, "server"},
    "cli": {*_USED, "bench", "chat", "server"},
}


def python_room(path: str) -> str:
    """llama.py and async_llama.py are of the room _llama. Other modules beside them name something else."""
    if path in GROUND:
        return "ground"
    if path in {"powerinfer/llama.py", "powerinfer/async_llama.py"}:
        return "_llama"
    parts = path.split("/")
    return parts[0] if parts[0] != "powerinfer" else parts[1] if len(parts) > 2 else "names"


def packages_have_one_way_arrows(path: str, text: str) -> Iterator[str]:
    here = python_room(path)
    if here in {"names", "scripts"} or path.endswith("/__main__.py"):  # which begin, and end, nowhere
        return
    if here not in PYTHON_ROOMS:
        yield "lies in a room that PYTHON_ROOMS does not have"
    for target in sorted(imported(path, text)):
        if python_room(target) not in {"ground", here, *PYTHON_ROOMS.get(here, set())}:
            yield f"imports {target}, which {here} may not know"


PYTHON_RULES: list[Callable[[str, str], Iterator[str]]] = [
    only_native_knows_cffi,
    the_package_needs_no_training_library,
    surfaces_do_not_reach_the_engine,
    packages_have_one_way_arrows,
    nothing_is_left_open,
]


def sources(directories: tuple[str, ...], suffixes: set[str]) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for directory in directories
        for path in (ROOT / directory).rglob("*")
        if path.suffix in suffixes and path.is_file()
    )


def included(path: str, text: str) -> set[str]:
    """The files of ours that a C file includes."""
    found: set[str] = set()
    for name in includes(text):
        candidates = (ROOT / Path(path).parent / name, ROOT / "vendor" / name, ROOT / "native" / name)
        target = next((c.resolve() for c in candidates if c.is_file()), ROOT)
        found.add(str(target.relative_to(ROOT)))
    return found


def imported(path: str, text: str) -> set[str]:
    """The files of ours that a Python file imports, anywhere in it."""
    package = path.split("/")[:-1]
    found: set[str] = set()
    for name in imports(text) - {".", ".."}:  # of which other names say more
        level = len(name) - len(name.lstrip("."))
        parts = package[: len(package) + 1 - level] if level else []
        stem = "/".join([*parts, *filter(None, name.lstrip(".").split("."))])
        found |= {f for f in (f"{stem}.py", f"{stem}/__init__.py") if (ROOT / f).is_file()}
    return found - {"powerinfer/__init__.py"}  # which imports a name when it is first used


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """The files from which a way along the arrows leads back to them."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            ahead += (fresh := arrows.get(ahead.pop(), set()) - seen)
            seen |= fresh
        return seen

    return sorted(path for path in arrows if path in reached(path))


@pytest.mark.parametrize(
    ("directories", "suffixes", "targets"),
    [(("vendor", "native"), C_SUFFIXES, included), (("powerinfer", "scripts"), {".py"}, imported)],
)
def test_no_circles(
    directories: tuple[str, ...], suffixes: set[str], targets: Callable[[str, str], set[str]]
) -> None:
    files = sources(directories, suffixes)
    arrows = {path: targets(path, (ROOT / path).read_text()) - {path} for path in files}
    assert sum(map(len, arrows.values())) > len(files)
    assert circles(arrows) == []


def test_rooms_have_no_circles() -> None:
    assert circles(NATIVE_ROOMS) == [] == circles(PYTHON_ROOMS)
    used = {
        (room(path), room(target))
        for path in sources(("native",), C_SUFFIXES)
        for target in included(path, (ROOT / path).read_text())
    }
    known = {name for pair in used for name in pair if name}
    assert known == set(NATIVE_ROOMS)
    assert {python_room(path) for path in sources(("powerinfer",), {".py"})} == {*PYTHON_ROOMS, "names"}


def test_circles_are_seen() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []
    assert "vendor/cpu/te_ops.h" in included("native/x/x.c", '#include "cpu/te_ops.h"')
    text = (
        "from . import context\ndef f():\n    from ..models.plan import make_plan\n    from ..cli import run"
    )
    assert imported("powerinfer/_engine/session.py", text) == {
        "powerinfer/_engine/context.py",
        "powerinfer/models/plan/__init__.py",
        "powerinfer/cli/__init__.py",
        "powerinfer/cli/run.py",
    }


@pytest.mark.parametrize("rule", C_RULES, ids=lambda rule: rule.__name__)
def test_c_sources(rule: Callable[[str, str], Iterator[str]]) -> None:
    files = sources(("vendor", "native"), C_SUFFIXES)
    assert len(files) > 10
    assert [f"{path} {fault}" for path in files for fault in rule(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_python_sources(rule: Callable[[str, str], Iterator[str]]) -> None:
    files = sources(("powerinfer", "scripts"), {".py"})
    assert "powerinfer/_engine/_native.py" in files
    assert [f"{path} {fault}" for path in files for fault in rule(path, (ROOT / path).read_text())] == []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (arrows_go_down, "vendor/core/x.c", '#include "../cpu/te_kernels.h"'),
        (arrows_go_down, "vendor/cpu/x.c", '#include "../../native/powerinfer.h"'),
        (arrows_go_down, "vendor/cpu/x.c", '#  include "powerinfer.h"'),
        (vendor_knows_no_model, "vendor/core/x.c", "int f(pi_model *m);"),
        (native_has_no_intrinsics, "native/x.c", "a = _mm256_add_ps(a, b);"),
        (native_has_no_intrinsics, "native/x.c", "#include <immintrin.h>"),
        (only_te_os_knows_the_system, "vendor/core/te_pool.c", "#include <pthread.h>"),
        (only_te_os_knows_the_system, "native/x.c", "#include <sys/mman.h>"),
        (the_engine_only_returns, "native/x.c", 'fprintf(stderr, "oops");'),
        (the_engine_only_returns, "native/x.c", "if (bad) abort();"),
        (the_environment_is_read_in_one_place, "native/x.c", 'getenv("HOME");'),
        (devices_meet_in_the_handover, "native/x.c", "te_op_linear(a); te_cuda_linear(a);"),
        (rooms_have_one_way_arrows, "native/model/x.c", '#include "../state/state.h"'),
        (rooms_have_one_way_arrows, "native/device/cuda/x.cu", '#include "../../plan/plan.h"'),
        (rooms_have_one_way_arrows, "native/hybrid/x.c", '#include "../step/chunk.h"'),
        (rooms_have_one_way_arrows, "native/attic/x.c", ""),
        (plans_ask_no_device, "native/plan/x.c", '#include "../device/device.h"'),
        (plans_ask_no_device, "native/device/space.c", '#include "device.h"'),
        (nothing_is_left_open, "native/x.c", "/* " + "TO" + "DO: later */"),
        (only_native_knows_cffi, "powerinfer/llama.py", "def f():\n    import cffi"),
        (the_package_needs_no_training_library, "powerinfer/llama.py", "from torch.nn import functional"),
        (the_package_needs_no_training_library, "powerinfer/models/predictor/train.py", "import torch"),
        (
            the_package_needs_no_training_library,
            "powerinfer/models/predictor/svd.py",
            "def f():\n    import torch",
        ),
        (surfaces_do_not_reach_the_engine, "powerinfer/cli/run.py", "from .._engine import _native"),
        (surfaces_do_not_reach_the_engine, "powerinfer/bench/x.py", "from .._engine import _native"),
        (
            surfaces_do_not_reach_the_engine,
            "powerinfer/chat/repl.py",
            "from powerinfer._engine._native import lib",
        ),
        (packages_have_one_way_arrows, "powerinfer/llama.py", "from .chat import repl"),
        (packages_have_one_way_arrows, "powerinfer/llama.py", "from . import cli"),
        (packages_have_one_way_arrows, "powerinfer/llama.py", "import powerinfer.cli"),
        (packages_have_one_way_arrows, "powerinfer/chat/chat.py", "from ..cli.options import RANGES"),
        (packages_have_one_way_arrows, "powerinfer/chat/ui.py", "import powerinfer.cli"),
        (packages_have_one_way_arrows, "powerinfer/_text/x.py", "from .._engine.session import Session"),
        (packages_have_one_way_arrows, "powerinfer/_text/x.py", "def f():\n    from ..models import plan"),
        (packages_have_one_way_arrows, "powerinfer/_text/x.py", "import powerinfer._engine.engine"),
        (packages_have_one_way_arrows, "powerinfer/_engine/x.py", "def f():\n    from ..models import plan"),
        (packages_have_one_way_arrows, "powerinfer/_engine/x.py", "from ..llama import Llama"),
        (packages_have_one_way_arrows, "powerinfer/models/x.py", "from .._llama.loader import Loader"),
        (packages_have_one_way_arrows, "powerinfer/hub/x.py", "from .._engine.machine import gpus"),
        (packages_have_one_way_arrows, "powerinfer/errors.py", "from ._text import terminal"),
        (packages_have_one_way_arrows, "powerinfer/server/x.py", "from .. import ray_serve"),
        (packages_have_one_way_arrows, "powerinfer/server/x.py", "from scripts import make_model"),
        (packages_have_one_way_arrows, "powerinfer/attic/x.py", ""),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_rules_see_a_breach(rule: Callable[[str, str], Iterator[str]], path: str, text: str) -> None:
    assert list(rule(path, text)) != []


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (arrows_go_down, "vendor/cpu/x.c", '#include "../core/te_pool.h"\n#include <stdint.h>'),
        (arrows_go_down, "native/x.c", '#include "../vendor/cpu/te_ops.h"'),
        (vendor_knows_no_model, "vendor/core/x.c", "int api_x; /* like pi_model */"),
        (only_te_os_knows_the_system, "vendor/core/te_os_linux.c", "#include <pthread.h>"),
        (rooms_have_one_way_arrows, "native/plan/x.c", '#include "../model/model.h"\n#include "plan.h"'),
        (rooms_have_one_way_arrows, "native/plan/x.c", '#include "../common.h"\n#include "core/te_os.h"'),
        (the_engine_only_returns, "native/x.c", 'snprintf(a, n, "exit(1)"); /* abort() */ te_exit(1);'),
        (
            the_package_needs_no_training_library,
            "powerinfer/models/predictor/train.py",
            "def f():\n    import torch",
        ),
        (surfaces_do_not_reach_the_engine, "powerinfer/_engine/session.py", "from . import _native"),
        (
            packages_have_one_way_arrows,
            "powerinfer/_text/x.py",
            "from ..errors import FormatError\nfrom . import parts",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_rules_allow(rule: Callable[[str, str], Iterator[str]], path: str, text: str) -> None:
    assert list(rule(path, text)) == []
