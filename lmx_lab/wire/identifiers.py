"""Ids of the daemon's API: prefixed and sortable by their time of making; of sessions and turns a client may choose."""

from __future__ import annotations

import secrets
import time
from typing import Annotated

from pydantic import StringConstraints

PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
Identifier = Annotated[str, StringConstraints(pattern=PATTERN)]
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32: its letters are unique whatever their case."""
CHARACTERS = 26


def new_id(prefix: str) -> str:
    """Such as ``ses_01kb…``: 48 bits of milliseconds, 80 random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    digits = [ALPHABET[value >> shift & 31] for shift in range(5 * (CHARACTERS - 1), -1, -5)]
    return f"{prefix}_{''.join(digits)}"
