"""Ids in the daemon's API and in the Responses format. Clients can choose those of sessions and turns; generated ids
sort by time.
"""

from __future__ import annotations

import secrets
import time
from typing import Annotated

from pydantic import StringConstraints

PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
Identifier = Annotated[str, StringConstraints(pattern=PATTERN)]
ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Base 32 as defined by Crockford: letters are distinct in upper and lower case."""
CHARACTERS = 26


def new_id(prefix: str) -> str:
    """Return a new id, such as ``ses_01kb…``, from a prefix, 48 bits of the time in milliseconds and 80 random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    digits = [ALPHABET[value >> shift & 31] for shift in range(5 * (CHARACTERS - 1), -1, -5)]
    return f"{prefix}_{''.join(digits)}"
