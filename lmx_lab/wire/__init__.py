"""Pydantic shapes of everything that crosses a process boundary; no behaviour."""
