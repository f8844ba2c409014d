"""Asking the hub for a model, and bringing it into huggingface_hub's cache."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._text.terminal import Bar, one_line
from ..errors import ArgumentError, FileError
from .names import GIB, Choice, Room, choose, parse
from .store import StrPath, cache_folder, client, repo_folder, snapshot

if TYPE_CHECKING:
    from .fetch import Remote

Say = Callable[[str], None]

_TIMEOUT_S = 20.0
_SPARE = 64 << 20  # of a disk that is to stay free


def download(
    repo_id: str,
    filename: str | None = None,
    additional_files: Sequence[str] | None = None,
    *,
    local_dir: StrPath | None = None,
    cache_dir: StrPath | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    verbose: bool = True,
    room: Room | None = None,
    say: Say | None = None,
) -> Path:
    """Fetches a model and returns its path; what is there already is not fetched again.

    filename: a name, a pattern (`*Q4_0.gguf`) or a format (`Q4_0`), which must fit one model; None: the only
        model of the repository or, with `room`, one that fits in it. All parts of a split model come with the
        first.
    additional_files: names or patterns of more files; each must fit one.
    verbose: show progress on stderr.
    say: told in a sentence which model was chosen.

    Files of a folder `activation` beside the model come too: PowerInfer's repositories keep statistics
    there. An interrupted download is gone on with, and checksums are compared. Where the hub cannot be
    reached, what is here is taken.

    Raises ArgumentError (nothing or too much fits), FileError (the hub does not answer, or refuses; the disk
    is too full), UnsupportedError if huggingface_hub is not installed.
    """
    hub = client()
    errors: Any = import_module("huggingface_hub.errors")
    where: dict[str, Any] = {"repo_id": repo_id, "revision": revision}
    try:
        # One request: listing a tree would be tried again for most of a minute where there is no line.
        found = hub.HfApi().model_info(files_metadata=True, token=token, timeout=_TIMEOUT_S, **where)
    except errors.HFValidationError as error:
        raise ArgumentError(f"{repo_id!r} is no repository's name: {error}") from None
    except Exception as error:
        path = None
        if _is_of_the_line(error, errors) and local_dir is None and revision is None:
            path = _here(repo_id, filename, additional_files or (), cache_dir, room)
        if path is None:
            raise FileError(_problem(repo_id, error)) from error
        if say is not None:
            say(f"the hub cannot be reached; what is here is used: {path.name}")
        return path
    listed = found.siblings or ()
    remotes = {entry.rfilename: entry for entry in listed if entry.size is not None and entry.size >= 0}
    sizes = {name: entry.size for name, entry in remotes.items()}
    chosen = choose(repo_id, sizes, filename, additional_files or (), room=room)
    if say is not None and filename is None and room is not None:
        say(_told(repo_id, sizes, chosen, room))
    try:
        return _bring(hub, chosen, remotes, where, token, local_dir, cache_dir, verbose)
    except FileError:
        raise
    except Exception as error:
        if not (isinstance(error, (errors.HfHubHTTPError, OSError)) or _is_of_the_line(error, errors)):
            raise
        raise FileError(_problem(repo_id, error)) from error


def _bring(
    hub: Any,
    chosen: Choice,
    remotes: Mapping[str, Any],
    where: Mapping[str, Any],
    token: str | bool | None,
    local_dir: StrPath | None,
    cache_dir: StrPath | None,
    verbose: bool,
) -> Path:
    """Fetches the bytes to where the client would have put them; it then finds them there, and links them."""
    from .fetch import fetch, partial_of

    blobs = repo_folder(where["repo_id"], cache_dir) / "blobs"
    targets = {
        name: Path(local_dir) / name if local_dir is not None else blobs / _digest(remotes[name])
        for name in chosen.files
    }
    missing = [name for name, path in targets.items() if not path.exists()]
    total = sum(remotes[name].size for name in missing)
    begun = sum(_size(partial_of(targets[name])) for name in missing)
    _check_disk(
        Path(local_dir) if local_dir is not None else cache_folder(cache_dir), total - begun, where["repo_id"]
    )
    before = 0
    with _bar(verbose, f"fetching {chosen.model}") as bar:
        for name in missing:

            def report(done: int, _: int, before: int = before) -> None:
                bar(before + done, total)

            fetch(_remote(hub, name, remotes[name], where, token), targets[name], report)
            before += remotes[name].size
    options: dict[str, Any] = {"local_dir": local_dir, "cache_dir": cache_dir, "token": token, **where}
    with _quiet():
        paths = {name: hub.hf_hub_download(filename=name, **options) for name in chosen.files}
    return Path(paths[chosen.model])


def _digest(entry: Any) -> str:
    """What the content hashes to; the file in the cache has this name. Raises FileError."""
    digest = str(entry.blob_id if entry.lfs is None else entry.lfs.sha256)
    if not re.fullmatch("[0-9a-f]{40}" if entry.lfs is None else "[0-9a-f]{64}", digest):
        raise FileError(f"{entry.rfilename}: the hub gives no checksum but {digest!r}")
    return digest


def _remote(hub: Any, name: str, entry: Any, where: Mapping[str, Any], token: str | bool | None) -> Remote:
    from urllib.parse import urlsplit

    from .fetch import Remote

    url = hub.hf_hub_url(where["repo_id"], name, revision=where["revision"])
    errors: Any = import_module("huggingface_hub.errors")

    def address() -> tuple[str, dict[str, str]]:
        try:
            location = hub.get_hf_file_metadata(url, token=token).location
        except Exception as error:
            text = _problem(where["repo_id"], error)
            raise (OSError if _is_of_the_line(error, errors) else FileError)(text) from error
        headers = import_module("huggingface_hub.utils").build_hf_headers(token=token)
        own = urlsplit(location)[:2] == urlsplit(url)[:2]
        # Other hosts are sent no token: their addresses are signed.
        return location, {k: v for k, v in headers.items() if own or k.lower() != "authorization"}

    return Remote(name, entry.size, _digest(entry), entry.lfs is not None, address)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _check_disk(folder: Path, n_bytes: int, repo: str) -> None:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if n_bytes and n_bytes + _SPARE > free:
        raise FileError(
            f"{repo}: {n_bytes / GIB:.2f} GiB are to be fetched, and {free / GIB:.2f} are free in {folder}; "
            "HF_HOME names another folder, and `powerinfer rm` makes room"
        )


@contextmanager
def _bar(wanted: bool, text: str) -> Iterator[Callable[[int, int], None]]:
    if not wanted:
        yield lambda done, total: None
        return
    with Bar(text, after=0, is_bytes=True) as bar:
        yield bar


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the client's own bars, which would tell of files that are here."""
    bars: Any = import_module("huggingface_hub.utils")
    was_quiet = bars.are_progress_bars_disabled()
    bars.disable_progress_bars()
    try:
        yield
    finally:
        if not was_quiet:
            bars.enable_progress_bars()


# -- references


def pull(
    name: str,
    *,
    room: Room,
    cache_dir: StrPath | None = None,
    verbose: bool = True,
    say: Say | None = None,
) -> Path:
    """Brings the model that hf:OWNER/REPO[:FILE-or-format] means, as the hub has it now. Raises what
    download() raises."""
    reference = parse(name)
    return download(
        reference.repo,
        reference.wanted,
        cache_dir=cache_dir,
        verbose=verbose,
        room=room,
        say=say if say is not None else _print if verbose else None,
    )


def find(
    name: str,
    *,
    room: Room,
    cache_dir: StrPath | None = None,
    verbose: bool = True,
    say: Say | None = None,
) -> Path:
    """The path of the model that hf:OWNER/REPO[:FILE-or-format] means: one that is here already, for which
    nobody is asked, else as pull()."""
    reference = parse(name)
    path = _here(reference.repo, reference.wanted, (), cache_dir, room)
    if path is not None:
        return path
    return pull(name, room=room, cache_dir=cache_dir, verbose=verbose, say=say)


def _here(
    repo: str, wanted: str | None, additional: Sequence[str], cache_dir: StrPath | None, room: Room | None
) -> Path | None:
    found = snapshot(repo, cache_dir)
    if found is None:
        return None
    folder, sizes = found
    try:
        return folder / choose(repo, sizes, wanted, additional, room=room).model
    except ArgumentError:
        return None


def _told(repo: str, sizes: Mapping[str, int], chosen: Choice, room: Room) -> str:
    n, own = (sum(name.endswith(".gguf") for name in names) for names in (sizes, chosen.files))
    which = f", chosen among {n} files" if n > own else ""
    name = f"hf:{repo}:{chosen.format or chosen.model}"
    return f"{name}, {chosen.n_bytes / GIB:.2f} GiB{which}; {room} are free"


def _print(text: str) -> None:
    print(f"powerinfer: {one_line(text)}", file=sys.stderr)


# -- errors


def _is_of_the_line(error: BaseException, errors: Any) -> bool:
    """The hub cannot be reached, or is down: exceptions of the client's own HTTP library, which its versions
    change. Not where it answered and said no."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HfHubHTTPError) and status is not None:
        return bool(status >= 500)
    kinds = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    offline = getattr(errors, "OfflineModeIsEnabled", ConnectionError)
    return isinstance(error, (OSError, offline)) or bool(kinds & {"httpx", "httpx2", "httpcore", "requests"})


def _problem(repo: str, error: BaseException) -> str:
    """What went wrong, and what helps."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return (
            f"{repo}: its owner asks to accept conditions first, at https://huggingface.co/{repo}; then log "
            "in (hf auth login), or give your token in HF_TOKEN"
        )
    if kind == "RepositoryNotFoundError" or status in (401, 404):
        return (
            f"{repo}: the hub has no such repository, or it is private and wants a token "
            "(HF_TOKEN, hf auth login)"
        )
    if kind == "OfflineModeIsEnabled":
        return f"{repo}: it is not here, and HF_HUB_OFFLINE forbids asking the hub"
    text = one_line(str(error).strip().split("\n")[0]) or kind
    endpoint = import_module("huggingface_hub.constants").ENDPOINT
    if _is_of_the_line(error, import_module("huggingface_hub.errors")):
        text = "the hub cannot be reached: " + re.sub(r"\[Errno -?\d+\] ", "", text)
    return f"{repo}: {text} ({endpoint}; HF_ENDPOINT names another hub)"
