"""What a docstring says of a function and of its parameters: Google, NumPy and Sphinx styles."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any, Literal

_ABOUT_PARAMETERS = {
    "args",
    "arguments",
    "parameters",
    "params",
    "keyword args",
    "keyword arguments",
    "other parameters",
}
_OTHER = {
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
_GOOGLE = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")
_NUMPY = re.compile(r"\*{0,2}(?P<name>\w+)(?:\s*:.*)?")
_SPHINX_OTHER = re.compile(r":(?:returns?|rtype|raises?|type|yields?)\b")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?\*{0,2}(?P<name>\w+)\s*:\s*(?P<text>.*)")


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description, without its sections, and the texts of parameters by their names."""
    reader = _Reader()
    # A partial has the docstring of its class.
    lines = (inspect.getdoc(getattr(function, "func", function)) or "").splitlines()
    for line, under in itertools.pairwise([*lines, ""]):
        reader.read(line, under.strip())
    texts = {name: " ".join(filter(None, pieces)) for name, pieces in reader.parameters.items()}
    return "\n".join(reader.about).strip(), {name: text for name, text in texts.items() if text}


class _Reader:
    """Takes a docstring line by line."""

    def __init__(self) -> None:
        self.about: list[str] = []
        self.parameters: dict[str, list[str]] = {}
        self._section: Literal["about", "google", "numpy", "sphinx", "other"] = "about"
        self._indent: int | None = None
        """Of the entries of a section in Google's style; deeper lines go on with an entry."""
        self._current: list[str] | None = None

    def read(self, line: str, under: str) -> None:
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if self._begins(text, indent, under) or self._is_sphinx(text):
            return
        if self._section == "about":
            self.about.append(line)
        elif text and set(text) != {"-"} and not self._is_entry(text, indent) and self._current is not None:
            self._current.append(text)

    def _begins(self, text: str, indent: int, under: str) -> bool:
        underlined = len(under) >= 3 and set(under) == {"-"}
        name = text.removesuffix(":").lower()
        if indent or not (underlined or text.endswith(":")) or name not in _ABOUT_PARAMETERS | _OTHER:
            return False
        self._section = "other" if name in _OTHER else "numpy" if underlined else "google"
        self._indent = self._current = None
        return True

    def _is_sphinx(self, text: str) -> bool:
        if found := _SPHINX.fullmatch(text):
            self._section = "sphinx"
            self._current = self.parameters[found["name"]] = [found["text"]]
        elif _SPHINX_OTHER.match(text):
            self._section, self._current = "sphinx", None
        else:
            return False
        return True

    def _is_entry(self, text: str, indent: int) -> bool:
        if self._section == "google":
            self._indent = indent if self._indent is None else self._indent
            found = _GOOGLE.fullmatch(text) if indent <= self._indent else None
        else:
            found = _NUMPY.fullmatch(text) if self._section == "numpy" and indent == 0 else None
        if found is None:
            return False
        self._current = self.parameters[found["name"]] = [found.groupdict().get("text", "")]
        return True
