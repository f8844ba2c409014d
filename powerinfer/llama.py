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

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ._engine import checks
from ._engine.arrays import Ids, Logits, as_int32
from ._engine.context import Context
from ._engine.devices import Budget, Devices, Names, choose_for_layers
from ._engine.drafting import Drafter
from ._engine.embedding import Embeddings, pooling_number, pooling_of_file
from ._engine.engine import Engine
from ._engine.file import DEMO, ModelFile, find_model
from ._engine.lora import adapters_of, add_adapters
from ._engine.report import LlamaState, Timings
from ._engine.request import Draft
from ._engine.sampling import Sampler
from ._engine.session import Activation, Model, Predictor, Progress, Session, Sparsity
from ._llama.completions import ChatHandler, Completions
from ._llama.draft_model import DraftModel, check_n_draft
from ._llama.generating import RANDOM_SEEDS, ContextGenerating
from ._llama.info import Info
from ._llama.loader import ContextSize, Loader, batch_of, loading_bar, summary
from ._llama.online import FirstTokens, OnlineStatistics, Placement
from ._llama.options import LlamaOptions, OtherLlamaOptions, spelled
from .compat.arguments import LATER_INIT, NO_EFFECT_INIT, refuse, refuse_other_rope, without_settled
from .compat.params import Params
from .errors import ArgumentError, ArgumentTypeError, ClosedError, FormatError, UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._text.chat_format import ChatFormat
    from .compat.llama_tokenizer import ModelTokenizer
    from .models.plan import Plan

_EMBEDDED_TOGETHER = 8  # texts of one call of embed()


class Llama(Info, ContextGenerating, Completions, Embeddings, Params):
    """A model with one context, for one conversation at a time.

    with Llama("model.gguf") as llm:  # or Llama.demo()
        print(llm("Once upon a time", max_tokens=40)["choices"][0]["text"])
        for part in llm.create_chat_completion([{"role": "user", "content": "Hello"}], stream=True):
            print(part["choices"][0]["delta"].get("content", ""), end="", flush=True)

    Calls from several threads wait for each other. AsyncLlama answers many requests at the same time.
    """

    @spelled(OtherLlamaOptions)
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_gpu_layers: int | None = None,
        n_ctx: ContextSize = None,
        n_batch: int | None = None,
        n_ubatch: int | None = None,
        n_seq: int = 1,
        n_pool: int | None = None,
        n_threads: int | None = None,
        seed: int | None = None,
        logits_all: bool = False,
        vocab_only: bool = False,
        embedding: bool = False,
        pooling_type: int | str | None = None,
        chat_format: str | None = None,
        chat_handler: ChatHandler | None = None,
        draft_model: Draft | Drafter | str | os.PathLike[str] | None = None,
        n_draft: int | None = None,
        lora_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        lora_scale: float | Sequence[float] = 1.0,
        spm_infill: bool = False,
        verbose: bool = True,
        use_mmap: bool = True,
        use_mlock: bool = False,
        type_k: str | int | None = None,
        type_v: str | int | None = None,
        last_n_tokens_size: int = 64,
        vram_budget: Budget = None,
        devices: Names = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        sparsity: Sparsity = "auto",
        threshold: float | None = None,
        activation: Activation | None = None,
        predictor: Predictor = "auto",
        predictor_type: str | None = None,
        online_statistics: bool = False,
        expert_cache: Literal["live", "frozen"] = "live",
        context_shift: bool = False,
        n_keep: int | None = None,
        progress: Progress | None = None,
        prompt_progress: Progress | None = None,
        **unsupported: Unpack[OtherLlamaOptions],
    ) -> None:
        """Opens a GGUF file, loads the model and makes a context.

        model_path: a file, "demo" for the model that comes with the package, or
            hf:OWNER/REPO[:FILE-or-format] for one of the Hugging Face Hub, fetched if it is not here.
        n_gpu_layers: a vram_budget that holds so many layers, or what of it is free; 0 is a vram_budget of 0,
            -1 one of None. Where no GPU can be used it warns, and the CPU computes.
        n_ctx: most tokens of prompt and answer together; None or 0: what the model was trained with, at
            most 4096; "auto": as much of that as a quarter of the memory holds.
        n_batch: prompt tokens computed together; n_ubatch, if smaller, instead. None: 512, of a mixture of
            experts 2048, and up to that where a GPU must be brought weights for each batch, if decoding
            loses less than 5 % by it.
        n_seq: conversations that `session` can hold; this object itself uses one.
        n_pool: positions that all of them share; None: n_ctx.
        n_threads: None: physical cores; beside a GPU one fewer, of four and more, for its driver.
            Of objects that compute at the same time each should have its share.
        seed: of all random choices; None: another one each time.
        logits_all: keep the logits of every token in `scores`. In predicted mode prompts are then computed
            with the predicted neurons only, instead of all, so answers may differ.
        vocab_only: only the tokenizer, of any architecture.
        embedding: allow embed().
        pooling_type: how embed() makes one vector of a text: "none", "mean", "cls", "last" or llama.cpp's
            number of them; None or -1: what the file says, else "none".
        chat_format: the name of one ("chatml", "llama-2", ...) to use instead of the file's template.
        chat_handler: answers conversations instead; called with `llama`, `messages` and the other arguments
            of create_chat_completion().
        draft_model: what guesses tokens that are then checked together: "mtp" the head that the file may have
            for it (NextN layers of GLM, DeepSeek and Qwen files), a path or hf: name a small model of the
            same vocabulary, LlamaPromptLookupDecoding() the text itself.
        n_draft: tokens that a model guesses at a time; None: 3.
        lora_path: a GGUF file with a LoRA adapter, or several; lora_scale: its strength, or one for each.
            If it changes the feed-forward, predictors no longer fit: such a model runs "exact" or "dense".
        spm_infill: with `suffix`, put it before the prefix.
        verbose: print notices on stderr; nothing else is ever printed.
        use_mmap: False copies the weights into memory of huge pages: slower to load, faster to read.
        use_mlock: keep the weights in RAM.
        type_k, type_v: "f32", "f16" (default) or "q8_0", or ggml's number of them.
        last_n_tokens_size: tokens that the penalties look back at.
        vram_budget: GiB of GPU memory to use, or a list with those of each device; 0: the CPU computes
            everything; None: what is free, less a margin, if there is a GPU that can be used.
        devices: the GPUs to use, by name or number ("cuda:1" or 1); "host" is a stand-in for tests.
        plan: a Plan or the path of a saved one, which is followed; refused if made for another model, other
            budgets or other options. Without one it is made here, and `plan` shows it.
        sparsity: which neurons of the feed-forward are computed: those that the model's predictor names
            ("predicted"), those that the gate lets through ("exact", the same answers as dense), all
            ("dense"), or the first of these that the model can do ("auto").
        threshold: replaces the file's threshold for the predictor's scores.
        activation: of the feed-forward, instead of what the file says.
        predictor: "mlp" (fc1 and fc2), "sign" (signs of the weights), "none", or "auto" (as the file says).
        predictor_type: weight format that fc1 and fc2 are rewritten in while loading; None: as in the file.
        online_statistics: count which neurons fire, and between requests bring those to the device that have
            turned out to fire most.
        expert_cache: "live": experts of a mixture that are used more move to the GPU while it runs, so that
            answers of the same prompt may part where sums are rounded otherwise; "frozen": they stay where
            the plan puts them.
        context_shift: when the context is full, forget the older half of it and go on, instead of stopping.
        n_keep: tokens at the beginning that a context shift keeps; None: the BOS token.
        progress, prompt_progress: called as f(done, total) while loading, and while a prompt is computed.

        The others are llama-cpp-python's: what changes no answer here warns, what would change some raises
        UnsupportedError (docs/llama-cpp-python.md has them all).

        Raises FileError, FormatError, UnsupportedError, ArgumentError, OutOfMemoryError; TypeError for
        unknown arguments.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "unsupported")}
        self._arguments = {**arguments, **unsupported}
        refuse("Llama()", without_settled(unsupported, n_threads), LATER_INIT, NO_EFFECT_INIT)
        if expert_cache not in ("live", "frozen"):
            raise ArgumentError(f'expert_cache is {expert_cache!r}, it must be "live" or "frozen"')
        chosen = None
        if not vocab_only and plan is None:
            chosen = choose_for_layers(n_gpu_layers, vram_budget, devices)  # before anything takes long
        begin = time.perf_counter()
        self.verbose = verbose
        self._embedding = embedding
        pooling = pooling_number(pooling_type)
        registered = None
        if chat_handler is None and chat_format is not None:
            from .compat.llama_chat_format import handler_of

            registered = handler_of(chat_format)
        self.chat_handler = chat_handler or registered
        self.draft_model = draft_model
        n_draft = check_n_draft(n_draft)
        self.spm_infill = spm_infill
        self.cache = None
        self._identity: str | None = None
        self.prompt_progress = prompt_progress
        for name, given in (("n_seq", n_seq), ("n_pool", n_pool), ("last_n_tokens_size", last_n_tokens_size)):
            checks.optional_whole(name, given)
        if threshold is not None:
            checks.real("threshold", threshold)
        if not isinstance(draft_model, (str, os.PathLike, Drafter)):
            checks.hook("draft_model", draft_model)
        hooks = {"progress": progress, "prompt_progress": prompt_progress, "chat_handler": chat_handler}
        for name, hook in hooks.items():
            checks.hook(name, hook)
        self.last_n_tokens_size = last_n_tokens_size
        self._lock = threading.RLock()
        self._closed = False
        budget = 0 if chosen is None and not vocab_only and plan is None else vram_budget
        self.file = ModelFile(find_model(model_path, vram_budget=budget, verbose=verbose))
        self.model_path = os.fspath(self.file.path)
        refuse_other_rope(unsupported, self.file.metadata)
        self._pooling = pooling if pooling >= 0 else pooling_of_file(self.file)
        self._tokenizer: ModelTokenizer | None = self._open_tokenizer()
        self._chat_format: ChatFormat | None = None
        if chat_format is not None and registered is None:
            self._choose_chat_format(chat_format)
        self._model: Model | None = None
        self._loader: Loader | None = None
        self._drafter: Drafter | None = None
        self._placement: Placement | None = None
        self._context: Context | None = None
        self._sampler: Sampler | None = None  # of sample()
        self.set_seed(seed)
        if not vocab_only:
            with ExitStack() as undo:  # whoever tries again with less needs the memory of what failed
                undo.callback(self.close)
                with loading_bar(verbose and progress is None, f"loading {self.file.path.name}") as bar:
                    self._model = Model(
                        self.file,
                        activation=activation or "auto",
                        predictor=predictor,
                        predictor_type=predictor_type,
                        use_mmap=use_mmap,
                        use_mlock=use_mlock,
                        progress=progress or bar,
                    )
                if lora_path is not None:
                    self._adapt()
                n_beside = _EMBEDDED_TOGETHER - 1 if embedding and n_seq == 1 and plan is None else 0
                shape: dict[str, Any] = {
                    "n_ctx": n_ctx or 0,
                    "n_batch": batch_of(n_batch, n_ubatch),
                    "n_seq": n_seq + n_beside,
                    "n_pool": n_pool or 0,
                    "n_threads": n_threads or 0,
                    "type_k": type_k,
                    "type_v": type_v,
                    "sparsity": sparsity,
                    "live_experts": expert_cache == "live",
                }
                draft = None
                if isinstance(draft_model, (str, os.PathLike)):
                    if online_statistics:
                        raise UnsupportedError("online_statistics with a model that drafts is not supported")
                    draft = DraftModel(draft_model, self.file, self._model, activation=activation or "auto")
                    undo.callback(draft.close)
                    chosen = None if chosen is None else draft.reserve(chosen, **shape)
                self._loader = Loader(
                    self._model,
                    devices=chosen,
                    plan=plan,
                    names=devices,
                    vram_budget=vram_budget,
                    n_gpu_layers=n_gpu_layers if vram_budget is None and (n_gpu_layers or 0) > 0 else None,
                    online=online_statistics,
                    say=self._notice,
                    **shape,
                    keep_hidden=draft is not None and draft.is_head,
                    n_guesses=0 if draft_model is None else min(15, n_draft * n_seq),
                )
                with loading_bar(verbose, "bringing weights to the GPU") as bar:
                    session = self._loader.open(bar)
                undo.callback(session.close)
                if draft is not None:
                    self._drafter = draft.open(session, n_draft, self._notice, **shape)
                if online_statistics:
                    self._placement = OnlineStatistics(self._loader)
                elif self._loader.plan is not None:
                    self._placement = FirstTokens(self._loader)
                if threshold is not None:
                    session.set_threshold(threshold)
                if n_keep is None:
                    n_keep = int(self._tokenizer is not None and self._tokenizer.add_bos)
                n_own = n_beside + 1  # the other sequences are the caller's
                engine = Engine(
                    session, n_seq=n_own, max_running=n_own, n_keep=n_keep if context_shift else None
                )
                engine.saw = None if self._placement is None else self._placement.saw
                self._context = Context(engine, logits_all=logits_all)
                undo.pop_all()
        elif self._tokenizer is None:
            raise FormatError(f"the file {self.model_path} has no tokenizer")
        self._timings = Timings(load_s=time.perf_counter() - begin)

    @classmethod
    @spelled(LlamaOptions)
    def demo(cls, **options: Unpack[LlamaOptions]) -> Llama:
        """Opens the small model that comes with the package, with the options of Llama."""
        return cls(DEMO, **options)

    @classmethod
    @spelled(LlamaOptions)
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        **options: Unpack[LlamaOptions],
    ) -> Llama:
        """Fetches a model from the Hugging Face Hub and opens it with the options of Llama.

        The arguments and errors are those of powerinfer.hub.download(). local_dir_use_symlinks has no
        effect: today's huggingface_hub makes no links there.
        """
        from .hub import download

        del local_dir_use_symlinks
        if options.get("plan") is None:  # what cannot be is said before anything is fetched
            choose_for_layers(options.get("n_gpu_layers"), options.get("vram_budget"), options.get("devices"))
        path = download(
            repo_id,
            filename,
            additional_files,
            local_dir=local_dir,
            cache_dir=cache_dir,
            revision=revision,
            token=token,
            verbose=options.get("verbose", True),
        )
        return cls(path, **options)

    def __getstate__(self) -> dict[str, Any]:
        """The arguments: a copy opens the model again, with an empty context."""
        self._open()
        return self._arguments

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        self.__init__(**arguments)  # type: ignore[misc]

    # -- parts

    def _open_tokenizer(self) -> ModelTokenizer | None:
        if "tokenizer.ggml.model" not in self.file.metadata:
            return None
        from .compat.llama_tokenizer import ModelTokenizer

        tokenizer = ModelTokenizer.from_metadata(self.file.metadata)
        if tokenizer.notice:
            self._notice(tokenizer.notice)
        return tokenizer

    def _adapters(self) -> list[tuple[str | os.PathLike[str], float]]:
        return adapters_of(self._arguments["lora_path"], self._arguments["lora_scale"])

    def _adapt(self) -> None:
        assert self._model is not None
        notice = add_adapters(self._model, self._adapters())
        if notice:
            self._notice(notice)

    def _choose_chat_format(self, name: str | None) -> ChatFormat:
        from ._text.chat_format import choose_chat_format

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

    def _open_beside(self, devices: Devices | None) -> tuple[Session, Loader]:
        """Another session of the same model and options, on other devices, and what has its plan."""
        assert self._loader is not None
        loader = self._loader.beside(devices)
        with loading_bar(self.verbose, "bringing weights to the GPU") as bar:
            session = loader.open(bar)
        if self._arguments["threshold"] is not None:
            session.set_threshold(self._arguments["threshold"])
        return session, loader

    @property
    def _ctx(self) -> Context:
        self._open()
        if self._context is None:
            raise UnsupportedError(
                "this Llama was opened with vocab_only=True: it has no model to compute with"
            )
        return self._context

    @property
    def tokenizer(self) -> ModelTokenizer:
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

    def _between_requests(self) -> None:
        placement = self._placement
        if placement is not None and placement.is_due(self.session):
            with self._lock:
                engine = self._ctx.engine
                engine.suspend()
                if placement.improve(engine) and self.plan is not None:
                    self._notice(f"neurons were moved: {summary(self.plan)}")

    @property
    def plan(self) -> Plan | None:
        """Where everything of the model lies; None if the CPU computes everything and no plan was given."""
        return None if self._loader is None else self._loader.plan

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
        checks.text("the text", text)
        return self.tokenizer.encode(text, add_bos=add_bos, special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens, which need not be whole characters.

        prev_tokens: what stands before them (the space before a text's first word depends on that).
        special: show control tokens.
        """
        return self.tokenizer().detokenize(tokens, prev_tokens, special)

    # -- the context

    def eval(self, tokens: Sequence[int]) -> None:
        """Computes tokens and appends them to the context.

        Raises ContextError before anything is computed if they do not fit; with context_shift older
        tokens make room.
        """
        with self._lock:
            self._ctx.append(self._checked(tokens), report=self.prompt_progress)

    def _score(self, ids: Ids, seen: Callable[[int, Logits], None]) -> None:
        self._ctx.score(ids, seen)

    @property
    def _shifts(self) -> bool:
        return self._ctx.shift

    def reset(self) -> None:
        """Forgets the context."""
        with self._lock:
            self._ctx.clear()
            self._sampler = None

    def save_state(self) -> LlamaState:
        """A copy of the context and of the random state."""
        with self._lock:
            return LlamaState(self._ctx.save(), self._random.getstate(), self._model_identity())

    def load_state(self, state: LlamaState) -> None:
        """Goes back to a saved state, of this or another Llama with the same model and KV types.

        Raises FormatError if it does not fit this model, ContextError if it is longer than n_ctx.
        """
        if not isinstance(state, LlamaState):
            raise ArgumentTypeError(f"the state is {type(state).__name__}, it must be what save_state() gave")
        with self._lock:
            if state.model not in ("", self._model_identity()):
                raise FormatError("the saved state is of another model")
            self._ctx.load(state.context)
            if state.random_state is not None:
                self._random.setstate(state.random_state)
            self._sampler = None

    def _model_identity(self) -> str:
        if self._identity is None:
            from .models.plan.plan import identify

            state = hashlib.sha256(repr(identify(self._ctx.session.model)).encode())
            for path, scale in self._adapters():
                state.update(str(scale).encode())
                state.update(Path(path).read_bytes())
            self._identity = state.hexdigest()
        return self._identity

    def set_seed(self, seed: int | None) -> None:
        """Restarts the sequence of random choices; None: from anywhere."""
        checks.optional_whole("seed", seed)
        with self._lock:
            self._random = Random(None if seed in RANDOM_SEEDS else seed)
            self._sampler = None

    def _checked(self, tokens: Sequence[int] | Ids) -> Ids:
        ids = as_int32("tokens", tokens)
        n_vocab = self._ctx.n_vocab
        bad = np.flatnonzero((ids < 0) | (ids >= n_vocab))
        if bad.size:
            raise ArgumentError(f"token {ids[bad[0]]} at index {bad[0]} is out of range 0..{n_vocab - 1}")
        return ids

    @property
    def _draft(self) -> Draft | Drafter | None:
        """What guesses tokens."""
        draft = self.draft_model
        if not isinstance(draft, (str, os.PathLike)):
            return draft
        if self._drafter is None:
            raise ArgumentError(
                f"draft_model is {draft!r}: a model that drafts is opened with Llama's arguments"
            )
        return self._drafter

    @property
    def drafted(self) -> tuple[int, int]:
        """How many tokens were guessed and checked so far, and how many of them were right."""
        totals = self._ctx.engine.totals
        return totals["drafted"], totals["accepted"]

    # -- the end

    def close(self) -> None:
        """Frees context and model. What is under way in other threads, and later calls, raise ClosedError."""
        self._closed = True
        if (context := self._context) is not None:
            context.engine.close()
        with self._lock:
            if self._context is not None:
                self._context.session.close()
            if self._drafter is not None:
                self._drafter.close()
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
