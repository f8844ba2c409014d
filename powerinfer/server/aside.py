"""Work beside the event loop, on two threads: more would only take Python's lock from the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_threads = ThreadPoolExecutor(2, thread_name_prefix="powerinfer-aside")


async def aside(function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns, called in a thread in its turn."""
    return await asyncio.get_running_loop().run_in_executor(_threads, function, *arguments)
