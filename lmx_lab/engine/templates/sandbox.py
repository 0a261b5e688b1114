"""The process in which chat templates are rendered: they are programs that come with models, and some never end.

Run by its path, so it imports nothing of the package. It gets JSON with ``template`` and ``variables``, and answers
with ``text``, or ``error`` (what the template says is wrong), or ``limit`` (what it has gone over).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 2**30
"""Of the whole process; without a template it takes 40 MB of addresses. macOS keeps no such limit."""
MOST_CHARACTERS = 2**24
CPU_S = 10
LONGEST_ERROR = 1000


class _Generation(Extension):
    """``{% generation %}`` says which text is the model's, for training; here it is text like any other."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)

    def _shown(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Without names that begin with an underscore: behind those are Python's own."""

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
    """``dict`` as templates may use it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TooMuchError(Exception):
    pass


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}: names must not begin with an underscore")


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message)[:LONGEST_ERROR])


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **more: Any) -> str:
    # Jinja's own would write < and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **more)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: transformers documents its filters, functions and white space."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return environment


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def rendered(template: str, variables: dict[str, Any]) -> str:
    """The text of a template.

    Raises:
        Exception: whatever the template does wrong.
    """
    parts, size = [], 0
    for part in _compiled(template).generate(variables):
        parts.append(part)
        size += len(part)
        if size > MOST_CHARACTERS:
            raise _TooMuchError
    return "".join(parts)


def _answer(question: bytes) -> dict[str, str]:
    try:
        return {"text": rendered(**json.loads(question))}
    except MemoryError:
        return {"limit": f"needs more than {MEMORY_BYTES >> 20} MB of memory"}
    except _TooMuchError:
        return {"limit": f"writes more than {MOST_CHARACTERS} characters"}
    except Exception as exc:
        return {"error": str(exc)[:LONGEST_ERROR] or type(exc).__name__}


def _limit(kind: int, soft: int, hard: int) -> None:
    # Not every system has every limit, and a container may have set lower ones.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (soft, hard))


def _watch(parent: int) -> None:
    """End with the parent, even while something is being rendered."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(channel: Connection, parent: int) -> None:
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    _limit(resource.RLIMIT_AS, MEMORY_BYTES, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0, 0)
    channel.send_bytes(b"{}")
    while True:
        try:
            question = channel.recv_bytes()
        except (EOFError, OSError):
            return
        # Nobody may be left to end a process that is busy with one long multiplication.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + CPU_S, resource.RLIM_INFINITY)
        channel.send_bytes(json.dumps(_answer(question)).encode())


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), parent=int(sys.argv[2]))
