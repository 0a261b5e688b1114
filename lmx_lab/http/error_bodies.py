"""Errors on the wire: which status each has, and the one body they all share."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Match

from lmx_lab import errors
from lmx_lab.errors import CallerError, InvalidRequestError, LabError
from lmx_lab.http.guard import is_local
from lmx_lab.wire.errors import ErrorBody, ErrorDetail

log = logging.getLogger(__name__)


# Looked up along the class's MRO, so a new error has its parent's status until it gets a row of its own.
STATUS: dict[type[LabError], int] = {
    errors.LabError: 500,
    errors.CallerError: 400,
    errors.BodyTooLargeError: 413,
    errors.ModelNotFoundError: 404,
    errors.UnauthorizedError: 401,
    errors.AdminForbiddenError: 403,
    errors.NotFoundError: 404,
    errors.ConflictError: 409,
    errors.GoneError: 410,
    errors.OriginForbiddenError: 403,
    errors.HostForbiddenError: 421,
    errors.UnavailableError: 503,
    errors.ModelBusyError: 409,
    errors.QueueFullError: 429,
    errors.StorageFullError: 507,
    errors.UpstreamUnreachableError: 502,
    errors.EngineError: 500,
    errors.GenerationTimeoutError: 504,
    errors.OutOfMemoryError: 503,
    errors.EngineDeadError: 503,
}
# Sending the same again at once cannot help, and chat clients would, twice, for every status from 500 up; unless the
# error says after how many seconds it can.
NO_RETRY = (
    errors.NotLoadedError,
    errors.OutOfMemoryError,
    errors.StorageFullError,
    errors.GenerationTimeoutError,
    errors.EngineDeadError,
    errors.ModelBusyError,
)
# nginx's word for it: the client has closed the request.
CLIENT_CLOSED = 499
# There is no number for "no limit"; -1 and 0 are such elsewhere.
LEFT_OUT = {
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens"),
        "for no limit but the model's context give a large number, such as 1000000",
    ),
    "top_n": "for all documents leave it out",
    "dimensions": "for all that the model has leave it out",
}
REQUEST_PARTS = ("body", "query")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
ALTERNATIVES = ("str", "constrained-str")
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def status_for(error: type[LabError]) -> int:
    return next(STATUS[kind] for kind in error.__mro__ if kind in STATUS)


def status_of(error: LabError) -> int:
    return status_for(type(error))


def detail(error: LabError, request_id: str | None) -> ErrorDetail:
    status = status_of(error)
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return ErrorDetail(
        code=error.code,
        message=error.message,
        type=kind,
        param=error.param,
        retryable=not isinstance(error, CallerError) and not _is_final(error),
        request_id=request_id,
        reason=error.reason if isinstance(error, errors.CursorExpiredError) else None,
    )


def _is_final(error: LabError) -> bool:
    return isinstance(error, NO_RETRY) and error.retry_after_s is None


def respond(error: LabError, status: int | None = None, request_id: str | None = None) -> JSONResponse:
    """The whole answer to a failed request."""
    return _answer(error, detail(error, request_id), status or status_of(error))


def _answer(error: LabError, shown: ErrorDetail, status: int) -> JSONResponse:
    headers = {}
    if _is_final(error):
        headers["x-should-retry"] = "false"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(ErrorBody(error=shown).model_dump(), status_code=status, headers=headers)


def detail_for(connection: HTTPConnection, error: LabError) -> ErrorDetail:
    """``detail`` as this caller may see it. If the application has ``state.without_paths``, which removes paths from a
    message, only local callers see paths.
    """
    shown = detail(error, request_id_of(connection))
    without_paths: Callable[[str], str] | None = getattr(connection.app.state, "without_paths", None)
    if without_paths is None or is_local(connection.scope):
        return shown
    return shown.model_copy(update={"message": without_paths(shown.message)})


def request_id_of(connection: HTTPConnection) -> str | None:
    request_id: str | None = connection.scope.get("lmx_lab.request_id")
    return request_id


def invalid(exc: ValidationError | RequestValidationError) -> InvalidRequestError:
    """The first thing that is wrong with a body, by field."""
    wrong = _first(list(exc.errors()))
    # A part may be a name that the caller chose, of any length.
    parts = _fields(exc, wrong["loc"])
    # What is no field may look like the name of a type.
    last = len(parts) - 1 if wrong["type"] == "extra_forbidden" else None
    path = [str(part)[:80] for at, part in enumerate(parts) if at == last or not _is_alternative(part)]
    field = ".".join(path)
    said = f"{_said(wrong)}{_given(wrong.get('input'))}"
    if wrong["type"] == "greater_than_equal" and path[-1:] and path[-1] in LEFT_OUT:
        said = f"{said}; {LEFT_OUT[path[-1]]}"
    return InvalidRequestError(f"{field or 'body'}: {said}", param=field or None)


def _said(wrong: dict[str, Any]) -> str:
    """What is wrong; in words of our own where pydantic's name its steps, or do not know the number."""
    match wrong["type"]:
        case "extra_forbidden":
            return "is not a field of this request, or not supported by this version; leave it out"
        case "too_long":
            most = wrong["ctx"]["max_length"]
            return f"has {len(wrong['input'])} items, the limit is {most}; send at most {most}"
        case "too_short":
            return f"has {len(wrong['input'])} items; send at least {wrong['ctx']['min_length']}"
        case _:
            return str(wrong["msg"]).removeprefix("Value error, ")


def _given(value: Any) -> str:
    # From the notebook an integer may be longer than Python writes out.
    if not isinstance(value, str | int | float) or (isinstance(value, int) and value.bit_length() > 1000):
        return ""
    # Cut first: the repr of a text of 8 MB takes tens of milliseconds.
    shown = value[:80] if isinstance(value, str) else value
    return f" (given: {shown!r:.80})"


def _first(problems: list[Any]) -> dict[str, Any]:
    """The first problem; of a union's alternatives the one that got furthest, which is what the caller meant."""
    first = problems[0]
    if not (first["loc"] and _is_alternative(first["loc"][-1])):
        return dict(first)
    field = first["loc"][:-1]
    alternatives = [problem for problem in problems if problem["loc"][: len(field)] == field]
    # Of two that got equally far, the one whose type was right.
    return dict(max(alternatives, key=lambda problem: (len(problem["loc"]), not problem["type"].endswith("_type"))))


def _fields(exc: ValidationError | RequestValidationError, path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """FastAPI puts the part of the request in front; a field may have the same name."""
    in_front = isinstance(exc, RequestValidationError) and path[:1] and path[0] in REQUEST_PARTS
    return path[1:] if in_front else path


def _is_alternative(part: str | int) -> bool:
    """A union puts the type it tried into the path."""
    return part in ALTERNATIVES or "[" in str(part)


async def on_lab_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, LabError)
    if not isinstance(exc, CallerError):
        log.warning("%s %s failed (%s): %s", request.method, request.url.path, request_id_of(request), exc)
    return _answer(exc, detail_for(request, exc), status_of(exc))


async def on_invalid(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError | ValidationError)
    return respond(invalid(exc), request_id=request_id_of(request))


async def on_http_error(request: Request, exc: Exception) -> JSONResponse:
    """Routes that do not exist, methods that a route does not have."""
    assert isinstance(exc, HTTPException)
    said = f"{request.method} {request.url.path}: {exc.detail}; see {request.app.openapi_url} for what there is"
    error = InvalidRequestError(said)
    response = respond(error, status=exc.status_code, request_id=request_id_of(request))
    response.headers.update(exc.headers or {})
    if exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        response.headers["allow"] = ", ".join(_methods_at(request))
    return response


def _methods_at(request: Request) -> list[str]:
    """What the address takes. Starlette names the methods of one route only, and there is a route for each method."""

    def taken(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in METHODS if taken(method)]


async def on_gone(request: Request, exc: Exception) -> Response:
    """The client has left, while sending or while waiting; nobody will read this."""
    return Response(status_code=CLIENT_CLOSED)


async def on_bug(request: Request, exc: Exception) -> JSONResponse:
    request_id = request_id_of(request)
    log.error("%s %s failed (%s)", request.method, request.url.path, request_id, exc_info=exc)
    return respond(LabError(f"internal error; the log has the details under {request_id}"), request_id=request_id)
