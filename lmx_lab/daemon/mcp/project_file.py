"""Reads ``.mcp.json``, the file in which projects say which MCP servers they use.

It only reads: whoever shows the result decides, by somebody's yes, whether any of it is started.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.mcp import McpServerConfig

FILE_BYTES = 2**20
SERVERS = 64
_TYPES: dict[str, Literal["stdio", "http"]] = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamableHttp": "http",
    "streamable_http": "http",
}
_VARIABLE = re.compile(r"\$\{[^}\"]*\}")
_FIELDS = {"command", "args", "env", "cwd", "url", "headers"}
_IGNORED = {"type", "transport", "disabled", "timeout", "alwaysAllow", "autoApprove", "description", "$schema"}
"""What other programs write beside them."""


def read_mcp_file(path: Path) -> list[McpServerConfig]:
    """The servers of a ``.mcp.json``, as proposals; their ``cwd`` is by default the file's folder.

    Raises:
        InvalidRequestError: it is not there or cannot be understood; names the server and the field.
    """
    servers = _servers(path)
    return [_proposal(path, name, entry) for name, entry in servers.items()]


def _servers(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as exc:
        raise InvalidRequestError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if len(data) > FILE_BYTES:
        raise InvalidRequestError(f"{path} has more than {FILE_BYTES:,} bytes, so it is no list of MCP servers")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"{path} is no JSON: {exc}") from exc
    servers = content.get("mcpServers", content.get("servers")) if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise InvalidRequestError(f'{path} has no object "mcpServers" of servers by their names')
    if len(servers) > SERVERS:
        raise InvalidRequestError(f"{path} has {len(servers)} servers, the limit is {SERVERS}")
    return servers


def _proposal(path: Path, name: str, entry: Any) -> McpServerConfig:
    where = f"{path}, server {name!r:.80}"
    if not isinstance(entry, dict):
        raise InvalidRequestError(f'{where}: has to be an object with "command" or "url"')
    if unknown := sorted(set(entry) - _FIELDS - _IGNORED):
        raise InvalidRequestError(f"{where}: unknown field {unknown[0]!r:.80}; there are {', '.join(sorted(_FIELDS))}")
    kind = entry.get("type", entry.get("transport", "http" if "url" in entry else "stdio"))
    if not isinstance(kind, str) or kind not in _TYPES:
        raise InvalidRequestError(
            f"{where}: type is {kind!r:.80}; there are stdio and http (older SSE servers are not)"
        )
    if variable := _VARIABLE.search(json.dumps(entry)):
        # Filling it in would hand a value of this machine to whoever wrote the file.
        raise InvalidRequestError(f"{where}: {variable[0]:.80} is not filled in here; write its value in its place")
    given = {field: entry[field] for field in _FIELDS & set(entry)}
    if _TYPES[kind] == "stdio":
        folder = given.get("cwd", ".")
        given["cwd"] = str(path.parent.absolute() / folder) if isinstance(folder, str) else folder
    try:
        return McpServerConfig(
            name=_server_name(name), transport=_TYPES[kind], enabled=not entry.get("disabled", False), **given
        )
    except (ValidationError, TypeError) as exc:
        raise InvalidRequestError(f"{where}: {_in_words(exc)}") from None


def _server_name(name: str) -> str:
    """The name in the characters that the daemon takes: projects use blanks and dots."""
    return re.sub(r"[-_]{2,}", "-", re.sub(r"[^A-Za-z0-9_-]", "-", name)).strip("-_")[:32].rstrip("-_")


def _in_words(exc: Exception) -> str:
    if not isinstance(exc, ValidationError):
        return str(exc)
    # Without the input, which may be a secret.
    error = exc.errors(include_input=False, include_url=False)[0]
    field = ".".join(map(str, error["loc"]))
    text = error["msg"].removeprefix("Value error, ")
    return f"{field}: {text}" if field else text
