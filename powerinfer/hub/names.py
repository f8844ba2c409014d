"""What a reference to a model of the hub says, and which files of a repository it means."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from ..errors import ArgumentError

PREFIX = "hf:"
GIB = 1 << 30

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# As browsers show it, and as ollama takes it.
_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)"
    r"(?:/(?:resolve|blob)/[^/]+/([^?]+\.gguf).*|(?:/.*)?|:([\w.-]+))"
)
_FORMAT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q\d(?:_\d)*(?:_[A-Z]{1,3})*|TQ\d_\d|BF16|F16|F32|FP16|MXFP4(?:_MOE)?))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
# No models: they belong to one, or show how one was made.
_BESIDE = re.compile(r"(^|[/._-])(mmproj|imatrix)", re.IGNORECASE)

# What decoding reads is what it costs, and with four bits answers are still close: these first, then what is
# larger, and only then what is smaller.
_PREFERRED = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_0", "Q4", "MXFP4", "MXFP4_MOE", "Q4_K_S", "Q4_K", "IQ4_NL", "IQ4_XS"),
    *("Q4_1", "Q5_K_M", "Q5_K_S", "UD-Q5_K_XL", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "UD-Q6_K_XL", "Q8_0"),
    *("Q8", "UD-Q8_K_XL", "F16", "FP16", "BF16", "F32"),
)
_LAST_FOR_GPUS = _PREFERRED.index(
    "Q8_0"
)  # on a GPU that holds it whole nothing beyond this is worth its time


@dataclass(frozen=True)
class Reference:
    """A model of the hub."""

    repo: str
    wanted: str | None
    """A file, a pattern, the name of a format, or None."""


@dataclass(frozen=True)
class Choice:
    """A model of a repository."""

    files: tuple[str, ...]
    """The model's (first) file, its other parts, and what lies beside it."""
    n_bytes: int
    """Of the model's own files."""
    format: str
    """As the name says it; "" where it says none."""

    @property
    def model(self) -> str:
        return self.files[0]


@dataclass(frozen=True)
class Room:
    """What a model may take."""

    host_bytes: int
    """0: unknown."""
    gpu_bytes: int = 0

    def __str__(self) -> str:
        gpu = f" and {self.gpu_bytes / GIB:.1f} GiB of GPU memory" if self.gpu_bytes else ""
        return f"{self.host_bytes / GIB:.1f} GiB of memory{gpu}"


def is_reference(name: object) -> bool:
    """Whether a model's name means the hub."""
    return isinstance(name, str) and name.startswith(PREFIX)


def parse(name: str) -> Reference:
    """hf:OWNER/REPO[:FILE-or-format]. Raises ArgumentError."""
    repo, colon, wanted = name.removeprefix(PREFIX).partition(":")
    if not _NAME.fullmatch(repo) or (colon and not wanted):
        raise ArgumentError(
            f"{name!r} names no model of the hub: it must be hf:OWNER/REPO, hf:OWNER/REPO:Q4_K_M or "
            "hf:OWNER/REPO:name.gguf"
        )
    return Reference(repo, wanted or None)


def hint(name: str) -> str:
    """What somebody may have meant by a name that is no file, as the end of a sentence, or ""."""
    url = _URL.fullmatch(name)
    if url:
        wanted = url[2] or url[3]
        return f"; a model of the hub is called hf:{url[1]}" + (f":{wanted}" if wanted else "")
    if re.match(r"https?://", name):
        return ": it is an address; fetch it, then name the file (hf:OWNER/REPO fetches from the hub)"
    if name.lower().endswith(".gguf"):
        return ""
    if _NAME.fullmatch(name):
        return (
            f"; hf:{name} would be a repository of GGUF files on the Hugging Face Hub. One that has none "
            f"is converted: hf download {name} --local-dir DIR, then powerinfer convert DIR -o model.gguf"
        )
    if re.fullmatch(r"[\w.:-]+", name):
        return (
            "; models have no short names here: give a GGUF file, or hf:OWNER/REPO of the Hugging Face Hub "
            "(docs/get-a-model.md lists some), or demo, which comes with the package"
        )
    return ""


def format_of(name: str) -> str:
    """The weight format that a file's name speaks of, or ""."""
    found = _FORMAT.findall(PurePosixPath(name).name) or _FORMAT.findall(name)
    return found[-1].upper() if found else ""


def choose(
    repo: str,
    sizes: Mapping[str, int],
    wanted: str | None,
    additional: Sequence[str] = (),
    *,
    room: Room | None = None,
) -> Choice:
    """The model that is meant among the files of a repository.

    sizes: of its files, in bytes. wanted: a file, a pattern that fits one model, a format; None: the only
    model or, where there is room, one that fits in it. additional: names or patterns of more files; each must
    fit one.

    Raises ArgumentError.
    """
    models = _models(repo, sizes, wanted)
    if len(models) > 1 and wanted is None and room is not None:
        models = [_fitting_model(repo, models, room)]
    if len(models) != 1:
        raise ArgumentError(_complaint(repo, sizes, wanted or "*.gguf", models))
    chosen = models[0]
    files = list(chosen.files)
    folder = PurePosixPath(chosen.model).parent / "activation"
    files += [name for name in sizes if PurePosixPath(name).parent == folder]
    for more in additional:
        found = [name for name in sizes if name == more or fnmatchcase(name, more)]
        if len(found) > 1:
            raise ArgumentError(f"several files of {repo} fit {more!r}: {', '.join(found[:20])}")
        if not found:
            raise ArgumentError(_complaint(repo, sizes, more, []))
        files += found
    for name in files:  # names come from the hub, and files of these names are written here
        if PurePosixPath(name).is_absolute() or {"..", ""} & set(name.replace("\\", "/").split("/")):
            raise ArgumentError(f"{repo} has a file of the name {name!r}, which leads out of its folder")
    return Choice(tuple(dict.fromkeys(files)), chosen.n_bytes, chosen.format)


def _models(repo: str, sizes: Mapping[str, int], wanted: str | None) -> list[Choice]:
    """The models that fit what is wanted. Raises ArgumentError for one that lacks parts."""
    ours = [name for name in sizes if name.endswith(".gguf") and not _BESIDE.search(name)]
    if wanted is None:
        fits = ours
    else:
        fits = [name for name in sizes if name == wanted or fnmatchcase(name, wanted)]
        word = re.compile(rf"(^|[/._-]){re.escape(wanted)}([/._-]|$)", re.IGNORECASE)
        fits = fits or [name for name in ours if format_of(name) == wanted.upper()]
        fits = fits or [name for name in ours if word.search(name)]
    found = []
    for name in fits:
        part = _PART.fullmatch(name)
        if part and int(part[2]) != 1:
            continue
        parts = [name]
        if part:
            parts = [f"{part[1]}-{i:05}-of-{part[3]}.gguf" for i in range(1, int(part[3]) + 1)]
            missing = [each for each in parts if each not in sizes]
            if missing:
                raise ArgumentError(f"{repo} has only some parts of {name}: {missing[0]} is missing")
        found.append(Choice(tuple(parts), sum(sizes[each] for each in parts), format_of(name)))
    return found


def _needed(model: Choice) -> int:
    """With K and V, and buffers."""
    return model.n_bytes + model.n_bytes // 8 + GIB // 2


def _rank(model: Choice) -> tuple[int, int]:
    place = _PREFERRED.index(model.format) if model.format in _PREFERRED else len(_PREFERRED)
    return place, -model.n_bytes


def _fitting_model(repo: str, models: list[Choice], room: Room) -> Choice:
    """One that memory holds: on a GPU that holds all of it the best up to Q8_0, else the usual four bits."""
    whole = [m for m in models if _needed(m) <= room.gpu_bytes and _rank(m)[0] <= _LAST_FOR_GPUS]
    if whole:
        return max(whole, key=lambda model: model.n_bytes)
    fits = [m for m in models if not room.host_bytes or _needed(m) <= room.host_bytes + room.gpu_bytes]
    if not fits:
        least = min(models, key=lambda model: model.n_bytes)
        name = least.format or least.model
        raise ArgumentError(
            f"the smallest model of {repo}, {name}, takes {_needed(least) / GIB:.1f} GiB with its context, "
            f"and {room} are free; hf:{repo}:{name} takes it nevertheless"
        )
    return min(fits, key=_rank)


def _complaint(repo: str, sizes: Mapping[str, int], pattern: str, found: Sequence[Choice]) -> str:
    if found:
        shown = ", ".join(f"{c.model} ({c.n_bytes / GIB:.1f} GiB)" for c in found[:20])
        return f"several files of {repo} fit {pattern!r}: {shown}"
    models = [name for name in sizes if name.endswith(".gguf")]
    if models:
        return f"no file of {repo} fits {pattern!r}; there are {', '.join(models[:20])}"
    text = f"{repo} has no GGUF file; there are {', '.join(list(sizes)[:20]) or 'none'}"
    if any(name.endswith((".safetensors", ".bin")) for name in sizes):
        text += (
            f"; it can be converted: hf download {repo} --local-dir DIR, then "
            "powerinfer convert DIR -o model.gguf"
        )
    return text
