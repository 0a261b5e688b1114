"""Configure, start, supervise, call and stop MCP servers."""
