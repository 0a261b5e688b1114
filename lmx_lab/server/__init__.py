"""Serve the models of an engine over HTTP and WebSockets."""

from lmx_lab.server.app import InferenceServer, create_server

__all__ = ["InferenceServer", "create_server"]
