"""POST /v1/rerank: documents by relevance, at the three paths that clients use."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import replace

import pydantic_core
from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Ranking, RerankRequest
from lmx_lab.engine.model_lookup import public_id
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.error_bodies import request_id_of
from lmx_lab.http.event_stream import while_connected
from lmx_lab.http.guard import is_local
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import INFERENCE
from lmx_lab.wire.embeddings import EncodingUsage
from lmx_lab.wire.generation import ANY_MODEL
from lmx_lab.wire.rerank import AnyRerankBody, RerankBody, RerankItem, RerankResults, TextRank, TextsRerankBody

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Jina's and Cohere's version 1, Cohere's version 2, and Text Embeddings Inference."""
SMALL = 256
"""Results that are written as text on the loop, in about a millisecond. More are written in a thread."""


def rerank_routes(service: InferenceService) -> APIRouter:
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    async def rerank(body: AnyRerankBody, request: Request) -> Response:
        """Documents ordered by relevance to a query; for a body with `texts`, a bare array of scores."""
        work = _answer(service, body, request_id_of(request), local=is_local(request.scope))
        return Response(await while_connected(request, work), media_type="application/json")

    for path in PATHS:
        router.add_api_route(
            path,
            rerank,
            name=path.strip("/").replace("/", "_"),
            methods=["POST"],
            response_model=RerankResults | list[TextRank],
            responses=INFERENCE,
        )
    return router


async def _answer(
    service: InferenceService, body: RerankBody | TextsRerankBody, request_id: str | None, *, local: bool
) -> bytes:
    ranking = await service.rerank(rerank_request(body), request_id, local=local)
    ranking = replace(ranking, report=replace(ranking.report, model=public_id(ranking.report.model, local=local)))
    if len(ranking.scores) > SMALL:
        return await asyncio.to_thread(_whole, body, ranking)
    return _whole(body, ranking)


def rerank_request(body: RerankBody | TextsRerankBody) -> RerankRequest:
    name = body.model if isinstance(body, RerankBody) else ANY_MODEL
    return RerankRequest(
        query=body.query,
        documents=tuple(body.texts),
        model=None if name == ANY_MODEL else name,
        truncate=bool(body.truncate),
        raw_scores=bool(body.raw_scores),
    )


def _whole(body: RerankBody | TextsRerankBody, ranking: Ranking) -> bytes:
    if isinstance(body, TextsRerankBody):
        return text_ranks(ranking, body.texts if body.return_text else None)
    return rerank_results(ranking, body.texts if body.return_documents is not False else None, top_n=body.top_n)


def rerank_results(ranking: Ranking, documents: Sequence[str] | None, *, top_n: int | None = None) -> bytes:
    """Return the body of the answer.

    Args:
        documents: Documents to include; None includes none.
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
    """Return the bare array of Text Embeddings Inference."""
    ranks = [
        TextRank(index=index, score=score, text=texts[index] if texts is not None else None)
        for index, score in _scored(ranking)
    ]
    return pydantic_core.to_json(ranks, exclude_none=True)


def _scored(ranking: Ranking, top_n: int | None = None) -> list[tuple[int, float]]:
    """Return index and score of the documents, the most relevant first."""
    # Converted to text and back: the shortest decimal fraction of a float32.
    return [(index, float(str(ranking.scores[index]))) for index in ranking.order(top_n)]
