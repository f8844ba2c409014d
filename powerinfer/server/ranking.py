"""Rerankers: /v1/rerank in the shape of Jina and Cohere, /score in that of vLLM."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from .arguments import invalid
from .events import unless_gone
from .host import Add, Host
from .problems import json_response
from .schemas import Body, Count, Texts


class Document(Body):
    text: str


class RerankRequest(Body):
    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, fail_fast=True)]
    top_n: Count | None = None
    return_documents: bool | None = None

    # These change nothing here.
    user: str | None = None


class ScoreRequest(Body):
    model: str | None = None
    text_1: str | Texts
    """Queries."""
    text_2: str | Texts
    """Documents: as many, or several for one query."""

    # These change nothing here.
    user: str | None = None


def add(at: Host, post: Add, get: Add) -> None:
    """Adds the routes."""
    del get

    async def rerank(request: Request, body: RerankRequest) -> Response:
        texts = [each if isinstance(each, str) else each.text for each in body.documents]
        scores, usage = await scored(request, body.model, [(body.query, text) for text in texts], "documents")
        order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n]
        results = []
        for i in order:
            result: dict[str, Any] = {"index": i, "relevance_score": scores[i]}
            if body.return_documents:
                result["document"] = {"text": texts[i]}
            results.append(result)
        head = {"id": f"rerank-{secrets.token_hex(12)}", "object": "list", "model": at.name(request)}
        return json_response(head | {"usage": usage, "results": results})

    async def score(request: Request, body: ScoreRequest) -> Response:
        first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
        second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
        if len(first) not in (1, len(second)):
            said = f"text_1 has {len(first)} texts and text_2 {len(second)}: one, or as many, are scored"
            raise invalid(said, "text_1")
        first = first * len(second) if len(first) == 1 else first
        scores, usage = await scored(request, body.model, list(zip(first, second, strict=True)), "text_2")
        data = [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)]
        head = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return json_response(head | {"model": at.name(request), "data": data, "usage": usage})

    async def scored(
        request: Request, name: str | None, pairs: list[tuple[str, str]], param: str
    ) -> tuple[list[float], dict[str, int]]:
        most = at.settings.max_inputs
        if len(pairs) > most:
            raise invalid(f"one request may have {most} texts, not {len(pairs)}", param)
        model = await at.use(request, name)
        for text in {pairs[0][0], *(text for _, text in pairs)}:
            at.check_length(model, text)
        work = model.llm.rank(pairs, max_tokens=at.settings.max_input_tokens, timeout_s=at.settings.timeout_s)
        scores, n = await unless_gone(request, work)
        return scores, {"prompt_tokens": n, "total_tokens": n}

    for path in ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"):
        post(path, rerank)
    for path in ("/score", "/v1/score"):
        post(path, score)
