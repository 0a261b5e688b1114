"""Read and write the configurations of MCP servers in the database. Every change appends its event."""

from __future__ import annotations

import contextlib

from pydantic import ValidationError

from lmx_lab.daemon.storage.store import DatabaseView, Transaction
from lmx_lab.wire.events import McpStatus
from lmx_lab.wire.mcp import McpServerConfig


def read_all(view: DatabaseView) -> list[McpServerConfig]:
    """Return all configurations, sorted by name."""
    configs = []
    for row in view.fetch_all("SELECT config FROM mcp_servers ORDER BY name"):
        # A row that is not valid is ignored, since a newer version may have written it.
        with contextlib.suppress(ValidationError):
            configs.append(McpServerConfig.model_validate_json(row["config"]))
    return configs


def add(tx: Transaction, config: McpServerConfig, status: McpStatus) -> None:
    """Add a server."""
    row = (config.name, config.model_dump_json(), tx.now)
    tx.execute("INSERT INTO mcp_servers (name, config, created_at) VALUES (?, ?, ?)", *row)
    append_status(tx, status)


def change(tx: Transaction, config: McpServerConfig, status: McpStatus) -> None:
    """Replace the configuration of a server."""
    tx.execute("UPDATE mcp_servers SET config = ? WHERE name = ?", config.model_dump_json(), config.name)
    append_status(tx, status)


def remove(tx: Transaction, status: McpStatus) -> None:
    """Remove a server."""
    tx.execute("DELETE FROM mcp_servers WHERE name = ?", status.name)
    append_status(tx, status)


def append_status(tx: Transaction, status: McpStatus) -> None:
    """Append the event of a new status."""
    tx.append("mcp.status", status)
