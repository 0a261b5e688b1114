"""A Python function as a tool: the schema of its arguments from its signature, and arguments made fit for a call."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUndefinedAnnotation
from pydantic_core import PydanticSerializationError, to_jsonable_python

from lmx_lab.daemon.tools.docstrings import read_docstring
from lmx_lab.errors import InvalidRequestError

ERRORS = 5
"""As many mistakes in arguments are told at once."""
_UNFIT: dict[Any, str] = {
    inspect.Parameter.POSITIONAL_ONLY: "is positional-only, and models give arguments by name; remove the / after it",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of values, which no schema names; make it a list",
    inspect.Parameter.VAR_KEYWORD: "takes any names, which no schema has; make it a dict, or name the parameters",
}


class ArgumentsError(Exception):
    """Arguments that do not fit, in words for a model."""


@dataclass(frozen=True, kw_only=True)
class FunctionSchema:
    """What is known of a function before it is called."""

    description: str
    parameters: dict[str, Any]
    """JSON schema of the object of its arguments."""
    names: dict[str, str]
    """The parameters by the fields of the shape: those may have names that fields cannot."""
    shape: type[BaseModel]

    def read(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments as the function takes them; what was not given is left to its defaults.

        Raises:
            ArgumentsError: they do not fit.
        """
        try:
            # As JSON: there a date is a text, and a set is a list.
            values = self.shape.model_validate_json(json.dumps(arguments))
        except ValidationError as exc:
            raise ArgumentsError(self._in_words(exc)) from None
        except (TypeError, ValueError, RecursionError) as exc:
            raise ArgumentsError(f"the arguments are no JSON: {exc}") from None
        return {self.names[field]: getattr(values, field) for field in values.model_fields_set}

    def _in_words(self, exc: ValidationError) -> str:
        errors = exc.errors(include_url=False)
        lines = []
        for error in errors[:ERRORS]:
            where = ".".join(map(str, error["loc"]))
            message = {
                "missing": "is missing; give it",
                "extra_forbidden": f"is no parameter; there are {', '.join(self.names.values()) or 'none'}",
            }.get(error["type"], f"{error['msg']}; it is {error['input']!r:.100}")
            lines.append(f"{where}: {message}" if where else message)
        more = f"\nand {len(errors) - ERRORS} more" if len(errors) > ERRORS else ""
        return "\n".join(lines) + more


def function_schema(function: Callable[..., Any]) -> FunctionSchema:
    """
    Raises:
        InvalidRequestError: it cannot be a tool; says why, and what to change.
    """
    description, texts = read_docstring(function)
    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    hints = _hints(function)
    for number, parameter in enumerate(_parameters(function)):
        field = f"p{number}"
        names[field] = parameter.name
        fields[field] = _field(parameter, hints.get(parameter.name, Any), texts.get(parameter.name))
    try:
        shape = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        parameters = shape.model_json_schema(by_alias=True)
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation) as exc:
        raise _unusable(
            function,
            f"a parameter has a type that JSON cannot hold ({_first_line(exc)}); use str, int, "
            "float, bool, list, dict, an enum, a dataclass or a pydantic model",
        ) from exc
    return FunctionSchema(description=description, parameters=_untitled(parameters), names=names, shape=shape)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as exc:
        raise _unusable(function, "it has no signature that can be read; wrap it in a def with annotations") from exc
    for parameter in parameters:
        if (problem := _UNFIT.get(parameter.kind)) is not None:
            raise _unusable(function, f"its parameter {parameter.name!r} {problem}")
    return parameters


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target: Any = inspect.unwrap(getattr(function, "func", function))
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError) as exc:
        raise _unusable(function, f"an annotation cannot be read ({_first_line(exc)}); define its type first") from exc


def _field(parameter: inspect.Parameter, hint: Any, text: str | None) -> tuple[Any, Any]:
    described = next((item for item in typing.get_args(hint)[1:] if isinstance(item, str)), None)
    # The text beside the annotation is nearer than that of the docstring; pydantic reads its own Field itself.
    text = described if typing.get_origin(hint) is Annotated and described else text
    options: dict[str, Any] = {"alias": parameter.name}
    if text is not None and not _says(hint):
        options["description"] = text
    if parameter.default is inspect.Parameter.empty:
        return hint, Field(**options)
    try:
        to_jsonable_python(parameter.default)
    except (PydanticSerializationError, ValueError):
        return hint, Field(default_factory=lambda: None, **options)
    return hint, Field(parameter.default, **options)


def _says(hint: Any) -> bool:
    """Whether the annotation has a description of pydantic's kind."""
    return any(getattr(item, "description", None) for item in getattr(hint, "__metadata__", ()))


def _untitled(schema: Any) -> Any:
    """Without the titles that pydantic makes from names: a model reads each of them."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _untitled(value) for name, value in item.items()}
        if key in ("properties", "$defs")
        else _untitled(item)
        for key, item in schema.items()
        if not (key == "title" and isinstance(item, str))
    }


def _unusable(function: Callable[..., Any], why: str) -> InvalidRequestError:
    name = getattr(function, "__qualname__", None) or repr(function)
    return InvalidRequestError(f"{name:.200} cannot be a tool: {why}", param="function")


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:300]
