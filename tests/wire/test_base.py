"""Tests that every model of a request body limits the number of items and members."""

import importlib
import pkgutil
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, FailFast, Field, JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from lmx_lab import values, wire
from lmx_lab.client.daemon import SessionFields
from lmx_lab.daemon.daemon import create_daemon_app
from lmx_lab.daemon.limits import Limits
from lmx_lab.engine import ModelManager
from lmx_lab.errors import InvalidRequestError
from lmx_lab.http.guard import GuardPolicy
from lmx_lab.server import create_server
from lmx_lab.settings import Settings
from lmx_lab.values.bodies import Body
from lmx_lab.wire.admin import TraceBody
from lmx_lab.wire.base import FEW_VALUES, VALUE_LIMIT, BodyModel, check_values
from lmx_lab.wire.errors import validated
from lmx_lab.wire.sessions import ChangeSession

LISTS = {"list", "set", "frozenset", "tuple", "dict", "generator"}
NO_PARTS = {"fields", "metadata", "serialization", "config", "function"}


def server_api():
    policy = GuardPolicy(hosts=frozenset())
    return create_server(manager=ModelManager(Settings()), policy=lambda: policy).api


def daemon_api():
    services = SimpleNamespace(limits=Limits(), servers=None, store=None, turns=None)
    return create_daemon_app(services, policy=lambda: GuardPolicy(hosts=frozenset()), max_body_bytes=1024)[1]


def routes(router):
    for route in router.routes:
        if (included := getattr(route, "original_router", None)) is not None:
            yield from routes(included)
        elif isinstance(route, APIRoute):
            yield route


def bodies(api):
    """Return the type of the body of each route."""
    found = [(route, route.body_field) for route in routes(api) if route.body_field is not None]
    return {f"{sorted(route.methods)} {route.path}": body.field_info.annotation for route, body in found}


def request_models():
    """Return all models that parse requests, including the one of WebSocket messages."""
    for module in pkgutil.iter_modules(wire.__path__, f"{wire.__name__}."):
        importlib.import_module(module.name)
    waiting, found = [BodyModel, Body], {}
    while waiting:
        model = waiting.pop()
        waiting += model.__subclasses__()
        is_part = model is not Body and model.__module__.startswith((wire.__name__, values.__name__))
        found |= {model.__qualname__: model} if is_part else {}
    return found


def nodes(schema):
    """Yield all nodes of a core schema with their field paths, except those below a validator that counts values."""
    waiting = [("", schema)]
    definitions = {}
    while waiting:
        path, node = waiting.pop()
        if isinstance(node, list | tuple):
            waiting += [(path, item) for item in node]
        elif not isinstance(node, Mapping) or counts_values(node):
            continue
        elif node.get("type") == "definitions":
            definitions |= {each["ref"]: each for each in node["definitions"]}
            waiting.append((path, node["schema"]))
        elif node.get("type") == "definition-ref":
            waiting.append((path, definitions.pop(node["schema_ref"], None)))
        else:
            if isinstance(node.get("type"), str):
                yield path, node
            fields = node.get("fields")
            waiting += (
                [(f"{path}.{name}", part) for name, part in fields.items()] if isinstance(fields, Mapping) else []
            )
            waiting += [(path, part) for name, part in node.items() if name not in NO_PARTS]


def counts_values(node):
    function = node.get("function")
    return node.get("type") == "function-before" and isinstance(function, dict) and function["function"] is check_values


def unlimited(model):
    """Return the lists and objects of a type without a limit, or validated beyond the first invalid item."""
    return [
        f"{path}: {node['type']}"
        for path, node in nodes(TypeAdapter(model).core_schema)
        if (node["type"] in LISTS and not is_bounded(node)) or node.get("extra_behavior") == "allow"
    ]


def is_bounded(node):
    fixed = node["type"] == "tuple" and node.get("variadic_item_index") is None
    return fixed or (node.get("max_length") is not None and node.get("fail_fast") is True)


APIS = (server_api(), daemon_api())
BODIES = bodies(APIS[0]) | bodies(APIS[1])
MODELS = request_models()


@pytest.mark.slow
def test_all_bodies_of_all_routes_are_found():
    for api in APIS:
        operations = [operation for path in api.openapi()["paths"].values() for operation in path.values()]
        assert len(bodies(api)) == sum("requestBody" in operation for operation in operations)
    assert {"ChatRequest", "EmbeddingsBody", "RerankBody", "CreateSession", "McpServerConfig", "LoadSpec"} <= {*MODELS}


@pytest.mark.parametrize("name", [*BODIES, *MODELS])
def test_every_list_and_object_of_a_request_has_a_limit(name):
    assert unlimited((BODIES | MODELS)[name]) == []


class Inner(BaseModel):
    texts: list[str]


class Keys(TypedDict):
    values: dict[str, Any]


Bounded = Annotated[list[str], FailFast(), Field(max_length=5)]


@pytest.mark.parametrize(
    "model",
    [
        *(list[int], dict[str, Any], set[str] | None, tuple[int, ...], Inner, Inner | None, Keys, JsonValue),
        *(Annotated[list[str], Field(max_length=5)], Annotated[list[str], FailFast()]),
        Annotated[list[list[str]], FailFast(), Field(max_length=5)],
        Annotated[dict[str, list[str]], FailFast(), Field(max_length=5)],
    ],
)
def test_a_list_or_object_without_a_limit_is_found(model):
    assert unlimited(model) != []


@pytest.mark.parametrize(
    "model", [int, Bounded, tuple[int, int], Annotated[JsonValue, FEW_VALUES], Annotated[Any, FEW_VALUES]]
)
def test_lists_and_objects_with_a_limit_are_not_found(model):
    assert unlimited(model) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BODIES, *MODELS])
def test_unknown_members_are_counted_and_not_kept(name):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter((BODIES | MODELS)[name]).validate_python({f"member-{number}": 1 for number in range(10_000)})
    assert caught.value.error_count() < 20


@pytest.mark.parametrize("name", [name for name in MODELS if name != "CompatibleFields"])  # It is only a base class.
def test_every_number_field_accepts_a_whole_number_with_a_decimal_point(name):
    """JSON has only one type of number. Lists of token ids and positions are excepted: they can be long."""
    adapter, problems = TypeAdapter(MODELS[name]), []
    for field in adapter.json_schema()["properties"]:
        try:
            adapter.validate_python({field: 1.0})
        except ValidationError as exc:
            problems += exc.errors()
    assert [problem["loc"] for problem in problems if problem["type"] == "int_type"] == []


def test_the_keyword_arguments_of_a_change_of_a_session_are_the_fields_of_its_body():
    """Type checkers need a ``TypedDict`` to tell None from an omitted argument."""
    assert set(get_type_hints(SessionFields)) == set(ChangeSession.model_fields)


@pytest.mark.slow
def test_values_are_counted_at_all_depths():
    check_values({"a": [[1] * 10, {"b": "c"}] * 100})
    wide, deep = [1] * (VALUE_LIMIT + 1), [[[1, {"a": 1}]]] * VALUE_LIMIT
    endless_list = []
    endless_list.append(endless_list)
    for value in (wide, {"a": wide}, [(wide,)], deep, endless_list):
        with pytest.raises(ValueError, match="10,000"):
            check_values(value)


def test_an_error_shows_only_the_beginning_of_an_unknown_kind():
    with pytest.raises(InvalidRequestError, match="does not match any of the expected tags: 'hooks'") as refused:
        validated(TraceBody, {"model": "tiny", "trace": {"kind": "long " * 20_000}})
    assert len(refused.value.message) < 400
