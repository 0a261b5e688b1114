"""The WebSocket ``/v1/responses``: requests of the Responses format, one after the other, over one connection.

Each message of the client is the body of a request with the type ``response.create``. The server sends the data of each
event of its stream as a message, and an error before the first event as the event ``error``. A response that is not
stored can be continued on the same connection, until the next response. The protocol is that of
https://www.openresponses.org/specification.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect

from lmx_lab.errors import CallerError, ContextLengthError, LabError
from lmx_lab.http.errors import detail_for, status_of
from lmx_lab.server.inference import InferenceService
from lmx_lab.server.responses.convert import NAMES
from lmx_lab.server.responses.routes import ResponseStore, answer_request, earlier_of, http_routes
from lmx_lab.server.translate import json_text
from lmx_lab.server.websocket import NORMAL, ServerStopping, accept, parse, receive, send_answer, send_text
from lmx_lab.wire.responses import ResponseCreate

log = logging.getLogger(__name__)
IDLE_S = 3600.0
"""A connection without requests is closed after this time."""


def responses_routes(service: InferenceService) -> APIRouter:
    """Return the router of ``/v1/responses``."""
    store = ResponseStore()
    router = http_routes(service, store)

    @router.websocket("")
    async def responses_socket(socket: WebSocket) -> None:
        await accept(socket, service)
        # While a request is answered, only the next one is read.
        messages: asyncio.Queue[str | bytes | None] = asyncio.Queue(1)

        async def read() -> bool:
            """Put the messages of the client into the queue.

            Returns when the client has disconnected (False) or the server is stopping (True). If it is stopping, the
            queue ends with None.
            """
            try:
                while True:
                    await messages.put(await receive(socket, None))
            except ServerStopping:
                await messages.put(None)
                return True
            except WebSocketDisconnect:
                return False

        reader = asyncio.ensure_future(read())
        answers = asyncio.ensure_future(_answer_all(socket, service, store, messages))
        try:
            await asyncio.wait({reader, answers}, return_when=asyncio.FIRST_COMPLETED)
            # If the server is stopping, it has ended the answer, but the end is not sent yet.
            if answers.done() or reader.result():
                await answers
        finally:
            reader.cancel()
            answers.cancel()
            await asyncio.gather(reader, answers, return_exceptions=True)

    return router


async def _answer_all(
    socket: WebSocket, service: InferenceService, store: ResponseStore, messages: asyncio.Queue[str | bytes | None]
) -> None:
    own = ResponseStore(responses=1)
    with suppress(WebSocketDisconnect):
        try:
            while (message := await asyncio.wait_for(messages.get(), IDLE_S)) is not None:
                try:
                    await _answer(socket, service, store, own, message)
                except LabError as exc:
                    if not isinstance(exc, CallerError):
                        log.warning("%s: the WebSocket request failed: %s", socket.scope.get("lmx_lab.request_id"), exc)
                    detail: dict[str, Any] = detail_for(socket, exc).model_dump(mode="json")
                    if detail["param"] == "previous_response_id":
                        # Clients then send the whole conversation.
                        detail["code"] = "previous_response_not_found"
                    await send_text(socket, json_text({"type": "error", "status": status_of(exc), "error": detail}))
        except TimeoutError:
            await socket.close(NORMAL, f"no request within {IDLE_S:g} s")


async def _answer(
    socket: WebSocket, service: InferenceService, store: ResponseStore, own: ResponseStore, message: str | bytes
) -> None:
    """Answer a request.

    Args:
        own: The last response that was not stored.

    Raises:
        LabError: the request was refused.
    """
    body = await parse(message, service.manager.settings.max_body_bytes, ResponseCreate.model_validate)
    before = body.previous_response_id
    try:
        earlier = earlier_of(body, own, store)
        request, writer_for = await answer_request(body, earlier, own if body.store is False else store)
        with NAMES.in_errors():
            await send_answer(socket, service, request, writer_for, _message)
    except ContextLengthError as exc:
        # As in other streams, agents shorten the conversation after this event.
        writer = writer_for(body.model)
        for text in (*writer.begin(0, 0), *writer.error(exc, detail_for(socket, exc))):
            await send_text(socket, _message(text))
    except LabError:
        # The protocol requires that such a response is not continued again.
        if before is not None and before in own:
            own.delete(before)
        raise


def _message(event: str) -> str:
    """Return the data of an event of a stream."""
    return event.partition("\ndata: ")[2].removesuffix("\n\n")
