"""One step of an engine at a time: its hooks run within one, and are not to begin another."""

from __future__ import annotations

from ..errors import ArgumentError


class OneStep:
    """Entered by a step. Only the thread that steps looks at it."""

    def __init__(self) -> None:
        self._is_under_way = False

    def check(self) -> None:
        """Raises ArgumentError within a step, which would not find what it left."""
        if self._is_under_way:
            raise ArgumentError(
                "a hook (logits_processor, stopping_criteria, prompt_progress, a signal handler) cannot have "
                "the model compute that it is a hook of"
            )

    def __enter__(self) -> None:
        self.check()
        self._is_under_way = True

    def __exit__(self, *_exc: object) -> None:
        self._is_under_way = False
