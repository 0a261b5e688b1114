"""What of a server's configuration nobody is shown: the values of ``env`` and ``headers``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from lmx_lab.wire.mcp import REDACTED, McpServerConfig

SHORTEST = 4
"""Shorter values would be found everywhere, and hide what is no secret."""


class SecretRedactor:
    """Knows the values and takes them out of texts. Its ``repr`` shows none."""

    def __init__(self, values: Iterable[str]) -> None:
        pieces = {piece.strip() for value in values for piece in (value, *value.splitlines(), *_credentials(value))}
        # The longest first: one may be part of another.
        self._values = sorted((piece for piece in pieces if len(piece) >= SHORTEST), key=len, reverse=True)

        self._longest = max((len(value.encode()) for value in self._values), default=0)

    @classmethod
    def of(cls, config: McpServerConfig) -> Self:
        return cls([*config.env.values(), *config.headers.values()])

    def hidden(self, text: str) -> str:
        """The text with ``***`` for each secret in it."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return text

    def hidden_bytes(self, data: bytes) -> bytes:
        """As ``hidden``, of text that is not decoded yet."""
        for value in self._values:
            data = data.replace(value.encode(), REDACTED.encode())
        return data

    def hidden_end(self, text: str) -> str:
        """As ``hidden``, of a text whose beginning was cut off: without what the end of a secret may be in."""
        return self.hidden(text)[self._longest :]


def _credentials(value: str) -> list[str]:
    """What follows the scheme of an Authorization header."""
    scheme, _, rest = value.partition(" ")
    return [rest] if rest and scheme.lower() in ("bearer", "basic", "token") else []
