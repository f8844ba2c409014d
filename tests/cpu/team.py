"""Runs operations of a team (te_ops.h) from Python: a pool, a workspace, the same call on every member."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.core.capi import check
from tests.cpu.kernels import ffi, lib


class Team:
    """n_threads members with a workspace over one kernel table."""

    def __init__(
        self, table: Any, n_threads: int, *, max_tok: int, max_cols: int, max_rows: int, mixture: bool = False
    ) -> None:
        pool, workspace = ffi.new("te_pool **"), ffi.new("te_workspace **")
        check(lib.te_pool_new(n_threads, pool))
        limits = {
            "n_threads": n_threads,
            "max_tok": max_tok,
            "max_cols": max_cols,
            "max_rows": max_rows,
            "mixture": mixture,
        }
        check(lib.te_workspace_new(table, limits, workspace))
        self.n_threads, self._table = n_threads, table
        self.pool, self.workspace = pool[0], workspace[0]
        self._sense = 0, 0

    def run(self, operation: Callable[[Any, Any], None]) -> None:
        """operation(team, workspace) on every member; raises what any of them raised."""
        errors: list[BaseException] = []

        def body(_: Any, team: Any) -> None:
            try:
                operation(team, self.workspace)
            except BaseException as error:
                errors.append(error)

        lib.te_pool_run(self.pool, ffi.callback("void(void *, te_team *)", body), ffi.NULL)
        if errors:
            raise errors[0]

    def run_without_last(self, operation: Callable[[Any, Any], None]) -> None:
        """The same while the last member is parked: the others are a team of one less."""
        done = threading.Barrier(self.n_threads)

        def body(team: Any, workspace: Any) -> None:
            n = team.nth
            if n == self.n_threads and team.ith < n - 1:
                team.nth = n - 1
                try:
                    operation(team, workspace)
                    lib.te_barrier(team)
                    team.nth = n
                    self._sense = team.sense, team.n_queues
                except BaseException:
                    done.abort()  # nobody waits for this one
                    raise
            elif n < self.n_threads:  # the pool made the team smaller itself
                done.abort()
                operation(team, workspace)
                return
            try:
                done.wait()
            except threading.BrokenBarrierError:
                return
            team.sense, team.n_queues = self._sense

        self.run(body)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        lib.te_workspace_free(self.workspace)
        lib.te_pool_free(self.pool)
