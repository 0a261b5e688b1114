"""The routes of OpenAI's Responses format."""

from lmx_lab.server.responses.routes import responses_routes

__all__ = ["responses_routes"]
