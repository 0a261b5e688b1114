"""Read ``.mcp.json``, the file that lists the MCP servers of a project.

Nothing is started here: the caller shows the servers to the user, who has to confirm them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from lmx_lab.daemon.mcp.config import describe_error
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.mcp import McpServerConfig

FILE_BYTES = 2**20
SERVERS = 64
_TRANSPORTS: dict[str, Literal["stdio", "http"]] = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamableHttp": "http",
    "streamable_http": "http",
}
_VARIABLE = re.compile(r"\$\{[^}\"]*\}")
_FIELDS = {"command", "args", "env", "cwd", "url", "headers"}
_OTHER_FIELDS = {"type", "transport", "disabled", "timeout", "alwaysAllow", "autoApprove", "description", "$schema"}
"""Fields that other programs use. They are accepted; all but ``type``, ``transport`` and ``disabled`` are ignored."""


def read_mcp_file(path: Path) -> list[McpServerConfig]:
    """Return the servers that a ``.mcp.json`` lists. Their ``cwd`` is the folder of the file by default.

    Raises:
        InvalidRequestError: The file cannot be read or is invalid. The message names the server and the field.
    """
    servers = _read_servers(path)
    return [_server_config(path, name, entry) for name, entry in servers.items()]


def _read_servers(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as exc:
        raise InvalidRequestError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if len(data) > FILE_BYTES:
        raise InvalidRequestError(f"{path} has more than {FILE_BYTES:,} bytes, so it is not a list of MCP servers")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequestError(f"{path} is not valid JSON: {exc}") from exc
    servers = content.get("mcpServers", content.get("servers")) if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise InvalidRequestError(f'{path} has no object "mcpServers" with servers by name')
    if len(servers) > SERVERS:
        raise InvalidRequestError(f"{path} has {len(servers)} servers, the limit is {SERVERS}")
    return servers


def _server_config(path: Path, name: str, entry: Any) -> McpServerConfig:
    where = f"{path}, server {name!r:.80}"
    if not isinstance(entry, dict):
        raise InvalidRequestError(f'{where}: must be an object with "command" or "url"')
    if unknown := sorted(set(entry) - _FIELDS - _OTHER_FIELDS):
        raise InvalidRequestError(
            f"{where}: unknown field {unknown[0]!r:.80}; the fields are {', '.join(sorted(_FIELDS))}"
        )
    transport = entry.get("type", entry.get("transport", "http" if "url" in entry else "stdio"))
    if not isinstance(transport, str) or transport not in _TRANSPORTS:
        raise InvalidRequestError(f"{where}: type is {transport!r:.80}; use stdio or http (SSE is not supported)")
    if variable := _VARIABLE.search(json.dumps(entry)):
        # Substituting it would give a value from this computer to the author of the file.
        raise InvalidRequestError(f"{where}: the variable {variable[0]:.80} is not substituted; write the value itself")
    fields = {field: entry[field] for field in _FIELDS & set(entry)}
    if _TRANSPORTS[transport] == "stdio":
        folder = fields.get("cwd", ".")
        fields["cwd"] = str(path.parent.absolute() / folder) if isinstance(folder, str) else folder
    try:
        return McpServerConfig(
            name=_server_name(name),
            transport=_TRANSPORTS[transport],
            enabled=not entry.get("disabled", False),
            **fields,
        )
    except ValidationError as exc:
        raise InvalidRequestError(f"{where}: {describe_error(exc)}") from None
    except TypeError as exc:
        raise InvalidRequestError(f"{where}: {exc}") from None


def _server_name(name: str) -> str:
    """Convert a name to the characters that the daemon accepts, since projects also use spaces and dots."""
    return re.sub(r"[-_]{2,}", "-", re.sub(r"[^A-Za-z0-9_-]", "-", name)).strip("-_")[:32].rstrip("-_")
