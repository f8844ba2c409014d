"""Work beside the event loop, on two threads: more would only take Python's lock from the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_threads = ThreadPoolExecutor(2, thread_name_prefix="powerinfer-aside")


async def aside(function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns, called in a thread in its turn."""
    call = copy_context().run
    return await asyncio.get_running_loop().run_in_executor(_threads, call, function, *arguments)


async def aside_if(is_long: bool, function: Callable[..., T], *arguments: Any) -> T:
    """The same, but here where it is not long."""
    return await aside(function, *arguments) if is_long else function(*arguments)
