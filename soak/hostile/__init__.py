"""Attack a server as one client, and measure health requests and the chats of another client meanwhile."""

from soak.hostile.beside import run

__all__ = ["run"]
