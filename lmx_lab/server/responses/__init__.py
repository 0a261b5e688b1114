"""The routes of OpenAI's Responses format."""

from lmx_lab.server.responses.socket import responses_routes

__all__ = ["responses_routes"]
