"""Display the text of an answer while it is generated. Notebooks update an output; elsewhere text is printed."""

from __future__ import annotations

import html
import time
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data

UPDATE_S = 0.1
"""Minimum time between two updates. Each one contains the whole text."""
CHARACTERS_PER_S = 500_000
"""Maximum amount of text that is sent to the browser."""
STYLE = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere"
"""Style that breaks lines between words. Notebooks also break lines of printed text within words."""


class LiveText:
    """The display of one answer, as a context manager. The last text is always displayed when the block ends."""

    def __init__(self) -> None:
        self._in_kernel = getattr(get_ipython(), "kernel", None) is not None
        self._display_id: str | None = None
        self._latest = ("", "")
        self._shown = ("", "")
        self._next_at = 0.0

    def update(self, reasoning: str, text: str) -> None:
        """Show the current text. Updates within a short time are combined."""
        self._latest = reasoning, text
        if time.monotonic() >= self._next_at:
            self._show()

    def end(self, result: Any) -> None:
        """Replace the text with the complete reply, or with the incomplete text if the stream was stopped."""
        if not self._in_kernel:
            self._show()
            print("" if isinstance(result, str) else f"\n\n{repr(result).rsplit(chr(10), 1)[-1]}")
        elif isinstance(result, str):
            self._send(_bundle("", result))
        else:
            shell: Any = get_ipython()
            self._send(*shell.display_formatter.format(result))
        self._shown = self._latest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown != self._latest:
            self._show()

    def _show(self) -> None:
        reasoning, text = self._latest
        if self._in_kernel:
            self._send(_bundle(reasoning, text))
        else:
            print(text[len(self._shown[1]) :], end="", flush=True)
        self._shown = self._latest
        self._next_at = time.monotonic() + max(UPDATE_S, (len(reasoning) + len(text)) / CHARACTERS_PER_S)

    def _send(self, data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        is_update = self._display_id is not None
        self._display_id = self._display_id or uuid4().hex
        publish_display_data(data, metadata, transient={"display_id": self._display_id}, update=is_update)  # type: ignore[no-untyped-call]


def _bundle(reasoning: str, text: str) -> dict[str, str]:
    thoughts = f"<small>{html.escape(reasoning)}</small>\n" if reasoning and not text else ""
    return {"text/plain": text, "text/html": f'<div style="{STYLE}">{thoughts}{html.escape(text)}</div>'}
