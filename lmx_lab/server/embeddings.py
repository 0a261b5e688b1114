"""Vectors of texts: the routes ``POST /v1/embeddings``, ``/v2/embed`` in Cohere's format, ``/embedding`` in that of
llama.cpp's server, and ``/embed`` in that of Text Embeddings Inference.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Iterator
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
from lmx_lab.server.convert import FieldNames
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.openapi import INFERENCE_ERRORS
from lmx_lab.server.translate import requested_model
from lmx_lab.values.outputs import InputType, Vectors
from lmx_lab.wire.embeddings import (
    CohereEmbedBody,
    CohereEmbeddings,
    EmbeddingList,
    EmbeddingsBody,
    EmbeddingType,
    EncodingUsage,
    Input,
    LlamaEmbedBody,
    LlamaEmbedding,
    TeiEmbedBody,
    listed_inputs,
)

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
    "classification": None,
    "clustering": None,
}
COHERE = FieldNames({"input.*": "texts.*", "input": "texts", "dimensions": "output_dimension"})
"""Maps the fields of ``/v1/embeddings`` to those of Cohere."""
LLAMA = FieldNames({"input.*": "content.*", "input": "content"})
"""The same for llama.cpp's server."""
TEI = FieldNames({"input.*": "inputs.*", "input": "inputs"})
"""The same for Text Embeddings Inference."""


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
        return json_response(await _written(embeddings, embedding_list, as_base64=as_base64), body.ignored())

    @router.post("/v2/embed", response_model=CohereEmbeddings, responses=INFERENCE_ERRORS)
    async def embed(body: CohereEmbedBody, request: Request) -> Response:
        """Return a vector for each text, in the form of version 2 of Cohere's API."""
        wanted = EmbeddingRequest(
            inputs=tuple(body.texts),
            model=requested_model(body.model),
            dimensions=body.output_dimension,
            input_type=INPUT_TYPES[body.input_type],
            truncate=body.truncate != "NONE",
            caller=service.caller_of(request),
        )
        with COHERE.in_errors():
            embeddings = await while_connected(request, service.embed(wanted))
        return json_response(await _written(embeddings, cohere_embeddings, body), body.ignored())

    async def compute(request: Request, given: Input, model: str, **options: Any) -> Embeddings:
        wanted = EmbeddingRequest(
            inputs=tuple(listed_inputs(given)),
            model=requested_model(model),
            caller=service.caller_of(request),
            **options,
        )
        return await while_connected(request, service.embed(wanted))

    @router.post("/embedding", response_model=list[LlamaEmbedding], responses=INFERENCE_ERRORS)
    async def llama_embedding(body: LlamaEmbedBody, request: Request) -> Response:
        """Return a vector for each text, in the form of llama.cpp's server."""
        with LLAMA.in_errors():
            embeddings = await compute(request, body.content, body.model)
        is_normal = body.embd_normalize != -1
        return json_response(await _written(embeddings, llama_embeddings, is_normal=is_normal), body.ignored())

    @router.post("/embed", response_model=list[list[float]], responses=INFERENCE_ERRORS)
    async def tei_embed(body: TeiEmbedBody, request: Request) -> Response:
        """Return a vector for each text, in the form of Text Embeddings Inference."""
        with TEI.in_errors():
            embeddings = await compute(
                request,
                body.inputs,
                body.model,
                dimensions=body.dimensions,
                input_type=body.prompt_name,
                truncate=bool(body.truncate),
            )
        is_normal = body.normalize is not False
        return json_response(await _written(embeddings, tei_embeddings, is_normal=is_normal), body.ignored())

    return router


async def _written(embeddings: Embeddings, write: Callable[..., bytes], *args: Any, **options: Any) -> bytes:
    if embeddings.vectors.size > NUMBERS_PER_STEP:
        return await asyncio.to_thread(write, embeddings, *args, **options)
    return write(embeddings, *args, **options)


def embedding_request(body: EmbeddingsBody, caller: Caller) -> EmbeddingRequest:
    """Convert a request body to the engine's request."""
    return EmbeddingRequest(
        inputs=tuple(listed_inputs(body.input)),
        model=requested_model(body.model),
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
    for index, value in enumerate(_rows(embeddings.vectors, "base64" if as_base64 else "float")):
        comma = b"," if index else b""
        pieces.append(b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, value))
    pieces.append(b'],"model":%b,"usage":%b}' % (model, usage.model_dump_json().encode()))
    # Joined only once, because each copy of a body of 50 MB delays all other requests.
    return b"".join(pieces)


def cohere_embeddings(embeddings: Embeddings, body: CohereEmbedBody) -> bytes:
    """Return the body of the answer, the JSON of ``CohereEmbeddings``."""
    members = [
        b'"%b":[%b]' % (kind.encode(), b",".join(_rows(embeddings.vectors, kind)))
        for kind in dict.fromkeys(body.embedding_types or ("float",))
    ]
    others = {
        "id": str(uuid.uuid4()),
        "texts": body.texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": embeddings.report.tokens}},
        "response_type": "embeddings_by_type",
    }
    return b'%b,"embeddings":{%b}}' % (pydantic_core.to_json(others)[:-1], b",".join(members))


def llama_embeddings(embeddings: Embeddings, *, is_normal: bool) -> bytes:
    """Return the body of the answer, the JSON of a list of ``LlamaEmbedding``.

    Args:
        is_normal: Whether the vectors have the length 1.
    """
    rows = enumerate(number_rows(_normal(embeddings.vectors) if is_normal else embeddings.vectors))
    return b"[%b]" % b",".join([b'{"index":%d,"embedding":[%b]}' % (index, row) for index, row in rows])


def tei_embeddings(embeddings: Embeddings, *, is_normal: bool) -> bytes:
    """Return the body of the answer, the JSON of a list of vectors. See ``llama_embeddings`` for the argument."""
    return b"[%b]" % b",".join(number_rows(_normal(embeddings.vectors) if is_normal else embeddings.vectors))


def _normal(vectors: Vectors) -> Vectors:
    """Return the vectors with length 1, except those that are zero."""
    lengths: Vectors = np.linalg.norm(vectors, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    normal: Vectors = vectors / lengths
    return normal


def _rows(vectors: Vectors, kind: EmbeddingType) -> Iterator[bytes]:
    """Return the JSON of each vector."""
    if kind == "float":
        return number_rows(vectors)
    if kind == "base64":
        return (b'"%b"' % base64.b64encode(row) for row in np.ascontiguousarray(vectors, dtype="<f4"))
    bits = np.packbits(vectors > 0, axis=1).astype(np.int16)
    return map(pydantic_core.to_json, (bits - 128 if kind == "binary" else bits).tolist())


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
