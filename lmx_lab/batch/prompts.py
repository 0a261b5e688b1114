"""Create the prompt of a row from a template, from messages with templates, or with a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from string import Formatter
from typing import Any

from lmx_lab.errors import InvalidRequestError
from lmx_lab.results.frames import has_text

Row = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages
PromptSource = Prompt | Callable[[Row], Prompt]


class RowPrompts:
    """Creates the prompt of each row.

    Args:
        source: A template, in which ``{name}`` is replaced by the value of a column; messages whose texts are
            templates; or a function that takes a copy of the row and returns a text or messages.

    Raises:
        InvalidRequestError: the source is none of these, or a template is malformed.
    """

    def __init__(self, source: PromptSource) -> None:
        self._source = source
        if inspect.iscoroutinefunction(source):
            raise InvalidRequestError(
                f"the prompt is {source!r:.80}, which is async; pass a plain function of a row", param="prompt"
            )
        if isinstance(source, str):
            self.names = _names(source)
        elif callable(source):
            self.names = []
        elif isinstance(source, Sequence) and source and all(isinstance(message, Mapping) for message in source):
            self.names = [name for message in source for text in _texts(message) for name in _names(text)]
        else:
            raise InvalidRequestError(
                f"the prompt is {source!r:.80}; pass a template such as 'Summarise: {{text}}', a list of messages, or "
                "a function of a row",
                param="prompt",
            )

    def check(self, columns: Iterable[str]) -> None:
        """Check that all columns that the templates name exist.

        Raises:
            InvalidRequestError: a column does not exist; the message lists the existing ones.
        """
        known = list(columns)
        for name in self.names:
            if name not in known:
                odd = next((each for each in known if not {":", "!", "{", "}"}.isdisjoint(each)), None)
                hint = "" if odd is None else f"; a function reads the column {odd!r:.80}: lambda row: row[{odd!r:.80}]"
                raise InvalidRequestError(
                    f"the prompt contains {{{name[:80]}}}, but the columns are {', '.join(known) or 'none'}; use one "
                    f"of them, and write literal braces as {{{{ and }}}}{hint}",
                    param="prompt",
                )

    def prompt(self, row: Row) -> Prompt:
        """Return the prompt of a row.

        Raises:
            InvalidRequestError: a value is missing or cannot be formatted, or the function failed.
        """
        source = self._source
        if isinstance(source, str):
            return self._fill(source, row)
        if not callable(source):
            return [self._fill_message(message, row) for message in source]
        try:
            made = source(copy(row))
        except Exception as exc:
            raise InvalidRequestError(f"the prompt function raised {type(exc).__name__}: {exc}") from exc
        is_list = isinstance(made, Sequence) and all(isinstance(message, Mapping) for message in made)
        if not isinstance(made, str) and not is_list:
            raise InvalidRequestError(
                f"the prompt function returned {made!r:.80}; it must return a text or a list of messages"
            )
        return made

    def _fill_message(self, message: Mapping[str, Any], row: Row) -> Mapping[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": self._fill(content, row)}
        if not isinstance(content, Sequence):
            return message
        parts = [
            {**part, "text": self._fill(part["text"], row)}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
        return {**message, "content": parts}

    def _fill(self, template: str, row: Row) -> str:
        filled = ""
        for before, name, spec in _parse(template):
            filled += before
            if name is None:
                continue
            if is_missing(value := row.get(name)):
                raise InvalidRequestError(
                    f"the column {name} has no value in this row; fill the value, or remove the row"
                )
            if isinstance(value, bytes):
                raise InvalidRequestError(f"the column {name} is {value!r:.80}; decode it to a text")
            if not has_text(value):
                raise InvalidRequestError(f"the column {name} is {value!r:.80}, which has no text; convert it to one")
            try:
                filled += format(value, spec)
            except Exception as exc:  # Of any type, in the ``__format__`` of the value.
                raise InvalidRequestError(
                    f"the column {name} is {value!r:.80}, which cannot be formatted with {spec!r}: {exc}"
                ) from exc
        return filled


def is_missing(value: object) -> bool:
    """Return whether a value is None, NaN, or pandas.NA."""
    try:
        return value is None or bool(value != value)  # noqa: PLR0124
    except TypeError:  # pandas.NA has no truth value.
        return True
    except ValueError:  # An array.
        return False


def _parse(template: str) -> list[tuple[str, str | None, str]]:
    """Split a template into literal texts, each with the column and the format that follow it."""
    try:
        # Unlike in str.format, a field is only a column name; attributes and items cannot be accessed.
        fields = list(Formatter().parse(template))
    except ValueError as exc:
        raise InvalidRequestError(
            f"the template {template!r:.80} is malformed: {exc}; write literal braces as {{{{ and }}}}", param="prompt"
        ) from None
    for _, name, _, conversion in fields:
        if conversion:
            raise InvalidRequestError(
                f"the template contains {{{name}!{conversion}}}, but conversions are not supported; write {{{name}}}, "
                "or pass a function of a row as the prompt",
                param="prompt",
            )
    return [(text, name, spec or "") for text, name, spec, _ in fields]


def _names(template: str) -> list[str]:
    return [name for _, name, _ in _parse(template) if name is not None]


def _texts(message: Any) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, Sequence) else ()
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
