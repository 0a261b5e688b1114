"""Errors of requests to a server, as the package's own error classes."""

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
SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    """The server that is expected at an address, as error messages describe it."""

    kind: str = "an LMX Lab server"
    start: str = "lmx-lab serve"
    """The command that starts it."""
    check: str = CHECK
    """The next step if the server runs and does not answer."""
    key: str = "api_key=KEY"
    """The argument by which Python callers give its key."""


LAB_SERVER = ServerDescription()
DAEMON = ServerDescription(
    kind="the lab's daemon",
    start="lmx-lab daemon",
    check="check the address; the daemon prints it when it starts",
    key="discover(), which reads the token of this user's daemon, or token=TOKEN",
)


@dataclass(frozen=True, kw_only=True)
class UnexpectedResponse:
    """A response that is not the one that was requested."""

    url: str
    """The server's address."""
    status: int
    kind: str
    """The Content-Type header."""
    retry_after: str | None
    body: bytes
    server: ServerDescription = LAB_SERVER


REASONS = ("pruned", "ahead", "other-stream")
ErrorReader = Callable[[UnexpectedResponse], LabError]
"""Makes an error from a response that is not a success."""


def error_in(
    text: str | bytes, *, retry_after: str | None = None, server: ServerDescription = LAB_SERVER
) -> LabError | None:
    """Parse an error body, or the error event of a stream; returns None if the text is neither."""
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
        message = f"{message}; in Python that is {server.key}"
    param = param if isinstance(param, str) else None
    if kind is CursorExpiredError and (reason := detail.get("reason")) in REASONS:
        return CursorExpiredError(message, reason=reason, param=param, retry_after_s=_seconds(retry_after))
    error = kind or LabError
    return error(message, param=param, retry_after_s=_seconds(retry_after))


def lab_server_error(answer: UnexpectedResponse) -> LabError:
    """The error for a response of a lab's server that is not a success, or not the requested document."""
    return error_in(answer.body, retry_after=answer.retry_after, server=answer.server) or wrong_server_error(answer)


def wrong_server_error(answer: UnexpectedResponse) -> UnreachableError:
    """The error for a response of another program, a proxy or a login page."""
    kind = answer.kind.partition(";")[0].strip()[:SHOWN] or "no content type"
    if 300 <= answer.status < 400 or answer.status in (401, 403):
        hint = "something in front of the server wants a login: give its token as the key, or the server's own address"
    elif answer.status in (500, 502, 503, 504):
        hint = "a proxy answers, and the server behind it does not; is it running?"
    else:
        hint = answer.server.check
    said = f"{answer.url} answered {answer.status} with {kind}, unlike {answer.server.kind}; {hint}"
    error = UnreachableError if answer.status >= 500 else WrongServerError
    return error(said, retry_after_s=_seconds(answer.retry_after))


@contextmanager
def translated_errors(url: str, *, begun: bool = False, server: ServerDescription = LAB_SERVER) -> Iterator[None]:
    """Translate connection errors raised in the block to ``UnreachableError`` with the address and the next step.

    Args:
        begun: Whether part of the response was received already.
    """
    try:
        yield
    except httpx2.ConnectTimeout as exc:
        said = f"{url} did not take the connection in time; is the address right, and its machine reachable?"
        raise UnreachableError(said) from exc
    except (httpx2.ConnectError, httpx2.ProxyError, httpx2.UnsupportedProtocol) as exc:
        said = f"nothing answers at {url} ({exc!s:.200}); is the server running ({server.start})? If so, {server.check}"
        raise UnreachableError(said) from exc
    except httpx2.TimeoutException as exc:
        raise UnreachableError(f"{url} said nothing within its time limit; ask again, or raise timeout_s") from exc
    except httpx2.DecodingError as exc:
        raise UnreachableError(f"the answer of {url} cannot be read ({exc!s:.200}); {server.check}") from exc
    except httpx2.TransportError as exc:
        when = "in the middle of its answer" if begun else "before it answered"
        reason = f"{exc!s:.200}" or type(exc).__name__
        raise ConnectionLostError(f"{url} went away {when} ({reason}); ask again once it is back") from exc


def was_sent(error: LabError) -> bool:
    """Whether a request that ended with this error may have reached a server."""
    return not isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)


def _seconds(text: str | None) -> float | None:
    # A proxy may send a date; it is ignored.
    return float(text) if text is not None and text.isascii() and text.isdigit() else None


CHAT_SERVER = ServerDescription(kind="a chat-format server")
MESSAGE_CHARACTERS = 500
# Messages of llama.cpp, vLLM, OpenAI and LM Studio, sent with status 400 or 500.
TOO_LONG = re.compile(r"context.{0,20}(length|size|window)|exceed_context_size|too many tokens", re.IGNORECASE)
NO_MODEL = re.compile(r"model|repo", re.IGNORECASE)
LOADING = re.compile(r"loading", re.IGNORECASE)
BY_STATUS: dict[int, type[LabError]] = {
    400: errors.InvalidRequestError,
    401: errors.UnauthorizedError,
    403: errors.UnauthorizedError,
    413: errors.BodyTooLargeError,
    422: errors.InvalidRequestError,
    429: errors.QueueFullError,
}


def chat_server_error(answer: UnexpectedResponse) -> LabError:
    """The error for a response of a chat-format server of any make that is not a success.

    Known formats: ``{"error": {"message", "type", "code", "param"}}`` with a word or a status as its code (OpenAI,
    llama.cpp, vLLM, Ollama), ``{"error": "…"}`` (mlx_lm.server, LM Studio), ``{"object": "error", "message": …}``
    (older vLLM), ``{"detail": …}`` (FastAPI).
    """
    return _chat_error(answer.body, answer) or wrong_server_error(answer)


def error_in_chat_event(text: str, url: str) -> LabError | None:
    """Parse an error event of a stream, or an error document in place of a stream; returns None if it is neither."""
    return _chat_error(text, UnexpectedResponse(url=url, status=500, kind="", retry_after=None, body=b""))


def _chat_error(text: str | bytes, answer: UnexpectedResponse) -> LabError | None:
    try:
        document = pydantic_core.from_json(text)
    except ValueError:
        return None
    if not isinstance(document, Mapping) or (detail := _error_detail(document)) is None:
        return None
    if (kind := _error_class(detail, answer.status)) is None:
        # A code of LMX Lab, whose message is complete.
        return error_in(text, retry_after=answer.retry_after)
    retry_after = answer.retry_after or ""
    advised = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else None
    return kind(f"{answer.url} says: {detail['message']:.{MESSAGE_CHARACTERS}}", retry_after_s=advised)


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
    code = detail.get("code")
    if isinstance(code, str) and code in ERROR_CLASSES:
        return None
    if isinstance(code, int) and code in range(400, 600):
        # llama.cpp may send an error with the status 200.
        status = code
    if TOO_LONG.search(f"{detail['message']} {code} {detail.get('type')}"):
        return errors.ContextLengthError
    if code == "model_not_found" or (status == 404 and NO_MODEL.search(detail["message"])):
        return errors.ModelNotFoundError
    if status == 503 and LOADING.search(detail["message"]):
        return errors.ModelBusyError
    return BY_STATUS.get(status, errors.EngineError)
