"""Models from a hub: a local stand-in for it, with the real client."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from powerinfer import ArgumentError, AsyncLlama, DeviceError, FileError, Llama, UnsupportedError
from powerinfer import hub as hubs
from powerinfer._engine.file import find_model
from powerinfer.cli import main
from powerinfer.hub import client, download, fetch, names
from powerinfer.hub.names import Room, format_of
from powerinfer.models.convert.conversion import convert
from powerinfer.models.writer import PartialFile, is_in_hub_cache
from tests.hub_server import Hub, serving

REPO = "someone/model-GGUF"
ROOM = Room(1 << 40)
GIB = 1 << 30
NAMES = [
    "README.md",
    "big-00001-of-00002.gguf",
    "big-00002-of-00002.gguf",
    "activation/activation_0.pt",
    "activation/activation_1.pt",
    "other/activation/x",
    "small.Q4_0.gguf",
]


def choose(repo: str, listed: list[str], wanted: str | None, more: Any = ()) -> tuple[str, list[str]]:
    found = names.choose(repo, dict.fromkeys(listed, 1), wanted, more)
    return found.model, list(found.files)


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("*Q4_0.gguf", ["small.Q4_0.gguf", *NAMES[3:5]]),
        ("big*.gguf", [*NAMES[1:5]]),
        (NAMES[1], [*NAMES[1:5]]),
    ],
)
def test_choice(pattern: str, wanted: list[str]) -> None:
    assert choose(REPO, NAMES, pattern, ()) == (wanted[0], wanted)
    assert choose(REPO, NAMES, pattern, ["READ*"])[1] == [*wanted, "README.md"]


@pytest.mark.parametrize(
    "name", ["../up.gguf", "a/../../up.gguf", "/etc/up.gguf", "a\\..\\up.gguf", "a//up.gguf"]
)
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(ArgumentError, match="leads out"):
        choose(REPO, [name], None, ())


def test_choices_that_cannot_be() -> None:
    for pattern, message in ((None, "several"), ("*.bin", "small.Q4_0.gguf"), ("*", "several")):
        with pytest.raises(ArgumentError, match=message):
            choose(REPO, NAMES, pattern, ())
    with pytest.raises(ArgumentError, match="big-00002-of-00002"):
        choose(REPO, NAMES[1:2], None, ())
    with pytest.raises(ArgumentError, match="no file"):
        choose(REPO, NAMES, NAMES[-1], ["*.md5"])
    with pytest.raises(ArgumentError, match="there are none"):
        choose(REPO, [], None, ())
    assert choose(REPO, ["sub/m.gguf", "sub/activation/a", "activation/b"], None, ())[1] == [
        "sub/m.gguf",
        "sub/activation/a",
    ]


# ---- which format


def sizes(**gib: float) -> dict[str, int]:
    return {f"Model-7B.{name}.gguf": int(n * GIB) for name, n in gib.items()}


LADDER = sizes(Q2_K=2.5, Q4_0=3.8, Q4_K_M=4.1, Q5_K_M=4.8, Q6_K=5.5, Q8_0=7.2, F16=13.5, IQ1_S=1.5)


@pytest.mark.parametrize(
    ("host", "gpu", "chosen"),
    [
        (64, 0, "Q4_K_M"),  # decoding reads it all: four bits
        (5, 0, "Q4_0"),
        (4, 0, "Q2_K"),
        (3, 0, "IQ1_S"),
        (64, 24, "Q8_0"),  # a GPU that holds it: the best that is of use
        (64, 7, "Q6_K"),
        (64, 4, "Q4_K_M"),  # one that holds a part
        (2, 4, "Q4_K_M"),  # both together
        (0, 0, "Q4_K_M"),  # nothing known
    ],
)
def test_the_format_that_memory_holds(host: float, gpu: float, chosen: str) -> None:
    room = Room(int(host * GIB), int(gpu * GIB))
    assert names.choose(REPO, LADDER, None, room=room).format == chosen


def test_nothing_fits() -> None:
    with pytest.raises(
        ArgumentError, match=r"smallest .* IQ1_S, takes 2\.2 GiB .* 1\.0 GiB .*IQ1_S takes it"
    ):
        names.choose(REPO, LADDER, None, room=Room(GIB))
    assert names.choose(REPO, LADDER, "F16", room=Room(GIB)).format == "F16"  # who names it has it


def test_names_of_formats() -> None:
    for name, form in (
        ("Llama-3.2-3B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("llama-7b-relu.q4.powerinfer.gguf", "Q4"),
        ("llama-7b-relu.powerinfer.gguf", ""),
        ("qwen3-30b-a3b-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("BF16/Model-BF16-00001-of-00002.gguf", "BF16"),
        ("Q8_0/model-00001-of-00002.gguf", "Q8_0"),
        ("model-IQ4_XS.gguf", "IQ4_XS"),
        ("QwQ-32B.gguf", ""),
    ):
        assert format_of(name) == form, name
    listed = ["a-Q4_K_M.gguf", "a-Q4_0.gguf", "mmproj-a-f16.gguf", "a.imatrix.gguf"]
    assert choose(REPO, listed, "q4_k_m")[0] == listed[0]
    assert choose(REPO, ["x.q4.powerinfer.gguf", "x.powerinfer.gguf"], "Q4")[0] == "x.q4.powerinfer.gguf"
    assert choose(REPO, ["a-UD-Q4_K_XL.gguf", "a-Q4_0.gguf"], "Q4_K_XL")[0] == "a-UD-Q4_K_XL.gguf"
    assert choose(REPO, [listed[0], *listed[2:]], None)[0] == listed[0]  # no projector, no importances


@pytest.mark.parametrize("name", ["hf:", "hf:model", "hf:a/b:", "hf:a/b/c", "hf:../b", "hf:a/.."])
def test_names_that_name_nothing(name: str) -> None:
    with pytest.raises(ArgumentError, match="names no model of the hub"):
        hubs.find(name, room=ROOM)


def test_what_to_type_instead(tmp_path: Path) -> None:
    for name, says in (
        ("llama3", "no short names here"),
        ("llama3:8b", "no short names here"),
        ("meta-llama/Llama-3-8B", "hf:meta-llama/Llama-3-8B would be"),
        ("https://huggingface.co/a/b-GGUF/tree/main", "is called hf:a/b-GGUF"),
        ("https://huggingface.co/a/b/resolve/main/Q4/c-Q4_0.gguf?download=true", r"hf:a/b:Q4/c-Q4_0\.gguf$"),
        ("https://huggingface.co/a/b/blob/main/c.gguf", r"is called hf:a/b:c\.gguf$"),
        ("hf.co/a/b-GGUF:Q4_K_M", "is called hf:a/b-GGUF:Q4_K_M$"),
        ("hf.co/a/b-GGUF", "is called hf:a/b-GGUF$"),
        ("https://example.com/c.gguf", r"no file https://example\.com/c\.gguf: it is an address"),
        (str(tmp_path), "is a folder"),
    ):
        with pytest.raises(FileError, match=says):
            find_model(name)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileError, match="powerinfer convert"):
        find_model(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(FileError, match=r"name a file in it: .*m\.gguf"):
        find_model(tmp_path)
    assert find_model("nowhere.gguf") == Path("nowhere.gguf")  # whose opening says the rest
    with pytest.raises(ArgumentError, match="is empty"):
        find_model("")
    for wrong in (b"m.gguf", 5, None):
        with pytest.raises(ArgumentError, match="must be text or a Path"):
            find_model(wrong)  # type: ignore[arg-type]
    with pytest.raises(FileError, match="hf download meta-llama/Llama-3-8B --local-dir Llama-3-8B"):
        convert("meta-llama/Llama-3-8B", tmp_path / "out.gguf")


# ---- bytes over a line that breaks


def remote(hub: Hub, name: str, data: bytes, digest: str = "") -> fetch.Remote:
    where = f"{hub.address}/{REPO}/resolve/main/{name}"
    found = digest or hashlib.sha256(data).hexdigest()
    return fetch.Remote(name, len(data), found, True, lambda: (where, {}))


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(fetch, "_PAUSE_S", 0.0)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    with serving({REPO: {"m.gguf": os.urandom(3_000_000)}}) as hub:
        yield hub


def test_a_broken_line_is_gone_on_with(line: Hub, tmp_path: Path) -> None:
    data = line.repos[REPO]["m.gguf"]
    seen: list[tuple[int, int]] = []
    line.cut_after, line.n_cuts = 1_000_000, 2
    fetch.fetch(remote(line, "m.gguf", data), tmp_path / "m", lambda *at: seen.append(at))
    assert (tmp_path / "m").read_bytes() == data and list(tmp_path.iterdir()) == [tmp_path / "m"]
    assert [text.partition(" bytes=")[2] for text in line.asked] == ["", "1000000-", "2000000-"]
    assert seen[0] == (0, len(data)) and seen[-1] == (len(data), len(data)) and seen == sorted(seen)


def test_what_came_before_is_not_fetched_again(line: Hub, tmp_path: Path) -> None:
    data = line.repos[REPO]["m.gguf"]
    line.cut_after, line.n_cuts = 400_000, 1

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done:
            raise Stop

    with pytest.raises(Stop):
        fetch.fetch(remote(line, "m.gguf", data), tmp_path / "m", stop)
    assert fetch.partial_of(tmp_path / "m").read_bytes() == data[:400_000]
    line.asked.clear()
    fetch.fetch(remote(line, "m.gguf", data), tmp_path / "m")
    assert line.asked[-1].endswith("bytes=400000-") and (tmp_path / "m").read_bytes() == data


def test_what_is_damaged_gets_no_name(line: Hub, tmp_path: Path) -> None:
    data = line.repos[REPO]["m.gguf"]
    line.corrupt = True
    with pytest.raises(FileError, match="checksum"):
        fetch.fetch(remote(line, "m.gguf", data), tmp_path / "m")
    assert not (tmp_path / "m").exists() and fetch.partial_of(tmp_path / "m").stat().st_size == 0
    line.corrupt = False
    fetch.fetch(remote(line, "m.gguf", data), tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == data


def test_a_line_that_brings_nothing(line: Hub, tmp_path: Path) -> None:
    data = line.repos[REPO]["m.gguf"]
    with pytest.raises(FileError, match="404"):
        fetch.fetch(remote(line, "gone.gguf", data), tmp_path / "m")
    line.repos[REPO]["m.gguf"] = data[:10]  # and no more, however often it is asked
    with pytest.raises(FileError, match=r"; \d+ of 3000000 bytes are there"):
        fetch.fetch(remote(line, "m.gguf", data), tmp_path / "m")
    assert len(line.asked) < 20


def test_two_at_once(line: Hub, tmp_path: Path) -> None:
    data = line.repos[REPO]["m.gguf"]
    with ThreadPoolExecutor(4) as pool:  # each opens the file for itself, as processes do
        list(pool.map(lambda _: fetch.fetch(remote(line, "m.gguf", data), tmp_path / "m"), range(4)))
    assert (tmp_path / "m").read_bytes() == data and list(tmp_path.iterdir()) == [tmp_path / "m"]
    assert sum(text.startswith("GET") for text in line.asked) == 1


# A limit of a process on the size of its files stands for a full disk.
FULL = """
import resource, signal, sys, hashlib
from pathlib import Path
from powerinfer.hub import fetch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, resource.RLIM_INFINITY))
where = lambda: (sys.argv[1], {})
remote = fetch.Remote("m.gguf", 3_000_000, sys.argv[2], True, where)
try:
    fetch.fetch(remote, Path(sys.argv[3]))
except fetch.FileError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
fetch.fetch(remote, Path(sys.argv[3]))
"""


def test_a_disk_that_fills_up(line: Hub, tmp_path: Path) -> None:
    data = line.repos[REPO]["m.gguf"]
    address = f"{line.address}/{REPO}/resolve/main/m.gguf"
    (said,) = run(line, tmp_path, FULL, address, hashlib.sha256(data).hexdigest(), str(tmp_path / "m"))
    assert said == f"m.gguf cannot be written to {tmp_path}: File too large"
    assert (tmp_path / "m").read_bytes() == data and line.asked[-1].endswith(" bytes=1500000-")


def test_a_small_file_of_git(line: Hub, tmp_path: Path) -> None:
    line.repos[REPO]["a.txt"] = b"text"
    where = f"{line.address}/{REPO}/resolve/main/a.txt"
    wrong = fetch.Remote("a.txt", 4, "0" * 40, False, lambda: (where, {}))
    with pytest.raises(FileError, match="checksum"):
        fetch.fetch(wrong, tmp_path / "a")
    git = subprocess.run(["git", "hash-object", "--stdin"], input=b"text", capture_output=True, check=True)
    right = fetch.Remote("a.txt", 4, git.stdout.decode().strip(), False, lambda: (where, {}))
    fetch.fetch(right, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"text"


def test_a_disk_that_is_too_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=GIB))
    client._check_disk(tmp_path / "not" / "there", GIB // 2, REPO)
    with pytest.raises(FileError, match=r"1\.00 GiB are to be fetched, and 1\.00 are free"):
        client._check_disk(tmp_path / "not" / "there", GIB, REPO)


# ---- the whole, in a process of its own


@pytest.fixture
def hub(relu_path: Path) -> Iterator[Hub]:
    """A server with one repository."""
    files = {"tiny/relu.gguf": relu_path.read_bytes(), "tiny/activation/activation_0.pt": b"counts"}
    with serving({REPO: files}) as found:
        yield found


SCRIPT = """
import sys
from powerinfer import Llama, PowerInferError
kind, repo, folder = sys.argv[1:]
options = {"local_dir": folder} if kind == "folder" else {"cache_dir": folder}
options |= {"verbose": False, "n_threads": 1}
try:
    llm = Llama.from_pretrained(repo, "*.gguf" if kind == "folder" else None, **options)
    print(llm.model_path)
    print(len(llm("the", max_tokens=2, temperature=0.0)["choices"][0]["text"]) > 0)
except PowerInferError as error:
    print(type(error).__name__, error)
"""


def run(hub: Hub, home: Path, code: str, *words: str, **more: str) -> list[str]:
    """In a process of its own: the client reads the hub's address when it is imported."""
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**hub.environment(home), **more},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # verbose=False: no progress
    return result.stdout.splitlines()


@pytest.mark.parametrize("kind", ["folder", "cache"])
def test_from_pretrained(hub: Hub, kind: str, tmp_path: Path, relu_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    path, works = run(hub, tmp_path / "home", SCRIPT, kind, REPO, str(tmp_path / "files"))
    assert works == "True" and Path(path).read_bytes() == relu_path.read_bytes()
    assert (Path(path).parent / "activation" / "activation_0.pt").read_bytes() == b"counts"
    if kind == "folder":
        assert Path(path) == tmp_path / "files" / "tiny" / "relu.gguf"


# What a user does, one after the other; a line of what came for each.
SESSION = """
import contextlib, io, sys
from powerinfer import Llama, PowerInferError
from powerinfer.cli import main

def shown(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(code, out.getvalue().replace("\\n", "|"), "!", err.getvalue().replace("\\n", "|"))

for line in sys.argv[1:]:
    if line.startswith("Llama "):
        try:
            with Llama(line[6:], verbose=False, n_threads=1) as llm:
                print(len(llm("the", max_tokens=2)["choices"][0]["text"]) > 0)
        except PowerInferError as error:
            print(type(error).__name__, error)
    else:
        shown(*line.split())
"""


def test_a_users_day(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    files, home, name = hub.repos[REPO], tmp_path / "home", f"hf:{REPO}"
    files["m-Q4_0.gguf"] = files.pop("tiny/relu.gguf")
    files["m-Q8_0.gguf"] = files["m-Q4_0.gguf"] + bytes(64)
    files["activation/activation_0.pt"] = files.pop("tiny/activation/activation_0.pt")
    hub.token, hub.redirects = "secret", True
    out = run(
        hub,
        home,
        SESSION,
        f"pull {name} --vram-budget 0",
        f"run {name} hi -n 2 --raw -t 1",
        f"run -hf {REPO}:Q4_0 hi -n 2 --raw -t 1",
        f"Llama {name}:Q4_0",
        f"info {name}",
        "list",
        f"profile {name} --in-place --text {tmp_path}",
        f"rm {name}:Q4_0",
        f"rm {name}:Q4_0",
        "list",
        HF_TOKEN="secret",
    )
    assert out[0].startswith("0 ") and f"! powerinfer: {name}:Q4_0, 0.00 GiB, chosen among 2 files" in out[0]
    assert out[1].startswith("0 ") and out[1].endswith("! ") and out[2][:2] == "0 " and out[3] == "True"
    assert out[4].startswith("0 ") and "llama-relu" in out[4]
    assert f"{name}:Q4_0" in out[5] and "demo" in out[5]
    assert out[6].startswith("1 ") and "hub's cache" in out[6]
    assert "2 files deleted" in out[7] and "is not here" in out[8] and "someone" not in out[9]
    assert hub.leaked == [] and any(text.startswith("GET /mirror/") for text in hub.asked)
    assert not list(home.rglob("blobs/*")) and not list(home.rglob("snapshots"))


def test_without_a_line(hub: Hub, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    home, name = tmp_path / "home", f"hf:{REPO}"
    run(hub, home, SESSION, f"Llama {name}")
    n_asked = len(hub.asked)
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    out = run(hub, home, SESSION, f"Llama {name}", f"pull {name}", "Llama hf:a/b", **gone)
    assert out[0] == "True" and "cannot be reached; what is here is used" in out[1]
    assert out[2].startswith("FileError a/b: the hub cannot be reached") and "HF_ENDPOINT" in out[2]
    assert "Errno" not in out[2]
    out = run(hub, home, SESSION, f"Llama {name}", "Llama hf:a/b", HF_HUB_OFFLINE="1")
    assert out == ["True", "FileError a/b: it is not here, and HF_HUB_OFFLINE forbids asking the hub"]
    assert len(hub.asked) == n_asked  # for what is here nobody is asked


QUICK = "from powerinfer.hub import fetch; fetch._PAUSE_S = 0.0"


def test_errors_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    """And one that cannot be trusted: wrong sizes and checksums, names and checksums that lead elsewhere."""
    pytest.importorskip("huggingface_hub")
    hub.repos["raw/weights"] = {"config.json": b"{}", "model.safetensors": b"x"}
    lies: list[dict[str, Any]] = [
        {"size": 99},
        {"size": -1},
        {"lfs": {"sha256": "0" * 64, "size": 100, "pointerSize": 100}},
        {"lfs": {"sha256": "../../../../up", "size": 100, "pointerSize": 100}},
        {"rfilename": "../../../../up.gguf"},
    ]
    for name in ("gated", "mute", *(f"lie{i}" for i in range(5))):
        hub.repos[f"a/{name}"] = {"m.gguf": bytes(100)}
    hub.gated, hub.mute = {"a/gated"}, {"a/mute"}
    hub.listed = {f"a/lie{i}": lie for i, lie in enumerate(lies)}
    lines = ["Llama hf:nobody/nothing", "Llama hf:raw/weights", f"Llama hf:{REPO}:Q5_0"]
    lines += [f"Llama hf:{name}" for name in hub.repos if name.startswith("a/")]
    out = run(hub, tmp_path / "a" / "b" / "home", QUICK + SESSION, *lines)
    assert out[0].startswith("FileError nobody/nothing: the hub has no such repository, or it is private")
    assert "it can be converted: hf download raw/weights" in out[1]
    assert out[2].startswith(f"ArgumentError no file of {REPO} fits 'Q5_0'; there are tiny/relu.gguf")
    assert "asks to accept conditions first" in out[3]
    assert sum("/a/gated/resolve" in text for text in hub.asked) == 1  # asking again is of no use
    assert out[4].startswith("FileError m.gguf: a/mute: ") and "0 of 100 bytes" in out[4]
    assert "checksum" in out[5] and "has no GGUF file" in out[6] and "checksum" in out[7]
    assert "gives no checksum" in out[8] and "leads out" in out[9]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not list(tmp_path.rglob("up*")) and not list(tmp_path.rglob("*.gguf"))


def test_nothing_is_fetched_for_a_gpu_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("find", "download"):
        monkeypatch.setattr(hubs, name, lambda *_, **__: pytest.fail("something was fetched"))
    options: dict[str, Any] = {"vram_budget": 1, "devices": "cuda:63"}
    for opened in (Llama, AsyncLlama, lambda _, **given: Llama.from_pretrained("a/b", **given)):
        with pytest.raises(DeviceError):
            opened("hf:a/b", **options)
    assert main(["run", "hf:a/b", "hi", "--vram-budget", "1", "--devices", "cuda:63"]) == 1
    assert "powerinfer: " in capsys.readouterr().err


def test_what_is_never_written(relu_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo, under any name, and the hub's cache."""
    blobs, folder = (tmp_path / "models--a--b" / name for name in ("blobs", "snapshots/c"))
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    (blobs / "01").write_bytes(b"m")
    (folder / "m.gguf").symlink_to(blobs / "01")
    assert is_in_hub_cache(folder / "m.gguf") and not is_in_hub_cache(tmp_path / "m.gguf")
    with pytest.raises(FileError, match="hub's cache"):
        PartialFile(folder / "m.gguf")
    demo = find_model("demo")
    (tmp_path / "mine.gguf").symlink_to(demo)
    before = demo.stat().st_mtime_ns
    text = tmp_path / "t.txt"
    text.write_text("a fox " * 50)
    for words in (
        ["profile", "demo", "--in-place", "--text", str(text)],
        ["profile", "demo", "--text", str(text), "-o", str(tmp_path / "mine.gguf")],
        ["quantize", str(relu_path), str(demo), "Q4_0"],
        ["predictor", "svd", str(relu_path), "--text", str(text), "-o", str(demo)],
        ["rm", "demo"],
    ):
        assert main(words) == 1, words
        assert "the demo model belongs to the package" in capsys.readouterr().err
    assert main(["rm", str(text)]) == 1 and "a file of yours" in capsys.readouterr().err and text.exists()
    assert demo.stat().st_mtime_ns == before


def test_without_huggingface_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: download(REPO), lambda: hubs.find(f"hf:{REPO}", room=ROOM), hubs.stored):
        with pytest.raises(UnsupportedError, match="pip install huggingface_hub"):
            call()
