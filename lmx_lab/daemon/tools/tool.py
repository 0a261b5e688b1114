"""A tool, the result of a call, and the names of MCP tools."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lmx_lab.wire.mcp import Permission
from lmx_lab.wire.sessions import ToolStatus

NAME_CHARACTERS = 64
"""Maximum length of a tool's name that all model servers accept."""
SEPARATOR = "__"
"""Separates the server from the tool in ``server__tool``. Neither the name of a server nor that of a Python function
contains it, so the first one in a name is the separator."""
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, kw_only=True)
class DaemonTool:
    """A tool: its description for the model, and whether a call needs a permission."""

    name: str
    """Up to 64 letters, digits, ``_`` and ``-``. The name of an MCP tool is ``server__tool``."""
    description: str
    parameters: dict[str, Any] = field(repr=False)
    """JSON schema of the arguments, which are one object."""
    read_only: bool = False
    """Whether the tool declares that it changes nothing."""
    permission: Permission = "ask"

    @property
    def needs_permission(self) -> bool:
        """Whether a client has to allow each call."""
        return self.permission == "ask" and not self.read_only


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """The result of one call."""

    status: ToolStatus
    """``ok``, ``error`` or ``timeout``. Only the runner of the turn uses the other values."""
    text: str
    """For the model: the result, or what failed and what the model can do about it."""


def mcp_tool_names(server: str, own_names: Iterable[str]) -> dict[str, str]:
    """Map the names under which models call a server's tools to the server's own names, in order.

    A name that is too long or has other characters is changed, and ends in a hash of the server's own name, so that it
    does not depend on which other tools the server has.
    """
    names: dict[str, str] = {}
    for own_name in own_names:
        prefix, cleaned = f"{server}{SEPARATOR}", _INVALID_CHARACTER.sub("_", own_name)
        if cleaned != own_name or len(prefix) + len(own_name) > NAME_CHARACTERS:
            digest = hashlib.sha256(own_name.encode("utf-8", "replace")).hexdigest()[:6]
            cleaned = f"{cleaned[: NAME_CHARACTERS - len(prefix) - 7]}_{digest}"
        names.setdefault(f"{prefix}{cleaned}", own_name)
    return names
