"""Models from the Hugging Face Hub, with what lies beside them in PowerInfer's repositories."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import ArgumentError, FileError, UnsupportedError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def download(
    repo_id: str,
    filename: str | None = None,
    additional_files: Sequence[str] | None = None,
    *,
    local_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    verbose: bool = True,
) -> Path:
    """Fetches a model and returns its path; what is there already is not fetched again.

    filename: a name or a pattern (`*Q4_0.gguf`), which must fit one model; None: the only model of the
        repository. All parts of a split model come with the first.
    additional_files: names or patterns of more files; each must fit one.
    verbose: show progress on stderr.

    Files of a folder `activation` beside the model come too: PowerInfer's repositories keep statistics
    there. Raises ArgumentError (nothing or too much fits), FileError (the hub does not answer, or refuses),
    UnsupportedError if huggingface_hub is not installed.
    """
    try:
        hub: Any = import_module("huggingface_hub")
        errors: Any = import_module("huggingface_hub.errors")
        bars: Any = import_module("huggingface_hub.utils")
    except ImportError:
        raise UnsupportedError(
            "models from the hub need huggingface_hub: pip install 'powerinfer[hub]'"
        ) from None

    where: dict[str, Any] = {"repo_id": repo_id, "revision": revision, "token": token}
    was_quiet = bars.are_progress_bars_disabled()
    if not verbose:
        bars.disable_progress_bars()
    try:
        names = hub.HfApi().list_repo_files(**where)
        model, wanted = choose(repo_id, names, filename, additional_files or ())
        paths = {
            name: hub.hf_hub_download(filename=name, local_dir=local_dir, cache_dir=cache_dir, **where)
            for name in wanted
        }
        return Path(paths[model])
    except errors.HFValidationError as error:
        raise ArgumentError(f"{repo_id!r} is no repository's name: {error}") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise FileError(f"{repo_id}: {str(error).strip() or type(error).__name__}") from error
    finally:
        if not verbose and not was_quiet:
            bars.enable_progress_bars()


def choose(
    repo_id: str, names: Sequence[str], filename: str | None, additional: Sequence[str]
) -> tuple[str, list[str]]:
    """The model's (first) file, and all files that are wanted. Raises ArgumentError."""
    pattern = "*.gguf" if filename is None else filename
    fits = _fitting(names, pattern)
    firsts = [name for name in fits if (part := _PART.fullmatch(name)) is None or int(part[2]) == 1]
    if len(firsts) != 1:
        raise ArgumentError(_complaint(repo_id, names, pattern, firsts))
    model = firsts[0]
    wanted = [model]
    part = _PART.fullmatch(model)
    if part:
        wanted = [f"{part[1]}-{i:05}-of-{part[3]}.gguf" for i in range(1, int(part[3]) + 1)]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise ArgumentError(f"{repo_id} has only some parts of {model}: {missing[0]} is missing")
    folder = PurePosixPath(model).parent / "activation"
    wanted += [name for name in names if PurePosixPath(name).parent == folder]
    for more in additional:
        found = _fitting(names, more)
        if len(found) != 1:
            raise ArgumentError(_complaint(repo_id, names, more, found))
        wanted += found
    for name in wanted:  # names come from the hub, and files of these names are written here
        if PurePosixPath(name).is_absolute() or {"..", ""} & set(name.replace("\\", "/").split("/")):
            raise ArgumentError(f"{repo_id} has a file of the name {name!r}, which leads out of its folder")
    return model, list(dict.fromkeys(wanted))


def _fitting(names: Sequence[str], pattern: str) -> list[str]:
    return [name for name in names if name == pattern or fnmatchcase(name, pattern)]


def _complaint(repo_id: str, names: Sequence[str], pattern: str, found: Sequence[str]) -> str:
    if found:
        return f"several files of {repo_id} fit {pattern!r}: {', '.join(found[:20])}"
    models = [name for name in names if name.endswith(".gguf")] or list(names)
    return f"no file of {repo_id} fits {pattern!r}; there are {', '.join(models[:20]) or 'none'}"
