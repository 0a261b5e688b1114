"""Whatever goes wrong between here and a server, as the package's own errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pydantic_core

from lmx_lab import errors
from lmx_lab.errors import (
    ConnectionLostError,
    CursorExpiredError,
    LabError,
    UnauthorizedError,
    UnreachableError,
    WrongServerError,
)

ERROR_CLASSES: dict[str, type[LabError]] = {
    kind.code: kind
    for kind in (
        errors.LabError,
        errors.InvalidRequestError,
        errors.BodyTooLargeError,
        errors.ContextLengthError,
        errors.ModelNotFoundError,
        errors.UnauthorizedError,
        errors.HostForbiddenError,
        errors.OriginForbiddenError,
        errors.AdminForbiddenError,
        errors.NotFoundError,
        errors.SessionNotFoundError,
        errors.TurnNotFoundError,
        errors.PermissionNotFoundError,
        errors.McpServerNotFoundError,
        errors.ConflictError,
        errors.TurnInProgressError,
        errors.IdempotencyConflictError,
        errors.AlreadyResolvedError,
        errors.RevisionConflictError,
        errors.McpServerExistsError,
        errors.GoneError,
        errors.CursorExpiredError,
        errors.PermissionExpiredError,
        errors.NotLoadedError,
        errors.ModelBusyError,
        errors.QueueFullError,
        errors.StorageFullError,
        errors.DownloadError,
        errors.UnreachableError,
        errors.ConnectionLostError,
        errors.UpstreamUnreachableError,
        errors.StoppingError,
        errors.GenerationTimeoutError,
        errors.OutOfMemoryError,
        errors.TurnError,
        errors.DaemonRestartedError,
        errors.TurnTimeoutError,
        errors.HostingError,
        errors.PortTakenError,
        errors.DaemonRunningError,
    )
}
"""By the code in a server's answer: of classes that share one, the one that says no more than the code does."""
CHECK = "check the address; the lab's server prints it when it starts"
SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class ServerDescription:
    """The server that is expected at an address, in the words of errors."""

    kind: str = "an LMX Lab server"
    start: str = "lmx-lab serve"
    """What runs it."""
    check: str = CHECK
    """What to do if it runs and does not answer."""
    key: str = "api_key=KEY"
    """How Python's callers give its key."""


LAB_SERVER = ServerDescription()
DAEMON = ServerDescription(
    kind="the lab's daemon",
    start="lmx-lab daemon",
    check="check the address; the daemon prints it when it starts",
    key="discover(), which reads the token of this user's daemon, or token=TOKEN",
)


@dataclass(frozen=True, kw_only=True)
class UnexpectedResponse:
    """What a server said in the place of what was asked for."""

    url: str
    """The server's."""
    status: int
    kind: str
    """Its Content-Type."""
    retry_after: str | None
    body: bytes
    server: ServerDescription = LAB_SERVER


REASONS = ("pruned", "ahead", "other-stream")
ErrorReader = Callable[[UnexpectedResponse], LabError]
"""What an answer that is no success means."""


def error_in(
    text: str | bytes, *, retry_after: str | None = None, server: ServerDescription = LAB_SERVER
) -> LabError | None:
    """The error that an error body, or a stream's last event, tells of; None if it is neither."""
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
    """The error of an answer that is no success, or not what was asked for."""
    return error_in(answer.body, retry_after=answer.retry_after, server=answer.server) or wrong_server_error(answer)


def wrong_server_error(answer: UnexpectedResponse) -> UnreachableError:
    """Of what the lab's server would not say: another program, a proxy, a login page."""
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
    """Errors of the connection, raised in the block, become ``UnreachableError`` with the address and the next step.

    Args:
        begun: The answer has begun to come.
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
    # A proxy may send a date, too; then there is no advice.
    return float(text) if text is not None and text.isascii() and text.isdigit() else None
