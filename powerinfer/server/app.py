"""The endpoints."""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..async_llama import AsyncLlama, AsyncStream
from . import llama_server, messages, ollama, ranking, responses
from .arguments import CONTINUING, arguments_of, is_of_texts
from .aside import aside, aside_if
from .dialects import Dialects, error_model, path_of
from .direct import Direct
from .events import EVENTS, EventStream, Gone, openai_events, unless_gone
from .guard import OPEN, Guard, LastResort
from .json_body import Route as JsonRoute
from .lenient import HEADER, lenient
from .live import engine_view
from .metrics import Metrics
from .models import USED, Models, Releasing, ServedModel, of_one
from .problems import Problem, json_response, on_http, on_invalid, on_problem, problem_of
from .schemas import (
    PART,
    ChatRequest,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    EmbeddingRequest,
    EngineView,
    Generate,
    Health,
    TokenizeAnswer,
    TokenizeRequest,
)
from .settings import Settings
from .vectors import check_size, vector_response

_log = logging.getLogger("uvicorn.error")

PAGE = Path(__file__).parent / "page"

_SLACK = 16  # open requests beyond those that compute or wait: their clients read slowly

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

_ERRORS = {
    400: "The request cannot be fulfilled as it is.",
    401: "The API key is missing or wrong.",
    403: "The host name is not allowed.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    422: "A field has the wrong type or value.",
    429: "Too many requests; Retry-After says when to try again.",
    500: "The engine failed.",
    503: "The server is shutting down, the model is not loaded, or the time for the request is over.",
}
_READ = (401, 403)
_FIND = (401, 403, 404, 422)
_LOOK = (*_FIND, 503)


def _errors(path: str, statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """For the description of an endpoint."""
    kind = error_model(path)
    return {status: {"model": kind, "description": _ERRORS[status]} for status in statuses}


class Endpoints:
    """What the routes call."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self.models = models
        self.settings = settings
        self.metrics = Metrics()

    async def use(self, request: Request, name: str | None, lora: Sequence[Any] | None = None) -> ServedModel:
        """The model that a request wants, open until its answer is written; always the same for one."""
        used: list[ServedModel] = request.scope[USED]
        if not used:
            own = None if lora is None else [(each.id, each.scale) for each in lora]
            if not self.models.take_open(name, own, used):
                await unless_gone(request, self.models.take(name, own, used))
        return used[0]

    def name(self, request: Request) -> str:
        """Of the model that a request uses."""
        return self.models.name_of(request.scope[USED][0])

    # -- answers

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return self._respond(request, body, await self.run_chat(request, body))

    async def completion(self, request: Request, body: CompletionRequest) -> Response:
        body.suffix = body.suffix or None  # clients send an empty one that have none
        return self._respond(request, body, await self.run_completion(request, body))

    async def run_chat(self, request: Request, body: ChatRequest) -> dict[str, Any] | AsyncStream:
        """What all protocols' chats become. Raises Problem, Gone and what AsyncLlama raises."""
        options = arguments_of(body, self.settings)
        self._check_count(body.n or 1)
        model = await self.use(request, body.model, body.lora)
        messages = await aside_if(len(body.messages) > PART, self._messages, model, body)
        return await self._run(
            request,
            body,
            lambda stream: model.llm.create_chat_completion(
                messages, stream=stream, model=self.name(request), **options
            ),
        )

    async def run_completion(self, request: Request, body: CompletionRequest) -> dict[str, Any] | AsyncStream:
        """The same for texts that are to go on."""
        options = arguments_of(body, self.settings)
        # OpenAI's default, 16 tokens, surprises everybody; this is llama-server's: as many as fit.
        n_prompts = len(body.prompt) if is_of_texts(body) else 1
        self._check_count(n_prompts * max(body.n or 1, body.best_of or 1))
        model = await self.use(request, body.model, body.lora)
        self.check_length(model, body.prompt)
        return await self._run(
            request,
            body,
            lambda stream: model.llm.create_completion(
                body.prompt, stream=stream, model=self.name(request), **options
            ),
            at_once=bool(body.stream) and model.llm.begins_at_once(body.prompt, options),
        )

    async def prompt_ids(self, request: Request, body: ChatRequest) -> list[int]:
        """The prompt of a chat, which is not computed."""
        options = arguments_of(body, self.settings)
        model = await self.use(request, body.model, body.lora)
        names = ("tools", "tool_choice", "chat_template_kwargs")
        own = {name: options[name] for name in (*names, *CONTINUING) if name in options}
        messages = await aside_if(len(body.messages) > PART, self._messages, model, body)
        return await unless_gone(request, model.llm.chat_tokens(messages, **own))

    async def prompt_text(self, request: Request, body: ChatRequest) -> str:
        """The same as text, without the BOS token that /completion puts before it."""
        ids = await self.prompt_ids(request, body)
        llm = (await self.use(request, body.model)).llm
        tokenizer = llm.llama.tokenizer
        if tokenizer.add_bos and ids[0] == tokenizer.bos:
            del ids[0]
        return await unless_gone(request, llm.detokenize(ids, special=True))

    async def mixed_ids(self, request: Request, model: ServedModel, parts: Sequence[str | int]) -> list[int]:
        """A prompt of texts and token ids, as token ids."""
        self.check_length(model, [part for part in parts if isinstance(part, str)])
        ids: list[int] = []
        for i, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += await unless_gone(request, model.llm.tokenize(part, add_bos=not i, special=True))
        return ids

    def _messages(self, model: ServedModel, body: ChatRequest) -> list[dict[str, Any]]:
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        for message in messages:
            self.check_length(model, message.get("content"))
        return messages

    async def _run(
        self,
        request: Request,
        body: Generate,
        create: Callable[[bool], Awaitable[Any]],
        *,
        at_once: bool = False,
    ) -> dict[str, Any] | AsyncStream:
        """at_once: creating it waits for nothing."""
        request.state.begin = time.perf_counter()
        if body.stream_options is not None and not body.stream:
            raise Problem(400, "stream_options needs stream", param="stream_options", code="invalid_value")
        work = create(bool(body.stream))
        result: dict[str, Any] | AsyncStream = await (work if at_once else unless_gone(request, work))
        if not isinstance(result, AsyncStream):
            self._done(request)
        return result

    def _done(self, request: Request) -> None:
        self.metrics.add(self.metrics.request_s, time.perf_counter() - request.state.begin)

    def _respond(self, request: Request, body: Generate, result: dict[str, Any] | AsyncStream) -> Response:
        if not isinstance(result, AsyncStream):
            return json_response(result)
        usage = body.stream_options is not None and body.stream_options.include_usage
        return self.stream(request, result, openai_events(result, usage=usage))

    def stream(
        self,
        request: Request,
        stream: AsyncStream,
        frames: AsyncIterator[bytes],
        media_type: str = EVENTS,
    ) -> Response:
        """An answer while it is made. frames: what is written of it."""
        return EventStream(
            stream,
            frames,
            write_timeout_s=self.settings.write_timeout_s,
            media_type=media_type,
            done=lambda: self._done(request),
        )

    def _check_count(self, n: int) -> None:
        if n > self.settings.max_choices:
            raise Problem(
                400,
                f"one request may ask for {self.settings.max_choices} answers, not {n}",
                param="n",
                code="invalid_value",
            )

    def check_length(self, model: ServedModel, text: Any) -> None:
        """Texts that are much too long are refused before they are cut into tokens, which takes a while."""
        n_ctx = model.llm.llama.n_ctx()
        if isinstance(text, (list, tuple)) and len(text) > n_ctx and isinstance(text[0], int):
            said = f"the prompt has {len(text)} tokens and n_ctx is {n_ctx}"
            raise Problem(400, said, code="context_length_exceeded")
        if isinstance(text, (list, tuple)):
            for part in text if len(text) and not isinstance(text[0], int) else ():
                self.check_length(model, part.get("text") if isinstance(part, dict) else part)
        elif isinstance(text, str) and len(text) > model.longest:
            raise Problem(
                400,
                f"a text has {len(text)} characters: more tokens than n_ctx, {n_ctx}",
                code="context_length_exceeded",
            )

    # -- vectors and tokens

    async def embeddings(self, request: Request, body: EmbeddingRequest) -> Response:
        result = await self.vectors(request, body)
        return await aside(vector_response, result, body.encoding_format)

    async def vectors(
        self, request: Request, body: EmbeddingRequest, *, normalize: bool | None = None
    ) -> dict[str, Any]:
        """The same in numbers, whatever encoding_format says. normalize: scale them to length 1; None: as the
        settings say."""
        if (many := not isinstance(body.input, str) and not isinstance(body.input[0], int)) and len(
            body.input
        ) > self.settings.max_inputs:
            said = f"one request may have {self.settings.max_inputs} inputs, not {len(body.input)}"
            raise Problem(400, said, param="input", code="invalid_value")
        model = await self.use(request, body.model)
        n_embd = model.llm.llama.n_embd()
        if body.dimensions not in (None, n_embd):
            raise Problem(
                400,
                f"vectors of this model have {n_embd} dimensions",
                param="dimensions",
                code="invalid_value",
            )
        if many:
            check_size(len(body.input), n_embd, body.encoding_format)
        self.check_length(model, body.input)
        return await unless_gone(
            request,
            model.llm.create_embedding(
                body.input,
                model=self.name(request),
                normalize=self.settings.normalize if normalize is None else normalize,
                max_tokens=self.settings.max_input_tokens,
                timeout_s=self.settings.timeout_s,
            ),
        )

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        model = await self.use(request, body.model)
        self.check_length(model, body.content)
        llm = model.llm
        ids = await llm.tokenize(body.content, add_bos=body.add_special, special=body.parse_special)
        if not body.with_pieces:
            return await aside(json_response, {"tokens": ids})
        return await aside(_with_pieces, llm, ids)

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        llm = (await self.use(request, body.model)).llm
        return json_response({"content": await llm.detokenize(body.tokens, special=True)})

    # -- what there is

    async def list_models(self) -> Response:
        return json_response({"object": "list", "data": [model_entry(*each) for each in self.models.known]})

    async def model(self, name: str) -> Response:
        self.models.base(name, strict=True)
        found = next(each for each in self.models.known if each[0] in (name, name.removesuffix(":latest")))
        return json_response(model_entry(*found))

    async def health(self) -> Response:
        for model in self.models.opened:
            if (error := model.llm.scheduler.last_error) is not None:  # which may be why it is closing
                raise Problem(503, f"the engine failed: {error}", code="engine_error")
        if self.models.is_closing or any(model.llm.scheduler.is_closing for model in self.models.opened):
            raise Problem(503, "the server is shutting down", code="shutting_down")
        states = Counter(model.state for model in self.models.each())  # no names: everybody may ask
        return json_response({"status": "ok", "models": states})

    async def engine(self, model: str | None = None) -> Response:
        one = self.models.one(model)
        return json_response(engine_view(one.llm, one.info, self.models.name_of(one)))

    async def show_metrics(self) -> Response:
        return Response(self.metrics.text(self.models), media_type="text/plain; version=0.0.4")

    async def on_error(self, _: Request, error: Exception) -> Response:
        stats = [model.llm.stats() for model in self.models.opened]
        problem = problem_of(error, retry_after_s=self.metrics.retry_after_s(stats))
        if problem.status == 500 or problem.code == "out_of_memory":
            _log.error("a request failed", exc_info=error)
        return problem.response()


def model_entry(name: str, model: ServedModel, parent: str | None) -> dict[str, Any]:
    """A model as OpenAI lists it. parent: of one with an adapter, the model without it."""
    info = model.info
    meta = (
        None
        if info is None
        else {
            "n_ctx": info.session.n_ctx,
            "n_ctx_train": info.model.n_ctx_train,
            "n_vocab": info.model.n_vocab,
            "n_embd": info.model.n_embd,
            "n_params": info.model.n_parameters,
            "size": info.model.n_weight_bytes,
        }
    )
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "powerinfer",
        "meta": meta,
        "state": model.state,
        "error": model.error,
        "in_use": model.n_users,
        "loads": model.n_loads,
        "parent": parent,
    }


def _with_pieces(llm: AsyncLlama, ids: list[int]) -> Response:
    piece = llm.llama.tokenizer.piece
    return json_response({"tokens": [{"id": i, "piece": _text_or_bytes(piece(i, True))} for i in ids]})


def _text_or_bytes(piece: bytes) -> str | list[int]:
    """As llama-server shows pieces: numbers where they are no whole characters."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


class _Counted:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = path_of(scope)
                self._metrics.count(path if path in self._paths else "other", message["status"])
            await send(message)

        await self._app(scope, receive, watch if scope["type"] == "http" else send)


def create_app(llm: AsyncLlama | Models, settings: Settings | None = None) -> ASGIApp:
    """The server as an ASGI application. The caller closes `llm`.

    llm: a model, or several (models.py), which have names of their own.
    settings: keys and limits; None: Settings(). Of its address only `host` counts,
    for the default of `allowed_hosts`.
    """
    settings = settings or Settings()
    at = Endpoints(models_of(llm, settings), settings)
    app = FastAPI(title="powerinfer", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Problem, on_problem)
    for kind in (ValueError, RuntimeError, OSError, NotImplementedError, MemoryError):
        app.add_exception_handler(kind, at.on_error)
    app.add_exception_handler(Gone, _on_gone)

    def post(path: str, call: Callable[..., Any], answer: Any = None, streams: str | None = None) -> None:
        call = lenient(call, settings.strict)
        said = _errors(path, _ERRORS)
        if streams is not None:
            said[200] = {"content": {"application/json": {}, streams: {}}}
        app.add_api_route(path, call, methods=["POST"], responses=said, response_model=answer)

    def get(path: str, call: Callable[..., Any], answer: Any = None) -> None:
        of_a_model = "model" in inspect.signature(call).parameters
        errors = _errors(path, _LOOK if of_a_model else _FIND if "{" in path else _READ)
        app.add_api_route(path, call, methods=["GET"], responses=errors, response_model=answer)

    def delete(path: str, call: Callable[..., Any]) -> None:
        app.add_api_route(path, call, methods=["DELETE"], responses=_errors(path, _FIND))

    post("/v1/chat/completions", at.chat, streams=EVENTS)
    post("/v1/completions", at.completion, streams=EVENTS)
    post("/v1/embeddings", at.embeddings)
    messages.add(at, post, get)
    ranking.add(at, post, get)
    post("/tokenize", at.tokenize, TokenizeAnswer)
    post("/detokenize", at.detokenize, DetokenizeAnswer)
    get("/v1/models", at.list_models)
    get("/v1/models/{name:path}", at.model)
    responses.add(at, post, get, delete)
    ollama.add(at, post, get)
    llama_server.add(at, post, get)
    get("/v1/engine", at.engine, EngineView)
    get("/health", at.health, Health)
    app.add_api_route("/health", at.health, methods=["HEAD"], include_in_schema=False)
    app.add_api_route(
        "/metrics",
        at.show_metrics,
        methods=["GET"],
        response_class=PlainTextResponse,
        responses=_errors("/metrics", _READ),
    )
    routes = [route for route in app.routes if isinstance(route, Route)]
    paths = {route.path for route in routes}
    open_paths = {*OPEN, *_add_page(app)}

    most = sum(model.max_requests for model in at.models.all) + _SLACK
    posts = {route.path for route in routes if "POST" in (route.methods or ())}
    wrapped: ASGIApp = Guard(
        Direct(app), settings, open_paths=open_paths, post_paths=posts, max_requests=most
    )
    if settings.cors_origins:
        wrapped = CORSMiddleware(
            wrapped,
            allow_origins=list(settings.cors_origins),
            allow_methods=sorted({method for route in routes for method in route.methods or ()}),
            allow_headers=["*"],  # OpenAI's client for browsers sends a dozen of its own
            expose_headers=["Retry-After", HEADER],
        )
    return Dialects(LastResort(_Counted(Releasing(wrapped, at.models), at.metrics, paths)))


def models_of(llm: AsyncLlama | Models, settings: Settings) -> Models:
    if isinstance(llm, Models):
        return llm
    return Models([of_one(llm, settings.names)], timeout_s=settings.timeout_s, strict=settings.strict)


async def _on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _add_page(app: FastAPI) -> set[str]:
    """Routes for the files of the chat page, if there are any; returns their paths."""
    paths = set()
    for file in sorted(PAGE.rglob("*")) if PAGE.is_dir() else ():
        path = "/" + file.relative_to(PAGE).as_posix()
        if not file.is_file() or "/." in path or "/__" in path or file.suffix == ".py":
            continue
        for name in {path, "/"} if path == "/index.html" else {path}:
            app.add_api_route(name, _page(file), methods=["GET", "HEAD"], include_in_schema=False)
            paths.add(name)
    return paths


def _page(file: Path) -> Callable[[], Awaitable[Response]]:
    async def show() -> Response:
        return FileResponse(file, headers=_PAGE_HEADERS)

    return show
