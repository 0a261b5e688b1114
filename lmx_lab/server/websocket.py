"""The WebSocket ``/v1/chat/stream``, which answers one chat request.

The client sends the request, the server sends tokens and statistics, and the client closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, ValidationError
from starlette.websockets import WebSocketDisconnect

from lmx_lab.engine import GenerationRequest
from lmx_lab.errors import BodyTooLargeError, CallerError, InvalidRequestError, LabError, UnavailableError
from lmx_lab.http.bodies import read_json
from lmx_lab.http.errors import detail_for, validation_error
from lmx_lab.http.streaming import SendWatch, escape_line_ends
from lmx_lab.server.answers import Choices, StreamWriter
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.translate import call_chunks, chat_logprobs, generation_request, json_text, socket_stats
from lmx_lab.values.outputs import Delta, GenerationReport
from lmx_lab.wire.chat import ChatRequest, SocketDone, SocketError
from lmx_lab.wire.errors import ErrorDetail

log = logging.getLogger(__name__)
T = TypeVar("T")
NORMAL, POLICY_VIOLATION = 1000, 1008
"""Close codes (RFC 6455, 7.4.1)."""
CLOSE_CODES: dict[type[LabError], int] = {
    LabError: 1011,
    CallerError: POLICY_VIOLATION,
    BodyTooLargeError: 1009,
    UnavailableError: 1013,
}
"""The close code after each class of errors, looked up along the MRO of a class: 1011 for a failure of the server, 1013
if the request may succeed later."""


class ServerStopping(WebSocketDisconnect):
    """The server is stopping. Unlike after a disconnect of the client, messages can still be sent."""


def socket_routes(service: InferenceService, *, max_body_bytes: int) -> APIRouter:
    """Return the router of ``/v1/chat/stream``."""
    router = APIRouter(tags=["inference"])

    @router.websocket("/v1/chat/stream")
    async def chat_stream(socket: WebSocket) -> None:
        await accept(socket, service)
        with suppress(WebSocketDisconnect):
            try:
                # The message is not kept in a variable, so that its memory is released once it is parsed.
                request = await parse(await receive(socket, timeout_s=60), max_body_bytes, ChatRequest.model_validate)
                if (request.n or 1) > 1:
                    raise InvalidRequestError(
                        f"n is {request.n}, but a WebSocket carries one answer; leave n out, or use POST "
                        "/v1/chat/completions",
                        param="n",
                    )
                if request.return_token_ids:
                    raise InvalidRequestError(
                        "return_token_ids is true, but the messages of a WebSocket have no ids; leave it out, or use "
                        "POST /v1/chat/completions",
                        param="return_token_ids",
                    )
                await _answer(socket, service, request)
            except LabError as exc:
                if not isinstance(exc, CallerError):
                    log.warning("%s: the WebSocket request failed: %s", socket.scope.get("lmx_lab.request_id"), exc)
                await _send(socket, _error(socket, exc))
                await socket.close(_close_code(exc))

    return router


async def accept(socket: WebSocket, service: InferenceService) -> None:
    """Accept a connection, with the headers of an answer."""
    headers = service.recording.answer_headers(own=service.recording.is_own(socket))
    await socket.accept(headers=[(name.encode(), value.encode()) for name, value in headers.items()])


def _close_code(error: LabError) -> int:
    return next(CLOSE_CODES[kind] for kind in type(error).__mro__ if kind in CLOSE_CODES)


async def _answer(socket: WebSocket, service: InferenceService, request: ChatRequest) -> None:
    """Send the answer, while a second task receives the messages of the client."""
    writer = SocketWriter(logprobs=bool(request.logprobs), as_probs=bool(request.post_sampling_probs))
    tokens = asyncio.ensure_future(send_answer(socket, service, generation_request(request), lambda _: writer))
    watcher = asyncio.ensure_future(_refuse_messages(socket))
    try:
        await asyncio.wait({tokens, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not tokens.done() and not watcher.result():
            return
        # If the server is stopping, it has ended the answer, but the rest of the answer or the error is not sent yet.
        await tokens
        if writer.failure is not None:
            await socket.close(_close_code(writer.failure))
            return
        # Closing the connection is up to the client.
        await asyncio.wait({watcher}, timeout=5.0)
        if not watcher.done():
            await socket.close(NORMAL)
    finally:
        tokens.cancel()
        watcher.cancel()
        await asyncio.gather(tokens, watcher, return_exceptions=True)
        # The traceback of an error of a task refers to this frame. Without this reference cycle, the memory of the
        # request is released immediately.
        del tokens, watcher


async def send_answer(
    socket: WebSocket,
    service: InferenceService,
    request: GenerationRequest,
    writer_for: Callable[[str], StreamWriter],
    message: Callable[[str], str] = lambda text: text,
) -> None:
    """Send the answer to a request. An error after the first token is written by the writer.

    Args:
        writer_for: Creates the writer. Its argument is the id of the model that answers, as the caller may see it.
        message: Converts a text of the writer to a message.

    Raises:
        LabError: the request was refused.
    """
    choices = Choices(service, [request], service.caller_of(socket))
    await choices.start()
    writer = writer_for(choices.model)
    watch = SendWatch(lambda: service.blocked_limit_s(choices.running))
    try:
        async with watch.watching(), aclosing(choices.texts(writer, lambda error: detail_for(socket, error))) as texts:
            async for text in texts:
                await watch.send(send_text(socket, message(text)))
    except TimeoutError:
        if not watch.expired:
            raise
        reason = f"the client has accepted no data for {watch.blocked_s:g} s"
        log.warning("%s: cancelled, because %s", socket.scope.get("lmx_lab.request_id"), reason)
        # This is an extension of ``http.connections``. Closing through ASGI would wait for the client.
        close = (socket.scope.get("extensions") or {}).get("lmx_lab.close")
        if close is not None:
            close(POLICY_VIOLATION, reason)
        raise WebSocketDisconnect(POLICY_VIOLATION, reason) from None


async def _refuse_messages(socket: WebSocket) -> bool:
    """Refuse further messages while the answer to the first one continues.

    Returns when the client has disconnected or the server is stopping, and whether it is the latter.
    """
    try:
        while True:
            await receive(socket, None)
            error = InvalidRequestError("a connection accepts only one request; open a new connection for each request")
            await _send(socket, _error(socket, error))
            # Neither of these calls yields to other tasks if the next message has already arrived.
            await asyncio.sleep(0)
    except ServerStopping:
        return True
    except WebSocketDisconnect:
        return False


async def receive(socket: WebSocket, timeout_s: float | None) -> str | bytes:
    """Return the next message.

    Raises:
        InvalidRequestError: there was none within the time.
        WebSocketDisconnect: the client has disconnected or, as ``ServerStopping``, the server is stopping.
    """
    try:
        message: dict[str, Any] = await asyncio.wait_for(socket.receive(), timeout_s)  # type: ignore[arg-type]
    except TimeoutError:
        raise InvalidRequestError(
            f"the connection received no request within {timeout_s:g} s; send one after connecting"
        ) from None
    if message["type"] == "websocket.disconnect":
        # ``http.connections`` adds this mark. The close code is not enough: any client can close with it.
        error = ServerStopping if message.get("lmx_lab") == "stopping" else WebSocketDisconnect
        raise error(message.get("code", NORMAL))
    text: str | None = message.get("text")
    return text if text is not None else message["bytes"]


async def parse(text: str | bytes, limit_bytes: int, validate: Callable[[Any], T]) -> T:
    """Read a request from a message.

    Raises:
        InvalidRequestError: the message is not text, too long, or not a valid request.
    """
    if isinstance(text, bytes):
        raise InvalidRequestError("the request is a binary message; send a text message")
    if len(text) > limit_bytes:
        raise InvalidRequestError(f"the message has {len(text)} characters, the limit is {limit_bytes}; send less")
    try:
        return await read_json(text, validate)
    except ValidationError as exc:
        raise validation_error(exc) from exc


def _error(socket: WebSocket, exc: LabError) -> SocketError:
    return SocketError(error=detail_for(socket, exc))


async def _send(socket: WebSocket, message: BaseModel) -> None:
    await send_text(socket, message.model_dump_json())


async def send_text(socket: WebSocket, text: str) -> None:
    """Send a message.

    Raises:
        WebSocketDisconnect: the connection is being closed.
    """
    try:
        await socket.send_text(escape_line_ends(text))
    except RuntimeError as exc:
        # Starlette raises this error if a message is sent after the close handshake has begun.
        raise WebSocketDisconnect(NORMAL) from exc


class SocketWriter(StreamWriter):
    """Writes one answer as the messages of a WebSocket.

    Args:
        logprobs: Whether the request asks for log-probabilities.
        as_probs: Whether these are written as probabilities.
    """

    def __init__(self, *, logprobs: bool = False, as_probs: bool = False) -> None:
        self._logprobs = logprobs
        self._as_probs = as_probs
        self.failure: LabError | None = None
        """The error with which the answer has ended."""

    def delta(self, index: int, delta: Delta) -> Iterator[str]:
        """Yield a ``SocketToken``, written as text, unless the delta is empty."""
        calls = list(call_chunks(delta.tool_calls))
        if not (delta.text or delta.reasoning or calls or delta.logprobs):
            return
        reasoning = f',"reasoning_content":{json_text(delta.reasoning)}' if delta.reasoning else ""
        tool_calls = f',"tool_calls":{json_text(calls)}' if calls else ""
        entries = chat_logprobs(delta.logprobs, as_probs=self._as_probs)
        logprobs = f',"logprobs":{json_text(entries)}' if self._logprobs else ""
        yield f'{{"token":{json_text(delta.text)}{reasoning}{tool_calls}{logprobs}}}'

    def end(self, index: int, report: GenerationReport) -> Iterator[str]:
        yield SocketDone(stats=socket_stats(report)).model_dump_json()

    def error(self, error: LabError, detail: ErrorDetail) -> Iterator[str]:
        self.failure = error
        yield SocketError(error=detail).model_dump_json()
