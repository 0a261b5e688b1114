"""Names of MCP tools for models: ``server__tool``, in the characters and the length that every model's server takes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

NAME_CHARACTERS = 64
SEPARATOR = "__"
"""In no server's name, and in no Python tool's, so that the first one of a name parts the two."""
_FOREIGN = re.compile(r"[^A-Za-z0-9_-]")


def tool_names(server: str, own: Sequence[str]) -> dict[str, str]:
    """The tools' own names by their names for models, in order.

    A name that had to be changed ends in a few digits of the hash of its own, so that it stays the same whatever other
    tools there are.
    """
    names: dict[str, str] = {}
    for name in own:
        names.setdefault(_fitting(server, name), name)
    return names


def _fitting(server: str, name: str) -> str:
    prefix = f"{server}{SEPARATOR}"
    cleaned = _FOREIGN.sub("_", name)
    if cleaned == name and len(prefix) + len(name) <= NAME_CHARACTERS:
        return prefix + name
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:6]
    return f"{prefix}{cleaned[: NAME_CHARACTERS - len(prefix) - 7]}_{digest}"
