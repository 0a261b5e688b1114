"""The route ``POST /v1/embeddings``: vectors of texts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pydantic_core
from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Caller, EmbeddingRequest, Embeddings
from lmx_lab.engine.lookup import public_id
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.streaming import while_connected
from lmx_lab.server.answers import json_response
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import INFERENCE_ERRORS
from lmx_lab.values.outputs import InputType, Vectors
from lmx_lab.wire.base import ANY_MODEL
from lmx_lab.wire.embeddings import EmbeddingList, EmbeddingsBody, EncodingUsage

NUMBERS_PER_STEP = 16_384
"""Up to this many numbers are written as text on the event loop, in about a millisecond. More are written in a thread,
this many at a time."""
DIGITS = 9
"""Significant digits of each number: enough to distinguish any two float32 (IEEE 754), and half as many as for
float64."""
INPUT_TYPES: dict[str | None, InputType | None] = {
    None: None,
    "query": "query",
    "document": "document",
    "search_query": "query",
    "search_document": "document",
}


def embedding_routes(service: InferenceService) -> APIRouter:
    """Return the router of ``/v1/embeddings``."""
    router = APIRouter(tags=["inference"], route_class=StrictRoute)

    @router.post("/v1/embeddings", response_model=EmbeddingList, responses=INFERENCE_ERRORS)
    async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
        """Return a vector for each text: numbers or, with `encoding_format: base64`, little-endian float32."""
        caller = service.caller_of(request)
        embeddings = await while_connected(request, service.embed(embedding_request(body, caller)))
        model = public_id(embeddings.report.model, local=caller.local)
        embeddings = replace(embeddings, report=replace(embeddings.report, model=model))
        as_base64 = body.encoding_format == "base64"
        if embeddings.vectors.size > NUMBERS_PER_STEP:
            content = await asyncio.to_thread(embedding_list, embeddings, as_base64=as_base64)
        else:
            content = embedding_list(embeddings, as_base64=as_base64)
        return json_response(content)

    return router


def embedding_request(body: EmbeddingsBody, caller: Caller) -> EmbeddingRequest:
    """Convert a request body to the engine's request."""
    # Token ids stay lists: copies of 16,384 lists would delay other requests by 20 ms.
    inputs: Iterable[Any] = [body.input] if body.is_single else body.input
    return EmbeddingRequest(
        inputs=tuple(inputs),
        model=None if body.model == ANY_MODEL else body.model,
        dimensions=body.dimensions,
        input_type=INPUT_TYPES[body.input_type],
        truncate=bool(body.truncate),
        caller=caller,
    )


def embedding_list(embeddings: Embeddings, *, as_base64: bool = False) -> bytes:
    """Return the body of the answer, the JSON of an ``EmbeddingList``.

    Args:
        as_base64: Whether to write the vectors in base64 instead of as lists of numbers.
    """
    report = embeddings.report
    usage = EncodingUsage(prompt_tokens=report.tokens, total_tokens=report.tokens)
    model = pydantic_core.to_json(report.model)
    pieces = [b'{"object":"list","data":[']
    rows = number_rows(embeddings.vectors)
    if as_base64:
        rows = (b'"%b"' % base64.b64encode(row) for row in np.ascontiguousarray(embeddings.vectors, dtype="<f4"))
    for index, value in enumerate(rows):
        comma = b"," if index else b""
        pieces.append(b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, value))
    pieces.append(b'],"model":%b,"usage":%b}' % (model, usage.model_dump_json().encode()))
    # Joined only once, because each copy of a body of 50 MB delays all other requests.
    return b"".join(pieces)


def number_rows(vectors: Vectors) -> Iterator[bytes]:
    """Yield a JSON array for each row. Other threads can run between two steps.

    The numbers are rounded to float64 values whose shortest decimal form has at most ``DIGITS`` significant digits.
    """
    rows = max(1, NUMBERS_PER_STEP // max(1, vectors.shape[1]))
    for start in range(0, len(vectors), rows):
        wide = vectors[start : start + rows].astype(np.float64)
        with np.errstate(divide="ignore"):
            exponents = np.floor(np.log10(np.abs(wide)))
        scale = 10.0 ** (DIGITS - 1 - np.where(np.isfinite(exponents), exponents, 0))
        for row in (np.round(wide * scale) / scale).tolist():
            yield pydantic_core.to_json(row)
