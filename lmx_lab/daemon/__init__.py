"""The daemon: a server for sessions, turns with tools, MCP servers and a persistent event log."""
