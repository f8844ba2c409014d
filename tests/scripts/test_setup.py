"""When setup.py builds the CUDA backend, and that nothing of another build stays in the package."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("setuptools.command.bdist_wheel", reason="setuptools is older than 70.1")
import setuptools

ROOT = Path(__file__).resolve().parents[2]
OFF = ["-DPOWERINFER_CUDA=OFF"]


def program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module that has built nothing, on a machine whose programs are those in tmp_path/bin."""
    told: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", told.update)
    for name in ("POWERINFER_CUDA", "POWERINFER_CUDA_ARCHITECTURES", "CUDACXX", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert told["version"] == module.version()
    which = module.shutil.which

    def here(name: str, path: str | None = None) -> str | None:
        found = which(name, path=path)  # a machine that has CUDA in its usual place must not be seen
        return found if found and Path(found).is_relative_to(tmp_path) else None

    monkeypatch.setattr(module.shutil, "which", here)
    return module


# What is asked for, whether there is nvcc, a GPU, which architectures; those built (None: no backend), and
# words of the sentence.
@pytest.mark.parametrize(
    ("asked", "nvcc", "gpu", "architectures", "built", "said"),
    [
        ("", True, True, "", "native", "for native"),
        ("", True, True, "90-real", "90-real", "for 90-real"),
        ("", True, False, "", None, "no GPU"),
        ("", True, False, "90-real", None, "no GPU"),
        ("", False, True, "", None, "no nvcc"),
        ("", False, False, "", None, "no nvcc"),
        ("0", True, True, "90-real", None, "POWERINFER_CUDA=0"),
        ("0", False, False, "", None, "POWERINFER_CUDA=0"),
        ("1", True, False, "", "", "all architectures"),
        ("1", True, True, "", "", "all architectures"),
        ("1", True, False, "80;90", "80;90", "for 80;90"),
    ],
)
def test_when_the_backend_is_built(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: str,
    nvcc: bool,
    gpu: bool,
    architectures: str,
    built: str | None,
    said: str,
) -> None:
    monkeypatch.setenv("POWERINFER_CUDA", asked)
    monkeypatch.setenv("POWERINFER_CUDA_ARCHITECTURES", architectures)
    compiler = tmp_path / "bin" / "nvcc"
    if nvcc:
        program(compiler)
    if gpu:
        program(tmp_path / "bin" / "nvidia-smi", 'echo "GPU 0: a card"\n')
    options, sentence = script.cuda_options()
    assert said in sentence and sentence.startswith("without" if built is None else "with ")
    if built is None:
        assert options == OFF
    else:
        wanted = ["-DPOWERINFER_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={compiler}"]
        assert options == wanted + ([f"-DPOWERINFER_CUDA_ARCHITECTURES={built}"] if built else [])


@pytest.mark.parametrize(("asked", "said"), [("1", "needs nvcc"), ("yes", "0, 1 or unset, not 'yes'")])
def test_what_cannot_be_done_ends_the_build(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, asked: str, said: str
) -> None:
    monkeypatch.setenv("POWERINFER_CUDA", asked)
    with pytest.raises(SystemExit, match=said):
        script.cuda_options()


def test_cudacxx_comes_first(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvcc")
    named = program(tmp_path / "other" / "nvcc-13")
    monkeypatch.setenv("CUDACXX", str(named))
    assert script.nvcc() == str(named)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "gone"))
    assert script.nvcc() == str(tmp_path / "bin" / "nvcc")


@pytest.mark.parametrize(
    ("text", "found"),
    [('echo "GPU 0: a card"', True), ("echo No devices found", False), ('echo "GPU 0: lost"; exit 9', False)],
)
def test_a_gpu_is_one_that_answers(script: ModuleType, tmp_path: Path, text: str, found: bool) -> None:
    program(tmp_path / "bin" / "nvidia-smi", text + "\n")
    assert script.has_gpu() is found


@pytest.mark.parametrize("with_cuda", [False, True])
def test_the_backend_of_another_build_goes(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_cuda: bool
) -> None:
    folder, build = tmp_path / "tree" / "powerinfer" / "lib", tmp_path / "build"
    folder.mkdir(parents=True)
    (folder / "libpowerinfer_cuda.so").write_bytes(b"old")
    names = ["libpowerinfer.so", "libpowerinfer_cuda.so"] if with_cuda else ["libpowerinfer.so"]
    build.mkdir()
    for name in names:
        (build / name).write_bytes(b"new")
    monkeypatch.setattr(script, "ROOT", tmp_path / "tree")
    monkeypatch.setattr(script, "build_engine", lambda *_, **__: {name: build / name for name in names})
    command = script.BuildEngine(script.EngineDistribution({"name": "powerinfer"}))
    command.initialize_options()
    command.inplace = True
    command.run()
    assert sorted(os.listdir(folder)) == sorted([*names, "powerinfer.h"])
    assert all((folder / name).read_bytes() == b"new" for name in names)


def test_a_missing_compiler_is_said_first(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="needs a C compiler, and cc or gcc or clang is not here"):
        script.check_compilers()
    program(tmp_path / "bin" / "gcc")
    with pytest.raises(SystemExit, match=r"needs a C\+\+ compiler"):
        script.check_compilers()
    program(tmp_path / "bin" / "my-c++")
    monkeypatch.setenv("CXX", "my-c++ -stdlib=x")
    script.check_compilers()
    monkeypatch.setenv("CC", "nothing")
    with pytest.raises(SystemExit, match="nothing is not here"):
        script.check_compilers()


# What nvcc says, what is asked for, and the architectures, or words of the error.
@pytest.mark.parametrize(
    ("says", "wanted", "built", "error"),
    [
        ("release 13.0, V13.0.88", "", "75-real;80-real;86-real;89-real;90-real;100-real;120", ""),
        ("release 12.8, V12.8.61", "", "75-real;80-real;86-real;89-real;90-real;100-real;120", ""),
        ("release 12.4, V12.4.99", "", "75-real;80-real;86-real;89-real;90", ""),
        ("release 12.0, V12.0.76", "90-real", "90-real", ""),
        ("release 12.4, V12.4.99", "90;100-real", None, "CUDA 12.4 .* is too old for 90;100-real"),
        ("release 11.8, V11.8.89", "", None, "CUDA 11.8 .* is too old"),
        ("release 11.8, V11.8.89", "80-real", None, "12.0 or newer is needed"),
        ("no version", "", None, "does not say its version"),
    ],
)
def test_architectures_of_a_version_of_cuda(
    tmp_path: Path, says: str, wanted: str, built: str | None, error: str
) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("no cmake")
    compiler = program(tmp_path / "nvcc", f'echo "Cuda compilation tools, {says}"\n')
    command = [cmake, f"-DCMAKE_CUDA_COMPILER={compiler}", f"-DPOWERINFER_CUDA_ARCHITECTURES={wanted}"]
    done = subprocess.run(
        [*command, "-P", str(ROOT / "cmake" / "cuda_architectures.cmake")], capture_output=True, text=True
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert (done.returncode == 0) == (built is not None), said
    if built is None:
        assert re.search(error, said)
    else:
        assert said.endswith(f": {built}")
