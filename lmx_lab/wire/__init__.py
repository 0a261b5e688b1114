"""Pydantic models of everything that crosses a process boundary: bodies of requests and responses, events and files."""
