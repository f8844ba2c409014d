"""What a Llama tells about itself: sizes, times, saved states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arrays import Ids
from .context import ContextState
from .file import FileInfo
from .session import ModelInfo, SessionInfo


@dataclass(kw_only=True)
class Timings:
    """Where the time of the last generation went, in seconds."""

    load_s: float
    """Opening the file and loading the model."""
    n_prompt: int = 0
    n_reused: int = 0
    """Tokens of the prompt that the context held already."""
    prompt_s: float = 0.0
    n_generated: int = 0
    """Tokens computed one by one after the prompt."""
    generate_s: float = 0.0
    """Computing and choosing them."""

    @property
    def prompt_per_s(self) -> float:
        """Prompt tokens per second; 0 before anything was computed."""
        return (self.n_prompt - self.n_reused) / self.prompt_s if self.prompt_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second; 0 before anything was generated."""
        return self.n_generated / self.generate_s if self.generate_s else 0.0


@dataclass(frozen=True, kw_only=True)
class LlamaInfo:
    """What is loaded and how it runs."""

    file: FileInfo
    model: ModelInfo | None
    """None with vocab_only, and so is the session."""
    session: SessionInfo | None
    isa: str
    """Instruction set in use."""
    build: str
    notes: tuple[str, ...]
    """Sentences about what could not be done as one might expect."""

    @property
    def n_ff(self) -> int:
        """Neurons of one layer; 0 with vocab_only."""
        return 0 if self.model is None else self.model.n_ff

    @property
    def n_neurons(self) -> int:
        """Of one layer that a token goes through: n_ff, or those of its experts; 0 with vocab_only."""
        return 0 if self.model is None else self.model.n_neurons

    @property
    def sparsity(self) -> str:
        """Mode in use: "predicted", "exact" or "dense"; "none" with vocab_only."""
        return "none" if self.session is None else self.session.sparsity


@dataclass(frozen=True)
class LlamaState:
    """The tokens held with their K, V and logits, and the random state. Can be pickled."""

    context: ContextState
    random_state: Any
    """None leaves that of the Llama as it is."""
    model: str = ""
    """Which model it is of; "": unknown."""

    @property
    def n_tokens(self) -> int:
        """Tokens held."""
        return int(self.context.ids.size)

    @property
    def n_bytes(self) -> int:
        """Memory taken."""
        return len(self.context.kv) + self.context.rows.nbytes + self.context.ids.nbytes

    @property
    def input_ids(self) -> Ids:
        """The tokens held, under llama-cpp-python's name; so are the next two."""
        return self.context.ids

    @property
    def llama_state(self) -> bytes:
        """K and V."""
        return self.context.kv

    @property
    def llama_state_size(self) -> int:
        """Bytes of K and V."""
        return len(self.context.kv)
