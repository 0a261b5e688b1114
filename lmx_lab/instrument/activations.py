"""Show the values of hooks, and the names of a model's hooks."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from lmx_lab.instrument.text_file import write_file
from lmx_lab.values.tracing import Trace

Shape = tuple[int | str, ...]
BLOCK = re.compile(r"^blocks\.\d+\.")


class ActivationCache(Mapping[str, NDArray[Any]]):
    """The values of hooks by name: float32 arrays whose first axis is the position.

    Attributes:
        model: Id of the model.
        tokens: Token ids of the whole text.
        texts: Text of each token.
        positions: The positions in the text that the rows of the arrays belong to.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.model = trace.model
        self.tokens = trace.tokens
        self.texts = trace.texts
        self.positions: tuple[int, ...] = tuple(trace.details["positions"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._trace.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trace.arrays)

    def __len__(self) -> int:
        return len(self._trace.arrays)

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in self.values())

    def to_safetensors(self, path: str | os.PathLike[str]) -> Path:
        """Write the arrays to a safetensors file, and return its path. The metadata contains the tokens as JSON.

        Raises:
            InvalidRequestError: the file cannot be written.
        """
        return write_file(path, self._trace.encode())

    def __repr__(self) -> str:
        rows = [f"  {name}  {text}" for name, text in _grouped({name: self[name].shape for name in self})]
        text = "".join(self.texts)
        head = (
            f"<ActivationCache of {self.model}: {len(self)} hooks at {len(self.positions)} of {len(self.tokens)} "
            f"positions, {self.nbytes / 1e6:.1f} MB, text {text[:60]!r}>"
        )
        return "\n".join([head, *rows])

    def _repr_html_(self) -> str:
        return _table(repr(self).split("\n", 1)[0].strip("<>"), {name: self[name].shape for name in self})


class HookTable(Mapping[str, Shape]):
    """The hooks of a model with the shapes of their values; ``position`` and ``key`` stand for numbers of tokens."""

    def __init__(self, trace: Trace) -> None:
        self.model = trace.model
        sizes: Mapping[str, Sequence[int]] = trace.details["hooks"]
        self._shapes: dict[str, Shape] = {
            name: ("position", *(each or "key" for each in size)) for name, size in sizes.items()
        }

    def __getitem__(self, name: str) -> Shape:
        return self._shapes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __repr__(self) -> str:
        rows = [f"  {name}  {text}" for name, text in _grouped(self)]
        return "\n".join([f"<{len(self)} hooks of {self.model}>", *rows])

    def _repr_html_(self) -> str:
        return _table(f"{len(self)} hooks of {self.model}", self)


def _grouped(shapes: Mapping[str, Shape]) -> list[tuple[str, str]]:
    """Return the names and shapes, with one row for hooks that differ only in their block."""
    groups: dict[tuple[str, Shape], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((BLOCK.sub("blocks.*.", name), shape), []).append(name)
    rows = []
    for (kind, shape), names in groups.items():
        title = names[0] if len(names) == 1 else f"{kind} ({len(names)} blocks)"
        rows.append((title, f"({', '.join(map(str, shape))})"))
    return rows


def _table(title: str, shapes: Mapping[str, Shape]) -> str:
    left = "style='text-align:left'"
    rows = "".join(
        f"<tr><td {left}><code>{html.escape(name)}</code></td><td {left}>{html.escape(shape)}</td></tr>"
        for name, shape in _grouped(shapes)
    )
    return f"<div>{html.escape(title)}</div><table><tbody>{rows}</tbody></table>"
