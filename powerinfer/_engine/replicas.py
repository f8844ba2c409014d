"""Several sessions of one model, each on devices of its own, over which requests are spread."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from . import machine
from ._native import KV_BLOCK
from .arrays import Ids
from .devices import GIB, Budget, Devices, Names, choose_devices
from .request import Stream
from .scheduler import Scheduler
from .scheduler_stats import SchedulerStats, together

_MAX_KNOWN = 1 << 14  # beginnings of prompts that are remembered
_LEAVES = 4  # threads
_MOST_AHEAD = 8  # requests that a replica with a prompt's beginning may have more than another


class Replicas:
    """Schedulers of equal sessions, with the methods of one. May be used from several threads."""

    def __init__(self, all_: Sequence[Scheduler]) -> None:
        self.all = tuple(all_)
        self._known: OrderedDict[bytes, int] = OrderedDict()
        self._n_sent = [0] * len(self.all)
        self._lock = threading.Lock()

    def submit(self, prompt: Ids, *args: Any, **options: Any) -> Stream:
        """Scheduler.submit() of the one that has computed the longest beginning of the prompt, unless it has
        much more to do than another; else of the one with the least to do."""
        with self._lock:
            names = _beginnings(prompt)
            chosen = self._order()[0]
            loads = self._loads()
            for name in reversed(names):
                i = self._known.get(name)
                if i is not None:
                    if loads[i] - loads[chosen] <= _MOST_AHEAD and self._is_open(i):
                        chosen = i
                    break
            for name in names:
                self._known[name] = chosen
                self._known.move_to_end(name)
            while len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            self._n_sent[chosen] += 1
            return self.all[chosen].submit(prompt, *args, **options)

    def score(self, *args: Any, **options: Any) -> None:
        """Scheduler.score()."""
        self._least().score(*args, **options)

    def embed_all(self, *args: Any, **options: Any) -> Any:
        """Scheduler.embed_all()."""
        return self._least().embed_all(*args, **options)

    def _least(self) -> Scheduler:
        with self._lock:
            chosen = self._order()[0]
            self._n_sent[chosen] += 1
            return self.all[chosen]

    def _loads(self) -> list[int]:
        return [sum(each.engine.n_requests) for each in self.all]

    def _is_open(self, i: int) -> bool:
        return self.all[i].last_error is None and self.all[i].engine.queue.has_room

    def _order(self) -> list[int]:
        """First the one with the least to do; of several with as little the one that was sent the least."""
        loads = self._loads()
        return sorted(range(len(self.all)), key=lambda i: (not self._is_open(i), loads[i], self._n_sent[i]))

    def check_process(self) -> None:
        self.all[0].check_process()

    @property
    def is_closing(self) -> bool:
        return any(each.is_closing for each in self.all)

    @property
    def last_error(self) -> BaseException | None:
        """Of the first that has one."""
        return next((each.last_error for each in self.all if each.last_error is not None), None)

    def stats(self) -> SchedulerStats:
        """Of all together."""
        return together([each.stats() for each in self.all])

    def begin_close(self, *, grace_s: float = 0.0) -> None:
        for each in self.all:
            each.begin_close(grace_s=grace_s)

    def close(self, *, grace_s: float = 0.0) -> None:
        self.begin_close(grace_s=grace_s)
        for each in self.all:
            each.close(grace_s=grace_s)


def _beginnings(prompt: Ids) -> list[bytes]:
    """Names of a prompt's beginnings that end where a block of K and V does, the shorter ones first."""
    so_far, names = hashlib.blake2b(digest_size=16), []
    for at in range(0, prompt.size - KV_BLOCK + 1, KV_BLOCK):
        so_far.update(prompt[at : at + KV_BLOCK].tobytes())
        names.append(so_far.copy().digest())
    return names


def shares(n: int, vram_budget: Budget, names: Names) -> list[Devices | None]:
    """The devices of each of n replicas, in their order; None: the CPU. A budget that is one number is of
    each device, of which there is one for each replica where none are named.

    Raises what choose_devices() does, and ArgumentError where they cannot be dealt out.
    """
    if isinstance(vram_budget, (int, float)) and vram_budget and names is None:
        vram_budget = [vram_budget] * n
    chosen = choose_devices(vram_budget, names)
    if chosen is None:
        return [None] * n
    each, left = divmod(len(chosen.indices), n)
    if left or not each:
        raise ArgumentError(f"{len(chosen.indices)} devices cannot be dealt out to {n} replicas")
    cuts = [slice(i * each, (i + 1) * each) for i in range(n)]
    return [
        replace(chosen, indices=chosen.indices[at], budgets=chosen.budgets[at], automatic=False)
        for at in cuts
    ]


def threads_of_each(n: int, asked: int | None, share: Devices | None) -> int:
    """Threads of each of n replicas, of so many that all of them have; None: of the machine's cores, of which
    each leaves one to the driver of its devices, where it has four or more (as a session does)."""
    each = max((asked or machine.cores()) // n, 1)
    return each - 1 if share is not None and not asked and each >= _LEAVES else each


def options_of(share: Devices | None) -> dict[str, Any]:
    """The same as options of Llama."""
    if share is None:
        return {"vram_budget": 0, "devices": None, "n_gpu_layers": None}
    budgets = [n / GIB for n in share.budgets]
    return {"vram_budget": budgets, "devices": share.names, "n_gpu_layers": None}


def check_options(given: dict[str, Any]) -> None:
    """Raises UnsupportedError for options of a single session."""
    for name in ("plan", "draft_model", "online_statistics"):
        if given.get(name):
            raise UnsupportedError(f"{name} is of one session: it is not supported with replicas")
    if (given.get("n_gpu_layers") or 0) > 0 and given.get("vram_budget") is None:
        raise UnsupportedError("n_gpu_layers with replicas is not supported: give a vram_budget")
