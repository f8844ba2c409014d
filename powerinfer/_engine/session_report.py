"""What a native session says of its steps, in types of Python. Its lock is the caller's."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError
from . import _native
from .counts import Counts, Unit
from .session_handle import SessionHandle
from .types import MOMENTS, LayerExperts, LayerStep, ModelInfo, StepTotal


def layer_steps(handle: Any, n_layer: int) -> list[LayerStep]:
    """What the last chunk of the last feed did, layer by layer."""
    entry = _native.ffi.new("pi_layer_step *")
    steps = []
    for layer in range(n_layer):
        _native.check(_native.lib.pi_session_last_step(handle, layer, entry))
        steps.append(
            LayerStep(
                n_tokens=entry.n_tokens,
                n_sparse=entry.n_sparse,
                n_predicted=entry.n_predicted,
                n_computed=entry.n_computed,
                n_active=entry.n_active,
                n_active_device=entry.n_active_device,
                n_rows=entry.n_rows,
                ffn_bytes=entry.ffn_bytes,
                bytes=entry.bytes,
                ffn_us=entry.ffn_us,
                layer_us=entry.layer_us,
                n_foreseen=entry.n_foreseen,
                n_routes=entry.n_routes,
                n_routes_device=entry.n_routes_device,
                n_routes_streamed=entry.n_routes_streamed,
                n_zero_copy=entry.n_zero_copy,
                n_copies=entry.n_copies,
                copied_bytes=entry.copied_bytes,
            )
        )
    return steps


def step_total(handle: Any) -> StepTotal:
    """Bytes that the last feed read in all, and its time."""
    n_bytes, us = _native.ffi.new("int64_t *"), _native.ffi.new("float *")
    _native.check(_native.lib.pi_session_last_total(handle, n_bytes, us))
    return StepTotal(bytes=n_bytes[0], us=us[0])


def timeline(handle: Any, n_layer: int) -> list[dict[str, float]]:
    """When each side of each layer had done what in the last chunk."""
    us = _native.ffi.new("float[]", len(MOMENTS))
    found = []
    for layer in range(n_layer):
        _native.check(_native.lib.pi_session_timeline(handle, layer, us))
        found.append({name: us[i] for i, name in enumerate(MOMENTS) if us[i] >= 0})
    return found


def layer_experts(handle: Any, info: ModelInfo) -> list[LayerExperts]:
    """Where a mixture's experts are, layer by layer, and how often they were used."""
    ffi = _native.ffi
    entry, found = ffi.new("pi_expert_counts *"), []
    for layer in range(info.n_layer):
        here, uses = np.empty(info.n_expert, np.uint8), np.empty(info.n_expert, np.uint64)
        out = ffi.from_buffer("uint8_t[]", here), ffi.from_buffer("uint64_t[]", uses)
        _native.check(_native.lib.pi_session_experts(handle, layer, entry, *out))
        found.append(
            LayerExperts(
                resident=here.astype(np.bool_),
                uses=uses,
                n_places=entry.n_places,
                n_routes=entry.n_routes,
                n_resident=entry.n_resident,
                n_streamed=entry.n_streamed,
                n_zero_copy=entry.n_zero_copy,
                n_copies=entry.n_copies,
                copied_bytes=entry.copied_bytes,
            )
        )
    return found


def counted_tokens(handle: Any, info: ModelInfo) -> int:
    """Over how many tokens neurons were counted."""
    row = np.empty(info.n_placed, np.uint32)
    n_tokens = _native.ffi.new("uint64_t *")
    counts = _native.ffi.from_buffer("uint32_t[]", row)
    _native.check(_native.lib.pi_session_counts(handle, 0, counts, n_tokens))
    return int(n_tokens[0])


def neuron_counts(handle: Any, info: ModelInfo) -> Counts:
    """How often each neuron fired. Raises ArgumentError where no token was counted."""
    counts = np.empty((info.n_layer, info.n_placed), np.uint32)
    n_tokens = _native.ffi.new("uint64_t *")
    for layer in range(info.n_layer):
        row = _native.ffi.from_buffer("uint32_t[]", counts[layer])
        _native.check(_native.lib.pi_session_counts(handle, layer, row, n_tokens))
    if not n_tokens[0]:
        raise ArgumentError("no tokens were counted yet")
    unit: Unit = "experts" if info.n_expert else "neurons"
    return Counts(counts=counts.astype(np.uint64), n_tokens=n_tokens[0], unit=unit)


class SessionReports(SessionHandle):
    """A session's methods that tell what it did."""

    @property
    def last_step(self) -> list[LayerStep]:
        """What the last chunk of the last feed did, layer by layer."""
        with self._lock:
            return layer_steps(self.handle, self.model.info.n_layer)

    def experts(self) -> list[LayerExperts]:
        """Where a mixture's experts are, layer by layer, how often they were used and found on the device
        since the session was opened. Raises ArgumentError (a model without experts)."""
        with self._lock:
            return layer_experts(self.handle, self.model.info)

    def counted_tokens(self) -> int:
        """Over how many tokens neurons were counted since the session was opened or reset. Raises
        ArgumentError (a session that was opened without count_neurons), DeviceError."""
        with self._lock:
            return counted_tokens(self.handle, self.model.info)

    def neuron_counts(self, *, reset: bool = False) -> Counts:
        """How often each neuron fired, and over how many tokens, since the session was opened or reset.

        reset: count anew from here on. In predicted mode neurons that the mask left out did not fire. Raises
        ArgumentError (a session that was opened without count_neurons, or was fed nothing since),
        DeviceError.
        """
        with self._lock:
            counts = neuron_counts(self.handle, self.model.info)
            if reset:
                _native.check(_native.lib.pi_session_reset_counts(self.handle))
            return counts

    @property
    def last_total(self) -> StepTotal:
        """Bytes that the last feed read in all, and its time."""
        with self._lock:
            return step_total(self.handle)

    @property
    def last_timeline(self) -> list[dict[str, float]]:
        """When each side of each layer had done what (types.MOMENTS) in the last chunk, in microseconds since
        it began; others are left out. Raises ArgumentError if the session has no `timeline` or no devices."""
        with self._lock:
            return timeline(self.handle, self.model.info.n_layer)
