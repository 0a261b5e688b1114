"""Complete the OpenAPI documents of both servers with what FastAPI does not know.

These are the errors of each route with their codes, the events of streams, WebSockets, keys, and links between
requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter

from lmx_lab.errors import (
    BodyTooLargeError,
    HostForbiddenError,
    InvalidRequestError,
    LabError,
    OriginForbiddenError,
    QueueFullError,
    UnauthorizedError,
)
from lmx_lab.http.errors import status_of
from lmx_lab.wire.errors import ErrorBody

Responses = dict[int | str, dict[str, Any]]
JSON_LINES = "application/x-ndjson"
"""Media type of JSON values that are separated by line ends."""
SCHEMA_REF = "#/components/schemas/{model}"
COMMON_ERRORS: tuple[type[LabError], ...] = (UnauthorizedError, OriginForbiddenError, HostForbiddenError, LabError)
"""Errors that any route can return."""
BODY: tuple[type[LabError], ...] = (InvalidRequestError, BodyTooLargeError, QueueFullError)
"""Errors that any route with a body can return, in addition to the common ones."""
# FastAPI documents its own status 422 unless a route has a response with this key.
NO_422 = "4XX"


def reference(model: type) -> dict[str, str]:
    """Return a reference to a schema in the document; for ``dict``, the schema of any object."""
    return {"type": "object"} if model is dict else {"$ref": SCHEMA_REF.format(model=model.__name__)}


# Errors


def _header(description: str, kind: str = "string", *, required: bool = False) -> dict[str, Any]:
    return {"description": description, "required": required, "schema": {"type": kind}}


HEADERS = {
    "x-request-id": _header("The id of this request, as in `error.request_id` and in the server's log", required=True),
    "x-lmx-lab": _header("The version of LMX Lab", required=True),
    "Retry-After": _header("Seconds after which another attempt may succeed; absent if none can", "integer"),
    "x-should-retry": _header("`false` if sending the same request again cannot help; otherwise absent"),
}
_HEADER_REFS = {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS}
COMMON_HEADERS = {name: _HEADER_REFS[name] for name in ("x-request-id", "x-lmx-lab")}
"""Headers of every response."""


def failures(*errors: type[LabError], in_path: bool = False, body: type[BaseModel] = ErrorBody) -> Responses:
    """Return the error responses of a route by status, including the common ones, with the possible codes.

    Args:
        in_path: Whether the path contains an id. An id with a slash makes it another path, which does not exist.
        body: The body of the responses.
    """
    codes: dict[int, list[str]] = {}
    for error in (*errors, *COMMON_ERRORS):
        codes.setdefault(status_of(error), []).append(error.code)
    if in_path:
        codes.setdefault(HTTPStatus.NOT_FOUND, []).append(InvalidRequestError.code)
    responses: Responses = {}
    for status, named in sorted(codes.items()):
        possible = list(dict.fromkeys(named))
        shown = f"{'one of ' if len(possible) > 1 else ''}{', '.join(f'`{code}`' for code in possible)}"
        code: dict[str, Any] = {"properties": {"code": {"enum": possible}}}
        is_flat = "code" in body.model_fields
        field, narrowed = ("code", code) if is_flat else ("error.code", {"properties": {"error": code}})
        responses[status] = {
            "description": f"{HTTPStatus(status).phrase}: `{field}` is {shown}",
            "content": {"application/json": {"schema": {"allOf": [reference(body), narrowed]}}},
            "headers": _HEADER_REFS,
        }
    return responses


# Streams


def event_stream(*models: type, description: str, end: str | None = None) -> dict[str, Any]:
    """Return a response of server-sent events: ``data:`` lines that contain the JSON of one of these models.

    Args:
        end: Data of the last event, which is not JSON.
    """
    references = [reference(model) for model in models]
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": references[0] if len(references) == 1 else {"anyOf": references},
    }
    if end is not None:
        data = {"anyOf": [data, {"const": end}]}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"content": {"text/event-stream": {"schema": event}}, "description": description}


def json_lines(*models: type[BaseModel], description: str) -> dict[str, Any]:
    """Return a response of lines, each of which is the JSON of one of these models."""
    schema = {"type": "string", "contentSchema": {"anyOf": [reference(model) for model in models]}}
    return {"content": {JSON_LINES: {"schema": schema}}, "description": description}


def websocket_response(description: str) -> Responses:
    """Return the response of a WebSocket. OpenAPI cannot describe more of it."""
    return {101: {"description": description}}


# Links


def link(operation: str, description: str, *, body: Any = None, **parameters: str) -> dict[str, Any]:
    """Describe a request that a response makes possible. The values say where its parameters come from."""
    described: dict[str, Any] = {"operationId": operation, "description": description}
    if body is not None:
        described["requestBody"] = body
    return {**described, "parameters": parameters} if parameters else described


def operation_id(route: APIRoute) -> str:
    """Return the id of an operation, such as ``sessions_create``."""
    return "_".join([*map(str, route.tags[:1]), route.name])


# The document


class DescribedAPI(FastAPI):
    """An application whose OpenAPI document contains all of the above.

    Args:
        extra_models: Classes that are not the response of a route, such as events and messages of WebSockets.
        sockets: OpenAPI operations by the path of a WebSocket; FastAPI leaves them out.
        key: Name of the key, and how a caller sends it; None if no key is needed.
        open_paths: Paths that need no key.
        maximums: Largest values of query parameters by operation and name, which only a running server knows.
    """

    def __init__(
        self,
        *,
        extra_models: Sequence[type] = (),
        sockets: Mapping[str, dict[str, Any]] | None = None,
        key: tuple[str, str] | None = None,
        open_paths: frozenset[str] = frozenset(),
        maximums: Mapping[tuple[str, str], float] | None = None,
        **settings: Any,
    ) -> None:
        responses: Responses = {**failures(), NO_422: {}}
        super().__init__(
            responses=responses,
            generate_unique_id_function=operation_id,
            # ``http.bodies`` checks it.
            strict_content_type=False,
            **settings,
        )
        self._extra_models: tuple[type, ...] = tuple(dict.fromkeys([ErrorBody, *extra_models]))
        self._sockets = dict(sockets or {})
        self._key = key
        self._open_paths = open_paths
        self._maximums = dict(maximums or {})

    def openapi(self) -> dict[str, Any]:
        known = self.openapi_schema
        described = super().openapi()
        if described is known:
            return described
        sent: list[tuple[str, Literal["serialization"], TypeAdapter[Any]]] = [
            (it.__name__, "serialization", TypeAdapter(it)) for it in self._extra_models
        ]
        _, schemas = TypeAdapter.json_schemas(sent, ref_template=SCHEMA_REF)
        parts = described["components"]
        parts["headers"] = HEADERS
        parts["schemas"] = {**schemas["$defs"], **parts["schemas"]}
        for path, operation in self._sockets.items():
            described["paths"].setdefault(path, {})["get"] = operation
        if self._key is not None:
            name, hint = self._key
            parts["securitySchemes"] = {name: {"type": "http", "scheme": "bearer", "description": hint}}
            described["security"] = [{name: []}]
        for path, operation in operations(described):
            operation["responses"].pop(NO_422, None)
            for response in operation["responses"].values():
                response["headers"] = {**COMMON_HEADERS, **response.get("headers", {})}
            for parameter in operation.get("parameters", ()):
                maximum = self._maximums.get((operation["operationId"], parameter["name"]))
                limit = {} if maximum is None else {"maximum": maximum}
                schema = parameter["schema"]
                # A parameter of a URL can be absent, but not null.
                alternatives = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
                if len(alternatives) == 1:
                    rest = {name: value for name, value in schema.items() if name not in ("anyOf", "default")}
                    schema = {**alternatives[0], **rest}
                parameter["schema"] = schema | limit
            if self._key is not None and path in self._open_paths:
                operation["security"] = []
        return described


def operations(described: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over all operations of a document with their paths."""
    for path, methods in described["paths"].items():
        for operation in methods.values():
            yield path, operation
