"""Derive the JSON schema of a Python function's arguments from its signature and docstring, and validate arguments."""

from __future__ import annotations

import contextlib
import inspect
import json
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from docstring_parser import Docstring, DocstringMeta, DocstringStyle, ParseError, numpydoc, rest
from docstring_parser.google import GoogleParser, Section, SectionType
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUndefinedAnnotation
from pydantic_core import PydanticSerializationError, to_jsonable_python

from lmx_lab.errors import InvalidRequestError

_UNSUPPORTED_KINDS: dict[Any, str] = {
    inspect.Parameter.POSITIONAL_ONLY: (
        "is positional-only, but models pass arguments by name; remove the / after it from the signature"
    ),
    inspect.Parameter.VAR_POSITIONAL: (
        "accepts any number of values, which a schema cannot express; use a parameter that is a list"
    ),
    inspect.Parameter.VAR_KEYWORD: (
        "accepts any names, which a schema cannot express; use a parameter that is a dict, or name the parameters"
    ),
}


class ArgumentsError(Exception):
    """Arguments do not match the function's signature. The message is for the model."""


@dataclass(frozen=True, kw_only=True)
class FunctionSchema:
    """The description and the parameters of a function."""

    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, which are one object."""
    names: dict[str, str]
    """Names of the parameters by the names of the fields of ``model``, which differ because a parameter can have a name
    that pydantic does not allow for a field."""
    model: type[BaseModel]
    """Validates the arguments."""

    def parse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert arguments of a call to the types of the signature. Omitted arguments are left to their defaults.

        Raises:
            ArgumentsError: The arguments do not match the signature.
        """
        try:
            # Validated as JSON, because JSON represents for instance a date as a string and a set as a list.
            values = self.model.model_validate_json(json.dumps(arguments))
        except ValidationError as exc:
            errors = exc.errors(include_url=False)
            lines, most = [], 5
            parameters = ", ".join(self.names.values()) or "none"
            for error in errors[:most]:
                location = ".".join(map(str, error["loc"]))
                message = {
                    "missing": "is missing; add it",
                    "extra_forbidden": f"is not a parameter; the parameters are: {parameters}",
                }.get(error["type"], f"{error['msg']}; the value is {error['input']!r:.100}")
                lines.append(f"{location}: {message}" if location else message)
            more = f"\nand {len(errors) - most} more errors" if len(errors) > most else ""
            raise ArgumentsError("\n".join(lines) + more) from None
        except (TypeError, ValueError, RecursionError) as exc:
            raise ArgumentsError(f"the arguments are not valid JSON: {exc}") from None
        return {self.names[field]: getattr(values, field) for field in values.model_fields_set}


def function_schema(function: Callable[..., Any]) -> FunctionSchema:
    """Derive the schema of a function from its signature and docstring.

    Raises:
        InvalidRequestError: The function cannot be a tool. The message contains the reason and the remedy.
    """
    description, texts = read_docstring(function)
    names: dict[str, str] = {}
    fields: dict[str, Any] = {}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as exc:
        raise _unusable(function, "its signature cannot be read; wrap it in a function with annotations") from exc
    hints = _type_hints(function)
    for number, parameter in enumerate(signature.parameters.values()):
        if (problem := _UNSUPPORTED_KINDS.get(parameter.kind)) is not None:
            raise _unusable(function, f"its parameter {parameter.name!r} {problem}")
        field = f"p{number}"
        names[field] = parameter.name
        fields[field] = _field(parameter, hints.get(parameter.name, Any), texts.get(parameter.name))
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        parameters = model.model_json_schema(by_alias=True)
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation) as exc:
        raise _unusable(
            function,
            f"a parameter has a type that JSON cannot represent ({_first_line(exc)}); use str, int, float, bool, list, "
            "dict, an enum, a dataclass or a pydantic model",
        ) from exc
    return FunctionSchema(description=description, parameters=_remove_titles(parameters), names=names, model=model)


def _type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    target: Any = inspect.unwrap(getattr(function, "func", function))
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        target = type(target).__call__
    try:
        return typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError) as exc:
        raise _unusable(
            function, f"an annotation cannot be evaluated ({_first_line(exc)}); define its type before the function"
        ) from exc


def _field(parameter: inspect.Parameter, hint: Any, text: str | None) -> tuple[Any, Any]:
    """Return the definition of a field of a pydantic model.

    Args:
        text: Description of the parameter in the docstring.
    """
    annotated_text = next((item for item in typing.get_args(hint)[1:] if isinstance(item, str)), None)
    # A text in the annotation has priority over the docstring. Pydantic reads its own Field in the annotation itself.
    text = annotated_text if typing.get_origin(hint) is Annotated and annotated_text else text
    options: dict[str, Any] = {"alias": parameter.name}
    # A pydantic ``Field`` in the annotation may contain a description.
    has_description = any(getattr(item, "description", None) for item in getattr(hint, "__metadata__", ()))
    if text is not None and not has_description:
        options["description"] = text
    if parameter.default is inspect.Parameter.empty:
        return hint, Field(**options)
    try:
        to_jsonable_python(parameter.default)
    except (PydanticSerializationError, ValueError):
        # JSON cannot represent the default, so the schema does not show it. The function still uses it.
        return hint, Field(default_factory=lambda: None, **options)
    return hint, Field(parameter.default, **options)


def _remove_titles(schema: Any) -> Any:
    """Remove the titles that pydantic generates, since the model would read each of them."""
    if isinstance(schema, list):
        return [_remove_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _remove_titles(value) for name, value in item.items()}
        if key in ("properties", "$defs")
        else _remove_titles(item)
        for key, item in schema.items()
        if not (key == "title" and isinstance(item, str))
    }


def _unusable(function: Callable[..., Any], reason: str) -> InvalidRequestError:
    name = getattr(function, "__qualname__", None) or repr(function)
    return InvalidRequestError(f"{name:.200} cannot be a tool: {reason}", param="function")


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:300]


_PARAMETER_TITLES = (
    *("Args", "Arguments", "Parameters", "Params"),
    *("Keyword Args", "Keyword Arguments", "Other Parameters"),
)
_OTHER_TITLES = (
    *("Attributes", "Example", "Examples", "Exceptions", "Note", "Notes", "Raises", "References", "Return", "Returns"),
    *("See Also", "Warning", "Warnings", "Warns", "Yield", "Yields"),
)
# Only the entries of parameters are parsed, so that the format of other sections does not matter.
_SECTIONS = [Section(title, "param", SectionType.MULTIPLE) for title in _PARAMETER_TITLES]
_SECTIONS += [Section(title, title, SectionType.SINGULAR) for title in _OTHER_TITLES]
_GOOGLE = GoogleParser([*_SECTIONS, *(section._replace(title=section.title.lower()) for section in _SECTIONS)])


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description without its sections, and the descriptions of the parameters by name.

    The docstring can be in the style of Google, numpy or Sphinx.
    """
    # A partial object has the docstring of the class ``partial``, so its function is used.
    text = inspect.getdoc(getattr(function, "func", function)) or ""
    found: list[Docstring] = []
    for parse in (_GOOGLE.parse, numpydoc.parse, rest.parse):
        with contextlib.suppress(ParseError):
            found.append(parse(text))
    # The style in which most was found. Sphinx's parser also finds ``:class:`` and other roles at the start of a line.
    best = max(
        found,
        key=lambda style: sum(
            type(meta) is not DocstringMeta or style.style is not DocstringStyle.REST for meta in style.meta
        ),
        default=None,
    )
    if best is None:
        return text, {}
    texts: dict[str, str] = {}
    for parameter in best.params:
        if parameter.args[0] != "attribute":
            lines = [line.strip() for line in (parameter.description or "").splitlines()]
            for name in parameter.arg_name.split(","):
                texts[name.strip().lstrip("*")] = " ".join(filter(None, lines))
    return (best.description or "").strip(), {name: text for name, text in texts.items() if text}
