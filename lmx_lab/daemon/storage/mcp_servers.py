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


def save(tx: Transaction, config: McpServerConfig | None, status: McpStatus) -> None:
    """Add a server or replace its configuration; None removes it."""
    if config is None:
        tx.execute("DELETE FROM mcp_servers WHERE name = ?", status.name)
    else:
        tx.execute(
            "INSERT INTO mcp_servers (name, config, created_at) VALUES (?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET config = excluded.config",
            *(config.name, config.model_dump_json(), tx.now),
        )
    tx.append("mcp.status", status)
