"""The scheduler of many sequences, the layer below AsyncLlama."""

from ._engine.scheduler import Scheduler

__all__ = ["Scheduler"]
