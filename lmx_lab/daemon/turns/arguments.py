"""The arguments of a call, read from what the model wrote. Pure."""

from __future__ import annotations

import json
import math
from typing import Any

SHOWN = 200


def arguments_in(text: str) -> dict[str, Any] | str:
    """The object that a call's arguments are, nothing at all being an empty one; or what is wrong with them."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\u" in text:
            # It may be half a character, which no log and no tool could take.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as exc:
        return f"the arguments are no JSON ({exc!s:.{SHOWN}}): {text[:SHOWN]}"
    return value if isinstance(value, dict) else f"the arguments are no JSON object: {text[:SHOWN]}"


def _finite(text: str) -> float:
    # The log would show null in its place, and whoever allows the call would allow another than the one that runs.
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:SHOWN]} is no number in JSON, or too large for one")
    return value
