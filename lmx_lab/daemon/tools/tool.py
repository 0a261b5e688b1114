"""The result of a tool's call, and the names of MCP tools."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from lmx_lab.wire.sessions import ToolStatus

SEPARATOR = "__"
"""Separates the server from the tool in ``server__tool``. Neither the name of a server nor that of a Python function
contains it, so the first one in a name is the separator."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of one call."""

    status: ToolStatus
    """``ok``, ``error`` or ``timeout``. Only the runner of the turn uses the other values."""
    text: str
    """For the model: the result, or what failed and what the model can do about it."""


def mcp_tool_name(server: str, own_name: str) -> str:
    """Return the name under which models call a server's tool: 64 letters, digits, ``_`` and ``-`` at most.

    A name that is too long or has other characters is changed, and ends in a hash of the server's own name, so that it
    does not depend on which other tools the server has.
    """
    # The maximum length that all model servers accept.
    prefix, limit = f"{server}{SEPARATOR}", 64
    cleaned = re.sub(r"[^A-Za-z0-9_-]", "_", own_name)
    if cleaned != own_name or len(prefix) + len(own_name) > limit:
        digest = hashlib.sha256(own_name.encode("utf-8", "replace")).hexdigest()[:6]
        cleaned = f"{cleaned[: limit - len(prefix) - 7]}_{digest}"
    return f"{prefix}{cleaned}"
