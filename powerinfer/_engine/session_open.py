"""Opening a native session, and the Python function that is called meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ArgumentError
from . import _native
from .model import Model
from .types import Progress, devices_of


class Reporter:
    """Lets the engine call a Python function; `error` is what that raised."""

    def __init__(self, progress: Progress | None) -> None:
        self.error: BaseException | None = None
        self.native: Any = _native.ffi.NULL
        if progress is not None:
            self.native = _native.ffi.callback("pi_progress", self._call, error=1, onerror=self._note)
            self._progress = progress

    def _call(self, _ctx: Any, done: int, total: int) -> int:
        self._progress(done, total)
        return 0

    def _note(self, _kind: object, error: BaseException, _trace: object) -> None:
        """The engine's frames are no place for an exception. A Ctrl-C that waited for Python to run comes
        before the first line of _call, where no `try` would catch it."""
        self.error = error


def open_native(
    model: Model, options: Any, device: str | Sequence[str], plan: Any, progress: Progress | None
) -> Any:
    """The engine's session, which is closed with its last reference. Raises what `progress` raises."""
    ffi, lib = _native.ffi, _native.lib
    options.device, indices = devices_of(device)
    if plan is not None:
        options.plan = plan
    chosen = _indices(plan, indices)
    if chosen is not None:
        options.device_index = chosen
    out = ffi.new("pi_session **")
    reporter = Reporter(progress)
    options.progress = reporter.native
    status = lib.pi_session_open(model.handle, options, out)
    if reporter.error is not None:
        lib.pi_session_close(out[0])
        raise reporter.error
    _native.check(status)
    # With its size known, the garbage collector has a reason to run when sessions are dropped
    # without close().
    sizes = ffi.new("pi_session_info *")
    lib.pi_session_get_info(out[0], sizes)
    return ffi.gc(out[0], lib.pi_session_close, sizes.n_kv_bytes + sizes.n_work_bytes)


def _indices(plan: Any, indices: list[int]) -> Any:
    """The devices that the plan's are, as the engine takes them, or None: those that come first."""
    if plan is None or not indices:
        return None
    info = _native.ffi.new("pi_plan_info *")
    _native.check(_native.lib.pi_plan_get_info(plan, info))
    if len(indices) != info.n_devices:
        raise ArgumentError(f"the plan is for {info.n_devices} devices, {len(indices)} are named")
    return _native.ffi.new("int32_t[]", indices)
