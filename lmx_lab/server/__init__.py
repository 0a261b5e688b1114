"""The HTTP and WebSocket interface of the engine."""

from lmx_lab.server.app import InferenceServer, create_server

__all__ = ["InferenceServer", "create_server"]
