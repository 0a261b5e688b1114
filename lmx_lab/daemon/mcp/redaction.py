"""Make text from MCP servers safe to display: without secrets and control characters, and of limited length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from lmx_lab.sanitize import UNSAFE
from lmx_lab.wire.mcp import REDACTED, McpServerConfig

MIN_SECRET_CHARACTERS = 4
"""Shorter values are not redacted, since they occur in much text that is not secret."""
TAIL_BYTES = 16_384
TAIL_LINES = 50
_LINE_CHARACTERS = 2000


class SecretRedactor:
    """Replaces secrets in text: the values of ``env`` and ``headers`` of a configuration. Its ``repr`` shows none."""

    def __init__(self, values: Iterable[str]) -> None:
        secrets = {part.strip() for value in values for part in (value, *value.splitlines(), *_credentials(value))}
        # Longest first, because a secret can be a part of another one.
        self._secrets = sorted(
            (secret for secret in secrets if len(secret) >= MIN_SECRET_CHARACTERS), key=len, reverse=True
        )
        self._longest_bytes = max((len(secret.encode()) for secret in self._secrets), default=0)

    @classmethod
    def of(cls, config: McpServerConfig) -> Self:
        """Return a redactor of the secrets in a configuration."""
        return cls([*config.env.values(), *config.headers.values()])

    def redact(self, text: str) -> str:
        """Replace each secret in the text by ``***``."""
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return text

    def redact_bytes(self, data: bytes) -> bytes:
        """Replace each secret in text that is not decoded yet."""
        for secret in self._secrets:
            data = data.replace(secret.encode(), REDACTED.encode())
        return data

    def redact_tail(self, text: str) -> str:
        """Replace each secret in a text whose beginning was cut off.

        The first characters are removed, since they may be the end of a secret that was cut in two.
        """
        return self.redact(text)[self._longest_bytes :]


def _credentials(value: str) -> list[str]:
    """Return the part after the scheme in the value of an Authorization header."""
    scheme, _, rest = value.partition(" ")
    return [rest] if rest and scheme.lower() in ("bearer", "basic", "token") else []


def last_lines(text: str) -> str:
    """Return the last lines of a text, at most 50 lines and 16 KiB, without control characters and with long lines cut.

    Empty lines are omitted.
    """
    text = _replace_unprintable(text)[-TAIL_BYTES:]
    lines = [line[:_LINE_CHARACTERS] for line in text.split("\n") if line.strip()]
    tail = "\n".join(lines[-TAIL_LINES:])
    # Cut again as bytes, because a character can take more than one.
    return tail.encode()[-TAIL_BYTES:].decode("utf-8", "ignore")


def one_line(text: str, limit: int = 300) -> str:
    """Return a text as one line of at most ``limit`` characters, for use in a sentence."""
    return " ".join(_replace_unprintable(text[: 4 * limit]).split())[:limit]


def _replace_unprintable(text: str) -> str:
    return UNSAFE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
