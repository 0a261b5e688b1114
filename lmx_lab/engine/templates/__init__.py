"""Render chat templates in a sandboxed process."""
