"""Stop strings in a stream of text. Pure code."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text at the first stop string, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def held(self) -> int:
        """Characters that wait for what follows."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is free to go, and whether a stop string was met (which is not part of the text)."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first, as if the text had come letter by letter.
            self._held = ""
            return text[: min(found)[1]], True
        hold = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold], False

    def finish(self) -> str:
        """What was held back and turned out to be ordinary text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0
