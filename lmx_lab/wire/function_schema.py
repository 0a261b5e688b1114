"""Derive the JSON schema of a Python function's arguments from its signature and docstring, and validate arguments."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, cast

from docstring_parser import Docstring, DocstringMeta, DocstringStyle, ParseError, numpydoc, rest
from docstring_parser.google import GoogleParser, Section, SectionType
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import PydanticSerializationError, SchemaError, to_jsonable_python

from lmx_lab.errors import InvalidRequestError

_UNSUPPORTED_KINDS: dict[Any, str] = {
    inspect.Parameter.POSITIONAL_ONLY: (
        "is positional-only, but models pass arguments by name; remove the / after it from the signature, or wrap the "
        "function in one with other parameters"
    ),
    inspect.Parameter.VAR_POSITIONAL: (
        "accepts any number of values, which a schema cannot express; use a parameter that is a list, or "
        "functools.wraps in the decorator of a function"
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
    arguments: TypeAdapter[dict[str, Any]]
    """Validates arguments, and returns them by name, with the defaults of omitted ones."""

    def parse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Convert arguments of a call to the types of the signature. Omitted arguments are left to their defaults.

        Raises:
            ArgumentsError: The arguments do not match the signature.
        """
        try:
            # Validated as JSON, because JSON represents for instance a date as a string and a set as a list.
            values = self.arguments.validate_json(json.dumps(arguments))
        except ValidationError as exc:
            errors = exc.errors(include_url=False)
            lines, most = [], 5
            parameters = ", ".join(self.parameters["properties"]) or "none"
            for error in errors[:most]:
                location = ".".join(map(str, error["loc"]))
                message = {
                    "missing_keyword_only_argument": "is missing; add it",
                    "unexpected_keyword_argument": f"is not a parameter; the parameters are: {parameters}",
                }.get(error["type"], f"{error['msg']}; the value is {error['input']!r:.100}")
                lines.append(f"{location}: {message}" if location else message)
            more = f"\nand {len(errors) - most} more errors" if len(errors) > most else ""
            raise ArgumentsError("\n".join(lines) + more) from None
        except (TypeError, ValueError, RecursionError) as exc:
            raise ArgumentsError(f"the arguments are not valid JSON: {exc}") from None
        return {name: values[name] for name in arguments}


def function_schema(function: Callable[..., Any]) -> FunctionSchema:
    """Derive the schema of a function from its signature and docstring.

    Raises:
        InvalidRequestError: The function cannot be a tool. The message contains the reason and the remedy.
    """
    description, texts = read_docstring(function)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as exc:
        raise _unusable(function, "its signature cannot be read; wrap it in a function with annotations") from exc
    target = inspect.unwrap(_called(function))
    names: list[str] = getattr(target, "__qualname__", "").split(".")
    owner = names[-2] if len(names) > 1 else ""
    if "self" in list(signature.parameters)[:1] and owner not in ("", "<locals>"):
        raise _unusable(
            function, f"it is a method without its object; pass that of an object, such as {owner}().{names[-1]}"
        )
    try:
        hints = typing.get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError) as exc:
        reason = f"an annotation cannot be evaluated ({_first_line(exc)})"
        raise _unusable(function, f"{reason}; define its type before the function, at the top level") from exc
    named: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if (problem := _UNSUPPORTED_KINDS.get(parameter.kind)) is not None:
            raise _unusable(function, f"its parameter {parameter.name!r} {problem}")
        named.append(_named(parameter, hints.get(parameter.name, Any), texts.get(parameter.name)))

    # pydantic validates the arguments of a function with the same signature.
    def collect(**arguments: Any) -> dict[str, Any]:
        return arguments

    collect.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in named}
    try:
        arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(cast("Any", collect))
        parameters = arguments.json_schema()
    except SchemaError as exc:
        # The last line is that of the cause.
        raise _unusable(function, f"an annotation is not valid ({str(exc).splitlines()[-1].strip():.300})") from exc
    except (PydanticUserError, PydanticUndefinedAnnotation) as exc:
        raise _unusable(
            function,
            f"a parameter has a type that JSON cannot represent ({_first_line(exc)}); use str, int, float, bool, list, "
            "dict, an enum, a dataclass or a pydantic model",
        ) from exc
    return FunctionSchema(description=description, parameters=_readable(parameters), arguments=arguments)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function as a tool.

    A partial object has the name of its function, and a callable object that of its class.
    """
    function = getattr(function, "func", function)
    name: str = getattr(function, "__name__", type(function).__name__)
    return name


def _called(function: Callable[..., Any]) -> Any:
    """Return the function that a partial object or a callable object calls."""
    function = getattr(function, "func", function)
    is_itself = inspect.isroutine(function) or inspect.isclass(function) or hasattr(function, "__wrapped__")
    return function if is_itself else type(function).__call__


def _named(parameter: inspect.Parameter, hint: Any, text: str | None) -> inspect.Parameter:
    """Return the parameter as a keyword, because models pass arguments by name, with its description in the annotation.

    Args:
        text: Description of the parameter in the docstring.
    """
    metadata = getattr(hint, "__metadata__", ())
    # A text in the annotation has priority over the docstring. Pydantic reads its own Field in the annotation itself.
    text = next((item for item in metadata if isinstance(item, str)), text)
    if text is not None and not any(getattr(item, "description", None) for item in metadata):
        hint = Annotated[hint, Field(description=text)]
    named = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hint)
    try:
        default = to_jsonable_python(None if parameter.default is inspect.Parameter.empty else parameter.default)
        json.dumps(default, ensure_ascii=False, allow_nan=False).encode()
    except (PydanticSerializationError, ValueError):
        # JSON cannot represent the default, so the schema does not show it. The function still uses it.
        return named.replace(default=Field(default_factory=lambda: None))
    return named


def _readable(schema: Any) -> Any:
    """Remove the titles that pydantic generates, since the model would read each of them, and defaults such as
    ``math.inf``, which JSON does not have.
    """
    if isinstance(schema, list):
        return [_readable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _readable(value) for name, value in item.items()}
        if key in ("properties", "$defs")
        else item
        if key in ("default", "const", "enum", "examples")
        else _readable(item)
        for key, item in schema.items()
        if not (key == "title" and isinstance(item, str))
        and not (key == "default" and isinstance(item, float) and not math.isfinite(item))
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
    # A partial object has the docstring of its class. The docstring of a callable object usually describes its class.
    text = inspect.getdoc(_called(function)) or inspect.getdoc(getattr(function, "func", function)) or ""
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
