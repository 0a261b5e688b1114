"""The route ``POST /v1/rerank``, which sorts documents by relevance, at the three paths that clients use."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

import pydantic_core
from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Caller, Ranking, RerankRequest
from lmx_lab.engine.lookup import public_id
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.streaming import while_connected
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import INFERENCE_ERRORS
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.embeddings import EncodingUsage
from lmx_lab.wire.rerank import AnyRerankBody, RerankBody, RerankItem, RerankResults, TextRank, TextsRerankBody

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
"""The paths of Jina and of version 1 of Cohere, of version 2 of Cohere, and of Text Embeddings Inference."""


def rerank_routes(service: InferenceService) -> APIRouter:
    """Return the router of the three paths."""
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    async def rerank(body: AnyRerankBody, request: Request) -> Response:
        """Sort documents by relevance to a query. For a body with `texts`, the response is a bare array of scores."""
        caller = service.caller_of(request)
        ranking = await while_connected(request, service.rerank(rerank_request(body, caller)))
        model = public_id(ranking.report.model, local=caller.local)
        ranking = replace(ranking, report=replace(ranking.report, model=model))
        # On the event loop, 256 results are written as text in about a millisecond.
        if len(ranking.scores) > 256:
            content = await asyncio.to_thread(_encode, body, ranking)
        else:
            content = _encode(body, ranking)
        return Response(content, media_type="application/json")

    for path in PATHS:
        router.add_api_route(
            path,
            rerank,
            name=path.strip("/").replace("/", "_"),
            methods=["POST"],
            response_model=RerankResults | list[TextRank],
            responses=INFERENCE_ERRORS,
        )
    return router


def rerank_request(body: RerankBody | TextsRerankBody, caller: Caller) -> RerankRequest:
    """Convert a request body to the engine's request."""
    name = body.model if isinstance(body, RerankBody) else ANY_MODEL
    return RerankRequest(
        query=body.query,
        documents=tuple(body.texts),
        model=None if name == ANY_MODEL else name,
        truncate=bool(body.truncate),
        raw_scores=bool(body.raw_scores),
        caller=caller,
    )


def _encode(body: RerankBody | TextsRerankBody, ranking: Ranking) -> bytes:
    if isinstance(body, TextsRerankBody):
        return text_ranks(ranking, body.texts if body.return_text else None)
    return rerank_results(ranking, body.texts if body.return_documents is not False else None, top_n=body.top_n)


def rerank_results(ranking: Ranking, documents: Sequence[str] | None, *, top_n: int | None = None) -> bytes:
    """Return the body of the answer to a ``RerankBody``, the JSON of ``RerankResults``.

    Args:
        documents: The documents, to include them in the results; None leaves them out.
        top_n: Number of results to return; None returns all.
    """
    tokens = ranking.report.tokens
    results = [
        RerankItem(index=index, relevance_score=score, document=documents[index] if documents is not None else None)
        for index, score in _scored(ranking, top_n)
    ]
    answer = RerankResults(
        id=f"rerank-{secrets.token_hex(12)}",
        model=ranking.report.model,
        method=ranking.method,
        results=results,
        usage=EncodingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )
    return answer.model_dump_json(exclude_none=True).encode()


def text_ranks(ranking: Ranking, texts: Sequence[str] | None) -> bytes:
    """Return the body of the answer to a ``TextsRerankBody``, a JSON array of ``TextRank``.

    Args:
        texts: The texts, to include them in the results; None leaves them out.
    """
    ranks = [
        TextRank(index=index, score=score, text=texts[index] if texts is not None else None)
        for index, score in _scored(ranking)
    ]
    return pydantic_core.to_json(ranks, exclude_none=True)


def _scored(ranking: Ranking, top_n: int | None = None) -> list[tuple[int, float]]:
    """Return the index and the score of each document, the most relevant first."""
    # Converted to text and back, so that the JSON contains the shortest decimal form of a float32.
    return [(index, float(str(ranking.scores[index]))) for index in ranking.order(top_n)]
