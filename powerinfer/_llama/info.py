"""What a Llama tells about itself: the methods that only look."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._engine import _native
from .._engine.activations import SILENT
from .._engine.arrays import Ids, Logits, as_int32, common_prefix
from .._engine.checks import whole
from .._engine.context import Context
from .._engine.file import ModelFile
from .._engine.report import LlamaInfo, Timings
from .._engine.session import LayerStep, Model, Session
from .._engine.types import LayerExperts
from .._text.logprobs import log_softmax

if TYPE_CHECKING:
    from .._text.tokenizer import Tokenizer


class Info(ABC):
    """What stands first is the part of Llama that these methods need."""

    file: ModelFile
    model_path: str
    _model: Model | None
    _context: Context | None
    _timings: Timings
    _lock: threading.RLock

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The vocabulary. Raises FormatError if the file has none."""

    @property
    @abstractmethod
    def session(self) -> Session:
        """The session below; sequence 0 is this object's context."""

    @property
    @abstractmethod
    def _ctx(self) -> Context: ...

    @abstractmethod
    def _open(self) -> None: ...

    @property
    def metadata(self) -> dict[str, str]:
        """The file's metadata as text; long arrays are cut. `file.metadata` has the full values."""
        values = self.file.metadata
        return {key: _as_text(values[key]) for key in values}

    def n_ctx(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._ctx.n_ctx

    def n_vocab(self) -> int:
        """Number of tokens that there are logits for."""
        return self.tokenizer.n_vocab if self._model is None else self._model.info.n_vocab

    def n_embd(self) -> int:
        """Width of the model."""
        if self._model is not None:
            return self._model.info.n_embd
        architecture = self.file.metadata.get("general.architecture")
        return int(self.file.metadata.get(f"{architecture}.embedding_length", 0))

    @property
    def n_batch(self) -> int:
        """Prompt tokens computed together."""
        return self._ctx.n_batch

    def token_bos(self) -> int:
        """Id of the token that begins a text; -1 if there is none."""
        return -1 if self.tokenizer.bos is None else self.tokenizer.bos

    def token_eos(self) -> int:
        """Id of the token that ends a text; -1 if there is none."""
        return -1 if self.tokenizer.eos is None else self.tokenizer.eos

    def token_nl(self) -> int:
        """Id of a line break; -1 if there is none."""
        return -1 if self.tokenizer.nl is None else self.tokenizer.nl

    def info(self) -> LlamaInfo:
        """What is loaded and how it runs."""
        self._open()
        notes = []
        model = None if self._model is None else self._model.info
        keeps_down = model is not None and not model.can_skip_down
        if model is not None and model.activation in SILENT and keeps_down:
            kept = "of experts is" if model.n_expert else "is quantised and"
            notes.append(f"ffn_down {kept} not stored transposed: silent neurons' parts of it are read too")
        return LlamaInfo(
            file=self.file.info,
            model=model,
            session=None if self._context is None else self._context.session.info,
            isa=_native.isa(),
            build=_native.build_info(),
            notes=tuple(notes),
        )

    def describe(self) -> str:
        """One line for people: the model, its size, and how it runs."""
        info = self.info()
        name = self.file.metadata.get("general.name") or os.path.basename(self.model_path)
        if info.model is None or info.session is None:
            return f"{name}: vocabulary of {self.n_vocab()} tokens"
        model, session = info.model, info.session
        device = (
            f", {session.n_device_bytes / (1 << 30):.2f} GiB on devices" if session.n_device_bytes else ""
        )
        return (
            f"{name}: {model.architecture}, {model.n_parameters / 1e6:,.0f} M parameters, "
            f"{model.n_weight_bytes / 1e6:,.0f} MB, {session.sparsity}; "
            f"context {session.n_ctx}, {session.n_threads} threads, {info.isa}{device}"
        )

    @property
    def timings(self) -> Timings:
        """Where the time of the last generation went."""
        return replace(self._timings)

    @property
    def last_step(self) -> list[LayerStep]:
        """What the last step did in each layer: neurons predicted, computed and active, bytes, time; of a
        mixture where its experts were."""
        return self.session.last_step

    def experts(self) -> list[LayerExperts]:
        """Of a mixture: where the experts of each layer are, how often each was used and found on a device
        since the model was opened, and what was copied there. Raises ArgumentError (a model without
        experts)."""
        return self.session.experts()

    # -- the context

    @property
    def n_tokens(self) -> int:
        """Tokens that the context holds. Setting it forgets those behind: eval() then goes on from there."""
        with self._lock:
            return self._ctx.n_tokens

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        n = whole("n_tokens", n)
        with self._lock:
            self._ctx.shorten(n)

    @property
    def input_ids(self) -> Ids:
        """A copy of the tokens that the context holds."""
        with self._lock:
            ids: Ids = self._ctx.ids.copy()
            return ids

    @property
    def scores(self) -> Logits:
        """Logits [n_tokens, n_vocab] of the tokens held.

        With logits_all those of every token. Without it only the last evaluated row is valid, and every
        row shows it.
        """
        with self._lock:
            return self._ctx.scores

    @property
    def eval_tokens(self) -> deque[int]:
        """input_ids as llama-cpp-python gives them."""
        return deque(self.input_ids.tolist(), maxlen=self.n_ctx())

    @property
    def eval_logits(self) -> deque[list[float]]:
        """scores as llama-cpp-python gives them: of all tokens with logits_all, else of the last."""
        with self._lock:
            all_rows = self._ctx.keeps_all
            return deque(self.scores.tolist() if all_rows else self.scores[-1:].tolist(), self.n_ctx())

    @staticmethod
    def logits_to_logprobs(logits: npt.ArrayLike, axis: int = -1) -> Logits:
        """Natural logarithms of the probabilities that logits stand for."""
        return log_softmax(logits, axis)

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """How many tokens at the beginning are the same."""
        return common_prefix(as_int32("a", a), as_int32("b", b))


def _as_text(value: Any) -> str:
    """A metadata value as text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(np.float32(value))
    if isinstance(value, (str, int)):
        return str(value)
    shown = [item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item) for item in value[:8]]
    return f"[{', '.join(shown)}{', ...' if len(value) > len(shown) else ''}]"
