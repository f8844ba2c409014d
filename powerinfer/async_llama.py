"""AsyncLlama: one model and many conversations at once, for asyncio programs.

    async with AsyncLlama("model.gguf", n_parallel=8) as llm:
        answers = await asyncio.gather(*(llm.create_completion(p, max_tokens=64) for p in prompts))
        async for chunk in await llm.create_chat_completion(messages, stream=True): ...

What is under way at the same time is computed together (scheduler.py). Cancelling a task, or leaving a
stream before its end, frees its place at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ._engine import checks, machine
from ._engine.context import Context
from ._engine.devices import Devices, choose_for_layers
from ._engine.embedding import POOLING, pooling_number, pooling_of_file
from ._engine.engine import Engine
from ._engine.file import ModelFile, find_model
from ._engine.replicas import Replicas, check_options, options_of, threads_of_each
from ._engine.replicas import shares as share_out
from ._engine.scheduler import Scheduler, SchedulerStats
from ._engine.session import Session
from ._engine.turn import give_way
from ._engine.warm_up import warm_up as warm_up_session
from ._llama.async_stream import AsyncStream, Chunk, Chunks, Parts, Pumped
from ._llama.async_vectors import AsyncVectors
from ._llama.completions import check_best_of, check_count
from ._llama.conversations import pool_on
from ._llama.generating import nth_seed
from ._llama.loader import Loader
from ._llama.online import FirstTokens, Placement
from ._llama.options import AsyncChatOptions, AsyncCompletionOptions, AsyncLlamaOptions, spelled
from ._llama.served import Reads, Served
from ._llama.usage import say_why, timings, usage
from ._text.answer import best
from ._text.grammars import Grammars
from .errors import ArgumentError, ClosedError
from .llama import Llama

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .models.plan import Plan

__all__ = ["AsyncLlama", "AsyncStream"]

T = TypeVar("T")
Prompt = str | bytes | Sequence[int]

_HELD = 16  # sequences beyond those under way, whose beginnings later prompts may share
_THREADS = "powerinfer-request"
_PATIENCE = 64  # how much rarer neurons move while somebody waits
_MOST_POSITIONS = 1 << 24  # that a session takes
_SINGLE = ("logits_all", "vocab_only", "n_seq")

_SHORT = 512  # characters and tokens of a request that is made ready sooner than a thread wakes up
_EASY = frozenset(
    [
        *(
            "n",
            "best_of",
            "timeout_s",
            "model",
            "max_tokens",
            "seed",
            "stop",
            "stop_token_ids",
            "min_tokens",
            "ignore_eos",
            "return_token_ids",
        ),
        *("temperature", "temp", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty"),
        *("presence_penalty", "frequency_penalty"),
    ]
)
"""Options with which nothing is computed, looked up in the vocabulary or asked of the caller's functions."""


class AsyncLlama(AsyncVectors):
    """A model that answers many requests at the same time, for asyncio programs.

    async with AsyncLlama("model.gguf", n_parallel=8) as llm:
        answers = await asyncio.gather(*(llm.create_completion(p, max_tokens=64) for p in prompts))
        async for part in await llm.create_chat_completion(messages, stream=True):
            print(part["choices"][0]["delta"].get("content", ""), end="")

    Requests that are open at the same time are computed together. Cancelling a task, or leaving a stream
    before its end, frees its place at once. Coroutines belong to one event loop at a time; everything else
    may be called from any thread.
    """

    @spelled(AsyncLlamaOptions)
    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_parallel: int = 8,
        max_waiting: int = 64,
        n_ctx: int | Literal["auto"] | None = None,
        n_pool: int | None = None,
        prompt_part: int | None = None,
        pooling: str | int | None = None,
        replicas: int = 1,
        warm_up: bool = False,
        **options: Unpack[AsyncLlamaOptions],
    ) -> None:
        """Opens and loads, which takes as long as it does for Llama.

        n_parallel: conversations that are computed at the same time.
        max_waiting: requests that wait for a place; one more raises BusyError.
        n_ctx: most tokens of one conversation, as in Llama.
        n_pool: tokens that all conversations together can hold; None: n_ctx for each of n_parallel; on a GPU
            as much of that as its budget holds beside the whole model, for two of them at least. Where it
            does not suffice, some wait.
        prompt_part: tokens of prompts that are read in one step while others generate; None: as many as make
            others' tokens take at most twice as long, or on average where no part is so short. More reads
            prompts sooner, less makes others pause for a shorter time.
        pooling: how embed() makes one vector of a text: "mean", "last", "cls", or "none" (one per token);
            None: as the file says, else "mean".
        replicas: sessions over which requests are spread, each with all of the model: on GPUs of its own (of
            those that devices and vram_budget name, dealt out in their order; a single number is the budget
            of each), and with its share of n_threads; where that is not given each leaves one of four cores
            and more to its GPU's driver. n_parallel, max_waiting and n_pool are of each.
        warm_up: compute a step of each kind before the first request comes, where a GPU has all of the model:
            its driver loads code when it is first used, for which first tokens would wait. Takes some tenths
            of a second.
        options: of Llama; those that belong to a single context (logits_all, n_seq) are refused.
            draft_model is asked where so few generate that its guesses are free. With online_statistics
            neurons move when nothing is under way, and on a busy machine now and then also while others
            wait. A plan must have n_parallel sequences or more; those beyond hold what later prompts may
            share.
        """
        given: dict[str, Any] = {**options}
        for name in _SINGLE:
            if given.pop(name, None):
                raise ArgumentError(f"AsyncLlama has no {name}: its context is many conversations")
        checks.at_least("n_parallel", n_parallel, 1)
        checks.at_least("replicas", replicas, 1)
        checks.at_least("max_waiting", max_waiting, 0)
        if prompt_part is not None:
            checks.at_least("prompt_part", prompt_part, 1)
        if not isinstance(n_ctx, str):
            checks.optional_whole("n_ctx", n_ctx)
        shares: list[Devices | None] = []
        if replicas > 1:
            check_options(given)
            on_cpu = given.get("n_gpu_layers") == 0 and given.get("vram_budget") is None
            shares = share_out(replicas, 0 if on_cpu else given.get("vram_budget"), given.get("devices"))
            given |= options_of(shares[0])
            given["n_threads"] = threads_of_each(replicas, given.get("n_threads"), shares[0])
        budget = given.get("vram_budget") if may_use_gpu(given) else 0
        chosen = None
        if given.get("plan") is None:  # what cannot be is said before anything is fetched
            names = ("n_gpu_layers", "vram_budget", "devices")
            chosen = choose_for_layers(*(given.get(name) for name in names))
        model_path = find_model(model_path, vram_budget=budget, verbose=given.get("verbose", True))
        has_plan = given.get("plan") is not None
        if n_pool is None and not has_plan and not isinstance(n_ctx, str):
            each = n_ctx or _trained_ctx(model_path)
            wanted = each * n_parallel
            if may_use_gpu(given):
                wanted = pool_on(chosen, model_path, each, n_parallel, given)
            n_pool = max(each, min(wanted, _MOST_POSITIONS))
        self.n_parallel = n_parallel * replicas
        """Of all replicas."""
        self.max_waiting = max_waiting
        self.llama = Llama(
            model_path,
            n_ctx=n_ctx,
            n_seq=1 if has_plan else n_parallel + _HELD,  # a plan says itself how many
            n_pool=n_pool,
            embedding=True,
            **given,
        )
        """The object below, for tokenize(), info() and the like. Its own context must not be used."""
        if self.llama.session.info.n_seq < n_parallel:
            n_seq = self.llama.session.info.n_seq
            self.llama.close()
            raise ArgumentError(f"n_parallel is {n_parallel}, and the plan has {n_seq} sequences")
        kind = pooling_number(pooling)
        self.pooling = kind if kind >= 0 else pooling_of_file(self.llama.file) or POOLING["mean"]

        def scheduler_of(session: Session, placement: Placement | None) -> Scheduler:
            if warm_up:
                warm_up_session(session, n_parallel)
            engine = Engine(
                session,
                max_running=n_parallel,
                max_waiting=max_waiting,
                prompt_part=prompt_part,
                n_keep=self.llama._ctx.engine.n_keep,
            )
            engine.saw = None if placement is None else placement.saw
            improve = None if placement is None else partial(_improve, engine, placement)
            return Scheduler(engine, draft=self.llama._draft, improve=improve)

        self._loaders: list[Loader] = []  # of the replicas after the first
        all_ = [scheduler_of(self.llama.session, self.llama._placement)]
        try:
            for share in shares[1:]:
                session, loader = self.llama._open_beside(share)
                self._loaders.append(loader)
                all_.append(scheduler_of(session, None if loader.plan is None else FirstTokens(loader)))
        except BaseException:
            _close(all_, self.llama)
            raise
        self.llama._context = Context(all_[0].engine)
        self.scheduler: Scheduler | Replicas = all_[0] if replicas == 1 else Replicas(all_)
        self._preparing = threading.Semaphore(2)
        self._grammars: Grammars | None = None
        if self.llama._tokenizer is not None:
            self._grammars = Grammars(self.llama.tokenizer, most=replicas * (n_parallel + max_waiting))
        # A request has a thread, which makes its prompt, and waits for tokens where it is no stream. As many
        # may wait for their grammars.
        self._threads = ThreadPoolExecutor(
            2 * replicas * (n_parallel + max_waiting) + 4, thread_name_prefix=_THREADS
        )
        self._requests: set[Served] = set()
        self._lock = threading.Lock()
        self._closed = False
        # Also where nobody calls close(): the scheduler's thread would keep the model for ever.
        self._finalizer = weakref.finalize(self, _free, all_, self._threads, self._grammars, self.llama)
        self._finalizer.atexit = False

    @classmethod
    def demo(cls, **options: Any) -> AsyncLlama:
        """Opens the small model that comes with the package."""
        return cls("demo", **options)

    # -- text

    @overload
    async def create_completion(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        stream: Literal[False] = False,
        **options: Unpack[AsyncCompletionOptions],
    ) -> Chunk: ...

    @overload
    async def create_completion(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        stream: Literal[True],
        **options: Unpack[AsyncCompletionOptions],
    ) -> AsyncStream: ...

    @overload
    async def create_completion(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        stream: bool,
        **options: Unpack[AsyncCompletionOptions],
    ) -> Chunk | AsyncStream: ...

    @spelled(AsyncCompletionOptions)
    async def create_completion(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        stream: bool = False,
        **options: Unpack[AsyncCompletionOptions],
    ) -> Chunk | AsyncStream:
        """Continues a prompt, or each of a list of prompts.

        prompt: text, token ids, or a list of either. All are computed together.
        stream: return an AsyncStream of parts instead of the whole.
        options: those of Llama.create_completion(), and timeout_s. After so many seconds an answer ends as
            if by max_tokens; None: no limit.

        Returns a dict in OpenAI's shape, with an entry of "choices" for each prompt and answer, and "timings"
        as llama-server has them: cache_n, prompt_n and predicted_n tokens, and for the last two _ms,
        _per_token_ms and _per_second. Of several answers they are the first prompt's and the whole time. A
        stream has them in each answer's last part.

        Raises what Llama.create_completion() raises, BusyError if too many requests wait, DeadlineError if
        the time is over before an answer has begun, ClosedError.
        """
        given: dict[str, Any] = {**options}
        at_once = stream and self.begins_at_once(prompt, given)
        prompts = list(prompt) if checks.are_several(prompt) else [prompt]
        best_of = given.pop("best_of", None)
        return await self._create(Served.create_completion, prompts, stream, given, best_of, at_once=at_once)

    def begins_at_once(self, prompt: Prompt | Sequence[Prompt], options: Mapping[str, Any]) -> bool:
        """Whether create_completion() with these waits for nothing before it returns a stream."""
        sizes = (_size(each) for each in (prompt, options.get("stop"), options.get("stop_token_ids")))
        if checks.are_several(prompt) or sum(sizes) > _SHORT:
            return False
        is_one = options.get("n") in (None, 1) and options.get("best_of") in (None, 1)
        return is_one and all(name in _EASY for name, value in options.items() if value is not None)

    @overload
    async def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        **options: Unpack[AsyncChatOptions],
    ) -> Chunk: ...

    @overload
    async def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[True],
        **options: Unpack[AsyncChatOptions],
    ) -> AsyncStream: ...

    @overload
    async def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: bool,
        **options: Unpack[AsyncChatOptions],
    ) -> Chunk | AsyncStream: ...

    @spelled(AsyncChatOptions)
    async def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: bool = False,
        **options: Unpack[AsyncChatOptions],
    ) -> Chunk | AsyncStream:
        """Answers a conversation.

        messages: dicts with "role" and "content".
        stream: return an AsyncStream of parts instead of the whole.
        options: those of Llama.create_chat_completion(), and timeout_s as in create_completion().

        Returns a dict in OpenAI's shape: the answer is result["choices"][0]["message"]. Raises what
        create_completion() raises.
        """
        return await self._create(Served.create_chat_completion, [messages], stream, {**options})

    async def _create(
        self,
        method: Callable[..., Any],
        given: Sequence[Any],
        stream: bool,
        options: dict[str, Any],
        best_of: int | None = None,
        *,
        at_once: bool = False,
    ) -> Chunk | AsyncStream:
        """n answers to each of what is given, computed together. at_once: begins_at_once()."""
        options = dict(options)
        n, timeout_s = check_count("n", options.pop("n", None)), options.pop("timeout_s", None)
        n_made = n if best_of is None else check_best_of(best_of, n, stream)
        tell = options.get("logprobs") is not None
        if n_made > n and not tell:
            options["logprobs"] = 0
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        limit = checks.optional_whole("max_tokens", options.get("max_tokens"))
        limit = 0 if options.get("prompt_only") else None if limit is None or limit <= 0 else limit
        has_maker = method is Served.create_chat_completion and self.llama.chat_handler is not None
        reads: Reads = "ready" if stream else "whole"
        if has_maker:  # a handler of the user's may wait for whatever it likes
            reads = "each"
        preparing = threading.Semaphore() if at_once else None  # others may hold that of all for long
        calls = []
        for what in given:
            for i in range(n_made):
                own = options | {"stream": stream}
                if i:
                    own.pop("prompt_logprobs", None)
                if options.get("seed") is not None:
                    own["seed"] = nth_seed(options["seed"], i)
                request = self._begin(
                    limit=limit, deadline=deadline, is_first=not i, reads=reads, preparing=preparing
                )
                calls.append((request, what, own))
        requests = [request for request, _, _ in calls]

        def begin(request: Served, what: Any, own: dict[str, Any]) -> Any:
            give_way()
            try:
                result = method(request, what, **own)
                if not stream:
                    say_why(request, result)
                return result
            finally:
                if not stream:
                    self._end(request)

        try:
            if at_once:
                results = [begin(*call) for call in calls]
            else:
                results = await asyncio.gather(*(self._in_thread(begin, *call) for call in calls))
        except BaseException:
            for request in requests:
                self._end(request)
            raise
        if stream:
            made = [Pumped(iter(chunks)) for chunks in results] if has_maker else results
            return self._stream(requests, made)
        if n_made > n:
            groups = [slice(i, i + n_made) for i in range(0, len(results), n_made)]
            echo = bool(options.get("echo"))
            results = [best(results[at], n, echo=echo, tell=tell) for at in groups]
        choices = [choice for result in results for choice in result["choices"]]
        numbered = [choice | {"index": i} for i, choice in enumerate(choices)]
        return {
            **results[0],
            "choices": numbered,
            "usage": usage(requests),
            "timings": timings(requests),
        }

    def _stream(self, requests: list[Served], answers: list[Chunks]) -> AsyncStream:
        """The parts of all answers in one stream."""
        for chunks in answers:
            if isinstance(chunks, Pumped):
                self._submit(chunks.run)
        return AsyncStream(Parts(requests, answers, self._end))

    # -- tokens

    async def tokenize(self, text: str, *, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text, as Llama.tokenize."""

        def ids() -> list[int]:
            with self._preparing:
                return self.llama.tokenize(text, add_bos, special)

        return await self._in_thread(ids)

    async def chat_tokens(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The prompt of a conversation as token ids, as Llama.chat_tokens."""

        def make() -> list[int]:
            with self._preparing:
                return self.llama.chat_tokens(messages, **options)

        return await self._in_thread(make)

    async def detokenize(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of tokens. Bytes that are no whole character become U+FFFD."""
        data = await self._in_thread(lambda: self.llama.detokenize(tokens, special=special))
        return data.decode("utf-8", "replace")

    # -- the object

    @property
    def plans(self) -> list[Plan | None]:
        """Of each replica, as Llama.plan."""
        return [self.llama.plan, *(loader.plan for loader in self._loaders)]

    def stats(self) -> SchedulerStats:
        """What is under way, and counts since the object was made."""
        return self.scheduler.stats()

    def _begin(
        self,
        *,
        limit: int | None = None,
        deadline: float | None = None,
        is_first: bool = True,
        reads: Reads = "each",
        preparing: threading.Semaphore | None = None,
    ) -> Served:
        with self._lock:
            if self._closed:
                raise ClosedError("this AsyncLlama is closed")
            request = Served(
                self.llama,
                self.scheduler,
                limit=limit,
                grammars=self._grammars,
                preparing=preparing or self._preparing,
                deadline=deadline,
                is_first=is_first,
                reads=reads,
            )
            self._requests.add(request)
            return request

    def _end(self, request: Served) -> None:
        request.cancel()
        with self._lock:
            self._requests.discard(request)

    def _submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Calls it in a thread. What nobody has begun when the object is closed still runs, and ends soon."""
        with self._lock:
            if self._closed:
                raise ClosedError("this AsyncLlama is closed")
            self.scheduler.check_process()
            return self._threads.submit(function, *arguments)

    def _in_thread(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._submit(function, *arguments))

    def begin_close(self, *, grace_s: float = 0.0) -> None:
        """No new requests from now on; those that wait end, those under way have grace_s seconds."""
        self.scheduler.begin_close(grace_s=grace_s)

    def close(self, *, grace_s: float = 0.0) -> None:
        """Ends what is under way, after grace_s seconds at most, and frees the model. Blocks until then."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.scheduler.close(grace_s=grace_s)
        with self._lock:
            requests = list(self._requests)
        for request in requests:
            request.cancel()
        self._finalizer()

    async def aclose(self, *, grace_s: float = 0.0) -> None:
        """close() without blocking the event loop."""
        await asyncio.get_running_loop().run_in_executor(None, lambda: self.close(grace_s=grace_s))

    async def __aenter__(self) -> AsyncLlama:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"AsyncLlama({self.llama!r}, n_parallel={self.n_parallel})"


def _size(value: Any) -> int:
    """Characters and tokens of an argument; too many of what is none of the usual kinds, an array say."""
    if value is None:
        return 0
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, (list, tuple)) or len(value) > _SHORT:
        return _SHORT + 1
    return sum(_size(each) if isinstance(each, (str, bytes)) else 1 for each in value)


def _close(all_: Sequence[Scheduler], llama: Llama) -> None:
    """Ends schedulers of a Llama's model, and frees it."""
    for scheduler in all_:
        scheduler.begin_close()
    for scheduler in all_:
        scheduler.close()
    for scheduler in all_[1:]:  # the first one's is the Llama's
        scheduler.engine.session.close()
    llama.close()


def _free(
    all_: Sequence[Scheduler], threads: ThreadPoolExecutor, grammars: Grammars | None, llama: Llama
) -> None:
    """What an AsyncLlama has. May be called in any thread."""
    for scheduler in all_:
        scheduler.close()
    if grammars is not None:
        grammars.close()
    # Those that wait for a thread as well: somebody waits for them. In one of them nobody does.
    is_own = threading.current_thread().name.startswith(_THREADS)
    threads.shutdown(wait=not is_own)
    _close(all_, llama)


def _improve(engine: Engine, placement: Placement, is_idle: bool) -> Callable[[], object] | None:
    """Neurons that fire often come to the device: what opens the session that has them there."""
    plan = placement.better_plan(engine.session, patience=1 if is_idle else _PATIENCE)
    return None if plan is None else lambda: placement.move(engine, plan)


def _trained_ctx(model_path: str | os.PathLike[str]) -> int:
    """The context that Llama takes where none is given."""
    file = ModelFile(model_path)
    try:
        architecture = file.metadata.get("general.architecture")
        value = file.metadata.get(f"{architecture}.context_length")
        return min(int(value), 4096) if isinstance(value, int) and value > 0 else 4096
    finally:
        file.close()


def may_use_gpu(options: Mapping[str, Any]) -> bool:
    if options.get("vram_budget") is not None or options.get("devices") is not None:
        return options.get("vram_budget") != 0
    return options.get("n_gpu_layers") != 0 and bool(machine.gpus().gpus)
