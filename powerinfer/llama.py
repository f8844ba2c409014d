"""Llama: a model, one context and its text, with the names that users of llama-cpp-python know.

    llm = Llama("model.gguf")
    print(llm("Once upon a time", max_tokens=64)["choices"][0]["text"])
    for chunk in llm.create_chat_completion([{"role": "user", "content": "Hello"}], stream=True):
        print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)

Threads: an object's calls wait for each other; several objects run side by side. A stream that is being
read does not block others between its parts: if another call changed the context meanwhile, it evaluates
its own text again.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _native
from .compat import LATER_INIT, refuse
from .completion import RANDOM_SEEDS, Completions
from .context import Context
from .errors import ArgumentError, ClosedError, ContextError, FormatError, UnsupportedError
from .file import DEMO, ModelFile
from .opening import open_session, refuse_device
from .report import LlamaInfo, LlamaState, Timings
from .sampling import Sampler
from .session import Activation, LayerStep, Model, Predictor, Progress, Session, Sparsity, as_int32

if TYPE_CHECKING:
    from .chat_format import ChatFormat
    from .plan import Plan
    from .tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


class Llama(Completions):
    """A model with one context."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        n_ctx: int | None = None,
        n_batch: int = 512,
        n_threads: int | None = None,
        seed: int | None = None,
        logits_all: bool = False,
        vocab_only: bool = False,
        embedding: bool = False,
        chat_format: str | None = None,
        verbose: bool = True,
        use_mmap: bool = True,
        use_mlock: bool = False,
        type_k: str | int | None = None,
        type_v: str | int | None = None,
        last_n_tokens_size: int = 64,
        vram_budget: float | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        sparsity: Sparsity = "auto",
        threshold: float | None = None,
        activation: Activation | None = None,
        predictor: Predictor = "auto",
        predictor_type: str | None = None,
        context_shift: bool = False,
        n_keep: int | None = None,
        progress: Progress | None = None,
        prompt_progress: Progress | None = None,
        **unsupported: Any,
    ) -> None:
        """Opens a GGUF file, loads the model and makes a context.

        model_path: a file, or "demo" for the model that comes with the package.
        n_gpu_layers: this version computes on the CPU; 0 and -1 are accepted, other values warn.
        n_ctx: most tokens of prompt and answer together; None or 0: what the model was trained with, at
            most 4096.
        n_batch: prompt tokens computed together.
        n_threads: None: physical cores.
        seed: of all random choices; None: another one each time.
        logits_all: keep the logits of every token in `scores`.
        vocab_only: only the tokenizer, of any architecture.
        embedding: allow embed().
        chat_format: the name of one ("chatml", "llama-2", ...) to use instead of the file's template.
        verbose: print notices on stderr; nothing else is ever printed.
        use_mmap: False copies the weights into memory of huge pages: slower to load, faster to read.
        use_mlock: keep the weights in RAM.
        type_k, type_v: "f32", "f16" (default) or "q8_0", or ggml's number of them.
        last_n_tokens_size: tokens that the penalties look back at.
        vram_budget: GiB of GPU memory; None or 0: CPU. This version has no GPU backend.
        plan: a Plan or the path of a saved one; refused if made for another model, or if it uses a GPU.
        sparsity: which neurons of the feed-forward are computed: those that the model's predictor names
            ("predicted"), those that the gate lets through ("exact", the same answers as dense), all
            ("dense"), or the first of these that the model can do ("auto").
        threshold: replaces the file's threshold for the predictor's scores.
        activation: of the feed-forward, instead of what the file says.
        predictor: "mlp" (fc1 and fc2), "sign" (signs of the weights), "none", or "auto" (as the file says).
        predictor_type: weight format that fc1 and fc2 are rewritten in while loading; None: as in the file.
        context_shift: when the context is full, forget the older half of it and go on, instead of stopping.
        n_keep: tokens at the beginning that a context shift keeps; None: the BOS token.
        progress, prompt_progress: called as f(done, total) while loading, and while a prompt is computed.

        Raises FileError, FormatError, UnsupportedError, ArgumentError, OutOfMemoryError; TypeError for
        unknown arguments.
        """
        refuse("Llama()", unsupported, LATER_INIT)
        if plan is None:
            refuse_device(vram_budget or 0)  # before anything takes long
        if n_gpu_layers not in (0, -1):
            warnings.warn(
                f"n_gpu_layers={n_gpu_layers} has no effect: this version computes on the CPU", stacklevel=2
            )
        begin = time.perf_counter()
        self.verbose = verbose
        self._embedding = embedding
        self.prompt_progress = prompt_progress
        self.last_n_tokens_size = last_n_tokens_size
        self._lock = threading.RLock()
        self._closed = False
        self.file = ModelFile(model_path)
        self.model_path = os.fspath(self.file.path)
        self._tokenizer = self._open_tokenizer()
        self._chat_format: ChatFormat | None = None
        if chat_format is not None:
            self._choose_chat_format(chat_format)
        self._model: Model | None = None
        self._context: Context | None = None
        self._sampler: Sampler | None = None  # of sample()
        self.set_seed(seed)
        if not vocab_only:
            self._model = Model(
                self.file,
                activation=activation or "auto",
                predictor=predictor,
                predictor_type=predictor_type,
                use_mmap=use_mmap,
                use_mlock=use_mlock,
                progress=progress,
            )
            session = open_session(
                self._model,
                plan=plan,
                vram_budget=vram_budget,
                n_ctx=n_ctx or 0,
                n_batch=n_batch,
                n_threads=n_threads or 0,
                type_k=type_k,
                type_v=type_v,
                sparsity=sparsity,
            )
            if threshold is not None:
                session.set_threshold(threshold)
            if n_keep is None:
                n_keep = int(self._tokenizer is not None and self._tokenizer.add_bos)
            self._context = Context(session, logits_all=logits_all, shift=context_shift, n_keep=n_keep)
        elif self._tokenizer is None:
            raise FormatError(f"the file {self.model_path} has no tokenizer")
        self._timings = Timings(load_s=time.perf_counter() - begin)

    @classmethod
    def demo(cls, **options: Any) -> Llama:
        """Opens the small model that comes with the package, with the options of Llama."""
        return cls(DEMO, **options)

    # -- parts

    def _open_tokenizer(self) -> Tokenizer | None:
        if "tokenizer.ggml.model" not in self.file.metadata:
            return None
        from .tokenizer import Tokenizer

        tokenizer = Tokenizer.from_metadata(self.file.metadata)
        if tokenizer.notice:
            self._notice(tokenizer.notice)
        return tokenizer

    def _choose_chat_format(self, name: str | None) -> ChatFormat:
        from .chat_format import choose_chat_format

        chosen, notice = choose_chat_format(self.file.metadata, name=name, tokenizer=self._tokenizer)
        if notice:
            self._notice(notice)
        self._chat_format = chosen
        return chosen

    def _notice(self, text: str) -> None:
        if self.verbose:  # the text may quote the file: nothing in it may steer a terminal
            shown = "".join(c if c.isprintable() else "?" for c in text)
            print(f"powerinfer: {shown}", file=sys.stderr)

    def _open(self) -> None:
        if self._closed:
            raise ClosedError(f"this Llama ({self.model_path}) is closed")

    @property
    def _ctx(self) -> Context:
        self._open()
        if self._context is None:
            raise UnsupportedError(
                "this Llama was opened with vocab_only=True: it has no model to compute with"
            )
        return self._context

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary. Raises FormatError if the file has none."""
        if self._tokenizer is None:
            raise FormatError(f"the file {self.model_path} has no tokenizer: give token ids instead of text")
        return self._tokenizer

    @property
    def session(self) -> Session:
        """The session below; sequence 0 is this object's context."""
        return self._ctx.session

    @property
    def _format(self) -> ChatFormat:
        return self._chat_format or self._choose_chat_format(None)

    @property
    def chat_format(self) -> str:
        """Name of the chat format in use."""
        return self._format.name

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
        if model is not None and model.activation in ("relu", "drelu") and not model.can_skip_down:
            notes.append(
                "ffn_down is quantised and not stored transposed: silent neurons' parts of it are read too"
            )
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
        return (
            f"{name}: {model.architecture}, {model.n_parameters / 1e6:,.0f} M parameters, "
            f"{model.n_weight_bytes / 1e6:,.0f} MB, {session.sparsity}; "
            f"context {session.n_ctx}, {session.n_threads} threads, {info.isa}"
        )

    @property
    def timings(self) -> Timings:
        """Where the time of the last generation went."""
        return self._timings

    @property
    def last_step(self) -> list[LayerStep]:
        """What the last step did in each layer: neurons predicted, computed and active, bytes, time."""
        return self.session.last_step

    def set_sparsity(self, sparsity: Sparsity) -> None:
        """Changes how the feed-forward is computed from the next step on. What the context holds stays."""
        self.session.set_sparsity(sparsity)

    def set_threshold(self, threshold: float) -> None:
        """Replaces the threshold of the predictor's scores."""
        self.session.set_threshold(threshold)

    # -- text and tokens

    def tokenize(self, text: bytes | str, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text.

        add_bos: begin with the BOS token if the model wants one.
        special: text that looks like a control token becomes that token.
        """
        return self.tokenizer.encode(text, add_bos=add_bos, special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens, which need not be whole characters.

        prev_tokens: what stands before them (the space before a text's first word depends on that).
        special: show control tokens.
        """
        ids = [int(token) for token in tokens]
        try:
            if prev_tokens is None:
                return self.tokenizer.decode(ids, special=special)
            before = [int(token) for token in prev_tokens]
            whole = self.tokenizer.decode(before + ids, special=special)
            return whole[len(self.tokenizer.decode(before, special=special)) :]
        except IndexError as error:
            raise ArgumentError(str(error)) from None

    # -- the context

    @property
    def n_tokens(self) -> int:
        """Tokens that the context holds."""
        with self._lock:
            return self._ctx.n_tokens

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

    def eval(self, tokens: Sequence[int]) -> None:
        """Computes tokens and appends them to the context.

        Raises ContextError before anything is computed if they do not fit; with context_shift older
        tokens make room.
        """
        with self._lock:
            context = self._ctx
            ids = self._checked(tokens)
            context.make_room(ids.size)
            report, total = self.prompt_progress, int(ids.size)
            context.feed(ids, report=None if report is None else lambda done: report(done, total))

    def embed(self, input: str | Sequence[str], *, normalize: bool = False) -> list[Any]:
        """The final hidden state of every token of a text, [n_tokens, n_embd] as lists of floats; a list of
        texts gives one such result each. There is no pooling. The context is forgotten.

        normalize: vectors of length 1.

        Raises ArgumentError unless the object was made with embedding=True, ContextError for a text that is
        longer than the context.
        """
        if not self._embedding:
            raise ArgumentError("embed() needs Llama(..., embedding=True)")
        if not isinstance(input, str):
            return [self.embed(text, normalize=normalize) for text in input]
        with self._lock:
            ids = self._checked(self.tokenize(input, special=True))
            if ids.size > self.n_ctx():
                raise ContextError(f"the text has {ids.size} tokens, n_ctx is {self.n_ctx()}")
            self.reset()
            session, rows = self.session, []
            try:
                for first in range(0, ids.size, session.info.n_batch):
                    part = ids[first : first + session.info.n_batch]
                    session.feed(part, want_logits=True)
                    rows += [session.hidden(i) for i in range(part.size)]
            finally:
                session.drop()
            vectors = np.stack(rows) if rows else np.empty((0, self.n_embd()), np.float32)
            if normalize:
                vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            result: list[Any] = vectors.tolist()
            return result

    def reset(self) -> None:
        """Forgets the context."""
        with self._lock:
            self._ctx.clear()
            self._sampler = None

    def save_state(self) -> LlamaState:
        """A copy of the context and of the random state."""
        with self._lock:
            return LlamaState(self._ctx.save(), self._random.getstate())

    def load_state(self, state: LlamaState) -> None:
        """Goes back to a saved state, of this or another Llama with the same model and KV types.

        Raises FormatError if it does not fit this model, ContextError if it is longer than n_ctx.
        """
        with self._lock:
            self._ctx.load(state.context)
            self._random.setstate(state.random_state)
            self._sampler = None

    def set_seed(self, seed: int | None) -> None:
        """Restarts the sequence of random choices; None: from anywhere."""
        with self._lock:
            self._random = random.Random(None if seed in RANDOM_SEEDS else seed)
            self._sampler = None

    def _checked(self, tokens: Sequence[int] | Ids) -> Ids:
        ids = as_int32("tokens", tokens)
        n_vocab = self._ctx.n_vocab
        bad = np.flatnonzero((ids < 0) | (ids >= n_vocab))
        if bad.size:
            raise ArgumentError(f"token {ids[bad[0]]} at index {bad[0]} is out of range 0..{n_vocab - 1}")
        return ids

    # -- the end

    def close(self) -> None:
        """Frees context and model. Later calls raise ClosedError."""
        with self._lock:
            self._closed = True
            if self._context is not None:
                self._context.session.close()
            if self._model is not None:
                self._model.close()
            self.file.close()
            self._context = self._model = self._sampler = None

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"Llama({self.model_path!r}, closed)"
        if self._model is None or self._context is None:
            return f"Llama({self.model_path!r}, vocab_only=True)"
        info = self._model.info
        n_ctx = self._context.n_ctx
        return f"Llama({self.model_path!r}, {info.architecture}, {info.n_layer} layers, n_ctx={n_ctx})"


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
