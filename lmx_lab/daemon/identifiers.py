"""New ids: a prefix, 48 bits of milliseconds, 80 random bits, in Crockford's base 32. They sort by their time."""

from __future__ import annotations

import secrets
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
CHARACTERS = 26


def new_id(prefix: str) -> str:
    """Such as ``ses_01kb…``; its letters are case-insensitively unique."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    digits = [ALPHABET[value >> shift & 31] for shift in range(5 * (CHARACTERS - 1), -1, -5)]
    return f"{prefix}_{''.join(digits)}"
