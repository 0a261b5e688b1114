"""What the OpenAPI documents of both servers say beyond what FastAPI finds out by itself: how a route may fail and with
which codes, what the events of a stream are, WebSockets, keys, what follows on what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lmx_lab.errors import (
    BodyTooLargeError,
    HostForbiddenError,
    InvalidRequestError,
    LabError,
    OriginForbiddenError,
    QueueFullError,
    UnauthorizedError,
)
from lmx_lab.http.error_bodies import status_for
from lmx_lab.wire.errors import ErrorBody

Responses = dict[int | str, dict[str, Any]]
PLACE = "#/components/schemas/{model}"
ANYWHERE: tuple[type[LabError], ...] = (UnauthorizedError, OriginForbiddenError, HostForbiddenError, LabError)
"""What any route may answer."""
BODY: tuple[type[LabError], ...] = (InvalidRequestError, BodyTooLargeError, QueueFullError)
"""What any route with a body may answer beside that."""
# FastAPI promises its own 422 unless a route has this.
NO_422 = "4XX"


def reference(model: type[BaseModel]) -> dict[str, str]:
    """To a shape that the document has."""
    return {"$ref": PLACE.format(model=model.__name__)}


# Failures


def _header(description: str, kind: str = "string", *, required: bool = False) -> dict[str, Any]:
    return {"description": description, "required": required, "schema": {"type": kind}}


HEADERS = {
    "x-request-id": _header("The id of this request, as in `error.request_id` and in the server's log", required=True),
    "x-lmx-lab": _header("The version of LMX Lab", required=True),
    "Retry-After": _header("Seconds after which it is worth another try; absent where none would help", "integer"),
    "x-should-retry": _header("`false` where sending the same again cannot help; otherwise absent"),
}
_PLACES = {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS}
ALWAYS = {name: _PLACES[name] for name in ("x-request-id", "x-lmx-lab")}
"""Headers of every answer."""


def failures(*errors: type[LabError], in_path: bool = False) -> Responses:
    """The failures of a route, and those of any route, by status: one body for all, and the codes of each.

    Args:
        in_path: The address has an id; with a slash in it, it is another address, of nothing.
    """
    codes: dict[int, list[str]] = {}
    for error in (*errors, *ANYWHERE):
        codes.setdefault(status_for(error), []).append(error.code)
    if in_path:
        codes.setdefault(HTTPStatus.NOT_FOUND, []).append(InvalidRequestError.code)
    return {status: _failure(status, list(dict.fromkeys(codes[status]))) for status in sorted(codes)}


def _failure(status: int, codes: Sequence[str]) -> dict[str, Any]:
    shown = ", ".join(f"`{code}`" for code in codes)
    narrowed = {"properties": {"error": {"properties": {"code": {"enum": list(codes)}}}}}
    return {
        "description": f"{HTTPStatus(status).phrase}: `error.code` is {'one of ' if len(codes) > 1 else ''}{shown}",
        "content": {"application/json": {"schema": {"allOf": [reference(ErrorBody), narrowed]}}},
        "headers": _PLACES,
    }


# Streams


def event_stream(*models: type[BaseModel], description: str, end: str | None = None) -> dict[str, Any]:
    """A response of server-sent events: ``data:`` lines, each the JSON of one of these models.

    Args:
        end: The data of the last event, which is no JSON.
    """
    places = [reference(model) for model in models]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": places[0] if len(places) == 1 else {"anyOf": places},
    }
    if end is not None:
        data = {"anyOf": [data, {"const": end}]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"content": {"text/event-stream": {"schema": event}}, "description": description}


def switching(description: str) -> Responses:
    """The response of a WebSocket. OpenAPI has no more words for them than this."""
    return {101: {"description": description}}


# What follows on what


def link(operation: str, description: str, *, body: Any = None, **parameters: str) -> dict[str, Any]:
    """A request that an answer makes possible; a value is where its parameter comes from."""
    made: dict[str, Any] = {"operationId": operation, "description": description}
    if body is not None:
        made["requestBody"] = body
    return {**made, "parameters": parameters} if parameters else made


def operation_id(route: APIRoute) -> str:
    """Such as ``sessions_create``."""
    return "_".join([*map(str, route.tags[:1]), route.name])


# The document


class DescribedAPI(FastAPI):
    """An application whose document has all of the above.

    Args:
        shapes: What is sent in other ways than as the answer of a route: events, messages of sockets.
        sockets: Operations (OpenAPI's) by the path of a WebSocket that FastAPI leaves out.
        key: What the key is called, and how a caller gives it; None where none is needed.
        open_paths: That need no key.
        most: The largest value of query parameters, by operation and name: what only a running server knows.
    """

    def __init__(
        self,
        *,
        shapes: Sequence[type[BaseModel]] = (),
        sockets: Mapping[str, dict[str, Any]] | None = None,
        key: tuple[str, str] | None = None,
        open_paths: frozenset[str] = frozenset(),
        most: Mapping[tuple[str, str], float] | None = None,
        **settings: Any,
    ) -> None:
        responses: Responses = {**failures(), NO_422: {}}
        super().__init__(responses=responses, generate_unique_id_function=operation_id, **settings)
        self._shapes: tuple[type[BaseModel], ...] = tuple(dict.fromkeys([ErrorBody, *shapes]))
        self._sockets = dict(sockets or {})
        self._key = key
        self._open_paths = open_paths
        self._most = dict(most or {})

    def openapi(self) -> dict[str, Any]:
        known = self.openapi_schema
        described = super().openapi()
        if described is not known:
            self._complete(described)
        return described

    def _complete(self, described: dict[str, Any]) -> None:
        sent: list[tuple[type[BaseModel], Literal["serialization"]]] = [(it, "serialization") for it in self._shapes]
        _, shapes = models_json_schema(sent, ref_template=PLACE)
        parts = described["components"]
        parts["headers"] = HEADERS
        parts["schemas"] = {**shapes["$defs"], **parts["schemas"]}
        for path, operation in self._sockets.items():
            described["paths"].setdefault(path, {})["get"] = operation
        if self._key is not None:
            name, hint = self._key
            parts["securitySchemes"] = {name: {"type": "http", "scheme": "bearer", "description": hint}}
            described["security"] = [{name: []}]
        for path, operation in operations(described):
            operation["responses"].pop(NO_422, None)
            for response in operation["responses"].values():
                response["headers"] = {**ALWAYS, **response.get("headers", {})}
            for parameter in operation.get("parameters", ()):
                most = self._most.get((operation["operationId"], parameter["name"]))
                parameter["schema"] = _as_text(parameter["schema"]) | ({} if most is None else {"maximum": most})
            if self._key is not None and path in self._open_paths:
                operation["security"] = []


def operations(described: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All of a document, with their paths."""
    for path, methods in described["paths"].items():
        for operation in methods.values():
            yield path, operation


def _as_text(schema: dict[str, Any]) -> dict[str, Any]:
    """Of a parameter: what may be absent from an address is no null there."""
    alternatives = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if len(alternatives) != 1:
        return schema
    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
    return {**alternatives[0], **rest}
