"""Parse the descriptions of a function and its parameters from a docstring in Google, NumPy or Sphinx style."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any, Literal

_PARAMETER_SECTIONS = {
    "args",
    "arguments",
    "parameters",
    "params",
    "keyword args",
    "keyword arguments",
    "other parameters",
}
_OTHER_SECTIONS = {
    "attributes",
    "example",
    "examples",
    "note",
    "notes",
    "raises",
    "references",
    "return",
    "returns",
    "see also",
    "warning",
    "warnings",
    "warns",
    "yield",
    "yields",
}
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")
_NUMPY_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+)(?:\s*:.*)?")
_SPHINX_OTHER_ENTRY = re.compile(r":(?:returns?|rtype|raises?|type|yields?)\b")
_SPHINX_ENTRY = re.compile(r":param\s+(?:[^:]*\s)?\*{0,2}(?P<name>\w+)\s*:\s*(?P<text>.*)")


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description without its sections, and the descriptions of the parameters by name."""
    parser = _Parser()
    # A partial object has the docstring of the class ``partial``, so its function is used.
    lines = (inspect.getdoc(getattr(function, "func", function)) or "").splitlines()
    for line, next_line in itertools.pairwise([*lines, ""]):
        parser.feed(line, next_line.strip())
    texts = {name: " ".join(filter(None, pieces)) for name, pieces in parser.parameters.items()}
    return "\n".join(parser.description).strip(), {name: text for name, text in texts.items() if text}


class _Parser:
    """Parses a docstring line by line."""

    def __init__(self) -> None:
        self.description: list[str] = []
        self.parameters: dict[str, list[str]] = {}
        self._section: Literal["description", "google", "numpy", "sphinx", "other"] = "description"
        self._indent: int | None = None
        """Indentation of the entries in a section of Google style. Lines with more indentation continue an entry."""
        self._current: list[str] | None = None

    def feed(self, line: str, next_line: str) -> None:
        """Parse one line. A line of hyphens after it makes it the heading of a section."""
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if self._start_section(text, indent, next_line) or self._start_sphinx_entry(text):
            return
        if self._section == "description":
            self.description.append(line)
        elif text and set(text) != {"-"} and not self._start_entry(text, indent) and self._current is not None:
            self._current.append(text)

    def _start_section(self, text: str, indent: int, next_line: str) -> bool:
        is_underlined = len(next_line) >= 3 and set(next_line) == {"-"}
        name = text.removesuffix(":").lower()
        if indent or not (is_underlined or text.endswith(":")) or name not in _PARAMETER_SECTIONS | _OTHER_SECTIONS:
            return False
        self._section = "other" if name in _OTHER_SECTIONS else "numpy" if is_underlined else "google"
        self._indent = self._current = None
        return True

    def _start_sphinx_entry(self, text: str) -> bool:
        if match := _SPHINX_ENTRY.fullmatch(text):
            self._section = "sphinx"
            self._current = self.parameters[match["name"]] = [match["text"]]
        elif _SPHINX_OTHER_ENTRY.match(text):
            self._section, self._current = "sphinx", None
        else:
            return False
        return True

    def _start_entry(self, text: str, indent: int) -> bool:
        if self._section == "google":
            self._indent = indent if self._indent is None else self._indent
            match = _GOOGLE_ENTRY.fullmatch(text) if indent <= self._indent else None
        else:
            match = _NUMPY_ENTRY.fullmatch(text) if self._section == "numpy" and indent == 0 else None
        if match is None:
            return False
        self._current = self.parameters[match["name"]] = [match.groupdict().get("text", "")]
        return True
