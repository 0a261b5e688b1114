"""How arguments are read, and what is said of those that cannot be.

Typer draws a box of several lines around a mistake, and in the help it puts ``<bool>`` beside a switch, which takes no
value, and ``<list[str]>`` beside an option that may be repeated.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from lmx_lab.cli.terminal import line
from lmx_lab.errors import InvalidRequestError

LONGEST = 400
NUMBERS = {"int_parsing": "a whole number", "int_parsing_size": "a smaller number", "float_parsing": "a number"}
"""By pydantic's kind of error."""


class Command(TyperCommand):
    """A command whose help shows options as they are typed."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_typed(super().get_params(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as exc:
            # Of an option without its value the parser does not say whose it is.
            if getattr(exc, "ctx", None) is None:
                exc.ctx = ctx  # type: ignore[attr-defined]
            raise


class Commands(TyperGroup):
    """All of them, and what is told before any of them runs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_typed(super().get_params(ctx), ctx)

    def main(self, *args: Any, **named: Any) -> Any:
        """Run the command that the arguments name, and end by ``SystemExit``.

        Raises:
            InvalidRequestError: an option, a value or a command that is none, in one line with the next step.
        """
        try:
            sys.exit(super().main(*args, **{**named, "standalone_mode": False}))
        except typer.TyperException as exc:
            if not (words := exc.format_message()) or "\n" in words:
                # There were no arguments at all, and this is the help, unless rich has printed that already.
                sys.stdout.write(words)
                sys.exit(exc.exit_code)
            said = _said(exc)
            end = "" if said.endswith(("?", "…")) else "."
            ctx: typer.Context | None = getattr(exc, "ctx", None)
            raise InvalidRequestError(f"{said}{end} See {ctx.command_path if ctx else 'lmx-lab'} --help") from None


def _as_typed(params: list[Any], ctx: Any) -> list[Any]:
    for param in params:
        if isinstance(param, TyperOption) and param.metavar is None:
            param.metavar = "" if param.is_flag else re.sub(r"list\[(\w+)\]", r"\1", param.display_type(ctx)).lower()
    return params


def _said(exc: typer.TyperException) -> str:
    """Typer's words, but for numbers, where they do not name what was given instead."""
    words = exc.format_message().rstrip(".")
    mistakes = getattr(exc.__cause__, "errors", None)
    if isinstance(exc, typer.BadParameter) and exc.param is not None and mistakes is not None:
        first = mistakes()[0]
        if (wanted := NUMBERS.get(first["type"])) is not None:
            words = f"{exc.param.opts[0]} is {first['input']!r:.80}; it must be {wanted}"
    return line(words[:1].lower() + words[1:], most=LONGEST)
