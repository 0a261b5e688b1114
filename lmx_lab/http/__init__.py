"""Serve ASGI applications: what the inference server and the daemon have in common."""
