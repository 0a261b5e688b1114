"""The tools that turns can call: Python functions, and tools of MCP servers under the same interface."""
