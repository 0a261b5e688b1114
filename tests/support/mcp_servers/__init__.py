"""MCP servers that run as programs."""
