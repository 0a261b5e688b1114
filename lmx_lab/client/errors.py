"""Turn failed requests to a server into the package's error classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pydantic_core

from lmx_lab import errors
from lmx_lab.errors import (
    ERROR_CLASSES,
    ConnectionLostError,
    CursorExpiredError,
    LabError,
    UnauthorizedError,
    UnreachableError,
    WrongServerError,
)

CHECK = "check the address; the lab's server prints it when it starts"
MAX_CONTENT_TYPE_CHARACTERS = 200
EXPIRY_REASONS = ("pruned", "ahead", "other-stream")


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    """The kind of server that is expected at an address, as error messages describe it."""

    kind: str = "an LMX Lab server"
    start: str = "lmx-lab serve"
    """The command that starts it."""
    check: str = CHECK
    """The next step if the server runs but does not answer."""
    key: str = "api_key=KEY"
    """The argument with which Python callers give its key."""


LAB_SERVER = ServerDescription()
DAEMON = ServerDescription(
    kind="the lab's daemon",
    start="lmx-lab daemon",
    check="check the address; the daemon prints it when it starts",
    key="discover(), which reads the token of this user's daemon, or token=TOKEN",
)
CHAT_SERVER = ServerDescription(kind="a chat-format server")


@dataclass(frozen=True, kw_only=True)
class UnexpectedResponse:
    """A response that is an error, or not the requested document."""

    url: str
    """The server's address."""
    status: int
    content_type: str
    retry_after: str | None
    body: bytes
    server: ServerDescription = LAB_SERVER


ErrorReader = Callable[[UnexpectedResponse], LabError]


# Errors of LMX Lab servers


def lab_server_error(response: UnexpectedResponse) -> LabError:
    """Return the error for an unexpected response of an LMX Lab server."""
    error = parse_error(response.body, retry_after=response.retry_after, server=response.server)
    return error or wrong_server_error(response)


def parse_error(
    text: str | bytes, *, retry_after: str | None = None, server: ServerDescription = LAB_SERVER
) -> LabError | None:
    """Parse an error body, or the error event of a stream. Returns None if the text is neither."""
    try:
        body: Any = pydantic_core.from_json(text)
    except ValueError:
        return None
    detail = body.get("error") if isinstance(body, Mapping) else None
    message = detail.get("message") if isinstance(detail, Mapping) else None
    if not isinstance(detail, Mapping) or not isinstance(message, str):
        return None
    code, param = detail.get("code"), detail.get("param")
    kind = ERROR_CLASSES.get(code) if isinstance(code, str) else None
    if kind is None and code is not None:
        message = f"{message} ({code!s:.80})"
    if kind is UnauthorizedError:
        message = f"{message}; in Python, give {server.key}"
    param = param if isinstance(param, str) else None
    retry_after_s = _seconds(retry_after)
    if kind is CursorExpiredError and (reason := detail.get("reason")) in EXPIRY_REASONS:
        return CursorExpiredError(message, reason=reason, param=param, retry_after_s=retry_after_s)
    return (kind or LabError)(message, param=param, retry_after_s=retry_after_s)


def _seconds(text: str | None) -> float | None:
    """Return the seconds in a Retry-After header. A date, which a proxy may send, is ignored."""
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


# Errors of other programs, and of connections


def wrong_server_error(response: UnexpectedResponse) -> UnreachableError:
    """Return the error for a response of another program, a proxy or a login page."""
    content_type = response.content_type.partition(";")[0].strip()[:MAX_CONTENT_TYPE_CHARACTERS] or "no content type"
    if 300 <= response.status < 400 or response.status in (401, 403):
        hint = "a proxy or login page before the server asks for a login: give its token as the key, or use the "
        hint += "server's own address"
    elif response.status in (500, 502, 503, 504):
        hint = "a proxy answers, but not the server behind it; check that the server is running"
    else:
        hint = response.server.check
    message = f"{response.url} answered {response.status} with {content_type}, unlike {response.server.kind}; {hint}"
    error = UnreachableError if response.status >= 500 else WrongServerError
    return error(message, retry_after_s=_seconds(response.retry_after))


@contextmanager
def translated_errors(url: str, *, has_begun: bool = False, server: ServerDescription = LAB_SERVER) -> Iterator[None]:
    """Translate connection errors raised in the block to ``UnreachableError`` with the address and the next step.

    Args:
        has_begun: Whether part of the response has been received.
    """
    try:
        yield
    # The causes are suppressed: the HTTP library's traceback has a hundred lines, and the message contains the reason.
    except httpx2.ConnectTimeout:
        message = f"{url} did not accept the connection in time; check the address, and that its machine is reachable"
        raise UnreachableError(message) from None
    except (httpx2.ConnectError, httpx2.ProxyError, httpx2.UnsupportedProtocol) as exc:
        message = f"nothing answers at {url} ({exc!s:.200}); start the server ({server.start}), or {server.check}"
        raise UnreachableError(message) from None
    except httpx2.TimeoutException:
        raise UnreachableError(f"{url} sent nothing within the time limit; try again, or raise timeout_s") from None
    except httpx2.DecodingError as exc:
        raise UnreachableError(f"the response of {url} cannot be decoded ({exc!s:.200}); {server.check}") from exc
    except httpx2.TransportError as exc:
        when = "during the response" if has_begun else "before the response"
        reason = f"{exc!s:.200}" or type(exc).__name__
        raise ConnectionLostError(
            f"{url} closed the connection {when} ({reason}); try again when the server is back"
        ) from None


def was_sent(error: LabError) -> bool:
    """Whether a request that ended with this error may have reached a server."""
    return not isinstance(error.__context__, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)


# Errors of chat-format servers

MAX_MESSAGE_CHARACTERS = 500
# Messages of llama.cpp, vLLM, OpenAI and LM Studio, sent with status 400 or 500.
CONTEXT_TOO_LONG = re.compile(r"context.{0,20}(length|size|window)|exceed_context_size|too many tokens", re.IGNORECASE)
MODEL_MISSING = re.compile(r"model|repo", re.IGNORECASE)
MODEL_LOADING = re.compile(r"loading", re.IGNORECASE)
CLASS_BY_STATUS: dict[int, type[LabError]] = {
    400: errors.InvalidRequestError,
    401: errors.UnauthorizedError,
    403: errors.UnauthorizedError,
    413: errors.BodyTooLargeError,
    422: errors.InvalidRequestError,
    429: errors.QueueFullError,
}


def chat_server_error(response: UnexpectedResponse) -> LabError:
    """Return the error for an unexpected response of any chat-format server.

    Known formats: ``{"error": {"message", "type", "code", "param"}}`` with a word or a status as its code (OpenAI,
    llama.cpp, vLLM, Ollama), ``{"error": "…"}`` (mlx_lm.server, LM Studio), ``{"object": "error", "message": …}``
    (older vLLM), ``{"detail": …}`` (FastAPI).
    """
    return _chat_error(response.body, response) or wrong_server_error(response)


def parse_chat_error(text: str, url: str) -> LabError | None:
    """Parse an error event of a stream, or an error document instead of a stream. Returns None if it is neither."""
    return _chat_error(text, UnexpectedResponse(url=url, status=500, content_type="", retry_after=None, body=b""))


def _chat_error(text: str | bytes, response: UnexpectedResponse) -> LabError | None:
    try:
        document = pydantic_core.from_json(text)
    except ValueError:
        return None
    if not isinstance(document, Mapping) or (detail := _error_detail(document)) is None:
        return None
    if (kind := _error_class(detail, response.status)) is None:
        # A code of LMX Lab, whose message is complete.
        return parse_error(text, retry_after=response.retry_after)
    message = f"error of {response.url}: {detail['message']:.{MAX_MESSAGE_CHARACTERS}}"
    return kind(message, retry_after_s=_seconds(response.retry_after))


def _error_detail(document: Mapping[str, Any]) -> dict[str, Any] | None:
    detail = document.get("error")
    if isinstance(detail, Mapping):
        return {**detail, "message": str(detail.get("message") or detail.get("code") or "an error without a message")}
    if isinstance(detail, str) and detail:
        return {"message": detail}
    if document.get("object") == "error":
        return {**document, "message": str(document.get("message"))}
    if "detail" in document:
        return {"message": str(document["detail"])}
    return None


def _error_class(detail: Mapping[str, Any], status: int) -> type[LabError] | None:
    """Return the class of the error; None if its code is one of LMX Lab's."""
    code = detail.get("code")
    if isinstance(code, str) and code in ERROR_CLASSES:
        return None
    if isinstance(code, int) and code in range(400, 600):
        # llama.cpp may send an error with the status 200.
        status = code
    if CONTEXT_TOO_LONG.search(f"{detail['message']} {code} {detail.get('type')}"):
        return errors.ContextLengthError
    if code == "model_not_found" or (status == 404 and MODEL_MISSING.search(detail["message"])):
        return errors.ModelNotFoundError
    if status == 503 and MODEL_LOADING.search(detail["message"]):
        return errors.ModelBusyError
    return CLASS_BY_STATUS.get(status, errors.EngineError)
