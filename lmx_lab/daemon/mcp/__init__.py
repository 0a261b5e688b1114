"""MCP servers: configured, started, watched, called, and ended with all that they have started."""
