"""Sandbox worker that renders chat templates (see ``sandbox_worker``).

Chat templates are programs that come with models, and some never end. A request is JSON with ``template`` and
``variables``. The answer is JSON with one field: ``text``, ``error`` (the message of the template) or ``limit`` (the
limit that it exceeded).
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 2**30
"""Address space of the process; without a template it takes 40 MB. macOS does not enforce this limit."""
CPU_S = 10
MAX_ERROR_CHARACTERS = 1000


def handle(request: bytes) -> bytes:
    """Answer one request; see the module's docstring."""
    try:
        answer = {"text": render(**json.loads(request))}
    except MemoryError:
        answer = {"limit": f"needs more than the limit of {MEMORY_BYTES >> 20} MB of memory"}
    except OutputTooLongError as exc:
        answer = {"limit": f"writes more than the limit of {exc} characters"}
    except Exception as exc:
        answer = {"error": str(exc)[:MAX_ERROR_CHARACTERS] or type(exc).__name__}
    return json.dumps(answer).encode()


class OutputTooLongError(Exception):
    """The text of a template has more characters than allowed."""


def render(template: str, variables: dict[str, Any], *, max_characters: int = 2**24) -> str:
    """Render a template.

    Raises:
        OutputTooLongError: the text is longer than ``max_characters``.
        Exception: whatever the template causes.
    """
    parts, size = [], 0
    for part in _compile(template).generate(variables):
        parts.append(part)
        size += len(part)
        if size > max_characters:
            raise OutputTooLongError(max_characters)
    return "".join(parts)


class _Generation(Extension):
    """The ``{% generation %}`` block, which marks the model's text for training. Here it renders as plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore: those give access to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """The parts of ``dict`` that templates may use."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have {name!r}: names must not begin with _")


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message)[:MAX_ERROR_CHARACTERS])


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    # Jinja's own filter would escape < and & for HTML. Filters such as map return generators.
    value = list(value) if isinstance(value, Iterator) else value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


class _Environment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Some templates change lists of their own, which llama.cpp allows. All lists belong to the request.
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)


_environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
"""The environment that chat templates are written for; transformers documents its filters and functions."""
_environment.filters["tojson"] = _tojson
_environment.globals |= {
    "raise_exception": _raise,
    "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    "dict": _Dict(),
    "namespace": _Namespace,
}
_compile = functools.lru_cache(maxsize=8)(_environment.from_string)
