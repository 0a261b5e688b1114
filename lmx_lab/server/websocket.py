"""WS /v1/chat/stream: the client sends one request, the server sends tokens and statistics, then the client closes."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, ValidationError
from starlette.websockets import WebSocketDisconnect

from lmx_lab.errors import InvalidRequestError, LabError
from lmx_lab.http.bodies import LargeBodyQueue, read_json
from lmx_lab.http.error_bodies import detail_for, request_id_of, validation_error
from lmx_lab.http.guard import is_local
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.serialize import socket_token
from lmx_lab.server.translate import socket_stats
from lmx_lab.wire.chat import ChatRequest, SocketDone, SocketError

log = logging.getLogger(__name__)
CLOSE_WAIT_S = 5.0
FIRST_MESSAGE_WAIT_S = 60.0
NORMAL, FAILED = 1000, 1011


class _ServerStops(WebSocketDisconnect):
    """The server stops; messages may still be sent."""


def socket_routes(service: InferenceService, *, max_body_bytes: int) -> APIRouter:
    router = APIRouter(tags=["inference"])

    @router.websocket("/v1/chat/stream")
    async def chat_stream(socket: WebSocket) -> None:
        await socket.accept()
        with suppress(WebSocketDisconnect):
            try:
                # The message is not kept in a variable, so that its memory is released once it is parsed.
                request = await _parse(
                    await _receive(socket, FIRST_MESSAGE_WAIT_S), max_body_bytes, socket.app.state.large_body_queue
                )
                await _answer(socket, service, request)
            except LabError as exc:
                log.warning("%s: socket ended by %s", request_id_of(socket), exc)
                await _send(socket, _error(socket, exc))
                await socket.close(FAILED)

    return router


async def _answer(socket: WebSocket, service: InferenceService, request: ChatRequest) -> None:
    """Send tokens until the end, while a second task watches the client."""
    tokens = asyncio.ensure_future(_send_tokens(socket, service, request))
    watch = asyncio.ensure_future(_refuse_messages(socket))
    try:
        await asyncio.wait({tokens, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not tokens.done() and not watch.result():
            return
        # A server that stops has ended the answer; the rest of it and the error are still to be sent.
        await tokens
        await asyncio.wait({watch}, timeout=CLOSE_WAIT_S)
        if not watch.done():
            await socket.close(NORMAL)
    finally:
        tokens.cancel()
        watch.cancel()
        await asyncio.gather(tokens, watch, return_exceptions=True)
        # The traceback of their error refers to this frame. Without the cycle, the request's memory is released at
        # once.
        del tokens, watch


async def _send_tokens(socket: WebSocket, service: InferenceService, request: ChatRequest) -> None:
    _, (generation,) = await service.start(request, request_id_of(socket), local=is_local(socket.scope))
    async with generation:
        async for delta in generation:
            if (message := socket_token(delta, logprobs=bool(request.logprobs))) is not None:
                await _send_text(socket, message)
    await _send(socket, SocketDone(stats=socket_stats(generation.finished())))


async def _refuse_messages(socket: WebSocket) -> bool:
    """Refuse further messages, while the answer to the first one continues. Returns when the client has left or the
    server stops: True if the server stops.
    """
    try:
        while True:
            await _receive(socket, None)
            second = InvalidRequestError("a connection takes one request; open another connection for each")
            await _send(socket, _error(socket, second))
            # Neither of these calls yields to other tasks while messages are already there.
            await asyncio.sleep(0)
    except _ServerStops:
        return True
    except WebSocketDisconnect:
        return False


async def _receive(socket: WebSocket, timeout_s: float | None) -> str | bytes:
    try:
        message: dict[str, Any] = await asyncio.wait_for(socket.receive(), timeout_s)  # type: ignore[arg-type]
    except TimeoutError:
        raise InvalidRequestError(f"no request came within {timeout_s:g} s") from None
    if message["type"] == "websocket.disconnect":
        # Marked by our own server (``http.protocol``): any client may close with the code of a restart.
        ends = _ServerStops if message.get("lmx_lab") == "stopping" else WebSocketDisconnect
        raise ends(message.get("code", NORMAL))
    text: str | None = message.get("text")
    return text if text is not None else message["bytes"]


async def _parse(text: str | bytes, limit_bytes: int, queue: LargeBodyQueue) -> ChatRequest:
    if isinstance(text, bytes):
        raise InvalidRequestError("the request came as a binary message; send it as text")
    if len(text) > limit_bytes:
        raise InvalidRequestError(f"the message has more than {limit_bytes} characters, the limit of this server")
    try:
        request = ChatRequest.model_validate(await read_json(text, queue))
    except ValidationError as exc:
        raise validation_error(exc) from exc
    if request.choices > 1:
        several = f"n is {request.n}; a socket carries one answer: open one for each, or POST /v1/chat/completions"
        raise InvalidRequestError(several, param="n")
    return request


def _error(socket: WebSocket, exc: LabError) -> SocketError:
    return SocketError(error=detail_for(socket, exc))


async def _send(socket: WebSocket, message: BaseModel) -> None:
    await _send_text(socket, message.model_dump_json())


async def _send_text(socket: WebSocket, text: str) -> None:
    try:
        await socket.send_text(text)
    except RuntimeError as exc:
        # Starlette raises this for a send after the close handshake has begun.
        raise WebSocketDisconnect(NORMAL) from exc
