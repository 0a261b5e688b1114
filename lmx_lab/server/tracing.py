"""The route ``POST /admin/trace``, which returns internal values of the loaded model."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from lmx_lab.engine import Caller, ModelManager, TextPrompt, TokenPrompt, TraceRequest
from lmx_lab.engine.requests import Prompt
from lmx_lab.errors import AdminForbiddenError
from lmx_lab.http.bodies import StrictRoute
from lmx_lab.http.guard import is_local
from lmx_lab.http.streaming import while_connected
from lmx_lab.server.openapi import GENERATION_ERRORS
from lmx_lab.server.translate import generation_request, requested_model
from lmx_lab.wire.admin import HookNamesBody, PatchingBody, TraceBody, TracedText
from lmx_lab.wire.chat import ChatRequest
from lmx_lab.wire.errors import validated


def trace_routes(manager: ModelManager) -> APIRouter:
    """Return the router of ``/admin/trace``."""
    media_type = "application/x-safetensors"
    router = APIRouter(prefix="/admin", tags=["admin"], route_class=StrictRoute)

    @router.post(
        "/trace",
        response_class=Response,
        responses={
            200: {"content": {media_type: {"schema": {"type": "string", "format": "binary"}}}},
            **GENERATION_ERRORS,
        },
    )
    async def trace(body: TraceBody, request: Request) -> Response:
        """Compute a text, and return internal values of the model as a safetensors document. Only programs on the
        server's machine may do this. The model must run on MLX.
        """
        if not is_local(request.scope):
            raise AdminForbiddenError(
                "only programs on the server's machine may trace its model; run the trace in a notebook on that machine"
            )
        result = await while_connected(request, manager.trace(trace_request(body, Caller(local=True))))
        return Response(await asyncio.to_thread(result.encode), media_type=media_type)

    return router


def trace_request(body: TraceBody, caller: Caller) -> TraceRequest:
    """Convert a request body to the engine's request.

    Raises:
        InvalidRequestError: messages are invalid.
    """
    trace = body.trace
    return TraceRequest(
        model=requested_model(body.model),
        work=trace,
        prompt=None if isinstance(trace, HookNamesBody) else _prompt(trace.input),
        clean=_prompt(trace.clean) if isinstance(trace, PatchingBody) else None,
        caller=caller,
    )


def _prompt(text: TracedText) -> Prompt:
    if text.tokens is not None:
        return TokenPrompt(tokens=tuple(text.tokens))
    if text.text is not None:
        return TextPrompt(text=text.text)
    return generation_request(validated(ChatRequest, {"messages": text.messages})).prompt
