"""Admission: who gets a place, a sequence and memory for K and V, and who gives them back.

Where that memory ends, idle sequences are forgotten first, then the youngest generation is preempted: it
waits and is computed again later. A context that is full is shifted.
"""

from __future__ import annotations

import time

import numpy as np

from ..errors import ClosedError, ContextError, PowerInferError, UnsupportedError
from ._native import KV_BLOCK
from .arrays import Ids
from .batch import coming
from .engine_state import EngineState
from .prefix_cache import Sequence, blocks
from .request import Request


class Admission(EngineState):
    """The part of Engine that decides who is under way."""

    def _leave(self) -> None:
        """Those that nobody waits for any more, or not so long."""
        now = time.monotonic()
        for request in list(self._running):
            if request.stream.is_cancelled:
                self._finish(request, "cancelled")
            elif request.over is not None:
                self._finish(request, request.over)
            elif request.deadline is not None and now >= request.deadline:
                self._finish(request, "time")
            elif self.queue.is_over:
                self._finish(request, "error", ClosedError("the model is closed"))
        for request, reason in self.queue.take_late(now):
            self._finish(request, reason)

    def _admit(self, room: int | None = None) -> list[Request]:
        """Gives places to those who wait, in the order in which they came; one whose beginning is just being
        computed for another lets others pass until it can share that. room: up to the first who has more
        tokens to compute than are left of it, or of whose logits others than a sampler see something.
        Returns who has a place now."""
        admitted: list[Request] = []
        if not self.queue.waiting:
            return admitted
        with self.changed:
            candidates = list(self.queue.waiting)
        n_free = self.session.info.n_blocks_free  # asked once: others have Python's lock after each call
        for request in candidates:
            if len(self._running) >= self.queue.max_running:
                break
            if room is not None and not (
                request.is_plain and request.place is None and request.n <= self.n_ctx
            ):
                break
            if request.n > self.n_ctx:  # it gave way just when its context was full
                if self.n_keep is None:
                    if self.queue.start(request):
                        self._finish(request, "error", self.shift.error(self.n_ctx, 1))
                    continue
                request.forget(*self.shift.sizes(self.n_ctx, 1))
            ids = request.ids[: request.n]
            source, n = self._held_of(request, ids)
            if room is not None and source is not None and source.n_coming > source.n:
                n = self._whole_blocks(request, source, n)
            if room is not None and request.n - n > room:
                break
            if not request.is_text and coming(self._running, ids) - n >= KV_BLOCK:
                continue
            # A shared block is copied when it is written; those that run may each want another.
            need = blocks(request.n) - n // KV_BLOCK + len(self._running)
            if request.is_text:  # several texts of one call: those before it are not all computed yet
                need += sum(blocks(own.n) - blocks(own.n - own.left) for own in self._running)
            if n_free < need:  # what others gave up meanwhile counts
                n_free = self.session.info.n_blocks_free
            while n_free < need and self.cache.evict(keep=source):
                n_free = self.session.info.n_blocks_free
            if self._running and n_free < need:
                break
            branch = 0 if request.is_text else self.cache.branch(ids)
            sequence = self.cache.take(request.ids, request.n_prompt, source, n, request.place)
            if sequence is None:
                break
            if not self.queue.start(request):
                self.cache.release(sequence)
                continue
            request.sequence, request.branch = sequence, branch
            admitted.append(request)
            room = room if room is None else room - request.left
            if request.is_text:  # its tokens are computed otherwise than those of a prompt
                sequence.n_shared = 0
            if not request.is_counted:
                request.is_counted, request.stream.n_reused = True, n
                request.stream.begun_at = time.monotonic()
                self.totals["prompt"] += request.n_prompt
                self.totals["reused"] += n
                self.times.placed(request)
        return admitted

    def _held_of(self, request: Request, ids: Ids) -> tuple[Sequence | None, int]:
        """A sequence that holds the beginning of a request, and how many of its ids."""
        place = request.place
        if request.is_text:
            return None, 0
        if request.is_continued and place is not None:
            request.is_continued = False  # whoever comes back finds what it left
            if place.n < ids.size and np.array_equal(place.ids[: place.n], ids[: place.n]):
                return place, place.n
        return self.cache.find(ids, request.n_prompt, place)

    def _whole_blocks(self, request: Request, source: Sequence, n: int) -> int:
        """Of n tokens that a sequence holds, behind which it is being computed, those of blocks that are not
        written any more, and from which the request can go on."""
        while n % KV_BLOCK:
            n = self.session.reusable_prefix(
                n - n % KV_BLOCK, source.n_prompt, request.n_prompt, seq=source.number
            )
        return n

    def _shift(self) -> None:
        """Makes room for the next token of those whose context is full."""
        for request in [request for request in self._running if request.n > self.n_ctx]:
            if self.n_keep is None:
                self._finish(request, "error", self.shift.error(self.n_ctx, 1))
            else:
                self._move(request, *self.shift.sizes(self.n_ctx, 1))

    def _move(self, request: Request, keep: int, n_drop: int) -> None:
        """Shifts the context of one, which may end with an error, or give way."""
        while request.sequence is not None:
            try:
                self.shift.move(self.session, request.sequence, keep, n_drop)
                request.forget(keep, n_drop)
                request.sequence.is_torn = False
                break
            except ContextError as error:  # what it shares must be copied, and there is no room for that
                if self.cache.evict():
                    continue
                if len(self._running) == 1:
                    self._finish(request, "error", error)
                    return
                self._preempt()
            except UnsupportedError:
                self._yield(request)
            except PowerInferError as error:
                self._finish(request, "error", error)
                return
        else:  # it gave way: what stays is computed anew
            request.forget(keep, n_drop)

    def _preempt(self) -> None:
        """The youngest gives its memory back and waits at the head of the line. One alone always fits, as the
        pool is not smaller than n_ctx."""
        self._yield(self._running[-1])

    def _yield(self, request: Request) -> None:
        """It gives its memory back and waits at the head of the line."""
        assert request.sequence is not None
        self.cache.drop(request.sequence)
        request.sequence = None
        request.drop_guess()
        self.totals["preempted"] += 1
        if not self.queue.put_back(request):
            self._finish(request, "error", ClosedError("the model is closed"))
