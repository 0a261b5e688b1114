"""Convert errors to HTTP responses: the status of each error, and the body that all of them share."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from http import HTTPStatus

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Match
from starlette.types import Scope

from lmx_lab import errors
from lmx_lab.errors import CallerError, InvalidRequestError, LabError, did_you_mean
from lmx_lab.http.guard import is_local, is_loopback
from lmx_lab.wire.base import request_class
from lmx_lab.wire.errors import ErrorBody, ErrorDetail, invalid_request

log = logging.getLogger(__name__)

# Looked up along the MRO of a class, so a new error has its parent's status until it gets its own entry.
STATUS: dict[type[LabError], int] = {
    errors.LabError: 500,
    errors.CallerError: 400,
    errors.BodyTooLargeError: 413,
    errors.SlowRequestError: 408,
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
# An immediate retry of these requests cannot succeed. Chat clients retry every status of 500 or more twice, so the
# response tells them not to, unless the error contains a time after which a retry can succeed.
NO_RETRY = (
    errors.NotLoadedError,
    errors.OutOfMemoryError,
    errors.StorageFullError,
    errors.GenerationTimeoutError,
    errors.EngineDeadError,
    errors.ModelBusyError,
)
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}

ErrorForm = Callable[[ErrorDetail, int], BaseModel]
"""Returns the body of an error and its status in a format of its own."""


def status_of(error: LabError | type[LabError]) -> int:
    """Return the HTTP status of an error, or of a class of errors."""
    given = error if isinstance(error, type) else type(error)
    return next(STATUS[kind] for kind in given.__mro__ if kind in STATUS)


def error_detail(error: LabError, request_id: str | None) -> ErrorDetail:
    """Convert an error to its form on the wire."""
    status = status_of(error)
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
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


def respond(
    scope: Scope, error: LabError, detail: ErrorDetail | None = None, *, status: int | None = None
) -> JSONResponse:
    """Return the response to a failed request.

    Args:
        detail: The form of the error that this caller may see; by default all of it.
        status: By default that of the error.
    """
    detail = detail or error_detail(error, scope.get("lmx_lab.request_id"))
    status = status or status_of(error)
    headers = {}
    if _is_final(error):
        headers["x-should-retry"] = "false"
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, errors.UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    forms: Mapping[str, ErrorForm] = scope.get("lmx_lab.error_forms", {})
    form = next((form for path, form in forms.items() if scope["path"].startswith(path)), None)
    body = ErrorBody(error=detail) if form is None else form(detail, status)
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def detail_for(connection: HTTPConnection, error: LabError) -> ErrorDetail:
    """Convert an error to the form that this caller may see.

    If the application has ``state.without_paths``, which removes paths from a message, only local callers see paths.
    """
    detail = error_detail(error, connection.scope.get("lmx_lab.request_id"))
    without_paths: Callable[[str], str] | None = getattr(connection.app.state, "without_paths", None)
    if without_paths is None or is_local(connection.scope):
        return detail
    return detail.model_copy(update={"message": without_paths(detail.message)})


def client_of(connection: HTTPConnection) -> str:
    """Return the address of the client, among which slots are shared.

    Behind a proxy on this machine, it is followed by the address that the proxy has added. Clients can choose it if the
    proxy adds none, but then they all come from the same proxy.
    """
    if connection.client is None:
        return "unknown"
    address = connection.client.host
    forwarded = connection.headers.getlist("x-forwarded-for") if is_loopback(address) else []
    return f"{address} {forwarded[-1].rpartition(',')[2].strip()[:100]}" if forwarded else address


def validation_error(exc: ValidationError | RequestValidationError) -> InvalidRequestError:
    """Return the error for the first invalid field of a request."""
    if isinstance(exc, ValidationError):
        return invalid_request(exc.errors(), shape=request_class(exc.title))
    problems = []
    for problem in exc.errors():
        path = problem["loc"]
        # FastAPI puts the part of the request first, which could also be the name of a field.
        has_part = path[:1] in (("body",), ("query",))
        problems.append({**problem, "loc": path[1:] if has_part else path})
    return invalid_request(problems)


async def on_lab_error(request: Request, exc: Exception) -> JSONResponse:
    """Respond to an error of this package."""
    assert isinstance(exc, LabError)
    if not isinstance(exc, CallerError):
        log.warning(
            "%s %s failed (%s): %s", request.method, request.url.path, request.scope.get("lmx_lab.request_id"), exc
        )
    return respond(request.scope, exc, detail_for(request, exc))


async def on_invalid(request: Request, exc: Exception) -> JSONResponse:
    """Respond to a body or a query that is not valid."""
    assert isinstance(exc, RequestValidationError | ValidationError)
    return respond(request.scope, validation_error(exc))


async def on_http_error(request: Request, exc: Exception) -> JSONResponse:
    """Respond to an unknown path, or a method that a route does not support."""
    assert isinstance(exc, HTTPException)
    similar = ""
    if exc.status_code == HTTPStatus.NOT_FOUND:
        # A prefix such as /v1 is similar to any short path below it.
        below = f"{request.url.path.rstrip('/')}/"
        paths = [context.path or "" for context in iter_route_contexts(request.app.routes)]
        similar = did_you_mean(request.url.path, [path for path in paths if path and not path.startswith(below)])
    message = (
        f"{request.method} {request.url.path}: {exc.detail}{similar}; see {request.app.openapi_url} for all routes"
    )
    response = respond(request.scope, InvalidRequestError(message), status=exc.status_code)
    response.headers.update(exc.headers or {})
    if exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names the methods of one route only, and each method has its own route.
        methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
        scopes = {method: {**request.scope, "method": method} for method in methods}
        matching = [
            method
            for method, scope in scopes.items()
            if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
        ]
        response.headers["allow"] = ", ".join(matching)
    return response


async def on_disconnect(request: Request, exc: Exception) -> Response:
    """Respond to a client that disconnected while it was sending or waiting. It does not receive this response."""
    # nginx's status for a request that the client has closed.
    return Response(status_code=499)


async def on_bug(request: Request, exc: Exception) -> JSONResponse:
    """Respond to any other exception, and log it."""
    request_id = request.scope.get("lmx_lab.request_id")
    log.error("%s %s failed (%s)", request.method, request.url.path, request_id, exc_info=exc)
    failure = LabError(f"internal error; the log contains the details for {request_id}")
    response = respond(request.scope, failure)
    # Starlette raises the exception again after this response, and the connection is closed.
    response.headers["connection"] = "close"
    return response
