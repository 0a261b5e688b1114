"""The routes ``POST /v1/rerank``, which sorts documents by relevance, at the three paths that clients use, and ``POST
/v1/score``, which scores pairs of texts.

The answers of each path have the form that its clients read: at ``/v2/rerank`` that of version 2 of Cohere's API; at
``/rerank`` that of Jina and vLLM or, for bodies with ``texts``, of Text Embeddings Inference.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pydantic_core
from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Caller, Ranking, RerankRequest
from lmx_lab.engine.lookup import public_id
from lmx_lab.errors import CallerError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.streaming import while_connected
from lmx_lab.server.answers import json_response
from lmx_lab.server.convert import FieldNames
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import INFERENCE_ERRORS
from lmx_lab.server.translate import requested_model
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.embeddings import EncodingUsage
from lmx_lab.wire.rerank import (
    AnyRerankBody,
    CohereResults,
    DocumentResults,
    RerankBody,
    RerankResults,
    Score,
    ScoreBody,
    Scores,
    TextRank,
    TextsRerankBody,
)

TEXTS = FieldNames({"documents.*": "texts.*", "documents": "texts"})
"""Maps the fields of a request for a ranking to those of Text Embeddings Inference."""
ANSWERS: dict[str, Any] = {"/v1/rerank": RerankResults, "/v2/rerank": CohereResults, "/rerank": DocumentResults}
"""Answers to bodies with documents, by path: that of version 1 of Cohere, of version 2, and of vLLM, Jina and
Text Embeddings Inference."""
DOCUMENTS_PER_UNIT = 100
"""Cohere counts a search unit for each query with up to this many documents."""


def rerank_routes(service: InferenceService) -> APIRouter:
    """Return the router of the three paths."""
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    async def rerank(body: AnyRerankBody, request: Request) -> Response:
        """Sort documents by relevance to a query. For a body with `texts`, the response is a bare array of scores. For
        others, documents are strings at `/v1/rerank` and objects at the other paths; at `/v2/rerank`, they are included
        only with `return_documents`."""
        caller = service.caller_of(request)
        with TEXTS.in_errors() if isinstance(body, TextsRerankBody) else nullcontext():
            ranking = await while_connected(request, service.rerank(rerank_request(body, caller)))
        model = public_id(ranking.report.model, local=caller.local)
        ranking = replace(ranking, report=replace(ranking.report, model=model))
        # On the event loop, 256 results are written as text in about a millisecond.
        path = request.scope["route"].path
        if len(ranking.scores) > 256:
            content = await asyncio.to_thread(_encode, path, body, ranking)
        else:
            content = _encode(path, body, ranking)
        return json_response(content, body.ignored())

    for path, answer in ANSWERS.items():
        router.add_api_route(
            path,
            rerank,
            name=path.strip("/").replace("/", "_"),
            methods=["POST"],
            response_model=answer | list[TextRank],
            responses=INFERENCE_ERRORS,
        )

    @router.post("/v1/score", response_model=Scores, responses=INFERENCE_ERRORS)
    @router.post("/score", response_model=Scores, responses=INFERENCE_ERRORS, name="score_unversioned")
    async def score(body: ScoreBody, request: Request) -> Response:
        """Score pairs of texts: a query with each document, or each text with the one at the same place."""
        caller = service.caller_of(request)
        content = await while_connected(request, _scores(service, body, caller))
        return json_response(content, body.ignored())

    return router


async def _scores(service: InferenceService, body: ScoreBody, caller: Caller) -> bytes:
    pairs, limit = body.pairs, body.truncate_prompt_tokens
    scores, tokens, model = [0.0] * len(pairs), 0, ""
    # A query with its documents is one request.
    places_of: dict[str, list[int]] = {}
    for at, (query, _) in enumerate(pairs):
        places_of.setdefault(query, []).append(at)
    for query, places in places_of.items():
        wanted = RerankRequest(
            query=query,
            documents=tuple(pairs[at][1] for at in places),
            model=requested_model(body.model),
            truncate=limit is not None,
            max_document_tokens=limit if limit is not None and limit > 0 else None,
            raw_scores=body.use_activation is False,
            caller=caller,
        )
        try:
            ranking = await service.rerank(wanted)
        except CallerError as exc:
            if (param := exc.param) is not None:
                exc.param = score_field(body, places, param)
                exc.message = exc.message.replace(param, exc.param, 1)
                exc.args = (exc.message,)
            raise
        for at, score in zip(places, ranking.scores, strict=True):
            scores[at] = float(str(score))
        tokens += ranking.report.tokens
        model = public_id(ranking.report.model, local=caller.local)
    answer = Scores(
        id=f"score-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=model,
        data=[Score(index=at, score=score) for at, score in enumerate(scores)],
        usage=EncodingUsage(prompt_tokens=tokens, total_tokens=tokens),
    )
    return answer.model_dump_json().encode()


def score_field(body: ScoreBody, places: Sequence[int], param: str) -> str:
    """Return the path of a field of a query with documents in the request with the pairs at these places."""
    field, _, number = param.partition(".")
    if field == "query":
        return f"text_1.{places[0]}" if isinstance(body.text_1, list) and len(body.text_1) > 1 else "text_1"
    if field != "documents":
        return param
    return f"text_2.{places[int(number)]}" if number.isdigit() and isinstance(body.text_2, list) else "text_2"


def rerank_request(body: RerankBody | TextsRerankBody, caller: Caller) -> RerankRequest:
    """Convert a request body to the engine's request."""
    name = body.model if isinstance(body, RerankBody) else ANY_MODEL
    return RerankRequest(
        query=body.query,
        documents=tuple(body.texts),
        model=None if name == ANY_MODEL else name,
        truncate=bool(body.truncate),
        max_document_tokens=(body.max_tokens_per_doc or None) if isinstance(body, RerankBody) else None,
        raw_scores=bool(body.raw_scores),
        caller=caller,
    )


def _encode(path: str, body: RerankBody | TextsRerankBody, ranking: Ranking) -> bytes:
    if isinstance(body, TextsRerankBody):
        return text_ranks(ranking, body.texts if body.return_text else None, top_n=body.top_n)
    with_documents = path != "/v2/rerank" if body.return_documents is None else body.return_documents
    return rerank_results(ranking, body.texts if with_documents else None, top_n=body.top_n, path=path)


def rerank_results(
    ranking: Ranking, documents: Sequence[str] | None, *, top_n: int | None = None, path: str = "/v1/rerank"
) -> bytes:
    """Return the body of the answer to a ``RerankBody``, the JSON of the path's class in ``ANSWERS``.

    Args:
        documents: The documents, to include them in the results; None leaves them out.
        top_n: Number of results to return; None returns all.
    """
    results: list[dict[str, Any]] = []
    for index, score in _scored(ranking, top_n):
        results.append({"index": index, "relevance_score": score})
        if documents is not None:
            results[-1]["document"] = documents[index] if path == "/v1/rerank" else {"text": documents[index]}
    report = ranking.report
    answer: dict[str, Any]
    if path == "/v2/rerank":
        meta = {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": math.ceil(len(ranking.scores) / DOCUMENTS_PER_UNIT)},
            "tokens": {"input_tokens": report.tokens},
        }
        answer = {"id": str(uuid.uuid4()), "results": results, "meta": meta}
    else:
        answer = {
            "id": f"rerank-{secrets.token_hex(12)}",
            "object": "list",
            "model": report.model,
            "method": ranking.method,
            "results": results,
            "usage": {"prompt_tokens": report.tokens, "total_tokens": report.tokens},
        }
    return pydantic_core.to_json(answer)


def text_ranks(ranking: Ranking, texts: Sequence[str] | None, *, top_n: int | None = None) -> bytes:
    """Return the body of the answer to a ``TextsRerankBody``, a JSON array of ``TextRank``.

    Args:
        texts: The texts, to include them in the results; None leaves them out.
        top_n: Number of results to return; None returns all.
    """
    ranks = [
        TextRank(index=index, score=score, text=texts[index] if texts is not None else None)
        for index, score in _scored(ranking, top_n)
    ]
    return pydantic_core.to_json(ranks, exclude_none=True)


def _scored(ranking: Ranking, top_n: int | None) -> list[tuple[int, float]]:
    """Return the index and the score of each document, the most relevant first."""
    # Converted to text and back, so that the JSON contains the shortest decimal form of a float32.
    return [(index, float(str(ranking.scores[index]))) for index in ranking.order(top_n)]
