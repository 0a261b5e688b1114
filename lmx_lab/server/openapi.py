"""Parts of ``/openapi.json`` that FastAPI does not generate from the routes: events, the WebSocket, and errors."""

from __future__ import annotations

from typing import Any

from lmx_lab.errors import (
    AdminForbiddenError,
    ContextLengthError,
    EngineDeadError,
    GenerationTimeoutError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
    OutOfMemoryError,
    QueueFullError,
    StorageFullError,
)
from lmx_lab.http.openapi import BODY, failures, reference, websocket_response
from lmx_lab.values.engine import PressureEvent
from lmx_lab.values.models import ModelEvent
from lmx_lab.wire.admin import Heartbeat, Memory, RequestEvent, Sample, Throughput
from lmx_lab.wire.chat import ChatChunk, ChatRequest, SocketDone, SocketError, SocketToken
from lmx_lab.wire.cohere import CohereEvent
from lmx_lab.wire.completions import Completion
from lmx_lab.wire.messages import MessageEvent, MessagesError
from lmx_lab.wire.ollama import OllamaError, OllamaPullProgress
from lmx_lab.wire.responses import ResponseEvent

EVENTS: tuple[type, ...] = (Throughput, Memory, Heartbeat, ModelEvent, RequestEvent, Sample, PressureEvent)
"""The events of ``/admin/events``."""
EXTRA_MODELS: tuple[type, ...] = (
    ChatChunk,
    CohereEvent,
    Completion,
    MessageEvent,
    MessagesError,
    ResponseEvent,
    OllamaError,
    OllamaPullProgress,
    *EVENTS,
    SocketToken,
    SocketDone,
    SocketError,
)
"""Models of the document that are not the response of a route."""
ANSWER_DESCRIPTION = (
    "A completion or, with `stream: true`, its chunks as events, followed by `[DONE]`. An error after the first chunk "
    "is sent as the last event, instead of `[DONE]`"
)
"""Description of the response to a chat or a completion."""
_ENGINE = (NotLoadedError, OutOfMemoryError, EngineDeadError)
_INFERENCE = (*BODY, ContextLengthError, ModelNotFoundError, QueueFullError, *_ENGINE, GenerationTimeoutError)
INFERENCE_ERRORS = failures(*_INFERENCE)
"""Error responses of a request that a model answers."""
GENERATION_ERRORS = failures(*_INFERENCE, AdminForbiddenError)
"""Error responses of a request that a model answers, and of which some are for callers on this machine only: those with
``steer``, and traces."""
MESSAGES_ERRORS = failures(*_INFERENCE, body=MessagesError)
"""The same in the Messages format."""
OLLAMA_COMMON_ERRORS = failures(body=OllamaError)
"""Error responses of all routes of Ollama's API."""
OLLAMA_LISTING_ERRORS = failures(*BODY, ModelNotFoundError, body=OllamaError)
"""Error responses of the routes of Ollama's API about models on disk."""
OLLAMA_ERRORS = failures(*_INFERENCE, AdminForbiddenError, ModelBusyError, StorageFullError, body=OllamaError)
"""Error responses of the other routes of Ollama's API, which may also load and download models."""
LOAD_ERRORS = failures(*BODY, AdminForbiddenError, ModelNotFoundError, ModelBusyError, *_ENGINE, StorageFullError)
"""Error responses of a request that loads or unloads a model."""
SOCKET = f"""Answer one chat request over a WebSocket, which OpenAPI cannot describe.

The client sends one text message, a `{ChatRequest.__name__}` (`n` is 1 or absent). The server sends text messages: a
`{SocketToken.__name__}` for each piece of the answer, then one `{SocketDone.__name__}`, and waits for the client to
close the connection. If the request fails, the server sends a `{SocketError.__name__}` and closes: with code 1008 if
the request is wrong (1009 if it is too large), 1013 if it may succeed later, and 1011 for other failures. A client that
closes early ends the generation. Without an upgrade, the response is 404."""
MESSAGES = {"oneOf": [reference(model) for model in (SocketToken, SocketDone, SocketError)]}
SOCKETS: dict[str, dict[str, Any]] = {
    "/v1/chat/stream": {
        "tags": ["inference"],
        "summary": "Chat Stream",
        "description": SOCKET,
        "operationId": "inference_chat_stream",
        "responses": {
            **{str(status): response for status, response in websocket_response("With `Upgrade: websocket`").items()},
            **{str(status): response for status, response in failures(in_path=True).items()},
        },
        "x-websocket": {"sends": reference(ChatRequest), "receives": MESSAGES},
    }
}
