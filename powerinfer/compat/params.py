"""Attributes of llama_cpp.Llama that programs read, and that have other names here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._engine.session import Session
    from ..models.plan import Plan


@dataclass(frozen=True)
class ModelParams:
    """How the model was opened."""

    n_gpu_layers: int
    """Layers whose attention a device computes."""
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool


@dataclass(frozen=True)
class ContextParams:
    """Sizes of the context."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_seq_max: int
    n_threads: int
    n_threads_batch: int
    embeddings: bool


class Params(ABC):
    """What stands first is the part of Llama that these need."""

    _arguments: dict[str, Any]

    @property
    @abstractmethod
    def session(self) -> Session: ...

    @property
    @abstractmethod
    def plan(self) -> Plan | None: ...

    @property
    def model_params(self) -> ModelParams:
        """How the model was opened, as llama-cpp-python tells it."""
        layers = () if self.plan is None else self.plan.layers
        n_device = sum(layer.on_device for layer in layers)
        names = ("vocab_only", "use_mmap", "use_mlock")
        return ModelParams(n_device, **{name: bool(self._arguments[name]) for name in names})

    @property
    def context_params(self) -> ContextParams:
        """Sizes of the context, as llama-cpp-python tells them."""
        info = self.session.info
        return ContextParams(
            n_ctx=info.n_ctx,
            n_batch=info.n_batch,
            n_ubatch=info.n_batch,
            n_seq_max=info.n_seq,
            n_threads=info.n_threads,
            n_threads_batch=info.n_threads,
            embeddings=bool(self._arguments["embedding"]),
        )

    @property
    def n_threads(self) -> int:
        """Threads that compute; n_threads_batch is the same."""
        return self.session.info.n_threads

    n_threads_batch = n_threads

    @property
    def lora_path(self) -> Any:
        """As it was given."""
        return self._arguments["lora_path"]

    @property
    def lora_scale(self) -> Any:
        """As it was given."""
        return self._arguments["lora_scale"]
