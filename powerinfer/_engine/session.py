"""Sessions: a typed object over the engine's handle, without text or sampling.

    model = Model("model.gguf")
    session = Session(model, n_ctx=2048)
    session.feed([1, 15043])
    logits = session.logits()  # float32 [n_vocab]

A session is one pool of K and V that holds many sequences; positions of a sequence are 0, 1, 2 ...
without gaps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError, DeviceError
from . import _native, checks
from .arrays import as_int32
from .interrupt import Interrupt
from .model import Model
from .read_probe import ReadProbe
from .sampling import Sampler
from .session_open import open_native
from .session_report import SessionReports
from .session_sequences import SessionSequences
from .types import (
    KV_TYPE,
    SPARSITY,
    Activation,
    LayerStep,
    ModelInfo,
    Predictor,
    Progress,
    SessionInfo,
    Sparsity,
    StepTotal,
    Tap,
    TokenKind,
    name_of,
    number_of,
)

__all__ = [
    "Activation",
    "LayerStep",
    "Model",
    "ModelInfo",
    "Predictor",
    "Progress",
    "Session",
    "SessionInfo",
    "Sparsity",
    "StepTotal",
    "Tap",
    "TokenKind",
    "as_int32",
    "pool_size",
]


class Session(SessionSequences, SessionReports):
    """Sequences of one model and the threads that compute them. Calls from several threads take turns."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 0,
        n_pool: int = 0,
        n_seq: int = 1,
        n_batch: int = 512,
        n_threads: int = 0,
        type_k: str | int = "f16",
        type_v: str | int = "f16",
        sparsity: Sparsity = "auto",
        mask_prompts: bool = False,
        plan: Any = None,
        device: str | Sequence[str] = "none",
        wait_ms: int = 0,
        count_neurons: bool = False,
        pin_weights: bool = True,
        timeline: bool = False,
        look_ahead: bool = True,
        live_experts: bool = True,
        n_guesses: int = 0,
        keep_hidden: bool = False,
        beside: Session | None = None,
        progress: Progress | None = None,
    ) -> None:
        """
        n_ctx: most positions of one sequence; 0: the model's own, at most 4096.
        n_pool: positions that all sequences share; 0: n_ctx.
        n_seq: sequences are numbered 0..n_seq-1.
        n_batch: tokens computed together; a longer feed is cut into chunks of this many.
        n_threads: 0: physical cores; beside a device one fewer, of four and more.
        type_k, type_v: "f32", "f16" or "q8_0".
        sparsity: "predicted" (the model's predictors choose neurons), "exact" (the gate chooses: same
            answers as dense), "dense", or "auto" (the first of those that the model can do).
        mask_prompts: in predicted mode compute every token with the predictor's neurons, not only those
            whose logits are wanted: for measuring what the mask costs.
        plan: the engine's plan (powerinfer.models.plan.engine.native_plan) of what lies on the device.
        device: "host" is a stand-in for tests; "cuda" needs a build with the CUDA backend. "cuda:1", or a
            list of them, chooses: the plan's first device is the first of the list.
        wait_ms: how long a step waits for a device, and a device for the CPU, before it fails with
            DeviceError; 0: a minute, and ten.
        count_neurons: count which neurons fire, for `neuron_counts`; takes 4 bytes for each neuron of a
            layer on a device there, which the plan must be made for (Settings.count_neurons).
        pin_weights: register the weights in host memory with a device's driver, which keeps their pages in
            RAM; False: prompts bring them over through a small buffer, which is slower. So it is where the
            system refuses, too.
        timeline: keep when each side of a step did what, for `last_timeline`; a GPU then takes some
            microseconds a layer more.
        look_ahead: False: neurons and experts of the CPU's share are not fetched by a device's guess a layer
            ahead; for measuring what that gains. Answers of neurons may differ by rounding.
        live_experts: experts of a mixture that are used more move to the device while the session runs;
            False: they stay where the plan puts them, so that the same input gives the same bits.
        n_guesses: of models with recurrent layers: tokens that are generated together, of all sequences,
            between which these can be gone back to; each takes as much memory as a sequence's state.
        keep_hidden: each feed leaves the final hidden states of all its tokens, for `all_hidden`.
        beside: a session whose threads compute this one, too; they take turns. n_threads is that one's.
        progress: called as progress(done, total) with bytes while weights are brought to devices; an
            exception from it ends that.

        Raises ArgumentError, OutOfMemoryError (also of a device's memory), DeviceError.
        """
        self.model = model
        options = _native.ffi.new("pi_session_options *", _native.lib.pi_session_defaults())
        options.n_ctx = _native.fit("n_ctx", n_ctx)
        options.n_pool = _native.fit("n_pool", n_pool)
        options.n_seq = _native.fit("n_seq", n_seq)
        options.n_batch = _native.fit("n_batch", n_batch)
        options.n_threads = _native.fit("n_threads", n_threads)
        options.type_k = number_of("type_k", KV_TYPE, type_k)
        options.type_v = number_of("type_v", KV_TYPE, type_v)
        options.sparsity = number_of("sparsity", SPARSITY, sparsity)
        options.mask_prompts = bool(mask_prompts)
        options.wait_ms = _native.fit("wait_ms", wait_ms)
        options.count_neurons = bool(count_neurons)
        options.no_pinning = not pin_weights
        options.timeline = bool(timeline)
        options.no_lookahead = not look_ahead
        options.frozen_experts = not live_experts
        options.n_guesses = _native.fit("n_guesses", n_guesses)
        options.keep_hidden = bool(keep_hidden)
        if beside is not None:
            options.beside = beside.handle
        self._handle: Any = open_native(model, options, device, plan, progress)
        self.mask_prompts = bool(mask_prompts)
        self.count_neurons = bool(count_neurons)
        self.thresholds: list[float] | None = None
        """Those of all layers that replaced the file's; None: none did."""
        self._lock = threading.RLock()
        self.interrupt: Interrupt = Interrupt() if beside is None else beside.interrupt
        self.call: AbstractContextManager[object] = nullcontext()
        """Entered while the engine computes, with nothing else of Python in it (turn.py)."""
        self._n_logits = self._n_fed = 0
        self._tap: tuple[Tap, dict[str, dict[int, npt.NDArray[np.float32]]]] | None = None
        # The engine's rows are copied here when they are asked for: its own memory moves when a batch
        # wants more rows.
        self._rows = np.empty((0, model.info.n_vocab), np.float32)
        self._copied: set[int] = set()

    @property
    def info(self) -> SessionInfo:
        """Sizes, and what is free at the moment."""
        native = _native.ffi.new("pi_session_info *")
        with self._lock:
            _native.quick_void("pi_session_get_info", self.handle, native)
        return SessionInfo(
            n_ctx=native.n_ctx,
            n_pool=native.n_pool,
            n_seq=native.n_seq,
            n_batch=native.n_batch,
            n_threads=native.n_threads,
            sparsity=name_of(SPARSITY, native.sparsity),
            sparse_threshold=native.sparse_threshold,
            n_kv_bytes=native.n_kv_bytes,
            n_work_bytes=native.n_work_bytes,
            n_device_bytes=native.n_device_bytes,
            n_zero_copy=native.n_zero_copy,
            n_unmapped_bytes=native.n_unmapped_bytes,
            n_blocks=native.n_blocks,
            n_blocks_free=native.n_blocks_free,
            n_window=native.n_window,
            n_mixed=native.n_mixed,
            n_part=native.n_part,
        )

    def feed(
        self,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        *,
        pos: Sequence[int] | None = None,
        seq: int | Sequence[int] = 0,
        want_logits: bool | Sequence[int] | npt.NDArray[np.uint8] | None = None,
        hidden: npt.NDArray[np.float32] | None = None,
        rows: Sequence[int] = (),
        samplers: Sequence[Sampler] = (),
    ) -> list[int]:
        """Computes tokens and appends them to their sequences.

        pos: positions, which must continue each sequence; None: they do.
        seq: the sequence of all tokens, or of each.
        want_logits: of which tokens the logits are kept (a TokenKind of each, or True and False); True:
            all, False: none, None: the last.
        hidden: [n_tokens, n_embd], for a model that is a head for further tokens: what it reads beside each.
        rows, samplers: each sampler, which nobody else uses meanwhile, chooses by its row of the logits, as
            draw() does, and accepts what it chose: in the same call of the engine, whose threads share that.

        Returns what the samplers chose, -1 where that failed: draw() then says why.

        On the CPU a token's values depend on its own sequence only, to the bit, and a prompt that is cut into
        feeds where `_native.chunk_end` says gets the values that it gets whole.

        Raises ArgumentError (a token, position or sequence out of range), ContextError (no room),
        OutOfMemoryError, and what ends it before its time (interrupt.py); then nothing was computed.
        """
        ffi, lib = _native.ffi, _native.lib
        ids = as_int32("tokens", tokens)
        n = ids.size
        places = None if pos is None else as_int32("pos", pos, n)
        owners = None
        if not isinstance(seq, int):
            owners = as_int32("seq", seq, n)
        elif seq != 0:
            owners = np.full(n, _native.fit("seq", seq), np.int32)
        wanted = None
        if want_logits is not None:
            wanted = np.empty(n, np.uint8)
            wanted[:] = want_logits
        n_wanted = min(n, 1) if wanted is None else int(np.count_nonzero(wanted))
        batch = ffi.new("pi_batch *")
        batch.n_tokens = n
        batch.token = ffi.from_buffer("int32_t[]", ids)
        batch.pos = ffi.NULL if places is None else ffi.from_buffer("int32_t[]", places)
        batch.seq = ffi.NULL if owners is None else ffi.from_buffer("int32_t[]", owners)
        batch.kind = ffi.NULL if wanted is None else ffi.from_buffer("uint8_t[]", wanted)
        given = None
        if hidden is not None:
            given = np.ascontiguousarray(hidden, np.float32)
            if given.shape != (n, self.model.info.n_embd):
                raise ArgumentError(f"hidden has shape {given.shape}, not ({n}, {self.model.info.n_embd})")
        batch.hidden = ffi.NULL if given is None else ffi.from_buffer("float[]", given)
        handles = ffi.new("pi_sampler *[]", [sampler.handle for sampler in samplers])
        chosen, of = ffi.new("int32_t[]", len(handles)), ffi.new("int32_t[]", rows)
        with self._lock:
            handle = self.handle
            try:
                self.interrupt.watch(batch)
                with self.call:
                    status = lib.pi_session_feed_choose(handle, batch, len(handles), of, handles, chosen)
            finally:
                if self.interrupt.batch is batch:
                    self.interrupt.batch = None
            if status == 0:
                self._keep(n, n_wanted)
            self._check_fed(status)
        return ffi.unpack(chosen, len(handles)) if samplers else []

    def next(self, token: int, pos: int, sampler: Sampler, *, seq: int = 0) -> int:
        """feed([token], pos=[pos], seq=seq), draw() and accept() in one call of the engine: a loop over
        tokens runs on cold caches, as all the weights have passed through them since its last turn, and what
        it touches takes longer than what it computes.

        Raises what these do. If it is the choice that failed, the token is in its sequence.
        """
        with self._lock:
            handle = self.handle
            with self.call:
                status, chosen = sampler.next_native(handle, seq, pos, token)
            if chosen >= 0:
                self._keep(1, 1)
            self._check_fed(status)
            return chosen

    def begin_part(self, tokens: Sequence[int], *, seq: Sequence[int]) -> None:
        """Tokens of prompts, none of which wants logits, whose layers are computed a few at a time in front
        of rounds that ask for it, or by what else is done with sequences, which have them from now on.
        Raises what feed() raises, and UnsupportedError where `info.n_part` is 0."""
        ffi, n = _native.ffi, len(tokens)
        ids, owners = as_int32("tokens", tokens), as_int32("seq", seq, n)
        batch = ffi.new("pi_batch *")
        kinds = ffi.new("uint8_t[]", n)
        batch.n_tokens, batch.kind = n, kinds
        batch.token = ffi.from_buffer("int32_t[]", ids)
        batch.seq = ffi.from_buffer("int32_t[]", owners)
        with self._lock:
            _native.check(_native.lib.pi_session_begin_part(self.handle, batch))

    def end_part(self) -> None:
        """Computes what is left of a part. Raises what feed() raises."""
        with self._lock:
            handle = self.handle
            with self.call:
                status = _native.lib.pi_session_end_part(handle)
            _native.check(status)

    def run_rounds(self, rounds: Any, n: int) -> None:
        """Runs the engine's rounds (rounds.py) of n sequences. Raises what feed() raises."""
        with self._lock:
            handle = self.handle
            with self.call:
                status = _native.lib.pi_session_rounds(handle, rounds)
            if rounds.state > 1:
                self._keep(n, n)
            self._check_fed(status)

    def _check_fed(self, status: int) -> None:
        """Raises what a feed failed with. A device that fails leaves no logits, nor those from before."""
        if status and _native.lib.pi_session_logits(self.handle, 0) == _native.ffi.NULL:
            self._n_logits = 0
        self.interrupt.check_status(status)
        _native.check(status)

    def _keep(self, n: int, n_logits: int) -> None:
        """Notes what the engine has of the feed that is done: n tokens, and the logits of so many."""
        self._n_logits, self._n_fed = n_logits, n
        if self._tap is not None:
            self._tap[0].show(self._tap[1], n)
        self._copied.clear()

    @property
    def n_logits(self) -> int:
        """Tokens of the last feed whose logits were kept."""
        return self._n_logits

    def logits(self, index: int = 0) -> npt.NDArray[np.float32]:
        """Logits [n_vocab] of the index-th token of the last feed that wanted them; -1 is the last.

        Writable, and the same array for every call until the next feed, which overwrites it.
        Raises ArgumentError if the index is out of range, DeviceError where a device has them, and fails.
        """
        with self._lock:
            row = self._row(index)
            if row not in self._copied:
                if len(self._rows) < self._n_logits:
                    self._rows = np.empty((self._n_logits, self.model.info.n_vocab), np.float32)
                    self._copied.clear()
                pointer = self._native_logits(row)
                _native.ffi.memmove(_native.ffi.from_buffer(self._rows[row]), pointer, self._rows[row].nbytes)
                self._copied.add(row)
            result: npt.NDArray[np.float32] = self._rows[row]
            return result

    def draw(self, sampler: Sampler, index: int = -1) -> int:
        """What the sampler chooses by `logits(index)`, which are not copied for that unless they were before.

        Raises what logits() and Sampler.sample() do.
        """
        with self._lock:
            row = self._row(index)
            if row in self._copied:  # its owner may have changed them
                return sampler.sample(self._rows[row])
            return sampler.sample_native(self._native_logits(row), self.model.info.n_vocab)

    def _native_logits(self, row: int) -> Any:
        """Raises DeviceError where they are on a device, which fails."""
        pointer = _native.lib.pi_session_logits(self.handle, row)
        if pointer == _native.ffi.NULL:
            raise DeviceError(_native.message())
        return pointer

    def hidden(self, index: int = 0) -> npt.NDArray[np.float32]:
        """A copy of the final normed hidden state [n_embd] of the same token."""
        with self._lock:
            out = np.empty(self.model.info.n_embd, np.float32)
            pointer = _native.lib.pi_session_hidden(self.handle, self._row(index))
            _native.ffi.memmove(_native.ffi.from_buffer(out), pointer, out.nbytes)
            return out

    def all_hidden(self, n: int) -> npt.NDArray[np.float32]:
        """A copy of the final normed hidden states [n, n_embd] of the last feed's n tokens, in their order.
        Raises ArgumentError unless the session keeps them (keep_hidden) and has fed so many."""
        with self._lock:
            pointer = _native.lib.pi_session_all_hidden(self.handle)
            if pointer == _native.ffi.NULL or n != self._n_fed:
                raise ArgumentError(f"the hidden states of {n} tokens are not there")
            out = np.empty((n, self.model.info.n_embd), np.float32)
            _native.ffi.memmove(_native.ffi.from_buffer(out), pointer, out.nbytes)
            return out

    def _row(self, index: int) -> int:
        self.handle  # noqa: B018 - raises when closed
        row = index + self._n_logits if index < 0 else index
        if not 0 <= row < self._n_logits:
            raise ArgumentError(
                f"index {index} is out of range: the last feed kept the logits of {self._n_logits} tokens"
            )
        return row

    def set_sparsity(self, sparsity: Sparsity) -> None:
        """Changes how the feed-forward is computed from the next feed on."""
        with self._lock:
            _native.check(
                _native.lib.pi_session_set_sparsity(self.handle, number_of("sparsity", SPARSITY, sparsity))
            )

    def set_threshold(self, threshold: float) -> None:
        """Replaces the file's threshold of the predictor's scores."""
        with self._lock:
            value = checks.real("threshold", threshold)
            _native.check(_native.lib.pi_session_set_threshold(self.handle, value))
            self.thresholds = [value] * self.model.info.n_layer

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """The same, one of each layer."""
        values = np.ascontiguousarray(thresholds, np.float32)
        if values.shape != (self.model.info.n_layer,):
            raise ArgumentError(f"{self.model.info.n_layer} thresholds are needed, one of each layer")
        with self._lock:
            floats = _native.ffi.from_buffer("float[]", values)
            _native.check(_native.lib.pi_session_set_thresholds(self.handle, floats))
            self.thresholds = values.tolist()

    @contextmanager
    def tap(
        self,
        layers: Iterable[int] | None = None,
        *,
        input: bool = False,
        norm: bool = False,
        hidden: bool = False,
        score: bool = False,
    ) -> Iterator[Tap]:
        """Within the `with` block every feed leaves what the feed-forward of these layers (None: of all) read
        and made in the Tap's arrays, a row per token, in the order of the feed.

        Such a feed may have at most n_batch tokens. input, norm, hidden, score: which arrays; their memory is
        n_batch rows of each, for each layer. Raises ArgumentError (a layer out of range, scores of a model
        without predictor).
        """
        info, rows = self.model.info, self.info.n_batch
        chosen = range(info.n_layer) if layers is None else [_native.fit("layer", layer) for layer in layers]
        widths = {"input": info.n_embd, "norm": info.n_embd, "hidden": info.n_ff, "score": info.n_ff}
        wanted = {"input": input, "norm": norm, "hidden": hidden, "score": score}
        names = [name for name, on in wanted.items() if on]
        arrays = {
            name: {layer: np.empty((rows, widths[name]), np.float32) for layer in chosen} for name in names
        }
        ffi, lib = _native.ffi, _native.lib
        tap = Tap()
        with self._lock:
            if self._tap is not None:
                raise ArgumentError("the session is tapped already")
            self._tap = (tap, arrays)
        try:
            for layer in chosen:
                native = ffi.new("pi_tap *")
                for name in names:
                    setattr(native, name, ffi.from_buffer("float[]", arrays[name][layer]))
                with self._lock:
                    _native.check(lib.pi_session_set_tap(self.handle, layer, native))
            yield tap
        finally:
            with self._lock:
                self._tap = None
                for layer in chosen:
                    if self._handle is not None:
                        lib.pi_session_set_tap(self._handle, layer, ffi.NULL)

    def read_probe(self, slice_bytes: int, n_slices: int) -> ReadProbe:
        """Memory to measure the read rate of this session's threads with, between feeds. Raises
        ArgumentError, OutOfMemoryError."""
        return ReadProbe(lambda: self.handle, self._lock, slice_bytes, n_slices)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def pool_size(n_seq: int, n_positions: int) -> int:
    """The n_pool that holds n_seq sequences of n_positions each, which take whole blocks of it."""
    return n_seq * -(-n_positions // _native.KV_BLOCK) * _native.KV_BLOCK
